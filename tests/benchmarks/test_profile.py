"""python -m benchmarks.profile: what it writes adds up, names every stage, and changes no row."""

from __future__ import annotations

import csv
import json
import time
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.profiler import ProfilerActivity, profile

from benchmarks import profile as section
from benchmarks.profile import BETWEEN, Profiler, profiling
from heatproof.run.engine import run_study
from heatproof.timeline import FRAME, NOTHING, Recording, Span, span
from tiny_study import fingerprint, make_study

METHODS = ["gradcam", "rise(masks=8)", "lime(samples=8, segment_count=6)"]
METRICS = ["insertion(steps=4)", "deletion(steps=4)", "randomisation(depths=2)", "cscore", "method_agreement"]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled")
    study = make_study(folder, images=6, methods=METHODS, metrics=METRICS, checkpoints=["epochs/epoch01.pt"])
    result = CliRunner().invoke(section.main, [str(study), "--out", str(folder / "run")])
    assert result.exit_code == 0, result.output
    (folder / "output.txt").write_text(result.output)
    return folder


def test_the_table_adds_up_to_the_wall_time_and_counts_every_input(profiled: Path) -> None:
    data = json.loads((profiled / "run/profile/profile.json").read_text())
    own = [stage for stage in data["stages"] if not stage["beside"]]
    assert sum(stage["seconds"] for stage in own) == pytest.approx(data["all"]["wall"], rel=0.01)
    for stage in own:
        parts = stage["device"] + stage["host"] + stage["waiting"]
        assert parts == pytest.approx(stage["seconds"], abs=1e-6) and stage["host"] > -1e-6, stage
    by_name = {(stage["stage"], stage["what"]): stage for stage in own}
    assert by_name["method", "rise(masks=8)"]["inputs"] == 6 * 8
    assert by_name["shared pass", ""]["inputs"] >= 6
    assert by_name["metric", "insertion_deletion"]["inputs"] >= 6 * 2
    assert by_name["waiting", "pictures"]["device"] == 0
    assert {stage["stage"] for stage in own} >= {"checking", "metric", "method", "group", BETWEEN}
    assert {stage["stage"] for stage in data["stages"] if stage["beside"]} >= {"decode", "rows", "writing"}


def test_the_files_and_what_is_printed_tell_the_same(profiled: Path) -> None:
    place, text = profiled / "run/profile", (profiled / "output.txt").read_text()
    data = json.loads((place / "profile.json").read_text())
    with (place / "profile.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["stage"] for row in rows] == [stage["stage"] for stage in data["stages"]]
    assert f"where {data['all']['wall']:.1f} s went, on cpu" in text
    assert f"{data['all']['inputs']:,}" in text and "beside: decode" in text
    assert "profile.trace.json" in text.replace("\n", "")


def test_the_timeline_is_what_trace_viewers_read(profiled: Path) -> None:
    events = json.loads((profiled / "run/profile/profile.trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all({"name", "pid", "tid", "ts", "dur", "cat"} <= event.keys() for event in spans)
    threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert "main" in threads.values() and {event["tid"] for event in spans} == set(threads)
    passes = [event for event in spans if event["name"] == "forward"]
    units = [event for event in spans if event["name"].startswith(FRAME)]
    assert len(units) == 2 and passes and all(event["args"]["inputs"] > 0 for event in passes)


def test_a_profiled_run_has_the_rows_of_another(profiled: Path) -> None:
    run_study(profiled / "study.toml", profiled / "plain")
    assert not (profiled / "plain/profile").exists() and span("x") is NOTHING
    assert fingerprint(profiled / "plain") == fingerprint(profiled / "run")


def test_on_a_gpu_the_device_has_a_clock_of_its_own() -> None:
    """No GPU is needed to add up: two units, passes that took the device 6 of 10 ns, kernels that overlap."""
    recorded = Recording("cuda")
    recorded.ended, main_thread = 100, recorded.main
    stage = ("metric", "a")
    recorded.spans = [
        Span("forward", "", main_thread, 0, 10, 4, stage, device_ns=6.0),
        Span("waiting", "device", main_thread, 10, 30, 0, stage),
        Span(*stage, main_thread, 0, 40, 0, stage),
        Span(FRAME, "u1", main_thread, 0, 40, 0, (FRAME, "u1")),
        Span(FRAME, "u2", main_thread, 40, 100, 0, (FRAME, "u2")),
    ]
    with profiling() as profiler:
        pass
    measured = Profiler(recorded, profiler._until_the_end)
    measured.kernels = [(0, 30), (50, 80), (60, 90), (95, 100)]
    timed = next(timed for timed in measured.summary().stages if timed.stage == "metric")
    ns = [round(value * 1e9) for value in (timed.seconds, timed.device, timed.host, timed.waiting)]
    assert ns == [40, 6, 20, 20] and (timed.passes, timed.inputs, round(timed.idle * 1e9)) == (1, 4, 10)
    assert measured.summary().busy == pytest.approx((40 + 5) / 60)  # from 40, after the first unit, to 100


class Warns(profile):
    """Torch's profiler of the CPU, which warns as that of a GPU does."""

    def __init__(self, activities: object) -> None:
        super().__init__(activities=[ProfilerActivity.CPU])

    def start(self) -> None:
        warnings.warn("Profiler won't be using warmup, this can skew profiler results", stacklevel=2)
        super().start()

    def stop(self) -> None:
        warnings.warn("Profiler clears events at the end of each cycle", stacklevel=2)
        super().stop()


def test_warnings_of_torch_s_profiler_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.profiler, "profile", Warns)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with section._kernels("cuda", [], 0), pytest.warns(UserWarning, match="of the run"):
        warnings.warn("of the run", UserWarning, stacklevel=1)


def test_torch_tells_when_a_kernel_ran() -> None:
    """What `_kernels` reads from torch's profiler, here of the CPU."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ones(3).sum()
    now = time.time_ns()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    assert any(event.duration_ns() > 0 for event in events)
    assert all(abs(now - event.start_ns()) < 60e9 for event in events), "not by the time of day"
    assert {event.device_type() for event in events} == {torch.autograd.DeviceType.CPU}
    with section._kernels("cpu", kernels := [], 0):
        pass
    assert kernels == []
