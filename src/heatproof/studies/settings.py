"""Settings of studies: each is declared once, as a field of its settings class.

    size: int = option(64, "Pixels along a side.", least=16)

The command line makes an option (--size) and a key of its TOML file (size = 64) of it (cli/_study.py); values
out of range are refused, wherever they come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from heatproof.errors import InputError, did_you_mean
from heatproof.registry import check_methods, split_calls

HEAD = (
    "What the output is: softmax, logit, multilabel, regression, segmentation, detection or embedding. "
    "Detected automatically if unambiguous."
)
CLASS_HEAD = "What the output is: softmax, logit, probabilities. Detected automatically if unambiguous."
LAYER = "Layer of CAMs; chosen automatically by default."
LIMIT = "Maximum number of images, classes in proportion."
DEVICE = "cpu, cuda, cuda:1, ...; default: a GPU if available."
EXPECT_ACCURACY = "Expected accuracy; stop if the measured one is far off."
THREADS = "Threads of torch; default: OMP_NUM_THREADS or one per CPU."
CHANNELS = "mean and std are one number per channel, such as 0.5,0.5,0.5"
KEY = "option"


@dataclass(frozen=True)
class Option:
    """Help text and allowed values of a setting."""

    help: str
    short: str = ""  # a letter: "m" for -m
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None  # parses the text of an option with several values
    default_text: str | None = None  # shown in the help instead of the default
    both: bool = False  # also add --no-NAME to a switch that is off by default, since a preset may turn it on


def option(default: Any = MISSING, /, help: str = "", **facts: Any) -> Any:
    """A field that can be set from the command line; without a default it is required."""
    return field(default=default, metadata={KEY: Option(help, **facts)})


class Settings:
    """The base of settings classes; raises InputError for values out of range and unknown methods."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value, about = getattr(self, each.name), each.metadata.get(KEY)
            if about is None or value is None:
                continue
            name = each.name.replace("_", "-")
            if about.least is not None and value < about.least:
                raise InputError(f"{name} is at least {about.least}; got {value}")
            if about.most is not None and value > about.most:
                raise InputError(f"{name} is at most {about.most}; got {value}")
            if about.choices and value not in about.choices:
                raise InputError(f"{name} cannot be {value!r}; {did_you_mean(value, about.choices)}")
        check_methods(getattr(self, "methods", ()))


def pixels(text: str) -> tuple[int, ...]:
    """Parse one or more sizes.

    >>> pixels("128"), pixels("96,128")
    ((128,), (96, 128))
    """
    try:
        sides = tuple(map(int, words(text)))
    except ValueError:
        sides = ()
    if not sides or len(sides) > 3 or min(sides) < 1:
        raise InputError(
            f"sizes are whole numbers of pixels, such as 128 or 96,128 (height,width); got {text!r}"
        )
    return sides


def numbers(text: str, rule: str = CHANNELS) -> tuple[float, ...]:
    """Parse numbers between commas; rule: what they must be, for the error.

    >>> numbers("0.5, 0.25")
    (0.5, 0.25)
    """
    try:
        return tuple(map(float, words(text)))
    except ValueError:
        raise InputError(f"{rule}; got {text!r}") from None


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings(Settings):
    """Parts of the preprocessing that replace the network's own: the [preprocess] table of a study."""

    size: tuple[int, ...] = option(
        (), "Pixels that the network sees: 128, or height,width.", read=pixels, default_text=""
    )
    resize: tuple[int, ...] = option(
        (), "Shorter side before the centre crop, or exact height,width; --size by default.",
        read=pixels, default_text="",
    )  # fmt: skip
    mean: tuple[float, ...] = option((), "Subtracted, one number per channel.", read=numbers, default_text="")
    std: tuple[float, ...] = option((), "Divided by, one number per channel.", read=numbers, default_text="")

    @property
    def table(self) -> dict[str, Any]:
        """Keys and values of what is given."""
        size = self.size * 2 if len(self.size) == 1 else self.size
        resize = self.resize or (size[:1] if len(set(size)) == 1 and len(size) == 2 else size)
        keys: dict[str, Any] = {"size": list(size), "resize": resize[0] if len(resize) == 1 else list(resize)}
        keys |= {"mean": list(self.mean), "std": list(self.std)}
        return {key: value for key, value in keys.items() if value}


def calls(text: str) -> tuple[str, ...]:
    """Names with options: "gradcam,lime(samples=9, seed=1)"."""
    return tuple(split_calls(text))


def words(text: str) -> tuple[str, ...]:
    """What stands between commas.

    >>> words("a, b c,")
    ('a', 'b c')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())
