"""How networks are named: a name of ours, of a library, or a file."""

from __future__ import annotations

import os
from pathlib import Path

LITE = ("lite0", "efficientnet-lite0", "efficientnet_lite0")
PRECISIONS = ("fp32", "tf32", "bf16")  # see precision.py
KERAS_FILES = (".keras", ".h5", ".hdf5")


def placed_spec(spec: str, folder: Path) -> str:
    """The spec with the full path of the file or folder it names, which is relative to `folder`.

    >>> placed_spec("net.py:make", Path("/studies")), placed_spec("lite0", Path("/studies"))
    ('/studies/net.py:make', 'lite0')
    """
    library, _, name = spec.partition(":")
    path, _, factory = spec.rpartition(":")
    if path.endswith(".py"):
        return f"{_placed(path, folder)}:{factory}"
    if library == "hf" and _placed(name, folder).exists():
        return f"hf:{_placed(name, folder)}"
    return str(_placed(spec, folder)) if spec.endswith(KERAS_FILES) else spec


def _placed(path: str, folder: Path) -> Path:
    return Path(os.path.abspath(folder / Path(path).expanduser()))
