"""The monitored images, one checkpoint measured on them in one shared pass, and the result of a step.

Each image's own class is explained, as the C-Score requires (elangovan2026cscore). The numbers are those of
hp.explain and hp.metrics.cscore_by_class. A smaller subset is part of a larger one (see images.source.draw).

Restored is what training could notice: every module's mode, which parameters require gradients, buffers that
`forward` changes (a counter, a BatchNorm that it trains), and random states. A buffer that `forward` adds
stays and is logged. Gradients are computed at a layer, not accumulated. Autocast is off inside, so that a
number does not depend on where in the loop the monitor is called, and a compiled model runs as written, since
hooks inside a compiled graph would compile it anew.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from heatproof.errors import InputError
from heatproof.images import Failure, Preprocess, Source, batches, open_source
from heatproof.images.findings import check_labels, read_findings
from heatproof.images.loader import entries
from heatproof.images.source import draw
from heatproof.metrics import accuracy, auc, cscore_by_class, f1, recall
from heatproof.metrics.classifier import ListRule, thresholds
from heatproof.metrics.cscores import confidence_weights
from heatproof.metrics.results import PerClass
from heatproof.models import Model, probabilities
from heatproof.models.heads import Multilabel
from heatproof.models.running import frozen_eval
from heatproof.show import Strip, middle, pixels, plain_table, sections, text
from heatproof.train.recipe import GradientNorm
from heatproof.types import Batch, Maps
from heatproof.verdict.alarms import Alarm
from heatproof.verdict.answers import Verdict

log = logging.getLogger("heatproof.monitor")
FEWEST = 2  # images of a class: one has no pair
NO_MAP = "every map of this method has NaN or infinite values"
ALL = "all"  # name of the support-weighted score over all classes
RED = np.array([228.0, 26.0, 28.0])
STRENGTH = 0.7  # of the colour where a map is highest
GAP = 4  # pixels between tiles
MOST_CLASSES = 4  # in the image


class Explained(NamedTuple):
    """The explained items: images, or labels of images, each with its class and its image's row."""

    batch: Batch
    targets: Tensor
    rows: Tensor


@dataclass(frozen=True)
class ValidationSet:
    """Images with their names and labels."""

    ids: tuple[str, ...]
    images: Tensor  # "b c H W", model-ready
    labels: Tensor  # "b"; "b k" bool of multi-label images
    classes: tuple[str, ...]
    preprocess: Preprocess | None = None  # that was applied here
    failures: tuple[Failure, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Sequence[int]) -> ValidationSet:
        chosen = list(rows)
        if len(chosen) == len(self):
            return self
        ids = tuple(self.ids[i] for i in chosen)
        return replace(self, ids=ids, images=self.images[chosen], labels=self.labels[chosen])

    @property
    def is_multilabel(self) -> bool:
        return self.labels.ndim == 2

    @cached_property
    def explained(self) -> Explained:
        """Every image with its class, or every label of every image."""
        if not self.is_multilabel:
            return Explained(Batch(self.ids, self.images, self.labels), self.labels, torch.arange(len(self)))
        batch = Batch(self.ids, self.images, findings=self.labels)
        return Explained(*entries(batch, self.labels, self.classes), self.labels.nonzero()[:, 0])

    def at_most(self, count: int, seed: int) -> list[int]:
        """Rows of a stratified subset of `count`, or of a few more, so that every class keeps a pair."""
        labels = [None] * len(self) if self.is_multilabel else self.labels.tolist()
        table = self.labels if self.is_multilabel else nn.functional.one_hot(self.labels)
        least = table.sum(0).clamp(max=FEWEST)
        for size in range(max(count, 1), len(self) + 1):
            rows = draw(labels, size, seed)
            if (table[rows].sum(0) >= least).all():
                return rows
        return list(range(len(self)))

    def first_maps(self) -> list[int]:
        """Index of the first map of every class."""
        targets = self.explained.targets.tolist()
        return sorted(targets.index(label) for label in set(targets))

    @property
    def first_images(self) -> ValidationSet:
        """The first image of every class."""
        return self.take(sorted({int(self.explained.rows[i]) for i in self.first_maps()}))

    @property
    def hash(self) -> str:
        """Hash of images, labels, names and classes."""
        digest = hashlib.sha256(repr((self.ids, self.labels.tolist(), self.classes)).encode())
        for image in self.images:
            digest.update(image.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def make_validation_set(
    images: Any, labels: Any = None, *, preprocess: Preprocess | None = None,
    class_names: Sequence[str] | None = None, limit: int | None = None, seed: int = 0, batch_size: int = 32,
) -> ValidationSet:  # fmt: skip
    """Check images: model-ready "b c H W" with labels; a list of Batch; a Source or folder with `preprocess`.

    Raises InputError if images or labels cannot be used.
    """
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if limit is not None and limit < 1:
        raise InputError(f"limit is a number of images, at least 1; got {limit}")
    if isinstance(images, (str, Path)):
        images = open_source("folder", images)
    failures: tuple[Failure, ...] = ()
    parts: Sequence[Batch] = [images] if isinstance(images, Batch) else images
    if isinstance(images, Source):
        if labels is not None:
            raise InputError("a source brings its own labels; leave labels out")
        if not images.labelled:
            raise InputError(
                "the images have no labels; a C-Score needs the class of each image; pass labels"
            )
        if preprocess is None:
            raise InputError("images need preprocess=, such as the preprocess of hp.load_model(your_model)")
        if limit is not None:
            images = images.subset(draw([s.label for s in images.samples], limit, seed))
        loaded = list(batches(images, preprocess, batch_size))
        parts, class_names, limit = [part.batch for part in loaded], class_names or images.classes, None
        failures = tuple(failure for part in loaded for failure in part.failures)
    elif not (isinstance(parts, (list, tuple)) and parts and all(isinstance(p, Batch) for p in parts)):
        tensors = _check_images(images)
        parts = [Batch(tuple(f"{i:06d}" for i in range(len(tensors))), tensors)]
    made = _join(parts, labels, class_names)
    made = replace(made, preprocess=preprocess if isinstance(images, Source) else None, failures=failures)
    return made if limit is None else made.take(made.at_most(limit, seed))


def _check_images(images: Any) -> Tensor:
    # These checks are the same for every network; there is none yet.
    return Model(nn.Identity()).check_images(images)


def _join(parts: Sequence[Batch], labels: Any, class_names: Sequence[str] | None) -> ValidationSet:
    """The images of all batches with their labels, which are checked."""
    if labels is None:
        known = [part.labels if part.findings is None else part.findings for part in parts]
        if any(part is None for part in known):
            raise InputError(
                "a monitor needs labels, one class number per image, in the batches or beside them"
            )
        labels = torch.cat([part for part in known if part is not None])
    shapes = {tuple(part.images.shape[1:]) for part in parts if len(part.ids)}
    if len(shapes) > 1:
        raise InputError(f"images of one size are needed; the batches have {' and '.join(map(str, shapes))}")
    images = _check_images(torch.cat([part.images for part in parts]))
    ids, y = tuple(name for part in parts for name in part.ids), torch.as_tensor(labels).detach().cpu()
    if y.ndim and len(y) != len(images):
        raise InputError(f"there are {len(images)} images but {len(y)} labels; they must match")
    if y.ndim == 2 and y.shape[1] > 1:
        _, classes = read_findings(y.numpy(), class_names)
        table = y.bool()
        if not (table.any(0) & ~table.all(0)).any():
            raise InputError(
                "no label has both positive and negative images, which AUC and C-Score need; add images"
            )
        return ValidationSet(ids, images, table, classes)
    if isinstance(class_names, str):
        raise InputError(f"class_names is a list of names, not the text {class_names!r}")
    numbers, classes = check_labels(y, len(images), class_names or None)
    if len(set(numbers)) < 2:
        raise InputError(
            f"all {len(numbers)} images have label {numbers[0]}; AUC and C-Score by class need two classes"
        )
    for kind, names in (("images", ids), ("classes", classes)):
        if len(set(names)) < len(names):
            raise InputError(f"two {kind} have the same name; names must differ")
    # Not torch.tensor(numbers): made in inference mode, it could not be used with gradients.
    return ValidationSet(ids, images, y.flatten().long(), tuple(map(str, classes)))


@dataclass(frozen=True)
class Answers:
    """Results of one pass over the images."""

    logits: Tensor  # "b k", on the CPU
    maps: Mapping[str, Maps]  # by method, on the model's device; of labels, if images are multi-label
    is_multilabel: bool = False

    @property
    def probabilities(self) -> Tensor:
        return (self.logits.sigmoid() if self.is_multilabel else probabilities(self.logits)).double()


@dataclass(frozen=True)
class Measured:
    """Scores of one checkpoint."""

    scores: Mapping[str, PerClass] = field(default_factory=dict)  # by method
    degenerate: Mapping[str, float] = field(default_factory=dict)  # by method: share of constant maps
    classifier: Mapping[str, PerClass] = field(default_factory=dict)  # by metric
    unusable: Mapping[str, int] = field(default_factory=dict)  # by method: maps that are not finite, left out


def measure(
    answers: Answers, labels: Tensor, rule: ListRule, seed: int, listed: Tensor | None = None
) -> Measured:
    """Compute the scores of one pass. listed: "b" bool (or "b k"), the gold list if it is anchored."""
    lost = int((~torch.isfinite(answers.logits).all(1)).sum())
    if lost:
        raise InputError(f"the model's output is NaN or infinite for {lost} of {len(labels)} images")
    probs, tau = answers.probabilities, rule.tau
    own, chances = labels, probs
    limits: dict[str, Any] = {}
    weights: Any = rule.weights
    if answers.is_multilabel:
        rows, own = labels.nonzero().unbind(1)
        tau = thresholds(labels, probs, rule.tau).tolist()
        chances, listed, limits = probs[rows], None if listed is None else listed[rows, own], {"tau": tau}
        weights = confidence_weights(labels, probs, rule.weights)[rows, own]
    scores, degenerate, unusable = {}, {}, {}
    for method, maps in answers.maps.items():
        finite = torch.isfinite(maps.values).flatten(1).all(1)
        usable, unusable[method] = finite.cpu(), int((~finite).sum())
        maps = maps if finite.all() else maps.take(finite)
        if usable.any():
            scores[method] = cscore_by_class(
                maps, own[usable], chances[usable], tau=tau, seed=seed,
                weights=weights[usable] if answers.is_multilabel else weights,
                anchor=None if listed is None else listed[usable],
            )  # fmt: skip
        else:
            none = PerClass(reason=NO_MAP)
            scores[method] = PerClass(reason=NO_MAP, classes=dict.fromkeys(range(probs.shape[1]), none))
        degenerate[method] = float(maps.degenerate.double().mean())
    classifier = {metric.__name__: metric(labels, probs, **limits) for metric in (accuracy, recall, f1)}
    return Measured(scores, degenerate, classifier | {"auc": auc(labels, probs)}, unusable)


def with_head(model: Model, is_multilabel: bool) -> Model:
    """The model, as a multi-label one if labels are a table; raises InputError if its head is another."""
    if not is_multilabel or isinstance(model.head, Multilabel):
        return model
    if model.head_name is not None and not model.head.by_itself:
        raise InputError(
            f"labels are multi-label, but the model's head is {model.head_name!r}; load it "
            "with head='multilabel', or give one label per image"
        )
    return replace(model, head=Multilabel())


@contextmanager
def undisturbed(model: Model) -> Iterator[None]:
    """The model in evaluation mode; everything is restored, see the top of the file."""
    eager = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    module = model.module
    before = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    names = {name for name, _ in module.named_buffers()}
    try:
        with (
            frozen_eval(module),
            torch.autocast(model.device.type, enabled=False),
            torch.compiler.set_stance("force_eager") if eager else nullcontext(),
        ):
            yield
    finally:
        for part, name, buffer, copy in before:
            part._buffers[name] = buffer
            if not torch.equal(buffer, copy):
                buffer.copy_(copy)
        for name in sorted({name for name, _ in module.named_buffers()} - names):
            log.warning("the model's forward adds the buffer %s, which the monitor cannot remove", name)


@dataclass(frozen=True)
class Cost:
    """Time of monitoring so far, and its share of the time since the monitor was made."""

    seconds: float
    share: float

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.share:.1%} of the time"


@dataclass(frozen=True)
class StepResult:
    """Result of a monitor's step. If it could not be measured, `problem` is the reason."""

    epoch: int
    checkpoint: str
    n: int  # images
    classes: Mapping[int, str]  # names of the classes that have images
    seconds: float
    measured: Measured = field(default_factory=Measured)
    alarms: tuple[Alarm, ...] = ()  # of this checkpoint
    new_alarms: tuple[Alarm, ...] = ()  # those of them that the checkpoint before did not have
    problem: str = ""
    pictures: np.ndarray | None = field(default=None, repr=False)  # "k H W 3" uint8, one per class
    heat: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)  # by method, "k H W" in [0, 1]
    gradients: Mapping[str, GradientNorm] = field(default_factory=dict, repr=False)  # by layer, where logged
    verdict: Verdict | None = field(default=None, repr=False)  # on the run folder, if there is one

    @property
    def cscore(self) -> dict[str, float]:
        """Score over all classes, by method."""
        return {method: scores.overall.value for method, scores in self.measured.scores.items()}

    @property
    def by_class(self) -> dict[str, dict[str, PerClass]]:
        """Value, size of the gold list, interval, degenerate share and reason, by method and class name."""
        return {
            method: {name: scores.classes[c] for c, name in self.classes.items()}
            for method, scores in self.measured.scores.items()
        }

    @property
    def auc(self) -> float:
        return self._classifier("auc").value

    @property
    def accuracy(self) -> float:
        return self._classifier("accuracy").value

    @property
    def f1(self) -> float:
        """Mean over the classes."""
        return self._classifier("f1").value

    @property
    def recall(self) -> dict[str, float]:
        """By class name."""
        recalls = self._classifier("recall").classes
        return {name: recalls[c] for c, name in self.classes.items() if c in recalls}

    def _classifier(self, metric: str) -> PerClass:
        return self.measured.classifier.get(metric, PerClass())

    @property
    def degenerate(self) -> dict[str, float]:
        """Share of constant maps, by method."""
        return dict(self.measured.degenerate)

    def _by_name(self) -> Iterator[tuple[str, str, PerClass]]:
        """Every C-Score with its method and class name; that over all classes first."""
        for method, scores in self.by_class.items():
            for name, score in [(ALL, self.measured.scores[method].overall), *scores.items()]:
                yield method, name, score

    def scalars(self) -> dict[str, float]:
        """Every defined number under the name that loggers use."""
        named = {"auc": self.auc, "accuracy": self.accuracy, "f1": self.f1, "seconds": self.seconds}
        named |= {f"recall/{name}": value for name, value in self.recall.items()}
        for method, name, score in self._by_name():
            named[f"cscore/{method}/{name}"] = score.value
            named[f"gold/{method}/{name}"] = float(score.n)
        named |= {f"degenerate/{method}": share for method, share in self.degenerate.items()}
        named |= {f"gradient/{layer}": norm.mean for layer, norm in self.gradients.items()}
        return {f"heatproof/{name}": value for name, value in named.items() if math.isfinite(value)}

    def picture(self) -> np.ndarray | None:
        """The first image of each class, plain and under each method's map in red, "H W 3" uint8."""
        if self.pictures is None:
            return None
        tiles = [self.pictures.astype(np.float64)]
        grey = tiles[0].mean(-1, keepdims=True)
        for heat in self.heat.values():
            weight = STRENGTH * heat[..., None]
            tiles.append((1 - weight) * grey + weight * RED)
        padded = [np.pad(t, ((0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=255) for t in tiles]
        rows = [np.concatenate([tile[k] for tile in padded], axis=1) for k in range(len(self.pictures))]
        return np.concatenate(rows).round().astype(np.uint8)

    def _repr_html_(self) -> str:
        rows = [
            [f"{method}, {name}", score.value, *score.interval, score.n, score.degenerate]
            for method, name, score in self._by_name()
        ]
        table = plain_table(["C-Score of", "value", "95 % from", "to", "images", "blank maps"], rows)
        alarms = "".join(f"<p>{text(alarm)}</p>" for alarm in self.new_alarms)
        drawn = self.picture()
        strip = "" if drawn is None else Strip([Image.fromarray(drawn)])._repr_html_()
        return f"<p>{text(self)}</p>{alarms}{table if rows else ''}{strip}"

    def __str__(self) -> str:
        if self.problem:
            return f"epoch {self.epoch}: not measured: {self.problem}"
        scores = []
        for method, score in self.measured.scores.items():
            low, high = score.overall.interval
            scores.append(f"{method} {score.overall.value:.3f} [{low:.3f}, {high:.3f}]")
        line = f"epoch {self.epoch}: AUC {self.auc:.3f}, accuracy {self.accuracy:.3f}, C-Score "
        return f"{line}{', '.join(scores)} ({self.n} images, {self.seconds:.1f} s)"


def example_maps(images: ValidationSet, answers: Answers) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The first image of the first classes, with its maps by method."""
    indices = images.first_maps()[:MOST_CLASSES]
    heat = {}
    for method, maps in answers.maps.items():
        few = maps.take(indices)
        whole = replace(few, values=few.values.nan_to_num(0, 0, 0)).for_display().numpy()
        heat[method] = np.stack([sections(v, middle(v.shape)) for v in whole]) if whole.ndim > 3 else whole
    return pixels(images.images[images.explained.rows[indices].tolist()], images.preprocess), heat
