"""The page's sections, one question each: from the run's data to a Section, which may say why it is empty.

Families of scores fill tables of at most six columns, so that no table is wider than a page; a longer family
is cut into tables of about the same size. A cell's strip runs from the least to the largest number of its
column: a bar for the interval, a dot for the mean, a line for each floor.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from PIL import Image

from heatproof.errors import InputError
from heatproof.metrics.agreement import metric_agreement
from heatproof.metrics.results import PerClass
from heatproof.report.charts import DotRows, Line, LinePanel, Mark
from heatproof.report.pieces import (
    UNSURE,
    Grid,
    Panels,
    Piece,
    Section,
    ShadedTable,
    named,
    number,
    with_sub,
)
from heatproof.show import address
from heatproof.verdict.album import Album, ClassPages, CropGroup
from heatproof.verdict.answers import WORDS, Answer, Verdict
from heatproof.verdict.data import Cell, RunData
from heatproof.verdict.epochs import read_gradients, whole_norm
from heatproof.verdict.judge import SEE_NOTES
from heatproof.verdict.measures import Measure, in_order, measure

MOST_CLASSES = 5  # as many as there are signs for
LISTED_CLASSES = 12
LISTED_PICTURES = 20
SMALLEST_SPAN = 0.1
WIDEST = 6  # columns of one table of scores
ALBUM_TITLE = "What the network uses"
NO_ALBUM = "no album was made of this run; heatproof verdict RUN --album makes one"
NO_METHOD = "No method was found to follow this network: do not show these maps as the reason for an answer."


@dataclass(frozen=True)
class ScoreColumn:
    """One metric: what every method and every floor has."""

    of: Measure
    cells: Mapping[str, Cell | None]  # by method
    floors: Mapping[str, Cell]  # by floor
    best: frozenset[str]

    @property
    def most(self) -> int | None:
        """Images behind most of its numbers."""
        known = [cell.n for cell in (*self.cells.values(), *self.floors.values()) if cell is not None]
        return max((n for n in known if n is not None), default=None)

    @property
    def lines(self) -> list[float]:
        """Where the floors stand in a strip, in per cent of its length."""
        return [self.place(cell.value) for cell in self.floors.values() if not math.isnan(cell.value)]

    def place(self, value: float) -> float:
        """Where a number stands in a strip, in per cent of its length."""
        cells = [cell for cell in (*self.cells.values(), *self.floors.values()) if cell is not None]
        known = [x for cell in cells for x in (cell.value, cell.low, cell.high) if math.isfinite(x)]
        low, high = min(known, default=0.0), max(known, default=1.0)
        return round(100 * (value - low) / (high - low), 1) if high > low else 50.0


@dataclass(frozen=True)
class ScoreTable(Piece):
    """Some families of metrics, side by side."""

    methods: Sequence[str]
    families: Sequence[tuple[str, Sequence[ScoreColumn]]]

    @property
    def columns(self) -> list[ScoreColumn]:
        return [column for _, columns in self.families for column in columns]

    @property
    def caption(self) -> str:
        return f"Scores: {', '.join(dict.fromkeys(family for family, _ in self.families))}"


def scores(data: RunData, widest: int = WIDEST) -> Section:
    """Methods down, metrics across, at most `widest` in a table; each mean with its interval and n."""
    title, methods = "Scores", data.real or data.floors
    if not data.measures or not methods:
        return Section("scores", title, missing="no metric was computed for any method")
    families: dict[str, list[ScoreColumn]] = {}
    for of in data.measures:
        cells = {method: data.cells.get((of.name, method)) for method in methods}
        floors = {f: data.cells[of.name, f] for f in data.floors if (of.name, f) in data.cells}
        best = best_methods(of, {method: cells[method] for method in data.real})
        families.setdefault(of.facts.family, []).append(
            ScoreColumn(of, cells, floors if data.real else {}, frozenset(best))
        )
    tables = [ScoreTable(methods, lot) for lot in packed(families, widest)]
    return Section("scores", title, {"data": data, "tables": tables})


def packed(
    families: Mapping[str, Sequence[ScoreColumn]], widest: int = WIDEST
) -> Iterator[list[tuple[str, Sequence[ScoreColumn]]]]:
    """Families in their order, as many side by side as fit."""
    lot: list[tuple[str, Sequence[ScoreColumn]]] = []
    for family, columns in families.items():
        parts = -(-len(columns) // widest)
        each = -(-len(columns) // parts)
        for start in range(0, len(columns), each):
            part = columns[start : start + each]
            if lot and sum(len(other) for _, other in lot) + len(part) > widest:
                yield lot
                lot = []
            lot.append((family, part))
    if lot:
        yield lot


def best_methods(of: Measure, cells: Mapping[str, Cell | None]) -> set[str]:
    """Those with the best mean; nobody where there is no direction or no difference."""
    known = {m: c.value for m, c in cells.items() if c is not None and not math.isnan(c.value)}
    if of.higher_is_better is None or len(set(known.values())) < 2:
        return set()
    top = (max if of.higher_is_better else min)(known.values())
    return {method for method, value in known.items() if value == top}


def trajectories(data: RunData) -> Section:
    """One panel per method: its C-Score (or the headline metric) and the classifier's AUC, with alarms."""
    title = "Over training"
    of = next((m for m in data.measures if m.base == "cscore"), data.headline)
    if len(data.checkpoints) < 2 or of is None:
        why = "the run has one checkpoint only" if of else "no metric was computed"
        return Section("trajectories", title, missing=why)
    auc = data.classifier("auc")
    beside = auc if of.base == "cscore" else []
    known = [v for m in data.real for v in data.paths.get((of.name, m), []) if not math.isnan(v)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    room = max(0.0, SMALLEST_SPAN - (high - low)) / 2  # so that hardly any change looks like hardly any
    bounds = (0.0, 1.0) if of.base == "cscore" else (low - room, high + room)
    ends = [(0.0, data.checkpoints[0]), (len(data.checkpoints) - 1.0, data.checkpoints[-1])]
    panels = []
    for method in data.real:
        path = data.paths.get((of.name, method), [])
        lines = [Line("AUC", list(enumerate(beside)), "faint")] * bool(beside)
        lines.append(Line(of.short, list(enumerate(path))))
        marks = [
            Mark((float(i), path[i] if path else math.nan), str(k), alarm.sentence)
            for k, alarm in enumerate(data.alarms, 1)
            if alarm.method in (method, None) and (i := data.checkpoints.index(alarm.checkpoint)) >= 0
        ]
        chart = LinePanel(f"{of.short} of {method} by checkpoint", lines, ends, bounds, marks)
        cell = data.cells.get((of.name, method))
        count = f", n = {cell.n} at {data.checkpoint}" if cell and cell.n is not None else ""
        panels.append((f"{method}{count}", chart))
    rows = [[named(m), *map(number, data.paths.get((of.name, m), []))] for m in data.methods]
    rows += [["AUC", *map(number, auc)]] if auc else []
    if logged := read_gradients(data.folder.path):
        norms = [whole_norm(logged.get(name, {})) for name in data.checkpoints]
        top = max((norm for norm in norms if math.isfinite(norm)), default=1.0) * 1.05
        line = Line("norm", list(enumerate(norms)))
        panels.append(
            (
                f"norm of the gradients, n = {sum(map(math.isfinite, norms))} checkpoints",
                LinePanel("Norm of the gradients by checkpoint", [line], ends, (0.0, top)),
            )
        )
        rows += [["norm of the gradients", *map(number, norms)]]
    content = {
        "of": of,
        "alarms": data.alarms,
        "panels": Panels(panels),
        "faint": bool(beside),
        "numbers": Grid(["", *map(named, data.checkpoints)], rows, f"{of.short} by checkpoint"),
    }
    return Section("trajectories", title, content)


def classes(data: RunData) -> Section:
    """C-Score by class at the checkpoint, and what else methods have for each class."""
    title, score = "By class", next((m for m in data.measures if m.base == "cscore"), None)
    names = {metric for metric, method, _ in data.by_class if method and metric.partition("(")[0] != "cscore"}
    others = []
    for of in in_order(sorted(names), data.facts):
        labels = _labels(data, of)
        told = f"{of.plain} by class, {min(LISTED_CLASSES, len(labels))} of {len(labels)}"
        others.append(_by_class(data, of, labels[:LISTED_CLASSES], told))
    consistency = _consistency(data, score) if score and _labels(data, score) else {"chart": None}
    if not others and not consistency["chart"]:
        why = "no C-Score by class was computed (add cscore to the metrics)"
        return Section("classes", title, missing=why)
    return Section("classes", title, {**consistency, "others": others})


def _labels(data: RunData, of: Measure) -> list[int]:
    return sorted({label for metric, _, label in data.by_class if metric == of.name})


def _consistency(data: RunData, of: Measure) -> dict[str, Any]:
    """A dot for each of a few classes, or for the lowest of many, and the numbers behind them."""

    def value(method: str, label: int) -> float:
        cell = data.by_class.get((of.name, method, label))
        return math.nan if cell is None else cell.defined

    labels = _labels(data, of)
    few = len(labels) <= MOST_CLASSES
    rows = []
    for method in data.methods:
        dots = [(data.class_name(label), value(method, label)) for label in labels]
        if not few:
            dots = sorted((d for d in dots if not math.isnan(d[1])), key=lambda d: d[1])[:1]
        overall = data.cells.get((of.name, method))
        rows.append((method, dots, math.nan if overall is None else overall.value))
    undefined = {c for c in labels if all(math.isnan(value(m, c)) for m in data.methods)}
    counts = {
        c: [cell.n for m in data.methods if (cell := data.by_class.get((of.name, m, c)))] for c in labels
    }
    legend = [
        named(data.class_name(c)) + (" (not defined)" if c in undefined else _images(counts[c]))
        for c in labels
    ]
    means = {c: [v for m in data.real if not math.isnan(v := value(m, c))] for c in labels}
    order = sorted(labels, key=lambda c: sum(means[c]) / len(means[c]) if means[c] else math.inf)
    listed = labels if few else order[:LISTED_CLASSES]
    told = f"{of.short} by class at {data.checkpoint}"
    return {
        "checkpoint": data.checkpoint,
        "chart": DotRows(told, rows, "The table below holds the same numbers."),
        "legend": legend if few else ["the lowest class"],
        "unlisted": len(labels) - len(listed),
        "numbers": _by_class(data, of, listed, f"{of.short} by class"),
    }


def _images(counts: Sequence[int | None]) -> str:
    """
    >>> _images([30, 28, None]), _images([30, 30]), _images([])
    (', n = 28 to 30', ', n = 30', '')
    """
    known = sorted({n for n in counts if n is not None})
    return f", n = {known[0]}{f' to {known[-1]}' if known[1:] else ''}" if known else ""


def _by_class(data: RunData, of: Measure, labels: Sequence[int], caption: str) -> Grid:
    def shown(cell: Cell | None) -> str:
        if cell is None:
            return UNSURE
        value = number(cell.defined)
        return value if cell.n is None else with_sub(value, f"n = {cell.n}")

    rows = [
        [named(data.class_name(c)), *(shown(data.by_class.get((of.name, m, c))) for m in data.methods)]
        for c in labels
    ]
    return Grid(["Class", *map(named, data.methods)], rows, caption)


def curves(data: RunData) -> Section:
    """Insertion and deletion, one panel per method."""
    title = "Insertion and deletion"
    if not data.curves:
        return Section("curves", title, missing="no insertion or deletion curve was kept")
    ends, styles = [(0.0, "0 %"), (50.0, "50 %"), (100.0, "100 %")], {"insertion": "one", "deletion": "two"}
    panels, rows, counts = [], [], _walked(data)
    percents = sorted({p for found in data.curves.values() for line in found.values() for p, _ in line})
    for method in data.methods:
        found = data.curves.get(method, {})
        lines = [Line(kind, found[kind], style) for kind, style in styles.items() if kind in found]
        if lines:
            chart = LinePanel(f"Insertion and deletion by {method}", lines, ends)
            panels.append((f"{method}, n = {counts[method]}", chart))
        rows += [
            [named(method) + f" {kind}", *(number(dict(line).get(p, math.nan)) for p in percents)]
            for kind, line in found.items()
        ]
    numbers = Grid(["", *(f"{p} %" for p in percents)], rows, "Insertion and deletion curves")
    return Section("curves", title, {"panels": Panels(panels), "numbers": numbers})


def _walked(data: RunData) -> dict[str, int]:
    """By method, the images whose curve was kept."""
    rows = data.folder.scores().sql(
        r"""select method, count(distinct image) as n from scores where model = ? and checkpoint = ?
            and regexp_matches(metric, '^(insertion|deletion)_at_\d+') and not isnan(value) group by 1""",
        [data.model, data.checkpoint],
    )
    return {row["method"]: row["n"] for row in rows}


def agreement(data: RunData) -> Section:
    """Between methods on the same images, and between metrics on the order of the methods."""
    why, methods, metrics = [], None, None
    if pairs := data.agreement.get("spearman"):
        labels = [m for m in data.methods if any(m in pair for pair in pairs)]
        cells = [[pairs.get((a, b), pairs.get((b, a), math.nan)) for b in labels] for a in labels]
        methods = ShadedTable(labels, cells, "Agreement between methods")
    else:
        why.append("no agreement between methods was computed (add method_agreement to the metrics)")
    found = between_metrics(data)
    if isinstance(found, str):
        why.append(found)
    else:
        of = [measure(label, data.facts) for label in found.labels]
        labels, heads = [m.short for m in of], [m.base for m in of]
        metrics = ShadedTable(labels, found.values.tolist(), "Agreement between metrics", heads)
    content = {
        "methods": methods,
        "metrics": metrics,
        "count": len(data.real),
        "images": len(data.images.ids),
        "why": why,
    }
    shown = methods is not None or metrics is not None
    return Section("agreement", "Agreement", content if shown else None, "; ".join(why))


def between_metrics(data: RunData) -> PerClass | str:
    """How alike metrics order the methods, floors left out; or why that cannot be said."""
    table: dict[str, dict[str, float]] = {}
    for of in data.measures:
        column = {m: data.cells[of.name, m].value for m in data.real if (of.name, m) in data.cells}
        known = {v for v in column.values() if not math.isnan(v)}
        if of.higher_is_better is not None and len(known) > 1:
            table[of.name] = column
    if len(data.real) < 3 or len(table) < 2:
        return "agreement between metrics needs three methods and two metrics with a direction"
    directions = {name: bool(measure(name, data.facts).higher_is_better) for name in table}
    try:
        matrix: PerClass = metric_agreement(table, directions).spearman
        return matrix
    except InputError as error:
        return str(error)


def made(data: RunData) -> Section:
    """Command, versions, settings, weights: what it takes to do it again."""
    manifest, git, count = data.manifest, data.manifest.git or {}, len(data.broken)
    weights = [
        [named(checkpoint), Markup("<code>{}</code>").format(digest)]
        for checkpoint, digest in manifest.models.items()
    ]
    broken = [[named(image), reason] for image, reason in data.broken[:LISTED_PICTURES]]
    known = f"{git.get('commit', '')}{' with changes' * bool(git.get('dirty'))}"
    content = {
        "manifest": manifest,
        "command": shlex.join(map(str, manifest.command)),
        "status": data.folder.status().sentence,
        "images": len(data.images.ids),
        "makers": [_maker(made) for made in data.folder.makers()],
        "commit": known if git else "not in a repository",
        "config": json.dumps(manifest.config, indent=2, ensure_ascii=False, default=str),
        "weights": weights and Grid(["Checkpoint", "Hash"], weights, "Hashes of the weights"),
        "broken": broken and Grid(["Picture", "Why"], broken, f"Pictures that could not be used ({count})"),
    }
    return Section("made", "How this was made", content)


def _maker(made: Mapping[str, Any]) -> str:
    """Versions and device behind some parts of a run; a run may be resumed under others."""
    known = ", ".join(f"{k} {v}" for k, v in made.items() if k != "parts") or "a version that kept no record"
    return f"{known}: {made['parts']} part{'s' * (made['parts'] != 1)}"


@dataclass(frozen=True)
class CropStrip(Piece):
    """Crops that are alike to the network, with what painting them over does."""

    group: CropGroup

    @property
    def pictures(self) -> list[tuple[str, str]]:
        """The id and the address of each crop."""
        return [(crop.id, address(Image.fromarray(crop.pixels))) for crop in self.group.crops]


@dataclass(frozen=True)
class AlbumClass(Piece):
    """The strips of one class."""

    pages: ClassPages

    @property
    def strips(self) -> Sequence[CropStrip]:
        return [CropStrip(group) for group in self.pages.groups]

    @property
    def left_out(self) -> str:
        """What the strips do not show, in one sentence; nothing where they show everything."""
        kept = sum(group.n for group in self.pages.groups)
        counts = {
            f"{self.pages.n - kept} in {self.pages.others} smaller groups": self.pages.others,
            f"{self.pages.blank} whose maps mark nothing": self.pages.blank,
            f"{self.pages.called_otherwise} that the network calls otherwise": self.pages.called_otherwise,
        }
        told = [text for text, count in counts.items() if count]
        return f"Pictures that are not shown: {', '.join(told)}." if told else ""


def album_section(album: Album | None) -> Section:
    """The section of an album, or why there is none."""
    if album is None:
        return Section("album", ALBUM_TITLE, missing=NO_ALBUM)
    if not any(pages.groups for pages in album.classes):
        return Section("album", ALBUM_TITLE, missing="no map marks anything in a picture of its own class")
    return Section("album", ALBUM_TITLE, {"album": album, "classes": [AlbumClass(p) for p in album.classes]})


@dataclass(frozen=True)
class Step:
    """One thing to do, and the command that does it where there is one."""

    text: str
    command: str = ""


def next_steps(verdict: Verdict) -> list[Step]:
    """In the order in which they help: what stands in the way, the maps, the network, the training."""
    return [*_obstacles(verdict), *_maps(verdict), *_network(verdict), *_training(verdict), *_later(verdict)]


def advice(verdict: Verdict) -> str:
    """Which maps to show, in one or two sentences."""
    follows, no, undecided = (_methods(verdict, answer) for answer in WORDS)
    if not follows:
        return NO_METHOD
    keep = f"If you show maps of this network, take {listed(follows, 'or')}: what they show is its doing."
    left = [*no, *undecided]
    return f"{keep} Leave out {listed(left)}." if left else keep


def listed(words: Sequence[str], last: str = "and") -> str:
    """
    >>> listed(["a", "b", "c"], "or")
    'a, b or c'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _methods(verdict: Verdict, answer: Answer | str) -> list[str]:
    return [one.method for one in verdict.methods if one.follows == answer]


def _obstacles(verdict: Verdict) -> Iterator[Step]:
    for note in verdict.notes:
        yield Step(f"Clear this first, it stands in the way of a judgement: {note}.")


def _maps(verdict: Verdict) -> Iterator[Step]:
    if verdict.follow != "undecided":
        yield Step(advice(verdict))
    open_questions: dict[str, list[str]] = {}
    for one in verdict.methods:
        if one.follows == "undecided":
            open_questions.setdefault(one.note, []).append(one.method)
    for note, methods in open_questions.items():
        why = "it waits for what stands above" if note in ("", SEE_NOTES) else note
        yield Step(f"Decide about {listed(methods)}: {why}.")


def _network(verdict: Verdict) -> Iterator[Step]:
    network = verdict.network
    away = [one.name for one in network.classes if one.test.answer == "no"]
    if network.looks_there == "no":
        on = f" for {listed(away)}" if away else ""
        yield Step(
            f"Find out what the network uses{on}, and let somebody who knows the pictures judge it before "
            "it is put to use. An album shows it in crops:",
            "heatproof verdict RUN --album",
        )
    elif network.looks_there == "undecided" and network.note and verdict.follow != "no":
        yield Step(f"{network.note}.")
    if network.as_well and verdict.follow == "yes":
        yield Step(
            f"Add pictures whose objects lie off the middle: maps of {listed(network.as_well)}, which never "
            "look at the network, lie where they should as well, so that lying there says little so far."
        )


def _training(verdict: Verdict) -> Iterator[Step]:
    """The alarms of the checkpoint shown, each kind once."""
    here = {alarm["name"]: alarm for alarm in verdict.alarms if alarm["checkpoint"] == verdict.checkpoint}
    for name, alarm in here.items():
        yield Step(f"Look into the training, {name} at {verdict.checkpoint}: {alarm['sentence']}")
    before = {alarm["checkpoint"] for alarm in verdict.alarms} - {verdict.checkpoint}
    if before and not here:
        yield Step(f"Earlier checkpoints raised alarms ({len(before)} of them); this one does not: keep it.")


def _later(verdict: Verdict) -> Iterator[Step]:
    if verdict.follow == "yes" and not verdict.notes:
        methods = _methods(verdict, "yes")
        rule = "follows" if len(methods) == len(verdict.methods) else f'"follows {methods[0]}"'
        yield Step(
            "Ask again when the network or the pictures change. In a build, this stops it where maps no "
            "longer follow:",
            f"heatproof gate RUN --rule {rule}",
        )
    yield Step("To hand it on, print it as a PDF of at most six pages.", "heatproof report RUN --pdf")
