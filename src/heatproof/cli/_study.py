"""A command whose options may also stand in a TOML file, given as its first argument.

    heatproof study cose examples/cose.toml --device cuda

Keys are the option names (`draws = 6` for --draws). What the command line says wins; paths in the file are
relative to the file.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click
from rich.table import Table as Grid

from heatproof.cli._console import new_table
from heatproof.errors import InputError, did_you_mean
from heatproof.report.tables import Table


class StudyCommand(click.Command):
    """Adds the optional argument FILE.toml to a command."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        file = click.Argument(
            ["settings_file"], metavar="[FILE.toml]", required=False, is_eager=True, expose_value=False,
            type=click.Path(path_type=Path), callback=self._read,
        )  # fmt: skip
        self.params.insert(0, file)

    def _read(self, ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
        if path is None:
            return
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"there is no file {path}") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"cannot read {path} as TOML: {error}") from error
        options = {_key(option): option for option in self.params if isinstance(option, click.Option)}
        defaults: dict[str, Any] = {}
        for key, value in content.items():
            if key not in options:
                raise InputError(f"{path}: unknown key {key}; {did_you_mean(key, options)}")
            defaults[str(options[key].name)] = _value(options[key], key, value, path)
        ctx.default_map = {**defaults, **(ctx.default_map or {})}


def _key(option: click.Option) -> str:
    """The option's name without its dashes, as the file writes it."""
    longest = max(option.opts, key=len)
    return longest.lstrip("-").replace("-", "_")


def _value(option: click.Option, key: str, value: Any, path: Path) -> Any:
    if isinstance(value, dict):
        raise InputError(f"{path}: {key} must be a value, not a table")
    if isinstance(value, list) and not option.multiple and option.nargs == 1:
        value = ",".join(map(str, value))  # methods = ["gradcam", "lime"] for --methods gradcam,lime
    if isinstance(option.type, click.Path):
        several = [value] if isinstance(value, str) else value
        placed = [str(path.parent / Path(one).expanduser()) for one in several]
        return placed[0] if isinstance(value, str) else placed
    return value


def shown(table: Table) -> Grid:
    """A study's table on the terminal, without its intervals."""
    grid = new_table(table.title)
    for column in table.columns:
        grid.add_column(column.name, overflow="fold")
    for i in range(len(table.rows)):
        grid.add_row(*(table.text(i, j, interval=False) for j in range(len(table.columns))))
    return grid
