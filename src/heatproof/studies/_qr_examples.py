"""A sheet of codes with their maps, so that the numbers can be looked at."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from heatproof.report.panels import Tile, overlay, sheet
from heatproof.store import RunFolder
from heatproof.studies._qr_results import Results
from heatproof.train import REGIMES

SHOWN = 3  # codes
METHODS = ("gradcam", "layercam", "eigengradcam")  # in the sheet, where they were asked for


def examples(results: Results, out: Path) -> str:
    """Writes OUT/figures/examples.png; the Markdown that shows it."""
    maps = RunFolder.open(out / "run").maps()
    methods = [m for m in METHODS if m in results.real] or list(results.real[:2])
    rows = []
    for image in sorted(results.column("zs", methods[0], "bl"))[:SHOWN]:
        with Image.open(out / "data" / "test" / image) as file:
            picture = file.convert("RGB")
        row = [Tile(picture, "code")]
        for method in methods:
            for regime in REGIMES:
                heat = maps.read(regime, method, [image]).upsample((picture.height, picture.width))[0]
                leak = results.column(regime, method, "bl")[image]
                row.append(Tile(overlay(picture, heat), method, f"{regime}, BL {leak:.2f}"))
        rows.append(row)
    path = out / "figures" / "examples.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet(rows, cmap="inferno", side=160).save(path)
    return "![codes and their maps](figures/examples.png)\n\n*The first codes and their maps.*"
