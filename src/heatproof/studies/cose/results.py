"""Results of a COSE study: its stored pairs as columns, and scores by kind, magnitude and checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from heatproof.errors import InputError
from heatproof.explain.floors import is_floor
from heatproof.images.transforms import STEPS, TRANSFORMS
from heatproof.metrics.agreement import Correlation
from heatproof.metrics.results import PerClass
from heatproof.metrics.stability import cose, cose_split, harmonic, ssim_to_final
from heatproof.metrics.stats import Interval, percentile_interval, resample
from heatproof.store import RunFolder
from heatproof.studies.common import mean_value

CHECKPOINT = "checkpoint"
KINDS = GEOMETRIC, PHOTOMETRIC, MODELS = "geometric", "photometric", "checkpoints"
CHANGES = (*TRANSFORMS, CHECKPOINT)
BAND = 5  # steps of magnitude that are shown as one point
QUERY = r"""
    select image, method, checkpoint, starts_with(metric, 'cose_same(') as same, value as ssim,
        regexp_extract(metric, '\(([\w-]+),', 1) as transform,
        if(transform = 'checkpoint', 'nan', regexp_extract(metric, ',([^)]*)\)$', 1))::double as magnitude
    from scores where starts_with(metric, 'cose_same(') or starts_with(metric, 'cose_changed(')
    order by image, method, checkpoint, metric, value"""


@dataclass(frozen=True)
class CoseResults:
    """A finished study: one model on one set of images."""

    model: str
    dataset: str
    family: str
    final: str
    methods: tuple[str, ...]
    checkpoints: tuple[str, ...]  # in order of training, the final one last
    images: int
    pairs: np.recarray  # the columns of QUERY, with kind and step
    accuracy: Mapping[str, float]  # by checkpoint; NaN without labels
    degenerate: Mapping[str, float]  # share of empty maps of the final model, by method
    pretraining: str | None = None
    trained_with: str = "unknown"  # whether the transforms were part of the training
    similarity: str = "local5"

    @cached_property
    def scores(self) -> dict[str, PerClass]:
        """COSE of each method over all its pairs."""
        return {m: _score(self.of(m)) for m in self.methods}

    @cached_property
    def ranked(self) -> dict[str, PerClass]:
        """The methods that have a COSE, floors left out, the best first."""
        known = {m: s for m, s in self.scores.items() if not is_floor(m) and not math.isnan(s.value)}
        return dict(sorted(known.items(), key=lambda item: -item[1].value))

    @cached_property
    def by_equation(self) -> dict[str, PerClass]:
        """The same with consistency over inputs alone, as eq. 4 has it."""
        counted = self.pairs[~self.pairs.same | (self.pairs.transform != CHECKPOINT)]
        return {m: _score(counted[counted.method == m]) for m in self.methods}

    @property
    def earlier(self) -> tuple[str, ...]:
        """Checkpoints before the final one."""
        return self.checkpoints[:-1]

    def of(self, method: str) -> np.recarray:
        """The pairs of a method."""
        pairs: np.recarray = self.pairs[self.pairs.method == method]
        return pairs

    def split(self, method: str, by: str, order: Iterable[str]) -> dict[str, PerClass]:
        """COSE without intervals of each kind ("kind") or change ("transform"), in this order."""
        pairs = self.of(method)
        return _split(pairs, pairs[by], order)

    def by_magnitude(self, method: str, kind: str | None = None) -> dict[float, PerClass]:
        """COSE in bands of magnitude, as a share of the largest, over signed transforms."""
        pairs = self.of(method)
        pairs = pairs[(pairs.step > 0) & ((pairs.kind == kind) if kind else True)]
        bands = _split(pairs, (pairs.step - 1) // BAND, range(STEPS))
        return {(band + 0.5) * BAND / STEPS: score for band, score in bands.items()}

    def image_sums(self, method: str, images: Sequence[str]) -> np.ndarray:
        """ "2 2 n": sums of SSIM or of 1 - SSIM, and how many, for kept and changed predictions."""
        pairs, place = self.of(method), {name: i for i, name in enumerate(images)}
        at, n = np.array([place[name] for name in pairs.image], dtype=int), len(images)
        sides = []
        for rows, values in ((pairs.same, pairs.ssim), (~pairs.same, 1 - pairs.ssim)):
            known = rows & ~np.isnan(values)
            sides.append([np.bincount(at[known], values[known], n), np.bincount(at[known], minlength=n)])
        return np.array(sides, dtype=np.float64)

    def ahead(self, first: str, second: str, resamples: int = 1000) -> tuple[float, Interval]:
        """By how much the first method's COSE is above the second's, with its 95 % interval.

        Both are taken on the same resampled images, so that images which are hard for both do not count.
        """
        names = sorted({*self.of(first).image, *self.of(second).image})
        drawn = [np.arange(len(names)), *resample(len(names), resamples)]
        sums = [self.image_sums(method, names) for method in (first, second)]
        totals = np.array([[of[:, :, rows].sum(-1) for rows in drawn] for of in sums])  # "2 r 2 2"
        with np.errstate(invalid="ignore"):
            halves = totals[..., 0] / totals[..., 1]
        scores = harmonic(halves[..., 0], halves[..., 1])
        apart = scores[0] - scores[1]
        return float(apart[0]), percentile_interval(apart[1:])

    def per_image(self, method: str, same: bool) -> np.ndarray:
        """Each image's mean SSIM over pairs with the same (or 1 - SSIM with another) prediction."""
        sums, counts = self.image_sums(method, sorted({*self.of(method).image}))[0 if same else 1]
        return np.asarray(sums[counts > 0] / counts[counts > 0])

    def to_final(self, method: str) -> dict[str, float]:
        """Mean SSIM of each earlier checkpoint's maps to the final one's."""
        pairs = self.of(method)
        pairs = pairs[pairs.transform == CHECKPOINT]
        return {c: mean_value(pairs.ssim[pairs.checkpoint == c]).value for c in self.earlier}

    def correlation(self, method: str) -> Correlation:
        """Of SSIM to the final maps with accuracy, over checkpoints."""
        near = self.to_final(method)
        return ssim_to_final(list(near.values()), [self.accuracy[c] for c in near])


def _score(pairs: np.recarray) -> PerClass:
    sides = pairs[pairs.same], pairs[~pairs.same]
    return cose(*(side.ssim for side in sides), *(side.image for side in sides))


def _split(pairs: np.recarray, groups: np.ndarray, order: Iterable[Any]) -> dict[Any, PerClass]:
    scores = cose_split(pairs.ssim, pairs.same, list(groups), list(pairs.image), resamples=1)
    return {group: scores[group] for group in order if group in scores}


def read_pairs(folder: RunFolder, require_correct: bool = False) -> CoseResults:
    """Read the folder of a COSE study. require_correct: only images that the final model gets right."""
    config = folder.manifest.config
    if config.get("protocol") != "cose":
        raise InputError(f"{folder.path} is not a COSE study; name a folder that heatproof study cose wrote")
    scores, final = folder.scores(), config["final"]
    answers = scores.sql("select checkpoint, image, value from scores where metric = 'correct' order by all")
    answered = {row["image"]: row["value"] for row in answers if row["checkpoint"] == final}
    pairs = _with_kind_and_step(scores.columns(QUERY))
    if require_correct:
        if 1 not in answered.values():
            raise InputError("require_correct needs labels and a final model that gets an image right")
        pairs = pairs[np.array([answered[image] == 1 for image in pairs.image], dtype=bool)]
    order = (*(c for c in folder.manifest.models if c != final), final)
    empty = scores.sql(
        "select method, avg(value order by value) as share from scores "
        "where metric = 'degenerate' and checkpoint = ? group by method",
        [final],
    )
    return CoseResults(
        config["name"], config["dataset"], config["family"], final, tuple(config["methods"]), order,
        len(answered), pairs,
        accuracy={c: mean_value(r["value"] for r in answers if r["checkpoint"] == c).value for c in order},
        degenerate={row["method"]: row["share"] for row in empty},
        pretraining=config.get("pretraining"),
        trained_with=config.get("trained_with", "unknown"),
        similarity=config.get("similarity", "local5"),
    )  # fmt: skip


def _with_kind_and_step(columns: dict[str, np.ndarray]) -> np.recarray:
    """One record per pair. step: of the 30 from magnitude zero, 0 where there is no magnitude."""
    kinds = {name: GEOMETRIC if t.geometric else PHOTOMETRIC for name, t in TRANSFORMS.items()}
    names = columns["transform"]
    kind = np.array([kinds.get(name, MODELS) for name in names], dtype=object)
    reach = np.array([TRANSFORMS[n].reach if n in TRANSFORMS else 0.0 for n in names], dtype=np.float64)
    part = np.divide(np.abs(columns["magnitude"]), reach, out=np.zeros_like(reach), where=reach > 0)
    made = columns | {"kind": kind, "step": np.rint(part * STEPS).astype(int)}
    pairs: np.recarray = np.rec.fromarrays(list(made.values()), names=list(made))  # type: ignore[call-overload]
    return pairs
