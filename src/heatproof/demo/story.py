"""Sections of the demo's page beyond a usual report: which maps to use, the cheating twin, alarms, COSE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from heatproof.demo.networks import CLASSES, CODE, HARM, HARMFUL, HEALTHY, Sizes, Twin
from heatproof.explain.baselines import is_floor
from heatproof.report.page import advice
from heatproof.report.pieces import Line, LinePanel, Mark, Panels, Section
from heatproof.show import address
from heatproof.studies.contrast.protocol import maps_over_pictures, table
from heatproof.studies.cose.results import CoseResults
from heatproof.verdict.alarms import Alarm
from heatproof.verdict.answers import USES, WORDS, Verdict, listed
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
    # `inside` of the edges, a strong floor on these images
    hard = [audit.cells.get((of.name, "edges")) for of in audit.measures if of.base == "inside"]
    which = {
        "advice": advice(verdict), "verdict": verdict, "words": WORDS, "uses": USES, "listed": listed,
        "hard": hard[0].value if hard and hard[0] else math.nan,
        "same": [listed(group) for group in same_maps(audit)],
    }  # fmt: skip
    changes = {"cose": cose, "methods": sorted(cose.methods, key=is_floor), "is_floor": is_floor}
    sections: dict[tuple[str, str], dict[str, Any]] = {
        ("which", "Which maps to use"): which,
        ("twin", "The cheating twin"): cheating(twin),
        ("trainings", "A harmful training"): two_trainings(sizes, twins),
        ("cose", "Consistency and sensitivity"): changes,
    }
    return [Section(*heading, content, room="demo") for heading, content in sections.items()]


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


def cheating(twin: Twin) -> dict[str, Any]:
    """Two networks that use known evidence, and the methods that show it."""
    point, contrast, token = twin.point, twin.contrast, twin.contrast.token.name
    content: dict[str, Any] = {"twin": twin, "point": point, "token": token, "method": STRIP}
    if not point.holds:
        return content
    score, maps = contrast.scores[STRIP], maps_over_pictures(contrast, STRIP)
    rows = {"The image": (list(contrast.pictures), [f"a code with a {token}"] * STRIP_PICTURES)}
    for network, overlays, inside in zip(NETWORKS.values(), maps, (score.a, score.b), strict=True):
        rows[network] = overlays, [f"{share:.0%} on the {token}" for share in inside[:STRIP_PICTURES]]
    return content | {
        "strip": [
            (title, [(address(p), caption) for p, caption in zip(pictures, captions, strict=False)])
            for title, (pictures, captions) in rows.items()
        ],
        "networks": [
            (NETWORKS[which], [item for item in record.items if item.label == CODE])
            for which, record in twin.records.items()
        ],
        "code": CLASSES[CODE],
        "answer": told_apart(twin),
        "numbers": table(point),
    }


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


def two_trainings(sizes: Sizes, twins: Mapping[str, RunData]) -> dict[str, Any]:
    """The healthy and the harmful training, with their alarms."""
    paths = {kind: Trajectory.from_run(data.folder) for kind, data in twins.items()}
    charts = [
        (
            f"{kind} training, n = {path.checkpoints[-1].classes[CODE].total} {CLASSES[CODE]}s",
            _chart(kind, path, twins[kind]),
        )
        for kind, path in paths.items()
    ]
    return {
        "shared": sizes.first_epochs, "healthy": HEALTHY, "harmful": HARMFUL, "harm": HARM[0] / HARM[CODE],
        "twins": twins, "paths": paths, "classes": CLASSES, "code": CODE, "panels": Panels(charts),
        "first": {kind: first_alarms(data.alarms) for kind, data in twins.items()},
    }  # fmt: skip


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
