"""What is made from an image alone: baselines for hidden pixels, Gaussian blur, superpixels, control maps.

Blurring a row of n pixels is a product with an n x n matrix K, K_ij = g(i - j), plus what the border folds
back. g(d) = exp(-d^2 / (2 sigma^2)) for |d| <= floor(4 sigma + 1/2), scaled to sum to 1: the kernel of
scipy.ndimage.gaussian_filter with its default truncation. The matrices are made in float64.

Segmentation (achanta2012slic; vedaldi2008quickshift; felzenszwalb2004graph; by scikit-image on the CPU) reads
the image, not the model's input: inputs go back to 8 bits through the model's own preprocessing, or are
scaled to their own range if that has another number of channels. It takes longer than a pass, and an audit
needs the same images repeatedly. So the last results are cached by the content of the image, and a run starts
with the next images while the network is busy.

Floors are maps that ignore the model: a method that does not score above them explains nothing. Many maps
look like edges (adebayo2018sanity), and objects mostly lie in the middle (zhang2018excitation).
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache, partial, reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import HeatproofError, InputError, did_you_mean
from heatproof.images.loader import available_cpus
from heatproof.models.model import Model
from heatproof.models.running import at_least_float, memory_format
from heatproof.registry import FLOOR_CARD, explainer, explainers, parse_call
from heatproof.show import eight_bit
from heatproof.timeline import span
from heatproof.types import Trace, per_map, size_of, spatial_dims

QUICKSHIFT = {"kernel_size": 4, "max_dist": 200, "ratio": 0.2}  # of the lime package
FELZENSZWALB = {"scale": 100, "sigma": 0.5, "min_size": 50}  # of scikit-image's comparison of the three
SEGMENTATIONS = ("slic", "quickshift", "felzenszwalb")
CACHED_PIXELS = 2**24  # 334 images of 224x224, 64 MB
Item = TypeVar("Item")
Result = TypeVar("Result")
BLUR_SIGMA = 10.0
BASELINES = ("blur", "black", "mean", "noise")  # for pixels that are hidden
STARTS = ("zero", "black", "blur", "noise")  # for paths to the image
TRUNCATE = 4.0  # kernel radius in standard deviations
floor = partial(explainer, card=FLOOR_CARD, forward_only=True, volumes=True)
GREY = (0.2125, 0.7154, 0.0721)  # luminance of red, green, blue, as scikit-image weighs them


def baseline_images(
    model: Model, images: Tensor, kind: str = "blur", seed: int = 0, known: Sequence[str] = BASELINES
) -> Tensor:
    """Baseline images "b c H W" of one of the `known` kinds.

    These are zero (in normalised space), black (0 before normalisation), blur (Gaussian, sigma 10), mean (the
    image's own, per channel) or noise (standard normal in normalised space, by the seed, the same for every
    image).
    """
    if kind not in known:
        raise InputError(f"unknown baseline {kind!r}; {did_you_mean(kind, known)}")
    images = at_least_float(images)
    if kind == "zero":
        return torch.zeros_like(images)
    if kind == "blur":
        return gaussian_blur(images, BLUR_SIGMA, axes=images.ndim - 2)
    if kind == "mean":
        return images.mean(spatial_dims(images, 2), keepdim=True).expand_as(images)
    if kind == "noise":
        drawn = np.random.default_rng(seed).standard_normal(images.shape[1:], dtype=np.float32)
        return torch.from_numpy(drawn).to(images).expand_as(images)
    channels = model.preprocess.channels
    if channels != images.shape[1]:
        other = "zero" if "zero" in known else "mean"
        raise InputError(
            f"'black' needs the model's preprocessing, but that has {channels} channels and the images "
            f"have {images.shape[1]}; give the model its own Preprocess or use {other!r}"
        )
    return model.preprocess.normalise(torch.zeros_like(images))


def mixed(
    visible: Tensor, images: Tensor, others: Tensor, rows: Tensor, segments: Tensor | None = None
) -> Tensor:
    """Inputs "n c H W": input j is image rows[j] where visible[j], "H W" bool, is true, its other elsewhere.

    segments: "b H W" numbers of segments; visible[j] is then "s" bool, by segment.
    """
    if not images.is_cpu:
        if segments is not None:
            visible = visible.gather(1, segments.flatten(1)[rows]).view(-1, *segments.shape[1:])
        return torch.where(visible[:, None], images[rows], others[rows])
    # On a CPU, indexing both images for every input takes more than twice as long; lerp is exact at 0 and 1,
    # and faster than where.
    inputs = torch.empty(
        (len(rows), *images.shape[1:]), dtype=images.dtype, memory_format=memory_format(images)
    )
    share = visible.contiguous().view(torch.uint8).to(images.dtype)  # from bool it takes ten times as long
    for target, row, part in zip(inputs, rows.tolist(), share, strict=True):
        if segments is not None:
            part = part.index_select(0, segments[row].flatten()).view(segments.shape[1:])
        target.copy_(torch.lerp(others[row], images[row], part))
    return inputs


def variant_scores(
    trace: Trace, rows: Tensor, count: int, make: Callable[[Tensor, Tensor], Tensor],
    read: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Tensor "r n": the class's probability for `count` variants of each of the images `rows`.

    make(images, variants): builds a batch, from the numbers of images and of variants.
    read: from logits and targets to scores, if not probabilities.
    """
    read, rows = read or trace.model.measured, rows.to(trace.images.device, non_blocking=True)

    def inputs(start: int, stop: int) -> Tensor:
        jobs = torch.arange(start, stop, device=rows.device)
        return make(rows[jobs // count], jobs % count)

    def score(logits: Tensor, start: int, stop: int) -> Tensor:
        jobs = torch.arange(start, stop, device=logits.device)
        return read(logits, trace.targets[rows[jobs // count]])

    return trace.queue.predict(len(rows) * count, inputs, score).view(-1, count)


def in_batches(trace: Trace, count: int, work: Callable[[int, int], Tensor]) -> Tensor:
    """The joined results of work(start, stop) for all jobs."""
    parts: list[Tensor] = []
    trace.queue.each(count, work, parts.append)
    return torch.cat(parts)


def gaussian_blur(images: Tensor, sigma: float, axes: int = 2) -> Tensor:
    """Blur "... H W" by a Gaussian of `sigma` pixels, reflected at the border; with 3 axes "... D H W".

    >>> dot = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    >>> gaussian_blur(dot, 0.5).round(decimals=2).tolist()
    [[0.0, 0.11, 0.79, 0.11, 0.0]]
    """
    *slices, rows, columns = (
        blur_matrices(n, [sigma], images.device, reflect=True)[0].to(images.dtype)
        for n in images.shape[-axes:]
    )
    blurred: Tensor = rows @ images @ columns.T
    return torch.einsum("ed,...dhw->...ehw", *slices, blurred) if slices else blurred


def blur_matrices(
    size: int, sigmas: Sequence[float], device: torch.device | str | None = None, reflect: bool = False
) -> Tensor:
    """Tensor "k size size": the matrix that blurs an axis of `size` pixels, for each of k sigmas.

    reflect: repeat the image beyond its border, mirrored, as scipy's "reflect"; else it is 0 there.
    """
    if min(sigmas) < 0:
        raise InputError(f"a blur's sigma must be 0 or more, got {min(sigmas)}")
    sigma = torch.tensor(list(sigmas), dtype=torch.float64, device=device)[:, None]
    radius = (TRUNCATE * sigma + 0.5).floor()
    margin = int(radius.max()) if reflect else 0
    longest = max(int(radius.max()), size - 1 + margin)
    offsets = torch.arange(-longest, longest + 1, device=device)
    kernels = torch.exp(-0.5 * (offsets / sigma.clamp(min=1e-9)) ** 2) * (offsets.abs() <= radius)
    kernels = kernels / kernels.sum(1, keepdim=True)
    sources = torch.arange(-margin, size + margin, device=device)
    matrices = kernels[:, sources - torch.arange(size, device=device)[:, None] + longest]
    if not reflect:
        return matrices
    mirrored = torch.minimum(sources % (2 * size), (-1 - sources) % (2 * size))  # the border pixel twice
    folded = torch.zeros(len(sigma), size, size, dtype=torch.float64, device=device)
    return folded.index_add_(2, mirrored, matrices)


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

    kind: "slic" with about `count` segments, "quickshift" (4, 200, .2), whose ties follow the seed, or
    "felzenszwalb" (100, .5, 50).
    """
    if kind not in SEGMENTATIONS:
        raise InputError(f"unknown segments {kind!r}; {did_you_mean(kind, SEGMENTATIONS)}")
    if count < 1 or compactness <= 0:
        raise InputError(f"slic needs count >= 1 and compactness > 0, got {count} and {compactness}")
    if kind != "slic" and images.ndim > 4:
        raise InputError(f"{kind} cuts images, not volumes; use segments='slic'")

    def cut() -> Tensor:
        futures = _begin(model, images, kind, count, compactness, seed)
        with span("waiting", "superpixels"):
            segments = np.stack([future.result() for future in futures])
        return torch.from_numpy(segments).long().to(images.device)

    return _last_segments(images, (kind, count, compactness, seed, model.preprocess), cut)


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
            *{"slic": options[:-1], "quickshift": (kind, seed)}.get(kind, (kind,)),
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


_last_noise, _last_segments, _cache = LastBatch(), LastBatch(), _SegmentCache()
if hasattr(os, "register_at_fork"):  # the parent's threads, and their futures, never end in a child process
    os.register_at_fork(after_in_child=threads.cache_clear)
    os.register_at_fork(after_in_child=_cache.__init__)  # type: ignore[misc]


def _cut(image: np.ndarray, kind: str, count: int, compactness: float, seed: int) -> np.ndarray:
    from skimage.segmentation import felzenszwalb, quickshift, slic

    if image.shape[-1] == 1:
        image = image.repeat(3, axis=-1)
    with span("superpixels"):
        if kind == "slic":
            labels = slic(image, n_segments=count, compactness=compactness, start_label=0, channel_axis=-1)
        elif kind == "felzenszwalb":
            labels = felzenszwalb(image, **FELZENSZWALB, channel_axis=-1)
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


@floor("random", cite="adebayo2018sanity")
def random(trace: Trace) -> Tensor:
    """Uniform noise, drawn from the seed and the image's pixels.

    u_ij uniform in [0, 1). The same image gets the same map in every batch, another image another map. The
    maximum is 1 and all else below 1 - 2**-9, so that half precision makes no equal maxima: the pointing game
    takes the first of them, which would lie in the top 8 % of a 224-pixel image on average.
    """
    images = trace.images

    def draw(image: np.ndarray) -> np.ndarray:
        key = int.from_bytes(hashlib.blake2b(image.tobytes(), digest_size=16).digest())
        noise = np.random.default_rng((trace.seed, key)).random(trace.image_size, dtype=np.float32)
        peak, noise = noise.argmax(), noise * np.float32(1 - 2**-9)
        noise.flat[peak] = 1
        return noise

    def drawn() -> Tensor:
        maps = in_threads(draw, images.float().contiguous().cpu().numpy())
        return torch.from_numpy(np.stack(maps)).to(images.device)

    return _last_noise(images, trace.seed, drawn).clone()


@floor("edges", cite="sobel1968edges", aliases=("edge-detector", "sobel"))
def edges(trace: Trace) -> Tensor:
    """The Sobel edge strength of the grey image.

    sqrt((g_y^2 + g_x^2) / 2), g the 3x3 Sobel derivatives with the border pixels repeated. Grey is the
    luminance of the image restored through the model's preprocessing, or the channels' mean where there
    are not three. Of a volume, sqrt((g_z^2 + g_y^2 + g_x^2) / 3).
    """
    pictures = pictures_of(trace.model, trace.images)
    if pictures.shape[1] == 3:
        grey = torch.einsum("c,bc...->b...", pictures.new_tensor(GREY), pictures)
    else:
        grey = pictures.mean(1)
    smooth, difference = grey.new_tensor([0.25, 0.5, 0.25]), grey.new_tensor([1.0, 0.0, -1.0])
    axes = grey.ndim - 1
    sides = [[difference if at == axis else smooth for at in range(axes)] for axis in range(axes)]
    padded = torch.nn.functional.pad(grey[:, None], (1, 1) * axes, mode="replicate")
    convolve = torch.nn.functional.conv2d if axes == 2 else torch.nn.functional.conv3d
    slopes = convolve(padded, torch.stack([_product(kernel) for kernel in sides])[:, None])
    return (slopes.square().sum(1) / axes).sqrt()


@floor("centre", cite="zhang2018excitation", aliases=("center",))
def centre(trace: Trace) -> Tensor:
    """A Gaussian bump around the middle pixel (H // 2, W // 2).

    exp(-8 ((i - H // 2)^2 / H^2 + (j - W // 2)^2 / W^2)): a standard deviation of a quarter of each side.
    """
    bumps = [
        torch.exp(-8 * ((torch.arange(n, device=trace.images.device) - n // 2) / n) ** 2)
        for n in trace.image_size
    ]
    return _product(bumps).expand(len(trace.images), *trace.image_size)


def _product(sides: Sequence[Tensor]) -> Tensor:
    """The outer product: "H", "W" -> "H W", and so on."""
    return reduce(lambda whole, side: whole[..., None] * side, sides)


@lru_cache(maxsize=1024)
def floor_name(method: str) -> str:
    """The name of the floor that a method is; "" for one that reads the network.

    >>> floor_name("sobel"), floor_name("random(seed=3)"), floor_name("gradcam")
    ('edges', 'random', '')
    """
    try:
        entry = explainers.get(parse_call(method)[0])
    except HeatproofError:
        return ""
    return entry.name if entry.card == FLOOR_CARD else ""


def is_floor(method: str) -> bool:
    """Whether a method ignores the network."""
    return bool(floor_name(method))
