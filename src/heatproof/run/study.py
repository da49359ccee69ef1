"""A resolved study: its images listed, its checkpoints found, its network loaded on demand.

A checkpoint is named after its file; its epoch is the last number in that name, and orders the checkpoints.
The checkpoint "random" is the network with the random weights of its builder. Whether a builder draws its
weights or brings trained ones (a file, a package, a factory's own download) is determined by building twice
from different seeds: equal weights were not drawn. Then all weights are drawn again, and none may stay equal.

Loading a network may run code that is neither heatproof nor an installed package: a file net.py:make and its
imports; with model.allow_pickle, what is pickled in checkpoints, a library's weights or a .keras file; with
model.options.trust_remote_code, the Python files beside the weights of a Hugging Face model.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from heatproof.errors import CheckpointError, InputError, ModelError, UnknownNameError
from heatproof.explain.api import read_methods
from heatproof.explain.providers import is_path, provided
from heatproof.images import Source
from heatproof.images.findings import THRESHOLD, entry_id, finding_name
from heatproof.models import Model, load_model
from heatproof.models.dense_heads import chosen_head
from heatproof.models.derived import reinitialise
from heatproof.models.heads import Multilabel
from heatproof.models.keras_graph import KerasClassifier
from heatproof.models.load import check_name
from heatproof.models.names import KERAS_FILES, placed_spec
from heatproof.registry import explainers, parse_call
from heatproof.rows import PRETRAINED, RANDOM, epoch_of
from heatproof.run.config import (
    MetricRequest,
    ModelTable,
    RunTable,
    Study,
    as_config,
    at,
    check_images,
    checkpoint_files,
    listed,
    open_images,
    read_metrics,
    read_study,
    study_from,
)  # fmt: skip
from heatproof.run.plan import Origin

OWN = "own"
LIBRARIES_WITHOUT_WEIGHTS = ("torchvision", "timm", "keras")
ALL_CLASSES_UP_TO = 100  # of more classes, the probabilities of the true and the predicted one are stored
RESOLVED = ("device", "threads", "precision", "inputs_per_pass")  # where a study leaves them open
CLASSES_LISTED = 20
Weights = list[tuple[str, Tensor]]
Renamed = tuple[dict[int, int], tuple[str, ...]]  # the model's number of each label, and the model's names
LABELS_UNUSED: Renamed = ({}, ())  # labels are not the network's classes, and nothing needs them
StudySource: TypeAlias = "str | Path | Mapping[str, Any] | ResolvedStudy"


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights: a file, or the builder's own."""

    name: str
    file: Path | None = None


def find_checkpoints(study: Study, folder: Path) -> list[Checkpoint]:
    """The untrained network first, then files in the order given, those of a pattern by epoch."""

    def by_epoch(path: Path) -> tuple[float, str]:
        epoch = epoch_of(path.stem)
        return math.inf if epoch is None else epoch, path.as_posix()

    table = study.model
    with at("model.checkpoints"):
        matches = [sorted(checkpoint_files(text, folder), key=by_epoch) for text in listed(table.checkpoints)]
    files = list(dict.fromkeys(file for some in matches for file in some))
    checkpoints = [Checkpoint(RANDOM)] * table.random_init + [Checkpoint(PRETRAINED)] * table.pretrained
    stems = [file.stem for file in files]
    for file in files:
        alone = stems.count(file.stem) == 1 and file.stem not in (RANDOM, PRETRAINED, OWN)
        relative = file.relative_to(folder) if file.is_relative_to(folder) else file
        checkpoints.append(Checkpoint(file.stem if alone else relative.as_posix(), file))
    if not checkpoints and table.spec.partition(":")[0] in LIBRARIES_WITHOUT_WEIGHTS:
        check_name(table.spec)
        raise InputError(
            "the model has no weights: set model.checkpoints, model.pretrained = true or "
            "model.random_init = true"
        )
    return checkpoints or [Checkpoint(OWN)]


def foreign_code(table: ModelTable, methods: Sequence[str] = ()) -> str:
    """Clause that names the code of this model and these methods that is run; '' if there is none.

    >>> foreign_code(ModelTable("net.py:make", checkpoints="best.pt", allow_pickle=True))
    'runs net.py and unpickles best.pt'
    """
    path = table.spec.rpartition(":")[0]
    files = [parse_call(text)[0].rpartition(":")[0] for text in methods]
    phrases = [f"runs {file}" for file in dict.fromkeys([path, *files]) if file.endswith(".py")]
    if table.allow_pickle:
        own = not path.endswith(".py") and (table.pretrained or table.spec.startswith("hf:"))
        pickled = ", ".join(map(str, listed(table.checkpoints)))
        phrases += [f"runs the code inside {table.spec}"] * table.spec.endswith(KERAS_FILES)
        phrases += [f"unpickles {what}" for what in (pickled, f"the weights of {table.spec}" * own) if what]
    phrases += [f"runs the code of {table.spec}"] * bool(table.options.get("trust_remote_code"))
    return " and ".join(phrases)


def _build(table: ModelTable, folder: Path, checkpoint: Checkpoint, seed: int) -> Model:
    """The network with one checkpoint's weights; random parts are the same each time."""
    for name in table.options:
        if name in inspect.signature(load_model).parameters:
            tables = {"model": ModelTable, "run": RunTable}
            places = [f"{key}.{name}" for key, kind in tables.items() if name in kind.__struct_fields__]
            remedy = f"write {places[0]} instead" if places else "leave it out"
            raise InputError(f"model.options.{name} is not an option of the network's builder; {remedy}")
    with seeded_builder(seed):
        return load_model(
            placed_spec(table.spec, folder), checkpoint.file, num_classes=table.num_classes,
            pretrained=checkpoint == Checkpoint(PRETRAINED), allow_pickle=table.allow_pickle,
            prefix=table.prefix, prompts=table.prompts or None, **table.options,
        )  # fmt: skip


def _untrained(table: ModelTable, folder: Path, seed: int) -> Model:
    model, other = (_build(table, folder, Checkpoint(RANDOM), seed + more) for more in (0, 1))
    brought = _weights(model)
    if not _equal(brought, _weights(other)):
        return model
    brought = [(name, weight.clone()) for name, weight in brought]
    for drawn in (seed, seed + 1):  # a factory may use the same seed itself
        if isinstance(model.module, KerasClassifier):
            with seeded_builder(drawn):
                model = replace(model, module=model.module.untrained())
        else:
            parts = model.module.named_modules()
            owners = [name for name, part in parts if next(part.parameters(False), None) is not None]
            reinitialise(model.module, owners, drawn)
        if not (equal := _equal(brought, _weights(model))):
            return model
    raise ModelError(f"{equal[0]} of {table.spec} cannot be drawn at random; leave out random_init")


def _weights(model: Model) -> Weights:
    """Parameters and running statistics, in order, since Keras renames each copy."""
    statistics = ("running_mean", "running_var")
    buffers = [(name, tensor) for name, tensor in model.module.named_buffers() if name.endswith(statistics)]
    return buffers + [(name, weight.detach()) for name, weight in model.module.named_parameters()]


def _equal(some: Weights, others: Weights) -> list[str]:
    """Names of weights that are equal in both, except for constant ones such as new biases."""
    pairs = zip(some, others, strict=False)
    return [n for (n, a), (_, b) in pairs if torch.equal(a, b) and not (a == a.flatten()[:1]).all()]


@contextmanager
def seeded_builder(seed: int) -> Iterator[None]:
    """Seed the generators that a builder uses (Keras: Python's), and restore them."""
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        torch.random.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before)


def weights_hash(checkpoint: Checkpoint, model: Model) -> str:
    digest = hashlib.sha256()
    if checkpoint.file is not None:
        with checkpoint.file.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    for name, tensor in sorted(model.module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass
class ResolvedStudy:
    """A study as every process of a run uses it; it can be pickled before its first use."""

    study: Study
    folder: Path  # that the study's paths are relative to
    device: str = "cpu"  # this and the next three: see engine.resolve_defaults
    threads: int = 1
    precision: str | None = None
    inputs_per_pass: int | None = None
    # From here to `warning`: known once checks.check_study or engine.prepare has run.
    hashes: dict[str, str] = field(default_factory=dict)  # of each checkpoint's weights
    head_description: str = ""  # how the network's output is read
    preprocess: str = ""  # what images go through
    warnings: tuple[str, ...] = ()  # what contradicts the preprocessing
    is_multilabel: bool = False
    by_label: bool = True  # whether labels can be explained, which values and similarities have none of
    predicts_classes: bool = True  # whether the network predicts classes, which labels are compared with
    thresholds: float | list[float] | None = None  # from which probability on each label counts
    renamed: Renamed | None = None  # the classes of the images as the model's
    origin: Origin | None = None  # identities of the images
    warning: str = ""  # about boxes and masks that do not fit their images
    network: Model | None = field(default=None, repr=False)  # used instead of the one that the study names
    images: Source | None = field(default=None, repr=False)  # the same
    _source: Source | None = field(default=None, repr=False)
    _model: tuple[Any, Model] | None = field(default=None, repr=False)  # the last one, by what made it

    def __post_init__(self) -> None:
        """Register FILE.py:FUNCTION and files:PATH of the study, which are relative to its folder."""
        for name in (parse_call(text)[0] for text in self.study.methods):
            if is_path(name):
                explainers.add_local(provided(name, self.folder, lambda: self.map_names))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None, "_model": None}

    @property
    def config(self) -> dict[str, Any]:
        """The config for the manifest: as written, with what was chosen or measured on this machine."""
        config = as_config(self.study)
        config["run"] |= {name: getattr(self, name) for name in RESOLVED}
        if self.is_multilabel:  # also where the head was found automatically
            config["model"] |= {"head": Multilabel.name, "thresholds": self.thresholds}
        return config

    def extended(self, study: Study) -> ResolvedStudy:
        """Another study of the same folder, network and images; a loaded network is shared if it fits."""
        shared = (*RESOLVED, "network", "images", "_model")
        return ResolvedStudy(study, self.folder, **{name: getattr(self, name) for name in shared})

    def set_inputs_per_pass(self, inputs_per_pass: int | None) -> None:
        """Set the number of inputs per pass, also of a network that is loaded."""
        self.inputs_per_pass = inputs_per_pass
        if self._model is not None:
            self._model[1].inputs_per_pass = inputs_per_pass

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

    @property
    def map_names(self) -> list[str]:
        """Ids of the maps of labels, in the source's order: of each image, or of each of its labels."""
        samples, classes = self.source.samples, self.source.classes
        if not self.is_multilabel:
            return [sample.id for sample in samples]
        return [entry_id(s.id, finding_name(classes, finding)) for s in samples for finding in s.stated]

    def describe(self) -> list[str]:
        """Input and output of the network, one line each."""
        lines = [f"the network's input: {self.preprocess}", f"the network's output: {self.head_description}"]
        if self.renamed == LABELS_UNUSED:
            lines.append("labels are not used, because they are not the network's classes")
        elif self.source.labelled and self.predicts_classes:
            lines.append(f"classes, in the order of its outputs: {listed_classes(self.source.classes)}")
        return [*lines, *(f"warning: {warning}" for warning in self.warnings)]

    def model(self, checkpoint: str) -> Model:
        """The network with the weights of a checkpoint; the last one stays loaded."""
        study = self.study
        key = checkpoint, self.device, self.precision, study.model, study.preprocess, study.run.seed
        if self._model is None or self._model[0] != key:
            self._model = None  # two networks need not be in memory
            wanted = next(c for c in self.checkpoints if c.name == checkpoint)
            model = self.loaded(wanted)
            if self.hashes.get(checkpoint) not in (None, weights_hash(wanted, model)):
                raise CheckpointError(f"the weights of {checkpoint!r} changed during the run; restore them")
            # Weights are constant within a run, so control maps of all batches can share the random networks.
            model.facts.keeps_twin = True
            self._model = key, model
        return self._model[1]

    def loaded(self, checkpoint: Checkpoint) -> Model:
        """The network with a checkpoint's weights, on the study's device, with its preprocessing and head."""
        study, table = self.study, self.study.model
        if self.network:
            model = self.network
        elif checkpoint == Checkpoint(RANDOM):
            model = _untrained(table, self.folder, study.run.seed)
        else:
            model = _build(table, self.folder, checkpoint, study.run.seed)
        preprocess = model.preprocess.replaced(as_config(study)["preprocess"])
        model = replace(
            model, name=self.model_name, preprocess=preprocess, precision=self.precision,
            inputs_per_pass=self.inputs_per_pass,
        )  # fmt: skip
        with at("model.head"):
            given = table.thresholds
            if isinstance(given, dict):  # by name; the others have the default
                names = model.classes or self.source.classes
                if unknown := [name for name in given if name not in names]:
                    raise UnknownNameError("label in model.thresholds:", unknown[0], names)
                given = [float(given.get(name, THRESHOLD)) for name in names]
            self.thresholds = given
            references = None if table.references is None else self.folder / table.references
            head = chosen_head(table.head, self.thresholds, tolerance=table.tolerance, references=references)
            if head:
                model = replace(model, head=head)
        try:
            model.module.to(self.device)
        except (RuntimeError, AssertionError) as error:
            why = str(error).splitlines()[0]
            raise InputError(f"cannot use run.device = {self.device!r}: {why}") from error
        return model


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


def _check_methods(methods: list[str]) -> None:
    seen: dict[tuple[str, str], str] = {}
    for request in read_methods(methods):
        key = request.entry.name, repr(sorted(request.options.items()))
        if key in seen:
            raise InputError(f"{seen[key]!r} and {request.text!r} are the same method; leave one out")
        seen[key] = request.text
    if len(set(methods)) < len(methods):
        raise InputError("a method is named twice; leave one out")


def renumbered(source: Source, numbers: dict[int, int], classes: tuple[str, ...]) -> Source:
    """The same images with the model's class numbers and names."""
    if source.is_multilabel:
        renamed = {source.classes[k]: classes[number] for k, number in numbers.items()}
        samples = []
        for s in source.samples:
            boxes = tuple(tuple(numbers[f] for f in of) for of in s.box_findings)
            masks = {renamed.get(part, part): mask for part, mask in s.masks.items()}
            findings = tuple(sorted(numbers[f] for f in s.stated))
            samples.append(replace(s, findings=findings, box_findings=boxes, masks=masks))
    else:
        samples = [s if s.label is None else replace(s, label=numbers.get(s.label)) for s in source.samples]
    return replace(source, samples=tuple(samples), classes=classes)


def listed_classes(names: Sequence[str]) -> str:
    """The first class names in a sentence.

    >>> listed_classes(["cat", "dog"])
    'cat, dog'
    """
    more = f" and {len(names) - CLASSES_LISTED} more" if len(names) > CLASSES_LISTED else ""
    return ", ".join(names[:CLASSES_LISTED]) + more
