"""What a step of the monitor tells: numbers by method and class, new alarms, the cost, one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from heatproof.metrics.results import PerClass
from heatproof.monitor.held import HeldOut
from heatproof.monitor.measure import Answers, Measured
from heatproof.show import Strip, middle, pixels, plain_table, sections, text

if TYPE_CHECKING:
    from heatproof.train.recipe import GradientNorm
    from heatproof.verdict.alarms import Alarm
    from heatproof.verdict.answers import Verdict

ALL = "all"  # what the support-weighted score over all classes is called beside the classes' names
RED = np.array([228.0, 26.0, 28.0])
STRENGTH = 0.7  # of the colour where a map is highest
GAP = 4  # pixels between tiles
SHOWN = 4  # classes in the picture


@dataclass(frozen=True)
class Cost:
    """What monitoring took so far, and of the time since the monitor was made."""

    seconds: float
    share: float

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.share:.1%} of the time"


@dataclass(frozen=True)
class Report:
    """One checkpoint. Where it could not be measured, `problem` says why and there are no numbers."""

    epoch: int
    checkpoint: str
    n: int  # images looked at
    classes: Mapping[int, str]  # names of the classes that have images
    seconds: float
    measured: Measured | None = None
    alarms: tuple[Alarm, ...] = ()  # of this checkpoint
    new_alarms: tuple[Alarm, ...] = ()  # those of them that the checkpoint before did not have
    problem: str = ""
    pictures: np.ndarray | None = field(default=None, repr=False)  # "k H W 3" uint8, one per class
    heat: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)  # by method, "k H W" in [0, 1]
    gradients: Mapping[str, GradientNorm] = field(default_factory=dict, repr=False)  # by layer, where logged
    verdict: Verdict | None = field(default=None, repr=False)  # on the run folder, where there is one

    @property
    def cscore(self) -> dict[str, float]:
        """By method: the score over all classes."""
        return {method: found.overall.value for method, found in self._scores.items()}

    @property
    def by_class(self) -> dict[str, dict[str, PerClass]]:
        """By method and class name: value, size of the gold list, interval, degenerate share, reason."""
        return {
            method: {name: found.classes[c] for c, name in self.classes.items()}
            for method, found in self._scores.items()
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
        found = self.measured
        return {} if found is None else {name: found.recall.classes[c] for c, name in self.classes.items()}

    @property
    def degenerate(self) -> dict[str, float]:
        """By method: share of all maps in which nothing stands out."""
        return {} if self.measured is None else dict(self.measured.degenerate)

    @property
    def _scores(self) -> Mapping[str, PerClass]:
        return {} if self.measured is None else self.measured.scores

    def scalars(self) -> dict[str, float]:
        """Every defined number under the name that loggers use."""
        named = {"auc": self.auc, "accuracy": self.accuracy, "seconds": self.seconds}
        named |= {f"recall/{name}": value for name, value in self.recall.items()}
        for method, found in self._scores.items():
            for name, score in [(ALL, found.overall), *self.by_class[method].items()]:
                named[f"cscore/{method}/{name}"] = score.value
                named[f"gold/{method}/{name}"] = float(score.n)
            named[f"degenerate/{method}"] = self.degenerate[method]
        named |= {f"gradient/{layer}": norm.mean for layer, norm in self.gradients.items()}
        return {f"heatproof/{name}": value for name, value in named.items() if math.isfinite(value)}

    def picture(self) -> np.ndarray | None:
        """ "H W 3" uint8: the first image of each class, plain and under each method's map in red."""
        if self.pictures is None:
            return None
        grey = self.pictures.astype(np.float64).mean(-1, keepdims=True)
        tiles = [self.pictures.astype(np.float64)]
        for heat in self.heat.values():
            weight = STRENGTH * heat[..., None]
            tiles.append((1 - weight) * grey + weight * RED)
        padded = [np.pad(t, ((0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=255) for t in tiles]
        rows = [np.concatenate([tile[k] for tile in padded], axis=1) for k in range(len(self.pictures))]
        return np.concatenate(rows).round().astype(np.uint8)

    def _repr_html_(self) -> str:
        rows = [
            [f"{method}, {name}", one.value, *one.interval, one.n, one.degenerate]
            for method, scores in self.by_class.items()
            for name, one in [(ALL, self._scores[method].overall), *scores.items()]
        ]
        table = plain_table(["C-Score of", "value", "95 % from", "to", "images", "blank maps"], rows)
        alarms = "".join(f"<p>{text(alarm)}</p>" for alarm in self.new_alarms)
        drawn = self.picture()
        pictures = "" if drawn is None else Strip([Image.fromarray(drawn)])._repr_html_()
        return f"<p>{text(self)}</p>{alarms}{table if rows else ''}{pictures}"

    def __str__(self) -> str:
        if self.problem:
            return f"epoch {self.epoch}: not measured: {self.problem}"
        scores = []
        for method, found in self._scores.items():
            low, high = found.overall.interval
            scores.append(f"{method} {found.overall.value:.3f} [{low:.3f}, {high:.3f}]")
        line = f"epoch {self.epoch}: AUC {self.auc:.3f}, accuracy {self.accuracy:.3f}, C-Score "
        return f"{line}{', '.join(scores)} ({self.n} images, {self.seconds:.1f} s)"


def shown(held: HeldOut, found: Answers) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Pictures of the first classes, with their maps."""
    places = held.first_maps()[:SHOWN]
    rows = held.explained.rows[places].tolist()
    heat = {}
    for method, maps in found.maps.items():
        few = maps.take(places)
        whole = replace(few, values=few.values.nan_to_num(0, 0, 0)).for_display().numpy()
        volumes = whole.ndim > 3
        heat[method] = np.stack([sections(v, middle(v.shape)) for v in whole]) if volumes else whole
    return pixels(held.images[rows], held.preprocess), heat
