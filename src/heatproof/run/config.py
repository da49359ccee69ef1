"""A study as it is written: one TOML file, read into typed structs, and the metrics that it names.

Paths are relative to the file. An unknown key or a wrong type is one sentence with the key's path. What is
wrong only in combination (a metric that needs boxes, a layer the model lacks) is checked by checks.py.
"""

from __future__ import annotations

import glob
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from heatproof.errors import HeatproofError, InputError, ModelError, UnknownNameError, did_you_mean
from heatproof.models.names import KERAS_FILES, PRECISIONS, placed_spec
from heatproof.registry import REPEATS, Metric, call_text, check_options, metrics, parse_call

if TYPE_CHECKING:
    from heatproof.images import Source

OFFERED = frozenset({"maps", "labels", "probabilities", "boxes", "masks", "model", "images"})
STORED = frozenset({"maps", "labels", "probabilities"})  # of all images of a checkpoint
RESERVED = ("progress", "batch_size", "layer", "boxes", "masks", "targets", "seed", "logits",
            "same_images", "changed_images", "then", "known")  # fmt: skip


@dataclass(frozen=True)
class MetricRequest:
    """A metric with its options; `text` is its name in rows and units."""

    text: str
    entry: Metric
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def group(self) -> bool:
        """Whether it is about all images of a checkpoint, or of its classes."""
        return self.entry.level != "image"

    @property
    def runs_network(self) -> bool:
        """Whether it is a checkpoint metric that runs the network on images it selects (ImagePool)."""
        return self.group and "model" in self.entry.needs and self.entry.call is not None

    @property
    def tests_maps(self) -> bool:
        """Whether it runs the network to test the maps of each image, which a decided method does without."""
        return not self.group and self.entry.question == "map" and "model" in self.entry.needs

    @property
    def inputs(self) -> int:
        """About how many inputs go through the network for each image and method."""
        if self.group or "model" not in self.entry.needs:
            return 0
        options = dict(self.entry.options) | dict(self.options)
        return self.entry.inputs(options) if self.entry.inputs else repetitions(self.entry.function, options)

    @property
    def every_class(self) -> bool:
        """Whether it reads the stored probabilities of all classes."""
        values = dict(self.options).values()
        reads = self.group and "probabilities" in self.entry.needs and not self.entry.own_class
        return reads or "adaptive" in values or "calibrated" in values

    @property
    def anchor(self) -> str:
        """The checkpoint whose predictions it also reads; "" if none."""
        return str(dict(self.options).get("anchor") or "")

    @property
    def per_method(self) -> bool:
        """Whether there is a value for each method rather than one for the classifier."""
        about_network = self.runs_network and self.entry.question == "network"
        return not self.group or (self.runs_network and not about_network) or "maps" in self.entry.needs

    def named(self, part: str) -> str:
        """The name of a further number of the same metric.

        >>> read_metrics(["randomisation(depths=3)"])[0].named("ssim")
        'randomisation_ssim(depths=3)'
        """
        return f"{self.entry.name}_{part}{self.text[len(self.entry.name) :]}"


def read_metrics(texts: Sequence[str]) -> list[MetricRequest]:
    """Requests in the order given, with families expanded and aliases replaced by registered names."""
    requests: dict[str, MetricRequest] = {}
    bundles: dict[str, list[Metric]] = {}  # in the order of their files
    for entry in metrics.as_registered() if texts else ():
        if entry.bundle:
            bundles.setdefault(entry.bundle, []).append(entry)
    for text in texts:
        name, options = parse_call(text)
        try:
            entries = bundles.get(name) or [metrics.get(name)]
        except UnknownNameError:
            raise UnknownNameError("metric", name, [*metrics.names(), *bundles]) from None
        for entry in entries:
            _refuse(entry, options)
            text = call_text(entry.name, options)
            if text in requests:
                raise InputError(f"metrics name {text} twice; leave one out")
            requests[text] = MetricRequest(text, entry, tuple(options.items()))
    return list(requests.values())


def in_a_run(name: str) -> bool:
    """Whether a study may name this metric without options."""
    try:
        return bool(read_metrics([name]))
    except InputError:
        return False


def _refuse(entry: Metric, options: dict[str, Any]) -> None:
    if reserved := [option for option in options if option in RESERVED]:
        raise InputError(f"{entry.name}: {reserved[0]} is set by the run itself; leave it out")
    check_options(entry, options)
    if not isinstance(options.get("anchor", ""), str):
        raise InputError(
            f"{entry.name}: anchor is the name of a checkpoint, or 'first'; got {options['anchor']!r}"
        )
    refusal = f"a run cannot compute {entry.name}"
    if entry.not_in_a_run:
        raise InputError(f"{refusal}: {entry.not_in_a_run}")
    if entry.compares_checkpoints:  # the run makes its pairs
        return
    if missing := sorted(set(entry.needs) - OFFERED):
        raise InputError(f"{refusal}, which needs {', '.join(missing)}; call hp.metrics for it")
    if MetricRequest(entry.name, entry).runs_network:
        return
    if entry.level != "image" and (missing := sorted(set(entry.needs) - STORED)):
        raise InputError(
            f"{refusal}: at level {entry.level!r} it has maps, labels and "
            f"probabilities, but no {', '.join(missing)}; register the metric with level='image'"
        )


def repetitions(function: Callable[..., Any], options: dict[str, Any]) -> int:
    """Number of passes that a method or metric repeats, from its options."""
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    counts = [(defaults | options).get(name) for name in REPEATS]
    return max([n for n in counts if isinstance(n, int)], default=1)


Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]


class RunTable(Struct, frozen=True, forbid_unknown_fields=True):
    """[run]: how to compute."""

    seed: int = 0
    batch_size: Count = 32  # images per unit
    targets: str | None = None  # the class to explain, "label" or "predicted"; default: the label, if any
    device: str | None = None  # default: a GPU if there is one; fixed for the run
    precision: str | None = None  # fp32, tf32 or bf16; default: torch's setting, fixed for the run
    threads: Count | None = None  # of torch; default: OMP_NUM_THREADS or one per CPU, fixed for the run
    workers: Annotated[int, Meta(ge=0)] | None = None  # threads that decode images; changes no number
    inputs_per_pass: Count | None = None  # default: usual, on a GPU as memory holds; fixed for the run
    out: str | None = None  # the run folder, if the command line names none
    expect_accuracy: Share | None = None  # stop before work starts if the measured accuracy is far off
    pictures: bool = True  # store a small copy of every image in the run folder, for the report
    both_classes: bool = False  # also store maps of the predicted class for wrong predictions, for the report
    # Steps of a sequential test: up to which number of images which methods are tested; default: all.
    tested: list[tuple[Annotated[int, Meta(ge=0)], list[str]]] = []


class ModelTable(Struct, frozen=True, forbid_unknown_fields=True):
    """[model]: the network and its weights."""

    spec: str
    checkpoints: str | list[str] = []  # files, or patterns such as "epochs/*.pt"
    random_init: bool = False  # also the untrained network, as checkpoint "random"
    pretrained: bool = False  # also the library's weights, as checkpoint "pretrained"
    num_classes: Count | None = None
    layer: str | list[str] | None = None
    name: str | None = None  # in the rows; default: the spec
    allow_pickle: bool = False
    prefix: str | None = None  # of the names of weights, for checkpoints of several networks
    head: str | None = None  # what its output is, such as "multilabel"; default: determined automatically
    # Of a multi-label network: one for all labels, or one each.
    thresholds: float | list[float] | dict[str, float] | None = None
    tolerance: float | None = None  # of a regression: change of a value that is still the same prediction
    references: str | None = None  # of an embedding: a .npy file of vectors to be similar to
    prompts: list[str] = []  # of an image-text model: its classes, "class: text" or a text
    options: dict[str, Any] = {}  # for the library's own builder


class ImagesTable(Struct, frozen=True, forbid_unknown_fields=True):
    """[images]: the images and their filters."""

    kind: str
    path: str
    limit: Count | None = None
    classes: list[str | int] | None = None
    single_object: bool = False
    box_share: tuple[Share, Share] | None = None
    stratified: bool = True
    growing: bool = False  # random order, so that a higher limit extends the run
    seed: int = 0
    options: dict[str, Any] = {}


class PreprocessTable(Struct, frozen=True, forbid_unknown_fields=True):
    """[preprocess]: replacements for parts of the model's own preprocessing."""

    size: Annotated[list[Count], Meta(min_length=2, max_length=3)] | None = None  # volumes: depth first
    resize: int | list[int] | None = None  # not Count | tuple[Count, Count]: msgspec 0.22 crashes on that
    mean: list[float] | None = None
    std: list[float] | None = None
    interpolation: str | None = None
    window: str | list[float] | None = None  # centre and width, or "range"
    spacing: list[float] | None = None  # of volumes, instead of resize: millimetres along each axis of size


class Study(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of a run."""

    model: ModelTable
    images: ImagesTable
    methods: Annotated[list[str], Meta(min_length=1)]
    metrics: list[str] = []
    run: RunTable = RunTable()
    preprocess: PreprocessTable = PreprocessTable()


TABLES: dict[str, type[Struct]] = {
    "run": RunTable, "model": ModelTable, "images": ImagesTable, "preprocess": PreprocessTable,
}  # fmt: skip
CHOICES = {
    "run.targets": ("label", "predicted"),
    "run.precision": PRECISIONS,
    "preprocess.interpolation": ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"),
}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML: {error}") from error


def read_study(path: str | Path) -> Study:
    """Read a study from a TOML file."""
    content = read_toml(Path(path))
    try:
        return study_from(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def study_from(content: Mapping[str, Any]) -> Study:
    """Read a study from a dict of the same form."""
    for name in TABLES:
        if not isinstance(content.get(name, {}), Mapping):
            raise InputError(f"{name} must be a table: write [{name}] and its keys below")
    try:
        study = msgspec.convert(dict(content), Study)
    except msgspec.ValidationError as error:
        raise InputError(_plain(str(error))) from error
    for path, known in CHOICES.items():
        table, _, key = path.partition(".")
        value = getattr(getattr(study, table), key)
        if value is not None and value not in known:
            raise InputError(f"{path} cannot be {value!r}; {did_you_mean(value, known)}")
    for method in (method for _, methods in study.run.tested for method in methods):
        if method not in study.methods:
            raise InputError(
                f"run.tested names {method!r}, which is not in methods; {did_you_mean(method, study.methods)}"
            )
    return study


def as_config(study: Study) -> dict[str, Any]:
    """Convert a study to plain dicts and lists, with all defaults, for the manifest."""
    config: dict[str, Any] = msgspec.to_builtins(study)
    return config


def toml(config: Mapping[str, Any]) -> str:
    """A config of plain values and tables as TOML; JSON writes strings, numbers and lists the same way.

    >>> print(toml({"methods": ["gradcam"], "run": {"seed": 0}}), end="")
    methods = ["gradcam"]
    <BLANKLINE>
    [run]
    seed = 0
    """

    def lines(table: Mapping[str, Any], prefix: str = "") -> list[str]:
        written = []
        for key, value in table.items():
            name = key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key, ensure_ascii=False)
            if isinstance(value, Mapping):
                written += lines(value, f"{prefix}{name}.")
            elif value is not None:
                written.append(f"{prefix}{name} = {json.dumps(value, ensure_ascii=False)}")
        return written

    plain = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    parts = [lines(plain)] + [[f"[{k}]", *lines(v)] for k, v in config.items() if isinstance(v, Mapping)]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _plain(message: str) -> str:
    """Message of msgspec with the key first.

    >>> _plain("Expected `int`, got `str` - at `$.run.seed`")
    'run.seed: expected int, got str'
    """
    what, _, where = message.replace("`", "").partition(" - at $.")
    path = f"{where}." if where else ""
    if missing := re.fullmatch(r"Object missing required field (\w+)", what):
        return f"the key {path}{missing[1]} is missing"
    if what.startswith("Object contains unknown field "):
        key = what.removeprefix("Object contains unknown field ")
        elsewhere = [f"{key} (before the first table)"] * (key in Study.__struct_fields__)
        elsewhere += [f"{name}.{key}" for name, table in TABLES.items() if key in table.__struct_fields__]
        known = TABLES.get(where, Study).__struct_fields__
        hint = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else did_you_mean(key, known)
        return f"unknown key {path}{key}; {hint}"
    what = what[0].lower() + what[1:]
    return f"{where.replace('[...]', '')}: {what}" if where else what


def check_network(spec: str, checkpoints: Sequence[str | Path]) -> None:
    """Raise InputError if a network's file or weights do not exist, before torch is imported."""
    folder = Path.cwd()
    placed = placed_spec(spec, folder)
    file = placed if placed.endswith(KERAS_FILES) else placed.rpartition(":")[0]
    if file.endswith((".py", *KERAS_FILES)) and not Path(file).is_file():
        raise ModelError(f"no such file: {file}")
    for text in checkpoints:
        checkpoint_files(str(text), folder)


def checkpoint_files(text: str, folder: Path) -> list[Path]:
    """Files of a name or a pattern, sorted by name."""
    path = Path(os.path.normpath(folder / Path(text).expanduser()))
    if path.exists() or not glob.has_magic(text):
        matches = [path]
    else:
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not matches or not matches[0].exists():
        raise InputError(f"there is no file {text!r} in {folder}")
    return matches


def listed(checkpoints: str | list[str]) -> list[str]:
    return [checkpoints] if isinstance(checkpoints, str) else checkpoints


def check_images(table: ImagesTable) -> None:
    """Raise InputError for options that images of this kind do not have."""
    from heatproof.images import SOURCES, source_options  # which imports torch

    known = source_options(table.kind)
    if table.kind == "memory":
        kinds = ", ".join(kind for kind in SOURCES if kind != "memory")
        raise InputError(f"kind 'memory' is for Python; use one of {kinds}")
    for name in table.options:
        if name in ImagesTable.__struct_fields__:
            raise InputError(f"{name} belongs under [images], not under [images.options]")
        if name not in known:
            offered = [option for option in known if option not in ImagesTable.__struct_fields__]
            raise InputError(f"options.{name}: a {table.kind} source takes {', '.join(offered) or 'none'}")


def open_images(table: ImagesTable, folder: Path) -> Source:
    """The images of a study."""
    from heatproof.images import open_source  # which imports torch

    path: Any = Path(os.path.normpath(folder / Path(table.path).expanduser()))
    if table.kind == "hf" and not path.exists():
        path = table.path  # the name of a dataset
    options = dict(table.options)
    if isinstance(options.get("root"), str):
        options["root"] = folder / options["root"]
    filters = {k: v for k, v in msgspec.structs.asdict(table).items() if k not in ("kind", "path", "options")}
    return open_source(table.kind, path, **filters, **options)


@contextmanager
def at(place: str) -> Iterator[None]:
    """Prefix errors raised in the context with the key of the value."""
    try:
        yield
    except HeatproofError as error:
        kind = ModelError if isinstance(error, ModelError) else InputError
        raise kind(str(error) if str(error).startswith(place) else f"{place}: {error}") from error
