"""Explanation drift: whether the maps of live images differ from those of a reference run, without labels.

Maps are compared within predicted classes; a statistic is the mean over classes, weighted by live images, of

    place         mean map       half the sum over cells of |mean mass, live - reference|; 1: no common cell
                  centre         distance between the mean centres of mass; 1: a side of the image
    spread        dispersion     |difference of the means| (metrics/localisation.py)
                  largest area   the same of the largest area's share of the budget
    blank maps    blank maps     the same of the share of maps that are constant
    consistency   C-Score        |difference of the C-Scores|, with equal weights (metrics/cscores.py)

and of recurring patches that the reference's evidence test names, over all images of runs that store images:

    evidence      patch of C     |difference of the shares of images| that contain the patch

A map is its share of mass in a grid of at most 16 cells a side. Only maps that explain the prediction count.

Null: the images of both samples are split at random into parts of the same sizes (within predicted classes,
except for patches), which are compared in the same way; p = (1 + splits with at least the observed
difference) / (1 + splits) is exact for independent images of one distribution. Drift: a Holm-corrected p is
below 5 %. Splits of the reference alone do not contain what is rare in it: for 60 and 30 images of the same
kind, they led to false alarms in 12 % of 60 trials.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from skimage.feature import match_template
from torch.nn import functional as F

from heatproof.disk import output_path, write_whole
from heatproof.errors import InputError, counted
from heatproof.explain.api import explain
from heatproof.images.kinds import guess_source
from heatproof.metrics.cscores import soft_iou_matrix
from heatproof.metrics.evidence_record import LARGEST
from heatproof.metrics.interventions import ALIKE
from heatproof.metrics.localisation import area_shares, budget_masks
from heatproof.models.model import Model, as_model
from heatproof.report.compare import RunSide, read_side, split_names
from heatproof.report.gallery import resized
from heatproof.report.panels import Tile, sheet
from heatproof.report.pieces import Grid, html_page, number
from heatproof.rows import MIN_N, PRETRAINED, RANDOM
from heatproof.run.config import study_from
from heatproof.run.engine import run_study
from heatproof.run.progress import Progress
from heatproof.run.study import ResolvedStudy, find_checkpoints
from heatproof.show import address, colours
from heatproof.store import RunFolder
from heatproof.store.folder import run_in
from heatproof.types import Maps, normalise
from heatproof.verdict.answers import without_nan
from heatproof.verdict.follow import LEVEL, holm
from heatproof.verdict.gate import DRIFT_FILE

if TYPE_CHECKING:
    from torch import nn

    from heatproof.types import Images

SCHEMA = "heatproof-drift-1"
CELLS = 16  # of the grid's side, at most
MOST = 2000  # images of a class of the reference, drawn at random from more
FEWEST = 4, 2  # images of a class: reference, live
BATCH = 256  # maps in memory at a time
CLASSES_SHOWN, PATCHES = 4, 3
QUESTIONS = {"mean map": "place", "centre": "place", "dispersion": "spread", "largest area": "spread",
             "blank maps": "blank maps", "C-Score": "consistency"}  # fmt: skip


class Sample(NamedTuple):
    """What is compared of some maps; the leading axis is the image."""

    cells: np.ndarray  # "n h w": share of the map's mass, 0 for a constant map
    numbers: np.ndarray  # "n k": centre of mass by axis, dispersion, largest area, blank
    classes: np.ndarray  # "n": explained
    patches: np.ndarray  # "n p": 1 if the image contains the patch

    def take(self, rows: np.ndarray) -> Sample:
        return Sample(*(field[rows] for field in self))

    def joined(self, other: Sample) -> Sample:
        return Sample(*map(np.concatenate, zip(self, other, strict=True)))


def describe(maps: Maps) -> Sample:
    """Reduce maps to what is compared; a constant map has no mass, its centre is that of the image."""
    mass = normalise(maps.values.detach().float().cpu())[:, None]
    mass = F.interpolate(mass, [min(CELLS, side) for side in mass.shape[2:]], mode="area")[:, 0]
    blank, cells = maps.degenerate.cpu().numpy(), mass.numpy()
    axes = range(1, cells.ndim)
    total = cells.sum(tuple(axes), keepdims=True)
    cells = np.divide(cells, total, out=np.zeros_like(cells), where=total > 0)
    columns = []
    for axis in axes:
        along = cells.sum(tuple(other for other in axes if other != axis))
        columns.append(np.where(blank, 0.5, along @ ((np.arange(along.shape[1]) + 0.5) / along.shape[1])))
    areas = [area_shares(mask) for mask in budget_masks(maps).cpu().numpy()]
    columns += [np.array([1 - (s**2).sum() for s in areas]), np.array([s.max(initial=0) for s in areas])]
    numbers = np.stack([*columns, blank], 1, dtype=np.float64)
    numbers[blank, -3:-1] = 0
    return Sample(cells, numbers, maps.explained.cpu().numpy(), np.zeros((len(maps), 0)))


class DriftTest(NamedTuple):
    """One statistic."""

    name: str
    question: str  # place, spread, consistency or evidence
    reference: float  # mean over the classes, weighted by live images; NaN of a map or a position
    live: float
    difference: float
    usual: float  # 95 % of the random splits have at most this difference
    p: float  # Holm-corrected over the statistics


@dataclass(frozen=True)
class Drift:
    """Whether the maps of live images differ from the reference: `.drifted`, `.tests`, `.report(path)`."""

    tests: tuple[DriftTest, ...]
    method: str
    images: tuple[int, int]  # compared, of the reference and live
    means: Mapping[str, tuple[np.ndarray, np.ndarray]]  # by class: mean maps, of the most frequent classes
    notes: tuple[str, ...] = ()
    runs: tuple[Mapping[str, Any], ...] = ({}, {})  # folder, id, checkpoint and finished units of either run

    @property
    def drifted(self) -> bool:
        return any(test.p < LEVEL for test in self.tests)

    @property
    def headline(self) -> str:
        kinds = list(dict.fromkeys(test.question for test in self.tests if test.p < LEVEL))
        if not kinds:
            return f"No drift: the {self.method} maps of live images are like those of the reference"
        return f"Drift: the {self.method} maps of live images differ from the reference in {', '.join(kinds)}"

    def as_json(self) -> dict[str, Any]:
        """For programs; NaN becomes null."""
        sides = [{"images": n, **run} for n, run in zip(self.images, self.runs, strict=True)]
        record = {
            "schema": SCHEMA, "drifted": self.drifted, "headline": self.headline, "method": self.method,
            "level": LEVEL, "reference": sides[0], "live": sides[1], "notes": self.notes,
            "tests": [test._asdict() | {"drifted": test.p < LEVEL} for test in self.tests],
        }  # fmt: skip
        return dict(without_nan(record))

    def report(self, path: str | Path = "drift.html") -> Path:
        """Write the page, one HTML file.

        Args:
            path: of the file.
        """
        path, heads = output_path(path), ["", "", "Reference", "Live", "Difference", "Usual, up to", "p", ""]
        rows = [
            [t.name, t.question, *map(number, (t.reference, t.live, t.difference, t.usual, t.p)),
             "differs" if t.p < LEVEL else "like the reference"] for t in self.tests
        ]  # fmt: skip
        content = {"this": self, "level": LEVEL, "table": Grid(heads, rows, "All statistics"),
                   "maps": address(self.mean_maps())}  # fmt: skip
        write_whole({path: html_page("drift", content).encode("utf-8", errors="replace")})
        return path

    def mean_maps(self) -> Image.Image:
        """Mean maps of the reference and of live images, and where live maps have more and less mass."""
        titles = ("reference", "live", "more in live", "less in live")
        rows = []
        for name, (before, after) in self.means.items():
            maps = np.stack([before, after, after - before, before - after]).clip(0)
            maps = maps.max(1) if maps.ndim == 4 else maps  # a volume from above
            maps = resized(maps / max(maps[:2].max(), 1e-12), (224, 224))
            rows.append(
                [Tile(Image.fromarray(colours(m)), f"{name}: {t}") for t, m in zip(titles, maps, strict=True)]
            )
        return sheet(rows)


def compare_samples(
    reference: Sample, live: Sample, method: str = "", names: Mapping[int, str] | None = None,
    patches: Sequence[str] = (), splits: int = 1000, seed: int = 0,
) -> Drift:  # fmt: skip
    """Compare two samples of maps of a method. names: of the classes; patches: names of the patches."""
    if splits < 100:
        raise InputError(f"splits must be at least 100, so that p can be below 5 %; got {splits}")
    if reference.cells.shape[1:] != live.cells.shape[1:]:
        sizes = " and ".join("x".join(map(str, s.cells.shape[1:])) for s in (reference, live))
        raise InputError(f"the maps have {sizes} cells; compare maps of the same network and method")
    random, every, samples = np.random.default_rng(seed), np.unique(live.classes), (reference, live)
    rows = {c: [np.flatnonzero(s.classes == c) for s in samples] for c in every.tolist()}
    used = {c: r for c, r in rows.items() if len(r[0]) >= FEWEST[0] and len(r[1]) >= FEWEST[1]}
    n, m = (sum(len(own[k]) for own in used.values()) for k in (0, 1))
    if m < MIN_N:
        raise InputError(
            f"only {counted(m, 'live image')} can be compared, and {MIN_N} are needed, with at least "
            f"{FEWEST[0]} reference images of the same predicted class; add images"
        )
    pairs = {
        c: [s.take(random.permutation(r)[:MOST]) for s, r in zip(samples, own, strict=True)]
        for c, own in sorted(used.items(), key=lambda item: -len(item[1][1]))
    }
    parts = [_compare_class(a, b, splits, random) for a, b in pairs.values()]
    weights = [len(used[c][1]) for c in pairs]
    changes, levels = (np.average([p[k] for p in parts], axis=0, weights=weights) for k in (0, 1))
    for column in range(len(patches)):
        total, hits = len(reference.classes) + len(live.classes), [s.patches[:, column] for s in samples]
        count = int(sum(h.sum() for h in hits))
        drawn = random.hypergeometric(count, total - count, len(hits[1]), splits)
        drawn = np.array([hits[1].sum(), *drawn])
        changes = np.vstack([changes, np.abs(drawn / len(hits[1]) - (count - drawn) / len(hits[0]))])
        levels = np.column_stack([levels, [h.mean() for h in hits]])
    titles = [*QUESTIONS, *patches]
    shares = (1 + (changes[:, 1:] >= changes[:, :1] - 1e-9).sum(1)) / (1 + splits)
    p = holm(dict(zip(titles, shares.tolist(), strict=True)))
    numbers = np.stack([*levels, changes[:, 0], np.quantile(changes[:, 1:], 0.95, axis=1)], 1).tolist()
    tests = tuple(
        DriftTest(title, QUESTIONS.get(title, "evidence"), before, after, change, most, p[title])
        for title, (before, after, change, most) in zip(titles, numbers, strict=True)
    )
    means = {c: (a.cells.mean(0), b.cells.mean(0)) for c, (a, b) in list(pairs.items())[:CLASSES_SHOWN]}
    named = {(names or {}).get(c, f"class {c}"): both for c, both in means.items()}
    left = f"{len(live.classes) - m} live images left out: the reference has too few of their predicted class"
    return Drift(tests, method, (n, m), named, (left,) if len(live.classes) > m else ())


def _compare_class(
    a: Sample, b: Sample, splits: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Differences "k 1+splits", the observed one first, and the numbers "2 k" of both samples (NaN: none)."""
    n, side = len(a.classes), a.cells.shape[1:]
    groups = np.tile(np.arange(n + len(b.classes)) >= n, (1 + splits, 1))
    groups[1:] = random.permuted(groups[1:], axis=1)
    live, rest = np.split(_means(a.joined(b), np.concatenate([groups, ~groups]).astype(np.float32)), 2)
    cells, centre, others = np.split(live - rest, np.cumsum([np.prod(side), len(side)]), axis=1)
    changes = np.stack([np.abs(cells).sum(1) / 2, np.linalg.norm(centre, axis=1), *np.abs(others).T])
    levels = np.stack([part[0, -others.shape[1] :] for part in (rest, live)])
    return changes, np.pad(levels, ((0, 0), (2, 0)), constant_values=np.nan)


def _means(sample: Sample, groups: np.ndarray) -> np.ndarray:
    """Mean cells, mean numbers and the C-Score of each group, a row of 0 and 1; "groups values"."""
    flat = sample.cells.reshape(len(sample.cells), -1)
    heat = flat - flat.min(1, keepdims=True)
    heat /= np.maximum(heat.max(1, keepdims=True), np.finfo(np.float32).tiny)
    # The square is alpha = 2 of the C-Score.
    similar = soft_iou_matrix(torch.from_numpy(heat**2)).fill_diagonal_(0).float().numpy()
    n = groups.sum(1, keepdims=True)
    pairs = ((groups @ similar) * groups).sum(1, keepdims=True) / (n * (n - 1))
    return np.hstack([groups @ flat / n, groups @ sample.numbers / n, pairs])


def read_sample(side: RunSide, method: str, patches: Sequence[np.ndarray] = ()) -> tuple[Sample, list[str]]:
    """The maps of a run that explain the prediction, and notes about the others."""
    images, store, checkpoint = side.data.images, side.data.folder.maps(), side.data.checkpoint
    both = zip(images.ids, images.explained, images.predicted, strict=True)
    ids = [name for name, explained, predicted in both if predicted is not None and explained == predicted]
    ids = [name for name, known in zip(ids, store.known(checkpoint, method, ids), strict=True) if known]
    if not ids:
        raise InputError(
            f"{side.data.folder.path} has no {method} maps of predicted classes; run its study again"
        )
    parts, notes = [], []
    for start in range(0, len(ids), BATCH):
        maps = store.read(checkpoint, method, ids[start : start + BATCH])
        part = describe(maps)
        seen = [[_contains(side, name, patch) for name in maps.ids] for patch in patches]
        parts.append(part._replace(patches=np.column_stack([part.patches, *seen])))
    if other := len(images.ids) - len(ids):
        notes.append(
            f"{other} of {len(images.ids)} images of {side.data.folder.path} left out: their maps do not "
            'explain the prediction; to include them, run its study with run.targets = "predicted"'
        )
    return Sample(*(np.concatenate(field) for field in zip(*parts, strict=True))), notes


def _contains(side: RunSide, name: str, patch: np.ndarray) -> bool:
    picture = side.data.folder.pictures().open(name)
    if picture is None or min(picture.size) < max(patch.shape[:2]):
        return False
    picture.thumbnail((LARGEST, LARGEST))
    grey = [np.asarray(image.convert("L"), float) for image in (picture, Image.fromarray(patch))]
    return bool(match_template(*grey).max() > ALIKE)


def live_run(
    reference: RunSide, images: str | Path, out: str | Path, progress: Progress | None = None
) -> RunFolder:
    """Explain the predictions of images with the network and the methods of a run, in a new run folder."""
    folder, config = reference.data.folder, reference.data.manifest.config
    # Paths of a study are relative to its file, which lies beside the run of an audit.
    files = [folder.path.parent / "study.toml", *map(Path, folder.manifest.command)]
    studies = (file for file in files if file.suffix == ".toml" and file.is_file())
    base = next(studies, Path("study.toml")).resolve().parent
    guess = guess_source(images)
    name = reference.data.checkpoint
    file = next((c.file for c in find_checkpoints(study_from(config), base) if c.name == name), None)
    unset = dict.fromkeys(("device", "threads", "inputs_per_pass", "out", "expect_accuracy"))
    study = {
        **config, "metrics": [], "run": {**config["run"], **unset, "targets": "predicted", "tested": []},
        "images": {"kind": guess.kind, "path": str(guess.path.resolve()), "options": dict(guess.options)},
        "model": {**config["model"], "checkpoints": [str(file)] if file else [],
                  "random_init": name == RANDOM, "pretrained": name == PRETRAINED},
    }  # fmt: skip
    return run_study(ResolvedStudy(study_from(study), base), out, progress=progress).folder


def find_drift(
    reference: str | Path | RunFolder, live: str | Path | RunFolder, out: str | Path | None = None,
    splits: int = 1000, seed: int = 0, progress: Progress | None = None,
) -> Drift:  # fmt: skip
    """hp.drift, which has the arguments; progress: of a live run."""
    first = read_side(reference)
    if not isinstance(live, RunFolder) and not (run_in(split_names(str(live))[0]) / "run.json").exists():
        if out is None:
            raise InputError(
                f"{live} is no run folder; if it holds images, name a folder for their run with out"
            )
        live = live_run(first, live, out, progress)
    sides = first, read_side(live)
    method = _method(sides)
    known = first.data.evidence.items if first.data.evidence else ()
    items = [item for item in known if item.kind == "patch" and item.recurring and item.crops][:PATCHES]
    patches = [item.crops[0] for item in items]
    (before, lost), (after, also_lost) = (read_sample(side, method, patches) for side in sides)
    titles = [f"patch {k} of {first.data.class_name(item.label)}" for k, item in enumerate(items, 1)]
    result = compare_samples(before, after, method, first.data.classes, titles, splits, seed)
    hashes = [s.data.manifest.models.get(s.data.checkpoint) for s in sides]
    other = ["the runs have different weights"] if hashes[0] != hashes[1] else []
    runs = tuple(
        {"run": str(s.data.folder.path), "id": s.data.manifest.id, "model": s.data.model,
         "checkpoint": s.data.checkpoint, "units": len(s.data.folder.done())} for s in sides
    )  # fmt: skip
    result = replace(result, notes=(*result.notes, *lost, *also_lost, *other), runs=runs)
    target = sides[1].data.folder.path if out is None else Path(out)
    text = json.dumps(result.as_json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole({target / DRIFT_FILE: text.encode()})
    result.report(target / "drift.html")
    return result


class DriftMonitor:
    """Compares the last images of a service with a reference; thread-safe, with bounded memory.

    Args:
        reference: a run folder, optionally with a checkpoint and a method behind @; or its maps.
        model: the network, as for hp.explain; without it, `add` takes maps.
        size: number of images that are compared, the last ones.

    Example:
        >>> import torch
        >>> maps = [Maps("gradcam", torch.rand(90, 4, 4), (8, 8), torch.zeros(90).long()) for _ in range(2)]
        >>> monitor = DriftMonitor(maps[0])
        >>> monitor.add(maps[1])
        >>> monitor.seen, len(monitor.result().tests)
        (90, 6)
    """

    def __init__(
        self, reference: str | Path | RunFolder | Maps, model: Model | nn.Module | None = None,
        size: int = 1000,
    ) -> None:  # fmt: skip
        if size < MIN_N:
            raise InputError(f"size must be at least {MIN_N} images, got {size}")
        self._names: Mapping[int, str] = {}
        if isinstance(reference, Maps):
            self.method, self._reference = reference.method, describe(reference)
        else:
            side = read_side(reference)
            self.method = _method([side])
            self._names, (self._reference, _) = side.data.classes, read_sample(side, self.method)
        self._model = None if model is None else as_model(model)
        self._last = Sample(*(np.zeros((size, *field.shape[1:]), field.dtype) for field in self._reference))
        self.size, self.seen = size, 0
        self._pass, self._update = threading.Lock(), threading.Lock()

    def add(self, images: Images | Maps) -> None:
        """Explain the predictions of images and add them; maps are added as they are.

        Args:
            images: as for hp.explain, or maps of the reference's method that explain predictions.
        """
        if not isinstance(images, Maps):
            if self._model is None:
                raise InputError("a DriftMonitor without a model takes maps; name the model to add images")
            with self._pass:  # the hooks of one pass at a time
                images = explain(self._model, images, self.method)[self.method]
        new = describe(images)
        with self._update:
            at = (self.seen + np.arange(len(new.classes)))[-self.size :]
            for field, values in zip(self._last, new, strict=True):
                field[at % self.size] = values[-self.size :]
            self.seen += len(new.classes)

    def result(self, splits: int = 1000, seed: int = 0) -> Drift:
        """Compare the last images with the reference.

        Args:
            splits, seed: as for hp.drift.
        """
        with self._update:
            last = self._last.take(np.arange(min(self.seen, self.size)))
        return compare_samples(self._reference, last, self.method, self._names, (), splits, seed)


def _method(sides: Sequence[RunSide]) -> str:
    """The method that is named, or the first one whose maps all runs have; controls are not compared."""
    named = [side.method for side in sides if side.method]
    stored = [{m for c, m in s.data.folder.maps().contents() if c == s.data.checkpoint} for s in sides]
    shared = [m for m in named or sides[0].data.real if all(m in methods for methods in stored)]
    if not shared:
        raise InputError(
            f"{named[0] if named else 'no method'} has no maps in both runs; name another method"
        )
    return shared[0]
