"""The check of a dataset before training names a planted property, and none without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image, ImageDraw

import heatproof as hp
from heatproof.cli import main
from heatproof.errors import InputError

N, SIDE = 60, 96
CLASSES = ("left", "right")
Change = Callable[[np.ndarray], np.ndarray]


def drawn(seed: int) -> list[np.ndarray]:
    """Triangles that point to the right, or, in every second image, to the left; nothing else differs."""
    random, images = np.random.default_rng(seed), []
    for i in range(N):
        colour = random.integers(60, 180) + random.integers(-10, 10, 3)
        noise = random.normal(0, random.uniform(4, 12), (SIDE, SIDE, 3))
        image = Image.fromarray(np.clip(colour + noise, 0, 255).astype(np.uint8))
        (x, y), half = random.integers(36, 60, 2), int(random.integers(8, 16))  # x, y: centre of gravity
        point = -half if i % 2 else half
        corners = [(x - point / 2, y - half), (x - point / 2, y + half), (x + point, y)]
        ImageDraw.Draw(image).polygon(corners, fill=tuple(random.integers(0, 255, 3).tolist()))
        images.append(np.asarray(image))
    return images


def planted(seed: int, change: Change) -> list[np.ndarray]:
    return [change(image) if i % 2 else image for i, image in enumerate(drawn(seed))]


def tinted(image: np.ndarray) -> np.ndarray:
    return np.clip(image + np.array([15.0, 0, -15]), 0, 255).astype(np.uint8)


def framed(image: np.ndarray) -> np.ndarray:
    return np.pad(image[4:-4, 4:-4], ((4, 4), (4, 4), (0, 0)))


def marked(image: np.ndarray) -> np.ndarray:
    image = image.copy()
    image[-16:-10, 8:24] = 255
    return image


def folder(path: Path, save: Callable[[Image.Image, bool, Path], object]) -> Path:
    """Images of both classes as files; save: writes an image, given whether it is of the second class."""
    for i, image in enumerate(drawn(1)):
        (path / CLASSES[i % 2]).mkdir(parents=True, exist_ok=True)
        save(Image.fromarray(image), bool(i % 2), path / CLASSES[i % 2] / f"{i}")
    return path


@pytest.mark.parametrize("seed", range(3))
def test_images_without_a_planted_property_are_clean(seed: int) -> None:
    result = hp.check_data(drawn(seed), np.arange(N) % 2)
    assert not result.named, str(result)
    assert result.headline.startswith("No whole-image property predicts the class")


@pytest.mark.parametrize(
    ("change", "name"), [(tinted, "tint"), (framed, "frame"), (marked, "corner, bottom left")]
)
def test_a_planted_property_is_named(change: Change, name: str) -> None:
    result = hp.check_data(planted(0, change), np.arange(N) % 2, classes=CLASSES)
    score = next(score for score in result.named if score.name == name)
    assert name in str(result.named[0]) or change is marked  # which is also in two edges
    assert score.accuracy > 0.8 > score.control_high and score.p < 0.05
    assert len(score.typical) == len(score.others) == 5
    assert name in str(result)


def test_a_property_of_one_of_three_classes_names_that_class() -> None:
    images = drawn(4)
    images = [tinted(image) if i % 3 == 2 else image for i, image in enumerate(images)]
    score = hp.check_data(images, np.arange(N) % 3, classes=("a", "b", "c")).named[0]
    assert (score.name, score.class_name) == ("tint", "c") and score.recall > 0.8


def test_copies_of_an_image_do_not_predict_each_other() -> None:
    """Without the removal, every copy finds its class among its copies."""
    images = [image for image in drawn(2)[:24] for _ in range(5)]
    result = hp.check_data(images, np.repeat(np.arange(24) % 2, 5))
    assert result.duplicates == 96 and result.n == 24 and not result.named


def saved_jpeg(image: Image.Image, second: bool, path: Path) -> None:
    image.save(path.with_suffix(".jpg"), quality=60 if second else 90)


def saved_larger(image: Image.Image, second: bool, path: Path) -> None:
    image.resize((112, 112) if second else image.size).save(path.with_suffix(".png"))


@pytest.mark.parametrize(("save", "name"), [(saved_jpeg, "compression"), (saved_larger, "size")])
def test_the_command_names_a_property_of_the_files(
    tmp_path: Path, save: Callable[[Image.Image, bool, Path], object], name: str
) -> None:
    images, out = folder(tmp_path / "images", save), tmp_path / "out"
    result = CliRunner().invoke(
        main, ["evidence", "--data-only", str(images), "--out", str(out), "--no-open"]
    )
    assert result.exit_code == 0, result.output
    record = json.loads((out / "data.json").read_text())
    assert record["schema"] == "heatproof-data-check-1" and record["named"][0] == name
    assert record["properties"][0]["accuracy"] > 0.9
    page = (out / "data.html").read_text()
    assert page.count("data:image/") >= 10 and name in page and "<script" not in page


def test_an_image_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    images = folder(tmp_path / "images", lambda image, _, path: image.save(path.with_suffix(".png")))
    (images / "left" / "broken.png").write_bytes(b"no image")
    args = ["evidence", "--data-only", str(images), "--out", str(tmp_path / "out"), "--no-open"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 1 and "1 image could not be used" in result.stderr, result.output
    assert not json.loads((tmp_path / "out" / "data.json").read_text())["named"]


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one class per image"):
        hp.check_data(drawn(0))
    with pytest.raises(InputError, match="one class per image"):
        hp.check_data(drawn(0), np.eye(2, dtype=int)[np.arange(N) % 2])
    with pytest.raises(InputError, match="two classes with 10 different images each, and there are 1"):
        hp.check_data(drawn(0)[:25], [0] * 20 + [1] * 5)
    result = CliRunner().invoke(main, ["evidence", "--data-only", str(tmp_path / "missing")])
    assert result.exit_code == 2 and "there is no folder or file" in result.stderr
