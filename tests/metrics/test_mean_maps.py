"""DoM against its slow twin, its properties, and in a run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import heatproof as hp
from heatproof.errors import InputError
from heatproof.metrics.cscores import dom
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from heatproof.types import Maps
from tiny_study import make_study, write_study

SETTINGS = settings(max_examples=40, deadline=None)
VALUES = arrays(np.float32, (6, 3, 4), elements=st.floats(-1, 1, width=32))
LABELS = st.lists(st.integers(-1, 2), min_size=6, max_size=6)


def scaled(map_: np.ndarray) -> np.ndarray:
    positive = np.maximum(map_.astype(np.float64), 0)
    span = positive.max() - positive.min()
    return (positive - positive.min()) / span if span > 0 else np.zeros_like(positive)


def slow(first: np.ndarray, second: np.ndarray, labels: list[int]) -> tuple[float, dict[int, float]]:
    """As the page writes it, picture by picture and pixel by pixel."""
    classes, total, n = {}, 0.0, 0
    for label in sorted({value for value in labels if value >= 0}):
        rows = [i for i, value in enumerate(labels) if value == label]
        if not all(any(scaled(maps[row]).any() for row in rows) for maps in (first, second)):
            classes[label] = math.nan
            continue
        gap = 0.0
        for i in range(first.shape[1]):
            for j in range(first.shape[2]):
                means = [sum(scaled(maps[row])[i, j] for row in rows) / len(rows) for maps in (first, second)]
                gap += abs(means[0] - means[1])
        classes[label] = gap / first[0].size
        total, n = total + len(rows) * classes[label], n + len(rows)
    return (total / n if n else math.nan), classes


@SETTINGS
@given(VALUES, VALUES, LABELS)
def test_equal_to_its_slow_twin(first: np.ndarray, second: np.ndarray, labels: list[int]) -> None:
    result = dom(first, second, labels)
    value, classes = slow(first, second, labels)
    assert result.value == pytest.approx(value, abs=1e-6, nan_ok=True)
    assert dict(result.classes) == pytest.approx(classes, abs=1e-6, nan_ok=True)
    blank = {label for label, gap in classes.items() if math.isnan(gap)}
    assert result.n == sum(label >= 0 and label not in blank for label in labels)
    assert bool(result.reason) == (math.isnan(value) or bool(blank))


@SETTINGS
@given(VALUES, VALUES, VALUES, LABELS, st.permutations(range(6)))
def test_it_is_a_distance(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, labels: list[int], order: list[int]
) -> None:
    if max(labels) < 0:
        return
    if any(dom(x, y, labels).reason for x, y in ((a, b), (b, c))):  # a class of blank maps
        return
    ab, ba, bc, ac = (dom(x, y, labels).value for x, y in ((a, b), (b, a), (b, c), (a, c)))
    assert ab == pytest.approx(ba, abs=1e-9) and 0 <= ab <= 1
    assert dom(a, a, labels).value == 0 and ac <= ab + bc + 1e-6
    shuffled = dom(a[order], b[order], [labels[i] for i in order])
    assert shuffled.value == pytest.approx(ab, abs=1e-6)
    assert dom(3 * a, b, labels).value == pytest.approx(ab, abs=1e-5)  # maps are normalised


def test_known_values() -> None:
    spot, other = torch.zeros(4, 2, 2), torch.zeros(4, 2, 2)
    spot[:, 0, 0] = other[:, 1, 1] = 1
    result = dom(spot, other, [0, 0, 0, 1])
    assert result.value == 0.5 and result.classes == {0: 0.5, 1: 0.5}  # half of the pixels differ by 1
    mixed = torch.cat([spot[:2], other[:2]])
    assert dom(mixed, mixed.flip(0), [0] * 4).value == 0  # means hide what the C-Score sees
    assert hp.metrics.cscore(mixed, torch.ones(4)).value < 0.5


def test_blank_maps_have_no_mean_map() -> None:
    blank, spot = torch.zeros(4, 2, 2), torch.eye(2).expand(4, 2, 2)
    for pair in ((blank, blank), (blank, spot), (torch.ones(4, 2, 2), -spot)):
        result = dom(*pair, [0, 0, 0, 0])
        assert math.isnan(result.value) and result.n == 0 and "constant" in result.reason
    result = dom(torch.cat([blank[:2], spot[2:]]), spot, [0, 0, 1, 1])
    assert result.value == 0 and result.n == 2 and "class 0 left out" in result.reason
    assert math.isnan(result.classes[0]) and result.classes[1] == 0
    partly_blank = torch.cat([blank[:1], spot[1:]])  # single blank maps count as zeros
    assert dom(partly_blank, spot, [0] * 4).value == pytest.approx(0.125)


def test_maps_of_two_sizes_meet_at_the_size_of_the_images() -> None:
    coarse = Maps("a", torch.eye(2).expand(3, 2, 2), (8, 8), torch.zeros(3))
    fine = Maps("b", coarse.upsample(), (8, 8), torch.zeros(3))
    assert dom(coarse, fine, [0, 0, 1]).value == pytest.approx(0, abs=1e-6)


def test_bad_input_raises_a_clear_error() -> None:
    maps = torch.rand(3, 4, 4)
    with pytest.raises(InputError, match="labels has 2 entries but first has 3"):
        dom(maps, maps, [0, 1])
    with pytest.raises(InputError, match="class numbers"):
        dom(maps, maps, [0.5, 1.0, 2.0])
    with pytest.raises(InputError, match="the same images"):
        dom(maps, torch.rand(3, 5, 5), [0, 1, 1])


def test_in_a_run_every_checkpoint_is_held_against_the_last(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=6, methods=["gradcam", "edges"], metrics=["cscore", "dom"])
    run_study(study, tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    rows = folder.scores().sql("select * from scores where metric = 'dom' order by method, label nulls first")
    assert {(row["checkpoint"], row["image"]) for row in rows} == {("epoch01", "")}
    assert [(row["method"], row["label"]) for row in rows] == [
        (method, label) for method in ("edges", "gradcam") for label in (None, 0, 1)
    ]
    ids = folder.maps().ids("epoch01", "gradcam")
    labels = [0 if name.startswith("cat") else 1 for name in ids]
    first, last = (folder.maps().read(f"epoch0{k}", "gradcam", ids) for k in (1, 2))
    expected = dom(first, last, labels)
    actual = {row["label"]: row["value"] for row in rows if row["method"] == "gradcam"}
    assert actual == pytest.approx({None: expected.value, **expected.classes}, abs=1e-6)
    assert [row["value"] for row in rows if row["method"] == "edges"] == [0, 0, 0]


def test_one_checkpoint_has_nothing_to_be_held_against(tmp_path: Path) -> None:
    make_study(tmp_path, images=2, metrics=["dom"])
    study = write_study(tmp_path, metrics=["dom"], checkpoints=["epochs/epoch01.pt"])
    with pytest.raises(InputError, match="dom compares checkpoints, but there is one"):
        run_study(study, tmp_path / "run")
