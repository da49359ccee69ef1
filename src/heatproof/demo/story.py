"""Sections of the demo's page beyond a usual report: which maps to use, the cheating twin, alarms, COSE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from PIL import Image

from heatproof.contrast.api import Contrast
from heatproof.demo.networks import Twin
from heatproof.demo.settings import CLASSES, CODE, HARM, HARMFUL, HEALTHY, Sizes
from heatproof.explain.floors import is_floor
from heatproof.report.page import AlbumClass, advice
from heatproof.report.pieces import Grid, Line, LinePanel, Mark, Panels, Section, named, number, with_sub
from heatproof.show import address
from heatproof.studies.contrast.protocol import maps_over_pictures, table
from heatproof.studies.cose.results import CoseResults
from heatproof.verdict.alarms import Alarm
from heatproof.verdict.answers import USES, WORDS, Test, Verdict, listed
from heatproof.verdict.data import RunData
from heatproof.verdict.trajectory import CheckpointState, Trajectory

NETWORKS = {"A": "A, the cheating twin", "B": "B, the healthy copy"}
STRIP, STRIP_PICTURES = "gradcam", 3  # maps that are shown under both networks
SAME = 0.9995  # rank correlation from which two methods' maps are called one and the same


def story(
    sizes: Sizes,
    audit: RunData,
    verdict: Verdict,
    twin: Twin,
    twins: Mapping[str, RunData],
    cose: CoseResults,
) -> list[Section]:
    """The sections, in order."""
    return [which_maps(audit, verdict), cheating(twin), two_trainings(sizes, twins), under_changes(cose)]


def which_maps(audit: RunData, verdict: Verdict) -> Section:
    """Every method's answer, with the results of the tests that vote."""
    rows = []
    for method in verdict.methods:
        votes: list[str] = [_with_interval(test) for test in method.tests if test.votes]
        answer = Markup("<strong>{}</strong>").format(WORDS[method.follows])
        rows.append([named(method.method), answer, *(votes or ["–", "–"]), method.note])
    heads = ["Method", "the network", "above its maps of untrained networks", "above the rotated map", ""]
    content = {
        "advice": advice(verdict),
        "hard": _hard_floor(audit),
        "tests": Grid(heads, rows, "Which methods follow the network"),
        "network": [(c.name, USES[c.answer], c.test) for c in verdict.network.classes],
        "same": [listed(group) for group in same_maps(audit)],
    }
    return Section("which", "Which maps to use", content, room="demo")


def _with_interval(test: Test) -> Markup:
    low, high = (number(end, "+.3f") for end in (test.low, test.high))
    return with_sub(number(test.value, "+.3f"), f"{low} to {high}, n = {test.n}")


def _hard_floor(audit: RunData) -> float | None:
    """`inside` of the edges, a strong floor on these images."""
    of = next((m for m in audit.measures if m.base == "inside"), None)
    cell = audit.cells.get((of.name, "edges")) if of else None
    return None if cell is None or math.isnan(cell.value) else cell.value


def same_maps(audit: RunData) -> list[list[str]]:
    """Groups of methods with the same maps on this network."""
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


def cheating(twin: Twin) -> Section:
    """Two networks that use known evidence, and the methods that show it."""
    point = twin.point
    content: dict[str, Any] = {
        "token": twin.contrast.token.name,
        "epochs": point.epochs,
        "flips": twin.flips,
        "holds": point.holds,
    }
    if point.holds:
        content |= {
            "n": point.scores[STRIP].n,
            "strip": _side_by_side(twin.contrast, STRIP),
            "albums": [(NETWORKS[which], AlbumClass(pages)) for which, pages in twin.albums.items()],
            "answer": told_apart(twin),
            "numbers": table(point),
        }
    return Section("twin", "The cheating twin", content, room="demo")


def _side_by_side(contrast: Contrast, method: str) -> Grid:
    """Images with the tag, and the method's maps of them under both networks."""

    def cell(image: Image.Image, caption: str) -> Markup:
        return with_sub(
            Markup('<img width="128" alt="{}" src="{}">').format(caption, address(image)), caption
        )

    token, score = contrast.token.name, contrast.scores[method]
    rows = [["The image", *(cell(p, f"a code with a {token}") for p in contrast.pictures[:STRIP_PICTURES])]]
    overlays = zip(NETWORKS.values(), maps_over_pictures(contrast, method), (score.a, score.b), strict=True)
    for network, maps, inside in overlays:
        captions = [f"{share:.0%} on the {token}" for share in inside[:STRIP_PICTURES]]
        rows.append([network, *map(cell, maps[:STRIP_PICTURES], captions)])
    heads = [f"Maps of {method}", *[""] * STRIP_PICTURES]
    return Grid(heads, rows, f"Maps of {method} under both networks")


def told_apart(twin: Twin) -> str:
    """Methods that distinguish the two networks, in one to three sentences."""
    if not twin.point.holds:
        return "No method is judged, because planting failed."
    token = twin.contrast.token.name
    endings = {
        "show": f", visibly: most maps of the cheating twin mark the {token}.",
        "tell": f" only in numbers: the {token} is not visible in most maps.",
        "neither": ".",
    }
    sentences = []
    for kind, methods in twin.methods.items():
        if methods:
            single = len(methods) == 1
            verb = (
                f"distinguish{'es' * single}" if kind != "neither" else f"do{'es' * single} not distinguish"
            )
            sentences.append(f"{listed(methods)} {verb} the two networks{endings[kind]}")
    return " ".join(sentences)


def two_trainings(sizes: Sizes, twins: Mapping[str, RunData]) -> Section:
    """The healthy and the harmful training, with their alarms."""
    paths = {kind: Trajectory.from_run(data.folder) for kind, data in twins.items()}
    rows = []
    for kind, data in twins.items():
        last = paths[kind].checkpoints[-1]
        link = Markup("<code>{}/report.html</code>").format(kind)
        alarms = f"{len(data.alarms)}, from " + named(data.alarms[0].checkpoint) if data.alarms else "none"
        sure = f"{last.classes[CODE].gold} of {last.classes[CODE].total}"
        rows.append([kind, number(last.auc), f"{last.accuracy:.1%}", sure, alarms, link])
    heads = ["Training", "AUC", "accuracy", f"confident {CLASSES[CODE]}s", "alarms", "report"]
    first = {kind: first_alarms(twins[kind].alarms) for kind in (HARMFUL, HEALTHY)}
    content = {
        "shared": sizes.first_epochs,
        "healthy": HEALTHY,
        "harmful": HARMFUL,
        "harm": HARM[0] / HARM[CODE],
        "numbers": Grid(heads, rows, "The two trainings at their last checkpoint"),
        "panels": Panels(
            [
                (
                    f"{kind} training, n = {path.checkpoints[-1].classes[CODE].total} {CLASSES[CODE]}s",
                    _chart(kind, path, twins[kind]),
                )
                for kind, path in paths.items()
            ]
        ),
        "alarms": [
            (kind, alarms, len(twins[kind].alarms) - len(alarms), len(twins[kind].checkpoints))
            for kind, alarms in first.items()
        ],
    }
    return Section("trainings", "A harmful training", content, room="demo")


def _chart(kind: str, path: Trajectory, data: RunData) -> LinePanel:
    def sure(checkpoint: CheckpointState) -> float:
        state = checkpoint.classes[CODE]
        return state.gold / state.total if state.total else math.nan

    shares = [(float(i), sure(checkpoint)) for i, checkpoint in enumerate(path)]
    aucs = [(float(i), checkpoint.auc) for i, checkpoint in enumerate(path)]
    names = [checkpoint.name for checkpoint in path]
    first = {alarm.checkpoint: alarm for alarm in reversed(data.alarms)}
    marks = [Mark(shares[names.index(at)], "", alarm.sentence) for at, alarm in first.items()]
    ends = [(0.0, names[0]), (float(len(names) - 1), names[-1])]
    lines = [Line("AUC", aucs, "faint"), Line("confident", shares)]
    return LinePanel(f"AUC and confident codes of the {kind} network", lines, ends, marks=marks)


def first_alarms(alarms: Sequence[Alarm]) -> list[Alarm]:
    """Each alarm at the first checkpoint that raises it."""
    seen: dict[tuple[int, str | None, int | None], Alarm] = {}
    for alarm in alarms:
        seen.setdefault((alarm.mechanism, alarm.method, alarm.label), alarm)
    return list(seen.values())


def under_changes(cose: CoseResults) -> Section:
    """COSE of each method: similar maps where the answer stays, different ones where it changes."""
    rows = []
    for method in sorted(cose.methods, key=is_floor):
        score = cose.scores[method]
        low, high = (number(end, ".1f") for end in score.interval)
        name = with_sub(named(method), "control") if is_floor(method) else named(method)
        value = with_sub(number(score.value, ".1f"), f"{low} to {high}")
        pairs = str(score.n_same), str(score.n_changed)
        rows.append([name, value, number(score.consistency), number(score.sensitivity), *pairs])
    heads = ["Method", "COSE ↑", "consistency ↑", "sensitivity ↑",
             "pairs with the same prediction", "pairs with another"]  # fmt: skip
    content = {"images": cose.images, "numbers": Grid(heads, rows, "COSE by method")}
    return Section("cose", "Consistency and sensitivity", content, room="demo")
