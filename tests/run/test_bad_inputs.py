"""Networks and images that support no result: NaN answers, random outputs, empty and tiny images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image, ImageOps
from torch import Tensor, nn

import heatproof as hp
from heatproof.cli import main
from heatproof.errors import InputError, ModelError
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from heatproof.verdict.data import read_run
from heatproof.verdict.follow import FollowRule
from heatproof.verdict.judge import judge
from made_run import make_run
from tiny_study import make_study

NETWORK = """
import torch
from torch import nn
from heatproof.images import Preprocess
from heatproof.models import Model

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.Conv2d(6, 8, 3, 2), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))

    def forward(self, x):
        logits = self.head(self.body(x))
        {last}

def tiny():
    return Model(Net(), preprocess=Preprocess(size=(32, 32), resize=32))
"""
MARKED = "return logits * torch.where(x[:, 0, 16, 16] > 1.7, {value}, 1.0)[:, None]"
DROPOUT = "return self.head(nn.functional.dropout(self.body(x), 0.2, training=True))"
UNANSWERED = "the network's output is NaN or infinite for this image"
METRICS = [
    "insertion(steps=4)", "deletion(steps=4)", "randomisation(depths=2)", "input_shift", "fragility(draws=1)",
    "specificity(draws=1, steps=4)", "untrained", "adversarial_fragility(steps=2)", "accuracy", "cscore",
]  # fmt: skip


def write_network(folder: Path, last: str) -> None:
    (folder / "net.py").write_text(NETWORK.replace("{last}", last))


def mark_one(folder: Path) -> str:
    """Make the red channel dark in all images except for a bright patch in one, whose id is returned."""
    for path in sorted((folder / "pictures").rglob("*.png")):
        pixels = np.asarray(Image.open(path)).copy()
        pixels[..., 0] //= 2
        if path.name == "001.png":
            pixels[12:24, 12:28, 0] = 255
        Image.fromarray(pixels).save(path)
    return "dog/001.png"


def image_rows(folder: RunFolder) -> dict[tuple[Any, ...], tuple[str, str]]:
    rows = folder.scores().sql("select * from scores where image <> ''")
    key = ("image", "label", "explained", "method", "metric")
    return {tuple(row[k] for k in key): (float(row["value"]).hex(), row["reason"]) for row in rows}


@pytest.mark.parametrize(
    ("targets", "value"),
    [
        ("label", "float('nan')"),
        ("predicted", "float('inf')"),
        pytest.param("label", "float('inf')", marks=pytest.mark.seeds),
        pytest.param("predicted", "float('nan')", marks=pytest.mark.seeds),
    ],
)
def test_a_nan_answer_to_one_image_leaves_all_other_rows_as_they_are(
    tmp_path: Path, value: str, targets: str
) -> None:
    methods, run = ["gradcam", "gradient", "random"], f'targets = "{targets}"'
    study = make_study(tmp_path, images=8, methods=methods, metrics=METRICS, checkpoints=[], run=run)
    marked = mark_one(tmp_path)
    write_network(tmp_path, MARKED.format(value="1.0"))
    expected = image_rows(run_study(study, tmp_path / "fine").folder)
    write_network(tmp_path, MARKED.format(value=value))
    result = run_study(study, tmp_path / "out")
    results = image_rows(result.folder)
    assert result.done == result.units and result.unanswered == 1
    own = {key: row for key, row in results.items() if key[0] == marked}
    assert {key: row for key, row in results.items() if key not in own} == {
        key: row for key, row in expected.items() if key[0] != marked
    }
    assert {key[3:] for key in own} == {key[3:] for key in expected if key[0] == marked}
    assert set(own.values()) == {("nan", UNANSWERED)}


def test_a_run_with_a_nan_answer_ends_with_exit_code_1_and_the_count(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=8, methods=["gradcam"], metrics=["input_shift"], checkpoints=[])
    mark_one(tmp_path)
    write_network(tmp_path, MARKED.format(value="float('nan')"))
    result = CliRunner().invoke(main, ["run", str(study), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1, result.output
    assert "1 image without a prediction: the network's output is NaN or infinite" in result.output


class Marked(nn.Sequential):
    """Infinite output for images whose first pixel is above 1."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x)
        return torch.where(x[:, :1, 0, 0] > 1, math.inf, logits)


def small(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def test_explain_names_the_images_that_get_no_answer() -> None:
    images = torch.rand(5, 3, 12, 12)
    images[3, :, 0, 0] = 2
    with pytest.raises(InputError, match=r"NaN or infinite for image 3 \(1 of 5\)"):
        hp.explain(small(Marked), images, ["gradcam", "gradient"])
    with pytest.raises(InputError, match=r"NaN or infinite for image d \("):
        hp.explain(small(Marked), images, "gradcam", 0, ids=list("abcde"))
    maps = hp.explain(small(Marked), images, "gradcam", allow_nan=True)["gradcam"]
    assert maps.values[[0, 1, 2, 4]].isfinite().all()


class Dropout(nn.Sequential):
    """Dropout left on inside forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.3, training=True))


class Noise(nn.Sequential):
    """Random numbers in place of the output, which leave no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn_like(super().forward(x).detach())


class Rounded(nn.Sequential):
    """Differences as the order of a sum on a GPU makes them."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x)
        return logits * (1 + 1e-4 * torch.rand_like(logits))


def test_a_random_network_is_recognised_and_rounding_is_not_randomness() -> None:
    images = torch.rand(2, 3, 12, 12)
    for kind in (Dropout, Noise):
        with pytest.raises(InputError, match=r"outputs for the same image differ by [\d.]+"):
            hp.load_model(small(kind)).check_repeatable(images)
    for kind in (nn.Sequential, Rounded, Marked):  # type: ignore[assignment]
        hp.load_model(small(kind)).check_repeatable(images + 0.5)  # some pixels are marked
    hp.load_model(small().half()).check_repeatable(images)


def test_a_random_output_without_gradient_is_not_called_checkpointing() -> None:
    with pytest.raises(InputError, match="is random: its outputs for the same image differ"):
        hp.explain(small(Noise), torch.rand(2, 3, 12, 12), "gradcam")

    class NoGradient(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    with pytest.raises(ModelError, match=r"carries no gradient; does its forward run under torch.no_grad"):
        hp.explain(small(NoGradient), torch.rand(2, 3, 12, 12), "gradcam")


def test_runs_and_the_explain_command_refuse_a_random_network(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=4, methods=["gradcam"], metrics=[], checkpoints=[])
    write_network(tmp_path, DROPOUT)
    result = CliRunner().invoke(main, ["run", str(study), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "outputs for the same image differ by" in " ".join(result.output.split())
    assert not (tmp_path / "out" / "run.json").exists()
    image = tmp_path / "pictures" / "cat" / "000.png"
    command = ["explain", f"{tmp_path}/net.py:tiny", str(image), "--out", str(tmp_path / "maps")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and "outputs for the same image differ by" in " ".join(result.output.split())


def repeat(folder: Path, count: int, copies: int) -> Path:
    """A study on `copies` copies of each of `count` noise images, every other one mirrored."""
    study = make_study(folder, images=0, methods=["gradcam"], metrics=["insertion(steps=4)"], checkpoints=[])
    write_network(folder, "return logits")
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((40, 40))
        for k in range(copies):
            path = folder / "pictures" / ("cat", "dog")[i % 2] / f"{i}-{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            (ImageOps.mirror(image) if k % 2 else image).save(path)
    return study


def test_repeated_images_count_once_in_every_interval(tmp_path: Path) -> None:
    data = read_run(run_study(repeat(tmp_path, 4, 10), tmp_path / "out").folder)
    assert len(data.images.ids) == 40 and data.images.distinct_files == 4
    cell = data.cells["insertion(steps=4)", "gradcam"]
    assert cell.n == 4
    column = data.images.scores["insertion(steps=4)", "gradcam"]
    groups = [column[[name[4:].startswith(f"{i}-") for name in data.images.ids]].mean() for i in range(4)]
    assert cell.value == pytest.approx(np.mean(groups)) and cell.low >= min(groups) - 1e-9
    verdict = judge(data)
    assert "Only 4 of the 40 images are distinct" in verdict.as_json()["warnings"][0]


def test_different_images_have_no_groups_and_old_folders_are_read(tmp_path: Path) -> None:
    folder = run_study(repeat(tmp_path, 8, 1), tmp_path / "out").folder
    data = read_run(folder)
    assert data.images.group is None and data.images.distinct_files == 8 and not judge(data).warnings
    old = make_run(tmp_path / "old", images=8, maps=False)
    assert read_run(old).images.group is None


@pytest.mark.parametrize(("distinct", "answer"), [(100, "yes"), (3, "undecided")])
def test_a_verdict_needs_distinct_images(tmp_path: Path, distinct: int, answer: str) -> None:
    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        return random.normal(0.6, 0.1, 100)

    random = np.random.default_rng(0)
    thumbnails = random.integers(0, 256, (distinct, 32, 32, 3), dtype=np.uint8)[np.arange(100) % distinct]
    tests = ("specificity_weights", "specificity_place")
    run = make_run(tmp_path, values, images=100, metrics=tests, maps=False, thumbnails=thumbnails)
    by = FollowRule(informative=-math.inf, yes=0.1, no=0.0)
    verdict = judge(read_run(run), by)
    assert {method.follows for method in verdict.methods} == {answer}
    (votes,) = {test.n for method in verdict.methods for test in method.tests if test.votes}
    assert votes <= 2 * distinct  # a group for each explained class
    if answer == "undecided":
        assert "30 are needed" in verdict.methods[0].note


@pytest.mark.parametrize(
    ("sides", "tiny"),
    [
        ((4, 64), True),
        ((27, 224), True),
        ((6, 32), True),
        ((32, 32), False),
        ((32, 224), False),
        ((8, 8), False),
    ],
)
def test_images_far_below_the_network_s_input_are_not_judged(
    tmp_path: Path, sides: tuple[int, int], tiny: bool
) -> None:
    thumbnails = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    verdict = judge(read_run(make_run(tmp_path, maps=False, thumbnails=thumbnails, sides=sides)))
    assert any("much smaller than the network's input" in note for note in verdict.notes) == tiny


def test_transparent_and_tiny_images_in_a_run(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=8, methods=["gradcam"], metrics=[], checkpoints=[])
    folder = tmp_path / "pictures" / "cat"
    for name, mode in (("clear", "RGBA"), ("grey", "LA")):
        Image.new(mode, (40, 40)).save(folder / f"{name}.png")
    palette = Image.new("P", (40, 40))
    palette.save(folder / "palette.png", transparency=0)
    half = np.full((40, 40, 4), 200, np.uint8)
    half[:20, :, 3] = 0
    Image.fromarray(half).save(folder / "half.png")
    Image.new("RGB", (4, 4), (200, 90, 10)).save(folder / "tiny.png")
    result = run_study(study, tmp_path / "out")
    assert {row["image"]: row["reason"] for row in result.broken} == dict.fromkeys(
        ["cat/clear.png", "cat/grey.png", "cat/palette.png"],
        "it is fully transparent, so that it shows nothing; give it an opaque background",
    )
    verdict = judge(read_run(result.folder))
    assert "1 image much smaller than the network's input (4 pixels" in verdict.warnings[-1]
