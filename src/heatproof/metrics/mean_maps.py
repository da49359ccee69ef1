"""DoM, the difference of means: distance between the mean maps of two networks, per class.

For the maps H of networks A and B of the same images, at the image's size and min-max normalised,

    M_c(A)  = mean over the images of class c of H(A)
    DoM_c   = mean over pixels of |M_c(A) - M_c(B)|              0: the same mean map; at most 1
    DoM     = sum_c n_c DoM_c / sum_c n_c

The C-Score's closest predecessor (ozer2025dom): it compares the mean maps of networks, where the C-Score
compares the maps of single images under one network.

Deviations: we know the metric from the C-Score paper, which describes it as comparing mean maps over
architectures and prints no formula; this is the plain reading. Blank maps are zeros and count; where all maps
of a class are blank under one of the networks, there is no mean map, and the class is NaN and left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.metrics.kit import as_tensor, chunks, same_length, sized_maps
from heatproof.metrics.results import NAN, PerClass
from heatproof.registry import metric
from heatproof.types import ArrayLike, Maps, constant, normalise, upsample

NO_IMAGE = "no image has a label"
BLANK = "class {} left out: all its maps are constant under one of the networks, so there is no mean map"


@metric(  # maps that ignore the network never change, so control maps are no reference
    "dom", needs=("maps", "labels"), level="checkpoint", higher_is_better=False, bounds=(0.0, 1.0),
    cite="ozer2025dom", title="DoM: distance to the last checkpoint's mean maps", family="Consistency",
    compares_checkpoints=True, floors=(), volumes=True,
)  # fmt: skip
def dom(first: Maps | ArrayLike, second: Maps | ArrayLike, labels: ArrayLike) -> PerClass:
    """Distance of the mean maps of two networks, by class and over all; 0 for the same mean map.

    Args:
        first, second: maps of the same images by two networks, or checkpoints, or methods; of any size each,
            where they are Maps.
        labels: "b" classes; images with -1 have none and are left out.

    Returns:
        The mean over classes, weighted by their images, and the distance of each class.

    Example:
        >>> a, b = torch.zeros(2, 2, 2), torch.zeros(2, 2, 2)
        >>> a[:, 0, 0], b[0, 0, 0], b[1, 1, 1] = 1.0, 1.0, 1.0
        >>> dom(a, b, [0, 0]).value
        0.25
    """
    (own, size), (other, size_of_other) = sized_maps(first), sized_maps(second)
    classes = as_tensor(labels).to(own.device)
    same_length(first=own, second=other, labels=classes)
    if size != size_of_other:
        raise InputError(f"dom compares maps of the same images; got sizes {size} and {size_of_other}")
    if classes.ndim != 1 or classes.is_floating_point():
        raise InputError("labels must be 'b' class numbers, one per map")
    gaps, counts = {}, {}
    for label in sorted(map(int, set(classes[classes >= 0].tolist()))):
        rows = (classes == label).nonzero()[:, 0]
        pair = own[rows], other.to(own.device)[rows]
        if any(constant(maps).all() for maps in pair):
            gaps[label] = NAN
            continue
        gap = mean_map(pair[0], size) - mean_map(pair[1], size)
        gaps[label], counts[label] = float(gap.abs().mean()), len(rows)
    blank = [str(label) for label in gaps if label not in counts]
    reason = BLANK.format(", ".join(blank)) if blank else "" if gaps else NO_IMAGE
    n = sum(counts.values())
    value = sum(gaps[label] * count for label, count in counts.items()) / n if n else NAN
    return PerClass(value, n, classes=gaps, reason=reason)


def mean_map(maps: Tensor, size: tuple[int, ...]) -> Tensor:
    """Tensor "H W" in float64: the mean of maps "b h w", each enlarged and normalised first."""
    total = torch.zeros(size, dtype=torch.float64, device=maps.device)
    for part in chunks(maps, size):
        total += normalise(upsample(maps[part], size)).sum(0, dtype=torch.float64)
    return total / len(maps)
