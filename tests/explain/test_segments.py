"""Superpixels: a picture is cut once, ahead of its turn where a run begins it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from conftest import small_cnn
from heatproof.explain import baselines as segments
from heatproof.models.model import Model


def test_a_picture_is_cut_once_also_ahead_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut: list[tuple[int, ...]] = []

    def counted(picture: np.ndarray, *options: Any) -> np.ndarray:
        cut.append(picture.shape)
        return real(picture, *options)

    real, cuts = segments._cut, segments._SegmentCache()
    monkeypatch.setattr(segments, "_cut", counted)
    monkeypatch.setattr(segments, "_cache", cuts)
    model = Model(small_cnn().eval())
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    options = {"segments": "slic", "segment_count": 6, "compactness": 10.0, "samples": 4}
    segments.cut_ahead(model, images, options, seed=0)
    segments.cut_ahead(model, images, {"steps": 4}, seed=0)  # of a method without segments
    first = segments.segments_of(model, images, count=6)
    assert len(cut) == 3 and torch.equal(first, segments.segments_of(model, images, count=6))
    segments.segments_of(model, images, count=5)
    assert len(cut) == 6  # asked for something else
    monkeypatch.setattr(segments, "CACHED_PIXELS", 2 * 32 * 32)
    segments.segments_of(model, images + 0.5, count=6)
    assert len(cuts.futures) == 2 and cuts.pixels == 2 * 32 * 32
