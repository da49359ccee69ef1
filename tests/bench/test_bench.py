"""The other libraries' contenders in `heatproof bench` are called the way those libraries want it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from conftest import small_cnn
from heatproof import __version__
from heatproof.bench import explain as section
from heatproof.cli import main
from heatproof.cli.bench import machine
from heatproof.models.model import Model


@pytest.mark.parametrize("name", ["ig", "lime"])
def test_reference_contenders_run(name: str) -> None:
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    contenders = section._reference_perturbations(Model(small_cnn().eval()), image, batch=4, samples=8)
    assert contenders[name]() is not None


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
