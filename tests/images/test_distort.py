"""Distortions: severity 0 changes nothing, masks follow the geometry exactly, all from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from heatproof.errors import HeatproofError
from heatproof.images.codes import QRSet, Spot, make_qr
from heatproof.images.distort import DISTORTIONS, SEVERITIES, distort, geometry, homography
from heatproof.metrics.on_parts import structure

pytest.importorskip("segno")

SIDE = 112
GEOMETRIC = ("rotation", "perspective")
FINE = 32  # points per pixel and axis: fewer, and the reference errs more than what it is to judge


@pytest.fixture(scope="module")
def codes() -> QRSet:
    return make_qr(6, 0, SIDE, seed=5, versions=(1, 2, 3))


def rectangles(mask: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Top, left, bottom, right of rectangles that cover a mask without overlapping."""
    left_over, boxes = mask.copy(), []
    while left_over.any():
        top, left = np.argwhere(left_over)[0]
        right = left + int(np.argmin(np.append(left_over[top, left:], False)))
        full = left_over[top:, left:right].all(1)
        bottom = top + int(np.argmin(np.append(full, False)))
        left_over[top:bottom, left:right] = False
        boxes.append((int(top), int(left), bottom, right))
    return boxes


def rendered(spot: Spot, part: str, matrix: np.ndarray) -> np.ndarray:
    """The mask drawn anew: its rectangles at their warped place, pixels that are covered by half or more."""
    covered = np.zeros((SIDE, SIDE))
    for top, left, bottom, right in rectangles(spot.code.parts[part]):
        x = spot.left + spot.scale * np.array([left, right, right, left])
        y = spot.top + spot.scale * np.array([top, top, bottom, bottom])
        u, v, w = matrix @ np.stack([x, y, np.ones(4)])
        covered += coverage(np.stack([u / w, v / w], 1))
    return covered >= 0.5


def coverage(corners: np.ndarray) -> np.ndarray:
    """The share of each pixel inside a convex polygon whose corners, "k 2", go clockwise on the screen."""
    along = np.roll(corners, -1, 0) - corners
    along /= np.linalg.norm(along, axis=1, keepdims=True)

    def depth(points: np.ndarray) -> np.ndarray:
        """Distance to the nearest edge's line, positive inside: "... 2" -> "..."."""
        away = points[..., None, :] - corners
        return (along[:, 0] * away[..., 1] - along[:, 1] * away[..., 0]).min(-1)

    middles = np.stack(np.meshgrid(*[np.arange(SIDE) + 0.5] * 2), -1)  # x, y
    deep = depth(middles)
    share = (deep > 0).astype(float)
    steps = (np.arange(FINE) + 0.5) / FINE - 0.5
    grid = np.stack(np.meshgrid(steps, steps), -1).reshape(-1, 2)
    near = abs(deep) < 0.75  # half a pixel's diagonal, and a little
    share[near] = (depth(middles[near][:, None] + grid) > 0).mean(1)
    return share


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / (a | b).sum())


@pytest.mark.parametrize("kind", GEOMETRIC)
@pytest.mark.parametrize("severity", SEVERITIES[1:])
def test_warped_masks_are_those_of_the_code_drawn_at_its_new_place(
    codes: QRSet, kind: str, severity: float
) -> None:
    _, masks = distort(codes.pictures, kind, severity, seed=1, masks=codes.masks)
    matrices = geometry(kind, severity, (SIDE, SIDE), seed=1, count=6)
    assert masks is not None
    for i in (0, 3):
        for part in masks:
            assert overlap(rendered(codes.spots[i], part, matrices[i]), masks[part][i]) > 0.97


@pytest.mark.parametrize("kind", GEOMETRIC)
def test_the_picture_moves_as_its_masks_do(codes: QRSet, kind: str) -> None:
    """Where the map sends a module's middle, it is as dark as the module (three pixels or larger)."""
    pictures, _ = distort(codes.pictures, kind, 0.5, seed=2)
    matrices = geometry(kind, 0.5, (SIDE, SIDE), seed=2, count=6)
    right = total = 0
    for picture, spot, matrix in zip(pictures, codes.spots, matrices, strict=True):
        if spot.scale < 3:
            continue
        rows, columns = np.indices(spot.shape) + 0.5
        points = np.stack(
            [spot.left + spot.scale * columns, spot.top + spot.scale * rows, np.ones(spot.shape)]
        )
        x, y, w = np.einsum("ij,jkl->ikl", matrix, points)
        values = picture[(y / w).astype(int), (x / w).astype(int)].mean(-1)
        right += ((values < 127) == spot.code.modules).sum()
        total += values.size
    assert total > 800 and right / total > 0.97


@pytest.mark.parametrize("kind", GEOMETRIC)
def test_geometry_loses_no_part(codes: QRSet, kind: str) -> None:
    """The frame's corners stay in the frame, so whatever is in the picture does."""
    for size in ((60, 60), (40, 90), (90, 40)):
        matrices = geometry(kind, 1.0, size, seed=3, count=20)
        corners = np.array([[0, size[1], size[1], 0], [0, 0, size[0], size[0]], [1, 1, 1, 1]])
        x, y, w = np.einsum("nij,jk->ink", matrices, corners)
        assert (x / w > -1e-9).all() and (x / w < size[1] + 1e-9).all()
        assert (y / w > -1e-9).all() and (y / w < size[0] + 1e-9).all()


def test_a_homography_sends_its_points_where_they_should_go() -> None:
    source = np.array([[0, 0], [10, 0], [10, 8], [0, 8]], float)
    target = np.array([[1, 1], [9, 0.5], [8, 7], [0.5, 6]])
    x, y, w = homography(source, target) @ np.vstack([source.T, np.ones(4)])
    assert np.allclose(np.stack([x / w, y / w], 1), target)


@pytest.mark.parametrize("kind", DISTORTIONS)
def test_severity_0_is_the_identity_and_nothing_is_changed_in_place(codes: QRSet, kind: str) -> None:
    before = codes.pictures.copy()
    pictures, masks = distort(codes.pictures, kind, 0, masks=codes.masks)
    assert masks is not None and np.array_equal(pictures, before)
    assert all(np.array_equal(masks[part], codes.masks[part]) for part in masks)
    pictures, masks = distort(codes.pictures, kind, 1, masks=codes.masks)
    assert np.array_equal(codes.pictures, before) and not np.array_equal(pictures, before)
    assert distort(codes.pictures, kind, 1)[1] is None


@pytest.mark.parametrize("kind", DISTORTIONS)
def test_pictures_depart_further_as_severity_grows(codes: QRSet, kind: str) -> None:
    far = [
        np.abs(distort(codes.pictures, kind, s)[0].astype(float) - codes.pictures).mean() for s in SEVERITIES
    ]
    assert far[0] == 0 and far[1] > 0 and far[-1] > far[1]


@pytest.mark.parametrize("kind", DISTORTIONS)
def test_a_distortion_follows_from_seed_index_and_kind_alone(codes: QRSet, kind: str) -> None:
    whole, masks = distort(codes.pictures, kind, 0.7, seed=4, masks=codes.masks)
    again, _ = distort(codes.pictures, kind, 0.7, seed=4)
    assert whole.tobytes() == again.tobytes() and masks is not None
    some = {part: mask[:3] for part, mask in codes.masks.items()}
    part, part_masks = distort(codes.pictures[:3], kind, 0.7, seed=4, masks=some)
    assert np.array_equal(part, whole[:3]) and part_masks is not None
    assert all(np.array_equal(part_masks[p], masks[p][:3]) for p in masks)
    if kind not in ("blur", "jpeg"):  # nothing in these is random
        other, _ = distort(codes.pictures, kind, 0.7, seed=5)
        assert not np.array_equal(other, whole)


def test_only_geometry_touches_the_masks(codes: QRSet) -> None:
    for kind in DISTORTIONS:
        _, masks = distort(codes.pictures, kind, 1.0, masks=codes.masks)
        assert masks is not None
        same = all(np.array_equal(masks[part], codes.masks[part]) for part in masks)
        assert same == (kind not in GEOMETRIC)


def test_masks_of_grey_levels_are_cut_at_a_half(codes: QRSet) -> None:
    soft = {"finder": np.where(codes.masks["finder"], 0.6, 0.4)}
    for severity in (0.0, 0.5):
        _, masks = distort(codes.pictures, "rotation", severity, masks=soft)
        _, sharp = distort(codes.pictures, "rotation", severity, masks={"finder": codes.masks["finder"]})
        assert masks is not None and sharp is not None and np.array_equal(masks["finder"], sharp["finder"])


def test_occlusion_hides_the_share_it_says() -> None:
    white = np.full((8, 100, 100, 3), 255, np.uint8)
    hidden, _ = distort(white, "occlusion", 1.0, seed=0)
    shares = (hidden != 255).any(-1).mean((1, 2))
    assert np.allclose(shares, 0.25, atol=0.01)


def test_oracles_stay_extreme_after_a_warp(codes: QRSet) -> None:
    for kind in GEOMETRIC:
        _, masks = distort(codes.pictures, kind, 1.0, masks=codes.masks)
        assert masks is not None
        parts: list[Any] = [masks[part] for part in ("finder", "timing", "box")]
        oracle = structure(masks["finder"].astype(np.float32), *parts)
        anti = structure(1.0 - masks["box"], *parts)
        assert np.allclose(oracle["fmr"], 1, atol=1e-5) and np.allclose(oracle["bl"], 0, atol=1e-5)
        assert np.allclose(anti["fmr"], 0, atol=1e-5) and np.allclose(anti["bl"], 1, atol=1e-5)


def test_what_cannot_be_distorted_raises_a_clear_error(codes: QRSet) -> None:
    pictures = codes.pictures
    for arguments, message in (
        ((pictures, "rotate", 0.5), "unknown distortion 'rotate'; did you mean 'rotation'"),
        ((pictures, "blur", 1.5), "from 0 .none. to 1; got 1.5"),
        ((pictures, "blur", float("nan")), "got nan"),
        ((pictures, "blur", "strong"), "got 'strong'"),
        ((pictures / 255, "blur", 0.5), "8-bit 'n H W 3'; got float64"),
        ((pictures[0], "blur", 0.5), "8-bit 'n H W 3'"),
        ((pictures, "blur", 0.5, 0, {"finder": codes.masks["finder"][:2]}), "masks of 'finder' must have"),
    ):
        with pytest.raises(HeatproofError, match=message):
            distort(*arguments)


def test_no_pictures_are_no_problem() -> None:
    none = np.empty((0, 8, 8, 3), np.uint8)
    for kind in DISTORTIONS:
        assert distort(none, kind, 0.5)[0].shape == none.shape
