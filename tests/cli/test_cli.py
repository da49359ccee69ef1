"""The command line as a user meets it: what is printed, what is written, and how mistakes are answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from heatproof import __version__
from heatproof.cli import main
from heatproof.cli.explain import find_images, unique_names
from heatproof.errors import InputError, ModelError
from heatproof.images.preprocess import Preprocess
from heatproof.registry import explainers, metrics
from heatproof.run.config import read_metrics

FACTORY = """
import torch
from torch import nn
def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 5, 4), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(6, 8, 3), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new user's folder: a model file, class names, two pictures."""
    (tmp_path / "net.py").write_text(FACTORY)
    (tmp_path / "names.txt").write_text("cat\ndog, hound\nowl\n")
    (tmp_path / "two.txt").write_text("cat\ndog\n")
    for i, name in enumerate(("a.png", "b.jpg")):
        pixels = np.random.default_rng(i).integers(0, 256, (120, 160 + i, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def heatproof(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def explain(*arguments: str) -> Result:
    return heatproof("explain", "net.py:tiny", *arguments)


def test_version_and_help() -> None:
    assert __version__ in heatproof("--version").output
    assert heatproof("--help").exit_code == 0


def commands(group: click.Group) -> Iterator[click.Command]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield from commands(command) if isinstance(command, click.Group) else (command,)


def test_every_command_and_option_is_documented() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for name in main.list_commands(click.Context(main)):
        assert f"heatproof {name}" in readme
    for command in commands(main):
        assert command.help and command.help[0].isupper()
        for option in command.params:
            assert isinstance(option, click.Argument) or option.help, f"{command.name} {option.name}"


def test_explain_writes_overlays_and_panels_and_lists_predictions(folder: Path) -> None:
    result = explain(
        "a.png", "b.jpg", "-m", "gradcam,rise(masks=4)", "--classes", "names.txt", "--out", "maps"
    )
    assert result.exit_code == 0, result.output
    written = sorted(path.name for path in (folder / "maps").iterdir())
    assert written == sorted(
        f"{name}.{kind}.png" for name in "ab" for kind in ("gradcam", "rise_masks=4", "panel")
    )
    assert all(f"maps/{name}" in result.output for name in written)
    assert (
        "hound" in result.output
        and result.output.count("explained") >= 2
        and "2 of 2 images" in result.output
    )
    with Image.open(folder / "maps" / "a.gradcam.png") as overlay:
        assert overlay.size == (224, 224)
    with Image.open(folder / "maps" / "a.panel.png") as panel:
        assert panel.width > 3 * 224


def test_explain_draws_the_crop_that_the_model_sees(folder: Path) -> None:
    assert explain("a.png", "--alpha", "0", "-m", "gradcam").exit_code == 0
    with Image.open("a.png") as picture, Image.open("heatmaps/a.gradcam.png") as drawn:
        assert np.array_equal(
            np.asarray(drawn), np.asarray(Preprocess().crop(picture).convert("L").convert("RGB"))
        )


def test_explain_goes_on_after_a_broken_image(folder: Path) -> None:
    (folder / "bad.png").write_bytes(b"not a picture")
    result = explain("bad.png", "a.png", "missing.png", "-m", "gradcam")
    assert result.exit_code == 1
    assert "bad.png" in result.output and "no such image: missing.png" in result.output
    assert (folder / "heatmaps" / "a.panel.png").exists() and "1 of 3 images" in result.output


def test_explain_leaves_out_a_picture_that_the_network_does_not_answer(folder: Path) -> None:
    (folder / "net.py").write_text(
        FACTORY.replace("def tiny", "def sure")
        + """
class Unsure(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = sure()
    def forward(self, x):
        dark = x.amax((1, 2, 3)) < 0
        return self.net(x) + torch.where(dark, torch.nan, 0.0)[:, None]
def tiny():
    return Unsure()
"""
    )
    Image.new("RGB", (120, 160)).save(folder / "dark.png")
    result = explain("dark.png", "a.png", "-m", "gradcam")
    assert result.exit_code == 1 and "nan%" not in result.output
    assert "not explained: dark: the network's output" in result.output and "1 of 2 images" in result.output
    assert [path.name for path in (folder / "heatmaps").glob("*.panel.png")] == ["a.panel.png"]


def test_explain_takes_the_target_by_name_synonym_or_number(folder: Path) -> None:
    outputs = [
        explain("a.png", "-m", "gradcam", "--classes", "names.txt", "-t", target, "--top", "1").output
        for target in ("hound", "Dog, Hound", "1")
    ]
    for output in outputs:
        (line,) = (line for line in output.splitlines() if line.rstrip().endswith("explained"))
        assert "dog, hound" in line


def test_the_same_seed_gives_the_same_files_in_any_batch_size(folder: Path) -> None:
    for out, options in (("one", ["--batch-size", "1"]), ("two", []), ("three", ["--seed", "5"])):
        assert explain("a.png", "b.jpg", "-m", "rise(masks=6)", "--out", out, *options).exit_code == 0
    first, two, three = (Image.open(folder / out / "b.rise_masks=6.png") for out in ("one", "two", "three"))
    close = np.abs(np.asarray(first, dtype=int) - np.asarray(two, dtype=int))
    assert close.max() <= 2  # rounding of single pixels
    assert not np.array_equal(np.asarray(two), np.asarray(three))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["a.png", "-m", "gradcm"], "unknown method 'gradcm'; did you mean 'gradcam'"),
        (["a.png", "-m", "rise(mask=3)"], "rise has no option 'mask'"),
        (["a.png", "-t", "wolf"], "has no class names"),
        (["a.png", "-t", "wolf", "--classes", "names.txt"], "has no class 'wolf'"),
        (["a.png", "-t", "7"], "target 7 is out of range"),
        (["a.png", "--layer", "9"], "unknown layer '9'"),
        (["a.png", "--classes", "nothing.txt"], "cannot read nothing.txt"),
        (["a.png", "--out", "a.png"], "cannot write a.png"),
        (["a.png", "--checkpoint", "no.pt"], "there is no file 'no.pt'"),
        (["a.png", "--checkpoint", "no.pt", "--random-weights"], "exclude each other"),
        (["a.png", "--classes", "two.txt"], "there are 2 class names but net.py:tiny has 3 classes"),
        (["*.bmp"], "no image in '*.bmp'"),
    ],
)
def test_a_mistake_is_answered_with_one_sentence(folder: Path, arguments: list[str], sentence: str) -> None:
    result = explain(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr and result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list(folder.glob("heatmaps/*"))


def test_debug_shows_where_it_happened(folder: Path) -> None:
    result = heatproof("--debug", "explain", "net.py:tiny", "a.png", "-m", "gradcm")
    assert result.exit_code == 2  # as without it
    assert "Traceback" in result.stderr and "UnknownNameError" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: unknown method")


def test_weights_that_cannot_be_fetched_lead_to_the_two_options(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def fails(*_: object, **options: object) -> None:
        assert options["pretrained"] is True
        raise ModelError(
            "resnet50 could not be loaded (no network); get the weights elsewhere and pass checkpoint="
        )

    monkeypatch.setattr("heatproof.models.load.load_model", fails)
    result = heatproof("explain", "torchvision:resnet50", "a.png")
    assert result.exit_code == 2
    assert (
        "--checkpoint" in result.stderr
        and "--random-weights" in result.stderr
        and "no network" in result.stderr
    )


def test_folders_and_patterns_of_images(folder: Path) -> None:
    (folder / "more").mkdir()
    Image.new("RGB", (9, 9)).save(folder / "more" / "a.png")
    (folder / "more" / "notes.txt").write_text("not an image")
    paths = find_images([".", "more", "more/*.png", "a.png"])
    assert paths == [Path("a.png"), Path("b.jpg"), Path("more/a.png")]
    assert unique_names(paths) == ["a", "b", "a-2"]


def test_lists_name_everything() -> None:
    for verbose in ([], ["-v"]):
        methods, known = heatproof("list", "methods", *verbose).output, explainers.names()
        assert all(name in methods for name in known)
        assert all(name in heatproof("list", "metrics", *verbose).output for name in metrics.names())
    assert "normalisation:" in methods and "after the sum over channels" in methods
    assert "1,000 inputs" in methods and "shared pass" in methods


def test_every_metric_is_described_in_its_own_words_and_whether_a_run_computes_it() -> None:
    summaries = [entry.summary for entry in metrics]
    assert len(set(summaries)) == len(summaries) and not [
        text for text in summaries if "{" in text or '"b' in text
    ]
    pages = heatproof("list", "metrics", "-v").output.split("\n\n")
    runs = {page.split("\n")[0].strip(): "in a run:       yes" in page for page in pages if page.strip()}
    assert runs["insertion"] and runs["cscore"] and not runs["ssim"] and not runs["above_floors"]
    for name, can in runs.items():
        if can:
            read_metrics([name])
        else:
            with pytest.raises(InputError):
                read_metrics([name])
    assert "in a run" in heatproof("list", "metrics").output


def test_the_first_example_works_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "heatproof explain lite0 example:cat" in heatproof("--help").output
    result = heatproof("explain", "lite0", "example:cat", "-m", "gradcam")
    assert result.exit_code == 0, result.output
    assert "tiger cat" in result.output and (tmp_path / "heatmaps" / "cat.panel.png").exists()
    missing = heatproof("explain", "lite0", "example:ca")
    assert missing.exit_code == 2 and "unknown example 'ca'; did you mean 'cat'" in missing.stderr


def test_list_layers_marks_the_default(folder: Path) -> None:
    lines = heatproof("list", "layers", "net.py:tiny", "--image-size", "96").output.splitlines()
    (default,) = (line.split() for line in lines if "default:" in line)
    assert default[:4] == ["4", "3x3", "8", "default:"]  # the ReLU behind the last convolution
