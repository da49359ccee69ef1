"""How far a method's scores lie above those of maps that know nothing of the network, on the same images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from heatproof.errors import InputError
from heatproof.metrics.arrays import as_numbers, same_length
from heatproof.metrics.stats import mean_interval
from heatproof.registry import metric

if TYPE_CHECKING:
    from heatproof.types import ArrayLike


class Margin(NamedTuple):
    """Mean paired difference to a floor, better counted as positive; NaN has its cause in `reason`."""

    mean: float
    interval: tuple[float, float]  # 95 %, bootstrap over images
    n: int
    share: float  # of images on which the method is better than the floor
    reason: str = ""

    @property
    def above(self) -> bool:
        """Whether the whole interval lies above the floor."""
        return self.interval[0] > 0


@metric(
    "above_floors", needs=("scores",), level="checkpoint", higher_is_better=True, cite="adebayo2018sanity",
    about="How far each method scores above each floor on the same images.", family="Sanity", floors=(),
)  # fmt: skip
def above_floors(
    scores: Mapping[str, ArrayLike],
    higher_is_better: bool = True,
    *,
    floors: Sequence[str] = ("random", "edges"),
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, dict[str, Margin]]:
    """How far each method is above each floor on the same images: {method: {floor: Margin}}.

    Args:
        scores: one metric's values per image "b" by method, the floors among them. Images on which either is
            NaN are left out of n.
        higher_is_better: which way a method is above a floor.
        floors: their names.
        resamples, seed: of the bootstrap behind the interval.
    """
    values = {name: as_numbers(one) for name, one in scores.items()}
    same_length(**values)
    present = [floor for floor in floors if floor in values]
    if not present:
        raise InputError(f"no floor to compare with; score {' or '.join(floors)} on the same images too")
    sign = 1.0 if higher_is_better else -1.0
    return {
        method: {floor: _margin(sign * (one - values[floor]), resamples, seed) for floor in present}
        for method, one in values.items()
        if method not in present
    }


def _margin(differences: np.ndarray, resamples: int, seed: int) -> Margin:
    defined = differences[np.isfinite(differences)]
    if not len(defined):
        nan = float("nan")
        return Margin(nan, (nan, nan), 0, nan, "no image has both scores")
    interval = mean_interval(defined, resamples, seed)
    return Margin(float(defined.mean()), interval, len(defined), float((defined > 0).mean()))
