"""Scores of the contrast test: how well methods distinguish the two networks on the same images.

    inside = share of a budget of pixels as large as the token that lies on the token,
             which is widened by half a cell of the map on every side: a map cannot be finer than its cells
    AUC    = P(inside under A > inside under B) + P(equal) / 2     over all pairs of images
    seen   = share of images in which a person would see it under A: inside >= 1/2

A method that ignores the network makes the same map for both, so that its AUC is 1/2 exactly. A constant map
marks nothing: inside 0. Intervals are 95 %, by bootstrap over images, each with its scores under both
networks. One control follows by construction: the fall of the positive class's logit when the token is
removed again (TOKEN_REMOVED).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from heatproof.contrast.pair import Pair
from heatproof.errors import InputError
from heatproof.explain.api import explain
from heatproof.metrics.localisation import localise
from heatproof.metrics.stats import Interval, percentile_interval, resample, wins
from heatproof.models.model import Model
from heatproof.models.queue import all_logits
from heatproof.types import Maps

TOKEN_REMOVED = "token removed"
SEEN = 0.5
SHOWN = 4  # images whose maps are stored


@dataclass(frozen=True, eq=False)
class ContrastScore:
    """One method under both networks."""

    method: str
    a: np.ndarray  # "n": inside under A, image by image
    b: np.ndarray
    blank: tuple[int, int] = (0, 0)  # constant maps under A and B
    maps: tuple[np.ndarray, ...] = field(default=(), repr=False)  # of the first images, under A and B
    seed: int = 0

    @cached_property
    def _area(self) -> tuple[float, Interval]:
        return contrast_auc(self.a, self.b, self.seed)

    @property
    def auc(self) -> float:
        return self._area[0]

    @property
    def interval(self) -> Interval:
        return self._area[1]

    @property
    def seen(self) -> float:
        """Share of images in which a person would see the token; NaN for the control: it has no map."""
        return float("nan") if self.method == TOKEN_REMOVED else float((self.a >= SEEN).mean())

    @property
    def shows(self) -> bool:
        """Whether a person would see the token in half of the maps under A, and not just as often under B."""
        return self.seen >= SEEN and self.interval[0] > 0.5

    @property
    def n(self) -> int:
        return len(self.a)


def contrast_scores(
    pair: Pair,
    methods: str | Sequence[str],
    *,
    layer: str | Sequence[str] | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> dict[str, ContrastScore]:
    """Scores by method on the pair's images; the control last."""
    if not pair.holds:
        raise InputError(pair.planting.sentence)
    explained = [
        explain(
            model, pair.images, methods, pair.positive, layer, pair.seed,
            ids=pair.ids, batch_size=batch_size, progress=progress,
        )
        for model in (pair.a, pair.b)
    ]  # fmt: skip
    scores = {}
    for method in explained[0]:
        both = [maps[method] for maps in explained]
        a, b = (inside_token(maps, pair.masks).cpu().double().numpy() for maps in both)
        blank = int(both[0].degenerate.sum()), int(both[1].degenerate.sum())
        examples = tuple(maps.values[:SHOWN].cpu().numpy() for maps in both)
        scores[method] = ContrastScore(method, a, b, blank, examples, pair.seed)
    a, b = (_drop(model, pair) for model in (pair.a, pair.b))
    return scores | {TOKEN_REMOVED: ContrastScore(TOKEN_REMOVED, a, b, seed=pair.seed)}


def inside_token(maps: Maps, masks: Tensor) -> Tensor:
    """Share "b" of a budget as large as the token that a map places on the widened token."""
    masks = masks.to(maps.values.device)
    rows, columns = (
        side // (2 * cells) for side, cells in zip(maps.image_size, maps.values.shape[1:], strict=True)
    )
    near = F.max_pool2d(
        masks[:, None].float(), (2 * rows + 1, 2 * columns + 1), stride=1, padding=(rows, columns)
    )[:, 0]
    budget = int(masks[0].sum()) / masks[0].numel()
    return localise(maps, masks=near > 0, budget=budget)["inside"].masked_fill(maps.degenerate, 0)


def contrast_auc(
    a: np.ndarray, b: np.ndarray, seed: int = 0, resamples: int = 1000
) -> tuple[float, Interval]:
    """Probability that a score under A exceeds one under B, ties half, with its interval over images.

    >>> contrast_auc(np.array([0.2, 0.9]), np.array([0.1, 0.5]))[0]
    0.75
    """
    table = wins(a, b)
    counts = np.stack([np.bincount(places, minlength=len(a)) for places in resample(len(a), resamples, seed)])
    draws = ((counts @ table) * counts).sum(1) / len(a) ** 2
    return float(table.mean()), percentile_interval(draws)


@torch.no_grad()
def _drop(model: Model, pair: Pair) -> np.ndarray:
    with_token, without = (
        model.scores(logits, torch.full((len(logits),), pair.positive, device=logits.device))
        for logits in (all_logits(model, pair.images), all_logits(model, pair.plain))
    )
    return np.asarray((with_token - without).double().cpu())
