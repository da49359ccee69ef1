"""QR pictures: real codes, exact masks, negatives that share everything but the code, all from a seed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from heatproof.errors import InputError
from heatproof.images import qr

segno = pytest.importorskip("segno")
from segno import consts  # noqa: E402  (only where segno is)

FINDER_TYPES = (consts.TYPE_FINDER_PATTERN_DARK, consts.TYPE_FINDER_PATTERN_LIGHT)
TIMING_TYPES = (consts.TYPE_TIMING_DARK, consts.TYPE_TIMING_LIGHT)
# The 7x7 finder pattern as the standard draws it: a dark ring, a light ring, a dark 3x3 core.
FINDER = np.array([[max(abs(i - 3), abs(j - 3)) != 2 for j in range(7)] for i in range(7)])


@pytest.fixture(scope="module")
def pictures() -> qr.QRSet:
    return qr.make_qr(12, 10, 96, seed=7)


@pytest.mark.parametrize("version", range(1, 7))
def test_part_masks_agree_with_what_segno_calls_the_modules(version: int) -> None:
    code = segno.make("HEATPROOF", version=version, error="L", boost_error=False, micro=False)
    types = np.array([list(row) for row in code.matrix_iter(border=0, verbose=True)])
    masks = qr.part_masks(qr.modules_of(version))
    n = len(types)
    assert n == 17 + 4 * version
    assert np.array_equal(masks["finder"], np.isin(types, FINDER_TYPES))
    # The definition is row 6 and column 6 minus the finders, so four separator modules belong to it.
    timing = np.isin(types, TIMING_TYPES)
    extra = masks["timing"] & ~timing
    assert not (timing & ~masks["timing"]).any() and extra.sum() == 4
    assert (types[extra] == consts.TYPE_SEPARATOR).all()
    counts = [int(masks[part].sum()) for part in qr.PARTS]
    assert counts == [147, 2 * (n - 14), n * n]


@pytest.mark.parametrize("version", range(1, 7))
@pytest.mark.parametrize("level", range(4))
def test_capacities_are_those_of_the_standard(version: int, level: int) -> None:
    most = qr.CAPACITY[version - 1][level]
    smallest = lambda text: segno.make(text, error="LMQH"[level], boost_error=False, micro=False).version  # noqa: E731
    assert smallest("A" * most) == version
    assert smallest("A" * (most + 1)) == version + 1


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


def test_there_is_an_outside_to_leak_into(pictures: qr.QRSet) -> None:
    box = pictures.masks["box"][:12]
    assert not box[:, [0, -1]].any() and not box[:, :, [0, -1]].any()
    assert (box.mean((1, 2)) < 0.8).all()


def test_codes_can_be_read_by_a_scanner() -> None:
    cv2 = pytest.importorskip("cv2")
    random = np.random.default_rng(3)
    for version in range(1, 7):
        text = "".join(random.choice(qr.ALPHABET[:36], qr.CAPACITY[version - 1][1]))
        modules = qr.encode(text, version, "M", mask=int(random.integers(8)))
        page = np.pad(np.where(qr.enlarge(modules, 6), 0, 255).astype(np.uint8), 24, constant_values=255)
        read, *_ = cv2.QRCodeDetector().detectAndDecode(page)
        assert read == text


def test_versions_and_levels_vary() -> None:
    sizes = set()
    for i in range(60):
        random = np.random.default_rng(i)
        sizes.add(len(qr.code_modules(random, 1 + i % 6)))
    assert sizes == {21, 25, 29, 33, 37, 41}
    sides = qr.make_qr(40, 0, 224, seed=0).masks["box"].any(1).sum(1)
    assert len(set(sides.tolist())) > 15


def test_a_finderless_code_has_no_finder_left_but_the_rest_of_a_code() -> None:
    for seed in range(20):
        real = qr.code_modules(np.random.default_rng(seed), 3)
        fake = qr.finderless(np.random.default_rng(seed), 3)
        untouched = np.ones_like(real)
        untouched[:8, :8] = untouched[:8, -8:] = untouched[-8:, :8] = False
        assert np.array_equal(real[untouched], fake[untouched])
        corners = [fake[:7, :7], fake[:7, -7:], fake[-7:, :7]]
        assert not any(np.array_equal(corner, FINDER) for corner in corners)


def test_negatives_come_in_turn_and_have_no_masks(pictures: qr.QRSet) -> None:
    assert pictures.labels.tolist() == [1] * 12 + [0] * 10
    assert not any(mask[12:].any() for mask in pictures.masks.values())
    assert len({picture.tobytes() for picture in pictures.pictures}) == 22
    kinds = {name: kind(np.random.default_rng(0), 2) for name, kind in qr.NEGATIVES.items()}
    assert all(modules.shape == (25, 25) and 0.05 < modules.mean() < 0.95 for modules in kinds.values())


def test_the_same_seed_makes_the_same_pictures_and_more_do_not_change_the_first(pictures: qr.QRSet) -> None:
    more = qr.make_qr(14, 11, 96, seed=7)
    assert np.array_equal(more.pictures[:12], pictures.pictures[:12])
    assert np.array_equal(more.pictures[14:24], pictures.pictures[12:])
    assert all(np.array_equal(more.masks[p][:12], pictures.masks[p][:12]) for p in qr.PARTS)
    other = qr.make_qr(12, 10, 96, seed=8)
    assert not any(np.array_equal(a, b) for a, b in zip(other.pictures, pictures.pictures, strict=True))


def test_every_side_from_the_smallest_on_has_room() -> None:
    for side in range(32, 72):
        assert qr.make_qr(1, 1, side, seed=side).masks["box"][0].any()


@pytest.mark.parametrize("size", [32, 61, (48, 100), 224])
def test_any_size_will_do(size: int | tuple[int, int]) -> None:
    made = qr.make_qr(6, 5, size, seed=1)
    height, width = (size, size) if isinstance(size, int) else size
    assert made.pictures.shape == (11, height, width, 3) and made.pictures.dtype == np.uint8
    assert made.masks["finder"][:6].any((1, 2)).all()


def test_what_cannot_be_made_is_one_sentence() -> None:
    with pytest.raises(InputError, match="does not fit into 20x20 pixels"):
        qr.make_qr(1, 1, 20)
    with pytest.raises(InputError, match="0 or more"):
        qr.make_qr(-1, 1)


def test_the_package_imports_without_segno() -> None:
    script = (
        "import sys; sys.modules['segno'] = None\n"
        "import heatproof.images.qr as qr\n"
        "from heatproof.errors import MissingExtraError\n"
        "try: qr.make_qr(1, 0, 64)\n"
        "except MissingExtraError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "segno" in run.stdout and "pip install" in run.stdout
