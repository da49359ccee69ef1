"""Does the network look where it should? Asked where truth is given, of methods that follow it.

The number is the metric that is registered to judge the network (the pointing game where there are boxes,
the structure score on codes), less what `random` gets on the same picture: 0 is chance. Per picture it is the
mean over the methods that follow the network, or over all of them where none does: then it says where maps
lie, and nothing about the network.

    looks there        the mean is surely above `there`
    looks elsewhere    it is surely below
    undecided          otherwise, or with fewer than 30 pictures

`there` lies between the numbers of planted and clean twins (rates.json). `centre` and `edges` stand beside
it: where a dot in the middle does as well, looking there says little.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from heatproof.explain.floors import floor_name
from heatproof.metrics.stats import mean_interval
from heatproof.verdict.answers import Answer, ClassAnswer, NetworkAnswer, Test
from heatproof.verdict.data import RunData
from heatproof.verdict.follow import ENOUGH, LEVEL, calibration
from heatproof.verdict.measures import Measure

NO_TRUTH = "Whether it looks where it should was not asked: no boxes or masks were given"


def looks(data: RunData, following: Sequence[str]) -> NetworkAnswer:
    """The answer for the network and for each class of which there are pictures."""
    of = _measure(data)
    chance = next((m for m in data.floors if floor_name(m) == "random"), None)
    methods = tuple(following or data.real)
    if of is None or not methods:
        return NetworkAnswer("undecided", note=NO_TRUTH)
    if chance is None:
        return NetworkAnswer(
            "undecided", note=f"Where it looks was not judged: {of.short} needs `random` among the methods"
        )
    sign = 1 if of.higher_is_better else -1
    columns = {
        m: sign * data.images.scores[of.name, m] for m in data.methods if (of.name, m) in data.images.scores
    }
    scored = [columns[m] for m in methods if m in columns]
    if not scored:
        return NetworkAnswer("undecided", note=NO_TRUTH)
    above = _mean(np.stack(scored)) - columns[chance]
    labels = np.array([-1 if label is None else label for label in data.images.labels])
    classes = []
    for label in sorted(set(labels[np.isfinite(above)].tolist()) - {-1}):
        test = _test(of, above[labels == label])
        classes.append(ClassAnswer(label, data.class_name(label), test.answer, test))
    whole = _test(of, above)
    context = {
        m: float(np.nanmean(columns[m] - columns[chance]))
        for m in data.floors
        if m in columns and m != chance and np.isfinite(columns[m]).any()
    }
    return NetworkAnswer(
        _together(classes, whole), tuple(classes), methods, whole, context, _said(whole, classes)
    )


def _mean(columns: np.ndarray) -> np.ndarray:
    """ "m n" -> "n": over the methods that are defined; NaN where none is."""
    known = np.isfinite(columns)
    total = np.where(known, columns, 0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)


def _measure(data: RunData) -> Measure | None:
    """The number of this run that is registered to judge the network."""
    found = [of for of in data.measures if of.is_test and of.facts.judges == "network"]
    return next((of for of in found if any((of.name, m) in data.images.scores for m in data.real)), None)


def _test(of: Measure, values: np.ndarray) -> Test:
    values = values[np.isfinite(values)]
    known = calibration()["network"]
    threshold = float(known["there"])
    low, high = mean_interval(values)
    mean = float(values.mean()) if len(values) else float("nan")
    answer: Answer = "undecided"
    if len(values) >= ENOUGH:
        surely = {
            side: float(stats.ttest_1samp(values, threshold, alternative=side).pvalue) < LEVEL
            if np.ptp(values)
            else (mean > threshold) == (side == "greater")
            for side in ("greater", "less")
        }
        answer = "yes" if surely["greater"] else "no" if surely["less"] else "undecided"
    title = f"{of.short} above chance"
    return Test(of.name, title, answer, mean, low, high, len(values), threshold, True, known.get("rates", {}))


def _together(classes: Sequence[ClassAnswer], whole: Test) -> Answer:
    """One class that looks elsewhere is enough to say so; all must look there to say that."""
    answers = {one.looks_there for one in classes} or {whole.answer}
    if "no" in answers:
        return "no"
    return "yes" if answers == {"yes"} else whole.answer if whole.answer != "no" else "undecided"


def _said(whole: Test, classes: Sequence[ClassAnswer]) -> str:
    away = [one.name for one in classes if one.looks_there == "no"]
    if away:
        return f"The network looks elsewhere on {', '.join(away)}"
    if whole.answer == "yes":
        return "The network looks where it should"
    if whole.n < ENOUGH:
        return f"Where the network looks is undecided: {whole.n} pictures with truth, {ENOUGH} are needed"
    return "Where the network looks is undecided: as often there as not; more pictures would decide it"
