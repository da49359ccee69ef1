"""The page of a study: a Markdown template filled with text, tables and figures, with their files beside it.

OUT/summary.md      the page
OUT/tables/         each table as Markdown, CSV and LaTeX
OUT/figures/        each figure as SVG, PDF and PNG
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heatproof.disk import write_whole
from heatproof.report.figures import save
from heatproof.report.pieces import TEMPLATES
from heatproof.report.tables import Table, cell_text

TEMPLATES.filters["cell"] = cell_text


@dataclass
class MarkdownReport:
    """A page and the tables and figures that were written with it."""

    folder: Path
    tables: dict[str, Table] = field(default_factory=dict)
    figures: list[str] = field(default_factory=list)  # names

    @property
    def page(self) -> Path:
        return self.folder / "summary.md"

    def write(
        self, template: str, tables: Iterable[Table | None] | Callable[[str], Table | None] = (),
        figures: Mapping[str, AbstractContextManager[Any]] | None = None, **content: Any,
    ) -> Path:  # fmt: skip
        """Fill a template and write it as summary.md, completely or not at all.

        In the template, table("name") and figure("name", "caption") write the files of a table or figure and
        insert it, or nothing if it is not given.

        Args:
            template: its path below the package, such as studies/cose/page.md.
            tables: or a function that makes them by name.
            figures: by name, as the functions of report/figures.py return them.
            content: what else the template names.
        """
        make = tables if callable(tables) else {table.name: table for table in tables if table}.get

        def table(name: str) -> str:
            if (made := make(name)) is None:
                return ""
            made.write(self.folder / "tables")
            self.tables[made.name] = made
            return made.markdown().strip()

        def figure(name: str, caption: str) -> str:
            if name not in (figures or {}):
                return ""
            with (figures or {})[name] as drawn:
                save(drawn, self.folder / "figures", name)
            self.figures.append(name)
            return f"![{caption}](figures/{name}.png)\n\n*{caption}*"

        text = TEMPLATES.get_template(template).render(table=table, figure=figure, **content)
        write_whole({self.page: re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"})
        return self.page
