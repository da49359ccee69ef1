"""Every explanation method, one file per family. A new file here is a new method; nothing else is edited."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time the package looks it up (heatproof/__init__.py)
    from heatproof.explain.api import explain as explain
