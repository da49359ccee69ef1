"""Scenes with several objects, and codes whose finder was edited: masks and pixels are where they say."""

from __future__ import annotations

import numpy as np
import pytest

from heatproof.errors import InputError
from heatproof.images.codes import EDITS, edit_finders, make_qr, make_scenes

SIZE = 128


def test_objects_of_a_scene_lie_apart_and_repeat_themselves() -> None:
    made = make_scenes(6, SIZE, 3, codes=2, distractors=2)
    both = np.concatenate([made.codes, made.distractors], 1)
    assert (both.sum(1) <= 1).all() and (both.sum((2, 3)) > 400).all()
    longer = make_scenes(8, SIZE, 3, codes=2, distractors=2)
    assert np.array_equal(made.pictures, longer.pictures[:6])
    assert all(len(kinds) == 2 for kinds in made.kinds)
    assert not np.array_equal(make_scenes(1, SIZE, 4).pictures, made.pictures[:1])


def test_the_codes_of_a_scene_can_be_read() -> None:
    cv2 = pytest.importorskip("cv2")
    made = make_scenes(6, 224, 0, codes=2, distractors=0)
    read = 0
    for picture, masks in zip(made.pictures, made.codes, strict=True):
        for mask in masks:
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            reach = 6
            cut = picture[
                max(0, rows[0] - reach) : rows[-1] + reach, max(0, columns[0] - reach) : columns[-1] + reach
            ]
            big = cv2.resize(np.ascontiguousarray(cut), None, fx=4, fy=4, interpolation=cv2.INTER_NEAREST)
            read += bool(cv2.QRCodeDetector().detectAndDecode(big)[0])
    assert read >= 9  # of 12


def test_codes_as_they_were_before_scenes_shared_their_drawing() -> None:
    """The same pictures from the same seed, to the bit: what runs of yesterday were made of."""
    import hashlib

    drawn = make_qr(3, 3, 64, seed=5)
    assert hashlib.sha256(drawn.pictures.tobytes()).hexdigest()[:16] == DIGEST


DIGEST = "83b5d55dd90bbc94"


@pytest.mark.parametrize("kind", EDITS)
def test_only_the_finder_and_its_new_place_change(kind: str) -> None:
    codes = make_qr(8, 0, SIZE, 1)
    edited = edit_finders(codes, kind, 0)
    assert edited.done.sum() >= 4 and np.array_equal(edited.pictures, edit_finders(codes, kind, 0).pictures)
    for i in np.flatnonzero(edited.done):
        changed = (edited.pictures[i] != codes.pictures[i]).any(-1)
        allowed = edited.before[i] | edited.after[i]
        assert changed.any() and not (changed & ~allowed).any()
        assert (codes.masks["finder"][i] & edited.before[i]).sum() > 0
        side = edited.before[i].any(0).sum()
        pattern = codes.pictures[i][edited.before[i]].reshape(-1, side, 3)
        if kind == "remove":
            assert (
                not edited.after[i].any()
                and (np.ptp(edited.pictures[i][edited.before[i]], axis=0) == 0).all()
            )
        else:
            assert np.array_equal(edited.pictures[i][edited.after[i]].reshape(-1, side, 3), pattern)
        if kind == "move":
            plate = codes.spots[i].plate
            assert not edited.after[i][plate].any()
        if kind == "swap":
            assert not (edited.after[i] & codes.masks["finder"][i]).any()
            assert (edited.after[i] & ~codes.masks["box"][i]).sum() == 0


def test_bad_requests_raise_a_clear_error() -> None:
    with pytest.raises(InputError, match="there is no edit 'turn'"):
        edit_finders(make_qr(1, 0, 64), "turn")
    with pytest.raises(InputError, match="does not fit into"):
        make_scenes(1, 40)
    with pytest.raises(InputError, match="a scene has 1 code or more"):
        make_scenes(1, 128, codes=0)


def test_a_symbol_without_three_finders_is_left_alone() -> None:
    codes = make_qr(2, 0, 64, 0, symbol="datamatrix")
    edited = edit_finders(codes, "remove")
    assert not edited.done.any() and np.array_equal(edited.pictures, codes.pictures)
