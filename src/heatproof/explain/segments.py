"""Pictures cut into segments of similar colour, and maps read per segment.

Segmentation sees the picture, not the model's input: images go back to 8 bits through the model's own
preprocessing (model.preprocess.restore). Where that preprocessing has another number of channels than the
images, each image is scaled to its own range instead.
slic: achanta2012slic; quickshift: vedaldi2008quickshift; both from scikit-image, on the CPU.

Cutting takes longer than a pass, and an audit asks for the same pictures again and again (under random
weights, other draws, other methods). So the last cuts are kept, by what the picture looks like, and a run
begins to cut the next pictures while the network is busy with these.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.pixels import LastBatch, in_threads, threads
from heatproof.models.model import Model
from heatproof.show import eight_bit
from heatproof.timeline import span
from heatproof.types import per_map, size_of

QUICKSHIFT = {"kernel_size": 4, "max_dist": 200, "ratio": 0.2}
PIXELS_KEPT = 2**24  # of cuts: 334 pictures of 224x224, 64 MB


def pictures_of(model: Model, images: Tensor) -> Tensor:
    """ "b c H W" in [0, 1]: what a person would see."""
    images = images.float()
    if model.preprocess.channels == images.shape[1]:
        return model.preprocess.restore(images)
    low, high = (per_map(v, images) for v in images.flatten(1).aminmax(dim=1))
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
    if kind not in ("slic", "quickshift"):
        raise InputError(f"segments must be 'slic' or 'quickshift', got {kind!r}")
    if count < 1 or compactness <= 0:
        raise InputError(f"slic needs count >= 1 and compactness > 0, got {count} and {compactness}")
    if kind == "quickshift" and images.ndim > 4:
        raise InputError("quickshift cuts pictures, not volumes; use segments='slic'")
    asked = (kind, count, compactness, seed, model.preprocess)
    if (known := _last.of(images, asked)) is not None:
        return known
    pictures = eight_bit(pictures_of(model, images)).movedim(1, -1).cpu().numpy()
    coming = in_threads(lambda picture: _cuts.begin(picture, kind, count, compactness, seed), pictures)
    with span("waiting", "superpixels"):
        found = [cut.result() for cut in coming]
    return _last.keep(images, asked, torch.from_numpy(np.stack(found)).long().to(images.device))


def cut_ahead(model: Model, images: Tensor, options: Mapping[str, Any], seed: int) -> None:
    """Begin to cut pictures for a method with these options, if it is one that looks at segments."""
    if "segment_count" in options and 4 * len(images) * math.prod(size_of(images)) <= PIXELS_KEPT:
        asked = (str(options["segments"]), options["segment_count"], options["compactness"], seed)
        pictures = eight_bit(pictures_of(model, images)).movedim(1, -1).cpu().numpy()
        in_threads(lambda picture: _cuts.begin(picture, *asked), pictures)


_last = LastBatch()


class _Cuts:
    """Pictures that were cut or are being cut; the last ones are kept."""

    def __init__(self) -> None:
        self.kept: OrderedDict[tuple[Any, ...], Future[np.ndarray]] = OrderedDict()
        self.pixels = 0
        self._lock = threading.Lock()

    def begin(
        self, picture: np.ndarray, kind: str, count: int, compactness: float, seed: int
    ) -> Future[np.ndarray]:
        """The segments of "h w c", now or in a while."""
        picture = np.ascontiguousarray(picture)
        asked = (kind, seed) if kind == "quickshift" else (kind, count, compactness)
        key = (*asked, picture.shape, hashlib.blake2b(picture.data).digest())
        with self._lock:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key]
            coming = self.kept[key] = threads("cut").submit(_cut, picture, kind, count, compactness, seed)
            self.pixels += math.prod(picture.shape[:-1])
            while self.pixels > PIXELS_KEPT and len(self.kept) > 1:
                (*_, shape, _), _ = self.kept.popitem(last=False)
                self.pixels -= math.prod(shape[:-1])
            return coming


_cuts = _Cuts()
if hasattr(os, "register_at_fork"):  # what the parent's threads are cutting never arrives in a child process
    os.register_at_fork(after_in_child=_cuts.__init__)  # type: ignore[misc]


def _cut(picture: np.ndarray, kind: str, count: int, compactness: float, seed: int) -> np.ndarray:
    from skimage.segmentation import quickshift, slic

    if picture.shape[-1] == 1:
        picture = picture.repeat(3, axis=-1)
    with span("superpixels"):
        if kind == "slic":
            found = slic(picture, n_segments=count, compactness=compactness, start_label=0, channel_axis=-1)
        else:
            coloured = picture.shape[-1] == 3
            found = quickshift(picture, **QUICKSHIFT, rng=seed, convert2lab=coloured, channel_axis=-1)
        return np.unique(found, return_inverse=True)[1].reshape(found.shape).astype(np.int32)


def segment_means(values: Tensor, segments: Tensor) -> Tensor:
    """ "b c s": the mean of "b c H W" in every segment; 0 in numbers an image does not use."""
    spots = segments.flatten(1)
    size = int(spots.max()) + 1
    exact = values.double() if values.is_cuda else values  # a GPU adds in any order: here it leaves no trace
    sums = exact.new_zeros(*values.shape[:2], size)
    sums.scatter_add_(2, spots[:, None].expand(-1, values.shape[1], -1), exact.flatten(2))
    areas = exact.new_zeros(len(values), 1, size)
    areas.scatter_add_(2, spots[:, None], exact.new_ones(len(values), 1, spots.shape[1]))
    return (sums / areas.clamp(min=1)).to(values.dtype)


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
