"""Publication figures, one file per protocol; here is what they share: the style, and how a figure is saved.

matplotlib is an extra and is imported when a figure is drawn. Colours keep apart for the colour-blind (the
Okabe-Ito set) and maps are perceptually uniform.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heatproof.errors import need

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
STYLE = {
    "figure.dpi": 110,
    "savefig.bbox": "tight",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "heatproof",  # the same figure is the same file
    "pdf.fonttype": 42,
}
FORMATS = ("svg", "pdf", "png")


def line_style(number: int) -> dict[str, Any]:
    """Colour and mark of one of several lines."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


@contextmanager
def drawing(
    width: float = 6.4, height: float = 3.6, rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[Any]:
    """A matplotlib figure and its axes in our style, closed afterwards; never opens a window.

    with drawing() as (figure, axes): ...
    """
    matplotlib = need("matplotlib", "plots")
    pyplot = need("matplotlib.pyplot", "plots")
    with matplotlib.rc_context({**STYLE, "axes.prop_cycle": matplotlib.cycler(color=COLOURS)}):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(width, height), layout="constrained", **options
        )
        try:
            yield figure, axes
        finally:
            pyplot.close(figure)


def save(figure: Any, folder: str | Path, name: str) -> list[Path]:
    """NAME.svg, NAME.pdf and NAME.png in this folder; no date inside, so the same figure is the same file."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    files = {suffix: folder / f"{name}.{suffix}" for suffix in FORMATS}
    for suffix, path in files.items():
        figure.savefig(path, metadata=dates.get(suffix, {}))
    return list(files.values())
