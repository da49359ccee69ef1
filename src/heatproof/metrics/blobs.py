"""Dispersion and centre bias: whether the map's pixels form one area, and how near to the centre they lie.

The budget's pixels (localisation.py selects floor(budget H W) of them) form areas whose pixels touch at a
side or a corner. With n_i pixels in area i and K in all:

    dispersion = 1 - sum_i (n_i / K)^2     the probability that two of them lie in different areas
    blobs      = the number of areas with at least 5 % of them

0 for one area, near 1 for scattered pixels. With m_i the normalised map and d_i the distance of pixel i from
the centre of the image:

    centre_bias = 1 - (sum_i m_i d_i / sum_i m_i) / mean_i d_i

1 for a dot in the centre, 0 for mass that is spread evenly, below 0 for mass near the border. keak2026budget
interprets spread "red blobs" as a sign of an uncertain network and says that networks tend to focus on the
centre, both without a number; these definitions are ours.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.ndimage import label

from heatproof.metrics.kit import CONSTANT, pixel_maps, sized_maps
from heatproof.metrics.localisation import budget_masks
from heatproof.metrics.results import Cause, PerImage
from heatproof.registry import metric
from heatproof.types import ArrayLike, Maps, constant

BLOB = 0.05  # of the budget's pixels, at least


@metric(
    "dispersion", needs=("maps",), bounds=(0.0, 1.0), cite="keak2026budget", family="Localisation",
    title="scatter of the map", parts={"blobs": "number of marked areas"}, floors=(), volumes=True,
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


@metric(
    "centre_bias", needs=("maps",), bounds=(-1.0, 1.0), cite="keak2026budget", family="Localisation",
    title="nearness to the centre", floors=(), volumes=True,
)  # fmt: skip
def centre_bias(maps: Maps | ArrayLike) -> PerImage:
    """How much nearer to the centre of the image the map's mass lies than evenly spread mass.

    Args:
        maps: "b h w", at any size; masks of objects too.

    Returns:
        centre_bias, "b": 1 for a dot in the centre, 0 for even mass, negative near the border.

    Example:
        >>> dot = torch.zeros(1, 5, 5)
        >>> dot[0, 2, 2] = 1
        >>> centre_bias(dot)["centre_bias"].tolist()
        [1.0]
    """
    values, size = sized_maps(maps)
    mass = pixel_maps(maps).double()
    sides = [(torch.arange(n, device=mass.device) - (n - 1) / 2).double() for n in size]
    far = torch.stack(torch.meshgrid(*sides, indexing="ij")).square().sum(0).sqrt()
    mean = (mass * far).flatten(1).sum(1) / mass.flatten(1).sum(1)
    return PerImage({"centre_bias": (1 - mean / far.mean()).float()}, [Cause(CONSTANT, constant(values))])


def _areas(mask: np.ndarray) -> tuple[float, int]:
    sizes = np.bincount(label(mask, np.ones((3,) * mask.ndim, dtype=int))[0].ravel())[1:]
    shares = sizes / sizes.sum()
    return float(1 - (shares**2).sum()), int((shares >= BLOB).sum())
