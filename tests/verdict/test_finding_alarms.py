"""Alarms where an image may have several findings: each is judged by its own AUC."""

from __future__ import annotations

import math
from dataclasses import replace

from heatproof.metrics.results import PerClass
from heatproof.verdict.alarms import find_alarms
from heatproof.verdict.trajectory import (
    CheckpointState,
    ClassState,
    LabelState,
    Trajectory,
    auc_falls,
)

NAMES = ("mass", "nodule")


def state(
    name: str, aucs: tuple[float, float], gold: tuple[int, int], c: tuple[float, float]
) -> CheckpointState:
    """200 images with each finding and 200 without; the network is sure of all that have it not."""
    scores = {k: PerClass(value, gold[k], 0.0, (value, value)) for k, value in enumerate(c)}
    overall = PerClass(sum(c) / 2, sum(gold), 0.0, (sum(c) / 2, sum(c) / 2))
    return CheckpointState(
        name, None, sum(aucs) / 2, 0.9, {k: ClassState(200, gold[k]) for k in range(2)},
        {"gradcam": replace(overall, classes=scores)},
        labels={k: LabelState(aucs[k], ClassState(200, 200)) for k in range(2)},
    )  # fmt: skip


def alarms(*states: CheckpointState) -> set[tuple[int, str, str | None]]:
    alarms = find_alarms(Trajectory(states, NAMES))
    return {(alarm.mechanism, alarm.checkpoint, alarm.class_name) for alarm in alarms}


GOOD = state("e1", (0.95, 0.95), (180, 180), (0.5, 0.5))


def test_a_list_that_empties_while_its_own_auc_holds_is_an_alarm() -> None:
    assert alarms(GOOD, state("e2", (0.95, 0.95), (2, 180), (math.nan, 0.5))) == {(1, "e2", "mass")}


def test_a_finding_whose_own_auc_has_fallen_needs_none_though_the_mean_holds() -> None:
    fallen = state("e2", (0.86, 0.99), (2, 180), (math.nan, 0.5))
    assert auc_falls(Trajectory((GOOD, fallen))) == [False, False]
    assert auc_falls(Trajectory((GOOD, fallen)), label=0) == [False, True]
    assert auc_falls(Trajectory((GOOD, fallen)), label=1) == [False, False]
    assert alarms(GOOD, fallen) == set()


def test_maps_of_one_finding_may_fall_apart() -> None:
    assert alarms(GOOD, state("e2", (0.95, 0.95), (180, 180), (0.01, 0.5))) == {(2, "e2", "mass")}


def test_the_mean_hides_a_finding() -> None:
    hidden = (0.95, 0.95), (180, 180), (0.05, 0.5)
    assert alarms(state("e1", *hidden), state("e2", *hidden)) == {(3, "e1", "mass"), (3, "e2", "mass")}
    assert alarms(state("e1", *hidden)) == set()


def test_an_alarm_tells_the_auc_of_its_finding() -> None:
    (alarm,) = find_alarms(Trajectory((GOOD, state("e2", (0.96, 0.90), (2, 180), (math.nan, 0.5))), NAMES))
    assert alarm.evidence["auc"] == 0.96 and "AUC holds at 0.960" in alarm.sentence
