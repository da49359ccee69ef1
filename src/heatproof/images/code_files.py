"""Codes and their masks as files, with a manifest that the csv source reads (csv.py).

    OUT/manifest.csv             path, label (1: a code), kind, the box's corners, a mask_ column per part,
                                 and what was drawn: version, level, text, scale, quiet, top, left
    OUT/pictures/00000-qr.png
    OUT/masks/00000-finder.png   255 inside; codes only

scale, quiet, top and left describe the code before it was distorted.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from heatproof.errors import InputError
from heatproof.images.codes import QRSet, Spot
from heatproof.images.csv import CORNERS, MASK
from heatproof.images.symbols import PARTS

MANIFEST = "manifest.csv"
FOLDERS = ("pictures", "masks")
COLUMNS = (
    "path", "label", "kind", *CORNERS, *(MASK + part for part in PARTS),
    "version", "level", "text", "scale", "quiet", "top", "left",
)  # fmt: skip


def check_folder(out: Path, overwrite: bool = False) -> None:
    """The folder for new files: empty, or holding an older set that may be replaced."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; name a folder")
    if out.exists() and any(out.iterdir()) and not (overwrite and (out / MANIFEST).is_file()):
        older = "ask to overwrite it" if (out / MANIFEST).is_file() else "it holds other files"
        raise InputError(f"the folder {out} is not empty; name another ({older})")


def write_codes(
    data: QRSet, out: Path, progress: Callable[[int], None] | None = None, overwrite: bool = False
) -> Path:
    """Writes pictures, masks and the manifest, which is returned; replaces an older set only on request."""
    check_folder(out, overwrite)
    try:
        for folder in FOLDERS:
            shutil.rmtree(out / folder, ignore_errors=True)
            (out / folder).mkdir(parents=True)
        with (
            ThreadPoolExecutor() as threads,
            (out / MANIFEST).open("w", newline="", encoding="utf-8") as file,
        ):
            rows = csv.DictWriter(file, COLUMNS)
            rows.writeheader()
            for row in threads.map(lambda i: write_one(data, i, out), range(len(data.labels))):
                rows.writerow(row)
                if progress:
                    progress(1)
    except OSError as error:
        raise InputError(f"cannot write into {out}: {error.strerror or error}") from error
    return out / MANIFEST


def write_one(data: QRSet, i: int, out: Path) -> dict[str, Any]:
    """One picture's files; its row of the manifest."""
    kind, spot = str(data.kinds[i]), data.spots[i]
    path = f"pictures/{i:05d}-{kind}.png"
    Image.fromarray(data.pictures[i]).save(out / path)
    row: dict[str, Any] = {"path": path, "label": int(data.labels[i]), "kind": kind}
    row |= {name: getattr(spot, name) for name in ("scale", "quiet", "top", "left")}
    if data.labels[i]:
        row |= dict(zip(CORNERS, corners(data.masks["box"][i]), strict=True)) | about_code(spot)
        for part in PARTS:
            row[MASK + part] = f"masks/{i:05d}-{part}.png"
            Image.fromarray(data.masks[part][i]).convert("L").save(out / row[MASK + part])
    return row


def about_code(spot: Spot) -> dict[str, Any]:
    assert spot.code is not None
    return {"version": spot.code.version, "level": spot.code.level, "text": spot.code.text}


def corners(mask: np.ndarray) -> tuple[int, int, int, int]:
    """x0, y0, x1, y1 of a mask, all inside it."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])
