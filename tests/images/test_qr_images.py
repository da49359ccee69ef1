"""QR pictures: real codes, exact masks, negatives that share everything but the code, all from a seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from heatproof.errors import InputError
from heatproof.images import codes as qr
from heatproof.images.codes import BACKGROUNDS, background, finderless, shuffled
from heatproof.images.symbols import ALPHABET, LEVELS, QR, capacity, encode_qr, part_masks
from heatproof.metrics.on_parts import structure

segno = pytest.importorskip("segno")
from segno import consts  # noqa: E402  (only where segno is)

FINDER_TYPES = (consts.TYPE_FINDER_PATTERN_DARK, consts.TYPE_FINDER_PATTERN_LIGHT)
TIMING_TYPES = (consts.TYPE_TIMING_DARK, consts.TYPE_TIMING_LIGHT)
# The 7x7 finder pattern as the standard draws it: a dark ring, a light ring, a dark 3x3 core.
FINDER = np.array([[max(abs(i - 3), abs(j - 3)) != 2 for j in range(7)] for i in range(7)])


@pytest.fixture(scope="module")
def pictures() -> qr.QRSet:
    return qr.make_qr(12, 12, 96, seed=7)


@pytest.mark.parametrize("version", range(1, 11))
def test_part_masks_agree_with_what_segno_calls_the_modules(version: int) -> None:
    code = segno.make("HEATPROOF", version=version, error="L", boost_error=False, micro=False)
    types = np.array([list(row) for row in code.matrix_iter(border=0, verbose=True)])
    n = len(types)
    masks = part_masks(n)
    assert n == QR.shape(version)[0] == 17 + 4 * version
    assert np.array_equal(masks["finder"], np.isin(types, FINDER_TYPES))
    # The definition is row 6 and column 6 minus the finders, so four separator modules belong to it; where
    # an alignment pattern sits on the line (version 7 on), segno calls those modules by its name.
    timing = np.isin(types, TIMING_TYPES)
    extra = masks["timing"] & ~timing
    assert not (timing & ~masks["timing"]).any()
    assert (types[extra] == consts.TYPE_SEPARATOR).sum() == 4
    alignment = (consts.TYPE_ALIGNMENT_PATTERN_DARK, consts.TYPE_ALIGNMENT_PATTERN_LIGHT)
    others = types[extra][types[extra] != consts.TYPE_SEPARATOR]
    assert np.isin(others, alignment).all() and (len(others) > 0) == (version >= 7)
    assert [int(masks[part].sum()) for part in qr.PARTS] == [147, 2 * (n - 14), n * n]


@pytest.mark.parametrize("version", [1, 2, 6, 9, 10, 27])
@pytest.mark.parametrize("level", LEVELS)
def test_capacities_are_where_segno_changes_the_version(version: int, level: str) -> None:
    def smallest(characters: int) -> int:
        return segno.make("A" * characters, error=level, boost_error=False, micro=False, mask=0).version

    most = capacity(version, level)
    assert (smallest(most), smallest(most + 1)) == (version, version + 1)


def test_masks_lie_exactly_on_the_drawn_code(pictures: qr.QRSet) -> None:
    codes = pictures.take(slice(12))
    parts = (codes.masks[part] for part in qr.PARTS)
    for picture, finder, timing, box in zip(codes.pictures, *parts, strict=True):
        rows, columns = np.flatnonzero(box.any(1)), np.flatnonzero(box.any(0))
        side = len(rows)
        assert side == len(columns) and box.sum() == side**2  # a full square
        scale = next(s for s in range(1, side) if finder.sum() == 147 * s**2)
        n = side // scale
        assert timing.sum() == 2 * (n - 14) * scale**2
        dark = picture[box].reshape(side, side, 3)[scale // 2 :: scale, scale // 2 :: scale].sum(-1) < 3 * 127
        for corner in (dark[:7, :7], dark[:7, -7:], dark[-7:, :7]):
            assert np.array_equal(corner, FINDER)
        assert dark[6, 8 : n - 8 : 2].all() and not dark[6, 9 : n - 8 : 2].any()  # timing: dark, light, dark
        inside_finder = picture[finder].reshape(-1, 3)
        assert len(np.unique(inside_finder, axis=0)) == 2  # two colours, no blending at module borders


def test_drawn_codes_are_reported(pictures: qr.QRSet) -> None:
    for picture, spot, box in zip(
        pictures.pictures[:12], pictures.spots, pictures.masks["box"], strict=False
    ):
        assert picture[spot.rows, spot.columns].shape == (spot.scale * spot.shape[0],) * 2 + (3,)
        assert box[spot.rows, spot.columns].all() and box.sum() == (spot.scale * spot.shape[0]) ** 2
        middles = picture[spot.rows, spot.columns][
            spot.scale // 2 :: spot.scale, spot.scale // 2 :: spot.scale
        ]
        assert np.array_equal(middles.sum(-1) < 3 * 127, spot.code.modules)
        ring = picture[spot.top - 1, spot.left - 1 : spot.left + 3]  # the quiet zone is there, and light
        assert (ring.mean(-1) > 127).all() and spot.quiet >= 1
        assert capacity(spot.code.version, spot.code.level) >= len(spot.code.text)
    assert all(spot.code is None for spot in pictures.spots[12:])


def test_there_is_an_outside_to_leak_into(pictures: qr.QRSet) -> None:
    box = pictures.masks["box"][:12]
    assert not box[:, [0, -1]].any() and not box[:, :, [0, -1]].any()
    assert (box.mean((1, 2)) < 0.8).all()


def test_an_oracle_and_an_anti_oracle_get_the_extreme_scores(pictures: qr.QRSet) -> None:
    masks: list[Any] = [pictures.masks[part][:12] for part in qr.PARTS]
    finder, _, box = masks
    oracle, anti = structure(finder.astype(np.float32), *masks), structure(1.0 - box, *masks)
    assert np.allclose(oracle["fmr"], 1, atol=1e-5) and np.allclose(oracle["bl"], 0, atol=1e-5)
    assert np.allclose(anti["fmr"], 0, atol=1e-5) and np.allclose(anti["bl"], 1, atol=1e-5)
    assert (
        (oracle["score"] > anti["score"]).all() and (oracle["dts"] < 1e-6).all() and (anti["dts"] > 0).all()
    )


def test_versions_levels_and_places_vary() -> None:
    made = qr.make_qr(60, 0, 224, seed=0)
    assert {spot.code.version for spot in made.spots} == {1, 2, 3, 4, 5, 6}
    assert {spot.code.level for spot in made.spots} == set("LMQH")
    assert {spot.quiet for spot in made.spots} == {1, 2, 3, 4}
    assert len({(spot.top, spot.left, spot.scale) for spot in made.spots}) > 50
    dataset = qr.make_qr(12, 6, 128, seed=0, versions=(7, 10))
    assert {spot.code.version for spot in dataset.spots[:12]} == {7, 10}


def test_a_finderless_code_has_no_finder_left_but_the_rest_of_a_code() -> None:
    for seed in range(20):
        real = QR.random(np.random.default_rng(seed), 3).modules
        fake = finderless(np.random.default_rng(seed), QR, 3)
        untouched = np.ones_like(real)
        untouched[:8, :8] = untouched[:8, -8:] = untouched[-8:, :8] = False
        assert np.array_equal(real[untouched], fake[untouched])
        corners = [fake[:7, :7], fake[:7, -7:], fake[-7:, :7]]
        assert not any(np.array_equal(corner, FINDER) for corner in corners)


def test_a_shuffled_code_keeps_its_modules_and_loses_their_order() -> None:
    for seed in range(20):
        real = QR.random(np.random.default_rng(seed), 2).modules
        mixed = shuffled(np.random.default_rng(seed), QR, 2)
        assert mixed.sum() == real.sum() and not np.array_equal(mixed, real)
        whole = [mixed[:7, :7], mixed[:7, -7:], mixed[-7:, :7]]
        assert not all(np.array_equal(corner, FINDER) for corner in whole)


def test_negatives_come_in_turn_and_have_no_masks(pictures: qr.QRSet) -> None:
    assert pictures.labels.tolist() == [1] * 12 + [0] * 12
    assert pictures.kinds.tolist() == ["qr"] * 12 + 2 * list(qr.NEGATIVES)
    assert not any(mask[12:].any() for mask in pictures.masks.values())
    assert len({picture.tobytes() for picture in pictures.pictures}) == 24
    kinds = {name: kind(np.random.default_rng(0), QR, 2) for name, kind in qr.NEGATIVES.items()}
    assert all(modules.shape == (25, 25) and 0.05 < modules.mean() < 0.95 for modules in kinds.values())


def test_the_same_seed_makes_the_same_pictures_and_more_do_not_change_the_first(pictures: qr.QRSet) -> None:
    more = qr.make_qr(14, 13, 96, seed=7)
    assert np.array_equal(more.pictures[:12], pictures.pictures[:12])
    assert np.array_equal(more.pictures[14:26], pictures.pictures[12:])
    assert all(np.array_equal(more.masks[p][:12], pictures.masks[p][:12]) for p in qr.PARTS)
    other = qr.make_qr(12, 12, 96, seed=8)
    assert not any(np.array_equal(a, b) for a, b in zip(other.pictures, pictures.pictures, strict=True))


def test_some_of_a_set_keep_what_belongs_to_them(pictures: qr.QRSet) -> None:
    few = pictures.take(np.array([3, 20]))
    assert np.array_equal(few.pictures[1], pictures.pictures[20]) and few.kinds[1] == pictures.kinds[20]
    assert few.spots[0] is pictures.spots[3] and np.array_equal(few.masks["box"][0], pictures.masks["box"][3])


def test_photographs_are_behind_about_half_of_the_pictures(tmp_path: Path) -> None:
    green = np.zeros((50, 80, 3), np.uint8) + np.array([1, 254, 3], np.uint8)
    Image.fromarray(green).save(tmp_path / "green.png")
    given = qr.make_qr(20, 20, 64, seed=0, photos=tmp_path)
    corner = (given.pictures[:, 0, 0] == [1, 254, 3]).all(-1)
    assert 8 < corner.sum() < 32


def test_backgrounds_stay_in_range_and_differ() -> None:
    made = [background(40, 60, np.random.default_rng(seed)) for seed in range(40)]
    assert all(b.shape == (40, 60, 3) and b.min() >= 0 and b.max() <= 255 for b in made)
    assert len({b.tobytes() for b in made}) == 40 and len(BACKGROUNDS) == 6


def test_every_side_from_the_smallest_on_has_room() -> None:
    for pixels in range(32, 72):
        assert qr.make_qr(1, 1, pixels, seed=pixels).masks["box"][0].any()


@pytest.mark.parametrize("size", [32, 61, (48, 100), 224])
def test_any_size_will_do(size: int | tuple[int, int]) -> None:
    made = qr.make_qr(6, 6, size, seed=1)
    height, width = (size, size) if isinstance(size, int) else size
    assert made.pictures.shape == (12, height, width, 3) and made.pictures.dtype == np.uint8
    assert made.masks["finder"][:6].any((1, 2)).all()


def test_what_cannot_be_made_raises_a_clear_error(tmp_path: Path) -> None:
    for wrong, message in (
        (
            lambda: qr.make_qr(1, 1, 20),
            "version 1 of the QR code does not fit into 20x20 pixels; make them at least 27x27",
        ),
        (lambda: qr.make_qr(1, 1, 40, versions=[1, 6]), "version 6 of the QR code does not fit into 40x40"),
        (lambda: qr.make_qr(1, 1, 64, versions=[0]), "there is no version 0 of the QR code"),
        (lambda: qr.make_qr(1, 1, 64, versions=[]), "no version is given"),
        (lambda: qr.make_qr(-1, 1), "0 or more"),
        (lambda: qr.make_qr(1, 1, -5), "1 to 8192 pixels"),
        (lambda: qr.make_qr(1, 1, seed=-1), "from 0 on"),
        (lambda: qr.make_qr(1, 1, photos=tmp_path), "no image in"),
        (lambda: qr.make_qr(1, 1, photos=tmp_path / "nowhere"), "there is no folder"),
        (
            lambda: encode_qr("A" * 26, 1, "L"),
            "26 characters do not fit into version 1 of the QR code, which holds 25",
        ),
        (lambda: encode_qr("lower", 1, "L"), "holds 'e'"),
        (lambda: encode_qr("", 1, "L"), "is empty"),
        (lambda: encode_qr("A", 1, "X"), "levels L, M, Q, H"),
    ):
        with pytest.raises(InputError, match=message):
            wrong()


def test_the_least_size_that_an_error_names_is_enough() -> None:
    assert qr.make_qr(1, 1, 27, versions=[1]).masks["box"][0].any()
    assert set("".join(ALPHABET)) >= set("AZ09 $%*+-./:")


def test_the_package_imports_without_segno() -> None:
    script = (
        "import sys; sys.modules['segno'] = None\n"
        "import heatproof.images.codes as qr\n"
        "from heatproof.errors import MissingExtraError\n"
        "try: qr.make_qr(1, 0, 64)\n"
        "except MissingExtraError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "segno" in run.stdout and "pip install" in run.stdout
