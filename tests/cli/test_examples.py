"""Every command's help has examples, and they run: as they stand, on little data, or up to the work itself.

Up to the work, where that takes long: every word is read, every option has a value that it takes, and every
setting is accepted.
"""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import click
import numpy as np
import pytest
import torch
import torchvision
from click.testing import CliRunner
from PIL import Image

from heatproof.cli import main
from heatproof.cli._study import StudyCommand
from heatproof.report.model_card import write_result
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import judge
from tiny_study import make_study

ROOT = Path(__file__).parents[2]
LONG = {  # what is read but not done here, and where it is
    r"demo": "tests/demo",
    r"drift": "needs more images; tests/report/test_drift.py and docs/drift.md",
    r"serve": "ends with Ctrl-C only; tests/report",
    r"(study )?contrast": "tests/contrast",
    r"study (cscore|qr|cose|localise)": "tests/studies",
    r"run .*--engine ray": "tests/run/test_ray.py",
    r"(audit|evidence) (lite0|timm|torchvision)": "minutes; tests/studies",
    r"evidence --data-only": "tests/report/test_data_check.py",
    r"explain monai": "a scan, and a package of its own; tests/models/test_monai.py",
    r"explain hf": "a saved model, and a package of its own; tests/models/test_zero_shot.py",
    r"score lite0": "minutes; the others below do the same with a small network",
    r"score (lite0|client)": "tests/run/test_foreign.py",
}
CLIENT = """
def predict(images):
    mean = images.flatten(1).mean(1)
    return (mean.sign()[:, None] * mean.new_tensor([[1.0, -1.0]])).softmax(1)
"""
LIGHTER = {
    "qr make": "--positives 2 --negatives 2", "audit": "--methods gradcam --no-open", "evidence": "--no-open",
}  # fmt: skip
MAY_FAIL = ("gate",)  # with 1: a rule may not hold


def commands(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command and group, each with its words; the program itself has none."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, f"{path} {name}".strip())


def examples(help_text: str) -> list[str]:
    r"""What can be typed, without `heatproof` and without the remark behind two spaces.

    >>> examples("A.\nB:\n  heatproof a 'x\n     y' -b   a remark\n  heatproof c && heatproof d > e")
    ["a 'x y' -b", 'c', 'd']
    """
    lines: list[str] = []
    for line in inspect.cleandoc(help_text).splitlines():
        if re.match(r" +heatproof ", line):
            lines.append(line.strip())
        elif lines and unfinished(lines[-1]):
            lines[-1] = f"{lines[-1].removesuffix(chr(92)).strip()} {line.strip()}"
    typed = [re.split(r"  +", line)[0] for line in lines]
    return [
        re.sub(r" > \S+$", "", command.removeprefix("heatproof "))
        for line in typed
        for command in line.split(" && ")
    ]


def unfinished(line: str) -> bool:
    """Whether a quotation is open, or a backslash says that the line goes on."""
    try:
        return line.endswith("\\") or not shlex.split(line)
    except ValueError:
        return True


EXAMPLES = sorted({example for _, command in commands(main) for example in examples(command.help or "")})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What somebody who reads the help would have: a network, weights, pictures, a study, a run."""
    folder = tmp_path_factory.mktemp("examples")
    study = make_study(folder)
    for old, new in (("cat", "normal"), ("dog", "pneumonia")):
        (folder / "pictures" / old).rename(folder / "pictures" / new)
    for old, new in (("01", "05"), ("02", "30")):
        (folder / f"epochs/epoch{old}.pt").rename(folder / f"epochs/epoch{new}.pt")
    with (folder / "net.py").open("a") as file:
        file.write("make = build = tiny\n")
    run_study(study, folder / "runs/first")
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(folder / "epochs/epoch05.pt", folder / "best.pt")
    for i, name in enumerate(("photos/a.jpg", "more/b.jpg", "holiday/c.jpg", "scan.png")):
        pixels = np.random.default_rng(i).integers(0, 256, (240, 300, 3), dtype=np.uint8)
        (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / name)
    (folder / "client.py").write_text(CLIENT)
    ids = sorted(path.relative_to(folder / "pictures").as_posix() for path in folder.glob("pictures/*/*.png"))
    maps = np.random.default_rng(0).random((len(ids), 8, 8), dtype=np.float32)
    np.savez(folder / "maps.npz", values=maps, ids=ids)
    for name, map_ in zip(ids, maps, strict=True):
        path = folder / "maps" / Path(name).with_suffix(".npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, map_)
    (folder / "results").mkdir()
    data = read_run(RunFolder.open(folder / "runs/first"))
    for name in ("first", "second"):
        write_result(data, judge(data), folder / f"results/{name}.json")
    (folder / "names.txt").write_text("\n".join(f"class {i}" for i in range(1000)))
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(finished, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def prepare(folder: Path, line: str) -> None:
    """What one example has and others do not."""
    if match := re.search(r"torchvision:(\w+) .*--checkpoint best.pt", line):
        torch.save(torchvision.models.get_model(match[1]).state_dict(), folder / "best.pt")
    for run in set(re.findall(r"runs/(?!first)(\w+)", line)) if line.startswith("compare") else ():
        shutil.copytree(folder / "runs/first", folder / "runs" / run)
    if line.startswith("score"):
        for picture in (folder / "pictures").rglob("*.png"):
            own = folder / "maps" / picture.relative_to(folder / "pictures").with_suffix(".npy")
            own.parent.mkdir(parents=True, exist_ok=True)
            np.save(own, np.random.default_rng(0).random((8, 8)))
    if line.startswith("init"):
        (folder / "study.toml").unlink()
    if "pictures/test" in line:
        shutil.move(folder / "pictures", folder / "test")
        shutil.move(folder / "test", folder / "pictures/test")


def accept(words: list[str]) -> None:
    """Read a command line as click does, and make the settings that it stands for."""
    command: click.Command = main
    context = click.Context(command, info_name="heatproof")
    while isinstance(command, click.Group):
        name, *words = words
        inner = command.get_command(context, name)
        assert inner is not None, f"there is no command {name}"
        command = inner
        if isinstance(command, click.Group):
            context = click.Context(command, context, name)
    context = command.make_context(command.name, words, context)
    if isinstance(command, StudyCommand):
        with patch.object(command, "callback", lambda given, **_: given):
            command.settings(**command.invoke(context))


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_of_the_help_runs(line: str, folder: Path) -> None:
    prepare(folder, line)
    words = shlex.split(line)
    if any(re.match(rf"{long}\b", line) for long in LONG):
        accept(words)
        return
    for command, lighter in LIGHTER.items():
        words += shlex.split(lighter) if line.startswith(command) else []
    result = CliRunner().invoke(main, words)
    allowed = (0, 1) if words[0] in MAY_FAIL else (0,)
    assert result.exit_code in allowed, result.output


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(*command, id=command[0] or "heatproof") for command in commands(main)]
)
def test_every_command_has_an_example_of_itself(path: str, command: click.Command) -> None:
    assert any(re.match(rf"{path}\b", line) for line in examples(command.help or "")), command.help


@pytest.mark.parametrize(
    "line", ["study cose --modle lite0", "study qr --seeds none", "gate", "export --csv"]
)
def test_an_example_that_is_wrong_is_noticed(line: str, folder: Path) -> None:
    with pytest.raises(click.UsageError):
        accept(line.split())
