"""Sections of the report, from the data of a run; an empty section gives its reason.

Families of metrics fill tables of at most six columns, so that no table is wider than a page; a longer family
is split into tables of about the same size. The strip in a cell runs from the least to the largest number of
its column: a bar for the interval, a dot for the mean, a line for each floor.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from scipy.stats import spearmanr

from heatproof.errors import StoreError
from heatproof.metrics.classifier import reading
from heatproof.metrics.evidence_record import EvidenceItem
from heatproof.registry import split_calls
from heatproof.report.pieces import (
    TEMPLATES,
    UNSURE,
    DotRows,
    Grid,
    Line,
    LinePanel,
    Mark,
    Panels,
    Piece,
    Section,
    ShadedTable,
    named,
    number,
    with_sub,
)
from heatproof.store import RunFolder
from heatproof.store.ledger import known_record, write_record
from heatproof.verdict.answers import NetworkAnswer, Verdict
from heatproof.verdict.data import Cell, Measure, RunData, in_order
from heatproof.verdict.trajectory import read_gradients, whole_norm

MOST_CLASSES = 5  # as many as there are shapes for
LISTED_CLASSES = 12
LISTED_IMAGES = 20
SMALLEST_SPAN = 0.1  # of a vertical axis, so that a small change looks small
WIDEST = 6  # columns of a table of scores
LEFT_OUT = "left_out.json"
ACCENTS = dict(zip("\"'`^~cv", "\u0308\u0301\u0300\u0302\u0303\u0327\u030c", strict=True))
VENUES = ("journal", "booktitle", "school", "howpublished")


@dataclass(frozen=True)
class ScoreColumn:
    """One metric for every method and every floor."""

    of: Measure
    cells: Mapping[str, Cell | None]  # by method
    floors: Mapping[str, Cell]  # by floor
    best: frozenset[str]

    @property
    def known(self) -> list[Cell]:
        return [cell for cell in (*self.cells.values(), *self.floors.values()) if cell is not None]

    @property
    def most(self) -> int | None:
        """Largest number of images of a cell."""
        return max((cell.n for cell in self.known if cell.n is not None), default=None)

    @property
    def lines(self) -> list[float]:
        """Places of the floors in a strip."""
        return [self.place(cell.value) for cell in self.floors.values() if not math.isnan(cell.value)]

    def place(self, value: float) -> float:
        """Place of a number in a strip, in per cent of its length."""
        numbers = [x for cell in self.known for x in (cell.value, cell.low, cell.high) if math.isfinite(x)]
        low, high = min(numbers, default=0.0), max(numbers, default=1.0)
        return round(100 * (value - low) / (high - low), 1) if high > low else 50.0


Families = list[tuple[str, Sequence[ScoreColumn]]]


@dataclass(frozen=True)
class ScoreTable(Piece):
    """Some families of metrics, side by side."""

    methods: Sequence[str]
    families: Families

    @property
    def columns(self) -> list[ScoreColumn]:
        return [column for _, columns in self.families for column in columns]

    @property
    def caption(self) -> str:
        return f"Scores: {', '.join(dict.fromkeys(family for family, _ in self.families))}"


def evidence(data: RunData, network: NetworkAnswer) -> Section:
    """What the network uses, by class."""
    classes: dict[str, list[EvidenceItem]] = {}
    for item in network.evidence:
        classes.setdefault(data.class_name(item.label), []).append(item)
    content = {"network": network, "classes": classes} if network.is_tested else None
    return Section("evidence", "What the network uses", content, network.note)


def scores(data: RunData, widest: int = WIDEST) -> Section:
    """Methods down, metrics across, at most `widest` in a table; each mean with its interval and n."""
    methods = data.real or data.floors
    if not data.measures or not methods:
        return Section("scores", "Scores", missing="no metric was computed for any method")
    families: dict[str, list[ScoreColumn]] = {}
    for of in data.measures:
        cells = {method: data.cells.get((of.name, method)) for method in methods}
        floors = {f: data.cells[of.name, f] for f in data.floors if (of.name, f) in data.cells}
        column = ScoreColumn(of, cells, floors if data.real else {}, best_methods(data, of))
        families.setdefault(of.facts.family, []).append(column)
    tables = [ScoreTable(methods, part) for part in packed(families, widest)]
    return Section("scores", "Scores", {"data": data, "tables": tables})


def packed(families: Mapping[str, Sequence[ScoreColumn]], widest: int = WIDEST) -> Iterator[Families]:
    """Families in their order, as many side by side as fit."""
    table: Families = []
    for family, columns in families.items():
        parts = -(-len(columns) // widest)
        each = -(-len(columns) // parts)
        for start in range(0, len(columns), each):
            part = columns[start : start + each]
            if table and sum(len(other) for _, other in table) + len(part) > widest:
                yield table
                table = []
            table.append((family, part))
    if table:
        yield table


def best_methods(data: RunData, of: Measure) -> frozenset[str]:
    """Methods with the best mean; none if the metric has no direction or the means do not differ."""
    cells = {m: data.cells[of.name, m].value for m in data.real if (of.name, m) in data.cells}
    known = {method: value for method, value in cells.items() if not math.isnan(value)}
    if of.higher_is_better is None or len(set(known.values())) < 2:
        return frozenset()
    top = (max if of.higher_is_better else min)(known.values())
    return frozenset(method for method, value in known.items() if value == top)


def trajectories(data: RunData) -> Section:
    """One panel per method: its C-Score (or the headline metric) and the classifier's AUC, with alarms."""
    title, score = "Over training", _cscore(data)
    of = score or data.headline
    if len(data.checkpoints) < 2 or of is None:
        why = "the run has one checkpoint only" if of else "no metric was computed"
        return Section("trajectories", title, missing=why)
    auc = data.classifier("auc")
    beside = auc if score else []
    known = [v for m in data.real for v in data.paths.get((of.name, m), []) if not math.isnan(v)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    margin = max(0.0, SMALLEST_SPAN - (high - low)) / 2
    bounds = (0.0, 1.0) if score else (low - margin, high + margin)
    ends = [(0.0, data.checkpoints[0]), (len(data.checkpoints) - 1.0, data.checkpoints[-1])]
    panels = []
    for method in data.real:
        path = data.paths.get((of.name, method), [])
        lines = [Line("AUC", list(enumerate(beside)), "faint")] * bool(beside)
        lines.append(Line(of.short, list(enumerate(path))))
        marks = []
        for k, alarm in enumerate(data.alarms, 1):
            if alarm.method in (method, None):
                i = data.checkpoints.index(alarm.checkpoint)
                marks.append(Mark((float(i), path[i] if path else math.nan), str(k), alarm.sentence))
        chart = LinePanel(f"{of.short} of {method} by checkpoint", lines, ends, bounds, marks)
        cell = data.cells.get((of.name, method))
        count = f", n = {cell.n} at {data.checkpoint}" if cell and cell.n is not None else ""
        panels.append((f"{method}{count}", chart))
    rows = [[named(m), *(_score(of, v) for v in data.paths.get((of.name, m), []))] for m in data.methods]
    rows += [["AUC", *map(number, auc)]] if auc else []
    if logged := read_gradients(data.folder.path):
        norms = [whole_norm(logged.get(name, {})) for name in data.checkpoints]
        top = max((norm for norm in norms if math.isfinite(norm)), default=1.0) * 1.05
        lines = [Line("norm", list(enumerate(norms)))]
        chart = LinePanel("Norm of the gradients by checkpoint", lines, ends, (0.0, top))
        count = f"n = {sum(map(math.isfinite, norms))} checkpoints"
        panels.append((f"norm of the gradients, {count}", chart))
        rows += [["norm of the gradients", *map(number, norms)]]
    content = {
        "of": of,
        "alarms": data.alarms,
        "panels": Panels(panels),
        "faint": bool(beside),
        "numbers": Grid(["", *map(named, data.checkpoints)], rows, f"{of.short} by checkpoint"),
    }
    return Section("trajectories", title, content)


def _score(of: Measure, value: float) -> str:
    """A number; a C-Score in the colour of its band (metrics/reading.toml)."""
    colour = reading(value, "colours") if of.base == "cscore" else ""
    text = number(value)
    return Markup('<span class="band {}">{}</span>').format(colour, text) if colour else text


def _cscore(data: RunData) -> Measure | None:
    return next((of for of in data.measures if of.base == "cscore"), None)


def classes(data: RunData) -> Section:
    """C-Score by class at the checkpoint, and the other metrics by class."""
    title, score = "By class", _cscore(data)
    names = {metric for metric, method, _ in data.by_class if method and metric.partition("(")[0] != "cscore"}
    others = []
    for of in in_order(sorted(names), data.facts):
        labels = _labels(data, of)
        caption = f"{of.plain} by class, {min(LISTED_CLASSES, len(labels))} of {len(labels)}"
        others.append(_by_class(data, of, labels[:LISTED_CLASSES], caption))
    consistency = _consistency(data, score) if score and _labels(data, score) else {"chart": None}
    if not others and not consistency["chart"]:
        why = "no C-Score by class was computed (add cscore to the metrics)"
        return Section("classes", title, missing=why)
    return Section("classes", title, {**consistency, "others": others})


def _labels(data: RunData, of: Measure) -> list[int]:
    return sorted({label for metric, _, label in data.by_class if metric == of.name})


def _consistency(data: RunData, of: Measure) -> dict[str, Any]:
    """A dot for each of a few classes, or for the lowest of many, and the numbers behind them."""
    labels = _labels(data, of)
    few = len(labels) <= MOST_CLASSES
    missing = Cell(math.nan)
    values = {
        (m, c): data.by_class.get((of.name, m, c), missing).defined for m in data.methods for c in labels
    }
    rows = []
    for method in data.methods:
        dots = [(data.class_name(c), values[method, c]) for c in labels]
        if not few:
            dots = sorted((d for d in dots if not math.isnan(d[1])), key=lambda d: d[1])[:1]
        rows.append((method, dots, data.cells.get((of.name, method), missing).value))
    legend, means = [], {}
    for c in labels:
        counts = [cell.n for m in data.methods if (cell := data.by_class.get((of.name, m, c)))]
        undefined = all(math.isnan(values[m, c]) for m in data.methods)
        legend.append(named(data.class_name(c)) + (" (not defined)" if undefined else _images(counts)))
        known = [values[m, c] for m in data.real if not math.isnan(values[m, c])]
        means[c] = sum(known) / len(known) if known else math.inf
    listed = labels if few else sorted(labels, key=lambda c: means[c])[:LISTED_CLASSES]
    title = f"{of.short} by class at {data.checkpoint}"
    return {
        "checkpoint": data.checkpoint,
        "chart": DotRows(title, rows, "The table below holds the same numbers."),
        "legend": legend if few else ["the lowest class"],
        "unlisted": len(labels) - len(listed),
        "numbers": _by_class(data, of, listed, f"{of.short} by class"),
    }


def _images(counts: Sequence[int | None]) -> str:
    """Clause with the numbers of images.

    >>> _images([30, 28, None]), _images([30, 30]), _images([])
    (', n = 28 to 30', ', n = 30', '')
    """
    known = sorted({n for n in counts if n is not None})
    return f", n = {known[0]}{f' to {known[-1]}' if known[1:] else ''}" if known else ""


def _by_class(data: RunData, of: Measure, labels: Sequence[int], caption: str) -> Grid:
    def text(cell: Cell | None) -> str:
        if cell is None:
            return UNSURE
        value = _score(of, cell.defined)
        return value if cell.n is None else with_sub(value, f"n = {cell.n}")

    rows = [
        [named(data.class_name(c)), *(text(data.by_class.get((of.name, m, c))) for m in data.methods)]
        for c in labels
    ]
    return Grid(["Class", *map(named, data.methods)], rows, caption)


def curves(data: RunData) -> Section:
    """Insertion and deletion, one panel per method."""
    title = "Insertion and deletion"
    if not data.curves:
        return Section("curves", title, missing="no insertion or deletion curve was stored")
    counts = data.folder.scores().sql(
        r"""select method, count(distinct image) as n from scores where model = ? and checkpoint = ?
            and regexp_matches(metric, '^(insertion|deletion)_at_\d+') and not isnan(value) group by 1""",
        [data.model, data.checkpoint],
    )
    n = {row["method"]: row["n"] for row in counts}
    ends, styles = [(0.0, "0 %"), (50.0, "50 %"), (100.0, "100 %")], {"insertion": "one", "deletion": "two"}
    panels, rows = [], []
    percents = sorted({p for own in data.curves.values() for line in own.values() for p, _ in line})
    for method in data.methods:
        own = data.curves.get(method, {})
        lines = [Line(kind, own[kind], style) for kind, style in styles.items() if kind in own]
        if lines:
            chart = LinePanel(f"Insertion and deletion by {method}", lines, ends)
            panels.append((f"{method}, n = {n[method]}", chart))
        rows += [
            [named(method) + f" {kind}", *(number(dict(line).get(p, math.nan)) for p in percents)]
            for kind, line in own.items()
        ]
    numbers = Grid(["", *(f"{p} %" for p in percents)], rows, "Insertion and deletion curves")
    return Section("curves", title, {"panels": Panels(panels), "numbers": numbers})


def agreement(data: RunData) -> Section:
    """Rank correlations between methods on the same images, and between metrics on the order of methods."""
    why, methods, metrics = [], None, between_metrics(data)
    if pairs := data.agreement.get("spearman"):
        labels = [m for m in data.methods if any(m in pair for pair in pairs)]
        cells = [[pairs.get((a, b), pairs.get((b, a), math.nan)) for b in labels] for a in labels]
        methods = ShadedTable(labels, cells, "Agreement between methods")
    else:
        why.append("no agreement between methods was computed (add method_agreement to the metrics)")
    if metrics is None:
        why.append("agreement between metrics needs three methods and two metrics with a direction")
    counts = {"count": len(data.real), "images": len(data.images.ids)}
    content = {"methods": methods, "metrics": metrics, **counts, "why": why}
    return Section("agreement", "Agreement", content if methods or metrics else None, "; ".join(why))


def between_metrics(data: RunData) -> ShadedTable | None:
    """How alike metrics order the methods, floors left out; 1 means the same order from best to worst."""
    table: list[tuple[Measure, np.ndarray]] = []
    for of in data.measures:
        column = np.array([data.cells.get((of.name, m), Cell(math.nan)).value for m in data.real])
        if of.higher_is_better is not None and len(np.unique(column[~np.isnan(column)])) > 1:
            table.append((of, column if of.higher_is_better else -column))
    if len(data.real) < 3 or len(table) < 2:
        return None

    def correlation(x: np.ndarray, y: np.ndarray) -> float:
        defined = np.isfinite(x) & np.isfinite(y)
        x, y = x[defined], y[defined]
        return float(spearmanr(x, y).statistic) if len(x) > 2 and np.ptp(x) and np.ptp(y) else math.nan

    cells = [[correlation(x, y) for _, y in table] for _, x in table]
    labels, heads = [of.short for of, _ in table], [of.base for of, _ in table]
    return ShadedTable(labels, cells, "Agreement between metrics", heads)


def made(data: RunData) -> Section:
    """Provenance: command, versions, settings and weights needed to repeat the run."""
    manifest, count = data.manifest, len(data.broken)
    weights = [
        [named(checkpoint), Markup("<code>{}</code>").format(digest)]
        for checkpoint, digest in manifest.models.items()
    ]
    broken = [[named(image), reason] for image, reason in data.broken[:LISTED_IMAGES]]
    content = {
        "manifest": manifest,
        "command": shlex.join(map(str, manifest.command)),
        "status": data.folder.status().sentence,
        "images": len(data.images.ids),
        "makers": data.folder.makers(),
        "config": json.dumps(manifest.config, indent=2, ensure_ascii=False, default=str),
        "weights": weights and Grid(["Checkpoint", "Hash"], weights, "Hashes of the weights"),
        "broken": broken and Grid(["Image", "Reason"], broken, f"Images that could not be used ({count})"),
    }
    return Section("made", "How this was made", content)


def limits(data: RunData, verdict: Verdict) -> Section:
    """What the page does not show, and what an audit left out."""
    content = {"images": len(data.images.ids), "measured": verdict.measured, "left_out": left_out(data)}
    return Section("limits", "Limits of this report", content)


def note_left_out(folder: RunFolder, reasons: Mapping[str, str]) -> None:
    """Store what an audit did not compute, each with its reason."""
    write_record(folder.path / LEFT_OUT, {"reasons": dict(reasons)})


def left_out(data: RunData) -> dict[str, list[str]]:
    """By reason, what an audit left out and was not added since."""
    known = {*data.manifest.config.get("methods", ()), *data.manifest.config.get("metrics", ())}
    missing: dict[str, list[str]] = {}
    with suppress(StoreError):  # a damaged record, which `verify` reports
        for calls, why in (known_record(data.folder.path / LEFT_OUT) or {}).get("reasons", {}).items():
            if not known.issuperset(split_calls(calls)):
                missing.setdefault(why, []).append(calls)
    return missing


class Reference(NamedTuple):
    """An entry of the bibliography."""

    text: str
    address: str  # of the publication, or ""


@lru_cache
def references() -> dict[str, Reference]:
    """The entries of references.bib by their keys."""
    text = files("heatproof").joinpath("references.bib").read_text(encoding="utf-8")
    return {key: _reference(body) for key, body in re.findall(r"@\w+\{([^,\s]+),(.*?)\n\}", text, re.S)}


def _reference(body: str) -> Reference:
    fields = {
        name.lower(): plain_latex(value)
        for name, value in re.findall(r"(\w+)\s*=\s*\{(.*?)\}\s*,?\s*(?=\n|$)", body, re.S)
    }
    names = [person.split(",")[0].strip() for person in fields.get("author", "").split(" and ")]
    authors = " and ".join(names) if len(names) <= 2 else f"{names[0]} et al."
    preprint = fields.get("eprint", "")
    venue = next((fields[kind] for kind in VENUES if fields.get(kind)), preprint and f"arXiv:{preprint}")
    parts = [f"{authors} ({fields.get('year', 'no year')})", fields.get("title", ""), venue]
    address = fields.get("url", "") or (f"https://doi.org/{fields['doi']}" if "doi" in fields else "")
    address = address or (preprint and f"https://arxiv.org/abs/{preprint}")
    return Reference(". ".join(filter(None, parts)) + ".", address)


def plain_latex(text: str) -> str:
    r"""Replace LaTeX's accents by letters and remove braces.

    >>> plain_latex(r'S{\"u}sstrunk, {SLIC}')
    'Süsstrunk, SLIC'
    """
    accented = r"""\{?\\(["'`^~]|[cv](?=\{))\s*\{?\\?([A-Za-z])\}?\}?"""
    text = re.sub(accented, lambda m: unicodedata.normalize("NFC", m[2] + ACCENTS[m[1]]), text)
    text = re.sub(r"[{}]", "", text)
    for latex, letter in (("--", "–"), ("\\&", "&"), ("``", "“"), ("''", "”")):
        text = text.replace(latex, letter)
    return " ".join(text.split())


def definitions(data: RunData) -> Section:
    """Definitions of metrics, by the module that defines them, and of methods, from the facts of the run."""
    modules: dict[str, list[Measure]] = {}
    for of in data.measures:
        modules.setdefault(of.facts.module, []).append(of)
    metrics = [
        {
            "title": f"{measures[0].facts.family}: {', '.join(dict.fromkeys(of.base for of in measures))}",
            "numbers": [(of, _definition(of)) for of in measures],
            "words": data.facts.definition(module),
            "papers": [
                references().get(key) for key in dict.fromkeys(of.facts.cite for of in measures if module)
            ],
        }
        for module, measures in modules.items()
    ]
    methods = [
        (method, facts, facts and vars(facts.card), facts and references().get(facts.cite))
        for method in data.methods
        for facts in [data.facts.method(method)]
    ]
    return Section("definitions", "Definitions", {"files": metrics, "methods": methods})


def _definition(of: Measure) -> str:
    infinite = {math.inf: "∞", -math.inf: "−∞"}
    low, high = (infinite.get(bound, f"{bound:g}".replace("-", "−")) for bound in of.facts.limits)
    between = "" if (low, high) == ("−∞", "∞") else f" Between {low} and {high}."
    options = f" Options: {of.options}." if of.options else ""
    return f"{_dot(of.facts.summary)} {of.direction.capitalize()}.{between}{options}"


def _dot(sentence: str) -> str:
    return sentence if not sentence or sentence.endswith((".", "?", "!")) else f"{sentence}."


TEMPLATES.filters["dot"] = _dot
