"""Overlays and panels: the right colours in the right places, and text that fits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from heatproof.errors import InputError, UnknownNameError
from heatproof.report import panels
from heatproof.report.gallery import pack, unpack
from heatproof.report.panels import Tile, panel, sheet
from heatproof.show import COLOUR_MAPS, brightened, colours, overlay
from heatproof.store.maps import StoredMaps
from heatproof.studies.localise.panels import Studio
from heatproof.studies.localise.results import LocaliseResults
from heatproof.types import Maps


def photo(height: int = 40, width: int = 60) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("name", ["inferno", "magma", "viridis"])
def test_colour_maps_are_those_everybody_uses(name: str) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    steps = np.linspace(0, 1, 256)
    published = matplotlib.colormaps[name](steps)[:, :3] * 255
    assert np.abs(colours(steps, name) - published).max() < 7.5


@pytest.mark.parametrize("name", COLOUR_MAPS)
def test_more_heat_is_always_lighter(name: str) -> None:
    luminance = colours(np.linspace(0, 1, 64), name) @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(luminance) > 0).all()


def test_an_overlay_is_a_blend_of_the_grey_picture_and_the_map() -> None:
    picture, heat = photo(), torch.rand(40, 60, generator=torch.Generator().manual_seed(0))
    grey = np.asarray(picture.convert("L"), dtype=np.float64)[..., None]
    expected = 0.3 * grey + 0.7 * colours(heat.numpy(), "viridis")
    drawn = np.asarray(overlay(picture, heat, "viridis", 0.7), dtype=np.float64)
    assert np.abs(drawn - expected).max() <= 1
    assert np.array_equal(
        np.asarray(overlay(picture, heat, alpha=0.0)), np.asarray(picture.convert("L").convert("RGB"))
    )


def test_gradient_maps_are_not_nearly_black() -> None:
    """A few pixels 50 times as large as the others; what is stored does not change."""
    values = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(0)).square()
    values[:, :2, :4] = 50
    maps = Maps("gradient", values.clone(), (64, 64), torch.zeros(2).long(), ("a", "b"))
    coarse = Maps("gradcam", values.clone(), (128, 128), torch.zeros(2).long(), ("a", "b"))
    assert maps.upsample().mean() < 0.02 and maps.for_display().mean() > 0.3
    assert torch.equal(coarse.for_display(), coarse.upsample()) and torch.equal(maps.values, values)
    fine, rough = (
        StoredMaps(m.method, values.numpy(), m.image_size, np.zeros(2), m.ids) for m in (maps, coarse)
    )
    assert unpack(pack(fine, 1, "")).mean() > 0.3 and unpack(pack(rough, 1, "")).mean() < 0.05
    black = Image.new("RGB", (64, 64))
    laid = np.asarray(maps.overlay([black, black])[0], dtype=float)
    assert laid.mean() > 5 * np.asarray(overlay(black, maps.upsample()[0]), dtype=float).mean()
    sparse = np.zeros((1, 64, 64), np.float32)
    sparse[0, 3, 3] = 1
    assert np.array_equal(brightened(sparse), sparse)


def test_a_map_of_another_size_or_colour_is_refused() -> None:
    with pytest.raises(InputError, match="upsample the map"):
        overlay(photo(), torch.zeros(7, 7))
    with pytest.raises(UnknownNameError, match="viridis"):
        overlay(photo(), torch.zeros(40, 60), "virids")
    with pytest.raises(InputError, match="alpha"):
        overlay(photo(), torch.zeros(40, 60), alpha=2)
    with pytest.raises(InputError, match="at least one tile"):
        sheet([])


def test_every_tile_is_in_the_panel_unchanged() -> None:
    tiles = [Tile(Image.new("RGB", (300, 250), (i * 20, 99, 7)), f"tile {i}", "a note") for i in range(5)]
    made = np.asarray(panel(tiles, columns=3, heading="five", cmap="inferno"))
    for i in range(5):
        assert (made == (i * 20, 99, 7)).all(-1).sum() == 300 * 250
    assert made.shape[1] < 4 * 320  # three columns, not five


def test_small_pictures_grow_in_whole_steps() -> None:
    picture = photo(32, 32)
    made = np.asarray(panel([Tile(picture, "small")]))
    factor = round(panels.SMALLEST_TILE / 32)
    enlarged = np.asarray(picture).repeat(factor, 0).repeat(factor, 1)
    rows, columns = panels.GAP + panels.LINE, panels.GAP
    assert np.array_equal(made[rows : rows + len(enlarged), columns : columns + len(enlarged)], enlarged)


def test_a_wrong_answer_stands_beside_the_class_that_is_explained() -> None:
    named = ["normal", "pneumonia"].__getitem__
    assert panels.explains(1, 1, 1, named) == "explains: pneumonia (true label and prediction)"
    assert panels.explains(1, 1, 0, named) == "explains: pneumonia (true label); predicted: normal"
    assert panels.explains(0, 1, 0, named) == "explains: normal (prediction); true label: pneumonia"
    assert panels.explains(1, None, 0, named) == "explains: pneumonia (a chosen class); predicted: normal"


def test_a_case_study_says_which_class_it_explains() -> None:
    scored = LocaliseResults("last", (), ("normal", "pneumonia"), 0.2, ("insertion", "deletion"),
                             {"a.png": 1}, {"a.png": 1}, {"a.png": 0}, {("a.png", 0): 0.93})  # fmt: skip
    heading = Studio(scored, *[None] * 4)._heading("a.png")  # type: ignore[arg-type]
    assert heading == "a.png: explains: pneumonia (true label); predicted: normal; 93% sure"


def test_a_blank_map_marks_no_pixel_of_a_case_study() -> None:
    scored = LocaliseResults("last", (), (), 0.2, ("insertion", "deletion"))
    values = torch.stack([torch.zeros(5, 5), torch.full((5, 5), 0.7), torch.eye(5)])
    masks = Studio(scored, *[None] * 4)._budget_masks(Maps("m", values, (5, 5), torch.zeros(3)))  # type: ignore[arg-type]
    assert masks.sum((1, 2)).tolist() == [0, 0, 5]


def test_a_long_heading_is_not_cut() -> None:
    tile = Tile(Image.new("RGB", (224, 224)), "map")
    words = "explains: pneumonia (true label); predicted: normal; faithful but off the object"
    long, short = (panel([tile], heading=text) for text in (words, "short"))
    lines = panels._wrapped(words, 224)
    assert " ".join(lines) == words and len(lines) > 2
    assert long.height - short.height == panels.LINE * (len(lines) - 1) and long.width == short.width


def test_text_stays_in_its_place() -> None:
    long = "a method with so many options that its name is wider than the image it stands above"
    made = np.asarray(panel([Tile(Image.new("RGB", (224, 224)), long, long)]))
    assert made.shape[1] == 224 + 2 * panels.GAP
    assert (made[:, -panels.GAP :] == 255).all()  # nothing is written into the margin
    assert (made[panels.GAP : panels.GAP + panels.LINE] != 255).any()  # and something above the picture
    assert panels._fitted(long, 200).endswith("...") and panels._fitted("short", 200) == "short"
