"""Pictures cut into segments of similar colour, and maps read per segment.

Segmentation sees the picture, not the model's input: images go back to 8 bits through the model's own
preprocessing (model.preprocess.restore). Where that preprocessing has another number of channels than the
images, each image is scaled to its own range instead.
slic: achanta2012slic; quickshift: vedaldi2008quickshift; both from scikit-image, on the CPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.models.model import Model
from heatproof.show import eight_bit

QUICKSHIFT = {"kernel_size": 4, "max_dist": 200, "ratio": 0.2}


def pictures_of(model: Model, images: Tensor) -> Tensor:
    """ "b c H W" in [0, 1]: what a person would see."""
    images = images.float()
    if model.preprocess.channels == images.shape[1]:
        return model.preprocess.restore(images)
    low, high = (v[:, None, None, None] for v in images.flatten(1).aminmax(dim=1))
    return (images - low) / torch.where(high > low, high - low, torch.inf)


def segments_of(
    model: Model,
    images: Tensor,
    kind: str = "slic",
    count: int = 100,
    compactness: float = 10.0,
    seed: int = 0,
) -> Tensor:
    """ "b H W" segment numbers of model-ready images, from 0 without gaps in every image.

    kind: "slic" with about `count` segments, or "quickshift" (4, 200, .2), whose ties follow the seed.
    """
    from skimage.segmentation import quickshift, slic

    if kind not in ("slic", "quickshift"):
        raise InputError(f"segments must be 'slic' or 'quickshift', got {kind!r}")
    if count < 1 or compactness <= 0:
        raise InputError(f"slic needs count >= 1 and compactness > 0, got {count} and {compactness}")
    pictures = eight_bit(pictures_of(model, images)).permute(0, 2, 3, 1).cpu().numpy()

    def cut(picture: np.ndarray) -> np.ndarray:
        if picture.shape[2] == 1:
            picture = picture.repeat(3, axis=2)
        if kind == "slic":
            found = slic(picture, n_segments=count, compactness=compactness, start_label=0, channel_axis=-1)
        else:
            coloured = picture.shape[2] == 3
            found = quickshift(picture, **QUICKSHIFT, rng=seed, convert2lab=coloured, channel_axis=-1)
        return np.unique(found, return_inverse=True)[1].reshape(found.shape)

    # Both release Python's lock, so the images of a batch are cut side by side.
    with ThreadPoolExecutor() as pool:
        cuts = list(pool.map(cut, pictures))
    return torch.from_numpy(np.stack(cuts)).long().to(images.device)


def segment_means(values: Tensor, segments: Tensor) -> Tensor:
    """ "b c s": the mean of "b c H W" in every segment; 0 in numbers an image does not use."""
    spots = segments.flatten(1)
    size = int(spots.max()) + 1
    sums = values.new_zeros(*values.shape[:2], size)
    sums.scatter_add_(2, spots[:, None].expand(-1, values.shape[1], -1), values.flatten(2))
    areas = values.new_zeros(len(values), 1, size)
    areas.scatter_add_(2, spots[:, None], values.new_ones(len(values), 1, spots.shape[1]))
    return sums / areas.clamp(min=1)


def paint(weights: Tensor, segments: Tensor) -> Tensor:
    """ "b H W": every pixel gets its segment's number of "b s"."""
    return weights.gather(1, segments.flatten(1)).view(segments.shape)


def top_segments(values: Tensor, segments: Tensor, count: int = 5, signed: bool = False) -> Tensor:
    """ "b H W" of -1, 0 and 1: the signs of the `count` segments of each image that weigh most.

    Positive segments alone, or with signed=True those of largest |weight|, whatever their sign. Ties go to
    the lower segment number; segments of weight 0 are never shown.

    >>> top_segments(torch.tensor([[[1.0, -3.0, 2.0]]]), torch.tensor([[[0, 1, 2]]]), 2, signed=True).tolist()
    [[[0, -1, 1]]]
    """
    weights = segment_means(values[:, None].float(), segments)[:, 0]
    strength = weights.abs() if signed else weights.clamp(min=0)
    kept = strength.argsort(dim=1, descending=True, stable=True)[:, :count]
    shown = torch.zeros_like(weights).scatter(1, kept, weights.gather(1, kept).sign())
    return paint(shown if signed else shown.clamp(min=0), segments).to(torch.int8)
