"""What a row of `heatproof bench` means, and that other libraries' contenders are called as those want it."""

from __future__ import annotations

import csv
import re
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from conftest import small_cnn
from heatproof import __version__
from heatproof.bench import explain as section
from heatproof.bench import faithfulness, maps, runner
from heatproof.bench.common import Row, cost, side_by_side, speed
from heatproof.cli import main
from heatproof.cli.bench import machine, within
from heatproof.models.model import Model


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
    assert calls == ["slow", "fast"] + ["slow", "fast"] * 3
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
    rows = maps.rows(quick=True)
    check_meaning(rows)
    ssim = rows[0]
    error = re.search(r"float64 result (\S+)$", ssim.note)
    assert ssim.what.startswith("SSIM") and error and float(error[1]) < 1e-5
    assert [row.what.split()[0].rstrip(",") for row in rows[1:]] == ["structure"] * 3 + ["localise"] * 3


def test_adaptive_steps_are_judged_by_the_passes_they_save(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(small_cnn().eval(), "small")
    monkeypatch.setattr(faithfulness, "SIZE", (32, 32))
    (row,) = faithfulness._adaptive(model, 1, "cpu")
    passes = re.match(r"passes (\d+) of (\d+);", row.note)
    assert passes and row.ratio == int(passes[1]) / int(passes[2])
    check_meaning(faithfulness._beside_bare(model, 1, 1, "cpu"))


def test_a_quick_run_is_too_short_to_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "side_by_side", lambda contenders, *_: dict.fromkeys(contenders, 1.0))
    monkeypatch.setattr(runner, "_write", write_little)
    (quick,), (full,) = runner.rows(quick=True), runner.rows()
    assert quick.limit == "" and "--quick" in quick.note
    assert full.limit == "<= 1.15" and full.note == ""


def write_little(folder: Path, network: str, count: int, device: str, write: object = runner._write) -> None:
    assert callable(write)
    write(folder, network, 2, device)


def test_rows_go_to_a_file_with_their_machine(tmp_path: Path) -> None:
    table = tmp_path / "new" / "speed.csv"
    command = ["bench", "--quick", "-s", "maps", "--csv"]
    result = CliRunner().invoke(main, [*command, str(table)])
    assert result.exit_code == 0, result.output
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert any(row["what"].startswith("SSIM") and float(row["ratio"]) > 0 for row in rows)
    assert {row["section"] for row in rows} == {"maps"}
    assert {row["machine"] for row in rows} == {machine("cpu")}
    assert {row["heatproof"] for row in rows} == {__version__}

    refused = CliRunner().invoke(main, [*command, str(tmp_path)])
    assert refused.exit_code == 2 and "cannot write" in refused.output
