"""Executed notebooks as pages of the site: their words, their code, and what each cell showed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def as_page(notebook: Path) -> str:
    """Markdown, with tables and pictures as the notebook holds them."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    where = f"A [notebook]({notebook.name}) as it ran; every cell runs in a test."
    head, *rest = (piece for cell in cells for piece in _pieces(cell))
    title, _, words = head.partition("\n")
    return "\n\n".join([title, where, words.strip(), *rest]) + "\n"


def _pieces(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return [source]
    return [f"```python\n{source}\n```", *filter(None, map(_shown, cell["outputs"]))]


def _shown(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    kinds = output.get("data", {})
    if "text/html" in kinds:
        return f"<div class='shown'>{''.join(kinds['text/html'])}</div>"
    if "image/png" in kinds:
        return f"![](data:image/png;base64,{''.join(kinds['image/png']).strip()})"
    return f"```text\n{''.join(kinds.get('text/plain', ''))}\n```"
