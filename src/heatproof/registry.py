"""Registries of methods and metrics, filled by the decorators @explainer and @metric.

The modules of heatproof and of plug-ins (entry points "heatproof.explainers" and "heatproof.metrics") are
imported when a registry is first read. Methods of other packages have a prefix: see explain/providers.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from heatproof.errors import InputError, UnknownNameError, did_you_mean


@dataclass(frozen=True)
class Card:
    """Conventions of a method in which libraries differ."""

    target: str = "logit of the explained class"
    relu: str = "after the sum over channels"
    sign: str = "positive evidence only"
    resize: str = "bilinear, align_corners=False"
    normalisation: str = "min-max per map"


FLOOR_CARD = Card(  # methods that ignore the network
    target="none: the same map for every class",
    relu="none",
    sign="never negative",
    resize="none: at the image's size",
)
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """A registered function with its facts. As a decorator, it registers the function."""

    name: str
    function: Callable[..., Any] = lambda: None  # until it decorates one
    needs: Collection[str] = ()
    cite: str = ""
    aliases: tuple[str, ...] = ()
    volumes: bool = False  # whether it takes volumes, "b c D H W", as well as images
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by option: words that it may be
    least: Mapping[str, int] = field(default_factory=dict)  # by option: the smallest whole number it may be

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs))

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    @cached_property
    def options(self) -> dict[str, Any]:
        """Arguments a user may set, with their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}


@dataclass(frozen=True)
class Explainer(Entry):
    """A method: Trace -> "b h w". `needs` names what the shared pass must provide.

    Needs: activations, gradients (both at the layer), scales (activations and gradients at several layers),
    input_gradient, blank (the logits of the all-zero image); nothing for methods that only predict.
    """

    card: Card = field(default_factory=Card)
    cost: str = ""  # passes per image, if neither `needs` nor an option determines it
    trace_only: bool = False  # whether it reads tensors of the shared pass only, and can be recorded with it
    architecture: str = ""  # "cnn" or "transformer", where it refuses other networks
    # By option: the number of repeats at which pixels rank as with the default (docs/results/passes.md).
    sufficient_repeats: Mapping[str, int] = field(default_factory=dict)
    forward_only: bool = False  # whether it needs outputs of the network only, no layers or gradients
    precomputed: bool = False  # whether its maps are read from files, so that it cannot be run again
    own_gradients: bool = False  # whether it computes gradients in passes of its own

    @property
    def reads_gradients(self) -> bool:
        """Whether it uses gradients, of the shared pass or of its own."""
        return self.own_gradients or not {"gradients", "scales", "input_gradient"}.isdisjoint(self.needs)

    def __call__(self, function: Function) -> Function:
        explainers.add(replace(self, function=function))
        return function


@dataclass(frozen=True)
class Metric(Entry):
    """A pure metric function, with the facts that runs, tables, reports and verdicts read.

    `needs` names its inputs: maps, labels, probabilities, boxes, masks, model, images. A run calls it with
    them by name, once for each method where it needs maps. By level it gets and returns

        image        the images of a batch; a number each, "b", or a PerImage
        class        all images of a checkpoint, without boxes, masks, model and images; {class: number}
        checkpoint   the same; one number

    or, for the last two, a PerClass.
    """

    level: str = "image"
    higher_is_better: bool | None = None
    bounds: tuple[float, float] = (float("-inf"), float("inf"))
    title: str = ""  # in a few plain words
    family: str = "Other"  # its heading in the table
    parts: Mapping[str, str] = field(default_factory=dict)  # titles of the further numbers that it returns
    floors: tuple[str, ...] = ("random", "edges")  # to be beaten by a method that looks at the network
    question: str = ""  # "map": whether it follows the network, "network": what that uses
    votes: bool = False  # whether the verdict rests on it; others of the same question are information
    headline: bool = False  # whether images may be ranked by it
    bundle: str = ""  # the name of its family: the metrics of one function
    compares_checkpoints: bool = False  # whether it compares checkpoints, from the SSIM of their maps
    own_class: bool = False  # of `probabilities` it reads those of the true and the predicted class only
    not_in_a_run: str = ""  # why it cannot run, if `needs` does not explain it
    pairs: bool = False  # whether it takes the maps by method and compares each pair of methods
    reruns: bool = False  # whether it runs the method again, under other weights or on other images
    needs_weights: bool = False  # whether it needs weights or layers, not outputs alone
    needs_gradients: bool = False  # whether it needs gradients
    call: Callable[..., Any] | None = None  # (function, context, options), where not by name
    inputs: Callable[[Mapping[str, Any]], int] | None = None  # per image and method, from its options

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level not in ("image", "class", "checkpoint"):
            raise InputError(f"metric {self.name}: level is image, class or checkpoint; got {self.level!r}")

    def __call__(self, function: Function) -> Function:
        metrics.add(replace(self, function=function))
        return function


REQUIRED = inspect.Parameter.empty  # the default of an option that must be given
REPEATS = ("samples", "masks", "steps", "channels")  # options that set the number of passes
EntryT = TypeVar("EntryT", bound=Entry)


class Registry(Generic[EntryT]):
    """Entries by name. Case, hyphens, underscores and spaces in a name do not matter."""

    def __init__(self, kind: str, package: str, group: str, providers: str = "") -> None:
        self.kind, self.package, self.group = kind, package, group
        self.providers = providers  # the module that resolves names with a prefix
        self._entries: dict[str, EntryT] = {}
        self._keys: dict[str, str] = {}
        self._local: dict[str, EntryT] = {}  # of this process: functions of users and of other packages
        self._loaded = self._loading = False
        self._lock = threading.RLock()

    def add(self, entry: EntryT) -> None:
        for name in (entry.name, *entry.aliases):
            owner = self._keys.setdefault(key_of(name), entry.name)
            if owner != entry.name:
                raise InputError(f"{self.kind} name {name!r} is already taken by {owner!r}")
        known = self._entries.get(entry.name)
        if known and known.function is not entry.function:
            raise InputError(f"{self.kind} {entry.name!r} is registered twice")
        self._entries[entry.name] = entry

    def add_local(self, entry: EntryT) -> None:
        """Register an entry in this process only, in place of an earlier local entry of the same name."""
        self._load()
        if owner := self._keys.get(key_of(entry.name)):
            raise InputError(f"the name {entry.name!r} is taken by the {self.kind} {owner!r}; choose another")
        self._local[entry.name] = entry

    def get(self, name: str) -> EntryT:
        if (entry := self.find(name)) is None:
            raise UnknownNameError(self.kind, name, self._entries)
        return entry

    def find(self, name: str) -> EntryT | None:
        """The entry of this name or alias, or None."""
        if self.providers and ":" in name and name not in self._local:
            self._local[name] = importlib.import_module(self.providers).provided(name)
        if name in self._local:
            return self._local[name]
        self._load()
        owner = self._keys.get(key_of(name))
        return None if owner is None else self._entries[owner]

    def names(self) -> list[str]:
        self._load()
        return sorted(self._entries)

    def __iter__(self) -> Iterator[EntryT]:
        return (self._entries[name] for name in self.names())

    def as_registered(self) -> list[EntryT]:
        """Entries in the order of their files, those of plug-ins last."""
        self._load()

        def place(entry: EntryT) -> tuple[bool, str]:
            module = entry.function.__module__
            return module.rpartition(".")[0] != self.package, module

        return sorted(self._entries.values(), key=place)

    def _load(self) -> None:
        """Import the modules of heatproof and of plug-ins, whose decorators register their functions."""
        if self._loaded:
            return
        with self._lock:
            if self._loaded or self._loading:  # by another thread, or by a caller in this one
                return
            self._loading = True
            try:
                package = importlib.import_module(self.package)
                for module in pkgutil.iter_modules(package.__path__):
                    importlib.import_module(f"{self.package}.{module.name}")
                for plugin in entry_points(group=self.group):
                    plugin.load()
                self._loaded = True
            finally:
                self._loading = False


def key_of(name: str) -> str:
    return re.sub(r"[-_\s]", "", name.lower())


explainers: Registry[Explainer] = Registry(
    "method", "heatproof.explain", "heatproof.explainers", "heatproof.explain.providers"
)
metrics: Registry[Metric] = Registry("metric", "heatproof.metrics", "heatproof.metrics")

explainer, metric = Explainer, Metric  # as decorators


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a name with options, as methods are written in TOML and on the command line.

    >>> parse_call("lime(samples=200, segments='quickshift')")
    ('lime', {'samples': 200, 'segments': 'quickshift'})
    >>> parse_call("gradcam++")
    ('gradcam++', {})
    """
    name, bracket, rest = text.strip().partition("(")
    if not bracket:
        return name, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        return name.strip(), {str(k.arg): _literal(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        hint = "write a name and options, such as lime(samples=200)"
        raise InputError(f"cannot read {text!r}; {hint}") from None


def _literal(node: ast.expr) -> Any:
    """A Python literal; true and false may be written as TOML writes them."""
    if isinstance(node, ast.Name):
        return node.id == "true" if node.id in ("true", "false") else node.id
    return ast.literal_eval(node)


def call_text(name: str, options: Mapping[str, Any]) -> str:
    """A name with options, as parse_call reads it."""
    given = ", ".join(f"{option}={value!r}" for option, value in options.items())
    return f"{name}({given})" if given else name


def check_options(entry: Entry, given: dict[str, Any]) -> None:
    """Raise InputError for an unknown option, a value it cannot have, and a required one that is missing."""
    for option, value in given.items():
        if option not in entry.options:
            raise InputError(f"{entry.name} has no option {option!r}; {did_you_mean(option, entry.options)}")
        words, least = entry.choices.get(option, ()), entry.least.get(option)
        if value in words or (not words and least is None):
            continue
        if least is None or not isinstance(value, int) or value < least:
            number = [] if least is None else [f"a whole number of at least {least}"]
            *first, last = [*number, *map(repr, words)]
            allowed = f"{', '.join(first)} or {last}" if first else last
            raise InputError(f"{entry.name} {option} must be {allowed}, got {value!r}")
    for option, usual in entry.options.items():
        if usual is REQUIRED and option not in given:
            raise InputError(f"{entry.name} needs {option}; write {entry.name}({option}=...)")


def check_methods(texts: Iterable[str]) -> None:
    """Raise for an unknown method or option. Names with a colon are checked when they are loaded."""
    for text in texts:
        name, options = parse_call(text)
        if ":" not in name:
            check_options(explainers.get(name), options)


def takes_volumes(entry: Entry) -> bool:
    """Whether an entry takes volumes, or reads no maps and no images."""
    spatial = {"maps", "images", "model", "ssim"}
    return entry.volumes or (isinstance(entry, Metric) and not spatial & set(entry.needs))


def check_volumes(entry: Entry) -> None:
    """Raise InputError for an entry that does not take volumes."""
    if not takes_volumes(entry):
        known: Registry[Any] = metrics if isinstance(entry, Metric) else explainers
        names = ", ".join(other.name for other in known if takes_volumes(other))
        raise InputError(f"{entry.name} is not built for volumes; leave it out or use one of {names}")


def split_calls(text: str) -> list[str]:
    """Split a comma-separated list of calls, leaving commas inside brackets and quotes alone.

    >>> split_calls("gradcam, lime(samples=9, seed=1),rise")
    ['gradcam', 'lime(samples=9, seed=1)', 'rise']
    >>> split_calls("f(a=1, b=(2,3)), g(c='x),y')")
    ['f(a=1, b=(2,3))', "g(c='x),y')"]
    """
    parts, depth = [""], 0
    for piece in re.findall(r"'[^']*'|\"[^\"]*\"|.", text, re.DOTALL):
        depth += (piece in "([{") - (piece in ")]}")
        if piece == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts if part.strip()]
