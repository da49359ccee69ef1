"""CAMBench-QR end to end: mass of maps on the parts of a code and on the rest of the image.

    data      codes with exact masks and hard negatives, from the seed            OUT/data
    train     ZS, FT-Struct, FT-LeakMin; deeper ones; lambda x alpha              OUT/training, OUT/weights
    run       every light method on every code, for the regimes: structure        OUT/run       (Table 2)
              those and the heavy ones on some codes: insertion, deletion         OUT/subset
              the deeper trainings; lambda x alpha                                OUT/depth, OUT/ablation
    measure   distorted codes, occluded parts, scenes, edits, speed               OUT/measured  (Tables 3, 4)
    report    Tables 2 to 6, Figures 4 and 5, answers to the paper's questions    OUT/summary.md

Several seeds repeat everything behind the data: the first lies in OUT itself, the others in OUT/seeds/1, ...
A study that was stopped is resumed by the same call. In measured/ a unit is one regime, one method and one
distortion, so that a method that is added later costs only its own maps. Its rows:

    bl(rotation=0.25), fmr(...), tmr(...)    of a distorted code; bl(clean=0) of the same code as it is
    drop_finder, drop_timing                 fall of the class's logit without that part; no method
    scene_codes, scene_distractors           mass on all codes of a scene, and on what is none
    scene_found         share of the codes of which the best pixels (as many as codes have) mark half or more
    scene_weakest       mass of the code that gets least, against an even share
    edit_leaves(move)   mass where the finder was, before the edit less after it
    edit_arrives(move)  mass where the finder is now, after the edit less before it
    edit_drop(move)     fall of the class's logit; no method
    ms                  milliseconds of hp.explain() for one image, about no image: the median of the calls
                        of 0.2 seconds, after those that warm up

Deviations from chakraborty2025cambench: where there are no ImageNet weights, the backbone learns a proxy task
first (trainings.py), and the page says so; masks are distorted with the image; every number carries a 95 %
interval; floors (random, edges) stand beside the methods; times include the model's passes.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from heatproof.disk import write_whole
from heatproof.errors import InputError, StoreError
from heatproof.explain.api import explain, read_methods
from heatproof.images import codes as drawing
from heatproof.images import open_source
from heatproof.images.codes import EDITS, MANIFEST, Edited, QRSet, find_photos
from heatproof.images.distort import DISTORTIONS, SEVERITIES, distort
from heatproof.images.symbols import find_symbol
from heatproof.metrics import part_occlusion, structure
from heatproof.metrics.kit import CONSTANT, Cause, PerImage, pixel_maps
from heatproof.metrics.localisation import budget_masks
from heatproof.models import Model
from heatproof.models.load import best_device
from heatproof.models.model import all_logits
from heatproof.registry import explainers
from heatproof.run.engine import UnitGroup, UnitRows, compute_units
from heatproof.run.progress import Progress
from heatproof.run.score import RowMaker
from heatproof.run.study import open_study
from heatproof.run.worker import fixed_threads, usual_threads
from heatproof.store import Manifest, RunFolder, compare_configs
from heatproof.studies.common import Outcome, named_run, run_config, study_file
from heatproof.studies.qr import trainings
from heatproof.studies.qr.results import CLEAN, Results, at, read_columns, write_qr_page
from heatproof.studies.settings import QrSettings
from heatproof.train import DEPTHS, REGIMES, ablation_grid
from heatproof.types import Maps, Score, Unit, constant

SETTINGS = "settings.json"
# Settings that do not affect finished results.
MAY_CHANGE = ("out", "seeds", "depth_study", "ablation", "figures", "scenes", "edits", "curves", "beside")
SAME_CODES = ("symbol", "size", "test", "seed", "photos")  # settings that studies on one page share
MAY_GROW = ("methods", "heavy")
CODE = 1  # the class that is explained
STRUCTURE = ("structure", "structure_score(variant='mass')")
CURVES = ("insertion", "deletion")
MASSES = ("bl", "fmr", "tmr")
PARTS = ("finder", "timing")
SCENE = ("scene_codes", "scene_distractors", "scene_found", "scene_weakest")
MARKED = 0.5  # of a code's pixels among the best ones
CODES, DISTRACTORS = 2, 1
UNDONE = "the finder could not be edited so"
SECONDS = 0.2  # of timing
Scored = Iterable[tuple[str, PerImage]]  # method, and its scores under the names of the rows


@dataclass(frozen=True)
class QrOutcome(Outcome):
    """Results of a study."""

    results: tuple[Results, ...]  # of each seed


def qr_study(
    settings: QrSettings, progress: Progress | None = None, training: trainings.ProgressCallback | None = None
) -> QrOutcome:
    """Run or resume the whole protocol; OUT/summary.md is its page."""
    settings, progress = check(settings), progress or Progress(quiet=True)
    trainings.check_network(settings)
    remember(settings)
    with fixed_threads(settings.threads or usual_threads()):
        sets = trainings.make_pictures(settings)
        results = [seed_results(settings, k, sets, progress, training) for k in range(settings.seeds)]
        places = {os.path.relpath(folder, settings.out.parent): folder for folder in settings.beside}
        others = {f"{read_settings(folder)['model']} ({place})": folder for place, folder in places.items()}
        return QrOutcome(write_qr_page(settings.out, results, others), tuple(results))


def check(settings: QrSettings) -> QrSettings:
    """Validate the settings before any work starts, and set those that depend on others."""
    if settings.heavy == ("all",):
        named = {name.partition("(")[0] for name in settings.every_method}
        others = (entry.name for entry in explainers if not entry.architecture)  # those for any network
        settings = replace(settings, heavy=tuple(name for name in others if name not in named))
    methods = (*settings.methods, *settings.heavy)
    different = {(r.entry.name, repr(sorted(r.options.items()))) for r in read_methods(methods)}
    if len(different) < len(methods):
        raise InputError("a method is named twice among --methods and --heavy; leave one out")
    drawing.versions_that_fit(find_symbol(settings.symbol), None, (settings.size, settings.size))
    find_photos(settings.photos)
    for folder in settings.beside:
        theirs, ours = read_settings(folder), recorded(settings)
        if other := [name for name in SAME_CODES if theirs[name] != ours[name]]:
            raise InputError(
                f"{folder} has other codes ({other[0]} is {theirs[other[0]]}, not {ours[other[0]]}); "
                "run it again with the same settings, or leave it out of --beside"
            )
    counts = {
        name: min(getattr(settings, name), settings.test) for name in ("subset", "robust", "causal", "edits")
    }
    return replace(settings, device=best_device(settings.device), **counts)


def remember(settings: QrSettings) -> None:
    """Write the settings to OUT; raise StoreError if they contradict those of a started study."""
    now = recorded(settings)
    if (settings.out / SETTINGS).exists():
        before = read_settings(settings.out)
        changes = [c for c in compare_configs(before, now, MAY_GROW, MAY_CHANGE) if not c.addition]
        if changes:
            sentences = "; ".join(change.sentence for change in changes)
            raise StoreError(
                f"{settings.out} was begun otherwise: {sentences}; undo the change or choose another folder"
            )
    write_whole({settings.out / SETTINGS: json.dumps(now, indent=1) + "\n"})


def recorded(settings: QrSettings) -> dict[str, Any]:
    """The settings as settings.json holds them."""
    return dict(json.loads(json.dumps(asdict(settings), default=str)))


def read_settings(folder: Path) -> dict[str, Any]:
    """Settings of a started study; those that it did not record have their defaults."""
    try:
        return recorded(QrSettings()) | dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        path = folder / SETTINGS
        raise StoreError(f"cannot read {path} ({error}); restore it, or choose another folder") from error


def seed_results(
    settings: QrSettings, number: int, sets: tuple[QRSet, QRSet], progress: Progress,
    training: trainings.ProgressCallback | None,
) -> Results:  # fmt: skip
    """Trainings and measurements of one seed, counted from 0."""
    folder = settings.out / "seeds" / str(number) if number else settings.out
    seed = settings.seed + number
    trained = trainings.train_all(settings, folder, seed, sets, training)
    seeded = replace(settings, seed=seed)
    runs = {run[0]: read_columns(engine_run(seeded, folder, *run, progress)) for run in engine_runs(settings)}
    probe = Probe(settings, folder, seed, sets[1], progress)
    measured = probe.measure()
    runs["measured"] = read_columns(measured)
    machine = measured.manifest.machine
    device = machine["cpu"] if machine["device_name"] == "cpu" else machine["device_name"]
    boxes = probe.codes(settings.test).masks["box"].mean((1, 2)).tolist()
    return Results(settings, seed, trained, runs, device, dict(zip(probe.ids, boxes, strict=True)))


def engine_runs(settings: QrSettings) -> Iterator[tuple[str, Sequence[str], Sequence[str], Sequence[str]]]:
    """The engine's runs of one seed: folder, weights, methods and metrics."""
    light, both = settings.every_method, (*STRUCTURE, *CURVES)
    yield "run", REGIMES, light, both if settings.curves == "all" else STRUCTURE
    yield "subset", REGIMES, (*light, *settings.heavy), both
    if settings.depth_study:
        yield "depth", [trainings.depth_name(depth) for depth in DEPTHS[2:]], settings.detailed, STRUCTURE
    if settings.ablation:
        cells = dict.fromkeys(trainings.cell_name(settings, *cell) for cell in ablation_grid())
        yield "ablation", [cell for cell in cells if cell not in REGIMES], settings.detailed, STRUCTURE


def engine_run(
    settings: QrSettings, folder: Path, name: str, weights: Sequence[str], methods: Sequence[str],
    metrics: Sequence[str], progress: Progress,
) -> RunFolder:  # fmt: skip
    """Complete one of the study's runs; the seed of the settings is that of the folder."""
    model = {
        "spec": trainings.network_spec(settings, folder, settings.seed), "name": settings.model,
        "layer": settings.layer, "num_classes": len(trainings.CLASSES), "head": settings.head,
        "checkpoints": [f"weights/{name}.safetensors" for name in weights],
    }  # fmt: skip
    images = {
        "kind": "csv", "path": os.path.relpath(settings.out / "data" / "test" / MANIFEST, folder),
        "classes": [str(CODE)], "limit": settings.subset if name == "subset" else None,
    }  # fmt: skip
    config = run_config(
        settings, in_order(folder / name, "methods", methods), in_order(folder / name, "metrics", metrics),
        model, images, preprocess={"size": [settings.size, settings.size], "resize": settings.size},
    )  # fmt: skip
    return named_run(folder, name, config, progress).folder


def in_order(run: Path, key: str, wanted: Sequence[str]) -> list[str]:
    """The requested items in the order of a started run, which may only grow at its end."""
    begun = RunFolder.open(run).manifest.config[key] if (run / "run.json").exists() else []
    return [*begun, *(name for name in wanted if name not in begun)]


@dataclass(frozen=True)
class Probe:
    """Measure what the engine does not: robustness, causality and speed of the three regimes."""

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
        return {checkpoint.name: opened.loaded(checkpoint) for checkpoint in opened.checkpoints}

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
        """Measure everything that is missing."""
        parts = (self.robustness, self.causality, self.scenes, self.edits, self.speed)
        compute_units(self.store, [group for part in parts for group in part()], REGIMES, self.progress)
        return self.store

    def robustness(self) -> Iterator[UnitGroup]:
        """Mass on the parts of distorted codes, whose masks were distorted with them."""
        codes = self.codes(self.settings.robust)

        @lru_cache(len(SEVERITIES))  # shared by the regimes
        def distorted(kind: str, level: float) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
            if kind == CLEAN:
                return codes.pictures, codes.masks
            images, masks = distort(codes.pictures, kind, level, self.settings.seed, codes.masks)
            return images, masks or {}

        def score(kind: str, levels: Sequence[float], regime: str, methods: Sequence[str]) -> Scored:
            for level in levels:
                images, masks = distorted(kind, level)
                for method, maps in self.explained(regime, images, methods).items():
                    scores = structure(maps, masks["finder"], masks["timing"], masks["box"])
                    renamed = {at(mass, kind, level): scores[mass] for mass in MASSES}
                    yield method, PerImage(renamed, scores.causes)

        for kind in (CLEAN, *DISTORTIONS):
            levels = SEVERITIES[:1] if kind == CLEAN else SEVERITIES[1:]
            names = [at(mass, kind, level) for level in levels for mass in MASSES]
            title = f"{len(codes.labels)} codes, {kind}: {', '.join(f'{level:g}' for level in levels)}"
            yield self.group(names, len(codes.labels), partial(score, kind, levels), title)

    def causality(self) -> Iterator[UnitGroup]:
        """Decrease of the class's logit when a part is occluded."""
        codes = self.codes(self.settings.causal)

        def score(regime: str, _: Sequence[str]) -> Scored:
            model, masks = self.models[regime], {part: codes.masks[part] for part in PARTS}
            yield "", part_occlusion(masks, CODE, model=model, images=ready(model, codes.pictures))

        title = f"{len(codes.labels)} codes without their finder or timing patterns"
        yield self.group([f"drop_{part}" for part in PARTS], len(codes.labels), score, title, [""])

    def scenes(self) -> Iterator[UnitGroup]:
        """Every method on scenes with two codes and a distractor; nothing where they do not fit the image."""
        given, count = self.settings, self.settings.scenes
        if not count:
            return
        try:
            scenes = drawing.make_scenes(
                count, given.size, given.seed, symbol=given.symbol, codes=CODES, distractors=DISTRACTORS,
                photos=given.photos,
            )  # fmt: skip
        except InputError as error:
            self.progress.say(f"no scenes with several codes: {error}")
            return

        def score(regime: str, methods: Sequence[str]) -> Scored:
            for method, maps in self.explained(regime, scenes.pictures, methods).items():
                yield method, scene_scores(maps, scenes.codes, scenes.distractors)

        title = f"{count} scenes with {CODES} codes and {DISTRACTORS} distractor"
        yield self.group(SCENE, count, score, title, ids=[f"scene {i}" for i in range(count)])

    def edits(self) -> Iterator[UnitGroup]:
        """Every method on codes before and after one finder was removed, moved and swapped."""
        if not self.settings.edits:
            return
        codes, before = self.codes(self.settings.edits), dict[tuple[str, str], Maps]()

        def drop(kind: str, edited: Edited, regime: str, _: Sequence[str]) -> Scored:
            yield "", edit_drops(codes.pictures, edited, kind, self.models[regime])

        def score(kind: str, edited: Edited, regime: str, methods: Sequence[str]) -> Scored:
            if new := [method for method in methods if (regime, method) not in before]:
                made = self.explained(regime, codes.pictures, new)
                before.update({(regime, method): maps for method, maps in made.items()})
            for method, maps in self.explained(regime, edited.pictures, methods).items():
                yield method, edit_scores(before[regime, method], maps, edited, kind)

        for kind in EDITS:
            edited = drawing.edit_finders(codes, kind, self.settings.seed)
            if not edited.done.any():
                self.progress.say(f"no code has a finder that could be edited ({kind})")
                continue
            yield self.group(
                [f"edit_drop({kind})"], len(codes.labels), partial(drop, kind, edited), methods=[""]
            )
            names = [f"edit_{what}({kind})" for what in ("leaves", "arrives")]
            title = f"{int(edited.done.sum())} codes, one finder edited: {kind}"
            yield self.group(names, self.settings.edits, partial(score, kind, edited), title)

    def speed(self) -> Iterator[UnitGroup]:
        """Milliseconds per image of every method alone."""
        code = self.codes(1).pictures

        def score(regime: str, methods: Sequence[str]) -> Scored:
            for method in methods:
                value = milliseconds(partial(self.explained, regime, code, (method,)))
                yield method, PerImage({"ms": torch.tensor([value], dtype=torch.float64)})

        every = (*self.settings.every_method, *self.settings.heavy)
        yield self.group(["ms"], 1, score, f"speed of {len(every)} methods", every, [""])

    def group(
        self, names: Sequence[str], count: int, score: Callable[[str, Sequence[str]], Scored],
        title: str = "", methods: Sequence[str] | None = None, ids: Sequence[str] | None = None,
    ) -> UnitGroup:  # fmt: skip
        """A unit for each regime and method ("": of the network alone), whose rows are those of `score`."""

        def compute(units: Sequence[Unit]) -> Iterator[UnitRows]:
            for regime in REGIMES:
                mine = {"".join(unit.methods): unit for unit in units if unit.checkpoint == regime}
                maker, rows = RowMaker(self.settings.model, regime), defaultdict[str, list[Score]](list)
                for method, scores in score(regime, tuple(mine)) if mine else ():
                    for name, values in scores.items():
                        columns = ids or self.ids, values.double().tolist(), scores.reasons(name)
                        rows[method] += [
                            maker.row(image, CODE if image else None, CODE, method, name, *of)
                            for image, *of in zip(*columns, strict=False)
                        ]
                yield from ((unit, rows[method], {}) for method, unit in mine.items())

        pairs = product(REGIMES, self.settings.every_method if methods is None else methods)
        units = [Unit(r, (0, count), (m,) if m else (), tuple(names), self.seed) for r, m in pairs]
        return UnitGroup(units, compute, title=title)

    def explained(self, regime: str, images: np.ndarray, methods: Sequence[str]) -> Mapping[str, Maps]:
        model = self.models[regime]
        return explain(model, ready(model, images), methods, CODE, self.settings.layer, self.seed)


def ready(model: Model, images: np.ndarray) -> Tensor:
    """Images "n H W 3" uint8 as the network takes them, on its device."""
    pixels = torch.from_numpy(np.ascontiguousarray(images)).to(model.device)
    return model.preprocess.from_bytes(pixels.permute(0, 3, 1, 2))


def masses(maps: Maps, masks: Tensor) -> Tensor:
    """Tensor "n k": share of each map's positive mass on each of its k masks; NaN for an empty map."""
    heat = pixel_maps(maps).double()
    inside = (heat[:, None] * masks.to(heat.device)).sum((-2, -1))
    total = heat.sum((-2, -1))
    return inside / torch.where(total > 0, total, torch.nan)[:, None]


def scene_scores(maps: Maps, codes: np.ndarray, distractors: np.ndarray) -> PerImage:
    """Scores of one method's maps of scenes."""
    objects, others = torch.from_numpy(codes), torch.from_numpy(distractors)
    on_codes = masses(maps, objects)
    areas = objects.any(1).flatten(1).double().mean(1).tolist()
    best = torch.cat([budget_masks(maps.take([i]), area) for i, area in enumerate(areas)])
    marked = (best[:, None] & objects.to(best.device)).sum((-2, -1)) / objects.sum((-2, -1)).to(best.device)
    together = on_codes.sum(1)
    scores = {
        "scene_codes": together,
        "scene_distractors": masses(maps, others).sum(1) if others.shape[1] else torch.zeros_like(together),
        "scene_found": (marked >= MARKED).double().mean(1),
        "scene_weakest": on_codes.amin(1) * len(codes[0]) / torch.where(together > 0, together, torch.nan),
    }
    flat = constant(maps.values)
    off = Cause("the map has no mass on a code", (together == 0) & ~flat, ("scene_weakest",))
    return PerImage({name: value.float() for name, value in scores.items()}, [Cause(CONSTANT, flat), off])


def edit_scores(before: Maps, after: Maps, edited: Edited, kind: str) -> PerImage:
    """Share of a map's mass that moved with the finder."""
    old, new = (torch.from_numpy(mask)[:, None] for mask in (edited.before, edited.after))
    leaves = (masses(before, old) - masses(after, old))[:, 0]
    arrives = (masses(after, new) - masses(before, new))[:, 0]
    undone = Cause(UNDONE, torch.from_numpy(~edited.done).to(leaves.device))
    empty = Cause("one of the maps is empty", (leaves.isnan() | arrives.isnan()) & ~undone.where)
    removed = torch.full_like(undone.where, kind == "remove")
    nowhere = Cause("a removed finder has no new position", removed, (f"edit_arrives({kind})",))
    return PerImage(
        {f"edit_leaves({kind})": leaves.float(), f"edit_arrives({kind})": arrives.float()},
        [undone, empty, nowhere],
    )


def edit_drops(images: np.ndarray, edited: Edited, kind: str, model: Model) -> PerImage:
    """Fall of the class's logit through the edit."""
    before, after = (all_logits(model, ready(model, of))[:, CODE] for of in (images, edited.pictures))
    undone = torch.from_numpy(~edited.done).to(before.device)
    return PerImage({f"edit_drop({kind})": before - after}, [Cause(UNDONE, undone)])


def milliseconds(work: Callable[[], object]) -> float:
    """Median time of calls for 0.2 seconds, after warming up, with synchronisation of a GPU."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=SECONDS).median
