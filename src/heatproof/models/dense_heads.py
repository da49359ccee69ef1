"""Heads with an output per pixel or per box, and which head a network has.

Column (c, i) of a segmentation is the sum of class c's logits over the region that was chosen in image i: a
given mask, or where the clean image is predicted to show the target class. Column i of a detection is the
score of the box that overlaps the reference box of image i by IoU >= 0.5, of the same class, 0 where there is
none; the reference is given or the best box of the clean image. The heads are bound to these regions or boxes
(model.py), which then stay the same however images and weights are changed. Before that the region is the
whole image (its mean logits, a column for each class), and the box is any box (the highest score).

A head is named, or the first pass determines it. Embeddings and values cannot be distinguished from logits:
those heads must be named. Nor can sigmoids be distinguished from logits in [0, 1] by their numbers; the
function that computed them decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.errors import InputError, ModelError, TargetError, did_you_mean
from heatproof.models import heads
from heatproof.models.heads import Columns, Head, LastStep, in_unit_interval, logits_of, undone_sigmoid
from heatproof.models.running import is_function
from heatproof.types import per_map

OVERLAP = 0.5  # IoU from which two boxes are the same
BOXES = ("boxes", "scores", "labels")
HIDDEN = ("last_hidden_state", *heads.VECTORS)  # of a Hugging Face encoder's record, which has no logits
HEAD_NAMES = ("fc", "classifier", "head", "heads", "last_linear")
FEWEST_FEATURES = 64  # that a normalisation layer may return; fewer may be classes
ADD_A_HEAD = (
    "add a classification head (timm: num_classes, Hugging Face: AutoModelForImageClassification, "
    "torchvision: a Linear as fc), or explain similarities: head='embedding' with references"
)


def as_place(targets: Any) -> tuple[Any, Tensor | None]:
    """A class and its region, None if targets are anything else, such as two class numbers.

    A region is a mask "H W" or "b H W", or a box (x0, y0, x1, y1) or "b 4".
    """
    if not isinstance(targets, tuple) or len(targets) != 2 or isinstance(targets[1], int):
        return targets, None
    where = torch.as_tensor(targets[1])
    return (targets[0], where) if where.ndim else (targets, None)


@dataclass(frozen=True, eq=False)
class Dense(Head):
    """A head that is bound to regions or boxes of images.

    where: "i h w" or "i d h w" regions, weights from 0 to 1; or "i 4" boxes, NaN where an image has none.
    classes: "i", the class of each image where no other is named.
    """

    chance: ClassVar[bool] = True
    look: ClassVar[Callable[..., list[Any]]]  # (output, count): per image, the data that `bind` needs
    bind: ClassVar[Callable[..., Dense]]  # (seen, targets): this head bound to images
    columns: ClassVar[Callable[..., Columns]]  # (targets, device): of the images it is bound to, in order

    where: Tensor | None = None
    classes: Tensor | None = None

    @property
    def bound(self) -> int:
        """Number of images it is bound to."""
        return 0 if self.where is None else len(self.where)

    def free(self) -> Dense:
        """This head, not bound."""
        return replace(self, by_itself=False, where=None, classes=None)


@dataclass(frozen=True, eq=False)
class Segmentation(Dense):
    """A class for each pixel."""

    name: ClassVar[str] = "segmentation"

    ends: str = ""  # "sigmoid" or "softmax" where the network ends in one

    @property
    def meaning(self) -> str:
        undone = f"{self.ends}s per pixel, undone" if self.ends else "logits per pixel"
        return f"a segmentation: {undone}, summed over a region"

    def settled(self, module: nn.Module, output: Any, table: Tensor, last: LastStep) -> Head:
        given = logits_of(output)
        given = given if isinstance(given, Tensor) else given[0]
        softmax = "softmax" if last.of(given) in ("softmax", "_softmax") else ""
        ends = "sigmoid" if last.is_sigmoid(given) else softmax
        return replace(self, ends=ends if in_unit_interval(given) else "")

    def pixel_logits(self, output: Any, count: int) -> Tensor:
        """Tensor "b k h w" or "b k d h w" logits."""
        given = logits_of(output)
        given = given[0] if isinstance(given, (tuple, list)) and given else given
        if not isinstance(given, Tensor) or given.ndim not in (4, 5) or len(given) != count:
            shape = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ModelError(f"the model returned {shape}; a segmentation returns 'b k h w' logits")
        if self.ends == "sigmoid":
            return undone_sigmoid(given)
        return given.clamp(min=torch.finfo(given.dtype).tiny).log() if self.ends else given

    def table(self, output: Any, count: int) -> Tensor:
        logits = self.pixel_logits(output, count)
        if self.where is None:
            return logits.mean(tuple(range(2, logits.ndim)))
        if logits.shape[2:] != self.where.shape[1:]:
            raise TargetError(
                f"the region is {tuple(self.where.shape[1:])} but the output {tuple(logits.shape[2:])}; "
                "use images of one size"
            )
        places = logits.flatten(2), self.where.to(logits).flatten(1)
        return torch.einsum("bkn,in->bki", *places).flatten(1)

    def look(self, output: Any, count: int) -> list[Tensor]:
        logits = self.pixel_logits(output, count).detach()
        if logits.shape[1] == 1:
            return list((logits[:, 0] > 0).long() - 1)  # class 0, or none: -1
        return list(logits.argmax(1))

    def bind(self, seen: list[Tensor], targets: Any) -> Segmentation:
        predicted = torch.stack(seen)  # "i h w" or "i d h w": the class of each pixel
        classes, where = as_place(targets)
        if classes is None:
            wanted = torch.stack([_largest(pixels) for pixels in predicted.flatten(1)])
        else:
            wanted = _one_per_image(classes, len(seen)).to(predicted.device)
        shown = (predicted == per_map(wanted, predicted)).float()
        regions = shown if where is None else _mask(where, predicted)
        return replace(self, by_itself=False, where=regions, classes=wanted)

    def columns(self, targets: Any, device: torch.device) -> Columns:
        assert self.classes is not None
        chosen = self.classes if targets is None else _one_per_image(targets, self.bound)
        return Columns(chosen.to(device) * self.bound + torch.arange(self.bound, device=device))

    def labels(self, columns: Tensor) -> Tensor:
        return columns // max(1, self.bound)

    def probabilities(self, logits: Tensor) -> Tensor:
        means = self._by_class(logits)
        if self.where is not None:
            means = means / self.where.to(logits).flatten(1).sum(1).clamp(min=1e-6)
        return (means.sigmoid() if means.shape[1] == 1 else means.softmax(1)).flatten(1)

    def predicted(self, logits: Tensor) -> Tensor:
        if self.where is not None:
            raise ModelError("a segmentation that is bound to images predicts no single column")
        return logits.argmax(1)

    def same(self, before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
        image = (targets % max(1, self.bound))[:, None, None]
        tables = [self._by_class(logits) for logits in (before, after)]
        first, second = (table.gather(2, image.expand(-1, table.shape[1], 1))[:, :, 0] for table in tables)
        if first.shape[1] == 1:
            return (first > 0)[:, 0] == (second > 0)[:, 0]
        return first.argmax(1) == second.argmax(1)

    def _by_class(self, logits: Tensor) -> Tensor:
        return logits.view(len(logits), -1, max(1, self.bound))  # "b k i"


@dataclass(frozen=True, eq=False)
class Detection(Dense):
    """Boxes with scores and classes."""

    name: ClassVar[str] = "detection"
    output: ClassVar[str] = (
        f"boxes; the score of the one that overlaps a reference box by IoU >= {OVERLAP}, else 0"
    )

    def table(self, output: Any, count: int) -> Tensor:
        return torch.stack([self._row(detections) for detections in _detections(output, count)])

    def _row(self, detections: dict[str, Tensor]) -> Tensor:
        """Tensor "i": the score that each reference box gets in one image."""
        scores = detections["scores"]
        nothing = scores.sum() * 0  # which has a gradient, 0, like the rest
        if self.where is None or self.classes is None:
            return torch.cat([scores, nothing[None]]).amax(0, keepdim=True)
        if not len(scores):
            return nothing.expand(self.bound)
        overlap = box_overlap(detections["boxes"].detach(), self.where.to(scores))
        matches = (overlap >= OVERLAP) & (detections["labels"][:, None] == self.classes.to(scores.device))
        return torch.where(matches, scores[:, None], nothing).amax(0)

    def look(self, output: Any, count: int) -> list[dict[str, Tensor]]:
        return [{name: each[name].detach() for name in BOXES} for each in _detections(output, count)]

    def bind(self, seen: list[dict[str, Tensor]], targets: Any) -> Detection:
        (classes, where), count = as_place(targets), len(seen)
        wanted = None if classes is None else _one_per_image(classes, count)
        if where is not None and wanted is not None:
            boxes = where.float()
            if boxes.shape not in ((4,), (count, 4)):
                raise TargetError(f"a box is four numbers x0, y0, x1, y1; got shape {tuple(boxes.shape)}")
            return replace(self, by_itself=False, where=boxes.expand(count, 4), classes=wanted)
        best = [_best(each, None if wanted is None else int(wanted[i])) for i, each in enumerate(seen)]
        boxes, labels = torch.stack([box for box, _ in best]), torch.tensor([label for _, label in best])
        return replace(self, by_itself=False, where=boxes, classes=labels.to(boxes.device))

    def columns(self, targets: Any, device: torch.device) -> Columns:
        if targets is not None and self.classes is not None:
            wanted = _one_per_image(targets, self.bound).to(self.classes)
            if (wanted != self.classes).any():
                raise TargetError("the boxes belong to other classes; explain them again")
        return Columns(torch.arange(self.bound, device=device))

    def labels(self, columns: Tensor) -> Tensor:
        return columns if self.classes is None else self.classes.to(columns.device)[columns]

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits

    def same(self, before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
        return (self.scores(before, targets) > 0) == (self.scores(after, targets) > 0)


def is_boxes(output: Any) -> bool:
    """Whether this is the output of one of torchvision's detectors."""
    if not isinstance(output, (list, tuple)) or not output or not all(isinstance(d, dict) for d in output):
        return False
    return all(isinstance(detections.get(name), Tensor) for detections in output for name in BOXES)


def _detections(output: Any, count: int) -> list[dict[str, Tensor]]:
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
    own, theirs = ((each[:, 2:] - each[:, :2]).clamp(min=0).prod(1) for each in (boxes, others))
    return shared / (own[:, None] + theirs - shared).clamp(min=1e-6)


def _best(detections: dict[str, Tensor], label: int | None) -> tuple[Tensor, int]:
    """The box with the highest score, of one class if given."""
    boxes, scores, labels = (detections[name] for name in BOXES)
    among = torch.ones_like(labels, dtype=torch.bool) if label is None else labels == label
    if not among.any():
        return torch.full((4,), torch.nan, device=boxes.device), 0 if label is None else label
    first = scores.masked_fill(~among, -1).argmax()
    return boxes[first].float(), int(labels[first])


def _largest(pixels: Tensor) -> Tensor:
    """The class with most pixels; class 0, usually the background, only if there is no other."""
    for least in (1, 0):
        if len(among := pixels[pixels >= least]):
            return among.mode().values
    return pixels.new_zeros(())


def _mask(where: Tensor, predicted: Tensor) -> Tensor:
    """Weights "i h w" at the output's size; a mask of the image's size is averaged over its pixels."""
    mask = where.float()
    mask = mask[None] if mask.ndim == predicted.ndim - 1 else mask
    if mask.ndim != predicted.ndim or len(mask) not in (1, len(predicted)):
        axes = "H W" if predicted.ndim == 3 else "D H W"
        raise TargetError(
            f"a region is a mask {axes!r} or one for each of {len(predicted)} images; "
            f"got shape {tuple(where.shape)}"
        )
    if mask.shape[1:] != predicted.shape[1:]:
        mask = nn.functional.interpolate(mask[:, None], size=predicted.shape[1:], mode="area")[:, 0]
    return mask.expand(predicted.shape).to(predicted.device)


def _one_per_image(classes: Any, count: int) -> Tensor:
    chosen = torch.as_tensor(classes)
    if chosen.is_floating_point() or chosen.dtype == torch.bool or chosen.ndim > 1:
        raise TargetError("targets are class numbers, (class, mask) or (class, box), or a function")
    if chosen.ndim and len(chosen) != count:
        raise TargetError(f"{count} images need one target or {count}; got shape {tuple(chosen.shape)}")
    if (chosen < 0).any():
        raise TargetError(f"target {int(chosen.min())} is no class; they begin at 0")
    return chosen.long().expand(count)


HEADS: dict[str, type[Head]] = {
    head.name: head
    for head in (
        heads.Softmax, heads.OneLogit, heads.Probabilities, heads.OneProbability, heads.Multilabel,
        heads.Regression, Segmentation, Detection, heads.Embedding,
    )
}  # fmt: skip
IMPLIED = {"thresholds": "multilabel", "references": "embedding"}  # settings that imply a head
ALIASES = {"logit": "one logit", "multi-label": "multilabel"}


def named_head(name: str) -> Head:
    """The head of this name, as written in TOML and on the command line."""
    known = ALIASES.get(name, name)
    if known not in HEADS:
        names = ["softmax", "logit", *(n for n in HEADS if n not in ("softmax", "one logit"))]
        raise InputError(f"unknown head {name!r}; {did_you_mean(name, names)}")
    return HEADS[known]()


def chosen_head(head: str | Head | None, thresholds: Any = None, **settings: Any) -> Head | None:
    """The head that a user names, with its settings: thresholds, tolerance, references."""
    chosen = named_head(head) if isinstance(head, str) else head
    given = {n: value for n, value in {"thresholds": thresholds, **settings}.items() if value is not None}
    if not given:
        return chosen
    chosen = chosen or next((HEADS[kind]() for name, kind in IMPLIED.items() if name in given), None)
    known = {option.name for option in fields(chosen)} if chosen is not None else set()
    if chosen is None or (extra := ", ".join(given.keys() - known)):
        cause = f"the head {chosen.name!r} has no {extra}" if chosen else f"{', '.join(given)} is of a head"
        raise InputError(f"{cause}; leave it out or name the head it is for")
    if isinstance(file := given.get("references"), (str, PathLike)):
        try:
            given["references"] = np.load(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the references in {file}: give a .npy file, 't d'") from error
    return replace(chosen, **given)


def read_first(head: Head, module: nn.Module, output: Any, count: int, last: LastStep) -> tuple[Head, Tensor]:
    """Determine the head and the logits "b k" from a first pass, in which `last` recorded functions."""
    if not isinstance(head, heads.Undetermined):
        table = head.table(output, count)
    else:
        values, name = logits_of(output), type(module).__name__
        hidden = [n for n in HIDDEN if (n in output if isinstance(output, dict) else hasattr(output, n))]
        if values is output and hidden:  # the record of an encoder
            raise InputError(
                f"{name} returns {', '.join(hidden)} and no logits: it has no classification head; "
                f"{ADD_A_HEAD}"
            )
        per_pixel = isinstance(values, Tensor) and values.ndim in (4, 5) and values[0, 0].numel() > 1
        kind = Detection if is_boxes(output) else Segmentation if per_pixel else heads.OneOfMany
        head = kind(by_itself=True)
        table = head.table(output, count)
        if kind is heads.OneOfMany:
            # A backbone without a head, whose features would be explained as classes.
            headless = any(isinstance(getattr(module, n, None), nn.Identity) for n in HEAD_NAMES)
            normed = last.weighted in heads.NORMS and table.shape[1] >= FEWEST_FEATURES
            features = normed or (headless and last.weighted != "linear")
            if features or getattr(module, "num_classes", None) == 0:
                raise InputError(
                    f"{name} returns {table.shape[1]} features, not class scores: it has no classification "
                    f"head; {ADD_A_HEAD}; if they are class scores: head='softmax'"
                )
            if is_function(module) and table.shape[1] == 1 and in_unit_interval(table):
                raise ModelError(
                    "the function returns one number between 0 and 1 for an image, a probability or a "
                    "logit; set head='one probability' or head='logit'"
                )
            head = _classifier(module, table, last)
    settled = head.settled(module, output, table, last)
    return settled, settled.table(output, count) if isinstance(settled, Dense) else table


def check_inputs(module: nn.Module) -> None:
    """Raise InputError for a network that takes images and texts together, such as CLIP."""
    if callable(getattr(module, "get_image_features", None)):
        raise InputError(
            f"{type(module).__name__} takes images and texts together; save it and load hf:FOLDER with "
            "prompts as classes, or explain the similarity of get_image_features(images) to references"
        )


def _classifier(module: nn.Module, table: Tensor, last: LastStep) -> Head:
    """The head by Hugging Face's configuration, or by the last activation of a Keras graph or of the pass."""
    kind = getattr(getattr(module, "config", None), "problem_type", None)
    if table.shape[1] > 1 and (
        kind == "multi_label_classification"
        or getattr(module, "final_activation", "") in ("sigmoid", "log_sigmoid")
        or (in_unit_interval(table) and last.is_sigmoid(table))
    ):
        return heads.Multilabel(by_itself=True)
    return heads.Regression(by_itself=True) if kind == "regression" else heads.OneOfMany(by_itself=True)
