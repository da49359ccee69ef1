"""What is measured on the trained networks of one seed, each in a folder that can be taken up again.

    run/       every light method on every code, for the regimes: structure (Table 2)
    subset/    those and the heavy ones on some codes: structure, insertion, deletion
    depth/     the deeper trainings (Table 5)            ablation/  lambda x alpha (Table 6)
    measured/  what the engine does not do: distorted codes (Table 3), occluded parts (Table 4), speed

The first four are ordinary runs, from study files beside them. In measured/ a unit is one regime, one method
and one distortion, so that a method that is added later costs only its own maps. Its rows:

    bl(rotation=0.25), fmr(...), tmr(...)    of a distorted code; bl(clean=0) of the same code as it is
    drop_finder, drop_timing                 fall of the class's logit without that part; no method
    ms                                       milliseconds to explain one picture, about no image

Time is that of hp.explain() for one method and one picture, with the model's passes: the median of 3 to 15
calls, after two to warm up. chakraborty2025cambench.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heatproof.explain.api import explain
from heatproof.images import open_source
from heatproof.images.codes import MANIFEST, QRSet
from heatproof.images.distort import DISTORTIONS, SEVERITIES, distort
from heatproof.metrics import part_occlusion, structure
from heatproof.metrics.kit import PerImage
from heatproof.models import Model
from heatproof.run.progress import Progress
from heatproof.run.study import Checkpoint, Opened, load_weights, open_study, weights_hash
from heatproof.store import Manifest, RunFolder
from heatproof.studies._qr_train import CLASSES, network_spec
from heatproof.studies.qr_settings import QrSettings
from heatproof.studies.skeleton import whole_run, write_study
from heatproof.train import REGIMES
from heatproof.types import Maps, Score, Unit

CODE = 1  # the class that is explained
STRUCTURE = ("structure", "structure_score(variant='mass')")
CURVES = ("insertion", "deletion")
CLEAN = "clean"
MASSES = ("bl", "fmr", "tmr")
PARTS = ("finder", "timing")
WARM_UP, FEWEST, MOST, SECONDS = 2, 3, 15, 1.0

Say = Callable[[str], object]


class RunPlan(NamedTuple):
    """One run of the engine: its folder's name, weights, methods, metrics and how many codes."""

    name: str
    weights: tuple[str, ...]
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    limit: int | None = None


def study_file(folder: Path, name: str) -> Path:
    return folder / ("study.toml" if name == "run" else f"{name}.toml")


def run_plan(
    settings: QrSettings, folder: Path, seed: int, plan: RunPlan, progress: Progress | None
) -> RunFolder:
    """One of the study's runs, to its end."""
    size = [settings.size, settings.size]
    pictures = os.path.relpath(settings.out / "data" / "test" / MANIFEST, folder)
    config: dict[str, Any] = {
        "methods": in_order(folder / plan.name, "methods", plan.methods),
        "metrics": list(plan.metrics),
        "run": {
            "seed": seed, "batch_size": settings.batch_size, "targets": "label", "device": settings.device,
            "threads": settings.threads,
        },
        "model": {
            "spec": network_spec(settings, folder, seed), "name": settings.model, "layer": settings.layer,
            "num_classes": len(CLASSES),
            "checkpoints": [f"weights/{name}.safetensors" for name in plan.weights],
        },
        "images": {"kind": "csv", "path": pictures, "classes": [str(CODE)], "limit": plan.limit},
        "preprocess": {"size": size, "resize": settings.size},
    }  # fmt: skip
    study = write_study(study_file(folder, plan.name), config)
    return whole_run(study, folder / plan.name, progress).folder


def in_order(run: Path, key: str, wanted: Sequence[str]) -> list[str]:
    """What is wanted, in the order of a run that was begun: it may grow at its end only."""
    begun = RunFolder.open(run).manifest.config[key] if (run / "run.json").exists() else []
    return [*begun, *(name for name in wanted if name not in begun)]


@dataclass(frozen=True)
class Bench:
    """Codes and networks on which robustness, causality and speed are measured."""

    settings: QrSettings
    folder: Path  # of the seed
    seed: int
    test: QRSet
    say: Say | None = None

    @cached_property
    def opened(self) -> Opened:
        opened = open_study(study_file(self.folder, "run"))
        opened.device = str(self.settings.device)
        return opened

    @cached_property
    def models(self) -> dict[str, Model]:
        """The networks of the three regimes, with their weights."""
        return {name: load_weights(self.opened, self._checkpoint(name)) for name in REGIMES}

    @cached_property
    def ids(self) -> list[str]:
        """The codes' names in the rows of every run."""
        manifest = self.settings.out / "data" / "test" / MANIFEST
        return [sample.id for sample in open_source("csv", manifest, classes=[str(CODE)]).samples]

    @cached_property
    def store(self) -> RunFolder:
        settings = self.settings
        config = {
            "methods": in_order(self.folder / "measured", "methods", settings.every_method),
            "heavy": in_order(self.folder / "measured", "heavy", settings.heavy),
            "robust": settings.robust, "causal": settings.causal, "severities": SEVERITIES,
            "distortions": list(DISTORTIONS), "layer": settings.layer,
        }  # fmt: skip
        hashes = {name: weights_hash(self._checkpoint(name), model) for name, model in self.models.items()}
        manifest = Manifest.collect(
            config, seed=self.seed, models=hashes, classes=CLASSES, device=str(settings.device)
        )
        return RunFolder.resume(self.folder / "measured", manifest, growing=("methods", "heavy"))

    def _checkpoint(self, name: str) -> Checkpoint:
        return Checkpoint(name, self.folder / "weights" / f"{name}.safetensors")

    def codes(self, count: int) -> QRSet:
        """The first codes of the test set."""
        return self.test.take(np.flatnonzero(self.test.labels == CODE)[:count])

    def measure(self) -> RunFolder:
        """Everything that is not measured yet."""
        with self.store.lock():
            self.robustness()
            self.causality()
            self.speed()
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
            rows: dict[str, list[Score]] = {}
            for level in levels:
                pictures, masks = codes.pictures, codes.masks
                if kind != CLEAN:
                    moved = distort(codes.pictures, kind, level, self.settings.seed, codes.masks)
                    pictures, masks = moved[0], moved[1] or {}
                for regime, units in left.items():
                    for method, maps in self.explained(regime, pictures, tuple(units)).items():
                        found = structure(maps, masks["finder"], masks["timing"], masks["box"])
                        rows.setdefault(units[method].hash, []).extend(
                            score
                            for mass in MASSES
                            for score in self.rows(regime, method, at(mass, kind, level), found, mass)
                        )
            for unit in (unit for units in left.values() for unit in units.values()):
                self.store.write_unit(unit, rows[unit.hash])
            self.tell(f"{len(codes.labels)} codes, {kind}: {', '.join(f'{level:g}' for level in levels)}")

    def causality(self) -> None:
        """How far the class's logit falls when a part is occluded."""
        codes = self.codes(self.settings.causal)
        masks = {part: codes.masks[part] for part in PARTS}
        names = tuple(f"drop_{part}" for part in PARTS)
        done = self.store.done()
        for regime, model in self.models.items():
            unit = Unit(regime, (0, len(codes.labels)), (), names, self.seed)
            if unit.hash in done:
                continue
            found = part_occlusion(
                model, ready(model, codes.pictures), masks, torch.full((len(codes.labels),), CODE)
            )
            rows = [row for name in names for row in self.rows(regime, "", name, found, name)]
            self.store.write_unit(unit, rows)
            self.tell(f"{len(codes.labels)} codes without their finder or timing patterns, {regime}")

    def speed(self) -> None:
        """Milliseconds per picture of every method by itself."""
        every = (*self.settings.every_method, *self.settings.heavy)
        code = self.codes(1).pictures
        for regime, units in self.left(("ms",), 1, every).items():
            for method, unit in units.items():
                value = milliseconds(lambda m=method, r=regime: self.explained(r, code, (m,)))  # type: ignore[misc]
                row = Score(self.settings.model, regime, "", None, CODE, method, "ms", value)
                self.store.write_unit(unit, [row])
            if units:
                self.tell(f"speed of {len(units)} methods, {regime}")

    def left(
        self, metrics: tuple[str, ...], count: int, methods: Sequence[str]
    ) -> dict[str, dict[str, Unit]]:
        """By regime and method: the units that are not done."""
        done = self.store.done()
        found: dict[str, dict[str, Unit]] = {}
        for regime in REGIMES:
            units = {m: Unit(regime, (0, count), (m,), metrics, self.seed) for m in methods}
            found[regime] = {method: unit for method, unit in units.items() if unit.hash not in done}
        return found

    def explained(self, regime: str, pictures: np.ndarray, methods: Sequence[str]) -> Mapping[str, Maps]:
        model = self.models[regime]
        if not methods:
            return {}
        layer = self.settings.layer
        return explain(model, ready(model, pictures), methods, CODE, layer, self.seed)

    def rows(self, regime: str, method: str, name: str, found: PerImage, key: str) -> Iterator[Score]:
        reasons = found.reasons(key)
        for image, value, reason in zip(self.ids, found[key].double().tolist(), reasons, strict=False):
            yield Score(self.settings.model, regime, image, CODE, CODE, method, name, value, reason)

    def tell(self, text: str) -> None:
        if self.say is not None:
            self.say(text)


def at(mass: str, kind: str, level: float) -> str:
    """
    >>> at("bl", "rotation", 0.25)
    'bl(rotation=0.25)'
    """
    return f"{mass}({kind}={level:g})"


def ready(model: Model, pictures: np.ndarray) -> Tensor:
    """Pictures "n H W 3" uint8 as the network takes them, on its device."""
    images = torch.from_numpy(np.ascontiguousarray(pictures)).to(model.device).permute(0, 3, 1, 2)
    return model.preprocess.normalise(images.float() / 255)


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
