"""What the demo's page says beyond a usual report: what was done, which maps to use, the alarms, COSE.

Everything is read from the run folders; the words only arrange it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from heatproof.demo.settings import CLASSES, CODE, HARM, HARMFUL, HEALTHY, Sizes
from heatproof.explain.floors import is_floor
from heatproof.monitor.alarms import Alarm
from heatproof.monitor.trajectory import Checkpoint, Trajectory
from heatproof.report.charts import Line, Mark, line_panel
from heatproof.report.data import RunData
from heatproof.report.evidence import ENOUGH, floor_tests
from heatproof.report.markup import Section, grid, name, number, panel, table
from heatproof.report.verdict import FAILURE, Fact, Verdict
from heatproof.studies.cose.found import Found

SAME = 0.9995  # rank correlation from which two methods' maps are called one and the same


def story(
    sizes: Sizes,
    audit: RunData,
    verdict: Verdict,
    twins: Mapping[str, RunData],
    verdicts: Mapping[str, Verdict],
    found: Found,
) -> list[Section]:
    """The sections, in the order in which a stranger needs them."""
    return [
        which_maps(audit, verdict),
        two_trainings(sizes, twins, verdicts),
        under_changes(found),
    ]


def failures(verdict: Verdict, methods: Sequence[str]) -> dict[str, list[Fact]]:
    """The failures found in each method."""
    found = [fact for fact in verdict.every if fact.kind == FAILURE]
    return {method: [fact for fact in found if method in fact.methods] for method in methods}


def advice(audit: RunData, verdict: Verdict) -> str:
    """What to do about it, in one or two sentences."""
    caught = failures(verdict, audit.real)
    failed, good = [m for m in audit.real if caught[m]], [m for m in audit.real if not caught[m]]
    if good:
        them = "it" if len(good) == 1 else "them"
        keep = f"If you show maps of this network, take {listed(good, 'or')}: no test caught {them} out."
        return f"{keep} Leave out {listed(failed)}." if failed else keep
    fewest = min(len(found) for found in caught.values())
    nearest = [method for method in audit.real if len(caught[method]) == fewest]
    near = "all of them" if len(nearest) == len(audit.real) else listed(nearest)
    return (
        "No method passed every test: do not show these maps as the whole reason for an answer. "
        f"{_common(audit)}Nearest to passing: {near}, with {fewest} failed test{'s' * (fewest != 1)}."
    )


def _common(audit: RunData) -> str:
    """What all methods have in common: tests that every one passes, tests that none does."""
    answers = {of.short: {_beats(audit, of.name, m) for m in audit.real} for of in floor_tests(audit)}
    every, none = ([short for short, found in answers.items() if found == {a}] for a in ("yes", "no"))
    said = [f"every one beats its floors on {listed(every)}"] * bool(every)
    said += [f"none does on {listed(none)}" if every else f"none beats its floors on {listed(none)}"] * bool(
        none
    )
    return f"{'; '.join(said).capitalize()}. " if said else ""


def test_answers(audit: RunData, verdict: Verdict, method: str) -> dict[str, str]:
    """By test: yes, no, not surely; the floors first, then whether maps change with the weights."""
    found = {of.short: _beats(audit, of.name, method) for of in floor_tests(audit)}
    failed = [fact.methods for fact in failures(verdict, [method])[method] if fact.rule == "randomisation"]
    return found | {"random weights": "no" if failed else "yes"}


def which_maps(audit: RunData, verdict: Verdict) -> Section:
    """Every method against every test, in words."""
    caught = failures(verdict, audit.real)
    rows = []
    for method in audit.real:
        answers = test_answers(audit, verdict, method).values()
        cells = ["<strong>no</strong>" if answer == "no" else answer for answer in answers]
        count = len(caught[method])
        result = f"{count} failure{'s' * (count != 1)}" if count else "no failure found"
        rows.append([name(method), *cells, result])
    heads = [f"better than its floors: {escape(of.short)}" for of in floor_tests(audit)]
    body = (
        "<p>A small CNN learned to tell QR codes from patterns that look like them. The pictures are made "
        "up, so it is known where a code and its parts lie.</p>"
        f"<p><strong>{escape(advice(audit, verdict))}</strong></p>"
        "<p>Floors are maps made without the network: noise, the picture’s edges, its middle. A method that "
        "is no better than they are tells you about the picture, not about the network; so does one whose "
        f"maps stay as they were when the network’s weights become random. {_hard_floor(audit)}</p>"
        + table(
            ["Method", *heads, "changes with the weights", "in all"], rows, "Which method failed which test"
        )
        + _same_maps(audit)
    )
    return Section("which", "Which maps to use", body)


def _hard_floor(audit: RunData) -> str:
    """How well the edges alone find a code: these pictures make them a strong rival."""
    of = next((m for m in audit.measures if m.base == "inside"), None)
    cell = audit.cells.get((of.name, "edges")) if of else None
    if cell is None or math.isnan(cell.value):
        return ""
    return (
        f"Codes are full of edges: {cell.value:.0%} of the strongest edges lie on the code, which makes "
        "them a hard floor on these pictures."
    )


def _beats(audit: RunData, metric: str, method: str) -> str:
    """Whether a method is better than every floor on the same images, as the verdict judges it."""
    cell = audit.cells.get((metric, method))
    if cell is None or not cell.margins:
        return "–"
    if cell.judged < ENOUGH:
        return "too few images"
    if cell.no_better:
        return "no"
    return "not surely" if cell.failed else "yes"


def same_maps(audit: RunData) -> list[list[str]]:
    """Groups of methods whose maps are one and the same on this network."""
    pairs = audit.agreement.get("spearman", {})
    groups: list[list[str]] = []
    for method in audit.real:
        for group in groups:
            value = pairs.get((group[0], method), pairs.get((method, group[0]), math.nan))
            if value >= SAME:
                group.append(method)
                break
        else:
            groups.append([method])
    return [group for group in groups if len(group) > 1]


def _same_maps(audit: RunData) -> str:
    groups = same_maps(audit)
    if not groups:
        return ""
    named = "; ".join(listed(group) for group in groups)
    return (
        f"<p>One and the same map on this network: {escape(named)}. It ends in a mean over all places, so "
        "the gradient is the same everywhere and these methods cannot differ. Count them as one.</p>"
    )


def two_trainings(sizes: Sizes, twins: Mapping[str, RunData], verdicts: Mapping[str, Verdict]) -> Section:
    """What was done to the harmful twin, and who noticed."""
    paths = {kind: Trajectory.from_run(data.folder) for kind, data in twins.items()}
    rows = []
    for kind, data in twins.items():
        last = paths[kind].checkpoints[-1]
        link = f'<a href="{kind}/report.html">{escape(verdicts[kind].title)}</a>'
        alarms = f"{len(data.alarms)}, from {name(data.alarms[0].checkpoint)}" if data.alarms else "none"
        sure = f"{last.classes[CODE].gold} of {last.classes[CODE].total}"
        rows.append([kind, number(last.auc), f"{last.accuracy:.1%}", sure, alarms, link])
    heads = ["Training", "AUC", "accuracy", f"{CLASSES[CODE]}s it is sure of", "alarms", "its own report"]
    body = (
        f"<p>The network was trained twice. Epochs 1 to {sizes.first_epochs} are shared. The "
        f"<strong>{HEALTHY}</strong> training then goes on; in the <strong>{HARMFUL}</strong> one, on "
        f"purpose, a missed code counts {HARM[0] / HARM[CODE]:.0f} times less than a false alarm: class "
        "weights given the wrong way round. Pictures, labels, learning rate and seed are the same. The "
        "verdict above is about the healthy network.</p>"
        + table(heads, rows, "The two trainings at their last checkpoint")
        + grid([panel(f"{kind} training", _chart(kind, path, twins[kind])) for kind, path in paths.items()])
        + '<p><span class="swatch one"></span> share of the codes that the network is sure of; dotted: AUC; '
        "▲ an alarm. AUC looks only at the order of the answers: it does not move when a class is no longer "
        "recognised. Accuracy does, where somebody looks at it.</p>"
        + "".join(_alarms(kind, twins[kind]) for kind in (HARMFUL, HEALTHY))
    )
    return Section("trainings", "A training gone wrong", body)


def _chart(kind: str, path: Trajectory, data: RunData) -> str:
    def sure(checkpoint: Checkpoint) -> float:
        state = checkpoint.classes[CODE]
        return state.gold / state.total if state.total else math.nan

    shares = [(float(i), sure(checkpoint)) for i, checkpoint in enumerate(path)]
    aucs = [(float(i), checkpoint.auc) for i, checkpoint in enumerate(path)]
    names = [checkpoint.name for checkpoint in path]
    first = {alarm.checkpoint: alarm for alarm in reversed(data.alarms)}
    marks = [Mark(shares[names.index(at)], "", alarm.sentence) for at, alarm in first.items()]
    ends = [(0.0, names[0]), (float(len(names) - 1), names[-1])]
    lines = [Line("AUC", aucs, "faint"), Line("sure of", shares)]
    return line_panel(f"AUC and codes the {kind} network is sure of", lines, ends, marks=marks)


def _alarms(kind: str, data: RunData) -> str:
    title = f"<h3>Alarms of the {kind} training</h3>"
    if not data.alarms:
        return f"{title}<p>None at {len(data.checkpoints)} checkpoints.</p>"
    told = "".join(
        f"<li><strong>{escape(alarm.name.capitalize())}</strong> ({escape(alarm.severity)}, "
        f"{name(alarm.where)}). {escape(alarm.sentence)}</li>"
        for alarm in first_alarms(data.alarms)
    )
    more = len(data.alarms) - len(first_alarms(data.alarms))
    rest = f"<p>{more} more repeat these at other checkpoints.</p>" if more else ""
    return f'{title}<ol class="alarms">{told}</ol>{rest}'


def first_alarms(alarms: Sequence[Alarm]) -> list[Alarm]:
    """Each alarm at the first checkpoint that raises it."""
    seen: dict[tuple[int, str | None, int | None], Alarm] = {}
    for alarm in alarms:
        seen.setdefault((alarm.mechanism, alarm.method, alarm.label), alarm)
    return list(seen.values())


def under_changes(found: Found) -> Section:
    """COSE of each method: alike where the answer stays, different where it changes."""
    rows = []
    for method in sorted(found.methods, key=is_floor):
        score = found.scores[method]
        low, high = score.interval
        between = f'<span class="sub">{number(low, ".1f")} to {number(high, ".1f")}</span>'
        kind = '<span class="sub">floor</span>' if is_floor(method) else ""
        rows.append(
            [
                f"{name(method)}{kind}", f"{number(score.value, '.1f')}{between}", number(score.consistency),
                number(score.sensitivity), str(score.n_same), str(score.n_changed),
            ]
        )  # fmt: skip
    heads = ["Method", "COSE ↑", "alike where the answer stays ↑", "different where it changes ↑",
             "pairs with the same answer", "pairs with another"]  # fmt: skip
    body = (
        f"<p>{found.images} pictures were moved, turned, mirrored and recoloured, and shown to the earlier "
        "checkpoints and to the untrained network. A useful map stays when the answer stays and changes when "
        "the answer changes; COSE is the harmonic mean of both, times 100.</p>"
        + table(heads, rows, "COSE by method")
        + '<p>All splits: <a href="cose/summary.md">cose/summary.md</a>.</p>'
    )
    return Section("cose", "When the picture or the network changes", body)


def listed(words: Sequence[str], last: str = "and") -> str:
    """
    >>> listed(["a", "b", "c"], "or")
    'a, b or c'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
