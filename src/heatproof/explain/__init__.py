"""Every explanation method, one file per family. A new file here is a new method; nothing else is edited."""

from heatproof.explain.api import explain

__all__ = ["explain"]
