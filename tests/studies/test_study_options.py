"""Options and TOML keys of a study from its settings class."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from heatproof.cli._study import StudyCommand
from heatproof.errors import InputError
from heatproof.studies.settings import Settings, calls, option


@dataclass(frozen=True, kw_only=True)
class Within(Settings):
    low: float = option(0.5, "How low.")


@dataclass(frozen=True, kw_only=True)
class Some(Settings):
    images: Path = option(help="Where they are.", short="i")
    methods: tuple[str, ...] = option(("gradcam",), "Which.", read=calls)
    draws: int = option(6, "How often.", least=1, most=9)
    within: Within = field(default_factory=Within)
    keep: tuple[str, ...] = option((), "What to keep.")
    share: tuple[float, float] = option((0.1, 0.8), "From and to.")
    kind: str = option("one", "Of what kind.", choices=("one", "two"))
    quick: bool = option(False, "Sooner.", both=True)
    figures: bool = option(True, "Draw them.")
    inner: dict[str, int] = field(default_factory=dict)


MORE = click.Option(["--large"], is_flag=True, help="All of it.")


@click.command("some", cls=StudyCommand, settings=Some, more={"draws": MORE})
def some(large: bool, given: dict[str, object]) -> None:
    settings = Some(**({"draws": 7, "quick": True} if large else {}) | given)  # type: ignore[arg-type]
    click.echo(f"{settings.images} {settings.methods} {settings.draws} {settings.keep} {settings.quick}")
    click.echo(f"{settings.within.low} {settings.share} {settings.kind} {settings.figures} {sorted(given)}")


def call(*args: object) -> tuple[object, str]:
    result = CliRunner().invoke(some, [str(a) for a in args])
    return result.exception, result.output.strip()


def test_settings_come_from_the_file_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text('images = "photos"\nmethods = ["gradcam", "lime(samples=9, bound=0.5)"]\ndraws = 3\n'
                    'keep = ["a", "b"]\nlow = 0.25\nshare = [0.2, 0.3]\nlarge = true\n')  # fmt: skip
    whole = ["images", "keep", "methods", "share", "within"]
    methods = ("gradcam", "lime(samples=9, bound=0.5)")
    rest = f"0.25 (0.2, 0.3) one True {sorted([*whole, 'draws'])}"
    assert call(file) == (None, f"{tmp_path / 'photos'} {methods} 3 ('a', 'b') True\n{rest}")
    error, output = call(
        file, "--draws", 9, "-i", "x", "--no-quick", "--low", 1, "--keep", "c", "--methods", ""
    )
    assert error is None and output.startswith("x ('gradcam',) 9 ('c',) False\n1.0 (0.2, 0.3)")


def test_only_given_options_are_passed_on() -> None:
    nothing = "('gradcam',) 6 () False\n0.5 (0.1, 0.8) one True ['images', 'within']"
    assert call("-i", "x") == (None, f"x {nothing}")
    assert call("-i", "x", "--large")[1].startswith("x ('gradcam',) 7 () True")  # a preset is no default
    error, _ = call("--draws", 2)
    assert isinstance(error, InputError) and str(error).startswith("--images is missing; name it")


def test_every_setting_is_an_option_with_its_default_and_range() -> None:
    lines = [" ".join(line.split()) for line in call("--help")[1].partition("Options:")[2].splitlines()]
    assert lines[1:-1] == [
        "-i, --images PATH Where they are.", "--methods TEXT Which. [default: gradcam]",
        "--large All of it.", "--draws INTEGER RANGE How often. [default: 6; 1<=x<=9]",
        "--low FLOAT How low. [default: 0.5]", "--keep TEXT What to keep.",
        "--share FLOAT... From and to. [default: 0.1, 0.8]",
        "--kind [one|two] Of what kind. [default: one]",
        "--quick / --no-quick Sooner. [default: no-quick]",
        "--figures / --no-figures Draw them. [default: figures]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"draws": 0}, "draws is at least 1; got 0"),
        ({"draws": 10}, "draws is at most 9; got 10"),
        ({"kind": "tow"}, "kind cannot be 'tow'; did you mean 'two'?"),
    ],
)
def test_a_setting_out_of_range_is_refused_in_python_too(setting: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        Some(images=Path("x"), **setting)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("draw = 3", "unknown key draw; did you mean 'draws'"),
        ("[draws]\na = 1", "not a table"),
        ("=", "TOML"),
    ],
)
def test_a_bad_file_raises_a_clear_error(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "study.toml").write_text(text)
    error, _ = call(tmp_path / "study.toml")
    assert isinstance(error, InputError) and sentence in str(error)
    assert "there is no file" in str(call(tmp_path / "none.toml")[0])
