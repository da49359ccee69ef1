"""A group of commands that are imported when they are asked for, in the order in which they are used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from heatproof.errors import did_you_mean


class LateGroup(click.Group):
    """Its help imports nothing: a line about each command stands here, under the heading of its section.

    modules: what their files are called, by the name of the command; renamed: where that is another name.
    """

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Mapping[str, str]] | None = None,
        modules: str = "heatproof.cli.{}",
        renamed: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sections, self.modules, self.renamed = sections or {}, modules, renamed or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        late = [name for lines in self.sections.values() for name in lines]
        return [*late, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands or cmd_name not in self.list_commands(ctx):
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(self.modules.format(self.renamed.get(cmd_name, cmd_name)))
        found = (getattr(module, f"{cmd_name}_{kind}", None) for kind in ("command", "group"))
        return next(command for command in found if isinstance(command, click.Command))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None and args[0][:1] != "-":
            ctx.fail(f"No such command {args[0]!r}; {did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.sections:
            return super().format_commands(ctx, formatter)
        widest = max(map(len, self.list_commands(ctx)))
        for heading, lines in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(widest), line) for name, line in lines.items()])
