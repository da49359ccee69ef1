"""Commands whose options are the fields of a settings class (studies/settings.py) or come from a file.

    heatproof study cose examples/cose.toml --device cuda

Keys of the file are the option names (`draws = 6` for --draws). The command line takes precedence; paths in
the file are relative to the file. An empty text counts as not given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from heatproof.cli._console import broken_table, console, errors, new_table, say
from heatproof.errors import InputError, did_you_mean
from heatproof.studies.settings import KEY, Option, Settings

if TYPE_CHECKING:
    from rich.table import Table as Grid

    from heatproof.report.tables import Table


class StudyCommand(click.Command):
    """A command whose function gets `given`: arguments for the settings class that were set, and no others.

    more: options that are no settings, by the name of the option that they stand before.
    words: what else than FILE.toml may be named, in the help; such words are the function's `words`.
    """

    def __init__(
        self,
        *args: Any,
        settings: type,
        more: Mapping[str, click.Option] | None = None,
        words: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.settings, before = settings, more or {}
        named: dict[str, Any] = {"required": False, "is_eager": True, "type": click.Path(path_type=Path)}
        if words:
            several = {"nargs": -1, "metavar": f"[FILE.toml] [{words}]...", "type": str}
            file = click.Argument(["words"], **named | several, callback=self._read_first)
        else:
            file = click.Argument(
                ["settings_file"], **named, metavar="[FILE.toml]", expose_value=False, callback=self._read
            )
        self.params = [
            file,
            *(each for own in options(settings) for each in (before.get(str(own.name)), own) if each),
        ]  # fmt: skip

    def invoke(self, ctx: click.Context) -> Any:
        own = {str(option.name) for option in options(self.settings)}
        given = {
            name: value
            for name, value in ctx.params.items()
            if value != "" and ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
        }
        others = {name: value for name, value in ctx.params.items() if name not in own}  # also `words`
        ctx.params = others | {"given": arguments(self.settings, given)}
        return super().invoke(ctx)

    def _read_first(
        self, ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Read the settings file among the words, and return the other words."""
        files = [word for word in given if word.endswith(".toml")]
        if len(files) > 1:
            raise InputError(f"one FILE.toml is read, not {len(files)}; leave out {', '.join(files[1:])}")
        self._read(ctx, parameter, Path(files[0]) if files else None)
        return tuple(word for word in given if word not in files)

    def _read(self, ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
        if path is None:
            return
        from heatproof.run.config import ModelTable, read_toml
        from heatproof.run.study import foreign_code

        content = read_toml(path)
        known = {str(own.name): own for own in self.params if isinstance(own, click.Option)}
        for key in content:
            if key not in known:
                raise InputError(f"{path}: unknown key {key}; {did_you_mean(key, known)}")
        values = {key: _value(known[key], key, value, path) for key, value in content.items()}
        ctx.default_map = {**values, **(ctx.default_map or {})}
        weights, pickles = content.get("checkpoints", []), bool(content.get("allow_pickle"))
        files = weights if isinstance(weights, list) else str(weights)
        if runs := foreign_code(ModelTable(str(content.get("model", "")), files, allow_pickle=pickles)):
            say(f"this study {runs}")


class PlacedCommand(StudyCommand):
    """A study whose model and images are positional arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        placed = ("model", "images", "settings_file")
        self.params = [
            click.Argument(["model"]),
            click.Argument(["images"], type=click.Path(path_type=Path)),
            *(parameter for parameter in self.params if parameter.name not in placed),
        ]


def _value(option: click.Option, key: str, value: Any, path: Path) -> Any:
    if isinstance(value, dict):
        raise InputError(f"{path}: {key} must be a value, not a table")
    if isinstance(value, list) and not option.multiple and option.nargs == 1:
        value = ",".join(map(str, value))  # methods = ["gradcam", "lime"] for --methods gradcam,lime
    if isinstance(option.type, click.Path):
        paths = [value] if isinstance(value, str) else value
        placed = [str(path.parent / Path(each).expanduser()) for each in paths]
        return placed[0] if isinstance(value, str) else placed
    return value


def options(settings: type) -> Iterator[click.Option]:
    """The fields of a settings class, and of those within it, as options in their order."""
    hints = get_type_hints(settings)
    for field in fields(settings):
        if _is_settings(hints[field.name]):
            yield from options(hints[field.name])
        elif KEY in field.metadata:
            yield _option(field.name, hints[field.name], field.default, field.metadata[KEY])


def settings_options(settings: type) -> Callable[[Any], Any]:
    """A decorator that adds the fields of a settings class as options of a plain command."""

    def decorate(function: Any) -> Any:
        own = list(options(settings))[::-1]  # click collects options from the last decorator on
        function.__click_params__ = [*getattr(function, "__click_params__", []), *own]
        return function

    return decorate


def _is_settings(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Settings)


def _option(name: str, hint: Any, default: Any, about: Option) -> click.Option:
    dashed = name.replace("_", "-")
    words = [f"--{dashed}", *([f"-{about.short}"] if about.short else [])]
    more: dict[str, Any] = {}
    if about.read is not None:
        hint, default = str, ",".join(map(str, default)) if about.default_text is None else about.default_text
    elif get_origin(hint) is tuple:
        hint, *others = get_args(hint)
        more = {"multiple": True} if Ellipsis in others else {"nargs": 1 + len(others)}
    kinds = get_args(hint) or (hint,)
    if bool in kinds and (default or about.both):
        words[0] += f"/--no-{dashed}"
    kind: Any = kinds[0]
    if Path in kinds:
        kind = click.Path(path_type=Path)
    elif about.choices:
        kind = click.Choice(about.choices)
    elif about.least is not None:
        kind = (click.IntRange if kind is int else click.FloatRange)(about.least, about.most)
    elif kind is bool:
        kind, more = None, {"is_flag": True}
    usual = None if default is MISSING or default == "" else default
    return click.Option(words, type=kind, default=usual, show_default=True, help=about.help, **more)


def arguments(settings: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of options as arguments of a settings class."""
    hints: dict[str, Any] = get_type_hints(settings)
    values: dict[str, Any] = {}
    for field in fields(settings):
        about: Any = field.metadata.get(KEY)
        if _is_settings(within := hints[field.name]):
            values[field.name] = within(**arguments(within, given))
        elif field.name in given:
            value = given[field.name]
            values[field.name] = about.read(value) if about.read else value
        elif about is not None and field.default is MISSING:
            name = field.name.replace("_", "-")
            raise InputError(f"--{name} is missing; name it on the command line or in FILE.toml")
    return values


def study_help(study: str) -> str:
    """The help text of a study's command, with \\b before paragraphs that are not wrapped."""
    text = files("heatproof.studies").joinpath(study, "help.txt").read_text(encoding="utf-8")
    return text.replace("\\b\n", "\b\n")


def finish_study(
    ctx: click.Context, page: Path, failed: object, before: str = "",
    broken: Sequence[Mapping[str, str]] = (), tables: Iterable[Table] = (),
) -> None:  # fmt: skip
    """Print images that could not be used, tables and where the page is; exit with 1 if something failed."""
    if broken:
        errors.print(broken_table(broken))
    for table in tables:
        console.print(terminal_table(table))
    say(f"{before}the page: {page}")
    if failed:
        ctx.exit(1)


def terminal_table(table: Table) -> Grid:
    """A study's table on the terminal, without its intervals."""
    texts = [[table.text(i, j, interval=False) for j in range(len(row))] for i, row in enumerate(table.rows)]
    return new_table(table.title, [column.name for column in table.columns], texts)
