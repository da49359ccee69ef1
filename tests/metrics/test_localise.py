"""Budgeted localisation: golden cases, a slow twin, properties, the thesis's tables, bad boxes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

import heatproof as hp
from heatproof.errors import InputError
from heatproof.metrics.kit import CONSTANT
from heatproof.metrics.localisation import (
    BUDGETS,
    budget_masks,
    kept_pixels,
    localise,
    localise_curve,
    macro_mean,
    name_losses,
)
from heatproof.types import Maps

SETTINGS = settings(max_examples=40, deadline=None)
Box = tuple[int, int, int, int]


def test_budget_of_a_constant_map(papers: dict[str, Any]) -> None:
    golden = papers["synthetic"]["topk_constant_224"]
    mask = budget_masks(torch.full((1, 224, 224), 0.7), 0.2)[0]
    assert golden == {"K": int(mask.sum()), "stable_ties": "rows 0-43 full, row 44 first 179 px"}
    assert mask[:44].all() and mask[44, :179].all() and not mask[44, 179:].any() and not mask[45:].any()


FEW_LEVELS = arrays(np.float32, (2, 7, 9), elements=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]))
ANY_MAP = arrays(np.float32, (2, 7, 9), elements=st.floats(-5, 5, width=32))


@SETTINGS
@given(FEW_LEVELS | ANY_MAP, st.floats(0.02, 1))
def test_budget_keeps_the_largest_pixels_in_stable_order_and_none_at_the_minimum(
    maps: np.ndarray, budget: float
) -> None:
    count = kept_pixels(budget, (7, 9))
    assert abs(count - budget * 63) < 1
    masks = budget_masks(maps, budget).flatten(1).numpy()
    for row, values in zip(masks, maps, strict=True):
        pixels = np.maximum(values, 0).ravel()
        order = np.argsort(-pixels, kind="stable")[:count]
        lowest = pixels.min() if pixels.max() > pixels.min() else 0
        assert set(np.flatnonzero(row)) == {place for place in order if pixels[place] > lowest}


def test_budget_is_counted_as_by_hand() -> None:
    assert kept_pixels(0.2, (224, 224)) == 10_035
    assert [kept_pixels(p / 100, (10, 10)) for p in range(1, 101)] == list(range(1, 101))
    assert kept_pixels(1 / 3, (3, 3)) == 3 and kept_pixels(0.999, (10, 10)) == 99


def twin(values: np.ndarray, boxes: list[Box], budget: float) -> dict[str, float]:
    """The definitions pixel by pixel, in Python sets."""
    height, width = values.shape
    values = np.maximum(values.astype(np.float64), 0)
    count = kept_pixels(budget, (height, width))
    pixels = [(y, x) for y in range(height) for x in range(width)]
    largest = sorted(pixels, key=lambda p: -values[p])[:count]
    selected = {p for p in largest if values[p] > values.min()}

    def inside(box: Box) -> set[tuple[int, int]]:
        x0, y0, x1, y1 = box
        return {(y, x) for y, x in pixels if x0 <= x <= x1 and y0 <= y <= y1}

    truth = set().union(*(inside(box) for box in boxes))
    ys, xs = zip(*selected, strict=True) if selected else ((math.nan,), (math.nan,))
    tight = inside((min(xs), min(ys), max(xs), max(ys)))
    ious = [len(tight & inside(box)) / len(tight | inside(box)) for box in boxes]
    peak = next(p for p in pixels if values[p] == values.max())
    positive = sum(values[p] > values.min() for p in pixels)
    return {
        "mask_iou": len(selected & truth) / len(selected | truth) if selected else math.nan,
        "box_iou": max(ious) if selected else math.nan,
        "inside": len(selected & truth) / len(selected) if selected else math.nan,
        "pointing": float(peak in truth and positive > 0),
        "reachable": min(len(truth), count) / max(len(truth), count),
        "filled": max(0, count - positive) / count,
    }


@st.composite
def a_box(draw: st.DrawFn, height: int = 7, width: int = 9) -> Box:
    x0, y0 = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    return x0, y0, draw(st.integers(x0, width - 1)), draw(st.integers(y0, height - 1))


BOXES = st.lists(st.lists(a_box(), min_size=1, max_size=3), min_size=2, max_size=2)


@SETTINGS
@given(FEW_LEVELS | ANY_MAP, BOXES, st.sampled_from([0.05, 0.2, 0.5, 1.0]))
def test_equals_the_slow_twin(maps: np.ndarray, boxes: list[list[Box]], budget: float) -> None:
    scores = localise(maps, boxes, budget=budget)
    for i in range(2):
        expected = twin(maps[i], boxes[i], budget)
        actual = {name: scores[name][i].item() for name in expected}
        assert actual == pytest.approx(expected, abs=1e-6, nan_ok=True)
    spent = scores["filled"] == 0
    assert (scores["mask_iou"] <= scores["reachable"] + 1e-6)[spent].all()
    assert all((((score >= 0) & (score <= 1)) | score.isnan()).all() for score in scores.values())


@SETTINGS
@given(
    arrays(np.int64, (3, 7, 9), elements=st.integers(0, 1000)),
    st.lists(a_box(), min_size=3, max_size=3),
    st.floats(1e-3, 1e3),
    st.permutations(range(3)),
)
def test_order_batch_and_scale_do_not_matter(
    values: np.ndarray, boxes: list[Box], factor: float, order: list[int]
) -> None:
    maps = values.astype(np.float32)
    scores = localise(maps, boxes)
    shuffled = localise(maps[order], [boxes[i] for i in order])
    scaled = localise(maps * np.float32(factor), torch.tensor(boxes))
    single = [localise(maps[i : i + 1], boxes[i : i + 1]) for i in range(3)]
    for name, score in scores.items():
        for other in (shuffled[name], scaled[name], torch.cat([s[name] for s in single])):
            expected = score[order] if other is shuffled[name] else score
            torch.testing.assert_close(other, expected, rtol=0, atol=0, equal_nan=True)


def test_curve_is_localise_at_every_budget() -> None:
    maps = Maps(
        "m", torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(0)), (56, 42), torch.zeros(3)
    )
    boxes = [[(3, 4, 20, 30)], [(0, 0, 41, 55)], [(10, 10, 12, 12), (30, 40, 41, 55)]]
    curve = localise_curve(maps, boxes)
    assert pytest.approx([k / 100 for k in range(5, 51, 5)]) == BUDGETS
    for k, budget in enumerate(BUDGETS):
        single = localise(maps, boxes, budget=budget)
        assert all(torch.equal(values[:, k], single[name]) for name, values in curve.items())
    assert curve["mask_iou"].shape == (3, 10)


def test_a_perfect_map_scores_one_and_reaches_the_cap() -> None:
    maps = torch.zeros(1, 20, 20)
    maps[0, 5:15, 2:10] = 1  # 80 pixels, exactly the budget
    scores = localise(maps, [(2, 5, 9, 14)], budget=0.2)
    assert {k: v.item() for k, v in scores.items() if k != "filled"} == dict.fromkeys(
        ("mask_iou", "box_iou", "inside", "reachable", "pointing"), 1.0
    )
    assert scores["filled"] == 0
    half = localise(maps, [(2, 5, 9, 14)], budget=0.4)
    assert half["mask_iou"] == half["inside"] == 1  # of the 80 pixels that stand out
    assert half["reachable"] == 0.5 and half["filled"] == 0.5


@pytest.mark.parametrize("rows", [(0, 1), (8, 9)], ids=["object on top", "object below"])
def test_a_blank_map_is_a_miss_and_has_no_overlap(rows: tuple[int, int]) -> None:
    maps = torch.stack([torch.zeros(10, 10), torch.full((10, 10), 3.0), -torch.rand(10, 10)])
    boxes = [(0, rows[0], 9, rows[1])] * 3
    scores = localise(maps, boxes)
    for name in ("mask_iou", "box_iou", "inside"):
        assert scores[name].isnan().all() and scores.reasons(name) == [CONSTANT] * 3
    for name, value in {"pointing": 0, "filled": 1, "reachable": 1}.items():
        assert scores[name].tolist() == [value] * 3 and scores.reasons(name) == [""] * 3
    curve = localise_curve(maps, boxes)
    assert curve["mask_iou"].isnan().all() and curve.reasons("inside") == [CONSTANT] * 3
    assert not budget_masks(maps)[[0, 2]].any()


def test_blank_maps_are_left_out_of_means_and_keep_their_reason_in_a_run() -> None:
    maps = torch.zeros(2, 10, 10)
    maps[1, :2] = 1
    result = name_losses(localise(maps, [(0, 0, 9, 1)] * 2), [(), ()])
    assert result.reasons("inside") == [CONSTANT, ""]
    assert macro_mean(result["inside"], [0, 0]).value == 1


def test_a_budget_is_not_filled_up_with_zeros() -> None:
    """One hot pixel beside an object of 40 x 20 pixels, which the first zeros in row-major order cover."""
    maps = torch.zeros(2, 40, 40)
    maps[0, 39, 39] = maps[1, 4, 4] = 1
    scores = localise(maps + 0.25, [(0, 0, 39, 7)] * 2)  # a constant added to a map changes nothing
    assert scores["mask_iou"].tolist() == pytest.approx([0, 1 / 320])
    assert scores["inside"].tolist() == [0, 1] and scores["box_iou"].tolist() == pytest.approx([0, 1 / 320])
    assert scores["filled"].tolist() == pytest.approx([319 / 320] * 2)
    assert budget_masks(maps).sum((1, 2)).tolist() == [1, 1]


def test_boxes_come_in_many_forms() -> None:
    maps = torch.rand(2, 10, 12)
    forms: list[Any] = [
        [(1, 2, 6, 7), (0, 0, 11, 9)],
        [[(1, 2, 6, 7)], [(0, 0, 11, 9)]],
        np.array([[1, 2, 6, 7], [0, 0, 11, 9]]),
        torch.tensor([[[1.0, 2, 6, 7]], [[0, 0, 11, 9]]]),
        [
            (0.2, 1.5, 6.9, 7.0),
            (0, 0, 12, 10),
        ],  # fractions keep the pixels between; x1 = W is the last column
    ]
    expected = localise(maps, forms[0])
    for form in forms[1:]:
        assert all(torch.equal(score, expected[name]) for name, score in localise(maps, form).items())


def test_masks_alone_and_beside_boxes() -> None:
    maps = torch.rand(2, 12, 12)
    masks = torch.zeros(2, 12, 12, dtype=torch.bool)
    masks[0, 2:6, 3:9] = True
    boxes = [(3, 2, 8, 5), (0, 0, 4, 4)]
    alone, boxed = localise(maps, masks=masks), localise(maps, boxes)
    assert all(torch.equal(alone[name][0], boxed[name][0]) for name in boxed)  # the mask is its own box
    assert torch.isnan(alone["mask_iou"][1]) and torch.isnan(alone["pointing"][1])
    assert alone.reasons("pointing") == ["", "the image has no box and no mask pixel"]
    masks[0, 3, 4:8] = False
    both = localise(maps, boxes, masks)
    assert torch.equal(both["mask_iou"][0], localise(maps, masks=masks)["mask_iou"][0])
    assert torch.equal(both["inside"], boxed["inside"]) and torch.equal(both["box_iou"], boxed["box_iou"])
    assert torch.equal(both["mask_iou"][1], boxed["mask_iou"][1])  # no mask there: the box


def test_masks_of_another_size_and_images_without_a_box() -> None:
    maps = torch.rand(2, 12, 12)
    small = torch.zeros(6, 6)
    small[1:4, 2:5] = 1
    large = small.repeat_interleave(2, 0).repeat_interleave(2, 1)
    expected = localise(maps, masks=large)
    assert all(torch.equal(score, expected[name]) for name, score in localise(maps, masks=small).items())
    scores = localise(maps, [[], [(4, 2, 9, 7)]])
    assert torch.isnan(scores["box_iou"]).tolist() == [True, False]
    assert scores.reasons("box_iou")[0] and not scores.reasons("filled")[0]
    rescued = localise(maps, [[], [(4, 2, 9, 7)]], masks=large)
    assert all(torch.equal(rescued[name][0], expected[name][0]) for name in expected)


def test_a_box_of_one_pixel_is_one_pixel() -> None:
    maps = torch.zeros(2, 10, 10)
    maps[0, 4, 3] = maps[1, 0, 0] = 1
    scores = localise(maps, [(3, 4, 3, 4), (3, 4, 3, 4)], budget=0.01)
    for name in ("mask_iou", "box_iou", "inside", "pointing"):
        assert scores[name].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("boxes", "sentence"),
    [
        ([(0, 0, 13, 5)], "outside its 12x10 image"),
        ([(-1, 0, 5, 5)], "outside its 12x10 image"),
        ([(0, 0, 5, 11)], "order x0, y0, x1, y1"),
        ([(6, 2, 3, 8)], "runs backwards"),
        ([(2, 6, 8, 3)], "not x, y, width, height"),
        ([(12, 4, 12, 8)], "holds no pixel"),
        ([(4.2, 4.0, 4.8, 8.0)], "holds no pixel"),
        ([(1, math.nan, 3, 4)], "four finite numbers"),
        ([(1, 2, 3)], r"boxes are \(x0, y0, x1, y1\)"),
        ([[(1, 2, 3, 4), (1, 2, 3)]], r"boxes are \(x0, y0, x1, y1\)"),
        ([(1, 2, 3, 4), (1, 2, 3, 4)], "maps has 1 entries but boxes has 2"),
        (None, "needs boxes or masks"),
    ],
)
def test_bad_boxes_raise_a_clear_error(boxes: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        localise(torch.rand(1, 10, 12), boxes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        (-0.2, "above 0 and at most 1; got -0.2"),
        (0, "above 0"),
        (20, "write 0.2 for 20 %"),
        (math.nan, "above 0"),
        (1e-4, "keeps no pixel of a 10x12 map"),
    ],
)
def test_bad_budgets_raise_a_clear_error(budget: float, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        localise(torch.rand(1, 10, 12), [(0, 0, 5, 5)], budget=budget)
    with pytest.raises(InputError, match=sentence):
        localise_curve(torch.rand(1, 10, 12), [(0, 0, 5, 5)], budgets=[0.2, budget])


def test_bad_masks_and_maps() -> None:
    with pytest.raises(InputError, match="masks must be one mask"):
        localise(torch.rand(2, 8, 8), masks=torch.ones(3, 8, 8))
    with pytest.raises(InputError, match="NaN or infinite"):
        localise(torch.full((1, 8, 8), torch.nan), [(0, 0, 4, 4)])


def test_empty_batch() -> None:
    assert all(score.shape == (0,) for score in localise(torch.zeros(0, 8, 8), []).values())


def test_thesis_class_means(papers: dict[str, Any]) -> None:
    published = (0.5922, 0.5532, 0.3751, 0.2881, 0.9728, 0.8591, 0.7934, 0.1610, 0.2097, 0.6369, 0.5957)
    thesis = papers["thesis"]
    rows = {c: (n, [*thesis["t2"][c][2], *thesis["t3"][c][2]]) for c, (_, n, _) in thesis["t2"].items()}
    images = [c for c, (n, _) in rows.items() for _ in range(n)]  # every image of a class at its class's mean
    assert len(rows) == 43 and len(images) == 1122
    macro, micro = [], []
    for column in range(11):
        values = np.array([rows[c][1][column] for c in images])
        macro.append(macro_mean(values, images).value)
        micro.append(values.mean())
    assert [round(value, 4) for value in macro] == list(published)
    assert not any(round(value, 4) == p for value, p in zip(micro, published, strict=True))


def test_thesis_recall_and_pointing_are_hits_over_images(papers: dict[str, Any]) -> None:
    columns = {"recall": ("t3", 0), "pointing G": ("t2", 4), "pointing L": ("t2", 5)}
    odd = []
    for name, (table, column) in columns.items():
        hits, classes, mean = [], [], []
        for c, (_, n, values) in papers["thesis"][table].items():
            inside = round(values[column] * n)
            hits += [True] * inside + [False] * (n - inside)
            classes += [c] * n
            mean.append(values[column])
        score = macro_mean(hits, classes)
        for (c, recalled), published in zip(score.classes.items(), mean, strict=True):
            if round(recalled, 4) != published:
                odd.append((name, c, published))
    assert odd == [("pointing L", "784", 0.7778)]  # the screwdriver: 7 of 9, though the class has 10 images


def test_macro_mean_skips_and_counts_the_undefined() -> None:
    score = macro_mean(torch.tensor([1.0, math.nan, 0.0, math.nan]), torch.tensor([3, 3, 5, 8]))
    assert score.value == 0.5 and score.undefined == 2
    assert score.n == {3: 1, 5: 1, 8: 0} and math.isnan(score.classes[8])
    assert math.isnan(macro_mean([], []).value)
    with pytest.raises(InputError, match="classes has 1 entries"):
        macro_mean([1.0, 2.0], ["a"])


def test_real_boxes_are_inside_their_images(real_data: Any) -> None:
    """The convention is the one of the ImageNet boxes: indices from 0, both corners inside."""
    lines = (real_data / "imagenet" / "boxes.csv").read_text().splitlines()[1:]
    for line in lines[::60]:
        width, height, *box = (int(v) for v in line.split(",")[-6:])
        scores = localise(torch.ones(1, height, width), [box])
        area = (box[2] - box[0] + 1) * (box[3] - box[1] + 1)
        count = kept_pixels(0.2, (height, width))
        assert scores["reachable"].item() == pytest.approx(min(area, count) / max(area, count), abs=1e-6)


def test_stored_noise_points_anywhere() -> None:
    """Equal maxima, which half precision makes of uniform noise, would move its peak to the top rows."""
    images = torch.randn(60, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    noise = (
        hp.explain(
            nn.Sequential(nn.Conv2d(3, 2, 32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            images,
            "random",
            targets=0,
        )["random"]
        .values.half()
        .float()
    )
    boxes = [(0, 0, 223, 111), (0, 112, 223, 223)]
    top, bottom = (float(localise(noise, [[box]] * 60)["pointing"].mean()) for box in boxes)
    assert 0.3 < top < 0.7 and top + bottom == pytest.approx(1)
    assert ((noise == noise.amax((1, 2), keepdim=True)).sum((1, 2)) == 1).all()
