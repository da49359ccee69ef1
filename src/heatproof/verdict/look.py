"""Whether the network uses the object: from annotated images, by methods that follow the network.

The number is the metric that is registered to judge the network (the pointing game with boxes, the structure
score on codes), less that of `random` on the same image: 0 is chance. Per image it is the mean over the
methods that follow the network.

    looks at the object    the mean is surely above `there`
    looks elsewhere        it is surely below
    undecided              otherwise, with fewer than 30 images, or if the annotations cover so much of the
                           image that a map that always hits them would not surely be above `there`

"Surely": a one-sided t test over images at 5 %, Holm-corrected over the classes. One class that looks
elsewhere is enough for this answer of the network; else all its images together decide. If no method follows,
the mean is over all of them: it shows where maps lie, not what the network uses. Images of a class on
which no test of the maps is defined are no evidence: the class is undecided, and they do not count.

`there` lies between the numbers of planted and clean twins (rates.json). The numbers of `centre` and `edges`
are given for comparison: if a dot in the centre scores as high, the answer is weak evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from heatproof.errors import counted
from heatproof.metrics.stats import mean_interval
from heatproof.verdict.answers import Answer, ClassAnswer, NetworkAnswer, Test, listed
from heatproof.verdict.data import Measure, RunData, mean_over_methods
from heatproof.verdict.follow import ENOUGH, LEVEL, calibration, decided, holm, p_above

NOT_TESTED = "Whether the network looks where it should was not tested"


def looks(data: RunData, following: Sequence[str], untested: Collection[int] = ()) -> NetworkAnswer:
    """The answer for the network and for each class with annotated images.

    Args:
        data: the run.
        following: methods that follow the network.
        untested: classes on whose images no test of the maps is defined.
    """
    judging = [of for of in data.measures if of.is_test and of.facts.judges == "network"]
    of = next((of for of in judging if any((of.name, m) in data.images.scores for m in data.real)), None)
    if of is None:
        return NetworkAnswer("undecided", note=_not_tested(data))
    sign = 1 if of.higher_is_better else -1
    columns = {m: sign * column for (name, m), column in data.images.scores.items() if name == of.name}
    # Chance on the same image, since a large object is hit by any map.
    chance = next(
        (columns[m] for m in data.floors if data.facts.floor_name(m) == "random" and m in columns), None
    )
    if chance is None:
        why = f"{NOT_TESTED}: {of.short} needs `random` among the methods"
        return NetworkAnswer("undecided", note=why)
    # Only maps that follow the network show what it uses; if none does, all are averaged as information.
    methods = tuple(m for m in following or data.real if m in columns)
    above = data.images.distinct(mean_over_methods(np.stack([columns[m] for m in methods])) - chance)
    known = np.isfinite(above)
    counts = known & ~np.array([c in untested for c in data.images.explained], bool)
    labels = np.array([-1 if label is None else label for label in data.images.labels])
    by_class = {c: above[known & (labels == c)] for c in sorted(set(labels[known].tolist()) - {-1})}
    answers: dict[int, Answer] = dict.fromkeys(by_class, "undecided")
    answers |= _answers({c: own for c, own in by_class.items() if c in labels[counts]})
    low, high = of.facts.limits
    room = (high if of.higher_is_better else -low) - chance  # of the best possible scores
    covered = [c for c in by_class if _has_no_room(room[known & (labels == c)])]
    answers |= dict.fromkeys(covered, "undecided")
    all_covered = _has_no_room(room[counts])
    whole = _test(of, above[counts], "undecided" if all_covered else _answers({"": above[counts]})[""])
    # One class with a shortcut is a defect even if the mean over all classes is good.
    lie: Answer = "no" if "no" in answers.values() else whole.answer
    classes = tuple(
        ClassAnswer(
            c, data.class_name(c), answers[c] if following else "undecided", _test(of, own, answers[c])
        )
        for c, own in by_class.items()
    )
    context = {
        m: float(np.nanmean(columns[m] - chance))
        for m in data.floors
        if m in columns and columns[m] is not chance and np.isfinite(columns[m] - chance).any()
    }
    note = _note(lie, whole.n, [c.name for c in classes if c.test.answer == "no"], bool(following))
    if all_covered and lie != "no":
        hits = f"`random` hits them on {chance[counts].mean():.0%} of the images"
        note = f"Where the network looks cannot be tested: annotations cover too much of the image, {hits}"
    elif covered:
        names = listed([data.class_name(c) for c in covered], most=5)
        note += f"; this cannot be tested on {names}, where annotations cover too much of the image"
    return NetworkAnswer(lie if following else "undecided", lie, classes, methods, whole, context, note)


def _not_tested(data: RunData) -> str:
    if not data.real:
        return f"{NOT_TESTED}: all methods of the run are controls"
    judging = (facts for facts in data.facts.every_metric if facts.test and facts.judges == "network")
    names = " or ".join(sorted(facts.name for facts in judging))
    return f"{NOT_TESTED}: this needs images with boxes or masks, and the metric {names}"


def _answers(columns: Mapping[Any, np.ndarray]) -> dict[Any, Answer]:
    there = float(calibration()["network"]["there"])
    enough = {key: column for key, column in columns.items() if len(column) >= ENOUGH}
    # Holm over the classes: with twenty classes, one would be "surely" wrong by chance at 5 % each.
    above = holm({key: p_above(column, there) for key, column in enough.items()})
    below = holm({key: p_above(-column, -there) for key, column in enough.items()})
    return {key: decided(above[key], below[key]) if key in enough else "undecided" for key in columns}


def _has_no_room(room: np.ndarray) -> bool:
    """Whether even the best possible scores would not surely be above chance by `there`."""
    there = float(calibration()["network"]["there"])
    return len(room) >= ENOUGH and bool(np.isfinite(room).all()) and p_above(room, there) >= LEVEL


def _test(of: Measure, values: np.ndarray, answer: Answer) -> Test:
    known = calibration()["network"]
    mean = float(values.mean()) if len(values) else float("nan")
    numbers = (mean, *mean_interval(values), len(values))
    title = f"{of.short} above chance"
    return Test(of.name, title, answer, *numbers, float(known["there"]), True, known.get("rates", {}))


def _note(lie: Answer, n: int, away: Sequence[str], followed: bool) -> str:
    on = f" on {', '.join(away)}" if away else ""
    if not followed:
        where = {"yes": "highlight the object", "no": f"do not highlight the object{on}"}
        maps = f"; the maps {where[lie]}" if lie in where else ""
        return f"Where the network looks is undecided, because no method follows it{maps}"
    if lie == "no":
        return f"The network does not look at the annotated object{on}"
    if lie == "yes":
        return f"The network looks at the annotated object ({counted(n, 'image')})"
    if n < ENOUGH:
        return f"Where the network looks is undecided: {counted(n, 'annotated image')}, {ENOUGH} are needed"
    return (
        "Where the network looks is undecided: the score is too close to the threshold; add annotated images"
    )
