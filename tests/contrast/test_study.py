"""heatproof contrast: a page, numbers for programs, exit codes; stopped, it goes on."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from contrast.discs import folder, network
from heatproof.cli import main

pytestmark = pytest.mark.trains

NETWORK = """
import sys
sys.path.insert(0, {here!r})
from contrast.discs import network as make
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network with weights in a file, and pictures in folders."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK.format(here=str(Path(__file__).parent)))
    torch.save(network().module.state_dict(), "weights.pt")
    folder(Path("pictures"))
    return tmp_path


def contrast(*more: str) -> Result:
    options = [
        "--checkpoint",
        "weights.pt",
        "--token-size",
        "0.4",
        "--lr",
        "0.003",
        "--methods",
        "gradcam,edges",
    ]
    return CliRunner().invoke(main, ["contrast", "net.py:make", "pictures", *options, *more])


def test_the_command_writes_a_page_and_numbers_and_reads_only_the_rest(place: Path) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    result = contrast("--strength", "1,0.5", "--out", "out")
    assert result.exit_code == 0, result.output
    assert "100%: planted" in result.output and "gradcam" in result.output
    assert {path: path.read_bytes() for path in before} == before
    made = {path.relative_to(place).parts[0] for path in place.rglob("*")}
    assert made - {"__pycache__"} == {"net.py", "weights.pt", "pictures", "out"}
    outcome = json.loads(Path("out/contrast.json").read_text())
    assert (
        outcome["schema"] == 1
        and outcome["token"] == "tag"
        and [p["strength"] for p in outcome["points"]] == [1, 0.5]
    )
    first = outcome["points"][0]
    assert first["holds"] and first["planted"]["share"] >= 0.9 and first["clean"]["share"] <= 0.1
    assert first["methods"]["gradcam"]["auc"] > 0.9 and first["methods"]["gradcam"]["shows"]
    for floor in ("random", "edges", "centre"):
        assert first["methods"][floor]["auc"] == 0.5 and outcome["shown_from"][floor] is None
    assert first["methods"]["token removed"]["seen"] is None
    rows = list(csv.DictReader(Path("out/contrast.csv").read_text().splitlines()))
    assert {row["method"] for row in rows} == {"gradcam", "random", "edges", "centre", "token removed"}
    page = Path("out/page.html").read_text()
    assert page.count("data:image/png;base64,") == 4 and "gradcam shows the tag once it is in" in page
    assert "Scores by strength of the shortcut" in page and "<svg" in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)  # it loads nothing
    again = contrast("--strength", "1,0.5", "--out", "out")
    assert again.exit_code == 0 and "epoch" not in again.output
    assert Path("out/page.html").read_text() == page


def test_failed_planting_is_reported_and_no_method_is_judged(place: Path) -> None:
    result = contrast("--epochs", "1", "--lr", "1e-6", "--mean", "0,0,0", "--std", "1,1,1", "--out", "out")
    assert result.exit_code == 1 and "planting failed" in result.output
    assert "the network's input: " in result.output and "mean 0, 0, 0, std 1, 1, 1" in result.output
    assert "classes, in the order of its outputs: " in result.output
    assert json.loads(Path("out/contrast.json").read_text())["points"][0]["methods"] == {}
    assert "no method is judged" in Path("out/page.html").read_text()


def test_a_study_in_a_file(place: Path) -> None:
    Path("study.toml").write_text(
        'model = "net.py:make"\nimages = "pictures"\ntoken = "tag"\ntoken_size = 0.4\npositive = "green"\n'
        'methods = ["gradcam"]\nlr = 3e-3\nout = "out"\n'
    )
    result = CliRunner().invoke(main, ["study", "contrast", "study.toml"])
    assert result.exit_code == 0, result.output
    assert json.loads(Path("out/contrast.json").read_text())["positive"] == "green"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--token", "tga"], "did you mean 'tag'"),
        (["--strength", "much"], "strength is one share or several"),
        (["--strength", "2"], "strength is the share"),
        (["--token-size", "3"], "does not fit"),
        (["--positive", "red"], "unknown class 'red'"),
        (["--methods", "gradcat"], "did you mean 'gradcam'"),
        (["--limit", "30"], "at least 20 of each"),
        (["--class-names", "cat,dog"], "are not the 2 of"),
    ],
)
def test_bad_input_raises_a_clear_error_and_leaves_nothing(
    place: Path, more: list[str], sentence: str
) -> None:
    result = contrast("--out", "out", *more)
    assert result.exit_code == 2 and sentence in result.output, result.output
    assert not Path("out").exists()
