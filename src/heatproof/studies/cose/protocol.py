"""COSE end to end: maps should stay if the prediction stays, and change if the prediction changes.

    inputs   each image under the final model, and its 48 transformed versions (images/transforms.py)
    models   each image under the untrained network and every training checkpoint, against the final model

Every input is explained for the class that its model predicts on it. Of a multi-label network, each label
that the final model predicts on an image is explained on all versions of it, under the id IMAGE#LABEL; a pair
keeps its prediction where the label is predicted again. daroya2023cose.

Rows (one per image, method and pair; `value` is the SSIM):

    metric                        checkpoint        explained
    cose_same(rotate,+45)         the final one     the class predicted on the transformed image
    cose_changed(brightness,-0.33)
    cose_same(checkpoint,final)   the earlier one   the class it predicts
    correct                       each              the class predicted on the image; value 1 or 0
    degenerate                    each              (value 1: the map is empty)
    cose                          the final one     (an image that cannot be used; NaN with the reason)

Consistency is `avg(value)` over 'cose_same%' without those of checkpoints (eq. 4), or with them (pooled);
sensitivity is `avg(1 - value)` over 'cose_changed%'. The final model's maps are stored, so that another
checkpoint costs only its own passes. A unit is one checkpoint, a few images and the methods that were
requested together.

Deviations: the stored maps have half precision, so an SSIM against a checkpoint may be off by 1e-4.
`require_correct` uses only images that the final model gets right, as the authors' code does. Originals are
explained with the study's seed and their variants with the next one, so that the noise of a random method
counts against it; `same_seed` repeats the numbers (the authors do so for LIME and not for SmoothGrad).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError, ModelError, UnknownNameError
from heatproof.explain.api import read_methods
from heatproof.images import Failure, batches
from heatproof.images.findings import entry_id, finding_name
from heatproof.images.loader import entries
from heatproof.images.transforms import TRANSFORMS, Drawn, draw
from heatproof.metrics.agreement import REASONS
from heatproof.metrics.stability import alike, checkpoint_pairs, comparable
from heatproof.models import Model
from heatproof.models.heads import Multilabel
from heatproof.models.load import best_device
from heatproof.models.model import Queue, all_logits
from heatproof.registry import call_text, explainers, parse_call
from heatproof.run.checks import check_classes
from heatproof.run.config import study_from
from heatproof.run.engine import UnitGroup, UnitRows, compute_units
from heatproof.run.progress import Progress
from heatproof.run.score import RowMaker, labels_of
from heatproof.run.study import LIBRARIES_WITHOUT_WEIGHTS, ResolvedStudy, weights_hash
from heatproof.run.worker import fixed_threads
from heatproof.show import eight_bit
from heatproof.store import Manifest, RunFolder
from heatproof.studies.common import Outcome, run_config, some
from heatproof.studies.cose.results import (
    CNN,
    TRANSFORMER,
    CoseResults,
    maps_of,
    read_pairs,
    write_results,
)
from heatproof.studies.settings import CoseSettings
from heatproof.train.loop import trained_with_transforms
from heatproof.types import Batch, Maps, Score, Unit

# Keys of the manifest that may change: no number depends on them, or hashes guard them.
FREE = (
    "images.path", "model.checkpoints", "batch_size", "name", "dataset", "pretraining", "trained_with",
)  # fmt: skip
FAILED = "select distinct image, reason from scores where metric = 'cose' order by image"
AUTHORS: dict[str, dict[str, Any]] = {  # options in the authors' code
    "lime": {"segments": "quickshift", "form": "published", "samples": 1000, "fill": "zero", "top": 10},
    "smoothgrad": {"squared": True},
    "integrated-gradients": {"steps": 25, "baseline": "zero", "rule": "trapezoid"},
}


@dataclass(frozen=True)
class CoseResult(Outcome):
    """The scores of a study and its files."""

    folder: RunFolder
    results: CoseResults
    failed: tuple[Failure, ...]  # images that could not be used
    skipped: Mapping[str, str]  # checkpoints that did not load, and why


def cose_study(settings: CoseSettings, progress: Progress | None = None) -> CoseResult:
    """Compute what is missing in the folder `out` and write its page."""
    progress = progress or Progress(quiet=True)
    settings = as_the_authors(settings) if settings.paper else settings
    settings = replace(settings, transforms=settings.transforms or tuple(TRANSFORMS))
    others = [read_pairs(RunFolder.open(path), settings.require_correct) for path in settings.beside]
    for other in others:
        if other.similarity != settings.similarity:
            way = f"{other.folder.path} compares maps by {other.similarity}"
            raise InputError(f"{way}, this study by {settings.similarity}; leave it out of beside")
    opened = _open(settings)
    hashes, skipped = _usable(opened)
    for name, why in skipped.items():
        progress.say(f"checkpoint {name!r} is left out: {why}")
    final = _final(settings, hashes)
    count = check_classes(opened, opened.model(final))
    if not opened.is_multilabel:
        opened.model(final).head.need_one_class("COSE")
    labels = [finding_name(opened.source.classes, k) for k in range(count)] if opened.is_multilabel else None
    folder = RunFolder.resume(settings.out, _manifest(settings, opened, hashes, final, labels), free=FREE)
    worker = CoseWorker(settings, opened, folder, final, progress)
    order = [final, *(c for c in hashes if c != final)]  # the others are compared with the final model's maps
    with fixed_threads(settings.threads or torch.get_num_threads()):
        compute_units(folder, [group for c in order for group in worker.groups(c)], order, progress)
    results = read_pairs(folder, settings.require_correct)
    failed = tuple(Failure(row["image"], row["reason"]) for row in folder.scores().sql(FAILED))
    if results.images == 0:
        raise InputError(f"no image could be used: {failed[0].id}: {failed[0].reason}")
    if not len(results.pairs):
        raise InputError(
            f"{final} predicts no label on any of the images; choose another checkpoint as final"
        )
    book = write_results(settings, opened, results, others, failed, skipped)
    return CoseResult(book, folder, results, failed, skipped)


@dataclass(frozen=True)
class CoseWorker:
    """Computes the rows of units."""

    settings: CoseSettings
    opened: ResolvedStudy
    folder: RunFolder
    final: str
    progress: Progress

    @property
    def method_groups(self) -> list[tuple[str, ...]]:
        """Methods that were requested together, in the order in which the study grew."""
        manifest, seen = self.folder.manifest, list[tuple[str, ...]]()
        for config in [*(stage["config"] for stage in manifest.earlier), manifest.config]:
            seen.append(tuple(m for m in config["methods"] if not any(m in group for group in seen)))
        return [group for group in seen if group]

    @property
    def passes(self) -> dict[str, Any]:
        more = {"progress": self.progress.inputs, "of_probability": self.settings.paper}
        return some(self.settings, "layer", "batch_size") | more

    def groups(self, checkpoint: str) -> Iterator[UnitGroup]:
        metrics = ("cose", f"draws={self.settings.draws}", f"final={self.final}")
        count, step = len(self.opened.source), self.settings.unit_images
        for methods in self.method_groups:
            for start in range(0, count, step):
                stop = min(start + step, count)
                unit = Unit(checkpoint, (start, stop), methods, metrics, self.settings.seed)
                yield UnitGroup([unit], self.compute, stop - start)

    def compute(self, units: Sequence[Unit]) -> Iterator[UnitRows]:
        for unit in units:
            model, indices = self.opened.model(unit.checkpoint), range(*unit.images)
            (loaded,) = batches(self.opened.source, model.preprocess, len(indices), indices)
            row = RowMaker(self.opened.model_name, unit.checkpoint).row
            rows = [row(f.id, None, None, "", "cose", math.nan, f.reason) for f in loaded.failures]
            maps: Mapping[str, Maps] = {}
            batch, is_final = loaded.batch, unit.checkpoint == self.final
            if batch.ids:
                images = eight_bit(model.preprocess.restore(batch.images.to(model.device)))
                seed = self.settings.seed + (not is_final and not self.settings.same_seed)
                logits = all_logits(model, model.preprocess.from_bytes(images))
                if unit.methods == self.method_groups[0]:
                    rows += correct_rows(model, row, batch, logits)
                targets = label_stays = None
                if isinstance(model.head, Multilabel):
                    positive = model.head.positive(logits)
                    labels = self.final_labels(batch, positive, unit)
                    batch, targets = entries(batch, labels, self.opened.source.classes)
                    chosen = labels.to(model.device)
                    images, label_stays = images[chosen.nonzero()[:, 0]], positive[chosen]
            if batch.ids:
                inputs = model.preprocess.from_bytes(images)
                maps = maps_of(model, inputs, unit.methods, targets, seed=seed, ids=batch.ids, **self.passes)
                for method, of in maps.items():
                    empty = zip(batch.ids, of.degenerate.tolist(), strict=True)
                    rows += [row(name, None, None, method, "degenerate", float(is_)) for name, is_ in empty]
                if is_final:
                    rows += self.input_rows(model, images, row, batch, maps)
                else:
                    rows += self.model_rows(row, batch, maps, label_stays)
            yield unit, rows, maps if is_final else {}

    def final_labels(self, batch: Batch, predicted: Tensor, unit: Unit) -> Tensor:
        """Bools "b k" on the CPU: labels that the final model predicts. predicted: by this checkpoint."""
        if unit.checkpoint == self.final:
            return predicted.cpu()
        names = [finding_name(self.opened.source.classes, k) for k in range(predicted.shape[1])]
        ids = [entry_id(image, name) for image in batch.ids for name in names]
        return torch.tensor(self.folder.maps().known(self.final, unit.methods[0], ids)).view_as(predicted)

    def input_rows(
        self, model: Model, images: Tensor, row: Any, batch: Batch, maps: Mapping[str, Maps]
    ) -> Iterator[Score]:
        """Compare the final model's maps with those of transformed images."""
        given, labels = self.settings, labels_of(batch)
        drawn = draw(given.seed, batch.ids, given.draws, given.transforms)
        pairs = input_pairs(
            model, images, maps, drawn, **some(given, "seed", "same_seed", "similarity"), **self.passes
        )
        classes, same = pairs.predicted.tolist(), pairs.same.tolist()
        for method in maps:
            values, whys = pairs.ssim[method].tolist(), pairs.why[method].tolist()
            for i, image in enumerate(batch.ids):
                for v, name in enumerate(drawn.names):
                    what = f"{_kind(same[i][v])}({name},{drawn.magnitudes[i, v]:+.4g})"
                    reason = REASONS[whys[i][v]]
                    yield row(image, labels[i], classes[i][v], method, what, values[i][v], reason)

    def model_rows(
        self, row: Any, batch: Batch, maps: Mapping[str, Maps], label_stays: Tensor | None
    ) -> Iterator[Score]:
        """Compare an earlier checkpoint's maps with the final model's stored ones."""
        for method, of in maps.items():
            final = self.folder.maps().read(self.final, method, batch.ids).to(of.values.device)
            pairs = checkpoint_pairs(of, final, self.settings.similarity)
            stayed = pairs.same if label_stays is None else label_stays
            columns = (column.tolist() for column in (of.explained, stayed, pairs.ssim))
            listed = zip(batch.ids, labels_of(batch), *columns, pairs.reasons(), strict=True)
            for image, label, explained, same, value, reason in listed:
                yield row(
                    image, label, explained, method, f"{_kind(same)}(checkpoint,{self.final})", value, reason
                )


def _kind(same: bool) -> str:
    return "cose_same" if same else "cose_changed"


def correct_rows(model: Model, row: Any, batch: Batch, logits: Tensor) -> Iterator[Score]:
    """Whether the label is predicted; of a multi-label network the share of labels that are right."""
    head, labels, values = model.head, labels_of(batch), [math.nan] * len(batch.ids)
    guesses = model.predicted(logits).tolist()
    if isinstance(head, Multilabel) and batch.findings is not None:
        right = head.positive(logits).cpu()[:, : batch.findings.shape[1]] == batch.findings.cpu()
        values = right.double().mean(1).tolist()
    elif batch.labels is not None:
        values = [float(label == guess) for label, guess in zip(labels, guesses, strict=True)]
    for image, label, guess, value in zip(batch.ids, labels, guesses, values, strict=True):
        reason = "the images have no labels" if math.isnan(value) else ""
        yield row(image, label, guess, "", "correct", value, reason)


class InputPairs(NamedTuple):
    """Images and their variants, "b v"."""

    ssim: Mapping[str, np.ndarray]  # by method; NaN where it is not defined
    why: Mapping[str, np.ndarray]  # by method: index into `similarity.REASONS`
    predicted: np.ndarray  # class of the variant, or the label that is explained
    same: np.ndarray  # bool


def input_pairs(
    model: Model, images: Tensor, reference: Mapping[str, Maps], drawn: Drawn, *, seed: int = 0,
    same_seed: bool = False, similarity: str = "local5", batch_size: int | None = None, **options: Any,
) -> InputPairs:  # fmt: skip
    """Compare the maps of transformed images with those of the images.

    Input j is variant j // b of image j % b. Variants are built batch by batch and go through one shared pass
    for all methods; only SSIMs and predictions stay, so memory does not grow with the variants.

    Args:
        images: "b c h w" uint8 on the model's device.
        reference: their maps by method, made with `seed`; of a multi-label network they name the labels.
        options: as for maps_of.
    """
    count, methods = len(images), list(reference)
    before = reference[methods[0]].explained.to(images.device)
    originals = {method: comparable(maps) for method, maps in reference.items()}
    table = torch.from_numpy(drawn.magnitudes.T.copy()).to(images.device)  # "v b"
    size = int(images.shape[-2]), int(images.shape[-1])
    results: list[dict[str, tuple[Tensor, ...]]] = []

    def work(start: int, stop: int) -> dict[str, tuple[Tensor, ...]]:
        numbers = torch.arange(start, stop, device=images.device)
        which = numbers % count
        magnitudes = table[numbers // count, which]
        inputs, pieces = images[which], []
        for run in drawn.runs():  # the transforms of this batch, and the rows that each makes
            low, high = max(start, run.first * count), min(stop, run.end * count)
            if low < high:
                part = slice(low - start, high - start)
                inputs[part] = run.transform.apply(inputs[part], magnitudes[part])
                pieces.append((run.transform, part, run.transform.valid(size, magnitudes[part])))
        ready, targets = model.preprocess.from_bytes(inputs), before[which]
        head = model.head
        maps = maps_of(
            model, ready, methods, targets if isinstance(head, Multilabel) else None,
            seed=seed + (not same_seed), batch_size=stop - start, **options,
        )  # fmt: skip
        explained = maps[methods[0]].explained
        same = explained == targets
        if isinstance(head, Multilabel):
            same = head.positive(all_logits(model, ready, stop - start)).gather(1, targets[:, None])[:, 0]
        result = {}
        for method, original in originals.items():
            heat = comparable(maps[method])
            compared = [
                alike(original[which[p]], t.inverse_maps(heat[p], magnitudes[p]), mask, similarity)
                for t, p, mask in pieces
            ]
            result[method] = *(torch.cat(column) for column in zip(*compared, strict=True)), explained, same
        return result

    Queue(model, size, batch_size).each(count * len(drawn.names), work, results.append)

    def column(method: str, k: int) -> np.ndarray:
        return torch.cat([result[method][k] for result in results]).view(-1, count).T.cpu().numpy()

    ssims, whys = ({method: column(method, k) for method in methods} for k in (0, 1))
    return InputPairs(ssims, whys, column(methods[0], 2), column(methods[0], 3))


def as_the_authors(settings: CoseSettings) -> CoseSettings:
    """Settings of the authors' code where the paper leaves them open or says otherwise.

    Integrated gradients start at zero in normalised space, as in the code; the text has a black image. Their
    25 points have equal weights; here the two ends have half of it. LIME's segments are those of the 8-bit
    image, theirs of the normalised one.
    """

    def method(text: str) -> str:
        name, options = parse_call(text)
        more = AUTHORS.get(explainers.get(name).name, {}) | options
        return call_text(name, more) if more else text

    return replace(settings, methods=tuple(map(method, settings.methods)), require_correct=True)


def _open(settings: CoseSettings) -> ResolvedStudy:
    """Validate the settings and list the images; no weights are read."""
    read_methods(list(settings.methods))
    draw(settings.seed, [], settings.draws, settings.transforms)
    own_weights = settings.model.partition(":")[0] not in LIBRARIES_WITHOUT_WEIGHTS
    if not (settings.checkpoints or settings.pretrained or own_weights):
        raise InputError(f"{settings.model} has no trained weights; name checkpoints or set pretrained")
    names = {key: list(of) for key, of in some(settings, "class_names", "label_columns").items() if of}
    model = some(settings, "pretrained", "num_classes", "layer", "name", "allow_pickle", "head") | {
        "spec": settings.model,
        "checkpoints": [str(path) for path in settings.checkpoints],
        "random_init": settings.random_init and bool(settings.checkpoints or settings.pretrained),
    }
    images = some(settings, "kind", "limit", "seed") | {"path": str(settings.images), "options": names}
    study = study_from(run_config(settings, settings.methods, (), model, images))
    opened = ResolvedStudy(study, Path.cwd(), best_device(settings.device))
    opened.source  # noqa: B018  (missing images are reported before weights are read)
    return opened


def _usable(opened: ResolvedStudy) -> tuple[dict[str, str], dict[str, str]]:
    """The hash of each checkpoint that loads, and the errors of the others."""
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


def _manifest(
    settings: CoseSettings, opened: ResolvedStudy, hashes: Mapping[str, str], final: str,
    labels: Sequence[str] | None,
) -> Manifest:  # fmt: skip
    files = [c.file.parent for c in opened.checkpoints if c.file]
    recorded = trained_with_transforms(files[-1]) if files else None  # by the training, beside its weights
    attends = any("attention" in type(part).__name__.lower() for part in opened.model(final).module.modules())
    config = some(settings, "draws", "same_seed", "unit_images", "batch_size", "layer", "pretraining") | {
        "protocol": "cose",
        "methods": list(settings.methods),
        "transforms": list(settings.transforms),
        "final": final,
        "name": opened.model_name,
        "dataset": settings.dataset or Path(settings.images).name,
        "family": TRANSFORMER if attends else CNN,
        "trained_with": settings.trained_with if recorded is None else "yes" if recorded else "no",
        "model": {"spec": settings.model, "checkpoints": list(map(str, settings.checkpoints))},
        "images": {"kind": settings.kind, "path": str(settings.images), "limit": settings.limit},
    }
    unusual = {  # absent from older folders
        "similarity": settings.similarity if settings.similarity != "local5" else None,
        "head": settings.head, "gradients": "of the probability" if settings.paper else None,
        "labels": labels,
    }  # fmt: skip
    config |= {key: value for key, value in unusual.items() if value is not None}
    return Manifest.collect(
        config, seed=settings.seed, models=hashes, data=opened.source.hash, device=opened.device
    )
