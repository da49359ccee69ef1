"""Exceptions of heatproof. Each message is one sentence with the value that was wrong and the remedy."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

# Control characters, and those that change the direction of text; line ends and tabs are text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class HeatproofError(Exception):
    """Base class of all exceptions of heatproof."""


class InputError(HeatproofError, ValueError):
    """Images, maps, labels, boxes or options that cannot be used."""


class TargetError(InputError):
    """A class that the model does not have."""


class UnknownNameError(HeatproofError, KeyError):
    """An unknown method, metric or layer."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}; {did_you_mean(name, known)}")

    def __str__(self) -> str:  # KeyError would show the message in quotes
        return str(self.args[0])


class ModelError(HeatproofError, RuntimeError):
    """A model that cannot be loaded or run."""


class CheckpointError(ModelError):
    """A weight file that is broken, unsafe or made for another model."""


class LayerError(ModelError):
    """A layer without a spatial grid in its output, or a missing layer."""


class StoreError(HeatproofError, RuntimeError):
    """A run folder that cannot be written, read, or shared with another process."""


class MissingExtraError(HeatproofError, ImportError):
    """An optional package is absent or broken."""


def visible(text: str) -> str:
    r"""Escape control characters, so that text from files cannot control the terminal.

    >>> print(visible("cat\x1b[2J.png"))
    cat\x1b[2J.png
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the singular or plural.

    >>> counted(1, "image"), counted(1200, "image"), counted(2, "class")
    ('1 image', '1,200 images', '2 classes')
    """
    return f"{number:,} {noun}{('es' if noun.endswith('s') else 's') * (number != 1)}"


def did_you_mean(name: str, known: Iterable[str], most: int = 5) -> str:
    """A clause that names the nearest known names, or all of them if none is near."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=most)
    if near:
        return f"did you mean {' or '.join(repr(n) for n in near)}?"
    return f"known: {', '.join([*known[:20], *(['...'] if len(known) > 20 else [])]) or 'none'}"


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Begin the message of an InputError with what it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{subject}: {error}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, to be part of a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def need(package: str, extra: str) -> ModuleType:
    """Import an optional package; raise MissingExtraError with the line that installs it."""
    try:
        return importlib.import_module(package)
    except Exception as error:  # a package that is half installed fails in many ways
        own = package.split(".")[0]
        if isinstance(error, ModuleNotFoundError) and (error.name or own).split(".")[0] == own:
            raise MissingExtraError(
                f"{package} is not installed; run: pip install 'heatproof[{extra}]'"
            ) from error
        raise MissingExtraError(
            f"{package} is installed but does not import ({first_line(error)}); "
            f"reinstall it to match your torch: pip install --force-reinstall 'heatproof[{extra}]'"
        ) from error
