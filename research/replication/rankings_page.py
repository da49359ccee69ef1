"""Tables, figure and page of the rankings.

    pairs.csv          one row per pair of networks, with those whose planting failed
    scores.csv         one row per planted pair, score and method
    correlations.csv   one row per two scores: mean rank correlation over pairs of networks, with an interval

`write_tables` needs stored results, `page` only these files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from heatproof.disk import write_whole
from research.calibration.collect import FLOORS
from research.replication.pages import FOLDER, RESULTS, as_csv, as_table, read_table
from research.replication.rankings import (
    CURVES,
    IMAGES,
    METHODS,
    METRICS,
    STEPS,
    TRANSFORMED,
    TRUTHS,
    correlation_rows,
    pair_rows,
    score_rows,
)

OWN = f"{FOLDER}/rankings"
PLAIN, CONTROLLED = "methods", "methods and controls"
TEMPLATE = Path(__file__).with_name("rankings.md")
COMMAND = (
    "python -m research.replication rank-prepare --data DATA --out PACKED\n"
    "    python -m research.replication rank --data PACKED --out PAIRS --device cuda --processes 5\n"
    "    python -m research.replication rank-tables PAIRS/results.json.gz\n"
    "    python -m research.replication pages"
)
SHORT = {"object inside": "object\ninside", "object pointing": "object\npointing"}
Row = Mapping[str, Any]


def write_tables(results: Sequence[Row], out: Path = RESULTS / OWN) -> None:
    """Write all CSV files and the figure."""
    scores = score_rows(results)
    correlations = [row for controls in (False, True) for row in correlation_rows(scores, controls)]
    tables = {"pairs": pair_rows(results), "scores": scores, "correlations": correlations}
    write_whole({out / f"{name}.csv": as_csv(rows) for name, rows in tables.items()})
    draw_figure(read_table("correlations", out), out / "rankings.png")


def draw_figure(rows: Sequence[Row], path: Path) -> None:
    """Left: correlations of all scores, truths first. Right: those with each truth, with intervals."""
    from matplotlib.figure import Figure

    known = [row for row in rows if row["ranked"] == PLAIN and row["rho"]]
    names = [n for n in (*TRUTHS, *METRICS) if any(n in (row["first"], row["second"]) for row in known)]
    values = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(values, 1)
    for row in known:
        i, j = names.index(row["first"]), names.index(row["second"])
        values[i, j] = values[j, i] = float(row["rho"])
    figure = Figure((11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    left.imshow(values, cmap="RdBu", vmin=-1, vmax=1)
    labels = [SHORT.get(name, name) for name in names]
    left.set_xticks(range(len(names)), labels, rotation=60, ha="right", fontsize=8)
    left.set_yticks(range(len(names)), labels, fontsize=8)
    for i, j in np.argwhere(np.isfinite(values)):
        colour = "white" if abs(values[i, j]) > 0.6 else "black"
        left.text(j, i, f"{values[i, j]:.1f}", ha="center", va="center", fontsize=7, color=colour)
    for edge in (left.axhline, left.axvline):
        edge(len(TRUTHS) - 0.5, color="black", lw=1)
    left.set_title("mean rank correlation over pairs of networks", fontsize=9)
    metrics = [name for name in names if name in METRICS]
    for shift, truth, colour in ((-0.12, TRUTHS[0], "#4477aa"), (0.12, TRUTHS[1], "#cc6677")):
        own = {row["second"]: row for row in known if row["first"] == truth}
        for i, metric in enumerate(metrics):
            if metric in own:
                low, rho, high = (float(own[metric][key]) for key in ("low", "rho", "high"))
                right.plot([low, high], [i + shift] * 2, color=colour, lw=2)
                label = truth if i == 0 else None
                right.plot(rho, i + shift, "o", color=colour, label=label, ms=5)
    right.axvline(0, color="grey", ls=":")
    right.set_yticks(range(len(metrics)), metrics, fontsize=8)
    right.invert_yaxis()
    right.set_xlim(-1, 1)
    right.set_xlabel("rank correlation with the truth (95 % over pairs of networks)", fontsize=9)
    right.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    figure.savefig(path, dpi=95)


def page(folder: Path = RESULTS / OWN) -> str:
    """The page, from the CSV files of a folder."""
    pairs, rows = read_table("pairs", folder), read_table("correlations", folder)
    planted = [row for row in pairs if int(row["planted"])]
    counts, held = (Counter((r["network"], r["data"]) for r in table) for table in (pairs, planted))
    population = as_table(("network", "images", "pairs", "planted"), (
        [network, data, str(n), str(held[network, data])] for (network, data), n in sorted(counts.items())
    ))  # fmt: skip
    return TEMPLATE.read_text("utf-8").format(
        answer=_answer(rows), pairs=len(pairs), planted=len(planted), population=population,
        methods=len(METHODS), names=", ".join(f"`{m}`" for m in METHODS), controls=", ".join(FLOORS),
        truths=_truth_table(rows), among=_among(rows), matrix=_matrix(rows), images=IMAGES,
        steps=STEPS, curves=CURVES, transformed=TRANSFORMED, folder=OWN, command=COMMAND,
    )  # fmt: skip


def _of(rows: Sequence[Row], first: str, second: str, ranked: str = PLAIN) -> Row | None:
    """The row of two scores; None where no pair of networks has both."""
    for row in rows:
        if {row["first"], row["second"]} == {first, second} and row["ranked"] == ranked and row["rho"]:
            return row
    return None


def above(row: Row | None) -> bool:
    return row is not None and float(row["low"]) > 0


def below(row: Row | None) -> bool:
    return row is not None and float(row["high"]) < 0


def undecided(row: Row | None) -> bool:
    return row is not None and not above(row) and not below(row)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _answer(rows: Sequence[Row]) -> str:
    """Which metrics rank as the truths do, without controls."""

    def metrics(test: Callable[[Row | None], bool], *truths: str) -> list[str]:
        return [m for m in METRICS if all(test(_of(rows, truth, m)) for truth in truths)]

    sentences = [
        "Metrics whose ranking of methods agrees with both truths (interval above 0): "
        f"{_listed(metrics(above, *TRUTHS))}."
    ]
    for truth in TRUTHS:
        kinds = {"agree": above, "opposite": below, "undecided": undecided}
        own = (f"{name}: {_listed(metrics(test, truth))}" for name, test in kinds.items())
        sentences.append(f"With *{truth}*, {'; '.join(own)}.")
    if both := _of(rows, *TRUTHS):
        sentences.append(f"Rank correlation of the two truths: {_interval(both)}.")
    return " ".join(sentences)


def _among(rows: Sequence[Row]) -> str:
    """How often two metrics agree, without truths and controls."""
    own = [row for first, second in combinations(METRICS, 2) if (row := _of(rows, first, second))]
    if not own:
        return "No two metrics were measured for the same pair of networks."
    agree, opposite = sum(map(above, own)), sum(map(below, own))
    median = float(np.median([float(row["rho"]) for row in own]))
    return (
        f"Of {len(own)} combinations of two metrics, {agree} rank the methods alike (interval above 0), "
        f"{opposite} in opposite order (below 0), and {sum(map(undecided, own))} are undecided; the median "
        f"correlation is {median:.2f}."
    )


def _interval(row: Row | None) -> str:
    if row is None:
        return ""
    rho, low, high = (_signed(row[key]) for key in ("rho", "low", "high"))
    return f"{rho} ({low} to {high})"


def _signed(text: str) -> str:
    return f"{round(float(text), 2) + 0.0:+.2f}"  # without -0.00


def _truth_table(rows: Sequence[Row]) -> str:
    """A row per metric: its correlations with both truths, without and with the controls."""
    head = ("metric", "from", *(f"{truth}, {ranked}" for ranked in (PLAIN, CONTROLLED) for truth in TRUTHS),
            "pairs of networks")  # fmt: skip
    table = []
    for metric, source in METRICS.items():
        own = [_of(rows, truth, metric, ranked) for ranked in (PLAIN, CONTROLLED) for truth in TRUTHS]
        if any(own):
            pairs = max(int(row["pairs"]) for row in own if row)
            table.append([metric, source, *map(_interval, own), str(pairs)])
    return as_table(head, table)


def _matrix(rows: Sequence[Row]) -> str:
    names = [*TRUTHS, *METRICS]
    table = []
    for name in names:
        cells = [_of(rows, name, other) for other in names]
        table.append([name, *("" if row is None else _signed(row["rho"]) for row in cells)])
    return as_table(("", *names), table)
