"""What travels along the path: Batch -> Trace -> Maps -> Score, in Units.

Shapes are written in axis names: b images, c channels, h w at a map's own size, H W at the image's. Volumes
have a third axis in front of these two: their images are "b c D H W", their maps "b d h w".
"""

from __future__ import annotations

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
from heatproof.grids import constant, normalise, per_map, places, size_of, upsample  # noqa: F401, for all
from heatproof.rows import Score as Score
from heatproof.rows import Unit as Unit
from heatproof.show import Strip, as_pictures, brightened, colours, hottest, overlay, pixels, sections, text

if TYPE_CHECKING:
    import numpy.typing

    from heatproof.images.preprocess import Preprocess
    from heatproof.models.model import Model
    from heatproof.models.queue import Queue

ArrayLike: TypeAlias = "Tensor | numpy.typing.ArrayLike"
Picture = str | PathLike[str] | Image.Image
# What is explained: class numbers, (class, mask or box), or a function of the output; see docs/heads.md.
Targets: TypeAlias = "ArrayLike | tuple[ArrayLike, ArrayLike] | Callable[[Any], Tensor]"
# Model-ready "b c H W" or "b c D H W", or what goes through preprocessing.
Images: TypeAlias = "ArrayLike | Picture | Sequence[Picture]"


@dataclass(frozen=True)
class Truth:
    """What is known about where the evidence is: boxes (x0, y0, x1, y1 in pixels), masks by part name."""

    boxes: tuple[tuple[tuple[float, float, float, float], ...], ...] | None = None
    masks: Mapping[str, Tensor] = field(default_factory=dict)  # each "b H W", bool
    lost: tuple[tuple[str, ...], ...] = ()  # where there are boxes: why those that the crop left out are gone

    def take(self, rows: slice) -> Truth:
        """The truth of some images."""
        boxes = None if self.boxes is None else self.boxes[rows]
        return Truth(boxes, {part: mask[rows] for part, mask in self.masks.items()}, self.lost[rows])


@dataclass(frozen=True)
class Batch:
    """Model-ready images with what is known about them.

    Args:
        ids, images: their names, and "b c H W".
        labels: "b" classes.
        truth: boxes or masks of the evidence.
        findings: "b k" bool, of images that may have several findings; then there are no labels.
        by_finding: the truth of each finding that occurs.
        sides: shorter side of each image's file in pixels, where it was read from one.
    """

    ids: tuple[str, ...]
    images: Tensor
    labels: Tensor | None = None
    truth: Truth | None = None
    findings: Tensor | None = None
    by_finding: Mapping[int, Truth] = field(default_factory=dict)
    sides: tuple[int, ...] = ()

    def take(self, rows: slice) -> Batch:
        """Some of the images, with what is known about them."""
        labels, findings = (None if each is None else each[rows] for each in (self.labels, self.findings))
        truth = None if self.truth is None else self.truth.take(rows)
        by_finding = {finding: own.take(rows) for finding, own in self.by_finding.items()}
        return Batch(self.ids[rows], self.images[rows], labels, truth, findings, by_finding, self.sides[rows])


@dataclass(frozen=True)
class Trace:
    """What one shared pass over a batch yields. Only what the methods declared is filled.

    Args:
        model, images: the network, and "b c H W" as given.
        targets, logits: "b", the explained class, and "b k".
        layer: the layer most CAMs read.
        layers, scales: every captured layer, in order of execution; those that multi-scale CAMs average.
        activations, gradients: By layer, each "b c h w", float32.
        input_gradient: "b c H W".
        blank_logits: "k", of the all-zero image.
        queue, seed: for methods that perturb the input, and for those that draw.
        ids: names of the images, for methods that read their maps.
    """

    model: Model
    images: Tensor
    targets: Tensor
    logits: Tensor
    layer: str | None = None
    layers: tuple[str, ...] = ()
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
        """Gradient times activation at the layer, which several CAMs read: formed once."""
        return self.gradient * self.activation

    @property
    def image_size(self) -> tuple[int, ...]:
        return size_of(self.images)


class Signed(NamedTuple):
    """What a method returns whose sign means something that its unsigned map loses."""

    values: Tensor  # "b h w", what metrics read
    signed: Tensor  # "b h w"


@dataclass(frozen=True)
class Maps:
    """One method's maps of one batch, at the method's own size.

    Args:
        method: its name, with its options.
        values: "b h w", float32, as the method defines it (not normalised).
        image_size: height and width of the images; depth, height and width of volumes.
        explained: "b", the class that each map explains.
        ids: names of the images.
        signed_values: "b h w", where the sign means something that `values` loses.
        dead: "b" bool, whether the layer it is read from says the same at every place; None without a layer.
        error, passes: of methods that draw: the map's standard error "b h w", and the passes "b" it took.
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

    @property
    def signed(self) -> Tensor:
        """The map with its signs: the method's signed map where it has one of its own, else its values."""
        return self.values if self.signed_values is None else self.signed_values

    @property
    def degenerate(self) -> Tensor:
        """ "b" bool: maps that say nothing because nothing in them stands out."""
        return constant(self.values)

    def normalised(self) -> Tensor:
        """ "b h w" in [0, 1], at the method's own size."""
        return normalise(self.values)

    def upsample(self, size: tuple[int, ...] | None = None) -> Tensor:
        """ "b H W" in [0, 1]: bilinear (of volumes trilinear) to the image's size, then normalised there.

        Args:
            size: another height and width than the image's.
        """
        return normalise(upsample(self.values, size or self.image_size))

    def for_display(self) -> Tensor:
        """ "b H W" in [0, 1] on the CPU, to look at: as upsample, but brightened (see show.py) where the
        method has a value for every pixel."""
        heat = self.upsample().cpu()
        if tuple(self.values.shape[1:]) != tuple(self.image_size):
            return heat
        return torch.from_numpy(brightened(heat.detach().numpy()))

    def to(self, device: str | torch.device) -> Maps:
        """The maps on a device.

        Args:
            device: such as "cpu" or "cuda".
        """
        return replace(self, **self._each(lambda name: getattr(self, name).to(device)))

    def take(self, rows: Tensor | Sequence[int] | slice) -> Maps:
        """The maps of some images, with their names, classes and signs.

        Args:
            rows: places, a "b" bool that says of each whether it stays, or a slice.
        """
        index = rows if isinstance(rows, torch.Tensor | slice) else list(rows)

        def of(one: Tensor) -> Tensor:
            return one[index.to(one.device) if isinstance(index, torch.Tensor) else index]

        ids = tuple(self.ids[i] for i in of(torch.arange(len(self))).tolist()) if self.ids else ()
        return replace(self, ids=ids, **self._each(lambda name: of(getattr(self, name))))

    def _each(self, change: Callable[[str], Tensor]) -> dict[str, Any]:
        """Every tensor that there is, changed."""
        names = ("values", "explained", "signed_values", "dead", "error", "passes")
        return {name: change(name) for name in names if getattr(self, name) is not None}

    def numpy(self) -> np.ndarray:
        """ "b h w": the values as an array, at the method's own size."""
        return np.asarray(self.values.detach().cpu().numpy())

    def overlay(
        self,
        images: Tensor | Image.Image | Sequence[Image.Image],
        preprocess: Preprocess | None = None,
        *,
        cmap: str = "inferno",
        alpha: float = 0.6,
    ) -> Strip:
        """Each map in colour over its image: a list of Pillow pictures that a notebook shows.

        Args:
            images: what was explained, as a tensor "b c H W" or as pictures. Of volumes "b c D H W" three
                planes are shown, of each axis that with most heat.
            preprocess: the model's own, model.preprocess: crops pictures to what the model saw, and gives a
                tensor its colours back. A tensor is stretched to the whole range without it.
            cmap, alpha: a colour map (inferno, magma, viridis, grey), and the weight of its colours.
        """
        heat = self.for_display().numpy()
        if heat.ndim == 4 and isinstance(images, torch.Tensor):
            planes = [hottest(one) for one in heat]
            shown = zip(pixels(images, preprocess, planes), heat, planes, strict=True)
            return Strip(
                (overlay(Image.fromarray(p), sections(h, at), cmap, alpha) for p, h, at in shown), self.ids
            )
        pictures = as_pictures(images, preprocess)
        if len(pictures) != len(self):
            raise InputError(f"there are {len(self)} maps but {len(pictures)} images; give those explained")
        if pictures[0].size != self.image_size[::-1]:
            raise InputError(
                f"the picture is {pictures[0].height} x {pictures[0].width} but the model saw "
                f"{self.image_size[0]} x {self.image_size[1]}; give overlay the model's preprocess too"
            )
        laid = zip(pictures, heat, strict=True)
        return Strip([overlay(picture, one, cmap, alpha) for picture, one in laid], self.ids)

    def save(self, path: str | Path) -> None:
        """Write values, explained, ids, method, image_size; signed, error and passes where there are any.

        Args:
            path: a file whose name ends in .npz, which numpy.load opens.
        """
        if Path(path).suffix != ".npz":
            raise InputError(f"maps are saved as .npz; name {Path(path).stem}.npz instead of {path}")
        content: dict[str, Any] = {"values": self.numpy(), "explained": self.explained.cpu().numpy()}
        content |= {"ids": self.ids, "method": self.method, "image_size": self.image_size}
        beside = {"signed": self.signed_values, "error": self.error, "passes": self.passes}
        content |= {name: one.detach().cpu().numpy() for name, one in beside.items() if one is not None}
        try:
            np.savez_compressed(path, **content)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}; choose another place") from error

    def _repr_html_(self) -> str:
        explained, ids = self.explained.tolist(), self.ids or map(str, range(len(self)))
        titles = [f"{name}: class {c}" for name, c in zip(ids, explained, strict=True)]
        heat = self.for_display().numpy()
        flat = heat if heat.ndim == 3 else [sections(one, hottest(one)) for one in heat]
        strip = Strip((Image.fromarray(colours(one)) for one in flat), titles)
        return f"<p>{len(self)} maps of {text(self.method)}</p>{strip._repr_html_()}"

    @staticmethod
    def of(values: ArrayLike, images: Tensor, explained: ArrayLike) -> Maps:
        """Maps that come from elsewhere, for metrics and pictures.

        Args:
            values, images, explained: "b h w"; "b c H W", what they are of; the class, one or one each.
        """
        kept, classes = torch.as_tensor(values).detach().float(), torch.as_tensor(explained)
        if kept.ndim != images.ndim - 1 or len(kept) != len(images):
            raise InputError(f"maps {tuple(kept.shape)} are not 'b h w' of images {tuple(images.shape)}")
        return Maps("maps", kept, size_of(images), classes.expand(len(kept)).clone())

    @staticmethod
    def concatenate(parts: Sequence[Maps]) -> Maps:
        """Batches of one method, one after the other.

        Args:
            parts: at least one, of equal sizes.
        """
        if len(parts) == 1:
            return parts[0]
        every = parts[0]._each(lambda name: torch.cat([getattr(p, name) for p in parts]))
        return replace(parts[0], ids=tuple(i for p in parts for i in p.ids), **every)
