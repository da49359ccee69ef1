"""CAMBench-QR end to end: do maps land on the parts that make a code one, and stay off the rest?

    data      codes with exact masks and hard negatives, from the seed            OUT/data
    train     ZS, FT-Struct, FT-LeakMin; deeper ones; lambda x alpha              OUT/training, OUT/weights
    run       every light method on every code, for the regimes: structure        OUT/run       (Table 2)
              those and the heavy ones on some codes: insertion, deletion         OUT/subset
              the deeper trainings; lambda x alpha                                OUT/depth, OUT/ablation
    measure   distorted codes, occluded parts, milliseconds per picture           OUT/measured  (Tables 3, 4)
    report    Tables 2 to 6, Figures 4 and 5, answers to the paper's questions    OUT/summary.md

Several seeds repeat everything behind the data: the first lies in OUT itself, the others in OUT/seeds/1, ...
Everything can be left at any moment and taken up by the same call: the runs are ordinary ones, from study
files beside them, and in measured/ a unit is one regime, one method and one distortion, so that a method that
is added later costs only its own maps. Its rows:

    bl(rotation=0.25), fmr(...), tmr(...)    of a distorted code; bl(clean=0) of the same code as it is
    drop_finder, drop_timing                 fall of the class's logit without that part; no method
    scene_codes, edit_leaves(move), ...      several codes in one picture, edited finders (probes.py)
    ms                                       milliseconds to explain one picture, about no image

Time is that of hp.explain() for one method and one picture, with the model's passes: the median of 3 to 15
calls, after two to warm up. chakraborty2025cambench.

Deviations: where there are no ImageNet weights, the backbone learns a proxy task first (trainings.py), and
the page says so; masks are distorted with the picture; every number carries a 95 % interval; floors (random,
edges) stand beside the methods; times include the model's passes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from heatproof.explain.api import explain
from heatproof.images import open_source
from heatproof.images.codes import MANIFEST, QRSet
from heatproof.images.distort import DISTORTIONS, SEVERITIES, distort
from heatproof.metrics import part_occlusion, structure
from heatproof.metrics.kit import PerImage
from heatproof.models import Model
from heatproof.report.book import Book
from heatproof.run.process import fixed_threads, usual_threads
from heatproof.run.progress import Progress
from heatproof.run.study import load_weights, open_study
from heatproof.store import Manifest, RunFolder
from heatproof.studies.qr import page, trainings
from heatproof.studies.qr.probes import CODE, measure_edits, measure_scenes, ready
from heatproof.studies.qr.results import CLEAN, Results, at, read_columns
from heatproof.studies.qr.settings import QrSettings, check, remember
from heatproof.studies.skeleton import named_run, run_config, study_file
from heatproof.train import DEPTHS, REGIMES, ablation_grid
from heatproof.types import Maps, Score, Unit

STRUCTURE = ("structure", "structure_score(variant='mass')")
CURVES = ("insertion", "deletion")
MASSES = ("bl", "fmr", "tmr")
PARTS = ("finder", "timing")
WARM_UP, FEWEST, MOST, SECONDS = 2, 3, 15, 1.0


@dataclass(frozen=True)
class QrOutcome:
    """What a study left behind."""

    page: Path
    book: Book
    results: tuple[Results, ...]


def qr_study(
    settings: QrSettings, progress: Progress | None = None, training: trainings.Told | None = None
) -> QrOutcome:
    """Run the whole protocol, or go on with it; OUT/summary.md is its page."""
    settings, progress = check(settings), progress or Progress(quiet=True)
    trainings.check_network(settings)
    remember(settings)
    with fixed_threads(settings.threads or usual_threads()):
        sets = trainings.make_pictures(settings)
        results = [one_seed(settings, k, sets, progress, training) for k in range(settings.seeds)]
        book = Book(settings.out, f"Do maps of {settings.model} find the parts of a {settings.symbol} code?")
        page.write(book, results)
    return QrOutcome(book.write(), book, tuple(results))


def one_seed(
    settings: QrSettings, number: int, sets: trainings.Sets, progress: Progress, told: trainings.Told | None
) -> Results:
    """Trainings and measurements of one seed, counted from 0."""
    folder = settings.out / "seeds" / str(number) if number else settings.out
    seed = settings.seed + number
    trained = trainings.train_all(settings, folder, seed, sets, told)
    runs = {
        plan.name: read_columns(engine_run(settings, folder, seed, plan, progress))
        for plan in engine_runs(settings)
    }
    probe = Probe(settings, folder, seed, sets.test, progress)
    measured = probe.measure()
    runs["measured"] = read_columns(measured)
    machine = measured.manifest.machine
    device = machine["cpu"] if machine["device_name"] == "cpu" else machine["device_name"]
    boxes = probe.codes(settings.test).masks["box"].mean((1, 2)).tolist()
    return Results(settings, seed, trained, runs, device, dict(zip(probe.ids, boxes, strict=True)))


class EngineRun(NamedTuple):
    """One run of the engine: its folder's name, weights, methods, metrics and how many codes."""

    name: str
    weights: tuple[str, ...]
    methods: tuple[str, ...]
    metrics: tuple[str, ...] = STRUCTURE
    limit: int | None = None


def engine_runs(settings: QrSettings) -> Iterator[EngineRun]:
    """The engine's runs of one seed."""
    light = settings.every_method
    everywhere = (*STRUCTURE, *CURVES) if settings.curves == "all" else STRUCTURE
    yield EngineRun("run", REGIMES, light, everywhere)
    yield EngineRun("subset", REGIMES, (*light, *settings.heavy), (*STRUCTURE, *CURVES), settings.subset)
    if settings.depth_study:
        yield EngineRun("depth", tuple(map(trainings.depth_name, DEPTHS[2:])), settings.shown)
    if settings.ablation:
        cells = dict.fromkeys(trainings.cell_name(settings, *cell) for cell in ablation_grid())
        yield EngineRun("ablation", tuple(c for c in cells if c not in REGIMES), settings.shown)


def engine_run(
    settings: QrSettings, folder: Path, seed: int, run: EngineRun, progress: Progress
) -> RunFolder:
    """One of the study's runs, to its end."""
    pictures = os.path.relpath(settings.out / "data" / "test" / MANIFEST, folder)
    model = {
        "spec": trainings.network_spec(settings, folder, seed), "name": settings.model,
        "layer": settings.layer, "num_classes": len(trainings.CLASSES), "head": settings.head,
        "checkpoints": [f"weights/{name}.safetensors" for name in run.weights],
    }  # fmt: skip
    images = {"kind": "csv", "path": pictures, "classes": [str(CODE)], "limit": run.limit}
    config = run_config(
        replace(settings, seed=seed), in_order(folder / run.name, "methods", run.methods), run.metrics,
        model, images, preprocess={"size": [settings.size, settings.size], "resize": settings.size},
    )  # fmt: skip
    return named_run(folder, run.name, config, progress).folder


def in_order(run: Path, key: str, wanted: Sequence[str]) -> list[str]:
    """What is wanted, in the order of a run that was begun: it may grow at its end only."""
    begun = RunFolder.open(run).manifest.config[key] if (run / "run.json").exists() else []
    return [*begun, *(name for name in wanted if name not in begun)]


@dataclass(frozen=True)
class Probe:
    """Measures what the engine does not: robustness, causality and speed of the three regimes."""

    settings: QrSettings
    folder: Path  # of the seed
    seed: int
    test: QRSet
    progress: Progress

    @cached_property
    def models(self) -> dict[str, Model]:
        """The networks of the regimes, with their weights."""
        opened = open_study(study_file(self.folder))
        opened.device = str(self.settings.device)
        return {checkpoint.name: load_weights(opened, checkpoint) for checkpoint in opened.checkpoints}

    @cached_property
    def ids(self) -> list[str]:
        """The codes' names in the rows of every run."""
        manifest = self.settings.out / "data" / "test" / MANIFEST
        return [sample.id for sample in open_source("csv", manifest, classes=[str(CODE)]).samples]

    @cached_property
    def store(self) -> RunFolder:
        settings, folder = self.settings, self.folder / "measured"
        config = {
            "methods": in_order(folder, "methods", settings.every_method),
            "heavy": in_order(folder, "heavy", settings.heavy),
            "robust": settings.robust, "causal": settings.causal, "severities": SEVERITIES,
            "distortions": list(DISTORTIONS), "layer": settings.layer,
        }  # fmt: skip
        weights = RunFolder.open(self.folder / "run").manifest.models
        manifest = Manifest.collect(
            config, seed=self.seed, models=weights, classes=trainings.CLASSES, device=str(settings.device)
        )
        return RunFolder.resume(folder, manifest, growing=("methods", "heavy"))

    def codes(self, count: int) -> QRSet:
        """The first codes of the test set."""
        return self.test.take(np.flatnonzero(self.test.labels == CODE)[:count])

    def measure(self) -> RunFolder:
        """Everything that is not measured yet."""
        with self.store.lock():
            self.robustness()
            self.causality()
            if self.settings.scenes:
                measure_scenes(self, self.settings.scenes)
            if self.settings.edits:
                measure_edits(self, self.settings.edits)
            self.speed()
            self.store.plan(self.store.ledger.seals(), 0, REGIMES)  # all that was to be measured is there
        return self.store

    def robustness(self) -> None:
        """Mass on the parts of distorted codes, whose masks were distorted with them."""
        codes = self.codes(self.settings.robust)
        for kind in (CLEAN, *DISTORTIONS):
            levels = SEVERITIES[:1] if kind == CLEAN else SEVERITIES[1:]
            names = tuple(at(mass, kind, level) for level in levels for mass in MASSES)
            left = self.left(names, len(codes.labels), self.settings.every_method)
            if not any(left.values()):
                continue
            rows: dict[str, list[Score]] = defaultdict(list)
            for level in levels:
                pictures, masks = codes.pictures, codes.masks
                if kind != CLEAN:
                    moved = distort(codes.pictures, kind, level, self.settings.seed, codes.masks)
                    pictures, masks = moved[0], moved[1] or {}
                for regime, units in left.items():
                    for method, maps in self.explained(regime, pictures, tuple(units)).items():
                        found = structure(maps, masks["finder"], masks["timing"], masks["box"])
                        named = {mass: at(mass, kind, level) for mass in MASSES}
                        rows[units[method].hash] += self.rows(regime, method, found, named)
            for unit in (unit for units in left.values() for unit in units.values()):
                self.store.write_unit(unit, rows[unit.hash])
            severities = ", ".join(f"{level:g}" for level in levels)
            self.progress.say(f"{len(codes.labels)} codes, {kind}: {severities}")

    def causality(self) -> None:
        """How far the class's logit falls when a part is occluded."""
        codes, done = self.codes(self.settings.causal), self.store.done()
        count, names = len(codes.labels), tuple(f"drop_{part}" for part in PARTS)
        masks = {part: codes.masks[part] for part in PARTS}
        for regime in REGIMES:
            unit = Unit(regime, (0, count), (), names, self.seed)
            if unit.hash in done:
                continue
            model = self.models[regime]
            images = ready(model, codes.pictures)
            found = part_occlusion(masks, torch.full((count,), CODE), model=model, images=images)
            self.store.write_unit(unit, self.rows(regime, "", found))
            self.progress.say(f"{count} codes without their finder or timing patterns, {regime}")

    def speed(self) -> None:
        """Milliseconds per picture of every method by itself."""
        every = (*self.settings.every_method, *self.settings.heavy)
        code = self.codes(1).pictures
        for regime, units in self.left(("ms",), 1, every).items():
            for method, unit in units.items():
                value = milliseconds(partial(self.explained, regime, code, (method,)))
                row = Score(self.settings.model, regime, "", None, CODE, method, "ms", value)
                self.store.write_unit(unit, [row])
            if units:
                self.progress.say(f"speed of {len(units)} methods, {regime}")

    def left(
        self, metrics: tuple[str, ...], count: int, methods: Sequence[str]
    ) -> dict[str, dict[str, Unit]]:
        """By regime and method: the units that are not done."""
        done = self.store.done()
        every = {r: {m: Unit(r, (0, count), (m,), metrics, self.seed) for m in methods} for r in REGIMES}
        return {r: {m: unit for m, unit in of.items() if unit.hash not in done} for r, of in every.items()}

    def explained(self, regime: str, pictures: np.ndarray, methods: Sequence[str]) -> Mapping[str, Maps]:
        if not methods:
            return {}
        model = self.models[regime]
        return explain(model, ready(model, pictures), methods, CODE, self.settings.layer, self.seed)

    def rows(
        self, regime: str, method: str, found: PerImage, named: Mapping[str, str] | None = None,
        ids: Sequence[str] | None = None,
    ) -> list[Score]:  # fmt: skip
        """Of each number that was found, or of those that get names here."""
        return [
            Score(self.settings.model, regime, image, CODE, CODE, method, name, value, reason)
            for key, name in (named or {key: key for key in found}).items()
            for image, value, reason in zip(
                ids or self.ids, found[key].double().tolist(), found.reasons(key), strict=False
            )
        ]


def milliseconds(work: Callable[[], object]) -> float:
    """The median of a few calls that are warm; what a GPU was asked for is waited for."""

    def once() -> float:
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    first = [once() for _ in range(WARM_UP)]
    calls = min(MOST, max(FEWEST, int(SECONDS * 1e3 / max(first[-1], 1e-3))))
    return statistics.median(once() for _ in range(calls))
