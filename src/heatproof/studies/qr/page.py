"""What a QR study says: tables, figures, and answers to the paper's four questions with their numbers.

An answer counts methods and regimes whose 95 % intervals lie apart; it never says more than that. Over
several seeds the intervals are those over seeds, else those over codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from PIL import Image

from heatproof.explain.floors import is_floor
from heatproof.images.distort import DISTORTIONS, SEVERITIES
from heatproof.metrics import rank_correlation
from heatproof.report.figures import qr as figures
from heatproof.report.markdown_report import MarkdownReport
from heatproof.report.panels import Tile, sheet
from heatproof.report.tables import Cell, Table, Value, cell_text, number
from heatproof.show import overlay
from heatproof.store import RunFolder
from heatproof.studies.qr.results import (
    CONTRADICTIONS,
    TABLES,
    Results,
    apart,
    flips,
    mean_curves,
    ours,
    over_seeds,
    tables,
)
from heatproof.studies.qr.settings import MAIN
from heatproof.studies.qr.trainings import BASE, depth_name, uses_proxy
from heatproof.train import DEPTHS, REGIMES

LEAST_POINTS = 0.01  # of accuracy that FT-LeakMin may cost
EMPTIED = 0.01  # more all-zero maps than this are said
TUNED = REGIMES[1:]  # FT-Struct and FT-LeakMin
SHOWN = 3  # codes of the sheet of examples
METHODS = ("gradcam", "layercam", "eigengradcam")  # in it, where they were asked for

PARETO = {"table-2": "ms/image", "coverage": "mass score"}
Tables = Mapping[str, Table]


def write(book: MarkdownReport, results: Sequence[Results]) -> None:
    """Everything, in the order a reader wants it; the first of several seeds is shown in full."""
    first, every = results[0], [tables(one) for one in results]
    main: Tables = every[0]
    if len(results) > 1:
        main = {name: over_seeds([one[name] for one in every]) for name in every[0]}
    book.text(introduction(first, len(results)))
    book.heading("Answers")
    answers = {
        "RQ1: do structure scores agree with causal tests?": agreement_answer(main),
        "RQ2: what does the depth of fine-tuning do?": depth_answer(first.settings.shown[0], main),
        "RQ3: does a light penalty lower leakage without emptying the code?": leakage_answer(main["table-2"]),
        "RQ4: do explanations hold under distortion?": robustness_answer(main),
        "Against the floors.": floor_text(main["table-2"]),
    }
    for question, answer in answers.items():
        book.text(f"**{question}** {answer}")
    book.text(
        "Published numbers stand below ours for reference. They are not the truth: the paper contradicts "
        f"itself in places, namely {'; '.join(CONTRADICTIONS)}."
    )
    if len(results) > 1:
        book.heading(f"Over {len(results)} seeds")
        book.text(seed_text([one["table-2"] for one in every]))
        for table in main.values():
            book.table(table)
    for name, table in every[0].items():
        if heading := TABLES[name].get("heading"):
            book.heading(heading + (f" (seed {first.seed})" if len(results) > 1 else ""))
        book.table(table)
        if first.settings.figures:
            draw(book, name, first, every[0])


def introduction(results: Results, seeds: int) -> str:
    given = results.settings
    if uses_proxy(given):
        weights = (
            f"**The backbone has no ImageNet weights.** It first learnt a proxy task on {given.proxy} "
            "pictures of another seed, among them no code: telling the kinds of negatives apart "
            f"({results.accuracy(BASE):.1%} right on fresh ones). ZS, FT-Struct and FT-LeakMin all start "
            "from there, with the same new head."
        )
    elif given.pretrained or given.proxy > 0:
        weights = "The backbone has the weights that its library brings."
    else:
        weights = "**The backbone was taken as it was built, without any training before the regimes.**"
    accuracy = ", ".join(f"{name} {results.accuracy(name):.1%}" for name in REGIMES)
    return (
        f"Symbol: {given.symbol}. Network: {given.model}, {given.size} x {given.size} pixels. {given.train} "
        f"codes and as many hard negatives to train on, {given.test} and as many to test. {weights} "
        f"Seed {given.seed}{f', {seeds} seeds of everything behind the data' if seeds > 1 else ''}; device: "
        f"{results.device}. Accuracy on the test pictures: {accuracy}.\n\n"
        "BL: mass outside the code (less is better). FMR, TMR: mass on finder and timing patterns. DtS: mean "
        "distance of the mass from them. In brackets: 95 % intervals."
    )


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
            found = rank_correlation([number(score[m]) for m in score], [number(area[m]) for m in score])
            orders.append(f"{found.rho:+.2f} ({column}, {regime})")
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
    said = [
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
        f"{method}, from {' → '.join(depths)}: {'; '.join(said)}. Against the head alone: "
        f"{'; '.join(moved)}.{only}"
    )


def leakage_answer(table: Table) -> str:
    """FT-LeakMin beside FT-Struct, method by method."""

    def moved(column: str, way: int) -> list[str]:
        """Methods whose cells lie apart, this way."""
        old, new = (real(table, regime, column) for regime in TUNED)
        return [method for method in old if apart(new[method], old[method]) == way]

    before, after = (real(table, regime, "BL") for regime in TUNED)
    said = ", ".join(
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
        f"BL from FT-Struct to FT-LeakMin: {said}. It is lower beyond both intervals for "
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
    said = f"{'; '.join(parts)} (means over methods)."
    growth = {kind: mean(kinds, REGIMES, kind) for kind in (name.replace("_", " ") for name in DISTORTIONS)}
    order = sorted((kind for kind in growth if not math.isnan(growth[kind])), key=lambda kind: -growth[kind])
    if not order:
        return f"{said} Under no distortion is BL defined."
    most, least = (f"{kind} ({growth[kind]:+.3f})" for kind in (order[0], order[-1]))
    return f"{said} Growth of BL from severity 0 to 1: most under {most}, least under {least}."


def floor_text(table: Table) -> str:
    """How many methods do better than maps that know nothing of the network."""
    said = []
    for column, better in (("BL", -1), ("FMR", 1), ("TMR", 1), ("DtS", -1)):
        of = {regime: ours(table, regime, column) for regime in REGIMES}
        pairs = [(r, cell) for r in REGIMES for cell in real(table, r, column).values()]
        counts = [
            f"{floor} by {sum(apart(cell, of[regime][floor]) == better for regime, cell in pairs)}"
            for floor in filter(is_floor, of[REGIMES[0]])
        ]
        said.append(f"{column}: {', '.join(counts)} of {len(pairs)}")
    return f"Beaten beyond both intervals, of pairs of regime and method: {'; '.join(said)}."


def seed_text(several: Sequence[Table]) -> str:
    """Whether the order of methods depends on the seed."""
    turned = {column: flips(several, column) for column in ("BL", "FMR", "TMR", "DtS")}
    found = [f"{column}: {a} and {b} under {r}" for column, lot in turned.items() for r, a, b in lot]
    if not found:
        return (
            "No two methods whose intervals over codes lie apart change places from one seed to another, in "
            "BL, FMR, TMR or DtS."
        )
    return (
        f"{len(found)} pairs of methods change places between seeds although their intervals over codes lie "
        f"apart, so those orders belong to a training and not to the methods: {'; '.join(found)}."
    )


def real(table: Table, group: str, column: str) -> dict[str, Cell]:
    """Our cells without the floors."""
    return {m: cell for m, cell in ours(table, group, column).items() if not is_floor(m)}


def draw(book: MarkdownReport, name: str, results: Results, made: Tables) -> None:
    """The figures that belong to a table."""
    method = results.settings.shown[0]
    if name == "coverage":
        with figures.pareto(pareto_panels(made), set(filter(is_floor, results.settings.listed))) as figure:
            caption = "structure against speed. The line joins what nothing beats in both; grey: floors."
            book.figure(figure, "figure-5", f"Figure 5: {caption}")
        book.text(examples(results, book.folder))
    if name == "table-3":
        lines = {regime: mean_curves(results.curves(regime, method, "bl")) for regime in REGIMES}
        curves = {kind: {r: lines[r][k].tolist() for r in REGIMES} for k, kind in enumerate(DISTORTIONS)}
        with figures.distortions(SEVERITIES, curves, method) as figure:
            book.figure(figure, "distortions", "Leakage as distortions grow; masks move with the picture.")
    if name == "table-5":
        cells = {
            column: tuple(
                [ours(made[name], depth, column, paper)[of] for depth in DEPTHS]
                for of, paper in ((method, False), (MAIN, True))
            )
            for column in ("FMR", "BL")
        }
        with figures.depth(DEPTHS, cells, method) as figure:
            book.figure(figure, "figure-4", "Figure 4: mass on finders and leakage by depth of fine-tuning.")


def pareto_panels(made: Tables) -> dict[str, list[figures.Point]]:
    """Ours and the published ones: their times are of other machines, so they do not share an axis."""
    titles = {False: "measured here", True: str(made["coverage"].rows[-1][0]).replace("paper", "published")}
    return {
        title: [
            figures.Point(m, r, *(number(ours(made[t], r, c, paper)[m]) for t, c in PARETO.items()))
            for r in REGIMES
            for m in ours(made["coverage"], r, "mass score", paper)
        ]
        for paper, title in titles.items()
    }


def examples(results: Results, out: Path) -> str:
    """Writes OUT/figures/examples.png, so that the numbers can be looked at; the Markdown that shows it."""
    maps = RunFolder.open(out / "run").maps()
    methods = [m for m in METHODS if m in results.settings.real] or list(results.settings.real[:2])
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
                note = f"{regime}, {'empty map' if math.isnan(leak) else f'BL {leak:.2f}'}"
                row.append(Tile(overlay(picture, heat), f"{method}{wrong}", note))
        rows.append(row)
    path = out / "figures" / "examples.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet(rows, heading="explains: code (true label)", cmap="inferno", side=160).save(path)
    shown = "The first codes and their maps, which explain the class code (the true label)."
    return f"![codes and their maps](figures/examples.png)\n\n*{shown}*"
