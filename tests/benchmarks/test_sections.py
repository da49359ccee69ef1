"""`python -m benchmarks` as a command: its sections, its options, and the file that its rows go to."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks import __main__ as command
from benchmarks import audit, explain, packages, startup, steady
from benchmarks.__main__ import bench_command, machine
from benchmarks.common import Part, Row
from benchmarks.sections import SECTIONS, BenchOptions, BenchSection
from heatproof import __version__
from heatproof.errors import MissingExtraError
from heatproof.train.networks import small_net

FAKE = "benchmarks.fake"


def bench(*words: str) -> Result:
    return CliRunner().invoke(bench_command, words)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A section that measures at once: a part for each network, whose time is the number of pictures."""

    def parts(options: BenchOptions) -> Iterator[Part]:
        for name in options.network:
            if name == "stop":
                raise KeyboardInterrupt
            taken = float(options.pictures or 1)
            rows = [Row(f"{name}, {options.pictures} pictures", taken, "bare", 1.0, -taken)]
            yield Part(name, lambda rows=rows: rows, options.device)  # type: ignore[misc]

    module = ModuleType(FAKE)
    module.parts = parts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, FAKE, module)
    monkeypatch.setattr(
        command, "SECTIONS", SECTIONS | {"fake": BenchSection("a test", "", "", ("network", "pictures"))}
    )
    return lambda *words: bench("--section", "fake", *words)


def test_every_section_has_a_file_and_the_help_says_what_it_costs() -> None:
    output = bench("--help").output
    for name, section in SECTIONS.items():
        assert callable(importlib.import_module(f"benchmarks.{name}").parts)
        assert re.search(rf"^ +{name} +{re.escape(section.what)}$", output, re.MULTILINE)
    assert command.chosen([]) == [name for name in SECTIONS if name not in ("passes", "budgets", "precision")]


def test_a_file_keeps_its_rows_but_for_parts_that_are_measured_again(
    fake: Callable[..., Result], tmp_path: Path
) -> None:
    table = tmp_path / "new" / "speed.csv"
    for words in (["--network", "a,b", "--pictures", "2"], ["--network", "c"], ["--network", "a"]):
        result = fake(*words, "--csv", str(table))
        assert result.exit_code == 0, result.output
    rows = rows_of(table)
    assert [row["part"] for row in rows] == ["a", "b", "c"]
    assert [row["what"] for row in rows] == ["a, None pictures", "b, 2 pictures", "c, None pictures"]
    assert [row["ratio"] for row in rows] == ["-1.0", "-2.0", "-1.0"]
    assert rows[1]["command"] == "python -m benchmarks --section fake --network a,b --pictures 2"
    assert {row["machine"] for row in rows} == {machine("cpu")}
    assert {(row["section"], row["device"], row["heatproof"]) for row in rows} == {
        ("fake", "cpu", __version__)
    }
    fake("--network", "a", "--quick", "--csv", str(table))
    assert [(row["part"], row["quick"]) for row in rows_of(table)][-1] == ("a", "True")
    assert len(rows_of(table)) == 4, "a rougher number does not replace a better one"
    fake("--network", "a", "--pictures", "9", "--csv", str(table))
    assert [row["what"][0] for row in rows_of(table)] == ["a", "b", "c"], "a better one replaces both"
    assert rows_of(table)[0]["what"] == "a, 9 pictures"


def test_what_was_measured_before_a_stop_is_kept_and_shown(
    fake: Callable[..., Result], tmp_path: Path
) -> None:
    result = fake("--network", "a,b,stop,c", "--csv", str(tmp_path / "speed.csv"))
    assert result.exit_code == 130 and "a, None pictures" in result.output
    assert [row["part"] for row in rows_of(tmp_path / "speed.csv")] == ["a", "b"]


def test_what_cannot_be_is_reported_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("name,value\na,1\n")
    expected = {
        ("-s", "maps", "--csv", str(tmp_path)): "cannot write",
        ("-s", "maps", "--csv", str(tmp_path / "other.csv")): "no table of python -m benchmarks",
        (
            "-s",
            "maps",
            "--network",
            "resnet50",
        ): "--network is for audit, passes, budgets; add",
        ("-s", "audit", "--precision", "fp16"): "did you mean 'bf16'",
        ("-s", "passes", "-s", "maps", "--csv", str(tmp_path / "x")): "one --section at a time",
        ("-s", "precision"): "--data",
        ("-s", "audit", "--network", "resnet5"): "did you mean 'resnet50'",
    }
    for words, sentence in expected.items():
        result = bench(*words)
        assert result.exit_code == 2 and sentence in " ".join(result.output.split()), result.output


def test_an_audit_has_a_part_for_each_network_and_precision() -> None:
    options = BenchOptions(device="cuda", network=("resnet50", "vgg11"), pictures=10)
    assert [part.name for part in audit.parts(options)] == ["resnet50, bf16", "resnet50, fp32", "vgg11, fp32"]
    both = BenchOptions(network=("resnet18",), precision=("bf16", "fp32"))
    assert [part.name for part in audit.parts(both)] == ["resnet18, bf16", "resnet18, fp32"]


def test_packages_are_measured_part_by_part_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "side_by_side", lambda *_, **__: {"ours": 2.0, "theirs": 10.0})
    monkeypatch.setattr(packages, "find_spec", lambda name: name != "lime")
    *parts, last = [part.measure()[0] for part in packages.parts(BenchOptions(quick=True))]
    assert len(parts) == 7 and {row.ratio for row in (*parts, last)} == {5.0}
    assert isinstance(last, Row) and last.other == "grad-cam, captum, Quantus"
    assert last.ours_ms == 6 * 2.0, "torchcam's are among grad-cam's"


def test_on_a_gpu_a_part_for_each_network_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "network", lambda name, device: small_net())
    names = [part.name for part in explain.parts(BenchOptions(device="cuda"))]
    each = [f"per image, {net}, {p}" for net in ("resnet50", "convnext_base") for p in ("fp32", "bf16")]
    assert names == ["seven CAMs", "methods of many passes", *each]


def test_rows_and_memory_stay_as_they_are() -> None:
    rows = next(steady.parts(BenchOptions(quick=True))).measure()[0]
    assert isinstance(rows, Row) and rows.ratio <= 1e-5 and int(re.findall(r"(\d+) rows", rows.note)[0]) > 20
    (memory,) = steady.flat_memory(small_net(), 20, 1, "cpu")
    assert memory.other_ms > 50 and 0.5 < memory.ratio < 1.5


def test_memory_that_grows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    leak: list[object] = []
    monkeypatch.setattr(
        steady, "explain", lambda model, images, methods: leak.append(bytearray(b"1") * (16 << 20))
    )
    monkeypatch.setattr(steady, "insertion_deletion", lambda *_, **__: None)
    (memory,) = steady.flat_memory(small_net(), 20, 1, "cpu")
    assert memory.ours_ms > memory.other_ms + 50


def test_a_command_is_timed_in_a_process_of_its_own(tmp_path: Path) -> None:
    (row,) = startup.best("nap", ["-c", "import time; time.sleep(0.2)"], 1, tmp_path, "<= 0.4")
    assert row.ours_ms >= 200 and row.other_ms < row.ours_ms and row.ratio == row.ours_ms / 1e3
    assert row.note.endswith("without torch")


def test_bench_prints_rows_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, absent = ModuleType("benchmarks.measured"), ModuleType("benchmarks.absent")

    def parts(options: BenchOptions) -> Iterator[Part]:
        assert options.quick and options.device == "cpu"
        yield Part("one", lambda: [Row("fine", 1.0, "bare", 1.0, 1.0, "<= 1.25")])
        yield Part("two", lambda: [Row("slow", 9.0, "bare", 1.0, 9.0, "<= 1.25")])

    def missing(options: BenchOptions) -> Iterator[Part]:
        raise MissingExtraError("captum is not installed; run: pip install 'heatproof[references]'")

    measured.parts, absent.parts = parts, missing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, measured.__name__, measured)
    monkeypatch.setitem(sys.modules, absent.__name__, absent)
    sections = dict.fromkeys(("measured", "absent"), BenchSection("a test", "", ""))
    monkeypatch.setattr(command, "SECTIONS", sections)
    result = bench("--quick")
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert lines["fine"][-1] == "ok" and lines["slow"][-1] == "over"
    began = re.findall(r"^ +[\d.]+ s  (.+)$", result.stdout, re.MULTILINE)
    assert began == ["measured: one", "measured: two"]
    assert "pip install 'heatproof[references]'" in result.stderr and "threads" in result.stdout
    assert bench("-s", "nothing").exit_code == 2
