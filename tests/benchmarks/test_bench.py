"""What a row of the benchmarks means, and that other libraries' contenders are called as those want it."""

from __future__ import annotations

import re
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torchvision.models import resnet18

from benchmarks import audit, calls, faithfulness, maps, packages, runner
from benchmarks import explain as section
from benchmarks.__main__ import within
from benchmarks.common import Row, cost, side_by_side, speed
from conftest import small_cnn
from heatproof.images import open_source
from heatproof.metrics.agreement import method_agreement
from heatproof.models import load_model
from heatproof.models.accel import keep_freed_memory
from heatproof.models.model import Model
from heatproof.run.engine import run_study


@pytest.mark.parametrize("name", ["ig", "lime"])
def test_reference_contenders_run(name: str) -> None:
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    contenders = section._reference_perturbations(Model(small_cnn().eval()), image, batch=4, samples=8)
    assert contenders[name]() is not None


def test_contenders_take_turns_and_their_medians_are_milliseconds() -> None:
    calls: list[str] = []
    naps = iter((0.0, 0.005, 0.3, 0.005))  # the warm-up, then three turns, of which one was disturbed

    def slow() -> None:
        calls.append("slow")
        time.sleep(next(naps))

    ms = side_by_side({"slow": slow, "fast": lambda: calls.append("fast")}, repeat=3)
    assert calls == ["slow", "fast", *("slow", "fast"), *("fast", "slow"), *("slow", "fast")]
    assert 5 <= ms["slow"] < 250  # the median: neither the mean nor the longest
    assert ms["fast"] < ms["slow"]


def test_a_cost_is_our_share_of_the_others_time_and_a_speed_how_much_faster_we_are() -> None:
    ours, other = cost("a", 3.0, "b", 2.0, "<= 1.25"), speed("a", 2.0, "b", 40.0, ">= 20", "times faster")
    assert (ours.ratio, other.ratio) == (1.5, 20.0)
    assert within(ours.ratio, ours.limit) is False and within(other.ratio, other.limit) is True


def check_meaning(rows: list[Row]) -> None:
    """Times were taken; the ratio is of the two times, in the direction that the words and the limit say."""
    for row in rows:
        assert row.ours_ms > 0 and row.other_ms > 0, row
        faster = "as fast as" in row.what or "faster" in row.note
        assert row.ratio == (row.other_ms / row.ours_ms if faster else row.ours_ms / row.other_ms), row
        assert row.limit == "" or row.limit.startswith(">=" if faster else "<="), row
        assert isinstance(within(row.ratio, row.limit), bool) is bool(row.limit), row


def test_rows_of_maps_compare_the_times_they_name() -> None:
    (ssim, *rows) = [*maps._ssim_rows(32), *maps._growth_rows(16, repeat=3)]
    check_meaning([ssim, *rows])
    error = re.search(r"float64 result (\S+)$", ssim.note)
    assert ssim.what.startswith("SSIM") and error and float(error[1]) < 1e-5
    assert [row.what.split()[0].rstrip(",") for row in rows] == ["structure"] * 3 + ["localise"] * 3


def test_adaptive_steps_are_judged_by_the_passes_they_save(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(small_cnn().eval(), "small")
    monkeypatch.setattr(faithfulness, "SIZE", (32, 32))
    (row,) = faithfulness._adaptive(model, 1, "cpu")
    passes = re.match(r"passes (\d+) of (\d+);", row.note)
    assert passes and row.ratio == int(passes[1]) / int(passes[2])
    check_meaning(faithfulness._beside_bare(model, 1, 1, "cpu"))


def test_a_run_is_judged_by_its_further_pictures_whatever_opening_it_takes() -> None:
    """10 ms a picture, 12 in a run, and 500 ms to open one, however short the run is."""
    for n in (8, 800):
        ms = {"loop": 10.0 * n, "n": 500 + 12.0 * n, "2n": 500 + 24.0 * n}
        further, opening = runner.judged("a run", n, ms)
        assert further.ratio == pytest.approx(1.2) and within(further.ratio, further.limit) is False
        assert opening.ours_ms == pytest.approx(500) and opening.limit == ""


def test_a_run_and_a_loop_of_the_same_pictures(tmp_path: Path) -> None:
    runner.write(tmp_path, "squeezenet1_1", 1, "cpu")
    model = load_model("torchvision:squeezenet1_1", tmp_path / "weights.pt", num_classes=2)
    runner.loop(model, open_source("folder", tmp_path / "pictures"), 1)
    for name, images in (("n", 1), ("2n", 2)):
        assert run_study(tmp_path / f"{name}.toml", tmp_path / name).computed == images


def test_the_standard_audit_has_twelve_methods_and_every_metric_without_annotation() -> None:
    assert len(audit.FULL) == len(audit.SMALL) == 12
    full, small = audit.standard_metrics(False), audit.standard_metrics(True)
    assert {"insertion", "randomisation", "specificity", "cscore", "method_agreement", "accuracy"} <= set(
        full
    )
    assert not {"box_iou", "fmr", "cose", "pointing", *audit.OWN_INPUTS} & set(full)
    assert [text.partition("(")[0] for text in small] == full
    assert {name for name in audit.FEWER if name not in full} == set()


def test_an_audit_is_its_wall_time_over_the_passes_that_it_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "SMALL", ["gradcam", "gradient", "random"])
    monkeypatch.setattr(audit, "standard_metrics", lambda small: ["insertion(steps=2)", "accuracy"])
    bare = (audit.Bare(2.0, 3.0), audit.Bare(4.0, 6.0))
    monkeypatch.setattr(audit, "_bare", lambda model, device: bare)
    whole, cpu, *shares = audit.audit("squeezenet1_1", "fp32", audit.Extent(2, 2, True), "cpu")
    forward, backward = (int(n) for n in re.findall(r"(\d+) (?:bare forward|backward)", whole.other))
    # The shared pass, two end points of a picture, one step of both curves of maps that are not blank.
    assert backward == 2 and 2 + 4 + 4 <= forward <= 3 + 4 + 12
    assert whole.other_ms == 2.0 * forward + 3.0 * backward and whole.ratio == whole.ours_ms / whole.other_ms
    assert cpu.other_ms == 2 * whole.other_ms and cpu.what.endswith("CPU time")
    assert sum(row.ratio for row in shares) == pytest.approx(1, abs=0.1)
    assert 0 < shares[0].ratio < 1


def test_other_packages_that_are_here_do_the_same_parts() -> None:
    """Each once, as small as it gets; Quantus and torchcam where they are installed."""
    amount = packages.Amount(images=1, samples=4, path=2, steps=4, draws=1)
    work = packages._Work(Model(resnet18().eval(), "resnet18"), "cpu", amount)
    here = [part for part in work.parts() if find_spec(part.module)]
    assert {"pytorch_grad_cam", "captum", "lime", "skimage"} <= {part.module for part in here}
    for part in here:
        assert part.theirs() is not None, part.what
    absent = packages.missing()
    assert bool(absent) is not (find_spec("quantus") is not None and find_spec("torchcam") is not None)
    assert not absent or "pip install --no-deps" in absent


def test_kept_memory_is_measured_in_new_processes() -> None:
    """It cannot be undone, and earlier allocations hide its effect."""
    before = keep_freed_memory.cache_info()
    (row,) = calls.kept_memory(["squeezenet1_1"], 1)
    assert row.ratio == row.ours_ms / row.other_ms > 0 and "squeezenet1_1" in row.what
    assert keep_freed_memory.cache_info() == before


def test_our_agreement_is_that_of_the_usual_loop() -> None:
    work = packages._Work(Model(resnet18().eval(), "resnet18"), "cpu", packages.Amount(images=1))
    theirs, ours = work._pairs(), method_agreement(work.maps)
    for (a, b), [(ranks, alike)] in theirs.items():
        assert ours.spearman[a, b] == pytest.approx(ranks, abs=1e-5)
        assert ours.ssim[a, b] == pytest.approx(alike, abs=1e-4)
