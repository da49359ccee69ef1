"""Severity slopes and areas under robustness curves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import integrate

from heatproof.errors import InputError
from heatproof.metrics.on_parts import aurc, bl_slope

SEVERITIES = (0, 0.25, 0.5, 0.75, 1)
SETTINGS = settings(max_examples=40, deadline=None)


@SETTINGS
@given(arrays(np.float64, (3, 6, 5), elements=st.floats(0.01, 1)))
def test_equal_to_numpy_one_curve_at_a_time(curves: np.ndarray) -> None:
    slopes = [[np.polyfit(SEVERITIES, curve, 1)[0] for curve in image] for image in curves]
    areas = [[integrate.trapezoid(curve / curve[0], SEVERITIES) for curve in image] for image in curves]
    assert bl_slope(curves, SEVERITIES)["bl_slope"].tolist() == pytest.approx(np.mean(slopes, 1), abs=1e-5)
    assert aurc(curves, SEVERITIES)["aurc"].tolist() == pytest.approx(np.mean(areas, 1), rel=1e-5)


def test_known_curves() -> None:
    line = torch.tensor([SEVERITIES]) * 0.3 + 0.2
    assert bl_slope(line, SEVERITIES)["bl_slope"].item() == pytest.approx(0.3)
    assert aurc(line, SEVERITIES)["aurc"].item() == pytest.approx(1.75)  # 1 + 0.15 / 0.2
    assert aurc(torch.full((6, 5), 0.4), SEVERITIES)["aurc"].item() == pytest.approx(1)


def test_order_of_severities_does_not_matter() -> None:
    curves = torch.rand(2, 6, 5)
    order = [3, 0, 4, 1, 2]
    shuffled = [SEVERITIES[i] for i in order]
    for metric, name in ((bl_slope, "bl_slope"), (aurc, "aurc")):
        result = metric(curves[..., order], shuffled)[name]
        assert torch.allclose(result, metric(curves, SEVERITIES)[name])


def test_undefined_curves_are_left_out_and_counted() -> None:
    curves = torch.full((3, 2, 5), 0.5)
    curves[0, 0, 0] = 0  # nothing to compare with
    curves[1, 0, 3] = math.nan
    curves[2, :, 0] = torch.tensor([0.0, math.nan])
    area, slope = aurc(curves, SEVERITIES), bl_slope(curves, SEVERITIES)
    assert area["n"].tolist() == [1, 1, 0] and slope["n"].tolist() == [2, 1, 1]
    assert area["aurc"][:2].tolist() == pytest.approx([1, 1]) and torch.isnan(area["aurc"][2])
    assert area.reasons("aurc")[:2] == ["", ""] and "severity 0" in area.reasons("aurc")[2]
    gone = bl_slope(torch.full((1, 5), math.nan), SEVERITIES)
    assert torch.isnan(gone["bl_slope"]) and "not defined" in gone.reasons("bl_slope")[0]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: aurc(torch.rand(6, 4), SEVERITIES), "one column for each of the 5 severities"),
        (lambda: bl_slope(torch.rand(5), SEVERITIES), "'b d s' or 'd s'"),
        (lambda: aurc(torch.rand(6, 2), (0.5, 1)), "start at 0.5"),
        (lambda: bl_slope(torch.rand(6, 2), (0.5, 0.5)), "two different numbers"),
        (lambda: bl_slope(torch.rand(6, 1), (0.5,)), "two different numbers"),
    ],
)
def test_bad_input_raises_a_clear_error(call: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        call()
    assert "\n" not in str(error.value)
