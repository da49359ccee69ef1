"""For the API reference: headings of examples as in the Google style, and functions that a function made."""

from __future__ import annotations

import re
import textwrap
from importlib import import_module
from typing import Any

import griffe

PROMPT = re.compile(r"^>>> .*?(?=\n\n(?!>>> )|\Z)", re.MULTILINE | re.DOTALL)


class Examples(griffe.Extension):
    """Put the heading "Examples:" before the examples of a docstring."""

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        """Read metrics that `members` makes, which are assignments in the source, from the functions."""
        if any("members(" in str(own.value) for own in mod.attributes.values()):
            import_module(mod.path)  # griffe reads what is imported, and imports with another sys.path
            for name, own in griffe.inspect(mod.path).members.items():
                known = mod.members.get(name)
                if not own.is_alias and own.is_function and (known is None or known.is_attribute):
                    mod.set_member(name, own)

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
