"""The transforms against Pillow, their inverses against themselves, and what is drawn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from heatproof.errors import HeatproofError
from heatproof.images.transforms import TRANSFORMS, draw

SIZE = (40, 52)  # not square, so that rows and columns cannot be mixed up
PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "brightness": lambda p, m: ImageEnhance.Brightness(p).enhance(1 + m),
    "colour": lambda p, m: ImageEnhance.Color(p).enhance(1 + m),
    "contrast": lambda p, m: ImageEnhance.Contrast(p).enhance(1 + m),
    "sharpness": lambda p, m: ImageEnhance.Sharpness(p).enhance(1 + m),
    "autocontrast": lambda p, m: ImageOps.autocontrast(p),
    "equalize": lambda p, m: ImageOps.equalize(p),
    "blur": lambda p, m: p.filter(ImageFilter.BLUR),
    "smooth": lambda p, m: p.filter(ImageFilter.SMOOTH),
    "flip-x": lambda p, m: ImageOps.mirror(p),
    "flip-y": lambda p, m: ImageOps.flip(p),
}


def pictures(channels: int = 3, n: int = 8) -> Tensor:
    """Noise, dim noise, ramps, flat patches and an all-grey picture: every table and border case."""
    rng = np.random.default_rng(channels)
    noise = rng.integers(0, 256, (n, channels, *SIZE))
    noise[1] = noise[1] // 5 + 90
    noise[2] = np.add.outer(np.arange(SIZE[0]) * 3, np.arange(SIZE[1]) * 2) % 256
    noise[3] = np.where(noise[3] > 128, 200, 31)
    noise[4] = 77
    noise[5, 0] = 12
    noise[6] = noise[6] * np.linspace(0, 1, SIZE[1]) ** 2
    return torch.from_numpy(noise.astype(np.uint8))


def as_pillow(picture: Tensor) -> Image.Image:
    pixels = picture.numpy()
    return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))


def from_pillow(picture: Image.Image) -> Tensor:
    pixels = np.array(picture)
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", PILLOW)
def test_equals_pillow(name: str, channels: int) -> None:
    transform, given = TRANSFORMS[name], pictures(channels)
    for start in range(0, len(transform.magnitudes), 3):
        chosen = np.resize(transform.magnitudes[start:], len(given))  # another one for each picture
        ours = transform.apply(given, torch.from_numpy(chosen))
        theirs = torch.stack(
            [from_pillow(PILLOW[name](as_pillow(p), m)) for p, m in zip(given, chosen, strict=True)]
        )
        assert ours.dtype == torch.uint8
        difference = (ours.int() - theirs.int()).abs()
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 1e-3


@pytest.mark.parametrize("angle", [-135.0, -58.5, 4.5, 90.0, 121.5])
def test_rotation_turns_as_pillow_does(angle: float) -> None:
    ramp = pictures()[2:3] // 2
    ours = TRANSFORMS["rotate"].apply(ramp, torch.tensor([angle]))[0]
    theirs = from_pillow(as_pillow(ramp[0]).rotate(angle, Image.Resampling.BILINEAR))
    inside = TRANSFORMS["rotate"].transport(torch.ones(1, *SIZE), torch.tensor([angle]))[0] > 0.999
    assert inside.float().mean() > 0.4
    # Pillow drops fractions and takes its border from inside: one grey level, away from the border.
    difference = (ours.int() - theirs.int()).abs()[:, inside]
    assert difference.float().quantile(0.98) <= 1


@pytest.mark.parametrize("name", ["flip-x", "flip-y", "translate-x", "translate-y"])
def test_flips_and_translations_come_back_bit_for_bit(name: str) -> None:
    transform = TRANSFORMS[name]
    magnitudes = torch.from_numpy(transform.magnitudes)
    maps = torch.rand(len(magnitudes), *SIZE, generator=torch.Generator().manual_seed(0))
    back = transform.inverse_maps(transform.transport(maps, magnitudes), magnitudes)
    valid = transform.valid(SIZE, magnitudes)
    if valid is None:
        assert torch.equal(back, maps)
        return
    assert torch.equal(back[valid], maps[valid])
    assert not torch.equal(back, maps) and 0.5 < valid.float().mean() < 1
    moved = transform.transport(maps, magnitudes)
    assert not any(torch.equal(after, before) for after, before in zip(moved, maps, strict=True))


def test_translation_in_pixels() -> None:
    pixels = torch.arange(224.0).expand(3, 224, 224)
    moved = TRANSFORMS["translate-x"].transport(pixels, torch.tensor([32.0, -32.0, 0.1]))
    assert moved[0, 0, 32:].equal(pixels[0, 0, :-32]) and moved[0, 0, :32].eq(0).all()
    assert moved[1, 0, :-32].equal(pixels[1, 0, 32:])
    assert moved[2, 0, 1:].equal(pixels[2, 0, :-1])  # never no change at all
    valid = TRANSFORMS["translate-x"].valid((224, 224), torch.tensor([32.0]))
    assert valid is not None
    assert valid[0, 100].nonzero().max() == 223 - 32 - 2  # lost on the right, and eroded by two pixels


def test_a_smooth_map_that_was_rotated_comes_back() -> None:
    size = (224, 224)
    y, x = np.mgrid[-1 : 1 : size[0] * 1j, -1 : 1 : size[1] * 1j]
    smooth = np.stack(
        [np.exp(-2 * ((x - 0.3) ** 2 + y**2)), 0.5 + 0.5 * np.sin(3 * x + y), np.cos(4 * y * x)]
    )
    transform = TRANSFORMS["rotate"]
    for map_ in torch.from_numpy(smooth).float():
        magnitudes = torch.from_numpy(transform.magnitudes[::4])
        maps = map_.expand(len(magnitudes), *size)
        carried = transform.transport(maps, magnitudes)
        back = transform.inverse_maps(carried, magnitudes)
        valid = transform.valid(size, magnitudes)
        assert valid is not None and valid.flatten(1).float().mean(1).min() > 0.6
        assert (back - maps)[valid].abs().max() < 1e-2
        assert (carried - maps)[valid].abs().max() > 0.1


def test_validity_is_the_eroded_round_trip() -> None:
    """Slow twin: a pixel counts where all of its 5x5 neighbours survived the frame twice."""
    transform, magnitudes = TRANSFORMS["rotate"], torch.tensor([40.5, -117.0])
    ones = torch.ones(2, *SIZE)
    back = transform.inverse_maps(transform.transport(ones, magnitudes), magnitudes).numpy() > 0.999
    valid = transform.valid(SIZE, magnitudes)
    assert valid is not None
    for k, i, j in np.ndindex(*valid.shape):
        assert bool(valid[k, i, j]) == back[k, max(0, i - 2) : i + 3, max(0, j - 2) : j + 3].all()


def test_photometric_maps_stay() -> None:
    maps = torch.rand(2, 6, 6)
    assert TRANSFORMS["contrast"].inverse_maps(maps, torch.ones(2)) is maps
    assert TRANSFORMS["blur"].valid((6, 6), torch.zeros(2)) is None


def test_forty_eight_variants_per_image() -> None:
    drawn = draw(0, ["a", "b", "c"])
    assert drawn.magnitudes.shape == (3, 48)
    assert [run.end - run.first for run in drawn.runs()] == [6, 6, 6, 1, 1, 6, 6, 6, 6, 1, 1, 1, 1]
    for run in drawn.runs():
        rows = drawn.magnitudes[:, run.first : run.end]
        assert np.isin(rows, run.transform.magnitudes).all()
        assert all(len(set(row)) == len(row) for row in rows)
        assert (np.abs(rows) > 0).all() == run.transform.signed
    rotations = TRANSFORMS["rotate"].magnitudes
    assert len(rotations) == 60 and rotations.min() == -135 and np.allclose(np.diff(rotations)[:29], 4.5)


def test_draws_follow_from_seed_and_id_alone() -> None:
    both, second = draw(3, ["a", "b"]), draw(3, ["b"])
    assert np.array_equal(both.magnitudes[1:], second.magnitudes)
    assert not np.array_equal(both.magnitudes[0], both.magnitudes[1])
    assert not np.array_equal(draw(4, ["b"]).magnitudes, second.magnitudes)
    more = draw(3, ["b"], draws=9, names=["rotate"]).magnitudes
    first = next(run for run in second.runs() if run.transform.name == "rotate").first
    assert np.array_equal(more[0, :6], second.magnitudes[0, first : first + 6])


def test_what_cannot_be_transformed_raises_a_clear_error() -> None:
    with pytest.raises(HeatproofError, match="8-bit images"):
        TRANSFORMS["rotate"].apply(torch.rand(1, 3, 8, 8), torch.zeros(1))
    with pytest.raises(HeatproofError, match="one magnitude per image"):
        TRANSFORMS["rotate"].apply(pictures(), torch.zeros(3))
    with pytest.raises(HeatproofError, match="unknown transform 'shear'"):
        draw(0, ["a"], names=["shear"])
    with pytest.raises(HeatproofError, match="1 to 60"):
        draw(0, ["a"], draws=61)
