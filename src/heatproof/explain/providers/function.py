"""A user's own method: a function (model, images, targets) -> maps, in Python or in a file.

The function gets the network itself (in evaluation mode, its weights frozen, gradients on), images "b c H W"
and the class to explain for each, "b". It returns maps "b h w" at any size, as a tensor or an array, or a
Signed. Arguments behind these three are its options.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.registry import Card, Explainer, explainers

if TYPE_CHECKING:
    from heatproof.types import Signed, Trace

Method = str | Callable[..., Any]
Methods = Method | Sequence[Method] | Mapping[str, Callable[..., Any]]
OWN = Card(target="as its author says", relu="as its author says", sign="as its author says")
SHARED = 3  # arguments in front of the options


def named(methods: Methods) -> list[str]:
    """Methods by name; functions among them are known by theirs from now on."""
    if isinstance(methods, str) or callable(methods):
        methods = [methods]
    given = methods.items() if isinstance(methods, Mapping) else [(_name(one), one) for one in methods]
    found: dict[str, Method] = {}
    for name, one in given:
        if callable(one):
            if found.get(name, one) is not one:
                raise InputError(f"two methods are called {name!r}; name them: {{'one': f, 'other': g}}")
            explainers.add_local(of_function(name, one))
        elif isinstance(methods, Mapping):
            raise InputError(f"methods[{name!r}] is a name already; a table of methods holds functions")
        found[name] = one
    return list(found)


def _name(method: Method) -> str:
    return method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)


def of_function(name: str, function: Callable[..., Any]) -> Explainer:
    """A function as a method."""
    if "(" in name or ":" in name:
        raise InputError(
            f"{name!r} is no name for a method: brackets hold options, and colons come behind packages"
        )

    def method(trace: Trace, **options: Any) -> Tensor | Signed:
        with torch.inference_mode(False), torch.enable_grad():
            images = trace.images.detach().clone()
            return _as_maps(name, function(trace.model.module, images, trace.targets, **options), trace)

    method.__doc__ = inspect.getdoc(function) or f"{name}, a function of the user's."
    method.__signature__ = inspect.Signature(_options(function))  # type: ignore[attr-defined]
    return Explainer(name, method, card=OWN, forward_only=True, volumes=True, cost="its own passes")


def _options(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        given = list(inspect.signature(function).parameters.values())[SHARED:]
    except (TypeError, ValueError):
        return []
    return [p.replace(kind=p.KEYWORD_ONLY) for p in given if p.default is not p.empty]


def _as_maps(name: str, found: Any, trace: Trace) -> Tensor | Signed:
    from heatproof.types import Signed

    if isinstance(found, Signed):
        return Signed(*(_as_maps(name, one, trace) for one in found))  # type: ignore[arg-type]
    try:
        maps = torch.as_tensor(found).to(trace.images.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} returned {type(found).__name__}, not maps 'b h w'") from error
    if maps.ndim == trace.images.ndim and maps.shape[1] == 1:
        return maps[:, 0]
    if maps.ndim == trace.images.ndim:
        raise InputError(f"{name} returned shape {tuple(maps.shape)}, not 'b h w'; sum over its channels")
    return maps


@dataclass(frozen=True)
class FromFile(Explainer):
    """A function in a file, which is run when the method is: not when it is named, listed or reported."""

    path: Path = Path()

    @cached_property
    def options(self) -> dict[str, Any]:
        """Read off the file, without running it."""
        name = self.name.rpartition(":")[2]
        try:
            lines = ast.parse(self.path.read_text(encoding="utf-8")).body
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {self.path}: {error}") from error
        for line in lines:
            if isinstance(line, ast.FunctionDef) and line.name == name:
                return _written(line.args)
        return {}


def _written(given: ast.arguments) -> dict[str, Any]:
    plain = [*given.posonlyargs, *given.args]
    pairs = [*zip(plain[len(plain) - len(given.defaults) :], given.defaults, strict=True)]
    pairs += [(one, usual) for one, usual in zip(given.kwonlyargs, given.kw_defaults, strict=True) if usual]
    return {one.arg: _value(usual) for one, usual in pairs if one not in plain[:SHARED]}


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def from_path(name: str, folder: Path = Path(), _order: object = None) -> Explainer:
    """FILE.py:FUNCTION, the file relative to a folder."""
    file, _, function = name.rpartition(":")
    path = folder / Path(file).expanduser()

    def method(trace: Trace, **options: Any) -> Any:
        from heatproof.models.wrapped import function_in

        with function_in(path, function) as found:
            return of_function(function, found).function(trace, **options)

    method.__doc__ = f"The function {function} of {file}."
    made = FromFile(name, method, card=OWN, forward_only=True, volumes=True, cost="its own passes")
    return replace(made, path=path)
