"""The verdict on a run: both questions at one checkpoint, alarms over training, obstacles and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np

from heatproof.disk import valid_unicode
from heatproof.errors import StoreError, counted
from heatproof.metrics.classifier import auc, auc_errors, class_order
from heatproof.metrics.results import mean_interval
from heatproof.rows import MIN_USABLE
from heatproof.run.plan import DEAD_LAYER, NO_EVIDENCE
from heatproof.store import RunFolder
from heatproof.store.ledger import write_record
from heatproof.store.scores import read_predictions
from heatproof.verdict import follow
from heatproof.verdict.alarms import surely_above
from heatproof.verdict.answers import Answer, LabelAgreement, MethodAnswer, Test, Verdict, listed
from heatproof.verdict.data import BLANK, Cell, RunData, read_run
from heatproof.verdict.uses import network_answer

FILE = "verdict.json"
CONTRAST = "run `heatproof contrast MODEL IMAGES` to decide"
SEE_NOTES = "see notes"
STORED = "files:"  # a method whose maps are read
FEW_BLANK, MOSTLY = 0.05, 0.5
ENOUGH_OF_A_CLASS = 10  # images, for a recall of 0 to be named: the recall is then surely below 26 %
TINY, FEWEST_PIXELS = 8, 8  # below 1 / TINY of the input, or so few pixels along a side
MONITOR = "monitor"  # the kind of a run folder that a training writes
IGNORES_WEIGHTS = "its maps are the same for random weights"
BLANK_WORDS = {
    NO_EVIDENCE: "without positive evidence for the explained class",
    DEAD_LAYER: "because the layer is constant",
}


def judge(data: RunData, by: follow.FollowRule | None = None) -> Verdict:
    """Compute the verdict on a run at one checkpoint. by: a rule instead of the calibrated one."""
    by = by or follow.rule()
    notes = tuple(_obstacles(data))
    names, values = _voting_names(data), _values(data)
    scale, results = _scale(data), follow_answers(data, by)
    # Blank maps have no number, so a method could pass on its few other maps alone.
    yes = [m for m, answer in results.items() if answer == "yes"]
    mostly_blank = [m for m in yes if _mostly_blank(data, m, yes, values)]
    results |= dict.fromkeys(mostly_blank, "undecided")
    if notes:  # no "yes" for a network without skill, or for an incomplete run; "no" needs neither
        results = {m: "undecided" if answer == "yes" else answer for m, answer in results.items()}
    following = [m for m, answer in results.items() if answer == "yes"]
    thresholds, growth = follow.limits(values, by, scale), growth_needed(data, results, by)
    methods = []
    for m, answer in results.items():
        alone = dict(zip(names, follow.per_test_answers(values[m], thresholds), strict=True))
        tests = tuple(_tests(data, m, alone, math.nan if thresholds is None else thresholds[1]))
        blank = data.cells.get((BLANK.name, m), Cell(math.nan)).value
        texts, untested = [], [data.class_name(c) for c in _untested(data, values, [m])]
        if answer == "no":
            texts.append(
                IGNORES_WEIGHTS if follow.ignores_weights(values[m]) else "no better than its control maps"
            )
        elif answer == "undecided" and not all(names):
            texts.append(_how_to_measure(data))
        elif m in mostly_blank:
            texts.append("it follows only where its maps are not blank: try another layer")
        elif answer == "undecided":
            counts = [int(np.isfinite(column).sum()) for column in values[m]]
            reason = _missing_controls(data, names[0], m) if counts[0] == 0 < counts[1] else ""
            n = min(counts)
            texts.append(reason or _would_decide(n, growth[m], bool(notes), thresholds is None, scale > 0))
        if answer != "undecided" and untested:
            whose = "their" if untested[1:] else "its"
            without = listed(untested, most=5)
            texts.append(f"judged without {without}: the test is undefined on all {whose} images")
        if blank >= FEW_BLANK:
            texts.append(_blank(data, m, following))
        methods.append(MethodAnswer(m, answer, tests, blank, "; ".join(texts)))
    alarms = tuple(asdict(alarm) | {"name": alarm.name} for alarm in data.alarms)
    rates = {key: follow.calibration()[key] for key in ("rates", "population", "made_by")}
    if scale:
        rates["rates"] = follow.calibration()["rates_alone"]
    elif data.real:
        looks = "tested sequentially" if data.manifest.config.get("run", {}).get("tested") else "tested once"
        by_size = follow.calibration()["rates_by_size"][looks]
        such = by_size[str(min(len(data.real), len(by_size)))]
        rates["such_runs"] = such | {"methods": len(data.real), "looks": looks}
    record = data.evidence
    by_following = record is not None and bool({*record.methods} & {*following})
    network = network_answer(record, by_following, why=data.evidence_missing)
    labels, warnings = _label_agreement(data), (*data.manifest.warnings, *_image_warnings(data))
    return Verdict(data.checkpoint, tuple(methods), network, alarms, notes, rates, labels, warnings)


def follow_answers(data: RunData, by: follow.FollowRule | None = None) -> dict[str, Answer]:
    """Whether maps follow the network by the voting test alone, which is sequential if methods stop early."""
    by, scale = by or follow.rule(), _scale(data)
    steps = data.manifest.config.get("run", {}).get("tested")
    if not steps:
        return follow.answers(_values(data), by, scale)
    order = {valid_unicode(name): i for i, (name, _) in enumerate(data.folder.images())}
    at = [order.get(name, order.get(name.rpartition("#")[0], 0)) for name in data.images.ids]
    named = {m: [images for images, methods in steps if m in methods] for m in data.real}
    tested = {m: numbers or [len(order)] for m, numbers in named.items()}
    return follow.sequential_answers(partial(_values, data, np.array(at, int)), tested, by, scale)


def growth_needed(
    data: RunData, results: Mapping[str, Answer], by: follow.FollowRule | None = None
) -> dict[str, float]:
    """By undecided method, the factor by which its images must grow for an answer, if more are like these."""
    values, scale, total = _values(data), _scale(data), len(data.folder.images())
    steps = data.manifest.config.get("run", {}).get("tested")
    thresholds = follow.limits(values, by or follow.rule(), scale)
    waiting = [m for m, answer in results.items() if answer == "undecided"]
    factors = {}
    for m in waiting:
        n = max((images for images, methods in steps or () if m in methods), default=total)
        level, least = (follow.looks((n, 2 * n))[2 * n], 2.0) if steps and n else (follow.LEVEL, 1.0)
        factors[m] = max(least, follow.growth_needed(values[m], thresholds, level / len(waiting)))
    return factors


def _scale(data: RunData) -> float:
    """The scale that the rule assumes if all maps are from files, so that no known method sets it; else 0."""
    return follow.ALONE if data.real and all(m.startswith(STORED) for m in data.real) else 0.0


def _voting_names(data: RunData) -> list[str]:
    """Names in the rows of both numbers of the voting test; "" if the run does not have it."""
    voting = f"{follow.follow_metric(data.facts).name}_"
    return [next((of.name for of in data.measures if of.base == voting + kind), "") for kind in follow.KINDS]


def _values(data: RunData, at: np.ndarray | None = None, first: int = 0) -> follow.Values:
    """Both numbers of every image by method. at: place of each image in the run, of which the first count."""
    nothing = np.full(len(data.images.ids), math.nan)

    def column(name: str, method: str) -> np.ndarray:
        own = data.images.scores.get((name, method), nothing)
        return data.images.distinct(own if at is None else np.where(at < first, own, math.nan))

    weights, place = _voting_names(data)
    return {m: (column(weights, m), column(place, m)) for m in data.real}


def keep(data: RunData, verdict: Verdict) -> str:
    """Write verdict.json into the run's folder; returns a sentence about it.

    The file is about the last checkpoint; verdicts on others are not written. A read-only folder is no error.
    """
    if (data.model, data.checkpoint) != (data.models[0], data.checkpoints[-1]):
        return ""
    path = data.folder.path / FILE
    try:
        write_record(path, verdict.as_json())
    except StoreError as error:
        return f"the verdict was not written: {error}"
    return f"written to {path}"


def conclude(folder: RunFolder) -> Verdict:
    """Judge a run that has just ended, and write verdict.json."""
    data = read_run(folder)
    verdict = judge(data)
    keep(data, verdict)
    return verdict


def _mostly_blank(data: RunData, method: str, following: Sequence[str], values: follow.Values) -> bool:
    """Whether surely most of its maps are blank, on images that another following method is tested on."""
    empty = data.images.scores.get((BLANK.name, method))
    others = [np.isfinite(values[m][0]) for m in following if m != method]
    if empty is None or not others:
        return False
    tested = np.any(others, axis=0)
    return surely_above(int((empty[tested] > 0).sum()), int(tested.sum()), MOSTLY)


def _untested(data: RunData, values: follow.Values, methods: Sequence[str]) -> list[int]:
    """Explained classes without any image on which the voting test is defined, for any of the methods."""
    defined = [np.isfinite(column) for m in methods for column in values[m]]
    if not np.any(defined):
        return []
    tested = {c for c, has in zip(data.images.explained, np.any(defined, axis=0), strict=True) if has}
    return sorted({c for c in data.images.explained if c is not None} - tested)


def _tests(data: RunData, method: str, voting: Mapping[str, Answer], threshold: float) -> Iterator[Test]:
    """The tests that vote, then the others about maps, as information."""
    of_maps = [of for of in data.measures if of.facts.judges == "map" or of.name in voting]
    for of in sorted(of_maps, key=lambda of: of.name not in voting):
        if cell := data.cells.get((of.name, method)):
            numbers = (cell.value, cell.low, cell.high, cell.n or 0)
            if of.name in voting:
                rates = follow.calibration()["tests"].get(of.base, {})
                yield Test(of.name, of.plain, voting[of.name], *numbers, threshold, True, rates)
            else:
                yield Test(of.name, of.plain, "undecided", *numbers)


def _how_to_measure(data: RunData) -> str:
    name = follow.follow_metric(data.facts).name
    if data.manifest.config.get("kind") == MONITOR:
        return f"the monitor does not measure {name}: set Monitor(metrics=[{name!r}])"
    return f"add {name} to the metrics of the study and run it again"


def _missing_controls(data: RunData, metric: str, method: str) -> str:
    """Reason in the rows why there are no numbers against maps under random weights."""
    rows = data.folder.scores().sql(
        "select mode(reason) as reason from scores "
        "where metric = ? and method = ? and model = ? and checkpoint = ? and isnan(value)",
        [metric, method, data.model, data.checkpoint],
    )
    return rows[0]["reason"] or ""


def _would_decide(n: int, growth: float, obstacles: bool, none_judged: bool, stored: bool) -> str:
    if n < follow.ENOUGH:
        return f"the test is defined on {counted(n, 'image')}, {follow.ENOUGH} are needed"
    if obstacles:
        return SEE_NOTES
    if stored:
        return (
            "without another method in the run, maps must be surely "
            f"{follow.rule().yes * follow.ALONE:g} better than both controls: add a method such as gradcam "
            "to the study and run it"
        )
    if none_judged:
        return f"no method is better than its control maps on this network, so none is judged: {CONTRAST}"
    if growth == math.inf:
        return f"between the limits of both answers on {n} images, so more of them hardly help: {CONTRAST}"
    needed = f"add images (about {float(f'{growth * n:.2g}'):,.0f} are needed)"
    return f"too close to the control maps on {n} images: {needed}, or {CONTRAST}"


def _blank(data: RunData, method: str, following: Sequence[str]) -> str:
    """Share of blank maps and their causes, and of those where another following method is not blank."""
    own = data.images.scores[BLANK.name, method] > 0
    others = [data.images.scores[BLANK.name, m] == 0 for m in following if m != method]
    why = [
        f"{count / len(own):.0%} {words}"
        for reason, words in BLANK_WORDS.items()
        if (count := data.blank_reasons.get((method, reason), 0))
    ]
    if others:
        beside = np.mean(own & np.any(others, axis=0))
        why.append(f"{beside:.0%} while the map of another method that follows is not blank")
    return f"{np.mean(own):.0%} of its maps are blank{': ' * bool(why)}{', '.join(why)}"


def _obstacles(data: RunData) -> Iterator[str]:
    """Reasons that forbid a "yes" to either question."""
    status = data.folder.status()
    if not status.complete:
        yield f"the run is not complete: {status.sentence}"
    elif status.usable < MIN_USABLE:
        yield f"too few images could be used: {status.sentence}"
    if not data.real:
        yield "all methods of the run are controls, which do not use the network"
    unanswered = _unanswered(data)
    if unanswered or not data.images.ids:
        total = counted(len(data.images.ids), "image")
        yield f"the network's output is NaN or infinite for {unanswered} of {total}"
    if len(tiny := _tiny(data)) > MOSTLY * len(data.images.ids):
        yield _tiny_images(tiny)
    yield from _other_order(data)
    yield from _no_skill_multilabel(data) if data.manifest.is_multilabel else _no_skill(data)


def _image_warnings(data: RunData) -> Iterator[str]:
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
    """Sides "n 2" of images below an eighth of the network's input, or enlarged from under 8 pixels."""
    if data.images.sides is None:
        return np.zeros((0, 2), int)
    own, of_input = data.images.sides.T
    least = np.maximum(of_input / TINY, np.minimum(FEWEST_PIXELS, of_input))
    return np.asarray(data.images.sides[own < least])


def _tiny_images(sides: np.ndarray) -> str:
    least, of_input = sides[sides[:, 0].argmin()].tolist()
    return (
        f"{counted(len(sides), 'image')} much smaller than the network's input ({least} pixels along a side "
        f"instead of {of_input}): the network sees mostly interpolation"
    )


def _unanswered(data: RunData) -> int:
    """Number of images without a probability and without a value of the head."""
    images = data.images
    unsure = {name for name, p in zip(images.ids, images.confidence, strict=True) if math.isnan(p)}
    if not unsure:
        return 0
    rows = data.folder.scores().sql(
        "select image from scores "
        "where metric = 'value' and not isnan(value) and model = ? and checkpoint = ?",
        [data.model, data.checkpoint],
    )
    return len(unsure - {row["image"] for row in rows})


def _right_by_class(data: RunData) -> dict[int | None, list[float]]:
    """By label, 1 for every correctly predicted image, else 0."""
    by_class: dict[int | None, list[float]] = {}
    right = [math.nan if right is None else right for right in data.images.right]
    shares = data.images.distinct(np.array(right))
    for label, share in zip(data.images.labels, shares.tolist(), strict=True):
        if not math.isnan(share):
            by_class.setdefault(label, []).append(share)
    return by_class


def _label_agreement(data: RunData) -> LabelAgreement:
    right = {} if data.manifest.is_multilabel else _right_by_class(data)
    shares = [share for own in right.values() for share in own]
    never = [c for c, own in right.items() if len(own) >= ENOUGH_OF_A_CLASS and not any(own)]
    names = tuple(data.class_name(c) for c in sorted(c for c in never if c is not None))
    return LabelAgreement(float(np.mean(shares)) if shares else math.nan, len(shares), names)


def _other_order(data: RunData) -> Iterator[str]:
    """Whether another order of the classes explains the labels much better."""
    names = [data.class_name(label) for label in range(max(data.classes, default=-1) + 1)]
    if data.manifest.is_multilabel:
        predictions = read_predictions(data.folder, data.checkpoint, model=data.model)
        truth, scores = predictions.labels, predictions.probabilities
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
    """Test mean recall against chance, so that always predicting the largest class is no skill."""
    right = _right_by_class(data)
    n = sum(map(len, right.values()))
    if n < follow.ENOUGH:
        return
    chance = 1 / (len(right) if len(right) > 1 else max(2, len(data.classes)))
    weighted = [each * n / len(right) / len(own) for own in right.values() for each in own]
    low, high = mean_interval(weighted)
    if not low > chance:
        yield (
            f"the network is not surely better than chance: mean recall {np.mean(weighted):.1%} (95 % "
            f"interval {low:.1%} to {high:.1%}, n = {n}), where guessing has {chance:.1%}"
        )


def _no_skill_multilabel(data: RunData) -> Iterator[str]:
    """Test mean AUC over the labels against chance; near-duplicates do not count."""
    predictions = read_predictions(data.folder, data.checkpoint, model=data.model)
    own = [i for i, name in enumerate(predictions.ids) if name not in data.images.copies]
    if predictions.limits is None or len(own) < follow.ENOUGH:
        return
    labels, probabilities = predictions.labels[own], predictions.probabilities[own]
    mean = auc(labels, probabilities)
    error = float((auc_errors(labels, probabilities) ** 2).sum()) ** 0.5
    low, high = mean.value - 1.96 * error, mean.value + 1.96 * error
    if not math.isnan(mean.value) and not low > 0.5:
        yield (
            f"the network is not surely better than chance: mean AUC {mean.value:.3f} over its labels "
            f"(95 % interval {low:.3f} to {high:.3f}, n = {mean.n}), where guessing has 0.5"
        )
