"""A user's own method: a function (model, images, targets) -> maps, in Python or in a file.

It is called with the network (in evaluation mode, weights frozen, gradients on), images "b c H W" and the
class to explain for each, "b". It returns maps "b h w" at any size, as a tensor, an array or a Signed. Its
further arguments are options.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.models.running import function_in
from heatproof.registry import Card, Explainer, explainers
from heatproof.types import Signed, Trace

Method = str | Callable[..., Any]
Methods = Method | Sequence[Method] | Mapping[str, Callable[..., Any]]
OWN = Card(target="as its author says", relu="as its author says", sign="as its author says")
LEADING = 3  # arguments before the options


def named(methods: Methods) -> list[str]:
    """Names of methods; functions among them are registered in this process under their own names."""
    if isinstance(methods, str) or callable(methods):
        methods = [methods]
    given = (
        methods.items() if isinstance(methods, Mapping) else [(_name(method), method) for method in methods]
    )
    by_name: dict[str, Method] = {}
    for name, method in given:
        if callable(method):
            if by_name.get(name, method) is not method:
                raise InputError(f"two methods are called {name!r}; name them: {{'one': f, 'other': g}}")
            explainers.add_local(of_function(name, method))
        elif isinstance(methods, Mapping):
            raise InputError(f"methods[{name!r}] is a name already; a table of methods holds functions")
        by_name[name] = method
    return list(by_name)


def _name(method: Method) -> str:
    return method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)


def of_function(name: str, function: Callable[..., Any]) -> Explainer:
    """The entry of a function."""
    if "(" in name or ":" in name:
        raise InputError(
            f"{name!r} is no name for a method: brackets hold options, and colons come behind packages"
        )

    def compute(trace: Trace, **options: Any) -> Tensor | Signed:
        with torch.inference_mode(False), torch.enable_grad():
            images = trace.images.detach().clone()
            return _as_maps(name, function(trace.model.module, images, trace.targets, **options), trace)

    try:
        parameters = list(inspect.signature(function).parameters.values())[LEADING:]
    except (TypeError, ValueError):
        parameters = []
    options = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.default is not p.empty]
    compute.__doc__ = inspect.getdoc(function) or f"{name}, a function of the user's."
    compute.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return Explainer(name, compute, card=OWN, forward_only=True, volumes=True, cost="its own passes")


def _as_maps(name: str, result: Any, trace: Trace) -> Tensor | Signed:
    if isinstance(result, Signed):
        return Signed(*(_as_maps(name, part, trace) for part in result))  # type: ignore[arg-type]
    try:
        maps = torch.as_tensor(result).to(trace.images.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} returned {type(result).__name__}, not maps 'b h w'") from error
    if maps.ndim == trace.images.ndim and maps.shape[1] == 1:
        return maps[:, 0]
    if maps.ndim == trace.images.ndim:
        raise InputError(f"{name} returned shape {tuple(maps.shape)}, not 'b h w'; sum over its channels")
    return maps


@dataclass(frozen=True)
class FromFile(Explainer):
    """A function in a file, which is imported when the method is run."""

    path: Path = Path()

    @cached_property
    def options(self) -> dict[str, Any]:
        """Defaults as written in the file, which is parsed but not run."""
        name = self.name.rpartition(":")[2]
        try:
            statements = ast.parse(self.path.read_text(encoding="utf-8")).body
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {self.path}: {error}") from error
        for statement in statements:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                return _written_defaults(statement.args)
        return {}


def _written_defaults(arguments: ast.arguments) -> dict[str, Any]:
    """Defaults by option; None for those that are not literals."""
    plain = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(plain[len(plain) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    pairs += [
        (a, default)
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default
    ]
    defaults = {}
    for argument, default in pairs:
        if argument not in plain[:LEADING]:
            try:
                defaults[argument.arg] = ast.literal_eval(default)
            except ValueError:
                defaults[argument.arg] = None
    return defaults


def from_path(name: str, folder: Path) -> Explainer:
    """FILE.py:FUNCTION, the file relative to a folder."""
    file, _, function = name.rpartition(":")
    path = folder / Path(file).expanduser()

    def compute(trace: Trace, **options: Any) -> Any:
        with function_in(path, function) as own:
            return of_function(function, own).function(trace, **options)

    compute.__doc__ = f"The function {function} of {file}."
    return FromFile(
        name, compute, card=OWN, forward_only=True, volumes=True, cost="its own passes", path=path
    )
