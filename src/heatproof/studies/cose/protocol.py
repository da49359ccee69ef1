"""COSE, end to end: does a map stay when the prediction stays, and change when the prediction changes?

    inputs   each image under the final model, and its 48 transformed selves (images/transforms.py)
    models   each image under the untrained network and every training checkpoint, against the final model

Every input is explained for the class that its model predicts on it. One forward and one partial backward
pass per batch of transformed inputs serves all CAMs together. daroya2023cose.

What is stored, and how to ask for it (one row per image, method and pair; `value` is the SSIM):

    metric                        checkpoint        explained
    cose_same(rotate,+45)         the final one     the class predicted on the transformed image
    cose_changed(brightness,-0.33)
    cose_same(checkpoint,final)   the earlier one   the class it predicts
    correct                       each              the class predicted on the image; value 1 or 0
    degenerate                    each              (value 1: the map is empty)
    cose                          the final one     (an image that cannot be used; NaN with the reason)

so consistency is `avg(value)` over 'cose_same%', and sensitivity `avg(1 - value)` over 'cose_changed%'. The
final model's maps are kept too, so that another checkpoint costs only its own passes. A unit is one
checkpoint, a few images and the methods that were asked for together: a killed study goes on with the next.

Deviations: consistency and sensitivity both pool inputs and models; the paper's eq. 4 leaves models out of
consistency, which is shown beside. The stored maps have half precision, so an SSIM against a checkpoint may
be off by 1e-4. `require_correct` keeps only images that the final model gets right, as the authors' code
does. Methods that draw random numbers draw others for each side of a pair unless `same_seed` is set (the
authors repeat them for LIME and not for SmoothGrad).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heatproof.errors import InputError, ModelError, UnknownNameError
from heatproof.explain.api import explain, read_methods
from heatproof.images import Failure, batches
from heatproof.images.transforms import draw
from heatproof.metrics.checkpoint_pairs import checkpoint_pairs
from heatproof.metrics.similarity import REASONS
from heatproof.models import Model
from heatproof.models.load import best_device
from heatproof.run.config import study_from
from heatproof.run.process import fixed_threads
from heatproof.run.progress import Progress
from heatproof.run.study import LIBRARIES_WITHOUT_WEIGHTS, Opened, check_classes, weights_hash
from heatproof.show import eight_bit
from heatproof.store import Manifest, RunFolder
from heatproof.studies.cose.found import Found, read_pairs
from heatproof.studies.cose.page import write_page
from heatproof.studies.cose.pairs import input_pairs, model_ready
from heatproof.studies.cose.settings import CoseSettings
from heatproof.types import Batch, Maps, Score, Unit

NAN = float("nan")


@dataclass(frozen=True)
class CoseResult:
    """What a study found and where it is."""

    folder: RunFolder
    page: Path
    found: Found
    failed: tuple[Failure, ...]  # images that could not be used
    skipped: Mapping[str, str]  # checkpoints that did not load, and why


def cose_study(settings: CoseSettings, progress: Progress | None = None) -> CoseResult:
    """Compute what is missing in the folder `out` and write its page."""
    progress = progress or Progress(quiet=True)
    others = [read_pairs(RunFolder.open(path)) for path in settings.beside]
    opened = _open(settings)
    hashes, skipped = _usable(opened)
    for name, why in skipped.items():
        progress.say(f"checkpoint {name!r} is left out: {why}")
    final = _final(settings, hashes)
    check_classes(opened, opened.model(final))
    manifest = _manifest(settings, opened, hashes, final)
    folder = RunFolder.resume(settings.out, manifest, free=FREE)
    with folder.lock(), fixed_threads(settings.threads or torch.get_num_threads()):
        _Worker(settings, opened, folder, final, progress).run(list(hashes))
    found = read_pairs(folder, settings.require_correct)
    failed = tuple(Failure(row["image"], row["reason"]) for row in folder.scores().sql(FAILED))
    if found.images == 0:
        raise InputError(f"no image could be used: {failed[0].id}: {failed[0].reason}")
    page = write_page(
        found, others, folder.path, failed=failed, skipped=skipped, draws=settings.draws,
        with_figures=settings.figures,
    )  # fmt: skip
    return CoseResult(folder, page, found, failed, skipped)


# What may change without a word: no number depends on it, or hashes guard it.
FREE = ("images.path", "model.checkpoints", "batch_size", "name", "dataset")
FAILED = "select distinct image, reason from scores where metric = 'cose' order by image"


class _Worker:
    """Computes the units that are not there yet."""

    def __init__(
        self, settings: CoseSettings, opened: Opened, folder: RunFolder, final: str, progress: Progress
    ) -> None:
        self.settings, self.opened, self.folder = settings, opened, folder
        self.final, self.progress = final, progress

    def run(self, checkpoints: list[str]) -> None:
        done = self.folder.done()
        # The final model first: the others are compared with its maps.
        order = [self.final, *(c for c in checkpoints if c != self.final)]
        units = [unit for checkpoint in order for unit in self.units(checkpoint)]
        waiting = [unit for unit in units if unit.hash not in done]
        images = sum(stop - start for start, stop in (unit.images for unit in waiting))
        self.progress.start(images, len(units), len(units) - len(waiting))
        try:
            for unit in waiting:
                self.compute(unit)
                self.progress.advance(unit.images[1] - unit.images[0], 1)
        finally:
            self.progress.finish()

    def units(self, checkpoint: str) -> Iterator[Unit]:
        metrics = ("cose", f"draws={self.settings.draws}", f"final={self.final}")
        count, step = len(self.opened.source), self.settings.unit_images
        for methods in method_groups(self.folder.manifest):
            for start in range(0, count, step):
                span = start, min(start + step, count)
                yield Unit(checkpoint, span, methods, metrics, self.settings.seed)

    def compute(self, unit: Unit) -> None:
        model = self.opened.model(unit.checkpoint)
        indices = range(*unit.images)
        (loaded,) = batches(self.opened.source, model.preprocess, len(indices), indices)
        rows = [_row(self, unit, f.id, "cose", NAN, f.reason) for f in loaded.failures]
        maps: dict[str, Maps] = {}
        if loaded.batch.ids:
            first = unit.methods == method_groups(self.folder.manifest)[0]
            more, maps = self.pairs(unit, model, loaded.batch, first)
            rows += more
        self.folder.write_unit(unit, rows, maps)

    def pairs(
        self, unit: Unit, model: Model, batch: Batch, first: bool
    ) -> tuple[list[Score], dict[str, Maps]]:
        is_final, options = unit.checkpoint == self.final, self.passes()
        pictures = eight_bit(model.preprocess.restore(batch.images.to(model.device)))
        # Why the others take the next seed is said in pairs.py.
        seed = self.settings.seed + (not is_final and not self.settings.same_seed)
        maps = explain(model, model_ready(model, pictures), unit.methods, seed=seed, ids=batch.ids, **options)
        predicted = maps[unit.methods[0]].explained
        rows = list(self.correct(unit, batch, predicted.tolist())) if first else []
        for method in unit.methods:
            for image, empty in zip(batch.ids, maps[method].degenerate.tolist(), strict=True):
                rows.append(_row(self, unit, image, "degenerate", float(empty), method=method))
        if not is_final:
            return rows + list(self.model_rows(unit, batch, maps)), {}
        settings = self.settings
        drawn = draw(settings.seed, batch.ids, settings.draws, settings.transforms)
        compared = input_pairs(
            model, pictures, maps, drawn, seed=settings.seed, same_seed=settings.same_seed, **options
        )
        classes, before = compared.predicted.tolist(), predicted.tolist()
        for method in unit.methods:
            values, whys = compared.ssim[method].tolist(), compared.why[method].tolist()
            for i, image in enumerate(batch.ids):
                for v, name in enumerate(drawn.names):
                    kind = "same" if classes[i][v] == before[i] else "changed"
                    what = f"cose_{kind}({name},{drawn.magnitudes[i, v]:+.4g})"
                    reason = REASONS[whys[i][v]]
                    label, explained = _label(batch, i), classes[i][v]
                    rows.append(_row(self, unit, image, what, values[i][v], reason, method, label, explained))
        return rows, maps

    def model_rows(self, unit: Unit, batch: Batch, maps: Mapping[str, Maps]) -> Iterator[Score]:
        store = self.folder.maps()
        for method in unit.methods:
            end = store.read(self.final, method, batch.ids).to(maps[method].values.device)
            both = {self.final: end, unit.checkpoint: maps[method]}
            predictions = {name: one.explained for name, one in both.items()}
            pairs = checkpoint_pairs(both, predictions, self.final)[unit.checkpoint]
            columns = (
                pairs.ssim.tolist(),
                pairs.same.tolist(),
                pairs.reasons(),
                maps[method].explained.tolist(),
            )
            for i, (value, same, reason, explained) in enumerate(zip(*columns, strict=True)):
                what = f"cose_{'same' if same else 'changed'}(checkpoint,{self.final})"
                yield _row(self, unit, batch.ids[i], what, value, reason, method, _label(batch, i), explained)

    def correct(self, unit: Unit, batch: Batch, predicted: list[int]) -> Iterator[Score]:
        for i, (image, explained) in enumerate(zip(batch.ids, predicted, strict=True)):
            label = _label(batch, i)
            value, reason = (
                (NAN, "the images have no labels") if label is None else (float(label == explained), "")
            )
            yield _row(self, unit, image, "correct", value, reason, "", label, explained)

    def passes(self) -> dict[str, Any]:
        layer, batch_size = self.settings.layer, self.settings.batch_size
        return {"layer": layer, "batch_size": batch_size, "progress": self.progress.inputs}


def method_groups(manifest: Manifest) -> list[tuple[str, ...]]:
    """Methods that were asked for together, in the order in which the study grew."""
    seen: list[str] = []
    groups = []
    for config in [*(stage["config"] for stage in manifest.earlier), manifest.config]:
        new = tuple(method for method in config["methods"] if method not in seen)
        if new:
            groups.append(new)
            seen += new
    return groups


def _open(settings: CoseSettings) -> Opened:
    """Everything named in the settings, checked as far as that takes no weights."""
    read_methods(list(settings.methods))
    draw(settings.seed, [], settings.draws, settings.transforms)
    own_weights = settings.model.partition(":")[0] not in LIBRARIES_WITHOUT_WEIGHTS
    if not (settings.checkpoints or settings.pretrained or own_weights):
        raise InputError(f"{settings.model} has no trained weights; name checkpoints or set pretrained")
    device = best_device(settings.device)
    names = {"class_names": list(settings.class_names)} if settings.class_names else {}
    study = study_from(
        {
            "methods": list(settings.methods),
            "run": {"seed": settings.seed, "device": device},
            "model": {
                "spec": settings.model,
                "checkpoints": [str(path) for path in settings.checkpoints],
                "random_init": settings.random_init and bool(settings.checkpoints or settings.pretrained),
                "pretrained": settings.pretrained,
                "num_classes": settings.num_classes,
                "layer": settings.layer,
                "name": settings.name,
                "allow_pickle": settings.allow_pickle,
                "options": dict(settings.model_options),
            },
            "images": {
                "kind": settings.kind,
                "path": str(settings.images),
                "limit": settings.limit,
                "seed": settings.seed,
                "options": {**settings.image_options, **names},
            },
        }
    )
    opened = Opened(study, Path.cwd(), device)
    opened.source  # noqa: B018  (images that are not there are said before weights are read)
    return opened


def _usable(opened: Opened) -> tuple[dict[str, str], dict[str, str]]:
    """The hash of each checkpoint that loads, and what is wrong with the others."""
    hashes, skipped = {}, {}
    for checkpoint in opened.checkpoints:
        try:
            hashes[checkpoint.name] = weights_hash(checkpoint, opened.model(checkpoint.name))
        except ModelError as error:
            skipped[checkpoint.name] = str(error)
    if not hashes:
        raise ModelError(f"no checkpoint loads: {next(iter(skipped.values()))}")
    opened.hashes.update(hashes)
    return hashes, skipped


def _final(settings: CoseSettings, hashes: Mapping[str, str]) -> str:
    if settings.final is None:
        return "pretrained" if "pretrained" in hashes else list(hashes)[-1]
    wanted = settings.final if settings.final in hashes else Path(settings.final).stem
    if wanted not in hashes:
        raise UnknownNameError("checkpoint that loads", settings.final, hashes)
    return wanted


def _manifest(settings: CoseSettings, opened: Opened, hashes: Mapping[str, str], final: str) -> Manifest:
    config = {
        "protocol": "cose",
        "methods": list(settings.methods),
        "transforms": list(settings.transforms),
        "draws": settings.draws,
        "same_seed": settings.same_seed,
        "final": final,
        "name": opened.model_name,
        "dataset": settings.dataset or Path(settings.images).name,
        "family": family(opened.model(final).module),
        "unit_images": settings.unit_images,
        "batch_size": settings.batch_size,
        "layer": settings.layer,
        "model": {"spec": settings.model, "checkpoints": list(map(str, settings.checkpoints))},
        "images": {"kind": settings.kind, "path": str(settings.images), "limit": settings.limit},
    }
    return Manifest.collect(
        config, seed=settings.seed, models=hashes, data=opened.source.hash, device=opened.device
    )


def family(module: nn.Module) -> str:
    """transformer where something in the network attends, else CNN."""
    names = {type(part).__name__.lower() for part in module.modules()}
    return "transformer" if any("attention" in name for name in names) else "CNN"


def _label(batch: Batch, i: int) -> int | None:
    return None if batch.labels is None else int(batch.labels[i])


def _row(
    worker: _Worker, unit: Unit, image: str, what: str, value: float, reason: str = "", method: str = "",
    label: int | None = None, explained: int | None = None,
) -> Score:  # fmt: skip
    name = worker.opened.model_name
    return Score(name, unit.checkpoint, image, label, explained, method, what, value, reason)
