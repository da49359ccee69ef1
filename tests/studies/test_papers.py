"""docs/papers.md: every command on it runs in its smallest configuration and makes the files it names.

To add one: a row on the page (what the paper has | the command | files, with * for any folder | what differs)
and an entry in SMALLEST under the command as the page writes it: a function that prepares an empty folder and
gives the arguments behind `heatproof`. They write to the folder "out".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paper_commands as others
import pytest
from click.testing import CliRunner
from PIL import Image
from test_study_cscore import VOLUMES, scans

from heatproof.cli import main

pytestmark = [pytest.mark.trains, pytest.mark.usefixtures("short_studies")]

PAGE = (Path(__file__).parents[2] / "docs" / "papers.md").read_text(encoding="utf-8")
Row = tuple[str, str, tuple[str, ...]]  # what the paper has, command, files


def rows() -> list[Row]:
    entries = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if len(cells) >= 3 and cells[1].startswith("`heatproof "):
            entries.append((cells[0], cells[1].strip("`"), tuple(re.findall(r"`([^`]+)`", cells[2]))))
    return entries


ROWS = rows()
COMMANDS = list(dict.fromkeys(command for _, command, _ in ROWS))


# --- C-Score ---------------------------------------------------------------------------------

NETWORKS = """
from heatproof.train import small_net
def narrow(num_classes=2): return small_net(num_classes, size=32, width=4)
def wide(num_classes=2): return small_net(num_classes, size=32, width=6, seed=1)
"""
TINY = [
    "--head-epochs",
    "1",
    "--full-epochs",
    "1",
    "--keep",
    "1,2",
    "--train-batch",
    "8",
    "--first-phase",
    "all",
    "--device",
    "cpu",
    "--methods",
    "gradcam",
    "--out",
    "out",
]


def shapes(folder: Path, count: int = 6) -> list[str]:
    """Bright discs and squares at random places, and a CSV file with their boxes."""
    lines = ["path,label,x0,y0,x1,y1"]
    for k, name in enumerate(("disc", "square")):
        (folder / "xrays" / name).mkdir(parents=True)
        for i in range(count):
            rng = np.random.default_rng((k, i))
            pixels = rng.integers(0, 60, (32, 32, 3), dtype=np.uint8)
            y, x = (int(v) for v in rng.integers(8, 24, 2))
            pixels[y - 5 : y + 6, x - 5 : x + 6] = 230 if k else 120
            Image.fromarray(pixels).save(folder / "xrays" / name / f"{i}.png")
            lines.append(f"xrays/{name}/{i}.png,{name},{x - 5},{y - 5},{x + 5},{y + 5}")
    (folder / "boxes.csv").write_text("\n".join(lines) + "\n")
    (folder / "nets.py").write_text(NETWORKS)
    return ["--images", "xrays"]


def three_networks(folder: Path) -> list[str]:
    """Two small ones in place of the paper's, and no sweep."""
    return [
        "study",
        "cscore",
        "nets.py:narrow",
        "nets.py:wide",
        *shapes(folder),
        *TINY,
        "--no-sweep",
        "--paper",
    ]


def several_seeds(folder: Path) -> list[str]:
    return [
        "study",
        "cscore",
        *shapes(folder),
        "--model",
        "nets.py:narrow",
        *TINY,
        "--no-sweep",
        "--seeds",
        "0,1",
    ]


def scans_in_files(folder: Path) -> list[str]:
    """Arrays and a small network in place of NIfTI files and one of MONAI."""
    scans(folder / "scans", 4)
    (folder / "volumes.py").write_text(VOLUMES)
    kind = ["--images", "scans", "--kind", "arrays", "--axes", "dhw", "--window", "100,250"]
    return ["study", "cscore", *kind, "--model", "volumes.py:build", *TINY, "--no-sweep"]


def options_of_lists(folder: Path) -> list[str]:
    chosen = [
        "--tau",
        "adaptive",
        "--weights",
        "calibrated",
        "--anchor",
        "last",
        "--gradients",
        "--model",
        "nets.py:narrow",
    ]
    return ["study", "cscore", *shapes(folder), *chosen, *TINY]


def boxes(folder: Path) -> list[str]:
    shapes(folder)
    named = [
        "--images",
        "boxes.csv",
        "--kind",
        "csv",
        "--model",
        "nets.py:narrow",
        "--no-sweep",
        "--held-out",
        "0.5",
    ]
    return ["study", "cscore", *named, *TINY]


def new_weights(folder: Path) -> list[str]:
    images = shapes(folder)
    first = ["study", "cscore", *images, "--model", "nets.py:narrow", *TINY[:-1], "run", "--no-sweep"]
    assert heatproof(first, folder).returncode == 0
    weights = "run/training/epoch02.safetensors"
    return ["study", "cscore", "--reference", "run", "--checkpoints", weights, "--out", "out"]


def other_methods(folder: Path) -> list[str]:
    methods = "gradcam,integrated-gradients(steps=2),lime(samples=20)"
    small = ["--model", "nets.py:narrow", "--no-sweep", *TINY, "--methods", methods]
    return ["study", "cscore", *shapes(folder), *small]


def under_transforms(folder: Path) -> list[str]:
    return [
        "study",
        "cscore",
        *shapes(folder),
        "--model",
        "nets.py:narrow",
        "--no-sweep",
        *TINY,
        "--transforms",
    ]


PAPERS_OWN = "heatproof study cscore keras:DenseNet201 keras:InceptionV3 keras:ResNet50V2"
CT = "--model monai:DenseNet121 --window 40,400"
LISTS = "--tau adaptive --weights calibrated --anchor last --gradients"
ANY_METHOD = "--model timm:vit_tiny_patch16_224 --methods gradcam,integrated-gradients,lime"
CONVNEXT = "heatproof study qr --full --model torchvision:convnext_base"
COSE = "heatproof study cose --model MODEL --checkpoints 'epochs/*.pt' --images PHOTOS"
OTHER = "heatproof study cose --model OTHER --checkpoints 'other/*.pt' --images PHOTOS --beside RUN"
LOCALISE = "heatproof study localise --model timm:resnet18.a1_in1k --checkpoint WEIGHTS --images IMAGENET"
FINISHED: dict[Callable[[Path], list[str]], Path] = {}
SMALLEST: dict[str, Callable[[Path], list[str]]] = {
    f"{PAPERS_OWN} --images XRAYS --pretrained --paper": three_networks,
    "heatproof study cscore --images XRAYS --seeds 0,1,2": several_seeds,
    f"heatproof study cscore --images SCANS --kind nifti {CT}": scans_in_files,
    "heatproof study cscore --reference RUN --checkpoints NEW": new_weights,
    f"heatproof study cscore --images XRAYS {LISTS}": options_of_lists,
    "heatproof study cscore --images BOXES.csv --kind csv": boxes,
    f"heatproof study cscore --images XRAYS {ANY_METHOD}": other_methods,
    "heatproof study cscore --images XRAYS --transforms": under_transforms,
    "heatproof study qr --full --device cuda": others.codes,
    f"{CONVNEXT} --beside RUN --device cuda": others.codes_beside(
        lambda arguments, folder: heatproof(arguments, folder), FINISHED
    ),
    f"{COSE} --paper": others.one_network,
    f"{COSE} --similarity pearson": others.by_pearson,
    OTHER: others.beside(lambda arguments, folder: heatproof(arguments, folder)),
    f"{LOCALISE} --target label --preprocess thesis --layer last_conv": others.as_the_thesis,
    "heatproof study localise --model MODEL --images IMAGENET --groups GROUPS.csv --exclude LIST --repeats 5 "
    "--segment-counts 30,100,200 --segmentations slic,quickshift,felzenszwalb --sample-counts 100,300,1000 "
    "--cues CUES.csv": others.further,
}

# --- the tests -------------------------------------------------------------------------------


class Done(NamedTuple):
    returncode: int
    output: str


def heatproof(arguments: list[str], folder: Path) -> Done:
    """In this process: a new one would spend most of its time on imports."""
    with chdir(folder):
        result = CliRunner().invoke(main, arguments)
    return Done(result.exit_code, result.output + str(result.exception or ""))


def test_the_page_and_the_smallest_configurations_name_the_same_commands() -> None:
    assert set(COMMANDS) == set(SMALLEST)
    assert all(files for _, _, files in ROWS), "a command without a file that shows it"


@pytest.mark.parametrize("command", SMALLEST)
def test_a_command_makes_what_the_page_says(command: str, tmp_path: Path) -> None:
    done = heatproof(SMALLEST[command](tmp_path), tmp_path)
    assert done.returncode == 0, done.output
    FINISHED[SMALLEST[command]] = tmp_path / "out"
    for what, named, files in ROWS:
        for file in files if named == command else ():
            assert list((tmp_path / "out").glob(file)), f"{what}: no {file}"
