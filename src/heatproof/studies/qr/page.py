"""The page of a QR study: tables, figures, and answers to the paper's four questions with their numbers.

An answer counts methods and regimes whose 95 % intervals lie apart. Over several seeds the intervals are
those over seeds, else those over codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from heatproof.explain.floors import is_floor
from heatproof.images.distort import DISTORTIONS, SEVERITIES
from heatproof.metrics import rank_correlation
from heatproof.report import figures
from heatproof.report.figures import COLOURS, GREY, MARKERS, Line, Panel, line_style
from heatproof.report.markdown_report import MarkdownReport
from heatproof.report.panels import Tile, sheet
from heatproof.report.tables import Cell, Table, Value, cell_text, number
from heatproof.show import overlay
from heatproof.store import RunFolder
from heatproof.studies.qr.results import TABLES, Results, apart, flips, mean_curves, ours, over_seeds, tables
from heatproof.studies.qr.settings import MAIN
from heatproof.studies.qr.trainings import BASE, depth_name, uses_proxy
from heatproof.train import DEPTHS, REGIMES

LEAST_POINTS = 0.01  # of accuracy that FT-LeakMin may cost
EMPTIED = 0.01  # more all-zero maps than this are reported
TUNED = REGIMES[1:]  # FT-Struct and FT-LeakMin
MAX_CODES = 3  # of the sheet of examples
METHODS = ("gradcam", "layercam", "eigengradcam")  # in it, if they are among the methods
PARETO = {"table-2": "ms/image", "coverage": "mass score"}
WIDE = 10  # slowest over fastest, from which on an axis of times is logarithmic
Tables = Mapping[str, Table]


def write_page(out: Path, seeds: Sequence[Results]) -> MarkdownReport:
    """Write the page; the first of several seeds is shown in full."""
    first, every = seeds[0], [tables(results) for results in seeds]
    settings, own = first.settings, every[0]
    main: Tables = own
    if len(seeds) > 1:
        main = {name: over_seeds([of[name] for of in every]) for name in own}
    answers = {
        "RQ1: do structure scores agree with causal tests?": agreement_answer(main),
        "RQ2: what does the depth of fine-tuning do?": depth_answer(settings.detailed[0], main),
        "RQ3: does a light penalty lower leakage without emptying the code?": leakage_answer(main["table-2"]),
        "RQ4: do explanations hold under distortion?": robustness_answer(main),
        "Against the floors.": floor_text(main["table-2"]),
    }
    book = MarkdownReport(out)
    book.write(
        "studies/qr/page.md", [*main.values(), *own.values()],
        draw_figures(first, own) if settings.figures else {}, settings=settings, results=first,
        seeds=len(seeds), answers=answers, order=seed_text([of["table-2"] for of in every]),
        proxy=first.accuracy(BASE) if uses_proxy(settings) else None,
        accuracy=[f"{name} {first.accuracy(name):.1%}" for name in REGIMES],
        headings={name: TABLES.content[name].get("heading") for name in own},
        examples=examples(first, out) if settings.figures else "",
    )  # fmt: skip
    return book


def agreement_answer(main: Tables) -> str:
    table, parts, orders = main["table-4"], [], []
    for mass, part, what in (("FMR", "finder", "finders"), ("TMR", "timing", "timing")):
        column, what = f"rho({mass}, drop without {part})", f"{mass} with the drop without {what}"
        blind = {regime: ours(table, regime, column)["random"] for regime in REGIMES}
        cells = [(cell, blind[regime]) for regime in REGIMES for cell in real(table, regime, column).values()]
        values = [number(cell) for cell, _ in cells if not math.isnan(number(cell))]
        if not values:
            parts.append(f"{what} is not defined here.")
            continue
        above, below = (sum(apart(cell, Value(0, (0, 0))) == side for cell, _ in cells) for side in (1, -1))
        beyond = sum(apart(cell, random) > 0 for cell, random in cells)
        parts.append(
            f"{what}: rho from {min(values):+.2f} to {max(values):+.2f}, surely positive for {above} and "
            f"surely negative for {below} of {len(cells)} pairs of regime and method; random maps get "
            f"{', '.join(cell_text(cell, '+.2f', interval=False) for cell in blind.values())}, and {beyond} "
            "pairs lie beyond theirs."
        )
    for regime in REGIMES:
        score = ours(main["coverage"], regime, "StructureScore")
        for column in ("insertion", "deletion"):
            area = ours(main["faithfulness"], regime, column)
            rho = rank_correlation([number(score[m]) for m in score], [number(area[m]) for m in score]).rho
            orders.append(f"{rho:+.2f} ({column}, {regime})")
    return (
        f"{' '.join(parts)} Large codes have large parts and lose more without them, so that even a random "
        f"map may correlate. Across the {len(score)} methods and floors, rho of the mean StructureScore with "
        f"the mean area: {', '.join(orders)}; agreement is positive for insertion and negative for deletion."
    )


def depth_answer(method: str, main: Tables) -> str:
    """From Table 5, or from the two of its rows that are regimes."""
    groups = {depth: (main["table-2"], depth_name(depth)) for depth in DEPTHS[:2]}
    if "table-5" in main:
        groups = {depth: (main["table-5"], depth) for depth in DEPTHS}
    rows = {
        depth: {column: ours(table, group, column)[method] for column in ("FMR", "BL", "DtS")}
        for depth, (table, group) in groups.items()
    }
    depths = tuple(rows)
    paths = [
        f"{name} {' → '.join(cell_text(rows[depth][name], interval=False) for depth in depths)}"
        for name in ("FMR", "BL", "DtS")
    ]
    words = {-1: "lower", 0: "no clear change", 1: "higher"}
    start = rows[depths[0]]
    moved = [
        f"{depth}: " + ", ".join(f"{c} {words[apart(rows[depth][c], start[c])]}" for c in ("FMR", "BL"))
        for depth in depths[1:]
    ]
    only = "" if len(depths) > 2 else " Deeper ones were not asked for."
    return (
        f"{method}, from {' → '.join(depths)}: {'; '.join(paths)}. Against the head alone: "
        f"{'; '.join(moved)}.{only}"
    )


def leakage_answer(table: Table) -> str:
    """Compare FT-LeakMin with FT-Struct, method by method."""

    def moved(column: str, way: int) -> list[str]:
        """Methods whose intervals do not overlap, in this direction."""
        old, new = (real(table, regime, column) for regime in TUNED)
        return [method for method in old if apart(new[method], old[method]) == way]

    before, after = (real(table, regime, "BL") for regime in TUNED)
    leaks = ", ".join(
        f"{m} {cell_text(before[m], interval=False)} → {cell_text(after[m], interval=False)}" for m in before
    )
    fallen = {name: moved(name, -1) for name in ("FMR", "TMR")}
    masses = [
        f"{name} falls for {len(fell)}" + (f" ({', '.join(fell)})" if fell else "")
        for name, fell in fallen.items()
    ]
    old, new = ({m: number(c) for m, c in real(table, r, "empty maps").items()} for r in TUNED)
    emptied = [f"{m} {old[m]:.0%} → {new[m]:.0%}" for m in old if new[m] > old[m] + EMPTIED]
    gone = (
        f"**Maps go empty**, and an empty map counts for no leakage at all: {', '.join(emptied)}."
        if emptied
        else "No method's maps go empty."
    )
    struct, leakmin = (number(next(iter(real(table, r, "accuracy").values()))) for r in TUNED)
    within = "not more" if struct - leakmin <= LEAST_POINTS + 1e-9 else "more"
    return (
        f"BL from FT-Struct to FT-LeakMin: {leaks}. It is lower beyond both intervals for "
        f"{len(moved('BL', -1))} of {len(before)} methods, higher for {len(moved('BL', 1))}. Mass on the "
        f"parts: {', '.join(masses)} of them. {gone} Accuracy {struct:.1%} → {leakmin:.1%}, {within} than "
        "one point lost."
    )


def robustness_answer(main: Tables) -> str:
    table, kinds = main["table-3"], main["distortions"]

    def mean(table: Table, regimes: Iterable[str], column: str) -> float:
        cells = (number(cell) for r in regimes for cell in real(table, r, column).values())
        known = [value for value in cells if not math.isnan(value)]
        return sum(known) / len(known) if known else math.nan

    parts = []
    for regime in REGIMES:
        slope, finder, timing = (mean(table, [regime], c) for c in ("BL slope", "FMR-AURC", "TMR-AURC"))
        empty = {m: number(cell) for m, cell in real(table, regime, "empty maps").items()}
        most = max(empty, key=empty.__getitem__)
        parts.append(
            f"{regime}: mean BL slope {slope:+.3f}, FMR-AURC {finder:.2f}, TMR-AURC {timing:.2f}, up to "
            f"{empty[most]:.0%} empty maps ({most})"
        )
    means = f"{'; '.join(parts)} (means over methods)."
    growth = {kind: mean(kinds, REGIMES, kind) for kind in (name.replace("_", " ") for name in DISTORTIONS)}
    order = sorted((kind for kind in growth if not math.isnan(growth[kind])), key=lambda kind: -growth[kind])
    if not order:
        return f"{means} Under no distortion is BL defined."
    most, least = (f"{kind} ({growth[kind]:+.3f})" for kind in (order[0], order[-1]))
    return f"{means} Growth of BL from severity 0 to 1: most under {most}, least under {least}."


def floor_text(table: Table) -> str:
    """Number of methods that score better than maps that ignore the network."""
    counted = []
    for column, better in (("BL", -1), ("FMR", 1), ("TMR", 1), ("DtS", -1)):
        of = {regime: ours(table, regime, column) for regime in REGIMES}
        pairs = [(r, cell) for r in REGIMES for cell in real(table, r, column).values()]
        counts = [
            f"{floor} by {sum(apart(cell, of[regime][floor]) == better for regime, cell in pairs)}"
            for floor in filter(is_floor, of[REGIMES[0]])
        ]
        counted.append(f"{column}: {', '.join(counts)} of {len(pairs)}")
    return f"Beaten beyond both intervals, of pairs of regime and method: {'; '.join(counted)}."


def seed_text(seeds: Sequence[Table]) -> str:
    """Whether the order of methods depends on the seed."""
    flipped = [
        f"{column}: {a} and {b} under {regime}"
        for column in ("BL", "FMR", "TMR", "DtS")
        for regime, a, b in flips(seeds, column)
    ]
    if not flipped:
        return (
            "No two methods whose intervals over codes lie apart change places from one seed to another, in "
            "BL, FMR, TMR or DtS."
        )
    return (
        f"{len(flipped)} pairs of methods change places between seeds although their intervals over codes "
        f"lie apart, so those orders belong to a training and not to the methods: {'; '.join(flipped)}."
    )


def real(table: Table, group: str, column: str) -> dict[str, Cell]:
    """Our cells without the floors."""
    return {m: cell for m, cell in ours(table, group, column).items() if not is_floor(m)}


def draw_figures(results: Results, made: Tables) -> dict[str, Any]:
    method = results.settings.detailed[0]
    drawn = {"figure-5": pareto_figure(made), "distortions": distortion_figure(results, method)}
    if "table-5" in made:
        drawn["figure-4"] = depth_figure(made["table-5"], method)
    return drawn


class Point(NamedTuple):
    """A method under a regime: milliseconds per image, StructureScore."""

    method: str
    regime: str
    time: float
    score: float


def pareto_figure(made: Tables) -> Any:
    """Structure against time, ours and published: their times are of other machines.

    The line joins the points that no other is both faster and better than.
    """
    titles = {False: "measured here", True: str(made["coverage"].rows[-1][0]).replace("paper", "published")}
    panels, colours = [], dict[str, str]()
    for paper, title in titles.items():
        points = [
            Point(m, r, *(number(ours(made[t], r, c, paper)[m]) for t, c in PARETO.items()))
            for r in REGIMES
            for m in ours(made["coverage"], r, "mass score", paper)
        ]
        for m in dict.fromkeys(point.method for point in points if not is_floor(point.method)):
            colours.setdefault(m, COLOURS[len(colours) % len(COLOURS)])
        lines = [
            Line([p.time], [p.score], style=_mark(colours.get(p.method, GREY), p.regime)) for p in points
        ]
        best = frontier([p for p in points if not is_floor(p.method)])
        joined = {"color": "black", "linewidth": 0.8, "alpha": 0.5}
        lines.append(Line([p.time for p in best], [p.score for p in best], style=joined))
        times = [p.time for p in points if not math.isnan(p.time)]
        scale = "log" if times and max(times) > WIDE * min(times) else "linear"
        axes = {"title": title, "xlabel": "ms per image", "xscale": scale}
        panels.append(Panel(lines, axes | {"ylabel": "FMR + TMR - 3 BL - DtS"}))
    legend = [Line([], [], m, _mark(colour)) for m, colour in (colours | {"floors": GREY}).items()]
    legend += [Line([], [], r, _mark("black", r) | {"markerfacecolor": "white"}) for r in REGIMES]
    panels[0] = Panel([*panels[0].lines, *legend], panels[0].axes)
    return figures.lines([panels], 3.4 * len(panels) + 1.9, 3.6)


def _mark(colour: str, regime: str = REGIMES[0]) -> dict[str, Any]:
    return {"color": colour, "marker": MARKERS[REGIMES.index(regime)], "linestyle": "", "markersize": 6}


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points that no other is both faster and better than, by time.

    >>> [p.method for p in frontier([Point("a", "", 1, 0), Point("b", "", 2, 1), Point("c", "", 3, 0.5)])]
    ['a', 'b']
    """
    best: list[Point] = []
    defined = [p for p in points if not (math.isnan(p.time) or math.isnan(p.score))]
    for point in sorted(defined, key=lambda p: (p.time, -p.score)):
        if not best or point.score > best[-1].score:
            best.append(point)
    return best


def distortion_figure(results: Results, method: str) -> Any:
    """BL against severity, a panel for each distortion."""
    curves = {regime: mean_curves(results.curves(regime, method, "bl")) for regime in REGIMES}
    panels = []
    for k, kind in enumerate(DISTORTIONS):
        lines = [Line(SEVERITIES, of[k], r, line_style(i)) for i, (r, of) in enumerate(curves.items())]
        axes = {"title": kind.replace("_", " "), "xlabel": "severity", "ylabel": f"BL, {method}"}
        panels.append(Panel(lines, axes))
    grid = [panels[:3], panels[3:]]
    return figures.lines(grid, 7.4, 4.4, "upper center", sharex=True, sharey=True)


def depth_figure(table: Table, method: str) -> Any:
    """Mass on finders and leakage, ours and published, against how much was trained."""
    x, panels = range(len(DEPTHS)), []
    for column in ("FMR", "BL"):
        cells = [ours(table, depth, column)[method] for depth in DEPTHS]
        intervals = [
            (cell.interval if isinstance(cell, Value) else None) or (math.nan, math.nan) for cell in cells
        ]
        low, high = zip(*intervals, strict=True)
        published = [number(ours(table, depth, column, paper=True)[MAIN]) for depth in DEPTHS]
        lines = [
            Line(x, [*map(number, cells)], method, line_style(0), (low, high)),
            Line(x, published, "published", line_style(1, linestyle="--")),
        ]
        ticks = {"xticks": x, "xticklabels": DEPTHS, "xlabel": "trained"}
        panels.append(Panel(lines, {"title": column, **ticks}))
    return figures.lines([panels], 6.6, 3.2, "upper center")


def examples(results: Results, out: Path) -> str:
    """Write OUT/figures/examples.png, maps of the first codes; returns the Markdown that shows it."""
    maps = RunFolder.open(out / "run").maps()
    methods = [m for m in METHODS if m in results.settings.real] or list(results.settings.real[:2])
    rows = []
    for image in sorted(results.column("zs", methods[0], "bl"))[:MAX_CODES]:
        with Image.open(out / "data" / "test" / image) as file:
            picture = file.convert("RGB")
        row = [Tile(picture, "code")]
        for method in methods:
            for regime in REGIMES:
                own = maps.read(regime, method, [image])
                heat = own.upsample((picture.height, picture.width))[0]
                leak = results.column(regime, method, "bl")[image]
                answer = results.column(regime, "", "predicted")[image]
                wrong = "" if answer == int(own.explained[0]) else " (says: no code)"
                note = f"{regime}, {'empty map' if math.isnan(leak) else f'BL {leak:.2f}'}"
                row.append(Tile(overlay(picture, heat), f"{method}{wrong}", note))
        rows.append(row)
    path = out / "figures" / "examples.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet(rows, heading="explains: code (true label)", cmap="inferno", side=160).save(path)
    caption = "The first codes and their maps, which explain the class code (the true label)."
    return f"![codes and their maps](figures/examples.png)\n\n*{caption}*"
