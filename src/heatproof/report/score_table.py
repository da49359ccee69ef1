"""The table of all scores: metrics down, methods across, floors apart; each mean with its interval and n."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from heatproof.report.data import Cell, RunData
from heatproof.report.definitions import anchor
from heatproof.report.markup import Section, name, number, scrolling
from heatproof.report.measures import Measure


def scores(data: RunData) -> Section:
    """Metrics down, methods across, floors apart."""
    if not data.measures or not data.methods:
        return Section("scores", "Scores", missing="no metric was computed for any method")
    methods = [*data.real, *data.floors]
    head = "".join(_method_head(data, method) for method in methods)
    bodies = []
    for family in dict.fromkeys(m.facts.family for m in data.measures):
        lines = [_score_row(data, of, methods) for of in data.measures if of.facts.family == family]
        title = (
            f'<tr class="family"><th colspan="{len(methods) + 2}" scope="rowgroup">{escape(family)}</th></tr>'
        )
        bodies.append(f"<tbody>{title}{''.join(lines)}</tbody>")
    first = '<th scope="col">Metric</th><th scope="col">n</th>'
    content = f'<table class="scores"><thead><tr>{first}{head}</tr></thead>{"".join(bodies)}</table>'
    floors = (
        f"Floors ({', '.join(map(name, data.floors))}) never look at the network; “not above” marks a method "
        "whose mean difference to a floor on the same images has an interval that reaches zero."
        if data.floors
        else "No floor was scored in this run, so nothing shows whether these scores are better than chance."
    )
    legend = (
        "<p>Mean over images, with its 95 % bootstrap interval below. ↑ higher is better, ↓ lower is better; "
        f"★ best mean among the methods. {floors} A metric’s name leads to its definition.</p>"
    )
    return Section("scores", "Scores", legend + scrolling(content, "Scores, metrics by methods"))


def _method_head(data: RunData, method: str) -> str:
    kind = '<span class="sub">floor</span>' if method in data.floors else ""
    link = f'<a href="#{anchor("method", method)}">{name(method)}</a>'
    return f'<th scope="col" class="{_style(data, method)}">{link}{kind}</th>'


def _style(data: RunData, method: str, best: bool = False) -> str:
    words = {"best": best, "floor": method in data.floors, "first": data.floors[:1] == [method]}
    return " ".join(word for word, on in words.items() if on)


def _score_row(data: RunData, of: Measure, methods: Sequence[str]) -> str:
    cells = {method: data.cells.get((of.name, method)) for method in methods}
    counts = [cell.n for cell in cells.values() if cell is not None and cell.n is not None]
    most = max(counts, default=None)
    best = best_methods(of, {m: cells[m] for m in data.real})
    styles = {method: _style(data, method, method in best) for method in methods}
    columns = "".join(_score_cell(cell, styles[method], most) for method, cell in cells.items())
    link = f'<a href="#{anchor("metric", of.name)}">{escape(of.plain)}</a>'
    arrow = (
        f'<span class="arrow" aria-hidden="true">{of.arrow}</span><span class="hidden">{of.direction}</span>'
    )
    label = f'{link} {arrow}<code class="sub">{escape(of.name)}</code>'
    count = f'<td class="count">{"" if most is None else most}</td>'
    return f'<tr><th scope="row">{label}</th>{count}{columns}</tr>'


def best_methods(of: Measure, cells: Mapping[str, Cell | None]) -> set[str]:
    """Those with the best mean; nobody where there is no direction or no difference."""
    known = {m: c.value for m, c in cells.items() if c is not None and not math.isnan(c.value)}
    if of.higher_is_better is None or len(set(known.values())) < 2:
        return set()
    top = (max if of.higher_is_better else min)(known.values())
    return {method for method, value in known.items() if value == top}


def _score_cell(cell: Cell | None, style: str, most: int | None) -> str:
    if cell is None:
        return f'<td class="{style}"><span class="hidden">not computed</span></td>'
    text = f'<span class="value">{number(cell.value)}</span>'
    if "best" in style:
        text += ' <span class="star"><span aria-hidden="true">★</span><span class="hidden">best</span></span>'
    if not math.isnan(cell.low) and cell.low < cell.high:
        text += f'<span class="sub">{number(cell.low)} to {number(cell.high)}</span>'
    if cell.n is not None and cell.n != most:
        text += f'<span class="sub">n = {cell.n}</span>'
    if cell.failed:
        text += f'<span class="flag">not above {escape(", ".join(cell.failed))}</span>'
    if math.isnan(cell.value) and cell.reason:
        text += f'<span class="sub">{escape(cell.reason)}</span>'
    return f'<td class="{style}">{text}</td>'
