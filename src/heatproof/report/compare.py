"""Comparison of runs: what became better or worse from the first to each other one, and which maps changed.

A side is a run at its last checkpoint, or at a named one, with all its methods or one of them:

    runs/a     runs/a@epoch05     runs/a@gradcam     runs/a@epoch05@gradcam

Values per image are compared in pairs if at least half of the smaller side's images are in both (same name,
same content), else as two samples; both with a 95 % bootstrap interval, not corrected for the number of
comparisons. Values of whole checkpoints have changed if their own intervals do not overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from heatproof.disk import output_path, write_whole
from heatproof.errors import HeatproofError, InputError, did_you_mean
from heatproof.metrics.results import mean_interval, percentile_interval, resample
from heatproof.report.gallery import MOST_COMPARED, for_display, standard_ranks
from heatproof.report.panels import Tile, sheet
from heatproof.report.pieces import (
    Chart,
    Grid,
    Panels,
    Scale,
    html_page,
    named,
    nice_ticks,
    number,
    with_sub,
)
from heatproof.show import address, overlay, plain_table
from heatproof.store import RunFolder
from heatproof.store.manifest import MetricFacts
from heatproof.verdict.answers import WORDS, Verdict, without_nan
from heatproof.verdict.data import NAN, Measure, RunData, read_run
from heatproof.verdict.judge import judge

SCHEMA = 1
UNCHANGED = 0.9995  # a rank correlation that is printed as 1
PIXELS = 112  # of an image's side
MOST_METHODS = 2  # of an image whose maps changed
MOST_PANELS = 12
ORDER = ("worse", "better", "unclear")
RIGHT = Measure(
    "classified rightly", "classified rightly",
    MetricFacts("classified rightly", title="images classified correctly", family="Classifier",
                higher_is_better=True, bounds=(0.0, 1.0), floors=()),
)  # fmt: skip
METHOD_HEADLINES = {
    "yes": "Its maps follow the network", "no": "Its maps do not follow the network",
    "undecided": "Undecided whether its maps follow the network",
    "": "A control, which does not use the network",
}  # fmt: skip


@dataclass(frozen=True)
class RunSide:
    """A run at one checkpoint with its verdict."""

    name: str
    data: RunData
    verdict: Verdict
    method: str = ""  # the only one that is compared; "" compares all

    @property
    def follows(self) -> str:
        """The answer for its method, or for its maps as a whole; "" for a floor."""
        if not self.method:
            return self.verdict.follow
        return next((m.follows for m in self.verdict.methods if m.method == self.method), "")

    @property
    def headline(self) -> str:
        return METHOD_HEADLINES[self.follows] if self.method else self.verdict.headline

    @cached_property
    def contents(self) -> Mapping[str, str]:
        """Hashes of the images' contents, if the run recorded them."""
        return dict(self.data.folder.images())

    @cached_property
    def places(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.data.images.ids)}


@dataclass(frozen=True)
class Difference:
    """One metric of two sides."""

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
    """An image whose maps differ between two sides."""

    image: str
    sides: tuple[int, int]
    alike: float  # mean rank correlation over the methods
    methods: tuple[tuple[str, str, float], ...]  # on either side, and their correlation; lowest first


@dataclass(frozen=True)
class RunComparison:
    """Sides, the changes from the first to each other one, and the images whose maps changed most."""

    sides: tuple[RunSide, ...]
    differences: tuple[Difference, ...]
    moved: tuple[Moved, ...] = ()
    same: Mapping[int, int] = field(default_factory=dict)  # images that a side shares with the first

    def by_answer(self, answer: str) -> list[Difference]:
        return [difference for difference in self.differences if difference.answer == answer]

    @property
    def headline(self) -> str:
        better, worse, unclear = (len(self.by_answer(word)) for word in ("better", "worse", "unclear"))
        if not self.differences:
            return "The runs have no number in common"
        total = len(self.differences)
        return f"{better} of {total} numbers became better, {worse} worse, {unclear} are unclear"

    def report(self, path: str | Path = "compare.html") -> Path:
        """Write the page, one HTML file.

        Args:
            path: of the file.
        """
        path = output_path(path)
        others = []
        for k, side in enumerate(self.sides[1:], 1):
            own = [d for d in self.differences if d.sides[1] == k]
            counts = {"same": self.same.get(k, 0), "pictures": len(side.data.images.ids)}
            others.append({"name": side.name, **counts, "charts": _charts(own), "numbers": _table(own, side)})
        content = {
            "this": self,
            "words": WORDS,
            "moved": [(image, _strip(self, image)) for image in self.moved],
            "others": others,
        }
        write_whole({path: html_page("compare", content).encode("utf-8", errors="replace")})
        return path

    def as_json(self) -> dict[str, Any]:
        """For programs; NaN becomes null."""
        sides = [
            {"name": s.name, "run": str(s.data.folder.path), "model": s.data.model,
             "checkpoint": s.data.checkpoint, "method": s.method or None, "headline": s.headline,
             "methods": {m.method: m.follows for m in s.verdict.methods},
             "network": s.verdict.network.answer}
            for s in self.sides
        ]  # fmt: skip
        changes = [
            {"metric": d.of.name, "answer": d.answer, **{k: v for k, v in vars(d).items() if k != "of"}}
            for d in self.differences
        ]
        moved = [image._asdict() for image in self.moved]
        return dict(without_nan({"schema": SCHEMA, "sides": sides, "differences": changes, "moved": moved}))

    def __str__(self) -> str:
        return "\n".join([f"{self.headline}.", *(f"  {s.name}: {s.headline}" for s in self.sides)])

    def _repr_html_(self) -> str:
        heads = ["", "method", "before", "after", "change", "low", "high", "answer"]
        rows = [[d.of.plain, d.method, d.before, d.after, d.change, d.low, d.high, d.answer]
                for d in self.differences]  # fmt: skip
        verdicts = plain_table(["run", "verdict"], [[s.name, s.headline] for s in self.sides])
        return verdicts + (plain_table(heads, rows) if rows else "")


def compare_runs(runs: Sequence[str | Path | RunFolder], most: int = 12) -> RunComparison:
    """Read and judge every side, and compare each with the first. most: images to name."""
    if len(runs) < 2:
        raise InputError("name at least two runs, or one at two checkpoints: RUN@epoch01 RUN@epoch10")
    sides = _with_names([read_side(run) for run in runs])
    differences: list[Difference] = []
    moved: list[Moved] = []
    same = {}
    first = sides[0]
    for k, other in enumerate(sides[1:], 1):
        shared = [
            name
            for name in first.data.images.ids
            if name in other.places
            and first.contents.get(name, "") == other.contents.get(name, first.contents.get(name, ""))
        ]
        same[k] = len(shared)
        if first.method or other.method:
            pairs = [(first.method or other.method, other.method or first.method)]
        else:
            pairs = [(m, m) for m in first.data.methods if m in other.data.methods]
        differences += _differences(first, other, k, pairs, shared)
        moved += _moved(first, other, k, pairs, shared)
    moved.sort(key=lambda image: image.alike)
    return RunComparison(tuple(sides), tuple(differences), tuple(moved[:most]), same)


def read_side(run: str | Path | RunFolder) -> RunSide:
    """A run, optionally with a checkpoint and a method after @."""
    path, names = (run, []) if isinstance(run, RunFolder) or Path(run).exists() else split_names(str(run))
    folder = path if isinstance(path, RunFolder) else RunFolder.open(path)
    data = read_run(folder)
    checkpoint, method = data.checkpoint, ""
    for name in names:
        if name in data.checkpoints:
            checkpoint = name
        elif name in data.methods:
            method = name
        else:
            known = [*data.checkpoints, *data.methods]
            raise InputError(f"{path} has no checkpoint or method {name!r}; {did_you_mean(name, known)}")
    if checkpoint != data.checkpoint:
        data = read_run(folder, data.model, checkpoint)
    return RunSide("", data, judge(data), method)


def split_names(text: str) -> tuple[str, list[str]]:
    """Split into the longest prefix that is a path, and the words after it."""
    words = text.split("@")
    for end in range(len(words) - 1, 0, -1):
        if Path(path := "@".join(words[:end])).exists():
            return path, words[end:]
    return words[0], words[1:]


def _with_names(sides: Sequence[RunSide]) -> list[RunSide]:
    """The sides, named after what they differ in."""
    paths = [s.data.folder.path.resolve() for s in sides]
    folders = [path.parent.name if path.name == "run" else path.name for path in paths]
    parts = [
        folders if len(set(paths)) > 1 else [""] * len(sides),
        [s.data.model for s in sides],
        [s.data.checkpoint for s in sides],
        [s.method for s in sides],
    ]
    different = [values for values in parts if len(set(values)) > 1]
    names = [" ".join(filter(None, (values[i] for values in different))) for i in range(len(sides))]
    unique = all(names) and len(set(names)) == len(names)
    return [
        replace(side, name=name if unique else f"{name or side.data.model} ({i})")
        for i, (name, side) in enumerate(zip(names, sides, strict=True), 1)
    ]


def _differences(
    first: RunSide, other: RunSide, k: int, pairs: Sequence[tuple[str, str]], shared: Sequence[str]
) -> Iterator[Difference]:
    a, b = first.data, other.data
    at = [[side.places[name] for name in shared] for side in (first, other)]
    half = 2 * len(shared) >= min(len(a.images.ids), len(b.images.ids)) > 0

    def difference(of: Measure, methods: tuple[str, str], x: np.ndarray, y: np.ndarray) -> Difference:
        both = x[at[0]], y[at[1]]
        known = np.isfinite(both[0]) & np.isfinite(both[1])
        if paired := bool(half and known.sum() > 1):
            x, y = (column[known] for column in both)
            interval = mean_interval(y - x)
        else:
            x, y = (column[np.isfinite(column)] for column in (x, y))
            interval = _unpaired(x, y)
        before, after = (float(column.mean()) if len(column) else NAN for column in (x, y))
        n = len(x), len(y)
        return Difference(of, (0, k), methods, before, after, after - before, *interval, n, paired)

    rights = [np.array([NAN if r is None else float(r) for r in data.images.right]) for data in (a, b)]
    if all(np.isfinite(right).any() for right in rights) and not a.manifest.is_multilabel:
        yield difference(RIGHT, ("", ""), *rights)
    for of in a.measures:
        if of.higher_is_better is None:
            continue
        for methods in pairs:
            keys = [(of.name, method) for method in methods]
            if keys[0] in a.images.scores and keys[1] in b.images.scores:
                yield difference(of, methods, a.images.scores[keys[0]], b.images.scores[keys[1]])
            elif keys[0] in a.whole and keys[1] in b.whole:
                x, y = a.whole[keys[0]], b.whole[keys[1]]
                apart = y.low - x.high, y.high - x.low  # contains 0 if the intervals overlap
                change, n = y.defined - x.defined, (x.n or 0, y.n or 0)
                yield Difference(of, (0, k), methods, x.defined, y.defined, change, *apart, n, False)


def _unpaired(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Bootstrap interval of the difference of the means of two samples."""
    if min(len(x), len(y)) < 2:
        return NAN, NAN
    means = [values[resample(len(values), seed=(0, i))].mean(1) for i, values in enumerate((x, y))]
    return percentile_interval(means[1] - means[0])


def _moved(
    first: RunSide, other: RunSide, k: int, pairs: Sequence[tuple[str, str]], shared: Sequence[str]
) -> Iterator[Moved]:
    """Images with maps on both sides that differ; floors are compared only if they are named."""
    step = max(1, -(-len(shared) // MOST_COMPARED))
    named = (first.method, other.method) != ("", "")
    by_image: dict[str, list[tuple[str, str, float]]] = {}
    for a, b in pairs:
        if named or (a in first.data.real and b in other.data.real):
            for image, alike in _alike(first, other, (a, b), shared[::step]):
                by_image.setdefault(image, []).append((a, b, alike))
    for image, methods in by_image.items():
        mean = float(np.mean([alike for _, _, alike in methods]))
        if mean < UNCHANGED:
            yield Moved(image, (0, k), mean, tuple(sorted(methods, key=lambda method: method[2])))


def _alike(
    first: RunSide, other: RunSide, methods: tuple[str, str], images: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """Rank correlation of two sides' maps of each image; 0 if only one of them is constant."""
    sides = [(side.data.folder.maps(), side.data.checkpoint, m)
             for side, m in zip((first, other), methods, strict=True)]  # fmt: skip
    try:
        known = [store.known(checkpoint, method, images) for store, checkpoint, method in sides]
        common = [name for name, *stored in zip(images, *known, strict=True) if all(stored)]
        if not common:
            return
        maps = [store.read_arrays(checkpoint, method, common) for store, checkpoint, method in sides]
    except HeatproofError:  # the run stored no maps
        return
    positive = [np.maximum(side.values, 0).reshape(len(common), -1) for side in maps]
    constant = [values.max(1) == values.min(1) for values in positive]
    ranks = [standard_ranks(side) for side in maps]
    alike = np.where(constant[0] != constant[1], 0.0, (ranks[0] * ranks[1]).sum(1).clip(-1, 1))
    for name, value in zip(common, alike.astype(np.float32).tolist(), strict=True):
        if math.isfinite(value):
            yield name, value


@dataclass(frozen=True)
class Intervals(Chart):
    """A chart with a row per method: its change with its interval, and the line of no change."""

    rows: Sequence[tuple[str, float, float, float, str]]  # name, change, low, high, answer

    width, step = 300, 24

    @property
    def height(self) -> int:
        return self.step * len(self.rows) + 34

    @property
    def x(self) -> Scale:
        ends = [e for _, *numbers, _ in self.rows for e in numbers if math.isfinite(e)]
        return Scale(min([0.0, *ends]), max([0.0, *ends]), 112, self.width - 14)

    @property
    def ticks(self) -> list[float]:
        return nice_ticks(self.x.low, self.x.high, 4)

    @property
    def description(self) -> str:
        return "; ".join(f"{name}: {change:+.3f}, {answer}" for name, change, _, _, answer in self.rows)


def _charts(differences: Sequence[Difference]) -> Panels | None:
    """A panel for each metric that surely changed for a method, all methods in it."""
    changed = {d.of.name: d.of for d in differences if d.answer != "unclear"}
    panels = []
    for name, of in list(changed.items())[:MOST_PANELS]:
        own = [d for d in differences if d.of.name == name]
        rows = [(d.method or "network", d.change, d.low, d.high, d.answer) for d in own]
        title = f"{of.plain} {of.arrow}, n = {max(max(d.n) for d in own)}"
        panels.append((title, Intervals(f"Change of {of.short}", rows)))
    return Panels(panels) if panels else None


def _table(differences: Sequence[Difference], side: RunSide) -> Grid | None:
    """All values of both sides, sure changes first."""
    rows = []
    for d in sorted(differences, key=lambda d: ORDER.index(d.answer)):
        interval = "no interval" if math.isnan(d.low) else f"{number(d.low)} to {number(d.high)}"
        n = f"n = {d.n[0]}, paired" if d.paired else f"n = {d.n[0]} and {d.n[1]}"
        metric = with_sub(named(f"{d.of.plain} {d.of.arrow}".strip()), d.of.options)
        change = with_sub(number(d.change), interval)
        rows.append([metric, named(d.method), number(d.before), number(d.after), change, n, d.answer])
    heads = ["Number", "Method", "Before", "After", "Change", "Images", "Answer"]
    return Grid(heads, rows, f"Every number, from the first run to {side.name}") if rows else None


def _strip(comparison: RunComparison, moved: Moved) -> str:
    """The image beside its maps on both sides, a row for each of the methods that changed most."""
    rows = []
    for methods in moved.methods[:MOST_METHODS]:
        tiles: list[Tile] = []
        for k, method in zip(moved.sides, methods[:2], strict=True):
            side = comparison.sides[k]
            maps = side.data.folder.maps().read_arrays(side.data.checkpoint, method, [moved.image])
            image = _image(comparison, moved, maps.image_size)
            tiles = tiles or [Tile(image, method if methods[0] == methods[1] else "the image")]
            explained = side.data.class_name(int(maps.explained[0]))
            tiles.append(Tile(overlay(image, for_display(maps)[0]), side.name, f"explains {explained}"))
        rows.append(tiles)
    return address(sheet(rows, side=PIXELS))


def _image(comparison: RunComparison, moved: Moved, size: tuple[int, ...]) -> Image.Image:
    """The image as the model received it; grey if no run stored it."""
    stored = (comparison.sides[k].data.folder.pictures().open(moved.image) for k in moved.sides)
    image = next(filter(None, stored), None) or Image.new("RGB", (1, 1), (128, 128, 128))
    return image.convert("RGB").resize((size[1], size[0]))
