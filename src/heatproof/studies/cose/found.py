"""The stored pairs of a COSE study as columns, and what they say: overall, by kind, magnitude, checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from heatproof.errors import InputError
from heatproof.explain.floors import is_floor
from heatproof.images.transforms import STEPS, TRANSFORMS
from heatproof.metrics.stability import Cose, Pearson, cose, cose_split, harmonic, ssim_to_final
from heatproof.metrics.stats import Interval, percentile_interval, resample
from heatproof.store import RunFolder
from heatproof.studies.skeleton import mean_value

CHECKPOINT = "checkpoint"
KINDS = GEOMETRIC, PHOTOMETRIC, MODELS = "geometric", "photometric", "checkpoints"
CHANGES = (*TRANSFORMS, CHECKPOINT)
BAND = 5  # steps of magnitude that are shown as one point
PAIR = re.compile(r"cose_(same|changed)\(([\w-]+),(.*)\)$", re.DOTALL)
QUERY = """select image, method, checkpoint, metric, value from scores
           where starts_with(metric, 'cose_same(') or starts_with(metric, 'cose_changed(') order by all"""


@dataclass(frozen=True)
class PairColumns:
    """Columns, one entry per pair."""

    image: np.ndarray
    method: np.ndarray
    checkpoint: np.ndarray
    transform: np.ndarray  # or "checkpoint"
    magnitude: np.ndarray  # NaN for a checkpoint
    same: np.ndarray  # bool
    ssim: np.ndarray

    def __len__(self) -> int:
        return len(self.ssim)

    def where(self, kept: np.ndarray) -> PairColumns:
        return PairColumns(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))

    @cached_property
    def kind(self) -> np.ndarray:
        kinds = {name: GEOMETRIC if t.geometric else PHOTOMETRIC for name, t in TRANSFORMS.items()}
        kinds |= {CHECKPOINT: MODELS}
        return np.array([kinds[name] for name in self.transform], dtype=object)

    @cached_property
    def step(self) -> np.ndarray:
        """How many of the 30 steps from zero; 0 where there is no magnitude."""
        reach = {name: t.reach for name, t in TRANSFORMS.items()}
        reaches = np.array([reach.get(name, 0.0) for name in self.transform], dtype=np.float64)
        part = np.divide(np.abs(self.magnitude), reaches, out=np.zeros_like(reaches), where=reaches > 0)
        return np.asarray(np.rint(part * STEPS).astype(int))

    def by_image(self, names: Sequence[str]) -> np.ndarray:
        """ "2 2 n": sums of SSIM or of 1 - SSIM, and how many, for kept and changed predictions."""
        place = {name: i for i, name in enumerate(names)}
        at = np.array([place[name] for name in self.image], dtype=int)
        found = np.zeros((2, 2, len(names)))
        for side, (rows, values) in enumerate(((self.same, self.ssim), (~self.same, 1 - self.ssim))):
            kept = rows & ~np.isnan(values)
            found[side, 0] = np.bincount(at[kept], values[kept], len(names))
            found[side, 1] = np.bincount(at[kept], minlength=len(names))
        return found

    def cose(self, **options: Any) -> Cose:
        sides = self.same, ~self.same
        return cose(*(self.ssim[s] for s in sides), *(self.image[s] for s in sides), **options)

    def split(self, groups: np.ndarray, order: Iterable[Any]) -> dict[Any, Cose]:
        """COSE of each group in this order, without intervals, which nobody reads there."""
        found = cose_split(self.ssim, self.same, list(groups), list(self.image), resamples=1)
        return {group: found[group] for group in order if group in found}


@dataclass(frozen=True)
class Found:
    """A finished study: one model on one set of images."""

    model: str
    dataset: str
    family: str
    final: str
    methods: tuple[str, ...]
    checkpoints: tuple[str, ...]  # in order of training, the final one last
    images: int
    pairs: PairColumns
    accuracy: Mapping[str, float]  # by checkpoint; NaN without labels
    degenerate: Mapping[str, float]  # share of empty maps of the final model, by method
    pretraining: str | None = None
    trained_with: str = "unknown"  # whether the transforms were part of the training
    similarity: str = "local5"

    @cached_property
    def scores(self) -> dict[str, Cose]:
        """COSE of each method over all its pairs."""
        return {m: self.of(m).cose() for m in self.methods}

    @cached_property
    def ranked(self) -> dict[str, Cose]:
        """The methods that have a COSE, floors left out, the best first."""
        known = {m: s for m, s in self.scores.items() if not is_floor(m) and not math.isnan(s.value)}
        return dict(sorted(known.items(), key=lambda one: -one[1].value))

    @cached_property
    def by_equation(self) -> dict[str, Cose]:
        """The same with consistency over inputs alone, as eq. 4 has it."""
        counted = self.pairs.where(~self.pairs.same | (self.pairs.transform != CHECKPOINT))
        return {m: counted.where(counted.method == m).cose() for m in self.methods}

    def ahead(self, first: str, second: str, resamples: int = 1000) -> tuple[float, Interval]:
        """By how much the first method's COSE is above the second's, with its 95 % interval.

        Both are taken on the same resampled images, so that images which are hard for both do not count.
        """
        names = sorted({*self.of(first).image, *self.of(second).image})
        sums = [self.of(method).by_image(names) for method in (first, second)]
        drawn = [np.arange(len(names)), *resample(len(names), resamples)]
        totals = np.array([[one[:, :, rows].sum(-1) for rows in drawn] for one in sums])  # "2 r 2 2"
        halves = np.divide(
            totals[..., 0], totals[..., 1], out=np.full(totals.shape[:-1], np.nan), where=totals[..., 1] > 0
        )
        scores = harmonic(halves[..., 0], halves[..., 1])
        apart = scores[0] - scores[1]
        return float(apart[0]), percentile_interval(apart[1:])

    def of(self, method: str) -> PairColumns:
        return self.pairs.where(self.pairs.method == method)

    def by_kind(self, method: str) -> dict[str, Cose]:
        """Geometric, photometric and checkpoints apart."""
        pairs = self.of(method)
        return pairs.split(pairs.kind, KINDS)

    def by_transform(self, method: str) -> dict[str, Cose]:
        pairs = self.of(method)
        return pairs.split(pairs.transform, CHANGES)

    def by_magnitude(self, method: str, kind: str | None = None) -> dict[float, Cose]:
        """COSE in bands of magnitude, as a share of the largest, over signed transforms."""
        pairs = self.of(method)
        pairs = pairs.where((pairs.step > 0) & ((pairs.kind == kind) if kind else True))
        found = pairs.split((pairs.step - 1) // BAND, range(STEPS))
        return {(band + 0.5) * BAND / STEPS: score for band, score in found.items()}

    def per_image(self, method: str, same: bool) -> np.ndarray:
        """Each image's mean SSIM over pairs with the same (or 1 - SSIM with another) prediction."""
        pairs = self.of(method)
        pairs = pairs.where((pairs.same == same) & ~np.isnan(pairs.ssim))
        _, which = np.unique(pairs.image.astype(str), return_inverse=True)
        if not len(which):
            return np.array([])
        means = np.bincount(which, weights=pairs.ssim) / np.bincount(which)
        return means if same else 1 - means

    def to_final(self, method: str) -> dict[str, float]:
        """Mean SSIM of each earlier checkpoint's maps to the final one's."""
        pairs = self.of(method)
        pairs = pairs.where(pairs.transform == CHECKPOINT)
        earlier = (c for c in self.checkpoints if c != self.final)
        return {c: mean_value(pairs.ssim[pairs.checkpoint == c]).value for c in earlier}

    def correlation(self, method: str) -> Pearson:
        """Of SSIM to the final maps with accuracy, over checkpoints."""
        near = self.to_final(method)
        return ssim_to_final(list(near.values()), [self.accuracy[c] for c in near])


def read_pairs(folder: RunFolder, require_correct: bool = False) -> Found:
    """What a COSE study's folder holds. require_correct: only images that the final model gets right."""
    config = folder.manifest.config
    if config.get("protocol") != "cose":
        raise InputError(f"{folder.path} is not a COSE study; name a folder that heatproof study cose wrote")
    scores, final = folder.scores(), config["final"]
    answers = scores.sql("select checkpoint, image, value from scores where metric = 'correct' order by all")
    answered = {row["image"]: row["value"] for row in answers if row["checkpoint"] == final}
    pairs = _columns(scores.sql(QUERY))
    if require_correct:
        if 1 not in answered.values():
            raise InputError("require_correct needs labels and a final model that gets an image right")
        pairs = pairs.where(np.array([answered[image] == 1 for image in pairs.image], dtype=bool))
    order = (*(c for c in folder.manifest.models if c != final), final)
    empty = scores.sql(
        "select method, avg(value order by value) as share from scores "
        "where metric = 'degenerate' and checkpoint = ? group by method",
        [final],
    )
    return Found(
        model=config["name"],
        dataset=config["dataset"],
        family=config["family"],
        final=final,
        methods=tuple(config["methods"]),
        checkpoints=order,
        images=len(answered),
        pairs=pairs,
        accuracy={c: mean_value(r["value"] for r in answers if r["checkpoint"] == c).value for c in order},
        degenerate={row["method"]: row["share"] for row in empty},
        pretraining=config.get("pretraining"),
        trained_with=config.get("trained_with", "unknown"),
        similarity=config.get("similarity", "local5"),
    )


def _columns(rows: list[dict[str, Any]]) -> PairColumns:
    parts = [match.groups() for row in rows if (match := PAIR.match(row["metric"]))]
    assert len(parts) == len(rows)
    image, method, checkpoint = (
        np.array([row[key] for row in rows], dtype=object) for key in ("image", "method", "checkpoint")
    )
    return PairColumns(
        image,
        method,
        checkpoint,
        transform=np.array([name for _, name, _ in parts], dtype=object),
        magnitude=np.array([np.nan if name == CHECKPOINT else float(m) for _, name, m in parts]),
        same=np.array([kind == "same" for kind, _, _ in parts], dtype=bool),
        ssim=np.array([row["value"] for row in rows], dtype=np.float64),
    )
