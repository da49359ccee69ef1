"""Superpixels of images, maps per segment, and the cache of what is computed from pixels alone.

Segmentation reads the image, not the model's input: inputs go back to 8 bits through the model's own
preprocessing, or are scaled to their own range if that has another number of channels.
slic: achanta2012slic; quickshift: vedaldi2008quickshift; both from scikit-image, on the CPU.

Segmenting takes longer than a pass, and an audit needs the same images repeatedly. So the last results are
cached by the content of the image, and a run starts with the next images while the network is busy.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.images.loader import available_cpus
from heatproof.models.model import Model
from heatproof.show import eight_bit
from heatproof.timeline import span
from heatproof.types import per_map, size_of

QUICKSHIFT = {"kernel_size": 4, "max_dist": 200, "ratio": 0.2}
CACHED_PIXELS = 2**24  # 334 images of 224x224, 64 MB
Item = TypeVar("Item")
Result = TypeVar("Result")


@cache
def threads(name: str) -> ThreadPoolExecutor:
    """A thread pool per name for work that releases the GIL: short work does not wait for long work."""
    return ThreadPoolExecutor(available_cpus(), thread_name_prefix=f"heatproof-{name}")


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Results of a short function, computed in threads, in order."""
    return list(threads("short").map(function, items))


class LastBatch:
    """Cache the result for the last batch on a GPU, to copy its pixels to the host once.

    The batch is referenced too, so that its memory is not reused. Not on a CPU, where NumPy may write to it.
    """

    cached: tuple[Tensor, int, Any, Tensor] | None = None

    def __call__(self, images: Tensor, options: Any, compute: Callable[[], Tensor]) -> Tensor:
        if not images.is_cuda or images.is_inference():
            return compute()
        if self.cached is not None:
            batch, version, before, result = self.cached
            same = batch.data_ptr() == images.data_ptr() and batch.shape == images.shape
            same = same and batch.stride() == images.stride() and batch.device == images.device
            if same and version == images._version and before == options:
                return result
        self.cached = images.detach(), images._version, options, compute()
        return self.cached[-1]


def pictures_of(model: Model, images: Tensor) -> Tensor:
    """Tensor "b c H W" in [0, 1]: the images before preprocessing."""
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
    """Segment numbers "b H W" of model-ready images, from 0 without gaps in every image.

    kind: "slic" with about `count` segments, or "quickshift" (4, 200, .2), whose ties follow the seed.
    """
    if kind not in ("slic", "quickshift"):
        raise InputError(f"segments must be 'slic' or 'quickshift', got {kind!r}")
    if count < 1 or compactness <= 0:
        raise InputError(f"slic needs count >= 1 and compactness > 0, got {count} and {compactness}")
    if kind == "quickshift" and images.ndim > 4:
        raise InputError("quickshift cuts images, not volumes; use segments='slic'")

    def cut() -> Tensor:
        futures = _begin(model, images, kind, count, compactness, seed)
        with span("waiting", "superpixels"):
            segments = np.stack([future.result() for future in futures])
        return torch.from_numpy(segments).long().to(images.device)

    return _last(images, (kind, count, compactness, seed, model.preprocess), cut)


def cut_ahead(model: Model, images: Tensor, options: Mapping[str, Any], seed: int) -> None:
    """Start to segment images for a method with these options, if it reads segments."""
    if "segment_count" in options and 4 * len(images) * math.prod(size_of(images)) <= CACHED_PIXELS:
        _begin(model, images, *(options[o] for o in ("segments", "segment_count", "compactness")), seed)


def _begin(model: Model, images: Tensor, *options: Any) -> list[Future[np.ndarray]]:
    arrays = eight_bit(pictures_of(model, images)).movedim(1, -1).cpu().numpy()
    return in_threads(lambda array: _cache.begin(array, *options), arrays)


class _SegmentCache:
    """Segments of the last images, finished or in progress."""

    def __init__(self) -> None:
        self.futures: OrderedDict[tuple[Any, ...], Future[np.ndarray]] = OrderedDict()
        self.pixels = 0
        self._lock = threading.Lock()

    def begin(self, image: np.ndarray, *options: Any) -> Future[np.ndarray]:
        """The segments of "h w c"; options: kind, count, compactness, seed."""
        image = np.ascontiguousarray(image)
        kind, seed = options[0], options[-1]
        key = (
            *((kind, seed) if kind == "quickshift" else options[:-1]),
            image.shape,
            hashlib.blake2b(image.data).digest(),
        )
        with self._lock:
            if key in self.futures:
                self.futures.move_to_end(key)
                return self.futures[key]
            future = self.futures[key] = threads("cut").submit(_cut, image, *options)
            self.pixels += math.prod(image.shape[:-1])
            while self.pixels > CACHED_PIXELS and len(self.futures) > 1:
                (*_, shape, _), _ = self.futures.popitem(last=False)
                self.pixels -= math.prod(shape[:-1])
            return future


_last, _cache = LastBatch(), _SegmentCache()
if hasattr(os, "register_at_fork"):  # the parent's threads, and their futures, never end in a child process
    os.register_at_fork(after_in_child=threads.cache_clear)
    os.register_at_fork(after_in_child=_cache.__init__)  # type: ignore[misc]


def _cut(image: np.ndarray, kind: str, count: int, compactness: float, seed: int) -> np.ndarray:
    from skimage.segmentation import quickshift, slic

    if image.shape[-1] == 1:
        image = image.repeat(3, axis=-1)
    with span("superpixels"):
        if kind == "slic":
            labels = slic(image, n_segments=count, compactness=compactness, start_label=0, channel_axis=-1)
        else:
            in_colour = image.shape[-1] == 3
            labels = quickshift(image, **QUICKSHIFT, rng=seed, convert2lab=in_colour, channel_axis=-1)
        return np.unique(labels, return_inverse=True)[1].reshape(labels.shape).astype(np.int32)


def segment_means(values: Tensor, segments: Tensor) -> Tensor:
    """Tensor "b c s": the mean of "b c H W" in every segment; 0 for numbers that an image does not use."""
    spots = segments.flatten(1)
    size = int(spots.max()) + 1
    exact = values.double() if values.is_cuda else values  # a GPU's sums have no fixed order
    sums = exact.new_zeros(*values.shape[:2], size)
    sums.scatter_add_(2, spots[:, None].expand(-1, values.shape[1], -1), exact.flatten(2))
    areas = exact.new_zeros(len(values), 1, size)
    areas.scatter_add_(2, spots[:, None], exact.new_ones(len(values), 1, spots.shape[1]))
    return (sums / areas.clamp(min=1)).to(values.dtype)


def paint(weights: Tensor, segments: Tensor) -> Tensor:
    """Tensor "b H W": the number in "b s" of every pixel's segment."""
    return weights.gather(1, segments.flatten(1)).view(segments.shape)


def top_segments(values: Tensor, segments: Tensor, count: int = 5, signed: bool = False) -> Tensor:
    """Signs "b H W", -1, 0 and 1, of the `count` segments of each image with the largest weights.

    Positive segments only, or with signed=True those of largest |weight|. Ties go to the lower segment
    number; segments of weight 0 are left out.

    >>> top_segments(torch.tensor([[[1.0, -3.0, 2.0]]]), torch.tensor([[[0, 1, 2]]]), 2, signed=True).tolist()
    [[[0, -1, 1]]]
    """
    weights = segment_means(values[:, None].float(), segments)[:, 0]
    strength = weights.abs() if signed else weights.clamp(min=0)
    top = strength.argsort(dim=1, descending=True, stable=True)[:, :count]
    signs = torch.zeros_like(weights).scatter(1, top, weights.gather(1, top).sign())
    return paint(signs if signed else signs.clamp(min=0), segments).to(torch.int8)
