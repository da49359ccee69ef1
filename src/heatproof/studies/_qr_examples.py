"""A sheet of codes with their maps, so that the numbers can be looked at."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from heatproof.report.panels import Tile, sheet
from heatproof.show import overlay
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
                found = maps.read(regime, method, [image])
                heat = found.upsample((picture.height, picture.width))[0]
                leak = results.column(regime, method, "bl")[image]
                said = results.column(regime, "", "predicted")[image]
                wrong = "" if said == int(found.explained[0]) else " (says: no code)"
                row.append(Tile(overlay(picture, heat), f"{method}{wrong}", f"{regime}, BL {leak:.2f}"))
        rows.append(row)
    path = out / "figures" / "examples.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    heading = "explains: code (true label)"
    sheet(rows, heading=heading, cmap="inferno", side=160).save(path)
    shown = "The first codes and their maps, which explain the class code (the true label)."
    return f"![codes and their maps](figures/examples.png)\n\n*{shown}*"
