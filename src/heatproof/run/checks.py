"""Checks of a study before work starts, and the metrics that can be computed for it.

Each checkpoint is loaded once, and a blank image goes through the network, so that a weight file that does
not fit, a missing layer or a label without a class is reported immediately. Preprocessing that contradicts
the native size of the images or what the network declares, and classes in another order than the labels
suggest (metrics/classifier.py), are warnings. An accuracy far from the expected one is an error: outside the
99 % interval of the measured accuracy (Clopper-Pearson, up to 256 images) by more than 0.05.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import binomtest
from torch import nn

from heatproof.errors import HeatproofError, InputError
from heatproof.explain.api import check_insides, explain, read_methods
from heatproof.explain.providers import FromFile
from heatproof.explain.providers.files import Stored
from heatproof.images import Preprocess, Source, batches
from heatproof.images.files import Size, picture_size
from heatproof.images.source import check_annotations, draw
from heatproof.metrics.classifier import class_order
from heatproof.models.capture import refusal_in_a_sentence
from heatproof.models.dense_heads import Dense
from heatproof.models.heads import Head, Multilabel
from heatproof.models.layers import find_module
from heatproof.models.load import sized
from heatproof.models.model import Model, first_convolution
from heatproof.models.names import LITE, model_classes
from heatproof.models.running import function_in, has_gradients, is_function
from heatproof.registry import Metric, check_volumes, metrics
from heatproof.rows import PRETRAINED
from heatproof.run.config import MetricRequest, as_config, at, in_a_run, read_metrics
from heatproof.run.plan import code_hashes
from heatproof.run.study import (
    ALL_CLASSES_UP_TO,
    LABELS_UNUSED,
    Renamed,
    ResolvedStudy,
    listed_classes,
    weights_hash,
)  # fmt: skip
from heatproof.store.ledger import hash_of

PARTS_OF_A_CODE = ("finder", "timing", "box")
MOST, AT_ONCE = 256, 32  # images of the first pass
CONFIDENCE, MARGIN = 0.99, 0.05
HEADERS = 32  # files whose native size is read
POSITIONS = ("pos_embed", "pos_embedding", "position_embeddings", "positional_embedding")
PREFIX_TOKENS = (0, 1, 2, 4, 5)  # class, distillation and register tokens before those of the patches
REMEDY = "name what it was trained with: --size, --resize, --mean and --std, or [preprocess] in a study"


def check_study(opened: ResolvedStudy) -> dict[str, str]:
    """Raise InputError if the study cannot be run; return the hash of each checkpoint's weights."""
    study = opened.study
    with at("images"):
        source = opened.source
    check_truth(opened.metrics, source, study.run.targets)
    if any({"boxes", "masks"} & {*request.entry.needs} for request in opened.metrics):
        with at("images"):
            opened.warning = check_annotations(source)
    with at("model"):
        checkpoints = opened.checkpoints
        for checkpoint in checkpoints:
            model = opened.model(checkpoint.name)
            # Every checkpoint is loaded before work starts: a file that does not fit would else fail after
            # hours.
            opened.hashes[checkpoint.name] = weights_hash(checkpoint, model)
    compared = [request.text for request in opened.metrics if request.entry.compares_checkpoints]
    if len(checkpoints) < 2 and compared:
        raise InputError(
            f"metrics: {compared[0]} compares checkpoints, but there is one; add model.checkpoints"
        )
    with at("model.layer"):
        for layer in [study.model.layer] if isinstance(study.model.layer, str) else study.model.layer or []:
            find_module(model.module, layer)
    count = check_classes(opened, model)
    opened.preprocess = model.preprocess.description
    given = {name for name, value in as_config(study)["preprocess"].items() if value is not None}
    own = checkpoints[-1].name == PRETRAINED or (
        checkpoints[-1].file is None and study.model.spec.lower().startswith((*LITE, "hf:"))
    )
    opened.warnings = tuple(input_warnings(model, [s.content for s in source.samples], given, own))
    with at("metrics"):
        for request in opened.metrics if len(model.preprocess.size) > 2 else ():
            check_volumes(request.entry)
        for request in opened.metrics:
            if reason := lacks_for(request.entry, model):
                raise InputError(f"{request.text} {reason}; leave it out")
        check_head(opened.metrics, model.head)
    with at("methods"):
        _check_methods(opened, model)
    for request in opened.metrics:
        if request.every_class and count > ALL_CLASSES_UP_TO:
            raise InputError(
                f"metrics: {request.text} needs the probabilities of all classes, which a run keeps for up "
                f"to {ALL_CLASSES_UP_TO} classes; this model has {count}"
            )
    return opened.hashes


def check_classes(opened: ResolvedStudy, model: Model) -> int:
    """Number of the model's classes; labels that are used must be among them."""
    with at("model"):
        with refusal_in_a_sentence(model, model.preprocess.blank):
            count = max(2, model.logits(model.preprocess.blank).shape[1])
            # Two images of noise; blank ones would hide noise that a network multiplies with them.
            shape, generator = model.preprocess.blank.shape[1:], torch.Generator().manual_seed(0)
            model.check_repeatable(torch.randn(2, *shape, generator=generator))
        head = model.head
        opened.head_description, opened.is_multilabel = model.head_meaning, isinstance(head, Multilabel)
        opened.by_label = head.names_classes or isinstance(head, Dense)
        opened.predicts_classes = head.names_classes
    source = opened.source
    with at("images"):
        if source.is_multilabel and not opened.is_multilabel:
            raise InputError(
                f"the images are multi-label, but the network's output is read as {model.head_meaning}; set "
                "model.head = 'multilabel' if it has a sigmoid for each label, else give each image one label"
            )
        if opened.is_multilabel and source.labelled and not source.is_multilabel:
            raise InputError(
                f"the network is multi-label ({model.head_meaning}), but each image has one label; list "
                "what an image has: label_columns or multilabel = true for a CSV file, a table of 0 and 1 in "
                "memory or npz; or set model.head = 'softmax' if one class is right"
            )
    for request in opened.metrics if opened.is_multilabel else ():
        options: dict[str, Any] = dict(request.options)
        why = ""
        if request.entry.compares_checkpoints and "labels" not in request.entry.needs:
            why = "needs the predicted class, which a label without a prediction does not have; leave it out"
        elif options.get("anchor") and options.get("tau") == "adaptive":
            why = "cannot have both an anchor and an adaptive tau; leave one out"
        elif request.entry.name == "cscore" and opened.targets == "predicted" and "tau" in options:
            why = "needs maps of true labels for its tau; set run.targets = 'label', or leave tau out"
        if why:
            raise InputError(f"metrics: for multi-label images, {request.text} {why}")
    if not source.labelled or not opened.predicts_classes:
        return count
    readers = [r for r in opened.metrics if "labels" in r.entry.needs and (r.group or not r.entry.call)]
    unused = opened.targets != "label" and not readers
    vouched = "class_names" in opened.study.images.options and len(source.classes) == count
    with at("images"):
        if renamed := match_labels_to_model(source, model, count, vouched, unused):
            opened.renamed, opened._source = renamed, None
    return count


def check_truth(requests: Sequence[MetricRequest], source: Source, targets: str | None) -> None:
    """Raise InputError if a metric needs labels, boxes, masks or targets that these images do not have."""
    for request in requests:
        needs, where = request.entry.needs, f"metrics: {request.text} needs"
        if "labels" in needs and request.group and not source.labelled:
            raise InputError(f"{where} labels, but the images have none; leave it out or use labelled images")
        if "boxes" in needs and not (source.boxed or source.parts):
            raise InputError(f"{where} boxes or masks, but the images have none; leave it out")
        wanted = PARTS_OF_A_CODE if "masks" in needs and request.entry.bundle else ()
        if missing := [part for part in wanted if part not in source.parts]:
            raise InputError(
                f"{where} masks of finder, timing and box, but {missing[0]} is missing; leave it out"
            )
        if "masks" in needs and not source.parts:
            raise InputError(f"{where} masks, but the images have none; add a column mask_NAME for each part")
        by_label = (targets or ("label" if source.labelled else "")) == "label"
        if request.entry.compares_checkpoints and "labels" not in needs and by_label:
            raise InputError(f"{where} maps of the predicted class; set run.targets = 'predicted'")
        # From a half up, the label of an image of the gold list is predicted, so both maps are the same.
        tau = dict(request.options).get("tau", 0.5)
        below = tau == "adaptive" or (isinstance(tau, float | int) and tau < 0.5)
        if request.entry.name == "cscore" and targets == "predicted" and below:
            raise InputError(
                f"{where} maps of the true class; set run.targets = 'label', or a tau of 0.5 or more"
            )
    if targets == "label" and not source.labelled:
        raise InputError("run.targets is 'label', but the images have no labels; set it to 'predicted'")


def match_labels_to_model(
    source: Source, model: Model, count: int, vouched: bool, unused: bool
) -> Renamed | None:
    """Mapping from labels to the classes of a model that has `count`; None if they are the same.

    vouched: the study lists the model's classes. unused: nothing reads labels. Labels of other classes are
    then left out of the rows, since the network is neither right nor wrong about them.
    """
    if unused and source.is_multilabel:
        return None
    names, used = dict(enumerate(source.classes)), {c for s in source.samples for c in s.stated}
    try:
        outside = next(((s, c) for s in source.samples for c in s.stated if c >= count), None)
        if outside is not None:
            sample, label = outside
            raise InputError(
                f"{sample.id} has label {label} ({source.classes[label]}), but {model.name} has the classes "
                f"0 to {count - 1}; order them with images.options.class_names or set model.num_classes"
            )
        numbers = {} if vouched else model_classes(names, used, model.classes, count, model.name)
    except InputError:
        if unused:
            return LABELS_UNUSED
        raise
    moved = any(k != number for k, number in numbers.items())
    return (numbers, model.classes) if model.classes is not None and moved else None


def lacks_for(entry: Metric, model: Model) -> str:
    """Clause that names what a network without weights or gradients lacks for a metric; "" if nothing."""
    if is_function(model.module) and (entry.needs_weights or entry.needs_gradients):
        return f"needs the network's weights or gradients, and {model.name} is only a function"
    if entry.needs_gradients and not has_gradients(model.module):
        return f"needs the network's gradients, and {model.name} runs in ONNX Runtime, which has none"
    return ""


def check_head(requests: Sequence[MetricRequest], head: Head) -> None:
    """Raise InputError for metrics of probabilities or classes if the head has no classes."""
    for request in requests:
        if "probabilities" in request.entry.needs or request.entry.compares_checkpoints:
            head.need_classes(request.text)


def _check_methods(opened: ResolvedStudy, model: Model) -> None:
    """Raise InputError for files that are missing or do not fit, and methods that a function cannot run."""
    calls = read_methods(opened.study.methods)
    check_insides(model, calls)
    for call in calls:
        if len(model.preprocess.size) > 2:
            check_volumes(call.entry)
        if isinstance(call.entry, FromFile):
            with function_in(call.entry.path, call.entry.name.rpartition(":")[2]):
                continue
        if isinstance(call.entry, Stored):
            if opened.is_multilabel and opened.targets != "label":
                raise InputError(
                    f"{call.text} contains maps of known labels, not of a network's predictions; "
                    "set run.targets = 'label'"
                )
            call.entry.check(opened.map_names, model.preprocess.size)
    if picky := [call.text for call in calls if call.entry.architecture]:
        layer = opened.study.model.layer
        explain(model, model.preprocess.blank, picky, layer=layer, allow_nan=True)


def method_hashes(opened: ResolvedStudy) -> dict[str, str]:
    """Hashes of the files of methods that a study brings: maps, or code with everything it imports."""
    hashes = {}
    for call in read_methods(opened.study.methods):
        if isinstance(call.entry, Stored):
            hashes[call.text] = call.entry.hash(opened.map_names)
        elif isinstance(call.entry, FromFile):
            code = json.dumps(code_hashes(call.entry.name, opened.folder), sort_keys=True)
            hashes[call.text] = hash_of(code)[:16]
    return hashes


@dataclass(frozen=True)
class MetricAvailability:
    """Which metrics a run can compute for these images and this network, with reasons for the others."""

    opened: ResolvedStudy
    classes: int  # number of the network's classes
    labels: bool = True  # whether the classes of the images are the network's
    stored: bool = False  # whether the maps are read, so that no method can be run again

    def why_not(self, text: str) -> str:
        """Clause that explains why a metric, or a family, cannot be computed; "" if it can."""
        try:
            requests = read_metrics([text])
            if not self.labels and any("labels" in r.entry.needs and r.group for r in requests):
                return "the network has other classes than the images"
            check_truth(requests, self.opened.source, self.opened.targets)
        except HeatproofError as error:
            return _short(str(error))
        used = {label for sample in self.opened.source.samples for label in sample.stated}
        several = len(self.opened.checkpoints) > 1
        most = f"a run keeps the probabilities of {ALL_CLASSES_UP_TO} classes at most"
        for request in requests:
            entry = request.entry
            lacking = lacks_for(entry, self.opened.model(self.opened.checkpoints[-1].name))
            reasons = {
                "it runs the method again, which stored maps cannot be": self.stored and entry.reruns,
                f"it {lacking}": bool(lacking),
                "it compares checkpoints, and there is one": entry.compares_checkpoints and not several,
                "all images are of one class": entry.name == "auc" and len(used) == 1,
                most: request.every_class and self.classes > ALL_CLASSES_UP_TO,
            }
            if reason := next((reason for reason, holds in reasons.items() if holds), ""):
                return reason
        return ""

    def all(self) -> dict[str, str]:
        """All registered metrics that a run may name, each with the reason against it or ""."""
        names = [entry.name for entry in metrics.as_registered() if in_a_run(entry.name)]
        return {name: self.why_not(name) for name in names}


def _short(sentence: str) -> str:
    """The missing input, extracted from the error message.

    >>> _short("metrics: localise needs boxes or masks, but the images have none; leave it out")
    'it needs boxes or masks, but the images have none'
    """
    needed = sentence.partition(" needs ")[2].partition(";")[0]
    return f"it needs {needed}" if needed else sentence.partition(": ")[2] or sentence


class Answers(NamedTuple):
    """Labels and predictions of some images."""

    truth: np.ndarray  # "n k" bool
    probabilities: np.ndarray  # "n k"
    single: bool  # whether each image has one label

    @property
    def right(self) -> int:
        return int((self.truth.argmax(1) == self.probabilities.argmax(1)).sum())

    def order(self, classes: Sequence[str]) -> str:
        """Sentence about another order of the classes that explains the labels much better; "" if none."""
        k = self.probabilities.shape[1]
        predicted = np.eye(k)[self.probabilities.argmax(1)] if self.single else self.probabilities
        order = class_order(self.truth, predicted)
        return order.sentence(classes, k) if order else ""


def first_answers(opened: ResolvedStudy, most: int = MOST) -> Answers | None:
    """Predictions of the last checkpoint for a stratified sample of images; None without labels."""
    source, model = opened.source, opened.model(opened.checkpoints[-1].name)
    if not opened.predicts_classes or not any(sample.stated for sample in source.samples):
        return None
    labels = [next(iter(sample.stated), None) for sample in source.samples]
    places = draw(labels, min(most, len(source)), opened.study.run.seed)
    truth, answers = [], []
    for loaded in batches(source, model.preprocess, AT_ONCE, places, opened.study.run.workers):
        batch = loaded.batch
        if not batch.ids:
            continue
        chances = model.probabilities(model.logits(batch.images)).cpu().numpy()
        answers.append(chances)
        if batch.findings is not None:
            known = np.zeros(chances.shape, dtype=bool)
            known[:, : batch.findings.shape[1]] = batch.findings.cpu().numpy()
        elif batch.labels is not None and int(batch.labels.min()) >= 0:
            known = np.eye(chances.shape[1], dtype=bool)[batch.labels.cpu().numpy()]
        else:
            return None
        truth.append(known)
    if not answers or not np.isfinite(np.concatenate(answers)).all():
        return None
    single = not isinstance(model.head, Multilabel)
    return Answers(np.concatenate(truth), np.concatenate(answers), single)


def check_accuracy(opened: ResolvedStudy, expected: float | None) -> None:
    """Raise InputError if the accuracy of the last checkpoint is far from the expected one."""
    if expected is None:
        return
    answers = first_answers(opened)
    if answers is None or not answers.single:
        raise InputError(
            "expect_accuracy needs images with one label each, out of the network's classes; leave it out"
        )
    right, n, classes = answers.right, len(answers.truth), opened.source.classes
    # A wide interval and a margin: the check is for wrong preprocessing or class order, not for small
    # differences.
    low, high = binomtest(right, n).proportion_ci(CONFIDENCE)
    if low - MARGIN <= expected <= high + MARGIN:
        return
    model, order = opened.model(opened.checkpoints[-1].name), answers.order(classes)
    raise InputError(
        f"the network is right on {right} of {n} images ({right / n:.0%}, 99 % interval {low:.0%} to "
        f"{high:.0%}), but the expected accuracy is {expected:.0%}: check size and normalisation "
        f"({model.preprocess.description}) and the order of the classes "
        f"({listed_classes(classes)}){f'; {order}' if order else ''}"
    )


def input_warnings(model: Model, files: Iterable[object], given: Collection[str], own: bool) -> Iterator[str]:
    """Contradictions to the preprocessing, one sentence each.

    files: image files; others are ignored. given: parts of the preprocessing that the user set. own: whether
    the weights come with their preprocessing, as a library's pretrained ones do.
    """
    seen = model.preprocess
    if len(seen.size) != 2:
        return
    first = first_convolution(model.module)
    if first is not None and (channels := first.in_channels) != seen.channels:
        yield f"the first layer of {model.name} takes {channels} channels, but mean has {seen.channels}"
    if "size" not in given:
        shape = "x".join(map(str, seen.size))
        for source, size in _declared_sizes(model.module):
            if size != seen.size:
                declared = "x".join(map(str, size))
                yield f"{model.name} gets {shape} px, but {source} {declared} px: {REMEDY}"
        paths, sizes = [file for file in files if isinstance(file, Path)][:HEADERS], set[Size]()
        for path in paths:
            with suppress(InputError):  # DICOM files and broken ones
                sizes.add(picture_size(path))
        native = sizes.pop() if len(sizes) == 1 and len(paths) > 1 else None  # width and height, if all equal
        usual = sized(Preprocess(), model.module)
        is_default = not own and (seen.size, seen.resize) == (usual.size, usual.resize)
        if is_default and native and native[::-1] != seen.size and min(native) != seen.resize:
            yield (
                f"all images are {native[1]}x{native[0]} px, but the network gets {shape} px, the default: "
                f"if it was trained at another size, {REMEDY}"
            )
    config = _pretrained_config(model.module)
    for name in ("mean", "std"):
        declared_values = config.get(name)
        if name in given or own or not declared_values or len(declared_values) != seen.channels:
            continue
        if not np.allclose(declared_values, getattr(seen, name), atol=1e-3):
            values = ", ".join(f"{value:g}" for value in declared_values)
            yield f"pretrained_cfg of {model.name} has {name} {values}, but images get another one: {REMEDY}"


def _pretrained_config(module: nn.Module) -> dict[str, tuple[float, ...]]:
    """Attribute pretrained_cfg of a network of timm."""
    config = getattr(module, "pretrained_cfg", None)
    return config if isinstance(config, dict) else {}


def _declared_sizes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Height and width that the network declares, by the source of the declaration."""
    patches = first_convolution(module)
    for name, weight in module.named_parameters():
        if not name.removesuffix(".weight").endswith(POSITIONS) or patches is None:
            continue
        if patches.kernel_size != patches.stride or weight.ndim < 2:
            continue
        tokens = weight.shape[-2]
        counts = [tokens - more for more in PREFIX_TOKENS if tokens > more]
        side = next((math.isqrt(count) for count in counts if math.isqrt(count) ** 2 == count), 0)
        if side > 1:
            yield f"its {tokens} position embeddings fit", tuple(side * step for step in patches.stride)
        break
    declared = _pretrained_config(module).get("input_size", ())
    if len(declared) == 3 and sized(Preprocess(), module).size == Preprocess.size:  # no size of its own
        yield "its pretrained_cfg names", (int(declared[1]), int(declared[2]))
