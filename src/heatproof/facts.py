"""What is known of methods and metrics while none of them is imported: facts.json, made from the registry.

    {"heatproof.explain": {"heatproof.explain.rise": [{"name": "rise", "said": "...", "options": {...}}]}}

Only what is not the usual is written. `python docs/pictures.py tables` writes the file; a test fails where it
does not say what the registry says.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("facts.json")
FUNCTIONS = ("function", "call")  # fields of an entry that no file can hold
Facts = Mapping[str, Any]


@cache
def read_facts() -> Mapping[str, Mapping[str, list[Facts]]]:
    """By package and file; nothing where the file is missing."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.exists() else {}


def facts_text(registries: Iterable[Any]) -> str:
    """The file as it should be."""
    return json.dumps({one.package: one.facts() for one in registries}, indent=1, ensure_ascii=False) + "\n"


def facts_of(entry: Any) -> Facts:
    """What is known of an entry of the registry, but for its functions."""
    usual = type(entry)(entry.name)
    own: dict[str, Any] = {"name": entry.name}
    for one in fields(entry):
        value = getattr(entry, one.name)
        if one.name not in FUNCTIONS and value != getattr(usual, one.name):
            own[one.name] = asdict(value) if is_dataclass(value) else _listed(value)  # type: ignore[arg-type]
    said = (inspect.getdoc(entry.function) or "").partition("\n")[0]
    more = {"said": said, "options": entry.options, "call": getattr(entry, "call", None) is not None}
    return own | {name: value for name, value in more.items() if value}


def entry_of(
    kind: type[Any],
    module: str,
    look_up: Callable[[], Any],
    *,
    name: str,
    said: str = "",
    options: Facts | None = None,
    call: bool = False,
    **facts: Any,
) -> Any:
    """An entry from its facts; calling its functions looks the real entry up, which imports it."""

    def function(*args: Any, **named: Any) -> Any:
        return look_up().function(*args, **named)

    def called(_function: object, *args: Any) -> Any:
        real = look_up()
        return real.call(real.function, *args)

    only_by_name = inspect.Parameter.KEYWORD_ONLY
    given = [inspect.Parameter(key, only_by_name, default=_tuple(v)) for key, v in (options or {}).items()]
    function.__doc__, function.__module__ = said, module
    function.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    usual = kind(name)
    known = {key: _tuple(value) for key, value in facts.items()}
    for key, value in known.items():
        if is_dataclass(getattr(usual, key)):
            known[key] = getattr(usual, key).__class__(**value)
    return kind(name, function, **known, **({"call": called} if call else {}))


def _listed(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _tuple(value: Any) -> Any:
    """JSON knows lists only; an entry holds none."""
    return tuple(value) if isinstance(value, list) else value
