"""Runs side by side: what became better or worse from the first to each of the others, and which maps moved.

A side is a run at its last checkpoint, or at one that is named, with all its methods or one of them:

    runs/a     runs/a@epoch05     runs/a@gradcam     runs/a@epoch05@gradcam

Numbers of pictures are compared picture by picture where at least half of the smaller side's pictures are
in both (same name, same content), else as two samples; both with a 95 % bootstrap interval. Each interval
stands by itself: of twenty comparisons in which nothing changed, about one leaves 0 out. Numbers about whole
checkpoints have changed where their own intervals lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heatproof.errors import HeatproofError, InputError, did_you_mean
from heatproof.metrics.stats import mean_interval, percentile_interval, resample
from heatproof.show import plain_table
from heatproof.store import RunFolder
from heatproof.store.facts import MetricFacts
from heatproof.verdict.answers import Verdict, without_nan
from heatproof.verdict.data import RunData, read_run
from heatproof.verdict.judge import judge
from heatproof.verdict.measures import Measure

NAN = float("nan")
SCHEMA = 1
COMPARED_AT = 32, 32  # pixels at which maps are compared
MOST_COMPARED = 2000  # pictures
UNMOVED = 0.9995  # a correlation that is shown as 1
RIGHT = Measure(
    "classified rightly", "classified rightly",
    MetricFacts("classified rightly", title="pictures classified rightly", family="Classifier",
                higher_is_better=True, bounds=(0.0, 1.0), floors=()),
)  # fmt: skip
SAID_OF_ONE = {
    "yes": "Its maps follow the network", "no": "Its maps do not follow the network",
    "undecided": "Not decided yet whether its maps follow the network",
    "": "A floor, which never looks at the network",
}  # fmt: skip


@dataclass(frozen=True)
class RunSide:
    """One run at one checkpoint, judged."""

    name: str
    data: RunData
    verdict: Verdict
    method: str = ""  # the only one that is compared; all where empty

    @property
    def follows(self) -> str:
        """The answer for its method, or for its maps as a whole; "" for a floor."""
        if not self.method:
            return self.verdict.follow
        return next((m.follows for m in self.verdict.methods if m.method == self.method), "")

    @property
    def headline(self) -> str:
        return SAID_OF_ONE[self.follows] if self.method else self.verdict.headline

    @cached_property
    def marks(self) -> Mapping[str, str]:
        """What each picture was made of, where the run recorded it."""
        return dict(self.data.folder.images())

    @cached_property
    def places(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.data.images.ids)}


def read_side(run: str | Path | RunFolder) -> RunSide:
    """A run, perhaps with a checkpoint and a method behind @."""
    path, names = (run, []) if isinstance(run, RunFolder) or Path(run).exists() else _split(str(run))
    folder = path if isinstance(path, RunFolder) else RunFolder.open(path)
    data = read_run(folder)
    checkpoint, method = None, ""
    for name in names:
        if name in data.checkpoints:
            checkpoint = name
        elif name in data.methods:
            method = name
        else:
            known = [*data.checkpoints, *data.methods]
            raise InputError(f"{path} has no checkpoint or method {name!r}; {did_you_mean(name, known)}")
    if checkpoint is not None and checkpoint != data.checkpoint:
        data = read_run(folder, data.model, checkpoint)
    return RunSide("", data, judge(data), method)


def _split(text: str) -> tuple[str, list[str]]:
    """The longest beginning that is a path, and the words behind it."""
    words = text.split("@")
    for end in range(len(words) - 1, 0, -1):
        if Path(path := "@".join(words[:end])).exists():
            return path, words[end:]
    return words[0], words[1:]


def named_sides(sides: Sequence[RunSide]) -> list[RunSide]:
    """With names that say in what they differ."""
    paths = [s.data.folder.path.resolve() for s in sides]
    folders = [path.parent.name if path.name == "run" else path.name for path in paths]
    parts = {
        "folder": folders if len(set(paths)) > 1 else [""] * len(sides),
        "model": [s.data.model for s in sides],
        "checkpoint": [s.data.checkpoint for s in sides],
        "method": [s.method for s in sides],
    }
    told = [key for key, values in parts.items() if len(set(values)) > 1]
    names = [" ".join(filter(None, (parts[key][i] for key in told))) for i in range(len(sides))]
    clear = all(names) and len(set(names)) == len(names)
    return [
        replace(side, name=name if clear else f"{name or side.data.model} ({i})")
        for i, (name, side) in enumerate(zip(names, sides, strict=True), 1)
    ]


@dataclass(frozen=True)
class Difference:
    """One number of two sides: better counted by its direction."""

    of: Measure
    sides: tuple[int, int]
    methods: tuple[str, str]
    before: float
    after: float
    change: float
    low: float
    high: float
    n: tuple[int, int]
    paired: bool

    @property
    def answer(self) -> str:
        """better, worse, or unclear."""
        if not (self.low > 0 or self.high < 0) or self.of.higher_is_better is None:
            return "unclear"
        return "better" if (self.change > 0) == self.of.higher_is_better else "worse"

    @property
    def method(self) -> str:
        a, b = self.methods
        return a if a == b else f"{a} → {b}"


class Moved(NamedTuple):
    """A picture whose maps are least alike on two sides."""

    image: str
    sides: tuple[int, int]
    alike: float  # mean rank correlation over the methods
    methods: tuple[tuple[str, str, float], ...]  # on either side, and how alike; the least alike first


@dataclass(frozen=True)
class RunComparison:
    """Sides, what changed from the first to each other one, and the pictures whose maps moved most."""

    sides: tuple[RunSide, ...]
    differences: tuple[Difference, ...]
    moved: tuple[Moved, ...] = ()
    same: Mapping[int, int] = field(default_factory=dict)  # pictures that a side shares with the first

    def found(self, answer: str) -> list[Difference]:
        return [one for one in self.differences if one.answer == answer]

    @property
    def headline(self) -> str:
        better, worse, unclear = (len(self.found(word)) for word in ("better", "worse", "unclear"))
        total = len(self.differences)
        if not total:
            return "The runs have no number in common"
        return f"{better} of {total} numbers became better, {worse} worse, {unclear} did not surely change"

    def report(self, path: str | Path = "compare.html") -> Path:
        """Write the page, one HTML file.

        Args:
            path: of the file.
        """
        from heatproof.report.compare_page import write_comparison  # needs torch

        return write_comparison(self, path)

    def as_json(self) -> dict[str, Any]:
        """For programs; NaN becomes null."""
        sides = [
            {"name": s.name, "run": str(s.data.folder.path), "model": s.data.model,
             "checkpoint": s.data.checkpoint, "method": s.method or None, "headline": s.headline,
             "methods": {m.method: m.follows for m in s.verdict.methods},
             "looks_there": s.verdict.network.looks_there}
            for s in self.sides
        ]  # fmt: skip
        changes = [
            {"metric": d.of.name, "methods": list(d.methods), "sides": list(d.sides), "answer": d.answer,
             "paired": d.paired, "n": list(d.n), "before": d.before, "after": d.after, "change": d.change,
             "low": d.low, "high": d.high}
            for d in self.differences
        ]  # fmt: skip
        moved = [m._asdict() for m in self.moved]
        found = {"schema": SCHEMA, "sides": sides, "differences": changes, "moved": moved}
        return dict(without_nan(found))

    def __str__(self) -> str:
        lines = [f"{self.headline}.", *(f"  {s.name}: {s.headline}" for s in self.sides)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = ["", "method", "before", "after", "change", "low", "high", "answer"]
        rows = [[d.of.plain, d.method, d.before, d.after, d.change, d.low, d.high, d.answer]
                for d in self.differences]  # fmt: skip
        told = plain_table(["run", "verdict"], [[s.name, s.headline] for s in self.sides])
        return told + (plain_table(heads, rows) if rows else "")


def compare_runs(runs: Sequence[str | Path | RunFolder], most: int = 12) -> RunComparison:
    """Read and judge every side, and hold each against the first. most: pictures to name."""
    if len(runs) < 2:
        raise InputError("name at least two runs, or one at two checkpoints: RUN@epoch01 RUN@epoch10")
    sides = named_sides([read_side(run) for run in runs])
    differences: list[Difference] = []
    moved: list[Moved] = []
    same = {}
    for k, other in enumerate(sides[1:], 1):
        shared = _shared(sides[0], other)
        same[k] = len(shared)
        pairs = _methods(sides[0], other)
        differences += _differences(sides, k, pairs, shared)
        moved += _moved(sides, k, pairs, shared)
    moved.sort(key=lambda one: one.alike)
    return RunComparison(tuple(sides), tuple(differences), tuple(moved[:most]), same)


def _shared(a: RunSide, b: RunSide) -> list[str]:
    """Pictures that are in both: of one name, and of one content where both runs know it."""
    return [
        name
        for name in a.data.images.ids
        if name in b.places and a.marks.get(name, "") == b.marks.get(name, a.marks.get(name, ""))
    ]


def _methods(a: RunSide, b: RunSide) -> list[tuple[str, str]]:
    """Pairs of methods that are compared: the same one, unless a side names its own."""
    if a.method or b.method:
        return [(a.method or b.method, b.method or a.method)]
    return [(m, m) for m in a.data.methods if m in b.data.methods]


def _differences(
    sides: Sequence[RunSide], k: int, pairs: Sequence[tuple[str, str]], shared: Sequence[str]
) -> Iterator[Difference]:
    a, b = sides[0].data, sides[k].data
    at = [[side.places[name] for name in shared] for side in (sides[0], sides[k])]
    half = 2 * len(shared) >= min(len(a.images.ids), len(b.images.ids)) > 0

    def held(of: Measure, methods: tuple[str, str], one: np.ndarray, other: np.ndarray) -> Difference:
        both = one[at[0]], other[at[1]]
        known = np.isfinite(both[0]) & np.isfinite(both[1])
        if paired := bool(half and known.sum() > 1):
            one, other = (column[known] for column in both)
            interval = mean_interval(other - one)
        else:
            one, other = (column[np.isfinite(column)] for column in (one, other))
            interval = _unpaired(one, other)
        before, after = (float(column.mean()) if len(column) else NAN for column in (one, other))
        n = len(one), len(other)
        return Difference(of, (0, k), methods, before, after, after - before, *interval, n, paired)

    rights = [np.array([NAN if r is None else float(r) for r in data.images.right]) for data in (a, b)]
    if all(np.isfinite(right).any() for right in rights) and not a.manifest.is_multilabel:
        yield held(RIGHT, ("", ""), *rights)
    for of in a.measures:
        for methods in pairs:
            if of.higher_is_better is None:
                continue
            one, other = (
                a.images.scores.get((of.name, methods[0])),
                b.images.scores.get((of.name, methods[1])),
            )
            if one is not None and other is not None:
                yield held(of, methods, one, other)
            elif (of.name, methods[0]) in a.whole and (of.name, methods[1]) in b.whole:
                yield _of_checkpoints(of, k, methods, a, b)


def _of_checkpoints(of: Measure, k: int, methods: tuple[str, str], a: RunData, b: RunData) -> Difference:
    """Of numbers about whole checkpoints, by their own intervals."""
    one, other = a.whole[of.name, methods[0]], b.whole[of.name, methods[1]]
    change = other.defined - one.defined
    apart = other.low - one.high, other.high - one.low  # 0 lies within where the intervals meet
    n = one.n or 0, other.n or 0
    return Difference(of, (0, k), methods, one.defined, other.defined, change, *apart, n, False)


def _unpaired(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Bootstrap interval of the difference of the means of two samples."""
    if min(len(one), len(other)) < 2:
        return NAN, NAN
    means = [x[resample(len(x), seed=(0, i))].mean(1) for i, x in enumerate((one, other))]
    return percentile_interval(means[1] - means[0])


def _moved(
    sides: Sequence[RunSide], k: int, pairs: Sequence[tuple[str, str]], shared: Sequence[str]
) -> Iterator[Moved]:
    """Every picture with maps on both sides, by how alike these are; floors say nothing here."""
    a, b = sides[0], sides[k]
    step = max(1, -(-len(shared) // MOST_COMPARED))
    named = (a.method, b.method) != ("", "")
    real = [p for p in pairs if named or (p[0] in a.data.real and p[1] in b.data.real)]
    found: dict[str, list[tuple[str, str, float]]] = {}
    for first, second in real:
        for image, alike in _alike(a, b, (first, second), shared[::step]):
            found.setdefault(image, []).append((first, second, alike))
    for image, each in found.items():
        mean = float(np.mean([alike for _, _, alike in each]))
        if mean < UNMOVED:
            yield Moved(image, (0, k), mean, tuple(sorted(each, key=lambda one: one[2])))


def _alike(
    a: RunSide, b: RunSide, methods: tuple[str, str], images: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """Rank correlation of two sides' maps of each picture; 0 where only one of them is blank."""
    from heatproof.metrics.agreement import map_similarity
    from heatproof.types import upsample

    try:
        stores = [side.data.folder.maps() for side in (a, b)]
        known = [store.known(side.data.checkpoint, m, images)
                 for store, side, m in zip(stores, (a, b), methods, strict=True)]  # fmt: skip
        common = [name for name, *there in zip(images, *known, strict=True) if all(there)]
        if not common:
            return
        maps = [store.read(side.data.checkpoint, m, common)
                for store, side, m in zip(stores, (a, b), methods, strict=True)]  # fmt: skip
    except HeatproofError:  # a run whose maps were not kept
        return
    blank = [one.degenerate for one in maps]
    size = COMPARED_AT if len(maps[0].image_size) == 2 else (16, 16, 16)
    alike = map_similarity(*(upsample(one.values, size) for one in maps))["spearman"]
    for i, name in enumerate(common):
        if bool(blank[0][i]) != bool(blank[1][i]):
            yield name, 0.0
        elif math.isfinite(float(alike[i])):
            yield name, float(alike[i])
