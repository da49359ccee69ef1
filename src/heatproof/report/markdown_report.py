"""What a study says: text, tables and figures in order, as one Markdown page with its files beside it.

OUT/summary.md      the page
OUT/tables/         each table as Markdown, CSV and LaTeX
OUT/figures/        each figure as SVG, PDF and PNG
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heatproof.disk import write_whole
from heatproof.report.figures import save
from heatproof.report.pieces import TEMPLATES
from heatproof.report.tables import Table


@dataclass
class MarkdownReport:
    """The parts of a page, in the order they were added."""

    folder: Path
    title: str
    tables: dict[str, Table] = field(default_factory=dict)
    figures: dict[str, Path] = field(default_factory=dict)  # the PNG of each
    parts: list[tuple[str, Any]] = field(
        default_factory=list
    )  # kind and content, as markdown_report.md shows them

    def heading(self, text: str) -> None:
        self.parts.append(("heading", text))

    def text(self, text: str) -> None:
        """A paragraph of Markdown."""
        self.parts.append(("text", text.strip()))

    def table(self, table: Table) -> None:
        table.write(self.folder / "tables")
        self.tables[table.name] = table
        self.parts.append(("table", table))

    def figure(self, figure: Any, name: str, caption: str) -> None:
        """Save a matplotlib figure and show it with its caption."""
        files = save(figure, self.folder / "figures", name)
        self.figures[name] = files[-1]
        self.parts.append(("figure", {"name": name, "caption": caption}))

    def write(self) -> Path:
        """summary.md, whole or not at all."""
        page = self.folder / "summary.md"
        text = TEMPLATES.get_template("report/templates/markdown_report.md").render(this=self)
        write_whole({page: text})
        return page
