"""The stored pairs of a COSE study as columns, and what they say: overall, by kind, magnitude, checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from heatproof.errors import InputError
from heatproof.images.transforms import STEPS, TRANSFORMS
from heatproof.metrics.stability import Correlation, Cose, cose, cose_split, ssim_to_final
from heatproof.metrics.stats import mean_interval
from heatproof.report.tables import Value
from heatproof.store import RunFolder

CHECKPOINT = "checkpoint"
GEOMETRIC, PHOTOMETRIC, MODELS = "geometric", "photometric", "checkpoints"
BAND = 5  # steps of magnitude that are shown as one point
PAIR = re.compile(r"cose_(same|changed)\(([\w-]+),(.*)\)$", re.DOTALL)
QUERY = """select image, method, checkpoint, metric, value from scores
           where starts_with(metric, 'cose_same(') or starts_with(metric, 'cose_changed(') order by all"""


@dataclass(frozen=True)
class Pairs:
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

    def where(self, kept: np.ndarray) -> Pairs:
        return Pairs(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))

    @cached_property
    def kind(self) -> np.ndarray:
        kinds = {name: GEOMETRIC if t.geometric else PHOTOMETRIC for name, t in TRANSFORMS.items()}
        kinds[CHECKPOINT] = MODELS
        return np.array([kinds[name] for name in self.transform], dtype=object)

    @cached_property
    def step(self) -> np.ndarray:
        """How many of the 30 steps from zero; 0 where there is no magnitude."""
        reach = {name: t.reach for name, t in TRANSFORMS.items()}
        reaches = np.array([reach.get(name, 0.0) for name in self.transform], dtype=np.float64)
        with np.errstate(invalid="ignore"):
            part = np.where(reaches > 0, np.abs(self.magnitude) / np.where(reaches > 0, reaches, 1), 0)
        return np.asarray(np.rint(part * STEPS).astype(int))

    def cose(self, **options: Any) -> Cose:
        sides = self.same, ~self.same
        return cose(*(self.ssim[s] for s in sides), *(self.image[s] for s in sides), **options)


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
    pairs: Pairs
    accuracy: Mapping[str, Value]  # by checkpoint; NaN without labels
    degenerate: Mapping[str, float]  # share of empty maps of the final model, by method

    @cached_property
    def scores(self) -> dict[str, Cose]:
        """COSE of each method over all its pairs."""
        return {m: self.of(m).cose() for m in self.methods}

    @cached_property
    def by_equation(self) -> dict[str, Cose]:
        """The same with consistency over inputs alone, as eq. 4 has it."""
        found = {}
        for m in self.methods:
            pairs = self.of(m)
            found[m] = pairs.where(~pairs.same | (pairs.transform != CHECKPOINT)).cose()
        return found

    def of(self, method: str) -> Pairs:
        return self.pairs.where(self.pairs.method == method)

    def splits(self, method: str) -> dict[str, Cose]:
        """Geometric, photometric and checkpoints apart."""
        pairs = self.of(method)
        found = _split(pairs, pairs.kind)
        return {kind: found[kind] for kind in (GEOMETRIC, PHOTOMETRIC, MODELS) if kind in found}

    def by_transform(self, method: str) -> dict[str, Cose]:
        pairs = self.of(method)
        found = _split(pairs, pairs.transform)
        return {name: found[name] for name in (*TRANSFORMS, CHECKPOINT) if name in found}

    def by_magnitude(self, method: str, kind: str | None = None) -> dict[float, Cose]:
        """COSE in bands of magnitude, as a share of the largest, over signed transforms."""
        pairs = self.of(method)
        pairs = pairs.where((pairs.step > 0) & ((pairs.kind == kind) if kind else True))
        found = _split(pairs, (pairs.step - 1) // BAND)
        return {(band + 0.5) * BAND / STEPS: found[band] for band in sorted(found)}

    def per_image(self, method: str, same: bool) -> np.ndarray:
        """Each image's mean SSIM over pairs with the same (or 1 - SSIM with another) prediction."""
        pairs = self.of(method)
        pairs = pairs.where((pairs.same == same) & ~np.isnan(pairs.ssim))
        _, which = np.unique(pairs.image.astype(str), return_inverse=True)
        if not len(which):
            return np.array([])
        means = np.bincount(which, weights=pairs.ssim) / np.bincount(which)
        return means if same else 1 - means

    def to_final(self, method: str) -> dict[str, Value]:
        """Mean SSIM of each earlier checkpoint's maps to the final one's."""
        pairs = self.of(method)
        pairs = pairs.where(pairs.transform == CHECKPOINT)
        values = {c: pairs.ssim[pairs.checkpoint == c] for c in self.checkpoints if c != self.final}
        return {c: mean_value(v) for c, v in values.items()}

    def correlation(self, method: str) -> Correlation:
        """Of SSIM to the final maps with accuracy, over checkpoints."""
        near = self.to_final(method)
        return ssim_to_final([v.value for v in near.values()], [self.accuracy[c].value for c in near])


def _split(pairs: Pairs, groups: np.ndarray) -> dict[Any, Cose]:
    """COSE of each group, without intervals, which nobody reads there."""
    return cose_split(pairs.ssim, pairs.same, list(groups), list(pairs.image), resamples=1)


def mean_value(values: Sequence[float] | np.ndarray) -> Value:
    """Mean over images with its interval; NaN is left out."""
    array = np.asarray(values, dtype=np.float64)
    defined = array[~np.isnan(array)]
    mean = float(defined.mean()) if len(defined) else float("nan")
    return Value(mean, mean_interval(defined), len(defined))


def read_pairs(folder: RunFolder, require_correct: bool = False) -> Found:
    """What a COSE study's folder holds. require_correct: only images that the final model gets right."""
    config = folder.manifest.config
    if config.get("protocol") != "cose":
        raise InputError(f"{folder.path} is not a COSE study; name a folder that heatproof study cose wrote")
    scores = folder.scores()
    final = config["final"]
    answers = scores.sql("select checkpoint, image, value from scores where metric = 'correct' order by all")
    right = {row["image"] for row in answers if row["checkpoint"] == final and row["value"] == 1}
    seen = {row["image"] for row in answers if row["checkpoint"] == final}
    pairs = _columns(scores.sql(QUERY))
    if require_correct:
        if not right:
            raise InputError("require_correct needs labels and a final model that gets an image right")
        pairs = pairs.where(np.array([image in right for image in pairs.image], dtype=bool))
    order = [c for c in folder.manifest.models if c != final] + [final]
    empty = scores.sql(
        "select method, avg(value) as share from scores where metric = 'degenerate' and checkpoint = ? "
        "group by method",
        [final],
    )
    return Found(
        model=config["name"],
        dataset=config["dataset"],
        family=config["family"],
        final=final,
        methods=tuple(config["methods"]),
        checkpoints=tuple(order),
        images=len(seen),
        pairs=pairs,
        accuracy={c: mean_value([r["value"] for r in answers if r["checkpoint"] == c]) for c in order},
        degenerate={row["method"]: row["share"] for row in empty},
    )


def _columns(rows: list[dict[str, Any]]) -> Pairs:
    found = [PAIR.match(row["metric"]) for row in rows]
    parts = [match.groups() for match in found if match]
    assert len(parts) == len(rows)
    names = {
        key: np.array([row[key] for row in rows], dtype=object) for key in ("image", "method", "checkpoint")
    }
    return Pairs(
        **names,
        transform=np.array([name for _, name, _ in parts], dtype=object),
        magnitude=np.array([np.nan if name == CHECKPOINT else float(m) for _, name, m in parts]),
        same=np.array([kind == "same" for kind, _, _ in parts], dtype=bool),
        ssim=np.array([row["value"] for row in rows], dtype=np.float64),
    )
