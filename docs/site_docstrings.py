"""For the API reference: examples of docstrings, which stand there without a heading, become its examples."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

PROMPT = re.compile(r"^>>> .*?(?=\n\n(?!>>> )|\Z)", re.MULTILINE | re.DOTALL)


class Examples(griffe.Extension):
    """Puts a heading that the Google style knows before the first prompt of a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_heading(obj.docstring.value)


def with_heading(text: str) -> str:
    """
    >>> with_heading("Twice.\\n\\n>>> twice(2)\\n4")
    'Twice.\\n\\nExamples:\\n    >>> twice(2)\\n    4'
    """
    return PROMPT.sub(lambda match: "Examples:\n" + textwrap.indent(match[0], "    "), text)
