"""A study opened: the pictures listed, the checkpoints found, every combination checked before work starts.

The network is built once, each checkpoint is loaded into it once, and one blank image goes through it, so
that a weight file that does not fit, a layer it lacks or a label it has no class for is said now, not hours
later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from heatproof.errors import CheckpointError, InputError
from heatproof.explain.api import explain, read_methods
from heatproof.images import Preprocess, Source
from heatproof.images.source import check_annotations
from heatproof.models import Model
from heatproof.models.capture import refusal_in_a_sentence
from heatproof.models.heads import Multilabel
from heatproof.models.layers import find_module
from heatproof.models.names import LITE
from heatproof.models.random_weights import keep_twin
from heatproof.run.config import Study, as_config, read_study, study_from
from heatproof.run.external_methods import lend_methods, map_names, refuse_methods, refuse_metrics
from heatproof.run.files import at, check_images, open_images
from heatproof.run.findings import check_findings, check_metrics, named_thresholds
from heatproof.run.inputs import input_warnings, listed_classes
from heatproof.run.labels import ASIDE, Renamed, match_labels_to_model, renumbered
from heatproof.run.metrics import MetricRequest, read_metrics, repetitions
from heatproof.run.provenance import Origin
from heatproof.run.values import explains_labels, refuse_for_head, told_head
from heatproof.run.weights import PRETRAINED, Checkpoint, build, find_checkpoints, weights_hash

ALL_CLASSES_UP_TO = 100  # of more classes, the probabilities of the true and the predicted one are kept
SETTLED = ("device", "threads", "precision", "inputs_per_pass")  # where a study leaves them open
PARTS_OF_A_CODE = ("finder", "timing", "box")
StudySource: TypeAlias = "str | Path | Mapping[str, Any] | ResolvedStudy"


@dataclass
class ResolvedStudy:
    """What every process of a run works with; it can be sent to another process before it is used there."""

    study: Study
    folder: Path  # what paths in the study are relative to
    device: str = "cpu"
    threads: int = 1
    precision: str | None = None
    inputs_per_pass: int | None = None
    hashes: dict[str, str] = field(default_factory=dict)  # of each checkpoint's weights, once checked
    head_description: str = ""  # how the network's output is read, once checked
    preprocess: str = ""  # what images go through, once checked
    warnings: tuple[str, ...] = ()  # what contradicts it
    is_multilabel: bool = False
    by_label: bool = True  # whether labels can be explained: not of values or similarities
    predicts_classes: bool = True  # which labels are compared with
    thresholds: float | list[float] | None = None  # and from which probability on each counts
    renamed: Renamed | None = None  # the pictures' classes as the model's
    origin: Origin | None = None  # of the pictures, once checked
    warning: str = ""  # about boxes and masks that do not fit their images, once checked
    network: Model | None = field(default=None, repr=False)  # instead of the one that the study names
    images: Source | None = field(default=None, repr=False)  # instead of those that the study names
    _source: Source | None = field(default=None, repr=False)
    _model: tuple[Any, Model] | None = field(
        default=None, repr=False
    )  # the last one, by what it was built from

    def __post_init__(self) -> None:
        lend_methods(self.study.methods, self.folder, lambda: map_names(self.source, self.is_multilabel))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None, "_model": None}

    @property
    def config(self) -> dict[str, Any]:
        """For the manifest: as written, with what was chosen or measured on this machine."""
        config = as_config(self.study)
        config["run"] |= {name: getattr(self, name) for name in SETTLED}
        if self.is_multilabel:  # also where the head was found by itself
            config["model"] |= {"head": Multilabel.name, "thresholds": self.thresholds}
        return config

    def extended(self, study: Study) -> ResolvedStudy:
        """Another study of the same folder, network and images; a loaded network is shared if it fits."""
        shared = ("device", "threads", "precision", "inputs_per_pass", "network", "images", "_model")
        return ResolvedStudy(study, self.folder, **{name: getattr(self, name) for name in shared})

    def set_inputs_per_pass(self, inputs_per_pass: int | None) -> None:
        """Set the number of inputs per pass, also of a network that is loaded."""
        self.inputs_per_pass = inputs_per_pass
        if self._model is not None:
            self._model[1].inputs_per_pass = inputs_per_pass

    @property
    def least_inputs(self) -> int:
        """Inputs that the run sends through the network at least, by the repetitions that options name."""
        calls = read_methods(self.study.methods)
        methods = sum(repetitions(call.entry.function, call.options) for call in calls)
        runs = [request for request in self.metrics if "model" in request.entry.needs]
        metrics = sum(repetitions(r.entry.function, dict(r.options)) * len(calls) for r in runs)
        return len(self.source) * len(self.checkpoints) * (methods + metrics)

    @property
    def source(self) -> Source:
        if self._source is None:
            source = self.images or open_images(self.study.images, self.folder)
            self._source = source if self.renamed is None else renumbered(source, *self.renamed)
        return self._source

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return find_checkpoints(self.study, self.folder)

    @property
    def metrics(self) -> list[MetricRequest]:
        return read_metrics(self.study.metrics)

    @property
    def targets(self) -> str:
        return self.study.run.targets or ("label" if self.source.labelled and self.by_label else "predicted")

    @property
    def model_name(self) -> str:
        return self.study.model.name or self.study.model.spec

    def describe(self) -> list[str]:
        """What the network gets and answers, a line each, for those who start a run."""
        lines = [f"the network's input: {self.preprocess}", f"the network's output: {self.head_description}"]
        if self.source.labelled and self.predicts_classes and self.renamed != ASIDE:
            lines.append(f"classes, in the order of its outputs: {listed_classes(self.source.classes)}")
        if self.renamed == ASIDE:
            lines.append(
                "labels are put aside: they are not the network's classes, so it is neither right nor wrong"
            )
        return [*lines, *(f"warning: {warning}" for warning in self.warnings)]

    def model(self, checkpoint: str) -> Model:
        """The network with these weights; the last one used is kept."""
        study = self.study
        key = checkpoint, self.device, self.precision, study.model, study.preprocess, study.run.seed
        if self._model is None or self._model[0] != key:
            self._model = None  # two networks need not be in memory
            wanted = next(c for c in self.checkpoints if c.name == checkpoint)
            model = load_weights(self, wanted)
            if self.hashes.get(checkpoint) not in (None, weights_hash(wanted, model)):
                changed = f"the weights of {checkpoint!r} changed while the run was going"
                raise CheckpointError(f"{changed}; keep them")
            keep_twin(model)
            self._model = key, model
        return self._model[1]


def open_study(
    given: StudySource, network: Model | None = None, images: Source | None = None
) -> ResolvedStudy:
    """Read a TOML file, or a dict of the same form, whose paths are relative to the working folder.

    Names of methods, metrics and sources are checked, nothing is loaded yet.

    Args:
        given: a file, a dict, or a resolved study, of which only the names are checked.
        network, images: used instead of those that the study names.
    """
    if isinstance(given, ResolvedStudy):
        opened, path = given, Path("study")
    else:
        study = study_from(given) if isinstance(given, Mapping) else read_study(given)
        path = Path("study") if isinstance(given, Mapping) else Path(given)
        opened = ResolvedStudy(study, path.resolve().parent, network=network, images=images)
    for key, check in (("methods", _check_methods), ("metrics", read_metrics), ("images", check_images)):
        if key != "images" or opened.images is None:
            with at(f"{path}: {key}"):
                check(getattr(opened.study, key))
    return opened


def check_study(opened: ResolvedStudy) -> dict[str, str]:
    """Refuse what cannot work; the hash of each checkpoint's weights."""
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
            opened.hashes[checkpoint.name] = weights_hash(checkpoint, model)
    if len(checkpoints) < 2 and (
        compared := [r.text for r in opened.metrics if r.entry.compares_checkpoints]
    ):
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
        refuse_metrics(opened.metrics, model)
        refuse_for_head(opened.metrics, model.head)
    with at("methods"):
        refuse_methods(study.methods, model, source, opened.is_multilabel, opened.targets)
        if picky := [call.text for call in read_methods(study.methods) if call.entry.architecture]:
            explain(model, model.preprocess.blank, picky, layer=study.model.layer, allow_nan=True)
    for request in opened.metrics:
        if request.every_class and count > ALL_CLASSES_UP_TO:
            raise InputError(
                f"metrics: {request.text} needs the probabilities of all classes, which a run keeps for up "
                f"to {ALL_CLASSES_UP_TO} classes; this model has {count}"
            )
    return opened.hashes


def check_classes(opened: ResolvedStudy, model: Model) -> int:
    """How many classes the model has; where labels are used, the pictures' classes must be among them."""
    with at("model"):
        with refusal_in_a_sentence(model, model.preprocess.blank):
            count = max(2, model.logits(model.preprocess.blank).shape[1])
            model.check_repeatable(_noise(model.preprocess))
        opened.head_description, opened.is_multilabel = (
            model.head_meaning,
            isinstance(model.head, Multilabel),
        )
        opened.by_label, opened.predicts_classes = explains_labels(model.head), model.head.names_classes
    source = opened.source
    with at("images"):
        check_findings(source, opened.is_multilabel, opened.head_description)
    if opened.is_multilabel:
        check_metrics(opened.metrics, opened.targets)
    if not source.labelled or not opened.predicts_classes:
        return count
    read = [r for r in opened.metrics if "labels" in r.entry.needs and (r.group or not r.entry.call)]
    unused = opened.targets != "label" and not read
    vouched = "class_names" in opened.study.images.options and len(source.classes) == count
    with at("images"):
        if renamed := match_labels_to_model(source, model, count, vouched, unused):
            opened.renamed, opened._source = renamed, None
    return count


def _noise(preprocess: Preprocess) -> Tensor:
    """Two model-ready images of noise: blank ones would hide noise that a network multiplies with."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, preprocess.channels, *preprocess.size, generator=generator)


def load_weights(opened: ResolvedStudy, checkpoint: Checkpoint) -> Model:
    """The study's network with one checkpoint's weights, device and preprocessing as the study says."""
    study = opened.study
    model = opened.network or build(study.model, opened.folder, checkpoint, study.run.seed)
    preprocess = model.preprocess.replaced(as_config(study)["preprocess"])
    model = replace(
        model, name=opened.model_name, preprocess=preprocess, precision=opened.precision,
        inputs_per_pass=opened.inputs_per_pass,
    )  # fmt: skip
    with at("model.head"):
        names = model.classes or opened.source.classes if study.model.thresholds is not None else ()
        opened.thresholds = named_thresholds(study.model.thresholds, names)
        if head := told_head(study.model, opened.thresholds, opened.folder):
            model = replace(model, head=head)
    try:
        model.module.to(opened.device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"cannot use run.device = {opened.device!r}: {why}") from error
    return model


def _check_methods(methods: list[str]) -> None:
    seen: dict[tuple[str, str], str] = {}
    for request in read_methods(methods):
        key = request.entry.name, repr(sorted(request.options.items()))
        if key in seen:
            raise InputError(f"{seen[key]!r} and {request.text!r} are the same method; leave one out")
        seen[key] = request.text
    if len(set(methods)) < len(methods):
        raise InputError("a method is named twice; leave one out")


def check_truth(requests: list[MetricRequest], source: Source, targets: str | None) -> None:
    """Every metric gets what it needs from these pictures."""
    for request in requests:
        needs, where = request.entry.needs, f"metrics: {request.text} needs"
        if "labels" in needs and request.group and not source.labelled:
            raise InputError(f"{where} labels, but the images have none; leave it out or use labelled images")
        if "boxes" in needs and not (source.boxed or source.parts):
            raise InputError(f"{where} boxes or masks, but the images have none; leave it out")
        if "masks" in needs and (missing := [p for p in PARTS_OF_A_CODE if p not in source.parts]):
            raise InputError(
                f"{where} masks of finder, timing and box, but {missing[0]} is missing; leave it out"
            )
        if (
            request.entry.compares_checkpoints
            and "labels" not in needs
            and (targets or ("label" if source.labelled else "")) == "label"
        ):
            raise InputError(f"{where} maps of the predicted class; set run.targets = 'predicted'")
        # From a half up, an image of the gold list is one whose label was predicted, so both maps are one.
        tau = dict(request.options).get("tau", 0.5)
        below = tau == "adaptive" or (isinstance(tau, float | int) and tau < 0.5)
        if request.entry.name == "cscore" and targets == "predicted" and below:
            raise InputError(
                f"{where} maps of the true class; set run.targets = 'label', or a tau of 0.5 or more"
            )
    if targets == "label" and not source.labelled:
        raise InputError("run.targets is 'label', but the images have no labels; set it to 'predicted'")
