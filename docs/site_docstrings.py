"""For the API reference: examples of docstrings get the heading that the Google style knows."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

PROMPT = re.compile(r"^>>> .*?(?=\n\n(?!>>> )|\Z)", re.MULTILINE | re.DOTALL)


class Examples(griffe.Extension):
    """Put the heading "Examples:" before the examples of a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_heading(obj.docstring.value)


def with_heading(text: str) -> str:
    """Replace "Example:", or a missing heading, by "Examples:".

    >>> with_heading("Twice.\\n\\n>>> twice(2)\\n4")
    'Twice.\\n\\nExamples:\\n    >>> twice(2)\\n    4'
    """
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    return PROMPT.sub(lambda match: "Examples:\n" + textwrap.indent(match[0], "    "), text)
