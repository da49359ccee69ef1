"""Boxes and masks that do not fit their images are refused before a run starts, or counted in a warning."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from heatproof.errors import InputError
from heatproof.images.kinds import open_source
from heatproof.images.source import check_annotations
from heatproof.run.config import toml
from heatproof.run.engine import prepare
from tiny_study import NETWORK

WIDTH, HEIGHT, COUNT = 96, 64, 40
BoxOf = Callable[[int], Sequence[float]]


def good(i: int) -> Sequence[float]:
    """Anywhere in the image, up to its last pixels."""
    return 2 * i, i, 2 * i + 16, i + 24


def write(folder: Path, box: BoxOf = good, exif: int = 1, mask: tuple[int, int] | None = None) -> Path:
    """A study on images with one box or mask each."""
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(NETWORK)
    with (folder / "list.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", *(["mask_object"] if mask else ["x0", "y0", "x1", "y1"])])
        for i in range(COUNT):
            pixels = np.random.default_rng(i).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
            tags = Image.Exif()
            tags[0x0112] = exif
            Image.fromarray(pixels).save(folder / f"{i:02d}.png", exif=tags)
            if mask:
                Image.fromarray(np.full(mask[::-1], 255, np.uint8)).save(folder / f"mask{i:02d}.png")
            truth = [f"mask{i:02d}.png"] if mask else box(i)
            rows.writerow([f"{i:02d}.png", i % 2, *truth])
    study = {
        "methods": ["gradcam", "random"],
        "metrics": ["pointing"],
        "run": {"batch_size": 8, "threads": 1, "workers": 1, "device": "cpu"},
        "model": {"spec": "net.py:tiny"},
        "images": {"kind": "csv", "path": "list.csv"},
    }
    (folder / "study.toml").write_text(toml(study))
    return folder / "study.toml"


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        (lambda i: [0.1, 0.2, 0.5, 0.6 + i / 200],
         r"40 of 40 boxes .* the box \(0.1, 0.2, 0.5, 0.6\) of 00.png, .* 96x64 pixels, has no number "
         "above 1 and seems to be given in fractions of the image; multiply x by the width and y by"),
        (lambda i: [100, 5, 110 + i, 20],
         r"40 of 40 boxes .* \(100, 5, 110, 20\) of 00.png, .* lies outside"),
        (lambda i: [2 * v for v in good(i)], r"31 of 40 boxes .* 96x64 .*\(columns width and height"),
        (lambda i: [v - 30 for v in good(i)], r"\(-30, -30, -14, -6\) of 00.png, .* lies outside"),
        (lambda i: [good(i)[k] for k in (1, 0, 3, 2)],
         "would fit with x and y swapped; the order is x0, y0, x1, y1"),
        (lambda i: [60, 5, 135, 20], "40 of 40 .* reaches past the edge; correct it"),
        (lambda i: [60, 5, 135, 20] if i < 3 else good(i), "3 of 40 boxes"),
    ],
    ids=["fractions", "outside", "twice", "negative", "swapped", "past", "a few too many"],
)  # fmt: skip
def test_boxes_that_do_not_fit_are_refused(tmp_path: Path, box: BoxOf, sentence: str) -> None:
    study = write(tmp_path, box)
    with pytest.raises(InputError, match=f"^images: .*{sentence}"):
        prepare(study, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_up_to_5_per_cent_of_boxes_that_do_not_fit_are_counted_in_a_warning(tmp_path: Path) -> None:
    lines: list[str] = []
    prepare(
        write(tmp_path, lambda i: [60, 5, 135, 20] if i < 2 else good(i)), tmp_path / "out", say=lines.append
    )
    (line,) = (line for line in lines if line.startswith("warning"))
    assert "2 of 40 boxes do not fit their images; the first: the box (60, 5, 135, 20) of 00.png" in line


def test_boxes_inside_or_one_pixel_past_the_edge_are_accepted(tmp_path: Path) -> None:
    lines: list[str] = []
    prepare(write(tmp_path, lambda i: [-1, 40, WIDTH, HEIGHT]), tmp_path / "out", say=lines.append)
    assert not any(line.startswith("warning") for line in lines)


def test_boxes_of_the_stored_frame_beside_an_orientation_are_named(tmp_path: Path) -> None:
    """Upright, the images are 64 wide and 96 high."""
    with pytest.raises(InputError, match=r"64x96 pixels, .* fits only the stored frame, whose axes the EXIF"):
        prepare(write(tmp_path, exif=6), tmp_path / "out")
    upright = write(tmp_path, lambda i: [good(i)[k] for k in (1, 0, 3, 2)], exif=6)
    prepare(upright, tmp_path / "out")


@pytest.mark.parametrize(
    ("exif", "mask", "sentence"),
    [
        (1, (64, 64), "40 of 40 masks .* the mask of 'object' of 00.png has 64x64 pixels, another aspect "
                      "ratio than its image of 96x64 pixels; save the mask in the shape"),
        (6, (96, 64), "image of 64x96 pixels, whose EXIF orientation swaps its axes; save the mask upright"),
    ],
)  # fmt: skip
def test_masks_of_another_aspect_ratio_are_refused(
    tmp_path: Path, exif: int, mask: tuple[int, int], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        prepare(write(tmp_path, exif=exif, mask=mask), tmp_path / "out")
    prepare(write(tmp_path, mask=(192, 128)), tmp_path / "out")  # of another size alone


def test_arrays_in_memory_are_checked_alike() -> None:
    images = [np.zeros((HEIGHT, WIDTH, 3), np.uint8)] * 2
    fitting = open_source("memory", images, boxes=[[(0, 0, 95, 63)]] * 2)
    assert check_annotations(fitting) == ""
    with pytest.raises(InputError, match=r"2 of 2 boxes .* 96x64 pixels"):
        check_annotations(open_source("memory", images, boxes=[[(0, 0, 63, 95)]] * 2))
    with pytest.raises(InputError, match=r"2 of 2 masks .* 64x64 pixels"):
        check_annotations(open_source("memory", images, masks={"a": np.ones((2, 64, 64))}))


def test_boxes_drawn_on_an_image_of_another_stated_size_are_held_against_it(tmp_path: Path) -> None:
    study = write(tmp_path, lambda i: [2 * v for v in good(i)])
    lines = (tmp_path / "list.csv").read_text().splitlines()
    sized = [f"{lines[0]},width,height", *(f"{line},{2 * WIDTH},{2 * HEIGHT}" for line in lines[1:])]
    (tmp_path / "list.csv").write_text("\n".join(sized))
    prepare(study, tmp_path / "out")
