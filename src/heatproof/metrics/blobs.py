"""Dispersion: whether the pixels within the budget form one connected area or many.

The budget's pixels (localisation.py selects floor(budget H W) of them) form areas whose pixels touch at a
side or a corner. With n_i pixels in area i and K in all:

    dispersion = 1 - sum_i (n_i / K)^2     the probability that two of them lie in different areas
    blobs      = the number of areas with at least 5 % of them

0 for one area, near 1 for scattered pixels. keak2026budget interprets spread "red blobs" as a sign of an
uncertain network, without a number; this definition is ours.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.ndimage import label

from heatproof.metrics.kit import CONSTANT, sized_maps
from heatproof.metrics.localisation import budget_masks
from heatproof.metrics.results import Cause, PerImage
from heatproof.registry import metric
from heatproof.types import ArrayLike, Maps, constant

BLOB = 0.05  # of the budget's pixels, at least


@metric(
    "dispersion", needs=("maps",), bounds=(0.0, 1.0), cite="keak2026budget", family="Localisation",
    title="how scattered the map is", parts={"blobs": "areas that the map marks"}, floors=(), volumes=True,
)  # fmt: skip
def dispersion(maps: Maps | ArrayLike, *, budget: float = 0.2) -> PerImage:
    """Probability that two of the budget's pixels lie in different areas; 0 for one area.

    Args:
        maps: "b h w", at any size.
        budget: share of the pixels that are looked at.

    Returns:
        dispersion, and dispersion_blobs, the number of areas, each "b".

    Example:
        >>> apart = torch.zeros(1, 8, 8)
        >>> apart[0, 0, :4] = apart[0, 7, :4] = 1
        >>> scores = dispersion(apart, budget=1 / 8)
        >>> scores["dispersion"].tolist(), scores["dispersion_blobs"].tolist()
        ([0.5], [2.0])
    """
    values, _ = sized_maps(maps)
    # Areas are found on the CPU: scipy's union-find takes about a millisecond an image.
    masks = budget_masks(maps, budget).cpu().numpy()
    table = np.array([_areas(mask) for mask in masks], dtype=np.float32).reshape(-1, 2)
    scores = torch.from_numpy(table).to(values.device)
    return PerImage(
        {"dispersion": scores[:, 0], "dispersion_blobs": scores[:, 1]},
        [Cause(CONSTANT, constant(values))],
    )


def _areas(mask: np.ndarray) -> tuple[float, int]:
    sizes = np.bincount(label(mask, np.ones((3,) * mask.ndim, dtype=int))[0].ravel())[1:]
    shares = sizes / sizes.sum()
    return float(1 - (shares**2).sum()), int((shares >= BLOB).sum())
