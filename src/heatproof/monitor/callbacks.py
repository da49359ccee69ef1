"""What the callbacks of training libraries share: the library is imported only where one is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def callback(
    module: str, hooks: type, base: Callable[[], type], called: str = "HeatproofCallback"
) -> Callable[[str], Any]:
    """A module's __getattr__ that makes HeatproofCallback, the hooks on the library's own base class."""

    def find(name: str) -> Any:
        if name != called:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        made = type(name, (hooks, base()), {"__module__": module})
        setattr(sys.modules[module], name, made)
        return made

    return find
