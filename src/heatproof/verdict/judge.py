"""The verdict on a run: both questions at one checkpoint, the alarms over training, what was not asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from heatproof.errors import StoreError, counted
from heatproof.metrics.classifier import class_order
from heatproof.metrics.stats import mean_interval
from heatproof.run.plan import DEAD_LAYER, NO_EVIDENCE
from heatproof.run.predictions import read_predictions
from heatproof.store import RunFolder
from heatproof.store.ledger import write_record
from heatproof.verdict.alarms import surely_above
from heatproof.verdict.answers import Answer, LabelAgreement, MethodAnswer, Test, Verdict, listed
from heatproof.verdict.data import Cell, RunData, read_run
from heatproof.verdict.findings import no_skill
from heatproof.verdict.follow import (
    ALONE,
    ENOUGH,
    KINDS,
    FollowRule,
    Values,
    alone,
    answers,
    calibration,
    ignores_weights,
    limits,
    rule,
    voter,
)
from heatproof.verdict.look import looks
from heatproof.verdict.measures import BLANK
from heatproof.verdict.rules import MIN_USABLE

FILE = "verdict.json"
CONTRAST = "`heatproof contrast MODEL IMAGES` would decide it"
SEE_NOTES = "see notes"
STORED = "files:"  # a method whose maps are read
FEW_BLANK, MOSTLY = 0.05, 0.5
ENOUGH_OF_A_CLASS = 10  # images, for a recall of 0 to be named: the recall is then surely below 26 %
TINY, FEWEST_PIXELS = 8, 8  # below 1 / TINY of the input, or so few pixels along a side
MONITOR = "monitor"  # the kind of a run folder that a training writes
UNMOVED = "random weights change nothing about its maps"
BLANK_WORDS = {
    NO_EVIDENCE: "for want of positive evidence for the explained class",
    DEAD_LAYER: "because the layer is dead there",
}


def judge(data: RunData, by: FollowRule | None = None) -> Verdict:
    """The verdict on a run at the checkpoint shown. by: another rule than the calibrated one."""
    by = by or rule()
    notes = tuple(_in_the_way(data))
    names = [_voting(data, kind) for kind in KINDS]
    nothing = np.full(len(data.images.ids), math.nan)
    values: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for m in data.real:
        weights, place = (data.images.distinct(data.images.scores.get((name, m), nothing)) for name in names)
        values[m] = weights, place
    stored = bool(values) and all(m.startswith(STORED) for m in values)
    scale = ALONE if stored else 0.0
    found = answers(values, by, scale)
    yes = [m for m, answer in found.items() if answer == "yes"]
    silent = [m for m in yes if _says_nothing(data, m, yes, values)]
    found |= dict.fromkeys(silent, "undecided")
    if notes:  # nothing is said in favour of maps of a network that does not answer, or of half a run
        found = {m: "undecided" if answer == "yes" else answer for m, answer in found.items()}
    following = [m for m, answer in found.items() if answer == "yes"]
    sides = limits(values, by, scale)
    methods = []
    for m, answer in found.items():
        alone_by = dict(zip(names, alone(values[m], sides), strict=True))
        tests = tuple(_tests(data, m, alone_by, math.nan if sides is None else sides[1]))
        blank = data.cells.get((BLANK.name, m), Cell(math.nan)).value
        told, silent_on = [], [data.class_name(c) for c in _untold(data, values, [m])]
        if answer == "no":
            told.append(UNMOVED if ignores_weights(values[m]) else "no better than its shadows")
        elif answer == "undecided" and not all(names):
            told.append(_missing(data))
        elif m in silent:
            told.append(
                "it follows where it shows something, but mostly it does not: another layer may show more"
            )
        elif answer == "undecided":
            counts = [int(np.isfinite(column).sum()) for column in values[m]]
            without = _without_controls(data, names[0], m) if counts[0] == 0 < counts[1] else ""
            told.append(without or _would_decide(min(counts), bool(notes), sides is None, stored))
        if answer != "undecided" and silent_on:
            whose = "their" if silent_on[1:] else "its"
            told.append(f"judged without {listed(silent_on)}: on none of {whose} pictures can the test tell")
        if blank >= FEW_BLANK:
            told.append(_blank(data, m, following))
        methods.append(MethodAnswer(m, answer, tests, blank, "; ".join(told)))
    alarms = tuple(asdict(alarm) | {"name": alarm.name} for alarm in data.alarms)
    rates = {key: calibration()[key] for key in ("rates", "population", "made_by")}
    rates |= {"rates": calibration()["rates_alone"]} if stored else {}
    network = looks(data, following, _untold(data, values, following))
    labels, warnings = _label_agreement(data), (*data.manifest.warnings, *_image_warnings(data))
    return Verdict(data.checkpoint, tuple(methods), network, alarms, notes, rates, labels, warnings)


def keep(data: RunData, verdict: Verdict) -> str:
    """Write verdict.json into the run's folder; what to tell about it.

    The file is about the last checkpoint: the verdict on another is not kept. A folder that may not be
    written is no reason to fail.
    """
    if (data.model, data.checkpoint) != (data.models[0], data.checkpoints[-1]):
        return ""
    path = data.folder.path / FILE
    try:
        write_record(path, verdict.as_json())
    except StoreError as error:
        return f"the verdict is not kept: {error}"
    return f"written to {path}"


def conclude(folder: RunFolder) -> Verdict:
    """The verdict on a run that has just ended, kept in its folder."""
    data = read_run(folder)
    verdict = judge(data)
    keep(data, verdict)
    return verdict


def _voting(data: RunData, kind: str) -> str:
    """The rows' name of a test that votes, with its options; "" where it was not run."""
    base = f"{voter(data.facts).name}_{kind}"
    return next((of.name for of in data.measures if of.base == base), "")


def _says_nothing(data: RunData, method: str, following: Sequence[str], values: Values) -> bool:
    """Whether surely most of its maps are blank, of pictures on which another method that follows is not.

    Only pictures count on which the test could tell.
    """
    empty = data.images.scores.get((BLANK.name, method))
    others = [np.isfinite(values[m][0]) for m in following if m != method]
    if empty is None or not others:
        return False
    shown = np.any(others, axis=0)
    return surely_above(int((empty[shown] > 0).sum()), int(shown.sum()), MOSTLY)


def _untold(data: RunData, values: Values, methods: Sequence[str]) -> list[int]:
    """Explained classes on none of whose pictures the test that votes can tell for any of the methods."""
    can = [np.isfinite(column) for m in methods for column in values[m]]
    if not np.any(can):
        return []
    told = {c for c, one in zip(data.images.explained, np.any(can, axis=0), strict=True) if one}
    return sorted({c for c in data.images.explained if c is not None} - told)


def _tests(data: RunData, method: str, voting: Mapping[str, Answer], threshold: float) -> Iterator[Test]:
    """The tests that vote, then the others that are about maps, as information."""
    of_maps = [of for of in data.measures if of.facts.judges == "map" or of.name in voting]
    for of in sorted(of_maps, key=lambda of: of.name not in voting):
        if cell := data.cells.get((of.name, method)):
            numbers = (cell.value, cell.low, cell.high, cell.n or 0)
            if of.name in voting:
                rates = calibration()["tests"].get(of.base, {})
                yield Test(of.name, of.plain, voting[of.name], *numbers, threshold, True, rates)
            else:
                yield Test(of.name, of.plain, "undecided", *numbers)


def _missing(data: RunData) -> str:
    """How the test that votes gets into this run."""
    name = voter(data.facts).name
    if data.manifest.config.get("kind") == MONITOR:
        return f"the monitor was not told to measure {name}: Monitor(metrics=[{name!r}])"
    return f"add {name} to the metrics of its study and run that again"


def _without_controls(data: RunData, metric: str, method: str) -> str:
    """Why no image has a number against maps under random weights, as the rows say it."""
    rows = data.folder.scores().sql(
        "select mode(reason) as reason from scores "
        "where metric = ? and method = ? and model = ? and checkpoint = ? and isnan(value)",
        [metric, method, data.model, data.checkpoint],
    )
    return rows[0]["reason"] or ""


def _would_decide(n: int, in_the_way: bool, nobody: bool, stored: bool) -> str:
    if n < ENOUGH:
        return f"{counted(n, 'picture')} on which the test can tell, {ENOUGH} are needed"
    if in_the_way:
        return SEE_NOTES
    if stored:
        return (
            f"without another method in the run, maps must be surely {rule().yes * ALONE:g} better than both "
            "controls: add one to its study, such as gradcam, and run that"
        )
    if nobody:
        return f"no method stands out from its shadows on this network, so none is judged: {CONTRAST}"
    return f"too close to its shadows on {n} pictures: more pictures, or {CONTRAST}"


def _blank(data: RunData, method: str, following: Sequence[str]) -> str:
    """How many maps are blank and why, and how many where another method that follows shows something."""
    own = data.images.scores[BLANK.name, method] > 0
    others = [data.images.scores[BLANK.name, m] == 0 for m in following if m != method]
    why = [
        f"{count / len(own):.0%} {words}"
        for reason, words in BLANK_WORDS.items()
        if (count := data.blank_reasons.get((method, reason), 0))
    ]
    if others:
        beside = np.mean(own & np.any(others, axis=0))
        why.append(f"{beside:.0%} where another method that follows shows something")
    return f"{np.mean(own):.0%} of its maps are blank{': ' * bool(why)}{', '.join(why)}"


def _in_the_way(data: RunData) -> Iterator[str]:
    """What stands in the way of saying anything good."""
    status = data.folder.status()
    if not status.complete:
        yield f"the run is not complete: {status.sentence}"
    elif status.usable < MIN_USABLE:
        yield f"too few pictures could be used: {status.sentence}"
    if not data.real:
        yield "no method of the run looks at the network"
    silent = _silent(data)
    if silent or not data.images.ids:
        asked = counted(len(data.images.ids), "picture")
        yield f"the network's answers to {silent} of {asked} are not numbers"
    if len(tiny := _tiny(data)) > MOSTLY * len(data.images.ids):
        yield _tiny_images(tiny)
    yield from _other_order(data)
    if data.manifest.is_multilabel:
        yield from no_skill(data.folder, data.model, data.checkpoint, ENOUGH, data.images.copies)
    else:
        yield from _no_skill(data)


def _image_warnings(data: RunData) -> Iterator[str]:
    """What to know about the images beside the answers."""
    images, tiny = data.images, _tiny(data)
    if images.copies:
        total = images.distinct_files + len(images.copies)
        only = "Only " * (images.distinct_files < MOSTLY * total)
        yield (
            f"{only}{images.distinct_files:,} of the {total:,} images are distinct: the others are "
            "near-duplicates (equal, mirrored, cropped, darker or compressed) and count with their original"
        )
    if 0 < len(tiny) <= MOSTLY * len(images.ids):
        yield _tiny_images(tiny)


def _tiny(data: RunData) -> np.ndarray:
    """ "n 2": sides of images below an eighth of the network's input, or enlarged from under 8 pixels."""
    if data.images.sides is None:
        return np.zeros((0, 2), int)
    own, of_input = data.images.sides.T
    return np.asarray(
        data.images.sides[own < np.maximum(of_input / TINY, np.minimum(FEWEST_PIXELS, of_input))]
    )


def _tiny_images(sides: np.ndarray) -> str:
    least, of_input = sides[sides[:, 0].argmin()].tolist()
    return (
        f"{counted(len(sides), 'image')} far smaller than the network's input (a side of {least} pixels, "
        f"it takes {of_input}), so that the network sees little more than interpolation"
    )


def _silent(data: RunData) -> int:
    """Pictures to which the network gave neither a probability nor, where its head has none, a value."""
    unsure = [
        i for i, chance in zip(data.images.ids, data.images.confidence, strict=True) if math.isnan(chance)
    ]
    if not unsure:
        return 0
    rows = data.folder.scores().sql(
        "select image from scores "
        "where metric = 'value' and not isnan(value) and model = ? and checkpoint = ?",
        [data.model, data.checkpoint],
    )
    return len({*unsure} - {row["image"] for row in rows})


def _right_by_class(data: RunData) -> dict[int | None, list[float]]:
    """By label, 1 for every image that is answered as labelled, else 0."""
    right: dict[int | None, list[float]] = {}
    shares = data.images.distinct(np.array([math.nan if one is None else one for one in data.images.right]))
    for label, share in zip(data.images.labels, shares.tolist(), strict=True):
        if not math.isnan(share):
            right.setdefault(label, []).append(share)
    return right


def _label_agreement(data: RunData) -> LabelAgreement:
    right = {} if data.manifest.is_multilabel else _right_by_class(data)
    answers = [one for own in right.values() for one in own]
    never = [c for c, own in right.items() if len(own) >= ENOUGH_OF_A_CLASS and not any(own)]
    names = tuple(data.class_name(c) for c in sorted(c for c in never if c is not None))
    return LabelAgreement(float(np.mean(answers)) if answers else math.nan, len(answers), names)


def _other_order(data: RunData) -> Iterator[str]:
    """Whether another order of the classes explains the labels much better."""
    names = [data.class_name(label) for label in range(max(data.classes, default=-1) + 1)]
    if data.manifest.is_multilabel:
        answers = read_predictions(data.folder, data.checkpoint, model=data.model)
        truth, scores = answers.labels, answers.probabilities
    else:
        pairs = zip(data.images.labels, data.images.predicted, strict=True)
        known = np.array([(a, b) for a, b in pairs if a is not None and b is not None], dtype=int)
        if not len(known) or known.min() < 0:
            return
        columns = np.eye(max(known.max() + 1, len(names)), dtype=bool)
        truth, scores = columns[known[:, 0]], columns[known[:, 1]].astype(float)
    if truth.shape[1] == len(names) and (order := class_order(truth, scores)):
        yield order.sentence(names, scores.shape[1])


def _no_skill(data: RunData) -> Iterator[str]:
    """By recall, so that calling everything the largest class is no skill, however large the class is."""
    right = _right_by_class(data)
    n = sum(map(len, right.values()))
    if n < ENOUGH:
        return
    chance = 1 / (len(right) if len(right) > 1 else max(2, len(data.classes)))
    weighted = [each * n / len(right) / len(own) for own in right.values() for each in own]
    low, high = mean_interval(weighted)
    if not low > chance:
        yield (
            f"the network is not surely better than chance: mean recall {np.mean(weighted):.1%} (95 % "
            f"interval {low:.1%} to {high:.1%}, n = {n}), where guessing has {chance:.1%}"
        )
