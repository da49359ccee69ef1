"""One checkpoint measured in one shared pass, without changing the training; and the result of a step.

ceil(n / batch) forward passes serve predictions and maps of all methods; each image's own class is explained,
as the C-Score requires (elangovan2026cscore). The numbers are those of hp.explain and
hp.metrics.cscore_by_class.

Restored is what training could notice: every module's mode, which parameters require gradients, buffers that
`forward` changes (a counter, a BatchNorm that it trains), the random states of torch (CPU and the model's
GPUs), NumPy and Python. A buffer that `forward` adds stays and is logged; other attributes that it sets
cannot be seen. Gradients and optimiser are never touched: gradients are computed at a layer, not accumulated.
Autocast is off inside, so that a number does not depend on where in the loop the monitor is called, and a
compiled model runs as written, since hooks inside a compiled graph would compile it anew.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from heatproof.errors import InputError
from heatproof.metrics import accuracy, auc, cscore_by_class, recall
from heatproof.metrics.cscores import confidence_weights
from heatproof.metrics.gold import ListRule, thresholds
from heatproof.metrics.results import PerClass
from heatproof.models import Model, probabilities
from heatproof.models.heads import Multilabel
from heatproof.models.running import frozen_eval
from heatproof.monitor.validation_set import ValidationSet
from heatproof.show import Strip, middle, pixels, plain_table, sections, text
from heatproof.train.recipe import GradientNorm
from heatproof.types import Maps
from heatproof.verdict.alarms import Alarm
from heatproof.verdict.answers import Verdict

log = logging.getLogger("heatproof.monitor")
NO_MAP = "every map of this method has NaN or infinite values"
ALL = "all"  # name of the support-weighted score over all classes
RED = np.array([228.0, 26.0, 28.0])
STRENGTH = 0.7  # of the colour where a map is highest
GAP = 4  # pixels between tiles
MOST_CLASSES = 4  # in the image


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

    scores: Mapping[str, PerClass]  # by method
    degenerate: Mapping[str, float]  # by method: share of constant maps
    auc: PerClass
    accuracy: PerClass
    recall: PerClass
    unusable: Mapping[str, int]  # by method: maps that are not finite, left out of its score


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
    right, recalled = (score(labels, probs, **limits) for score in (accuracy, recall))
    return Measured(scores, degenerate, auc(labels, probs), right, recalled, unusable)


def with_head(model: Model, is_multilabel: bool) -> Model:
    """The model, as a multi-label one if labels are a table; raises InputError if its head is another."""
    if not is_multilabel or isinstance(model.head, Multilabel):
        return model
    if model.head_name is not None:
        raise InputError(
            f"labels are multi-label, but the model's head is {model.head_name!r}; load it "
            "with head='multilabel', or give one label per image"
        )
    return replace(model, head=Multilabel())


@contextmanager
def undisturbed(model: Model) -> Iterator[None]:
    """The model in evaluation mode; everything is restored, see the top of the file."""
    eager = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    with (
        same_buffers(model.module),
        frozen_eval(model.module),
        torch.autocast(model.device.type, enabled=False),
        torch.compiler.set_stance("force_eager") if eager else nullcontext(),
    ):
        yield


@contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the buffers, whatever `forward` changes in them."""
    before = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    names = {name for name, _ in module.named_buffers()}
    try:
        yield
    finally:
        for part, name, buffer, copy in before:
            part._buffers[name] = buffer
            if not torch.equal(buffer, copy):
                buffer.copy_(copy)
        for name in sorted({name for name, _ in module.named_buffers()} - names):
            log.warning("the model's forward adds the buffer %s, which the monitor cannot remove", name)


@contextmanager
def same_randomness() -> Iterator[None]:
    """Restore the random states after the context, including draws by loggers."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  # the state that others use
    try:
        with torch.random.fork_rng(devices=[]):  # those of GPUs: frozen_eval() knows which the model is on
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


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
    measured: Measured | None = None
    alarms: tuple[Alarm, ...] = ()  # of this checkpoint
    new_alarms: tuple[Alarm, ...] = ()  # those of them that the checkpoint before did not have
    problem: str = ""
    pictures: np.ndarray | None = field(default=None, repr=False)  # "k H W 3" uint8, one per class
    heat: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)  # by method, "k H W" in [0, 1]
    gradients: Mapping[str, GradientNorm] = field(default_factory=dict, repr=False)  # by layer, where logged
    verdict: Verdict | None = field(default=None, repr=False)  # on the run folder, if there is one

    @property
    def _scores(self) -> Mapping[str, PerClass]:
        return {} if self.measured is None else self.measured.scores

    @property
    def cscore(self) -> dict[str, float]:
        """Score over all classes, by method."""
        return {method: scores.overall.value for method, scores in self._scores.items()}

    @property
    def by_class(self) -> dict[str, dict[str, PerClass]]:
        """Value, size of the gold list, interval, degenerate share and reason, by method and class name."""
        return {
            method: {name: scores.classes[c] for c, name in self.classes.items()}
            for method, scores in self._scores.items()
        }

    @property
    def auc(self) -> float:
        return math.nan if self.measured is None else self.measured.auc.value

    @property
    def accuracy(self) -> float:
        return math.nan if self.measured is None else self.measured.accuracy.value

    @property
    def recall(self) -> dict[str, float]:
        """By class name."""
        recalls = {} if self.measured is None else self.measured.recall.classes
        return {name: recalls[c] for c, name in self.classes.items() if c in recalls}

    @property
    def degenerate(self) -> dict[str, float]:
        """Share of constant maps, by method."""
        return {} if self.measured is None else dict(self.measured.degenerate)

    def _by_name(self) -> Iterator[tuple[str, str, PerClass]]:
        """Every C-Score with its method and class name; that over all classes first."""
        for method, scores in self.by_class.items():
            for name, score in [(ALL, self._scores[method].overall), *scores.items()]:
                yield method, name, score

    def scalars(self) -> dict[str, float]:
        """Every defined number under the name that loggers use."""
        named = {"auc": self.auc, "accuracy": self.accuracy, "seconds": self.seconds}
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
        for method, score in self._scores.items():
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
        volumes = whole.ndim > 3
        heat[method] = np.stack([sections(v, middle(v.shape)) for v in whole]) if volumes else whole
    return pixels(images.images[images.explained.rows[indices].tolist()], images.preprocess), heat
