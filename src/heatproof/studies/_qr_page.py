"""What a QR study says: tables, figures, and answers to the paper's four questions with their numbers.

An answer counts methods and regimes whose 95 % intervals lie apart; it never says more than that. Over
several seeds the intervals are those over seeds, else those over codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from heatproof.images.distort import DISTORTIONS, SEVERITIES
from heatproof.metrics import rank_correlation
from heatproof.report.book import Book
from heatproof.report.figures import qr as figures
from heatproof.report.tables import Cell, Table, Value, cell_text, number
from heatproof.studies import _qr_published as published
from heatproof.studies._qr_examples import examples
from heatproof.studies._qr_results import Results, is_floor, mean_curves
from heatproof.studies._qr_tables import apart, flips, ours, over_seeds, tables
from heatproof.studies._qr_train import BASE, uses_proxy
from heatproof.train import DEPTHS, REGIMES

HEADLINES = {
    "table-2": "Structure and speed", "faithfulness": "Insertion and deletion", "table-3": "Robustness",
    "table-4": "Causality", "table-5": "How deep to fine-tune", "table-6": "The price of leakage",
}  # fmt: skip
LEAST_POINTS = 0.01  # of accuracy that FT-LeakMin may cost
EMPTIED = 0.01  # more all-zero maps than this are said

Tables = Mapping[str, Table]


def write(book: Book, results: Sequence[Results]) -> None:
    """Everything, in the order a reader wants it; the first of several seeds is shown in full."""
    first = results[0]
    every = [tables(one) for one in results]
    main: Tables = every[0]
    if len(results) > 1:
        main = {name: over_seeds([one[name] for one in every]) for name in every[0]}
    book.text(introduction(first, len(results)))
    book.heading("Answers")
    for question, answer in answers(first, main).items():
        book.text(f"**{question}** {answer}")
    book.text(f"**Against the floors.** {floor_text(main['table-2'])}")
    book.text(
        "Published numbers stand below ours for reference. They are not the truth: the paper contradicts "
        f"itself in places, namely {'; '.join(published.CONTRADICTIONS)}."
    )
    if len(results) > 1:
        book.heading(f"Over {len(results)} seeds")
        book.text(seed_text([one["table-2"] for one in every]))
        for table in main.values():
            book.table(table)
    for name, table in every[0].items():
        if name in HEADLINES:
            of = f" (seed {first.seed})" if len(results) > 1 else ""
            book.heading(HEADLINES[name] + of)
        book.table(table)
        if first.settings.figures:
            draw(book, name, first, every[0])


def introduction(results: Results, seeds: int) -> str:
    given = results.settings
    if uses_proxy(given):
        proxy = results.trained.histories[BASE].epochs[-1].accuracy
        weights = (
            f"**The backbone has no ImageNet weights.** It first learnt a proxy task on {given.proxy} "
            "pictures of another seed, among them no code: telling the kinds of negatives apart "
            f"({proxy:.1%} right on fresh ones). ZS, FT-Struct and FT-LeakMin all start from there, with the "
            "same new head."
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


def answers(results: Results, main: Tables) -> dict[str, str]:
    """The paper's research questions in our words, each with what the numbers say."""
    return {
        "RQ1: do structure scores agree with causal tests?": agreement_answer(results, main),
        "RQ2: what does the depth of fine-tuning do?": depth_answer(results, main),
        "RQ3: does a light penalty lower leakage without emptying the code?": leakage_answer(main["table-2"]),
        "RQ4: do explanations hold under distortion?": robustness_answer(main),
    }


def agreement_answer(results: Results, main: Tables) -> str:
    table = main["table-4"]
    parts = []
    for column, what in (
        ("rho(FMR, drop without finder)", "FMR with the drop without finders"),
        ("rho(TMR, drop without timing)", "TMR with the drop without timing"),
    ):
        cells = [cell for regime in REGIMES for cell in real(table, regime, column).values()]
        values = [number(cell) for cell in cells if not math.isnan(number(cell))]
        if not values:
            parts.append(f"{what} is not defined here.")
            continue
        above, below = (sum(apart(cell, Value(0, (0, 0))) == side for cell in cells) for side in (1, -1))
        blind = {regime: ours(table, regime, column)["random"] for regime in REGIMES}
        beyond = sum(
            apart(cell, blind[regime]) > 0
            for regime in REGIMES
            for cell in real(table, regime, column).values()
        )
        parts.append(
            f"{what}: rho from {min(values):+.2f} to {max(values):+.2f}, surely positive for {above} and "
            f"surely negative for {below} of {len(cells)} pairs of regime and method; random maps get "
            f"{', '.join(cell_text(cell, '+.2f', interval=False) for cell in blind.values())}, and {beyond} "
            "pairs lie beyond theirs."
        )
    orders = []
    for regime in REGIMES:
        score = ours(main["coverage"], regime, "StructureScore")
        for column in ("insertion", "deletion"):
            area = ours(main["faithfulness"], regime, column)
            found = rank_correlation([number(score[m]) for m in score], [number(area[m]) for m in score])
            orders.append(f"{found.rho:+.2f} ({column}, {regime})")
    return (
        " ".join(parts)
        + " Large codes have large parts and lose more without them, so that even a random map may correlate."
        + f" Across the {len(score)} methods and floors, rho of the mean StructureScore with the "
        f"mean area: {', '.join(orders)}; agreement is positive for insertion and negative for deletion."
    )


def depth_answer(results: Results, main: Tables) -> str:
    method, depths = results.main, DEPTHS if "table-5" in main else DEPTHS[:2]
    if "table-5" in main:
        rows = {
            depth: {c: ours(main["table-5"], depth, c)[method] for c in ("FMR", "BL", "DtS")}
            for depth in depths
        }
    else:
        names = dict(zip(depths, REGIMES[:2], strict=True))
        rows = {
            d: {c: ours(main["table-2"], names[d], c)[method] for c in ("FMR", "BL", "DtS")} for d in depths
        }
    said = [
        f"{name} {' → '.join(cell_text(rows[d][name], interval=False) for d in depths)}"
        for name in ("FMR", "BL", "DtS")
    ]
    start = rows[depths[0]]
    moved = [
        f"{d}: " + ", ".join(f"{c} {_word(apart(rows[d][c], start[c]))}" for c in ("FMR", "BL"))
        for d in depths[1:]
    ]
    only = "" if len(depths) > 2 else " Deeper ones were not asked for."
    return (
        f"{method}, from {' → '.join(depths)}: {'; '.join(said)}. Against the head alone: "
        f"{'; '.join(moved)}.{only}"
    )


def _word(side: int) -> str:
    return {-1: "lower", 0: "no clear change", 1: "higher"}[side]


def leakage_answer(table: Table) -> str:
    """FT-LeakMin beside FT-Struct, method by method."""
    before, after = (real(table, regime, "BL") for regime in REGIMES[1:])
    lower = [m for m in before if apart(after[m], before[m]) < 0]
    higher = [m for m in before if apart(after[m], before[m]) > 0]
    accuracies = [number(next(iter(real(table, regime, "accuracy").values()))) for regime in REGIMES[1:]]
    cost = accuracies[0] - accuracies[1]
    said = ", ".join(
        f"{m} {cell_text(before[m], interval=False)} → {cell_text(after[m], interval=False)}" for m in before
    )
    masses = []
    for name in ("FMR", "TMR"):
        old, new = (real(table, regime, name) for regime in REGIMES[1:])
        fell = [m for m in old if apart(new[m], old[m]) < 0]
        masses.append(f"{name} falls for {len(fell)}" + (f" ({', '.join(fell)})" if fell else ""))
    blank = [{m: number(c) for m, c in real(table, r, "empty maps").items()} for r in REGIMES[1:]]
    emptied = [
        f"{m} {blank[0][m]:.0%} → {blank[1][m]:.0%}" for m in blank[0] if blank[1][m] > blank[0][m] + EMPTIED
    ]
    gone = (
        f"**Maps go empty**, and an empty map counts for no leakage at all: {', '.join(emptied)}."
        if emptied
        else "No method's maps go empty."
    )
    within = "not more" if cost <= LEAST_POINTS + 1e-9 else "more"
    return (
        f"BL from FT-Struct to FT-LeakMin: {said}. It is lower beyond both intervals for {len(lower)} of "
        f"{len(before)} methods, higher for {len(higher)}. Mass on the parts: {', '.join(masses)} of them. "
        f"{gone} Accuracy {accuracies[0]:.1%} → {accuracies[1]:.1%}, {within} than one point lost."
    )


def robustness_answer(main: Tables) -> str:
    table, kinds = main["table-3"], main["distortions"]
    parts = []
    for regime in REGIMES:
        slopes = {m: number(cell) for m, cell in real(table, regime, "BL slope").items()}
        means = [
            _mean([number(c) for c in real(table, regime, f"{mass}-AURC").values()])
            for mass in ("FMR", "TMR")
        ]
        empty = {m: number(cell) for m, cell in real(table, regime, "empty maps").items()}
        most = max(empty, key=lambda m, empty=empty: empty[m])  # type: ignore[misc]
        parts.append(
            f"{regime}: mean BL slope {_mean(list(slopes.values())):+.3f}, FMR-AURC {means[0]:.2f}, TMR-AURC "
            f"{means[1]:.2f}, up to {empty[most]:.0%} empty maps ({most})"
        )
    worst = {
        kind: _mean([number(c) for r in REGIMES for c in real(kinds, r, kind.replace("_", " ")).values()])
        for kind in DISTORTIONS
    }
    order = sorted((k for k in worst if not math.isnan(worst[k])), key=lambda kind: -worst[kind])
    said = f"{'; '.join(parts)} (means over methods)."
    if not order:
        return f"{said} Under no distortion is BL defined."
    growing, flat = (f"{kind.replace('_', ' ')} ({worst[kind]:+.3f})" for kind in (order[0], order[-1]))
    return f"{said} Growth of BL from severity 0 to 1: most under {growing}, least under {flat}."


def floor_text(table: Table) -> str:
    """How many methods do better than maps that know nothing of the network."""
    said = []
    for column, better in (("BL", -1), ("FMR", 1), ("TMR", 1), ("DtS", -1)):
        beaten = {floor: 0 for floor in ours(table, REGIMES[0], column) if is_floor(floor)}
        pairs = 0
        for regime in REGIMES:
            cells = ours(table, regime, column)
            for cell in real(table, regime, column).values():
                pairs += 1
                for floor in beaten:
                    beaten[floor] += apart(cell, cells[floor]) == better
        counts = ", ".join(f"{floor} by {count}" for floor, count in beaten.items())
        said.append(f"{column}: {counts} of {pairs}")
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


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def draw(book: Book, name: str, results: Results, made: Tables) -> None:
    """The figures that belong to a table."""
    if name == "coverage":
        backbone = published.backbone_of(results.settings.model)
        with figures.pareto(
            pareto_panels(made, backbone), {m for m in results.methods if is_floor(m)}
        ) as figure:
            book.figure(
                figure, "figure-5",
                "Figure 5: structure against speed. The line joins what nothing beats in both; grey: floors.",
            )  # fmt: skip
        book.text(examples(results, book.folder))
    if name == "table-3":
        curves = {
            kind: {r: mean_curves(results.curves(r, results.main, "bl"))[k].tolist() for r in REGIMES}
            for k, kind in enumerate(DISTORTIONS)
        }
        with figures.distortions(SEVERITIES, curves, results.main) as figure:
            book.figure(figure, "distortions", "Leakage as distortions grow; masks move with the picture.")
    if name == "table-5":
        lines = [[ours(made[name], depth, c)[results.main] for depth in DEPTHS] for c in ("FMR", "BL")]
        theirs = [[published.TABLE_5[depth][k] for depth in DEPTHS] for k in (1, 0)]
        with figures.depth(DEPTHS, (lines[0], lines[1]), (theirs[0], theirs[1]), results.main) as figure:
            book.figure(figure, "figure-4", "Figure 4: mass on finders and leakage by depth of fine-tuning.")


def pareto_panels(made: Tables, backbone: str) -> dict[str, list[figures.Point]]:
    """Ours and the published ones: their times are of other machines, so they do not share an axis."""
    mine = [
        figures.Point(m, regime, number(ours(made["table-2"], regime, "ms/image")[m]), number(score))
        for regime in REGIMES
        for m, score in ours(made["coverage"], regime, "mass score").items()
    ]
    theirs = [
        figures.Point(m, regime, numbers[-1], published.mass_score(backbone, regime, m))
        for regime in REGIMES
        for m, numbers in published.TABLE_2[backbone][regime].items()
    ]
    return {"measured here": mine, f"published, {backbone}": theirs}
