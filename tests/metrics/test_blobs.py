"""Blobs counted by hand, by a slow twin, and what must hold for any map."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heatproof as hp
from heatproof.metrics.localisation import budget_masks


def slow_areas(mask: np.ndarray) -> list[int]:
    """Sizes of the areas, by filling one after the other."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}
    sizes = []
    while left:
        front, size = [left.pop()], 0
        while front:
            y, x = front.pop()
            size += 1
            near = {(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            front += near
        sizes.append(size)
    return sizes


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 12), st.integers(2, 12), st.sampled_from([0.05, 0.2, 0.5, 1.0]))
def test_equals_a_slow_twin(seed: int, height: int, width: int, budget: float) -> None:
    maps = torch.from_numpy(np.random.default_rng(seed).random((3, height, width), dtype=np.float32))
    if math.floor(budget * height * width + 1e-9) < 1:
        return
    result = hp.metrics.dispersion(maps, budget=budget)
    for i, mask in enumerate(budget_masks(maps, budget).numpy()):
        shares = np.array(slow_areas(mask)) / mask.sum()
        assert result["dispersion"][i].item() == pytest.approx(1 - (shares**2).sum(), abs=1e-6)
        assert result["dispersion_blobs"][i].item() == (shares >= 0.05).sum()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_bounds_and_what_changes_nothing(seed: int) -> None:
    maps = torch.from_numpy(np.random.default_rng(seed).random((2, 9, 9), dtype=np.float32))
    result = hp.metrics.dispersion(maps)
    assert ((result["dispersion"] >= 0) & (result["dispersion"] < 1)).all()
    for other in (maps * 7, maps**3, maps.flip(1), maps.transpose(1, 2)):
        assert torch.allclose(hp.metrics.dispersion(other)["dispersion"], result["dispersion"], atol=1e-6)


def test_zeros_are_no_blob() -> None:
    maps = torch.zeros(1, 20, 20)
    maps[0, 15, 15] = 1
    result = hp.metrics.dispersion(maps)
    assert result["dispersion"].item() == 0 and result["dispersion_blobs"].item() == 1


def test_one_blob_two_blobs_dust_and_nothing() -> None:
    maps = torch.zeros(4, 20, 20)
    maps[0, 2:10, 2:12] = 1
    maps[1, 2:6, 2:12], maps[1, 12:16, 2:12] = 1, 1
    maps[2, ::2, ::2] = torch.arange(100.0).reshape(10, 10) + 1
    result = hp.metrics.dispersion(maps)
    assert result["dispersion"][:2].tolist() == pytest.approx([0, 0.5])
    assert result["dispersion_blobs"][:2].tolist() == [1, 2]
    assert math.isnan(result["dispersion"][3]) and "constant" in result.reasons("dispersion")[3]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 12), st.integers(2, 12))
def test_centre_bias_equals_a_slow_twin(seed: int, height: int, width: int) -> None:
    maps = torch.from_numpy(np.random.default_rng(seed).random((2, height, width), dtype=np.float32))
    result = hp.metrics.centre_bias(maps)["centre_bias"]
    for i in range(2):
        heat = (maps[i] - maps[i].min()) / (maps[i].max() - maps[i].min())
        total = mass = even = 0.0
        for y in range(height):
            for x in range(width):
                far = math.hypot(y - (height - 1) / 2, x - (width - 1) / 2)
                total += float(heat[y, x]) * far
                mass += float(heat[y, x])
                even += far / (height * width)
        assert result[i].item() == pytest.approx(1 - total / mass / even, abs=1e-5)


def test_centre_bias_of_known_maps() -> None:
    maps = torch.zeros(3, 9, 9)
    maps[0, 4, 4] = maps[1, 0, 0] = 1
    maps[2] = 0.5
    result = hp.metrics.centre_bias(maps)
    assert result["centre_bias"][0] == 1 and -1 <= result["centre_bias"][1] < -0.5
    assert result["centre_bias"][2].isnan() and "constant" in result.reasons("centre_bias")[2]
