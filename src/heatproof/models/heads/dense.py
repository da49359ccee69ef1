"""Heads that answer place by place: segmentation and detection.

    segmentation   "b k h w" logits, of volumes "b k d h w"; torchvision's {"out": ...}; a record with .logits
                   column (c, i): the sum of class c's logits over the region that was asked for in image i,
                   a given mask or where the clean image is predicted to show the class that was asked for
    detection      a dict of boxes, scores and labels for each image, as torchvision returns it
                   column i: the score of the box that overlaps the reference box of image i by IoU >= 0.5,
                   of the same class, 0 where there is none; the reference is given or the best box of the
                   clean image

So these heads are first asked about some images (`models/targets.py`): that binds them to regions or boxes,
which stay as they are however the images are changed, and whichever weights the network gets. Before that
the region is the whole picture (its mean logits, a column for each class), and the box is any box (one
column: the highest score).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from heatproof.errors import ModelError, TargetError
from heatproof.grids import per_map
from heatproof.models.heads.base import Columns, Head, inside
from heatproof.models.heads.classes import in_unit_interval, undone_sigmoid

if TYPE_CHECKING:
    from heatproof.models.heads.find import LastStep

OVERLAP = 0.5  # IoU from which two boxes are the same
BOXES = ("boxes", "scores", "labels")


class Place(NamedTuple):
    """A class, and where: a mask "H W" or "b H W", or a box (x0, y0, x1, y1) or "b 4"."""

    classes: Any
    where: Tensor


def as_place(targets: Any) -> Place | None:
    """(class, region) as a person writes it; None for anything else, such as two class numbers."""
    if not isinstance(targets, tuple) or len(targets) != 2 or isinstance(targets[1], int):
        return None
    where = torch.as_tensor(targets[1])
    return Place(targets[0], where) if where.ndim else None


@dataclass(frozen=True, eq=False)
class Dense(Head):
    """What both share: they are asked about images, and keep what they were asked."""

    asks: ClassVar[bool] = True

    @abstractmethod
    def look(self, output: Any, count: int) -> list[Any]:
        """For each image what asking needs to know of it."""

    @abstractmethod
    def ask(self, seen: list[Any], targets: Any, size: tuple[int, ...]) -> Dense:
        """Bound to these images. targets: None, classes, or (class, region)."""

    @property
    @abstractmethod
    def bound(self) -> int:
        """How many images it is bound to."""

    @abstractmethod
    def free(self) -> Dense:
        """As before it was asked."""

    @abstractmethod
    def columns(self, targets: Any, device: torch.device) -> Columns:
        """Targets of the images it is bound to, in their order."""


@dataclass(frozen=True, eq=False)
class Segmentation(Dense):
    """A class for each pixel."""

    name: ClassVar[str] = "segmentation"
    chance: ClassVar[str] = "softmax over the classes of the mean logits in the region"
    same_if: ClassVar[str] = "the same class has the highest mean logit in the region"

    ends: str = ""  # "sigmoid" or "softmax" where the network ends in one
    regions: Tensor | None = None  # "i h w" or "i d h w", weights from 0 to 1
    wanted: Tensor | None = None  # "i": the class of each image where none is named

    @property
    def meaning(self) -> str:
        undone = f"{self.ends}s per pixel, undone" if self.ends else "logits per pixel"
        return f"a segmentation: {undone}, summed over a region"

    def settled(self, module: nn.Module, output: Any, table: Tensor, last: LastStep) -> Head:
        given = inside(output)
        given = given if isinstance(given, Tensor) else given[0]
        if not in_unit_interval(given):
            return replace(self, ends="")
        if last.is_sigmoid(given):
            return replace(self, ends="sigmoid")
        return replace(self, ends="softmax" if last.of(given) in ("softmax", "_softmax") else "")

    def picture(self, output: Any, count: int) -> Tensor:
        """ "b k h w" or "b k d h w" logits."""
        given = inside(output)
        given = given[0] if isinstance(given, (tuple, list)) and given else given
        if not isinstance(given, Tensor) or given.ndim not in (4, 5) or len(given) != count:
            shape = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ModelError(f"the model returned {shape}; a segmentation returns 'b k h w' logits")
        if self.ends == "sigmoid":
            return undone_sigmoid(given)
        return given.clamp(min=torch.finfo(given.dtype).tiny).log() if self.ends else given

    def table(self, output: Any, count: int) -> Tensor:
        picture = self.picture(output, count)
        if self.regions is None:
            return picture.mean(tuple(range(2, picture.ndim)))
        if picture.shape[2:] != self.regions.shape[1:]:
            raise TargetError(
                f"the region is {tuple(self.regions.shape[1:])} but the answer {tuple(picture.shape[2:])}; "
                "ask about images of one size"
            )
        places = picture.flatten(2), self.regions.to(picture).flatten(1)
        return torch.einsum("bkn,in->bki", *places).flatten(1)

    def look(self, output: Any, count: int) -> list[Tensor]:
        picture = self.picture(output, count).detach()
        if picture.shape[1] == 1:
            return list((picture[:, 0] > 0).long() - 1)  # class 0, or none: -1
        return list(picture.argmax(1))

    def ask(self, seen: list[Tensor], targets: Any, size: tuple[int, ...]) -> Segmentation:
        shown = torch.stack(seen)  # "i h w" or "i d h w": the class of each place
        place = as_place(targets)
        classes = place.classes if place else targets
        wanted = _largest(shown) if classes is None else _one_each(classes, len(seen)).to(shown.device)
        regions = _mask(place.where, shown) if place else (shown == per_map(wanted, shown)).float()
        return replace(self, by_itself=False, regions=regions, wanted=wanted)

    @property
    def bound(self) -> int:
        return 0 if self.regions is None else len(self.regions)

    def free(self) -> Segmentation:
        return replace(self, by_itself=False, regions=None, wanted=None)

    def columns(self, targets: Any, device: torch.device) -> Columns:
        assert self.wanted is not None
        chosen = self.wanted if targets is None else _one_each(targets, self.bound)
        return Columns(chosen.to(device) * self.bound + torch.arange(self.bound, device=device))

    def labels(self, columns: Tensor) -> Tensor:
        return columns // max(1, self.bound)

    def probabilities(self, logits: Tensor) -> Tensor:
        means = self._by_class(logits)
        if self.regions is not None:
            means = means / self.regions.to(logits).flatten(1).sum(1).clamp(min=1e-6)
        return (means.sigmoid() if means.shape[1] == 1 else means.softmax(1)).flatten(1)

    def predicted(self, logits: Tensor) -> Tensor:
        if self.regions is not None:
            raise ModelError("a segmentation that was asked about images predicts no one column")
        return logits.argmax(1)

    def same(self, before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
        where = (targets % max(1, self.bound))[:, None, None]
        tables = [self._by_class(one) for one in (before, after)]
        first, second = (one.gather(2, where.expand(-1, one.shape[1], 1))[:, :, 0] for one in tables)
        if first.shape[1] == 1:
            return (first > 0)[:, 0] == (second > 0)[:, 0]
        return first.argmax(1) == second.argmax(1)

    def _by_class(self, logits: Tensor) -> Tensor:
        """ "b k i"."""
        return logits.view(len(logits), -1, max(1, self.bound))


@dataclass(frozen=True, eq=False)
class Detection(Dense):
    """Boxes with scores and classes."""

    name: ClassVar[str] = "detection"
    chance: ClassVar[str] = "the score of the box"
    same_if: ClassVar[str] = f"the box is found again: one of its class overlaps it by IoU >= {OVERLAP}"

    boxes: Tensor | None = None  # "i 4"; NaN where the image has none to refer to
    classes: Tensor | None = None  # "i"

    @property
    def meaning(self) -> str:
        return f"boxes; the score of the one that overlaps a reference box by IoU >= {OVERLAP}, else 0"

    def table(self, output: Any, count: int) -> Tensor:
        found = boxes_of(output, count)
        return torch.stack([self._row(one) for one in found])

    def _row(self, found: dict[str, Tensor]) -> Tensor:
        """ "i": the score that each reference box gets in one image."""
        scores = found["scores"]
        nothing = scores.sum() * 0  # which has a gradient, 0, like the rest
        if self.boxes is None or self.classes is None:
            return torch.cat([scores, nothing[None]]).amax(0, keepdim=True)
        if not len(scores):
            return nothing.expand(len(self.boxes))
        overlap = box_overlap(found["boxes"].detach(), self.boxes.to(scores))
        is_it = (overlap >= OVERLAP) & (found["labels"][:, None] == self.classes.to(scores.device))
        return torch.where(is_it, scores[:, None], nothing).amax(0)

    def look(self, output: Any, count: int) -> list[dict[str, Tensor]]:
        return [{name: one[name].detach() for name in BOXES} for one in boxes_of(output, count)]

    def ask(self, seen: list[dict[str, Tensor]], targets: Any, size: tuple[int, ...]) -> Detection:
        place, count = as_place(targets), len(seen)
        classes = place.classes if place else targets
        wanted = None if classes is None else _one_each(classes, count)
        if place is not None and wanted is not None:
            boxes = place.where.float()
            if boxes.shape not in ((4,), (count, 4)):
                raise TargetError(f"a box is four numbers x0, y0, x1, y1; got shape {tuple(boxes.shape)}")
            return replace(self, by_itself=False, boxes=boxes.expand(count, 4), classes=wanted)
        best = [_best(one, None if wanted is None else int(wanted[i])) for i, one in enumerate(seen)]
        boxes, labels = torch.stack([box for box, _ in best]), torch.tensor([label for _, label in best])
        return replace(self, by_itself=False, boxes=boxes, classes=labels.to(boxes.device))

    @property
    def bound(self) -> int:
        return 0 if self.boxes is None else len(self.boxes)

    def free(self) -> Detection:
        return replace(self, by_itself=False, boxes=None, classes=None)

    def columns(self, targets: Any, device: torch.device) -> Columns:
        if targets is not None and self.classes is not None:
            wanted = _one_each(targets, self.bound).to(self.classes)
            if (wanted != self.classes).any():
                raise TargetError("the network was asked about boxes of other classes; explain these anew")
        return Columns(torch.arange(self.bound, device=device))

    def labels(self, columns: Tensor) -> Tensor:
        return columns if self.classes is None else self.classes.to(columns.device)[columns]

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits

    def same(self, before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
        return (self.scores(before, targets) > 0) == (self.scores(after, targets) > 0)


def is_boxes(output: Any) -> bool:
    """Whether this is what torchvision's detectors return."""
    return (
        isinstance(output, (list, tuple))
        and bool(output)
        and all(
            isinstance(one, dict) and all(isinstance(one.get(name), Tensor) for name in BOXES)
            for one in output
        )
    )


def boxes_of(output: Any, count: int) -> list[dict[str, Tensor]]:
    if not is_boxes(output) or len(output) != count:
        raise ModelError(
            "a detector returns a list with a dict of boxes, scores and labels for each image; wrap yours so"
        )
    return list(output)


def box_overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """IoU of "n 4" and "i 4" -> "n i"; NaN where a box is."""
    low = torch.maximum(boxes[:, None, :2], others[:, :2])
    high = torch.minimum(boxes[:, None, 2:], others[:, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    own, theirs = ((one[:, 2:] - one[:, :2]).clamp(min=0).prod(1) for one in (boxes, others))
    return shared / (own[:, None] + theirs - shared).clamp(min=1e-6)


def _best(found: dict[str, Tensor], label: int | None) -> tuple[Tensor, int]:
    """The box with the highest score, of a class where one is asked for."""
    among = torch.ones_like(found["labels"], dtype=torch.bool) if label is None else found["labels"] == label
    if not among.any():
        return torch.full((4,), torch.nan, device=found["boxes"].device), 0 if label is None else label
    first = found["scores"].masked_fill(~among, -1).argmax()
    return found["boxes"][first].float(), int(found["labels"][first])


def _largest(shown: Tensor) -> Tensor:
    """ "i": the class of most pixels, beside class 0 where there is another, which most use as background."""
    found = []
    for one in shown.flatten(1):
        seen = one[one >= 0]
        others = seen[seen > 0]
        seen = others if len(others) else seen
        found.append(seen.mode().values if len(seen) else one.new_zeros(()))
    return torch.stack(found)


def _mask(where: Tensor, shown: Tensor) -> Tensor:
    """ "i h w" weights at the answer's size; a mask of the image's size is averaged over its pixels."""
    mask = where.float()
    mask = mask[None] if mask.ndim == shown.ndim - 1 else mask
    if mask.ndim != shown.ndim or len(mask) not in (1, len(shown)):
        axes = "H W" if shown.ndim == 3 else "D H W"
        raise TargetError(
            f"a region is a mask {axes!r} or one for each of {len(shown)} images; "
            f"got shape {tuple(where.shape)}"
        )
    if mask.shape[1:] != shown.shape[1:]:
        mask = nn.functional.interpolate(mask[:, None], size=shown.shape[1:], mode="area")[:, 0]
    return mask.expand(shown.shape).to(shown.device)


def _one_each(classes: Any, count: int) -> Tensor:
    chosen = torch.as_tensor(classes)
    if chosen.is_floating_point() or chosen.dtype == torch.bool or chosen.ndim > 1:
        raise TargetError("targets are class numbers, (class, mask) or (class, box), or a function")
    if chosen.ndim and len(chosen) != count:
        raise TargetError(f"{count} images need one target or {count}; got shape {tuple(chosen.shape)}")
    if (chosen < 0).any():
        raise TargetError(f"target {int(chosen.min())} is no class; they begin at 0")
    return chosen.long().expand(count)
