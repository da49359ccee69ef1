"""Types that pass between packages: Batch, Trace, Maps (Score and Unit: rows.py); operations on maps.

Shapes are written as axis names: b images, c channels, h w at the map's size, H W at the image's. Volumes
have a third axis in front of these two: their images are "b c D H W", their maps "b d h w".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from heatproof.errors import InputError
from heatproof.rows import Score as Score
from heatproof.rows import Unit as Unit
from heatproof.show import Strip, as_pictures, brightened, colours, hottest, overlay, pixels, sections, text

if TYPE_CHECKING:
    import numpy.typing

    from heatproof.images.preprocess import Preprocess
    from heatproof.models.model import Model, Queue

ArrayLike: TypeAlias = "Tensor | numpy.typing.ArrayLike"
Picture = str | PathLike[str] | Image.Image
# Class numbers, (class, mask or box), or a function of the output; see docs/heads.md.
Targets: TypeAlias = "ArrayLike | tuple[ArrayLike, ArrayLike] | Callable[[Any], Tensor]"
# Model-ready "b c H W" or "b c D H W", or images and files that go through preprocessing.
Images: TypeAlias = "ArrayLike | Picture | Sequence[Picture]"


def size_of(images: Tensor) -> tuple[int, ...]:
    """Height and width of "b c H W"; depth, height and width of "b c D H W"."""
    return tuple(int(side) for side in images.shape[2:])


def spatial_dims(maps: Tensor, first: int = 1) -> tuple[int, ...]:
    """The spatial axes of a tensor: those from `first` on."""
    return tuple(range(first, maps.ndim))


def per_map(numbers: Tensor, maps: Tensor) -> Tensor:
    """Reshape "b" numbers to "b 1 1" or "b 1 1 1", to broadcast over maps."""
    return numbers.reshape(-1, *[1] * (maps.ndim - 1))


def extremes(values: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over axes, with keepdim; aminmax takes several times as long on a CPU."""
    return values.amin(dims, keepdim=True), values.amax(dims, keepdim=True)


def normalise(values: Tensor) -> Tensor:
    """Clip negatives, then min-max each map to [0, 1]; a constant map becomes all zeros.

    >>> normalise(torch.tensor([[[-1.0, 0.0], [1.0, 2.0]]])).tolist()
    [[[0.0, 0.0], [0.5, 1.0]]]
    """
    positive = _wide(values).clamp(min=0)
    low, high = extremes(positive, spatial_dims(values))
    span = high - low
    # An infinite divisor sends a constant map to zero without a branch per map.
    return ((positive - low) / torch.where(span > 0, span, math.inf)).float()


def constant(values: Tensor) -> Tensor:
    """Bool tensor "b": maps that are constant once negatives are clipped."""
    low, high = extremes(values.flatten(1).clamp(min=0), (1,))
    return (high == low)[:, 0]


def upsample(values: Tensor, size: tuple[int, ...]) -> Tensor:
    """Turn "b h w" into "b H W", linear in each axis, align_corners=False; float32, or float64 as maps."""
    values = _wide(values)
    if tuple(values.shape[1:]) == tuple(size):
        return values
    mode = "bilinear" if len(size) == 2 else "trilinear"
    larger = torch.nn.functional.interpolate(values[:, None], size=size, mode=mode, align_corners=False)[:, 0]
    low, high = extremes(values, spatial_dims(values))
    return torch.where(low == high, low, larger)  # a constant stays one, also where its weights round


def _wide(values: Tensor) -> Tensor:
    """float32, or float64 if the maps are: a cast before normalising would lose their contrast."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@dataclass(frozen=True)
class Truth:
    """Annotations of a batch: boxes (x0, y0, x1, y1 in pixels), masks by part name."""

    boxes: tuple[tuple[tuple[float, float, float, float], ...], ...] | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)  # each "b H W", bool
    lost: tuple[tuple[str, ...], ...] = ()  # with boxes: the reasons for those that the crop removed

    def take(self, rows: slice) -> Truth:
        boxes = None if self.boxes is None else self.boxes[rows]
        return Truth(boxes, {part: mask[rows] for part, mask in self.masks.items()}, self.lost[rows])


@dataclass(frozen=True)
class Batch:
    """Model-ready images with names, labels and annotations.

    Args:
        ids, images: names, and "b c H W".
        labels: "b" classes.
        truth: boxes or masks of the object.
        findings: "b k" bool, labels of multi-label images, which have no `labels`.
        by_finding: annotations of each label that occurs.
        sides: shorter side in pixels of each image's file, if it was read from a file.

    Example:
        >>> import torch, heatproof as hp
        >>> batch = hp.Batch(("a.png", "b.png"), torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
        >>> batch.take(slice(1, 2)).ids
        ('b.png',)
    """

    ids: tuple[str, ...]
    images: Tensor
    labels: Tensor | None = None
    truth: Truth | None = None
    findings: Tensor | None = None
    by_finding: Mapping[int, Truth] = field(default_factory=dict)
    sides: tuple[int, ...] = ()

    def take(self, rows: slice) -> Batch:
        labels, findings = (None if each is None else each[rows] for each in (self.labels, self.findings))
        truth = None if self.truth is None else self.truth.take(rows)
        by_finding = {finding: own.take(rows) for finding, own in self.by_finding.items()}
        return Batch(self.ids[rows], self.images[rows], labels, truth, findings, by_finding, self.sides[rows])


@dataclass(frozen=True)
class Trace:
    """The result of one shared pass over a batch, from which methods compute maps.

    Only the fields that the methods need are filled.

    Args:
        model, images: the network, and "b c H W" as given.
        targets, logits: "b", the explained class, and "b k".
        layer: the layer most CAMs read.
        scales: the layers that multi-scale CAMs average.
        activations, gradients: by layer, in order of execution, each "b c h w", float32.
        input_gradient: "b c H W".
        blank_logits: "k", of the all-zero image.
        queue, seed: for methods that perturb the input, and for those that draw random numbers.
        ids: names of the images, for methods whose maps are read from files.

    Example:
        >>> import torch, heatproof as hp
        >>> model = hp.load_model(torch.nn.Conv2d(3, 2, 1))
        >>> trace = hp.Trace(model, torch.rand(1, 3, 8, 8), torch.tensor([1]), torch.rand(1, 2))
        >>> trace.image_size
        (8, 8)
    """

    model: Model
    images: Tensor
    targets: Tensor
    logits: Tensor
    layer: str | None = None
    scales: tuple[str, ...] = ()
    activations: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    input_gradient: Tensor | None = None
    blank_logits: Tensor | None = None
    queue: Queue = None  # type: ignore[assignment]
    seed: int = 0
    ids: tuple[str, ...] = ()

    @property
    def activation(self) -> Tensor:
        assert self.layer is not None
        return self.activations[self.layer]

    @property
    def gradient(self) -> Tensor:
        assert self.layer is not None
        return self.gradients[self.layer]

    @cached_property
    def product(self) -> Tensor:
        """Gradient times activation at the layer."""
        return self.gradient * self.activation

    @cached_property
    def rectified(self) -> Tensor:
        """The positive part of the gradient at the layer."""
        return self.gradient.relu()

    @cached_property
    def total(self) -> Tensor:
        """Tensor "b c": the sum of each channel of the layer."""
        return self.activation.sum(spatial_dims(self.activation, 2))

    @property
    def image_size(self) -> tuple[int, ...]:
        return size_of(self.images)


class Signed(NamedTuple):
    """Maps of a method that also computes a signed version."""

    values: Tensor  # "b h w", what metrics read
    signed: Tensor  # "b h w"


@dataclass(frozen=True)
class Maps:
    """The maps of one method for a batch, at the method's own size.

    Args:
        method: name of the method, with options.
        values: "b h w", float32, as the method defines it (not normalised).
        image_size: height and width of the images; depth, height and width of volumes.
        explained: "b", the class that each map explains.
        ids: names of the images.
        signed_values: "b h w", of methods with a signed version of `values`.
        dead: "b" bool, whether every channel of the layer is constant over places; None without a layer.
        error, passes: of methods that sample: the map's standard error "b h w", and the number of passes "b".

    Example:
        >>> import torch, heatproof as hp
        >>> maps = hp.Maps("gradcam", torch.rand(2, 4, 4), (8, 8), explained=torch.tensor([0, 1]))
        >>> len(maps), maps[0].shape, maps.upsample().shape
        (2, torch.Size([4, 4]), torch.Size([2, 8, 8]))
    """

    method: str
    values: Tensor
    image_size: tuple[int, ...]
    explained: Tensor
    ids: tuple[str, ...] = ()
    signed_values: Tensor | None = None
    dead: Tensor | None = None
    error: Tensor | None = None
    passes: Tensor | None = None

    def __len__(self) -> int:
        return int(self.values.shape[0])

    def __getitem__(self, index: int | slice) -> Tensor:
        """The values of a map "h w", or of several "n h w"; `take` returns Maps."""
        return self.values[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype, copy=copy)

    @property
    def signed(self) -> Tensor:
        """The signed map where the method has one, else `values`."""
        return self.values if self.signed_values is None else self.signed_values

    @property
    def degenerate(self) -> Tensor:
        """Bool tensor "b": maps that are constant once negatives are clipped."""
        return constant(self.values)

    def normalised(self) -> Tensor:
        """Tensor "b h w" in [0, 1], at the method's own size."""
        return normalise(self.values)

    def upsample(self, size: tuple[int, ...] | None = None) -> Tensor:
        """Tensor "b H W" in [0, 1]: bilinear (of volumes trilinear) to the image's size, then normalised.

        Args:
            size: height and width, if not those of the image.
        """
        return normalise(upsample(self.values, size or self.image_size))

    def for_display(self) -> Tensor:
        """Tensor "b H W" in [0, 1] on the CPU: as upsample, brightened for methods with a value per pixel."""
        heat = self.upsample().cpu()
        if tuple(self.values.shape[1:]) != tuple(self.image_size):
            return heat
        return torch.from_numpy(brightened(heat.detach().numpy()))

    def to(self, device: str | torch.device) -> Maps:
        """Move the maps to a device.

        Args:
            device: such as "cpu" or "cuda".
        """
        return replace(self, **self._each(lambda name: getattr(self, name).to(device)))

    def take(self, rows: Tensor | Sequence[int] | slice) -> Maps:
        """Select the maps of some images, with their names, classes and signs.

        Args:
            rows: indices, a "b" bool mask, or a slice.
        """
        index = rows if isinstance(rows, torch.Tensor | slice) else list(rows)

        def select(tensor: Tensor) -> Tensor:
            return tensor[index.to(tensor.device) if isinstance(index, torch.Tensor) else index]

        ids = tuple(self.ids[i] for i in select(torch.arange(len(self))).tolist()) if self.ids else ()
        return replace(self, ids=ids, **self._each(lambda name: select(getattr(self, name))))

    def _each(self, change: Callable[[str], Tensor]) -> dict[str, Any]:
        """The tensors that are not None, changed, by name."""
        names = ("values", "explained", "signed_values", "dead", "error", "passes")
        return {name: change(name) for name in names if getattr(self, name) is not None}

    def numpy(self) -> np.ndarray:
        """Array "b h w": the values as an array, at the method's own size."""
        return np.asarray(self.values.detach().cpu())

    def overlay(
        self, images: Tensor | Image.Image | Sequence[Image.Image], preprocess: Preprocess | None = None, *,
        cmap: str = "inferno", alpha: float = 0.6,
    ) -> Strip:  # fmt: skip
        """Overlay each map in colour on its image.

        Args:
            images: those explained, as a tensor "b c H W" or as Pillow images. Of volumes "b c D H W" three
                planes are shown, of each axis that with the largest sum of the map.
            preprocess: model.preprocess: crops Pillow images to what the model saw, and restores the colours
                of a tensor. Without it, a tensor is stretched to the whole range.
            cmap, alpha: a colour map (inferno, magma, viridis, grey), and the weight of its colours.

        Returns:
            A list of Pillow images that a notebook shows.
        """
        heat: Sequence[np.ndarray] = self.for_display().numpy()  # type: ignore[assignment]
        if len(self.image_size) == 3 and isinstance(images, torch.Tensor):
            planes = [hottest(volume) for volume in heat]
            opened = [Image.fromarray(sheet) for sheet in pixels(images, preprocess, planes)]
            heat = [sections(volume, at) for volume, at in zip(heat, planes, strict=True)]
        else:
            opened = as_pictures(images, preprocess)
            if len(opened) != len(self):
                raise InputError(f"there are {len(self)} maps but {len(opened)} images; give those explained")
            if opened[0].size != self.image_size[::-1]:
                raise InputError(
                    f"the image is {opened[0].height} x {opened[0].width} but the model saw "
                    f"{self.image_size[0]} x {self.image_size[1]}; give overlay the model's preprocess too"
                )
        return Strip([overlay(*pair, cmap, alpha) for pair in zip(opened, heat, strict=True)], self.ids)

    def save(self, path: str | Path) -> None:
        """Save values, explained, ids, method, image_size; and signed, error, passes if there are any.

        Args:
            path: a file whose name ends in .npz.
        """
        if Path(path).suffix != ".npz":
            raise InputError(f"maps are saved as .npz; name {Path(path).stem}.npz instead of {path}")
        content: dict[str, Any] = {"values": self.numpy(), "explained": self.explained.cpu().numpy()}
        content |= {"ids": self.ids, "method": self.method, "image_size": self.image_size}
        optional = {"signed": self.signed_values, "error": self.error, "passes": self.passes}
        content |= {k: tensor.detach().cpu().numpy() for k, tensor in optional.items() if tensor is not None}
        try:
            np.savez_compressed(path, **content)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}; choose another place") from error

    def _repr_html_(self) -> str:
        explained, ids = self.explained.tolist(), self.ids or map(str, range(len(self)))
        titles = [f"{name}: class {c}" for name, c in zip(ids, explained, strict=True)]
        heat = self.for_display().numpy()
        flat = heat if heat.ndim == 3 else [sections(volume, hottest(volume)) for volume in heat]
        strip = Strip((Image.fromarray(colours(values)) for values in flat), titles)
        return f"<p>{len(self)} maps of {text(self.method)}</p>{strip._repr_html_()}"

    @staticmethod
    def of(values: ArrayLike, images: Tensor, explained: ArrayLike) -> Maps:
        """Make Maps from an array, for metrics and overlays.

        Args:
            values, images, explained: "b h w"; the explained images "b c H W"; the class, one or "b".
        """
        tensor, classes = torch.as_tensor(values).detach().float(), torch.as_tensor(explained)
        if tensor.ndim != images.ndim - 1 or len(tensor) != len(images):
            raise InputError(f"maps {tuple(tensor.shape)} are not 'b h w' of images {tuple(images.shape)}")
        return Maps("maps", tensor, size_of(images), classes.expand(len(tensor)).clone())

    @staticmethod
    def concatenate(parts: Sequence[Maps]) -> Maps:
        """Join the maps of several batches of a method.

        Args:
            parts: at least one, of equal sizes.
        """
        if len(parts) == 1:
            return parts[0]
        joined = parts[0]._each(lambda name: torch.cat([getattr(p, name) for p in parts]))
        return replace(parts[0], ids=tuple(i for p in parts for i in p.ids), **joined)
