"""Building blocks of metrics: maps and masks as tensors, scores with reasons, what a run passes to them.

For metrics of other packages too; docs/extend.md shows one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from textwrap import indent
from typing import Any, ParamSpec, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.errors import InputError
from heatproof.metrics.results import Cause as Cause
from heatproof.metrics.results import PerImage as PerImage
from heatproof.metrics.results import same_length as same_length
from heatproof.models.model import Model, as_model, bind_targets
from heatproof.registry import Metric, check_volumes, metrics
from heatproof.types import ArrayLike, Batch, Images, Maps, normalise, per_map, upsample

P = ParamSpec("P")
T = TypeVar("T")
Part = TypeVar("Part")
PIXELS_AT_ONCE = {"cpu": 2**20}
CONSTANT = "the map is constant, so nothing in it stands out"
NOT_FINITE = "a map has NaN or infinite values, as where the network's output has"
Change = Callable[[Maps], Maps]


class Passes(TypedDict, total=False):
    """Options of metrics that run the model, as of hp.explain."""

    batch_size: int | None
    progress: Callable[[int], object] | None


def bound(model: Model | nn.Module, images: Images, targets: Any = None) -> tuple[Model, Tensor, Any]:
    """The model with its columns bound to the targets, the images on its device, and the targets."""
    network = as_model(model)
    inputs = network.check_images(images).to(network.device)
    network, columns = bind_targets(network, inputs, targets)
    return network, inputs, columns


def cached(known: dict[Any, T] | None, key: Hashable, compute: Callable[[], T]) -> T:
    """The entry of a cache, computed if it is missing; without a cache, computed."""
    if known is None:
        return compute()
    if key not in known:
        known[key] = compute()
    return known[key]


def members(
    register: Callable[..., Metric], family: Callable[P, T], read: Callable[[T, str], Part], returns: str,
    example: str,
) -> Callable[..., Callable[P, Part]]:  # fmt: skip
    """Make metrics that each read one score of what `family` returns, with a signature and a docstring.

    The result takes the metric's name, its summary, the value of the example, the facts to register, and the
    names of score and function where these are others, {key} and {name} in `returns` and `example`.
    """
    signature = inspect.signature(family)
    signature = signature.replace(return_annotation=inspect.signature(read).return_annotation)
    arguments = f"Args:\n    {', '.join(signature.parameters)}: as for {family.__name__}."

    def member(
        metric: str, summary: str, value: str, key: str = "", function: str = "", **facts: Any
    ) -> Callable[P, Part]:
        names = {"key": key or metric, "name": function or metric}

        def single(*args: P.args, **kwargs: P.kwargs) -> Part:
            return read(family(*args, **kwargs), names["key"])

        shown = "Example:\n" + indent(f"{example.format_map(names)}\n{value}", "    ")
        text = [summary, arguments, f"Returns:\n    {returns.format_map(names)}", shown]
        single.__doc__, single.__signature__ = "\n\n".join(text), signature  # type: ignore[attr-defined]
        single.__name__ = single.__qualname__ = names["name"]
        single.__module__ = family.__module__
        return register(metric, **facts)(single)

    return member


def as_tensor(values: ArrayLike) -> Tensor:
    """A tensor, array or nested list as a tensor, where it already is."""
    return values if isinstance(values, torch.Tensor) else torch.as_tensor(np.asarray(values))


def raw_maps(maps: Maps | ArrayLike) -> Tensor:
    """Tensor "b h w" or "b d h w" as given: Maps, tensor or array, checked but not normalised."""
    values = maps.values if isinstance(maps, Maps) else as_tensor(maps)
    if values.ndim not in (3, 4) or 0 in values.shape[1:]:
        raise InputError(f"maps must be 'b h w' with h, w > 0, or 'b d h w'; got shape {tuple(values.shape)}")
    if not torch.isfinite(values).all():
        raise InputError("maps contain NaN or infinite values")
    return values


def finite(maps: Maps) -> Tensor:
    """Bool tensor "b": maps whose values are finite."""
    good = torch.isfinite(maps.values).flatten(1).all(1)
    if maps.signed_values is not None:
        good &= torch.isfinite(maps.signed_values).flatten(1).all(1)
    return good


def blanked(maps: Maps) -> Maps:
    """Maps that are not finite become all zeros, so that the others can be scored."""
    good = per_map(finite(maps), maps.values)
    signed = None if maps.signed_values is None else torch.where(good, maps.signed_values, 0.0)
    return replace(maps, values=torch.where(good, maps.values, 0.0), signed_values=signed)


def sized_maps(maps: Maps | ArrayLike) -> tuple[Tensor, tuple[int, ...]]:
    """Tensor "b h w" as given, and the size of the images: what Maps know, or the size of the maps."""
    values = raw_maps(maps)
    return values, maps.image_size if isinstance(maps, Maps) else tuple(map(int, values.shape[1:]))


def pixel_maps(maps: Maps | ArrayLike, size: tuple[int, ...] | None = None) -> Tensor:
    """Tensor "b H W" in [0, 1], normalised at image size (the Maps' own, or `size` where given)."""
    values, own = sized_maps(maps)
    return normalise(upsample(values, size or own))


def refuse_volumes(metric: str, size: tuple[int, ...]) -> None:
    """Raise InputError if a metric for 2D images gets volumes."""
    if len(size) > 2:
        check_volumes(metrics.get(metric))


def ascending(pixels: Tensor) -> Tensor:
    """Each row sorted. On the CPU through NumPy, whose value-only sort is ten times as fast."""
    if pixels.device.type == "cpu":
        return torch.from_numpy(np.sort(pixels.numpy(), axis=1))
    return pixels.sort(dim=1).values


def in_threads(count: int, work: Callable[[range], object]) -> None:
    """Distribute rows 0 to count - 1 over as many threads as torch has; NumPy releases the GIL."""
    threads = max(1, min(torch.get_num_threads(), count))
    shares = [range(first, count, threads) for first in range(threads)]
    if threads == 1:
        work(shares[0])
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, shares))


def align(mask: ArrayLike, size: tuple[int, ...], maps: Tensor, name: str) -> Tensor:
    """A mask "H W" or "b H W" of any size -> bool, "1 H W" or "b H W", on the maps' device."""
    values = as_tensor(mask).to(maps.device)
    values = values[None] if values.ndim == len(size) else values
    if values.ndim != len(size) + 1 or 0 in values.shape[1:] or values.shape[0] not in (1, len(maps)):
        axes = "H W" if len(size) == 2 else "D H W"
        raise InputError(
            f"{name} must be one mask {axes!r} or one per map, 'b {axes}' with b = {len(maps)}; "
            f"got shape {tuple(as_tensor(mask).shape)}"
        )
    if values.is_floating_point() and not torch.isfinite(values).all():
        raise InputError(f"{name} contains NaN or infinite values; a mask holds 0 and 1")
    if tuple(values.shape[1:]) != tuple(size):
        grow = torch.nn.functional.interpolate
        values = grow(values[:, None].float(), size=size, mode="nearest-exact")[:, 0]
    return values if values.dtype == torch.bool else values >= 0.5


def chunks(maps: Tensor, size: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the batch that bound memory; small ones on a CPU, for its caches."""
    step = max(1, PIXELS_AT_ONCE.get(maps.device.type, 2**24) // math.prod(size))
    return (slice(start, start + step) for start in range(0, len(maps), step))


@dataclass(frozen=True)
class BatchContext:
    """One batch: its images, labels and annotations, and their maps by every method."""

    model: Model
    batch: Batch
    maps: Mapping[str, Maps]  # as read back from the store
    targets: Tensor  # "b", the explained classes
    layer: Any = None
    seed: int = 0
    passed: Callable[[int], object] | None = None
    then: Change | None = None  # rounding of the store, to apply to control maps too
    caches: dict[Any, dict[Any, Any]] = field(default_factory=dict, repr=False)

    def cache(self, *key: str) -> dict[Any, Any]:
        """Results shared by the metrics of this batch."""
        return self.caches.setdefault(key, {})

    @property
    def classes(self) -> Tensor:
        """Explained classes as the model takes them; -1, for an image without a map, is scored NaN anyway."""
        return self.targets.clamp(min=0)

    @cached_property
    def probabilities(self) -> Tensor:
        """Tensor "b k", from a separate pass, so that a metric added later gets the same."""
        return self.model.probabilities(self.model.logits(self.batch.images)).cpu()

    @property
    def passes(self) -> dict[str, Any]:
        """Options of everything that runs the model."""
        return {"seed": self.seed, "progress": self.passed}


@dataclass(frozen=True)
class ImagePool:
    """A checkpoint's network and images, for metrics that run the network on some of them."""

    model: Model
    methods: tuple[str, ...]
    pictures: Callable[[int], Batch]  # largest number of images; labels if they are explained
    layer: Any
    passes: Mapping[str, Any]  # options of everything that runs the model
    annotated: Callable[[int], list[Batch]]  # largest number of images, with all labels and annotations
    classes: tuple[str, ...] = ()  # names by number


@dataclass(frozen=True)
class CheckpointContext:
    """All images of a checkpoint that could be used."""

    maps: Any  # of one method, on the run's device; None for a metric that needs none
    labels: Tensor  # "b"
    probabilities: Tensor  # "b k"; zero for a class whose probability was not stored
    seed: int
    # Probabilities of the same images at another checkpoint, by its name; zero where there are none.
    at: Callable[[str], Tensor] = lambda name: torch.zeros(0)
    # For multi-label images: thresholds per label, and labels and probabilities of all images.
    # Without maps `labels` is that table; with maps, each entry is one label of an image, with its map.
    limits: tuple[float, ...] | None = None
    every: tuple[Tensor, Tensor] | None = None
    rows: Sequence[int] = ()  # index into `every` of each map's image
