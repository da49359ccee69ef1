"""heatproof init: a commented study that heatproof run takes once the network is filled in."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from heatproof.cli import main
from heatproof.errors import HeatproofError
from heatproof.run.config import read_study
from heatproof.run.engine import prepare
from tiny_study import make_study


def heatproof(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_study(tmp_path, images=12)
    (tmp_path / "study.toml").unlink()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_accepted_after_the_marked_lines_are_filled_in(folder: Path) -> None:
    ran = heatproof("init", "pictures")
    assert ran.exit_code == 0 and "2 classes: cat (6), dog (6)" in ran.output, ran.output
    assert "the verdict needs 30 images" in ran.output and "fill in the lines marked <-" in ran.output
    text = (folder / "study.toml").read_text()
    marked = [line for line in text.splitlines() if "<-" in line]
    assert len(marked) == 2
    with pytest.raises(HeatproofError, match="cannot read the model 'MODEL'"):
        prepare("study.toml")
    text = text.replace('"MODEL"  # <- fill in', '"net.py:tiny"')
    text = text.replace('# checkpoints = "best.pt"  # <- fill in', 'checkpoints = "epochs/*.pt"')
    (folder / "study.toml").write_text(text)
    prepared = prepare("study.toml")
    assert list(prepared.manifest.models) == ["epoch01", "epoch02"]
    assert {"specificity", "cscore", "auc"} <= set(read_study("study.toml").metrics)


def test_boxes_in_a_list_ask_for_localisation(folder: Path) -> None:
    (folder / "list.csv").write_text(
        "path,label,x0,y0,x1,y1\npictures/cat/000.png,cat,2,2,9,9\npictures/cat/002.png,cat,1,1,5,5\n"
    )
    ran = heatproof(
        "init", "list.csv", "--model", "net.py:tiny", "--checkpoint", "epochs/epoch01.pt", "-o", "a.toml"
    )
    assert ran.exit_code == 0 and "truth: boxes" in ran.output
    study = read_study("a.toml")
    assert "localise" in study.metrics and "auc" not in study.metrics
    assert (study.images.kind, study.images.path, study.model.spec) == ("csv", "list.csv", "net.py:tiny")


def test_nothing_is_overwritten_and_mistakes_raise_a_clear_error(folder: Path) -> None:
    (folder / "study.toml").write_text("mine")
    (folder / "empty").mkdir()
    for words, sentence in (
        (["pictures"], "study.toml is there already"),
        (["empty", "-o", "new.toml"], "there is no image in empty"),
        (["pictures", "-o", "no/new.toml"], "there is no folder no"),
    ):
        ran = heatproof("init", *words)
        assert ran.exit_code == 2 and sentence in ran.output and len(ran.output.splitlines()) == 1, ran.output
    assert (folder / "study.toml").read_text() == "mine" and not (folder / "new.toml").exists()
