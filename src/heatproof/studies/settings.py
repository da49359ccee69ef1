"""What a study may be told: every setting is declared once, as a field of its settings class.

    size: int = option(64, "Pixels along a side.", least=16)

The command line makes an option (--size) and a key of its TOML file (size = 64) of it (cli/_study.py); values
out of range are refused, wherever they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from heatproof.errors import InputError, did_you_mean
from heatproof.registry import split_calls

HEAD = (
    "What the output is: softmax, logit, multilabel, regression, segmentation, detection or embedding. "
    "Found by itself where that is safe."
)
CLASS_HEAD = "What the output is: softmax, logit, probabilities. Found by itself where that is safe."
LAYER = "Where CAMs look; found by itself by default."
LIMIT = "At most so many pictures, classes in proportion."
DEVICE = "cpu, cuda, cuda:1, ...; a GPU where there is one."
THREADS = "Of torch; OMP_NUM_THREADS or one per CPU by default."
KEY = "option"


@dataclass(frozen=True)
class Option:
    """What a person is told about a setting, and what it may be."""

    help: str
    short: str = ""  # a letter: "m" for -m
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None  # where several values stand in one text
    shown: str | None = None  # the default in words, where its own would say little
    both: bool = False  # a switch that is off and can still be switched off, for a preset may turn it on


def option(default: Any = MISSING, /, help: str = "", **facts: Any) -> Any:
    """A field that can be set from the command line; without a default somebody must say it."""
    return field(default=default, metadata={KEY: Option(help, **facts)})


class Settings:
    """The base of settings classes: what cannot be is refused when it is said."""

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            value, about = getattr(self, one.name), one.metadata.get(KEY)
            if about is None or value is None:
                continue
            name = one.name.replace("_", "-")
            if about.least is not None and value < about.least:
                raise InputError(f"{name} is at least {about.least}; got {value}")
            if about.most is not None and value > about.most:
                raise InputError(f"{name} is at most {about.most}; got {value}")
            if about.choices and value not in about.choices:
                raise InputError(f"{name} cannot be {value!r}; {did_you_mean(value, about.choices)}")


def with_floors(methods: Sequence[str], floors: Sequence[str]) -> tuple[str, ...]:
    """The methods, then the floors that are not among them."""
    from heatproof.explain.api import read_methods

    names = {request.entry.name for request in read_methods(methods)}
    return (*methods, *(floor for floor in floors if floor not in names))


def calls(text: str) -> tuple[str, ...]:
    """Names with options: "gradcam,lime(samples=9, seed=1)"."""
    return tuple(split_calls(text))


def words(text: str) -> tuple[str, ...]:
    """What stands between commas.

    >>> words("a, b c,")
    ('a', 'b c')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())
