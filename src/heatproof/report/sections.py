"""The page's sections, one question each: from the run's data to a Section, which may say why it is empty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape

from heatproof.errors import InputError
from heatproof.metrics.agreement import Matrix, metric_agreement
from heatproof.report.charts import Line, Mark, dot_rows, line_panel, pareto, scatter, shape_key
from heatproof.report.data import RunData
from heatproof.report.markup import UNSURE, Section, fold, grid, matrix, name, number, panel, table
from heatproof.report.measures import Measure, in_order, measure

MOST_CLASSES = 5  # as many as there are signs for
LISTED_CLASSES = 12
SMALLEST_SPAN = 0.1


def trajectories(data: RunData) -> Section:
    """One panel per method: its C-Score (or the headline metric) and the classifier's AUC, with alarms."""
    title = "Over training"
    of = next((m for m in data.measures if m.base == "cscore"), data.headline)
    alarms = list(enumerate(data.alarms, 1))
    listed = "".join(
        f"<li><strong>{escape(alarm.name.capitalize())}</strong> ({escape(alarm.severity)}, "
        f"{name(alarm.where)}). {escape(alarm.sentence)}"
        + (f" AUC alone tells only at {name(alarm.auc_tells_at)}." if alarm.auc_tells_at else "")
        + "</li>"
        for _, alarm in alarms
    )
    body = f'<ol class="alarms">{listed}</ol>' if alarms else ""
    if len(data.checkpoints) < 2 or of is None:
        why = "the run has one checkpoint only" if of else "no metric was computed"
        return Section("trajectories", title, body, missing="" if body else why)
    steps = [(float(i), checkpoint) for i, checkpoint in enumerate(data.checkpoints)]
    auc = data.classifier("auc")
    known = [v for m in data.real for v in data.paths.get((of.name, m), []) if not math.isnan(v)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    room = max(0.0, SMALLEST_SPAN - (high - low)) / 2  # so that hardly any change looks like hardly any
    bounds = (0.0, 1.0) if of.base == "cscore" else (low - room, high + room)
    panels = []
    for method in data.real:
        path = data.paths.get((of.name, method), [])
        lines = [Line(of.short, list(enumerate(path)))]
        if auc and of.base == "cscore":
            lines.insert(0, Line("AUC", list(enumerate(auc)), "faint"))
        marks = [
            Mark((float(i), path[i] if path else math.nan), str(k), alarm.sentence)
            for k, alarm in alarms
            if alarm.method in (method, None) and (i := data.checkpoints.index(alarm.checkpoint)) >= 0
        ]
        ends = [steps[0], *([steps[-1]] if len(steps) > 1 else [])]
        chart = line_panel(f"{of.short} of {method} by checkpoint", lines, ends, bounds, marks)
        panels.append(panel(method, chart))
    said = "No alarm was raised." if not alarms else "▲ marks an alarm, numbered as below."
    faint = " The dashed line is the classifier’s AUC." if auc and of.base == "cscore" else ""
    intro = f"<p>{escape(of.plain)} {of.arrow} at each checkpoint.{faint} {said}</p>"
    rows = [[name(m), *(number(v) for v in data.paths.get((of.name, m), []))] for m in data.methods]
    rows += [["AUC", *map(number, auc)]] if auc else []
    numbers = table(["", *map(name, data.checkpoints)], rows, f"{of.short} by checkpoint")
    return Section("trajectories", title, intro + grid(panels) + body + fold("The numbers", numbers))


def classes(data: RunData) -> Section:
    """C-Score by class at the checkpoint, and what else methods have for each class."""
    first, more = _consistency(data), ""
    others = {metric for metric, method, _ in data.by_class if method and measure(metric).base != "cscore"}
    for of in in_order(sorted(others)):
        labels = sorted({label for metric, _, label in data.by_class if metric == of.name})
        lines = [
            [name(data.class_name(c)), *(_class_cell(data, of, m, c) for m in data.methods)]
            for c in labels[:LISTED_CLASSES]
        ]
        said = f"{of.plain} by class, {len(lines)} of {len(labels)}"
        more += fold(said, table(["Class", *map(name, data.methods)], lines, said))
    return replace(first, body=first.body + more, missing="" if more else first.missing)


def _consistency(data: RunData) -> Section:
    title = "By class"
    of = next((m for m in data.measures if m.base == "cscore"), None)
    labels = sorted({label for (metric, _, label) in data.by_class if of and metric == of.name})
    if of is None or not labels:
        return Section(
            "classes", title, missing="no C-Score by class was computed (add cscore to the metrics)"
        )

    def value(method: str, label: int) -> float:
        cell = data.by_class.get((of.name, method, label))
        return math.nan if cell is None else cell.defined

    few = len(labels) <= MOST_CLASSES
    rows = []
    for method in data.methods:
        dots = [(data.class_name(label), value(method, label)) for label in labels]
        if not few:
            dots = sorted((d for d in dots if not math.isnan(d[1])), key=lambda d: d[1])[:1]
        overall = data.cells.get((of.name, method))
        rows.append((method, dots, math.nan if overall is None else overall.value))
    undefined = {c: " (not defined)" for c in labels if all(math.isnan(value(m, c)) for m in data.methods)}
    keys = [
        f"{shape_key(i)} {name(data.class_name(c))}{undefined.get(c, '')}"
        for i, c in enumerate(labels)
        if few
    ]
    keys = keys or [f"{shape_key(0)} the lowest class"]
    legend = "".join(
        f"<li>{key}</li>" for key in [*keys, '<span class="barkey"></span> all classes together']
    )
    chart = dot_rows(
        f"{of.short} by class at {data.checkpoint}", rows, "The table below holds the same numbers."
    )
    means = {c: [v for m in data.real if not math.isnan(v := value(m, c))] for c in labels}
    order = sorted(labels, key=lambda c: sum(means[c]) / len(means[c]) if means[c] else math.inf)
    shown = labels if few else order[:LISTED_CLASSES]
    lines = [[name(data.class_name(c)), *(_class_cell(data, of, m, c) for m in data.methods)] for c in shown]
    more = (
        "" if len(shown) == len(labels) else f" The {len(shown)} lowest of {len(labels)} classes are listed."
    )
    intro = f"<p>How alike a method’s maps are within each class, at {name(data.checkpoint)}.{more}</p>"
    numbers = table(["Class", *map(name, data.methods)], lines, f"{of.short} by class")
    figure = f'<figure class="single">{chart}<ul class="legend">{legend}</ul></figure>'
    return Section("classes", title, intro + figure + fold("The numbers", numbers))


def _class_cell(data: RunData, of: Measure, method: str, label: int) -> str:
    cell = data.by_class.get((of.name, method, label))
    if cell is None:
        return UNSURE
    sub = f'<span class="sub">n = {cell.n}</span>' if cell.n is not None else ""
    return f"{number(cell.defined)}{sub}"


def curves(data: RunData) -> Section:
    """Insertion and deletion, one panel per method."""
    title = "Insertion and deletion"
    if not data.curves:
        return Section("curves", title, missing="no insertion or deletion curve was kept")
    ends = [(0.0, "0 %"), (50.0, "50 %"), (100.0, "100 %")]
    panels = []
    for method in [m for m in data.methods if m in data.curves]:
        found = data.curves[method]
        lines = [
            Line(kind, found[kind], style)
            for kind, style in (("insertion", "one"), ("deletion", "two"))
            if kind in found
        ]
        panels.append(panel(method, line_panel(f"Insertion and deletion by {method}", lines, ends)))
    intro = (
        "<p>Mean probability of the explained class while the pixels a map ranks highest are shown first "
        '(<span class="swatch one"></span> insertion ↑) or removed first '
        '(<span class="swatch two"></span> deletion ↓, dashed). '
        "A useful map rises fast and falls fast.</p>"
    )
    percents = sorted({p for found in data.curves.values() for line in found.values() for p, _ in line})
    rows = [
        [f"{name(m)} {kind}", *(number(dict(line).get(p, math.nan)) for p in percents)]
        for m in data.methods
        for kind, line in data.curves.get(m, {}).items()
    ]
    numbers = table(["", *(f"{p} %" for p in percents)], rows, "Insertion and deletion curves")
    return Section("curves", title, intro + grid(panels) + fold("The numbers", numbers))


def speed(data: RunData) -> Section:
    """Quality against time."""
    title = "Quality and speed"
    time = next((m for m in data.measures if m.base == "ms_per_image"), None)
    if time is None:
        return Section("speed", title, missing="no latency was measured (rows ms_per_image)")
    found = [m for base in ("structure_score", "insertion") for m in data.measures if m.base == base]
    found.sort(key=lambda m: "mass" not in m.options)  # the variant the paper plots, where it was scored
    if not found:
        return Section("speed", title, missing="no structure or insertion score was computed")
    of = found[0]
    points = []
    for method in data.real:
        x, y = data.cells.get((time.name, method)), data.cells.get((of.name, method))
        if x and y and x.value > 0 and not math.isnan(y.value):
            points.append((method, x.value, y.value))
    if not points:
        return Section("speed", title, missing="no method has both a latency and a score")
    judged = pareto(points)
    chart = scatter(
        f"{of.short} against time", judged, "milliseconds per image", of.short,
        "; ".join(f"{m}: {x:.3g} ms, {y:.3f}" for m, x, y in points),
    )  # fmt: skip
    rows = [[name(m), f"{x:.3g}", number(y), "yes" if on else "no"] for m, x, y, on in judged]
    numbers = table(["Method", "ms per image", escape(of.short), "on the front"], rows, title)
    intro = "<p>Filled points: no other method is both faster and better.</p>"
    return Section(
        "speed", title, f'{intro}<figure class="single">{chart}</figure>{fold("The numbers", numbers)}'
    )


def agreement(data: RunData) -> Section:
    """Between methods on the same images, and between metrics on the order of the methods."""
    title = "Agreement"
    parts, why = [], []
    if pairs := data.agreement.get("spearman"):
        labels = [m for m in data.methods if any(m in pair for pair in pairs)]
        cells = [[_pair(pairs, a, b) for b in labels] for a in labels]
        parts.append(
            "<h3>Between methods</h3><p>Mean rank correlation of two methods’ maps of the same image.</p>"
        )
        parts.append(matrix(labels, cells, "Agreement between methods"))
    else:
        why.append("no agreement between methods was computed (add method_agreement to the metrics)")
    between = between_metrics(data)
    if isinstance(between, Matrix):
        names = [next(m for m in data.measures if m.name == label) for label in between.labels]
        cells = [[float(v) for v in row] for row in between.values]
        n = len(data.real)
        few = ", few enough for chance to play a large part" if n < 10 else ""
        parts.append(
            "<h3>Between metrics</h3><p>Do two metrics put the methods in the same order? Rank correlation "
            f"over {n} methods{few}; 1 is the same order of merit.</p>"
        )
        heads = [m.base for m in names]
        parts.append(matrix([m.short for m in names], cells, "Agreement between metrics", heads))
    else:
        why.append(between)
    note = f"<p>Left out: {escape('; '.join(why))}.</p>" if why and parts else ""
    return Section("agreement", title, "".join(parts) + note if parts else "", missing="; ".join(why))


def between_metrics(data: RunData) -> Matrix | str:
    """How alike metrics order the methods, floors left out; or why that cannot be said."""
    table: dict[str, dict[str, float]] = {}
    for of in data.measures:
        column = {m: data.cells[of.name, m].value for m in data.real if (of.name, m) in data.cells}
        known = [v for v in column.values() if not math.isnan(v)]
        if of.higher_is_better is not None and len(set(known)) > 1:
            table[of.name] = column
    if len(data.real) < 3 or len(table) < 2:
        return "agreement between metrics needs three methods and two metrics with a direction"
    directions = {of.name: bool(of.higher_is_better) for of in data.measures if of.name in table}
    try:
        return metric_agreement(table, directions).spearman
    except InputError as error:
        return str(error)


def _pair(pairs: Mapping[tuple[str, str], float], a: str, b: str) -> float:
    return 1.0 if a == b else pairs.get((a, b), pairs.get((b, a), math.nan))


SECTIONS: tuple[Callable[[RunData], Section], ...] = (trajectories, classes, curves, speed, agreement)
