"""--head wherever a network is named; a study of one class per picture says so where the head has none."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import heatproof as hp
from heatproof.cli import main
from heatproof.contrast import make_pair
from heatproof.errors import InputError
from heatproof.run.config import read_study
from heatproof.studies.audit.settings import ScoreSettings
from tiny_study import make_study

COMMANDS = (
    "explain", "audit", "score", "init", "contrast",
    "study cscore", "study qr", "study cose", "study localise", "study contrast",
)  # fmt: skip
ONE_CLASS = "needs a network that names one class for each image, and the head here is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads")
    make_study(path, images=6)
    with (path / "net.py").open("a") as file:
        file.write("\n\ndef sized(num_classes=2):\n    return tiny()\n")
    (path / "boxes.csv").write_text(
        "path,label,x0,y0,x1,y1\npictures/cat/000.png,cat,2,2,29,29\npictures/dog/001.png,dog,2,2,29,29\n"
    )
    return path


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_that_names_a_network_takes_a_head(words: str) -> None:
    command: click.Command | None = main
    for word in words.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None and "--head" in {
        name for parameter in command.params for name in parameter.opts
    }


@pytest.mark.parametrize(
    "words",
    [
        "cscore -M net.py:sized -i pictures -c epochs/*.pt --head multilabel",
        "cscore -M net.py:sized -i pictures --head regression",
        "cose -M net.py:tiny --images pictures --checkpoints epochs/*.pt --head regression",
        "localise -M net.py:tiny --images boxes.csv --kind csv --head multilabel",
        "qr --head regression --width 2 --train 16 --test 8 --proxy 0",
    ],
)
def test_a_study_of_one_class_refuses_other_heads_before_any_work(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, ["study", *words.split(), "--out", "none"])
    output = " ".join(result.output.split())
    assert result.exit_code == 2 and ONE_CLASS in output and "name another head" in output, result.output
    assert not (folder / "none" / "run").exists() and not (folder / "none" / "training").exists()


def test_a_contrast_test_and_a_training_need_one_class_too() -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    with pytest.raises(InputError, match=f"the contrast test {ONE_CLASS} 'multilabel'"):
        make_pair(hp.load_model(net, head="multilabel"), torch.rand(4, 3, 16, 16), [0, 1, 0, 1])


def test_the_head_reaches_the_study_that_is_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = "init pictures -M net.py:tiny -c epochs/epoch01.pt --head regression -o regression.toml"
    assert CliRunner().invoke(main, words.split()).exit_code == 0
    assert read_study("regression.toml").model.head == "regression"
    scored = ScoreSettings(model="net.py:tiny", images=Path("pictures"), maps="maps", head="regression")
    assert scored.audit.head == "regression"
    words = "study cose -M net.py:tiny --images pictures --checkpoints epochs/*.pt --head softmax -m gradcam"
    fast = "--transforms flip-x --draws 1 --examples 0 --no-figures --limit 2 --out cose"
    done = CliRunner().invoke(main, [*words.split(), *fast.split()])
    assert done.exit_code == 0, done.output
    assert hp.open_run("cose").folder.manifest.config["head"] == "softmax"
