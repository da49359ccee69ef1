"""The page of a QR study: tables, figures, and answers to the paper's four questions with their numbers.

An answer counts methods and regimes whose 95 % intervals lie apart. Over several seeds the intervals are
those over seeds, else those over codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from PIL import Image

from heatproof.explain.floors import is_floor
from heatproof.images.distort import DISTORTIONS, SEVERITIES
from heatproof.metrics import rank_correlation
from heatproof.report import figures
from heatproof.report.figures import COLOURS, GREY, MARKERS, Line, Panel, line_style
from heatproof.report.markdown_report import MarkdownReport
from heatproof.report.panels import Tile, sheet
from heatproof.report.tables import Cell, Table, Value, number
from heatproof.show import overlay
from heatproof.store import RunFolder
from heatproof.studies.qr.results import (
    SCORES,
    TABLES,
    Results,
    apart,
    compared,
    mean_curves,
    ours,
    over_seeds,
    tables,
)
from heatproof.studies.qr.trainings import BASE, depth_name, uses_proxy
from heatproof.studies.settings import MAIN
from heatproof.train import DEPTHS, REGIMES

NEAR_ALL = 0.99  # accuracy of every regime, the paper's premise: it reports 99.2 % and more
LEAST_POINTS = 0.01  # of accuracy that FT-LeakMin may cost
EMPTIED = 0.01  # more all-zero maps than this are reported
TUNED = REGIMES[1:]  # FT-Struct and FT-LeakMin
MAX_CODES = 3  # of the sheet of examples
METHODS = ("gradcam", "layercam", "eigengradcam")  # in it, if they are among the methods
WIDE = 10  # slowest over fastest, from which on an axis of times is logarithmic
Tables = Mapping[str, Table]


def write_page(
    out: Path, seeds: Sequence[Results], others: Mapping[str, Path] | None = None
) -> MarkdownReport:
    """Write the page; that of the first of several seeds is complete.

    others: by network, folders of finished studies of the same codes.
    """
    first, every = seeds[0], [tables(results) for results in seeds]
    settings, own = first.settings, every[0]
    main: Tables = own
    if len(seeds) > 1:
        main = {name: over_seeds([of[name] for of in every]) for name in own}
    if settings.figures:
        draw_examples(first, out)
    both = compared(settings.model, own["table-2"], others or {})
    book = MarkdownReport(out)
    book.write(
        "studies/qr/page.md", [*main.values(), *own.values(), *both],
        draw_figures(first, own) if settings.figures else {}, settings=settings, results=first,
        seeds=len(seeds), agreement=agreement(main), depths=depths(main, settings.detailed[0]),
        leakage=leakage(main["table-2"]), robustness=robustness(main), floors=floors(main["table-2"]),
        flipped=flipped([of["table-2"] for of in every]),
        proxy=first.accuracy(BASE) if uses_proxy(settings) else None,
        accuracy={name: first.accuracy(name) for name in REGIMES}, near=NEAR_ALL,
        orders=both[1].rows if both else (),
        guidance=guidance(main, settings.detailed[0]),
        headings={name: TABLES.content[name].get("heading") for name in own},
    )  # fmt: skip
    return book


def guidance(main: Tables, method: str) -> dict[str, Any]:
    """Best method, depth, lambda and alpha by the mass score of Figure 5, and what speaks against them."""
    masses = [real(main["coverage"], regime, "mass score") for regime in TUNED]
    order = sorted(((sum(number(of[m]) for of in masses) / len(masses), m) for m in masses[0]), key=_rank)
    leaks = {r: ours(main["table-2"], r, "BL") for r in TUNED}
    leaky = [m for _, m in order if all(apart(of[m], of["random"]) >= 0 for of in leaks.values())]
    deep = [(number(ours(main["table-5"], d, "mass score")[method]), d) for d in DEPTHS if "table-5" in main]
    cells = []
    if "table-6" in main:
        table = main["table-6"]
        names = [column.name for column in table.columns]
        ranked = (row for i, row in enumerate(table.rows) if i not in table.unranked and row[1] == method)
        rows = [dict(zip(names[2:], map(number, row[2:]), strict=True)) for row in ranked]
        start = next(row for row in rows if row["lambda"] == 0)
        free = (
            row for row in rows
            if start["accuracy"] - row["accuracy"] <= LEAST_POINTS + 1e-9
            and row["empty maps"] <= start["empty maps"] + EMPTIED
        )  # fmt: skip
        cells = sorted(((row["mass score"], row["lambda"], row["alpha"]) for row in free), key=_rank)
    return {"order": order, "leaky": leaky, "depths": sorted(deep, key=_rank), "cells": cells}


def _rank(scored: Sequence[Any]) -> float:
    """Key that sorts the highest score first and undefined ones last."""
    return math.inf if math.isnan(scored[0]) else -scored[0]


def agreement(main: Tables) -> dict[str, Any]:
    """RQ1: correlations of masses with drops beside those of random maps, and of scores with areas."""
    parts, orders = [], []
    for mass, part, what in (("FMR", "finder", "finders"), ("TMR", "timing", "timing")):
        column = f"rho({mass}, drop without {part})"
        random = {regime: ours(main["table-4"], regime, column)["random"] for regime in REGIMES}
        cells = [(cell, random[r]) for r in REGIMES for cell in real(main["table-4"], r, column).values()]
        signs = [apart(cell, Value(0, (0, 0))) for cell, _ in cells]
        parts.append({
            "what": f"{mass} with the drop without {what}", "pairs": len(cells), "random": random.values(),
            "rhos": [rho for rho in (number(cell) for cell, _ in cells) if not math.isnan(rho)],
            "above": signs.count(1), "below": signs.count(-1),
            "beyond": sum(apart(*both) > 0 for both in cells),
        })  # fmt: skip
    for regime, column in product(REGIMES, ("insertion", "deletion")):
        score = ours(main["coverage"], regime, "StructureScore")
        area = ours(main["faithfulness"], regime, column)
        rho = rank_correlation([number(score[m]) for m in score], [number(area[m]) for m in score]).rho
        orders.append((rho, column, regime))
    return {"parts": parts, "orders": orders, "methods": len(score)}


def depths(main: Tables, method: str) -> list[dict[str, Any]]:
    """RQ2: from Table 5, or from the two of its rows that are regimes."""
    groups = [(depth, main["table-2"], depth_name(depth)) for depth in DEPTHS[:2]]
    if "table-5" in main:
        groups = [(depth, main["table-5"], depth) for depth in DEPTHS]
    rows: list[dict[str, Any]] = []
    for depth, table, group in groups:
        cells = {column: ours(table, group, column)[method] for column in ("FMR", "BL", "DtS")}
        start = rows[0]["cells"] if rows else cells
        moved = {column: apart(cells[column], start[column]) for column in ("FMR", "BL")}
        rows.append({"depth": depth, "cells": cells, "moved": moved})
    return rows


def leakage(table: Table) -> dict[str, Any]:
    """RQ3: FT-LeakMin against FT-Struct, method by method."""

    def both(column: str) -> dict[str, tuple[Cell, Cell]]:
        old, new = (real(table, regime, column) for regime in TUNED)
        return {method: (old[method], new[method]) for method in old}

    struct, leakmin = (number(cell) for cell in next(iter(both("accuracy").values())))
    empty = {method: (number(old), number(new)) for method, (old, new) in both("empty maps").items()}
    return {
        "leaks": both("BL"),
        "moved": {
            (column, way): [m for m, (old, new) in both(column).items() if apart(new, old) == way]
            for column, way in product(("BL", "FMR", "TMR"), (-1, 1))
        },
        "emptied": {m: (old, new) for m, (old, new) in empty.items() if new > old + EMPTIED},
        "accuracy": (struct, leakmin),
        "within": struct - leakmin <= LEAST_POINTS + 1e-9,
    }


def robustness(main: Tables) -> dict[str, Any]:
    """RQ4: means over methods by regime, and distortions by growth of leakage."""

    def mean(name: str, regimes: Iterable[str], column: str) -> float:
        cells = (number(cell) for r in regimes for cell in real(main[name], r, column).values())
        known = [value for value in cells if not math.isnan(value)]
        return sum(known) / len(known) if known else math.nan

    regimes = []
    for regime in REGIMES:
        means = (mean("table-3", [regime], c) for c in ("BL slope", "FMR-AURC", "TMR-AURC"))
        empty = {m: number(cell) for m, cell in real(main["table-3"], regime, "empty maps").items()}
        most = max(empty, key=empty.__getitem__)
        regimes.append((regime, *means, empty[most], most))
    kinds = (name.replace("_", " ") for name in DISTORTIONS)
    growth = [(kind, mean("distortions", REGIMES, kind)) for kind in kinds]
    known = [pair for pair in growth if not math.isnan(pair[1])]
    return {"regimes": regimes, "growth": sorted(known, key=lambda pair: -pair[1])}


def floors(table: Table) -> list[tuple[str, dict[str, int], int]]:
    """By column: number of methods that score better than each map that ignores the network."""
    counted = []
    for column, better in SCORES.items():
        of = {regime: ours(table, regime, column) for regime in REGIMES}
        pairs = [(r, cell) for r in REGIMES for cell in real(table, r, column).values()]
        counts = {
            floor: sum(apart(cell, of[regime][floor]) == better for regime, cell in pairs)
            for floor in filter(is_floor, of[REGIMES[0]])
        }
        counted.append((column, counts, len(pairs)))
    return counted


def flipped(seeds: Sequence[Table]) -> list[str]:
    """Pairs of methods that two seeds rank in opposite orders, each beyond its intervals over codes."""
    pairs = []
    for column, regime in product(SCORES, REGIMES):
        cells = [ours(table, regime, column) for table in seeds]
        for a, b in product(cells[0], repeat=2):
            if a < b and {-1, 1} <= {apart(of[a], of[b]) for of in cells}:
                pairs.append(f"{column}: {a} and {b} under {regime}")
    return pairs


def real(table: Table, group: str, column: str) -> dict[str, Cell]:
    """Our cells without the floors."""
    return {m: cell for m, cell in ours(table, group, column).items() if not is_floor(m)}


def draw_figures(results: Results, made: Tables) -> dict[str, Any]:
    """Structure against time, BL against severity, and FMR and BL against what was trained."""
    method, panels, depths = results.settings.detailed[0], [], []
    curves = {regime: mean_curves(results.curves(regime, method, "bl")) for regime in REGIMES}
    for k, kind in enumerate(DISTORTIONS):
        lines = [Line(SEVERITIES, of[k], r, line_style(i)) for i, (r, of) in enumerate(curves.items())]
        axes = {"title": kind.replace("_", " "), "xlabel": "severity", "ylabel": f"BL, {method}"}
        panels.append(Panel(lines, axes))
    grid, shared = [panels[:3], panels[3:]], {"sharex": True, "sharey": True}
    drawn = {
        "figure-5": pareto_figure(made),
        "distortions": figures.lines(grid, 7.4, 4.4, "upper center", **shared),
    }
    if "table-5" in made:
        x = range(len(DEPTHS))
        for column in ("FMR", "BL"):
            cells = [ours(made["table-5"], depth, column)[method] for depth in DEPTHS]
            ends = [getattr(cell, "interval", None) or (math.nan, math.nan) for cell in cells]
            low, high = zip(*ends, strict=True)
            paper = [number(ours(made["table-5"], depth, column, paper=True)[MAIN]) for depth in DEPTHS]
            lines = [
                Line(x, [*map(number, cells)], method, line_style(0), (low, high)),
                Line(x, paper, "published", line_style(1, linestyle="--")),
            ]
            ticks = {"xticks": x, "xticklabels": DEPTHS, "xlabel": "trained"}
            depths.append(Panel(lines, {"title": column, **ticks}))
        drawn["figure-4"] = figures.lines([depths], 6.6, 3.2, "upper center")
    return drawn


def pareto_figure(made: Tables) -> Any:
    """Structure against time, ours and published: their times are of other machines.

    The line joins the points that no other is both faster and better than.
    """
    titles = {False: "measured here", True: str(made["coverage"].rows[-1][0]).replace("paper", "published")}
    panels, colours = [], dict[str, str]()

    def mark(colour: str, regime: str = REGIMES[0]) -> dict[str, Any]:
        return {"color": colour, "marker": MARKERS[REGIMES.index(regime)], "linestyle": "", "markersize": 6}

    for paper, title in titles.items():
        lines, points = [], []
        for regime in REGIMES:
            scores = ours(made["coverage"], regime, "mass score", paper)
            for method, score in scores.items():
                time = number(ours(made["table-2"], regime, "ms/image", paper)[method])
                if not is_floor(method):
                    colours.setdefault(method, COLOURS[len(colours) % len(COLOURS)])
                    points.append((time, number(score)))
                style = mark(colours.get(method, GREY), regime)
                lines.append(Line([time], [number(score)], style=style))
        best = frontier(points)
        joined = {"color": "black", "linewidth": 0.8, "alpha": 0.5}
        times = [line.x[0] for line in lines if not math.isnan(line.x[0])]
        scale = "log" if times and max(times) > WIDE * min(times) else "linear"
        axes = {"title": title, "xlabel": "ms per image", "xscale": scale}
        lines.append(Line([time for time, _ in best], [score for _, score in best], style=joined))
        panels.append(Panel(lines, axes | {"ylabel": "FMR + TMR - 3 BL - DtS"}))
    legend = [Line([], [], m, mark(colour)) for m, colour in (colours | {"floors": GREY}).items()]
    legend += [Line([], [], r, mark("black", r) | {"markerfacecolor": "white"}) for r in REGIMES]
    panels[0] = Panel([*panels[0].lines, *legend], panels[0].axes)
    return figures.lines([panels], 3.4 * len(panels) + 1.9, 3.6)


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Times and scores that no other is both faster and better than, by time.

    >>> frontier([(3, 0.5), (1, 0), (2, 1), (2, math.nan)])
    [(1, 0), (2, 1)]
    """
    best: list[tuple[float, float]] = []
    for time, score in sorted((p for p in points if not math.isnan(sum(p))), key=lambda p: (p[0], -p[1])):
        if not best or score > best[-1][1]:
            best.append((time, score))
    return best


def draw_examples(results: Results, out: Path) -> None:
    """Write OUT/figures/examples.png, maps of the first codes."""
    maps = RunFolder.open(out / "run").maps()
    methods = [m for m in METHODS if m in results.settings.real] or list(results.settings.real[:2])
    rows = []
    for image in sorted(results.column("zs", methods[0], "bl"))[:MAX_CODES]:
        with Image.open(out / "data" / "test" / image) as file:
            picture = file.convert("RGB")
        row = [Tile(picture, "code")]
        for method, regime in product(methods, REGIMES):
            own = maps.read(regime, method, [image])
            heat = own.upsample((picture.height, picture.width))[0]
            leak = results.column(regime, method, "bl")[image]
            answer = results.column(regime, "", "predicted")[image]
            wrong = "" if answer == int(own.explained[0]) else " (predicted: no code)"
            note = f"{regime}, {'empty map' if math.isnan(leak) else f'BL {leak:.2f}'}"
            row.append(Tile(overlay(picture, heat), f"{method}{wrong}", note))
        rows.append(row)
    path = out / "figures" / "examples.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet(rows, heading="explains: code (true label)", cmap="inferno", side=160).save(path)
