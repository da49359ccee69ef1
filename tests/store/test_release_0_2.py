"""A run folder that heatproof 0.2 wrote opens, verifies and resumes."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from heatproof.cli import main
from heatproof.run.engine import run_study
from heatproof.store import RunFolder

ARCHIVE = Path(__file__).parents[1] / "data" / "run-0.2.zip"  # tiny_study: 6 images, 2 checkpoints, 2 methods


@pytest.fixture
def study(tmp_path: Path) -> Path:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "study.toml"


def heatproof(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_it_is_complete_and_every_command_reads_it(study: Path) -> None:
    run = study.parent / "run"
    verify = heatproof("verify", run)
    assert verify.exit_code == 0 and "complete: 8 of 8 units" in verify.output
    for words in (("verdict", run), ("report", run), ("sql", run, "from scores limit 1"), ("verify", run)):
        assert heatproof(*words).exit_code == 0, words


def test_it_resumes_with_the_same_rows(study: Path) -> None:
    run = study.parent / "run"
    query = "select image, method, metric, value from scores order by all"
    before = RunFolder.open(run).scores().sql(query)
    next(iter(sorted((run / "seals").iterdir()))).unlink()
    result = run_study(study, run)
    assert 0 < result.computed < result.units
    assert RunFolder.open(run).manifest.facts.metrics  # which 0.2 did not record
    assert heatproof("verdict", run).exit_code == heatproof("verify", run).exit_code == 0
    after = RunFolder.open(run).scores().sql(query)
    assert [(r["image"], r["metric"]) for r in after] == [(r["image"], r["metric"]) for r in before]
    values = [[row["value"] for row in rows] for rows in (before, after)]
    assert values[1] == pytest.approx(values[0], abs=2e-3, nan_ok=True)
