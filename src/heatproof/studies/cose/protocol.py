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

The paper trains its networks with these transforms, so that answers stay under them; `heatproof study cscore
--transforms` does that for networks of ours, and the page says which networks it is true of.

Deviations: consistency and sensitivity both pool inputs and models; the paper's eq. 4 leaves models out of
consistency, which is shown beside. The stored maps have half precision, so an SSIM against a checkpoint may
be off by 1e-4. `require_correct` keeps only images that the final model gets right, as the authors' code
does. Methods that draw random numbers draw others for each side of a pair unless `same_seed` is set (the
authors repeat them for LIME and not for SmoothGrad).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.errors import InputError, ModelError, UnknownNameError
from heatproof.explain.api import explain, read_methods
from heatproof.images import Failure, batches
from heatproof.images.transforms import draw
from heatproof.metrics.checkpoint_pairs import checkpoint_pairs
from heatproof.metrics.similarity import REASONS
from heatproof.models import Model
from heatproof.models.load import best_device
from heatproof.registry import call_text, explainers, parse_call
from heatproof.run.config import study_from
from heatproof.run.process import fixed_threads
from heatproof.run.progress import Progress
from heatproof.run.score import RowMaker, labels_of
from heatproof.run.study import Opened, check_classes
from heatproof.run.weights import LIBRARIES_WITHOUT_WEIGHTS, weights_hash
from heatproof.show import eight_bit
from heatproof.store import Manifest, RunFolder
from heatproof.studies.cose.examples import example_pairs
from heatproof.studies.cose.found import Found, read_pairs
from heatproof.studies.cose.page import write_page
from heatproof.studies.cose.pairs import input_pairs
from heatproof.studies.cose.settings import CoseSettings
from heatproof.studies.skeleton import need_one_class, run_config, some
from heatproof.train.folder import trained_with_transforms
from heatproof.types import Batch, Maps, Score, Unit


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
    settings = as_the_authors(settings) if settings.paper else settings
    others = [read_pairs(RunFolder.open(path)) for path in settings.beside]
    opened = _open(settings)
    hashes, skipped = _usable(opened)
    for name, why in skipped.items():
        progress.say(f"checkpoint {name!r} is left out: {why}")
    final = _final(settings, hashes)
    need_one_class(opened.model(final), "COSE")
    check_classes(opened, opened.model(final))
    manifest = _manifest(settings, opened, hashes, final)
    folder = RunFolder.resume(settings.out, manifest, free=FREE)
    with folder.lock(), fixed_threads(settings.threads or torch.get_num_threads()):
        CoseWorker(settings, opened, folder, final, progress).run(hashes)
    found = read_pairs(folder, settings.require_correct)
    failed = tuple(Failure(row["image"], row["reason"]) for row in folder.scores().sql(FAILED))
    if found.images == 0:
        raise InputError(f"no image could be used: {failed[0].id}: {failed[0].reason}")
    shown = example_pairs(settings, opened, found, final)
    page = write_page(settings, found, others, failed, skipped, shown)
    return CoseResult(folder, page, found, failed, skipped)


# What may change without a word: no number depends on it, or hashes guard it.
FREE = (
    "images.path", "model.checkpoints", "batch_size", "name", "dataset", "pretraining", "trained_with",
)  # fmt: skip
FAILED = "select distinct image, reason from scores where metric = 'cose' order by image"


@dataclass(frozen=True)
class CoseWorker:
    """Computes the units that are not there yet."""

    settings: CoseSettings
    opened: Opened
    folder: RunFolder
    final: str
    progress: Progress

    def run(self, checkpoints: Iterable[str]) -> None:
        done = self.folder.done()
        # The final model first: the others are compared with its maps.
        order = [self.final, *(c for c in checkpoints if c != self.final)]
        units = [unit for checkpoint in order for unit in self.units(checkpoint)]
        waiting = [unit for unit in units if unit.hash not in done]
        images = sum(len(range(*unit.images)) for unit in waiting)
        self.folder.plan([unit.hash for unit in units], 0, order)  # 0: its rows are about pairs
        self.progress.start(images, len(units), len(units) - len(waiting))
        try:
            for unit in waiting:
                self.compute(unit)
                self.progress.advance(len(range(*unit.images)), 1)
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
        model, indices = self.opened.model(unit.checkpoint), range(*unit.images)
        (loaded,) = batches(self.opened.source, model.preprocess, len(indices), indices)
        maker = RowMaker(self.opened.model_name, unit.checkpoint)
        rows = [maker.row(f.id, None, None, "", "cose", math.nan, f.reason) for f in loaded.failures]
        maps: dict[str, Maps] = {}
        batch, is_final = loaded.batch, unit.checkpoint == self.final
        if batch.ids:
            pictures = eight_bit(model.preprocess.restore(batch.images.to(model.device)))
            # Why the others take the next seed is said in pairs.py.
            seed = self.settings.seed + (not is_final and not self.settings.same_seed)
            ready = model.preprocess.from_bytes(pictures)
            maps = explain(model, ready, unit.methods, seed=seed, ids=batch.ids, **self.passes)
            if unit.methods == method_groups(self.folder.manifest)[0]:
                rows += correct_rows(maker, batch, maps[unit.methods[0]].explained.tolist())
            for method, one in maps.items():
                empty = zip(batch.ids, one.degenerate.tolist(), strict=True)
                rows += [maker.row(name, None, None, method, "degenerate", float(was)) for name, was in empty]
            if is_final:
                rows += self.input_rows(maker, model, batch, pictures, maps)
            else:
                rows += self.model_rows(maker, batch, maps)
        self.folder.write_unit(unit, rows, maps if is_final else {})

    def input_rows(
        self, maker: RowMaker, model: Model, batch: Batch, pictures: Tensor, maps: Mapping[str, Maps]
    ) -> Iterator[Score]:
        """The final model's maps against those of transformed pictures."""
        told, labels = self.settings, labels_of(batch)
        drawn = draw(told.seed, batch.ids, told.draws, told.transforms)
        found = input_pairs(
            model, pictures, maps, drawn, seed=told.seed, same_seed=told.same_seed,
            similarity=told.similarity, **self.passes,
        )  # fmt: skip
        classes = found.predicted.tolist()
        for method, one in maps.items():
            values, whys, before = (
                c.tolist() for c in (found.ssim[method], found.why[method], one.explained)
            )
            for i, image in enumerate(batch.ids):
                for v, name in enumerate(drawn.names):
                    what = f"{_kind(classes[i][v] == before[i])}({name},{drawn.magnitudes[i, v]:+.4g})"
                    cell = method, what, values[i][v], REASONS[whys[i][v]]
                    yield maker.row(image, labels[i], classes[i][v], *cell)

    def model_rows(self, maker: RowMaker, batch: Batch, maps: Mapping[str, Maps]) -> Iterator[Score]:
        """An earlier checkpoint's maps against the final ones, which are stored."""
        store, labels = self.folder.maps(), labels_of(batch)
        for method, one in maps.items():
            final = store.read(self.final, method, batch.ids).to(one.values.device)
            pairs = checkpoint_pairs(one, final, self.settings.similarity)
            columns = (one.explained, pairs.ssim, pairs.same)
            listed = zip(batch.ids, labels, *(c.tolist() for c in columns), pairs.reasons(), strict=True)
            for image, label, explained, value, same, reason in listed:
                what = f"{_kind(same)}(checkpoint,{self.final})"
                yield maker.row(image, label, explained, method, what, value, reason)

    @property
    def passes(self) -> dict[str, Any]:
        return some(self.settings, "layer", "batch_size") | {"progress": self.progress.inputs}


def correct_rows(maker: RowMaker, batch: Batch, predicted: Sequence[int]) -> Iterator[Score]:
    for image, label, guess in zip(batch.ids, labels_of(batch), predicted, strict=True):
        known = label is not None
        value, reason = (float(label == guess), "") if known else (math.nan, "the images have no labels")
        yield maker.row(image, label, guess, "", "correct", value, reason)


def _kind(same: bool) -> str:
    return "cose_same" if same else "cose_changed"


def method_groups(manifest: Manifest) -> list[tuple[str, ...]]:
    """Methods that were asked for together, in the order in which the study grew."""
    groups: list[tuple[str, ...]] = []
    for config in [*(stage["config"] for stage in manifest.earlier), manifest.config]:
        seen = {method for group in groups for method in group}
        groups.append(tuple(method for method in config["methods"] if method not in seen))
    return [group for group in groups if group]


def as_the_authors(settings: CoseSettings) -> CoseSettings:
    """The settings of the authors' code where the paper's own methods leave a choice."""

    def method(text: str) -> str:
        name, options = parse_call(text)
        more = AUTHORS.get(explainers.get(name).name, {}) | options
        return call_text(name, more) if more else text

    return replace(settings, methods=tuple(map(method, settings.methods)), require_correct=True)


AUTHORS: dict[str, dict[str, Any]] = {
    "lime": {"segments": "quickshift", "form": "published", "samples": 1000},
    "smoothgrad": {"squared": True},
}


def _trained_with(settings: CoseSettings, opened: Opened) -> str:
    """What the user says, else what the training wrote beside its weights."""
    places = [c.file.parent for c in opened.checkpoints if c.file]
    found = trained_with_transforms(places[-1]) if places else None
    return settings.trained_with if found is None else "yes" if found else "no"


def _open(settings: CoseSettings) -> Opened:
    """Everything named in the settings, checked as far as that takes no weights."""
    read_methods(list(settings.methods))
    draw(settings.seed, [], settings.draws, settings.transforms)
    own_weights = settings.model.partition(":")[0] not in LIBRARIES_WITHOUT_WEIGHTS
    if not (settings.checkpoints or settings.pretrained or own_weights):
        raise InputError(f"{settings.model} has no trained weights; name checkpoints or set pretrained")
    names = {"class_names": list(settings.class_names)} if settings.class_names else {}
    model = some(settings, "pretrained", "num_classes", "layer", "name", "allow_pickle", "head") | {
        "spec": settings.model,
        "checkpoints": [str(path) for path in settings.checkpoints],
        "random_init": settings.random_init and bool(settings.checkpoints or settings.pretrained),
        "options": dict(settings.model_options),
    }
    images = some(settings, "kind", "limit", "seed") | {
        "path": str(settings.images),
        "options": {**settings.image_options, **names},
    }
    study = study_from(run_config(settings, settings.methods, (), model, images))
    opened = Opened(study, Path.cwd(), best_device(settings.device))
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
    config = some(settings, "draws", "same_seed", "unit_images", "batch_size", "layer") | {
        "protocol": "cose",
        "methods": list(settings.methods),
        "transforms": list(settings.transforms),
        "final": final,
        "name": opened.model_name,
        "dataset": settings.dataset or Path(settings.images).name,
        "family": family(opened.model(final).module),
        "pretraining": settings.pretraining,
        "trained_with": _trained_with(settings, opened),
        "model": {"spec": settings.model, "checkpoints": list(map(str, settings.checkpoints))},
        "images": {"kind": settings.kind, "path": str(settings.images), "limit": settings.limit},
    }
    if settings.similarity != "local5":  # older folders do not say it
        config["similarity"] = settings.similarity
    if settings.head is not None:
        config["head"] = settings.head
    return Manifest.collect(
        config, seed=settings.seed, models=hashes, data=opened.source.hash, device=opened.device
    )


def family(module: nn.Module) -> str:
    """transformer where something in the network attends, else CNN."""
    names = {type(part).__name__.lower() for part in module.modules()}
    return "transformer" if any("attention" in name for name in names) else "CNN"
