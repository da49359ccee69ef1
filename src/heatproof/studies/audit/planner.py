"""Selection of what an audit computes, by network, images and time.

The rungs, in order; a rung that does not fit is left out, and later ones are still tried:

    the first method, `random`, and the test that the verdict rests on, on 40 images (fewer if there is no
    time for more); a second method
    up to 64 images, for the answer to what the network uses
    two more methods of one pass; floors; further methods of one pass; insertion and deletion
    up to 100 images
    methods of many passes; randomisation, fragility
    up to 1,000 images, if a method is undecided
    metrics over all images or methods

Each line is a step of the run: after each one the rest is chosen anew by the measured time and the answers so
far. The test is sequential (verdict/follow.py): a method is tested on 40 images, then on twice as many until
it is decided, or would need more than twice the images of the audit. Floors are not judged: they are tested
on 40 images with insertion and deletion. Methods that the network refuses, and metrics that the images do not
allow, are left out with their reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from heatproof.errors import CheckpointError, HeatproofError, InputError
from heatproof.explain.api import with_sufficient_repeats
from heatproof.explain.baselines import is_floor
from heatproof.models.heads import Multilabel
from heatproof.models.load import check_name
from heatproof.models.model import Model, all_logits
from heatproof.run.checks import (
    MetricAvailability,
    check_accuracy,
    check_classes,
    check_head,
    check_study,
    first_answers,
)
from heatproof.run.config import check_network, read_metrics, study_from
from heatproof.run.engine import CHEAP, Trials, resolve_defaults
from heatproof.run.plan import PER_MAP, PlannedUnit
from heatproof.run.progress import spell
from heatproof.run.study import LIBRARIES_WITHOUT_WEIGHTS, ResolvedStudy, open_study
from heatproof.run.worker import Worker, fastest_threads
from heatproof.store import Manifest, RunFolder
from heatproof.studies.audit.settings import BATCH, AuditSettings
from heatproof.verdict.follow import ENOUGH, FIRST_LOOK, follow_metric

FORWARD_ONLY = ("reciprocam", "eigencam", "scorecam", "ablationcam")  # CAMs of networks without gradients
FIRST = ("gradcam", "legrad", "gradient", FORWARD_ONLY[0], "occlusion")  # the first that the network takes
CORE = ("layercam", "hirescam", "legrad", "attnlrp", "gradient")
MORE = ("gradcam++", "eigencam", "rollout", "lrp", "guided-backprop", "gradient-x-input")
EXPENSIVE = ("integrated-gradients", "occlusion", "lime", "rise(masks=1000)")
FLOORS, FLOOR = ("edges", "centre"), "control: does not use the network"  # beside `random`, which is free
DRAWS = 2  # networks with random weights: error rates are those of three (docs/results/calibration.md)
VOTE = (f"{follow_metric().name}(draws={DRAWS})", "untrained")  # which share the maps under random weights
CURVES = ("insertion(steps=10)", "deletion(steps=10)")
FURTHER = (("randomisation(depths=3)",), ("fragility",))
EVIDENCE = "evidence"
FREE = "needs no extra passes"
PASSLESS = ("auc", "accuracy", "recall", "localise", "structure")
# Metrics that compare all images or all methods, and why they are computed: once, after all tests.
LAST = {"cscore": FREE, "method_agreement": FREE,
        EVIDENCE: "what the network uses: moves evidence into other images"}  # fmt: skip
FEWEST, FOR_EVIDENCE, SOME, MANY = 4, 64, 104, 1000  # images
PATIENCE = 2  # a method that needs more than so many times the images of the audit is tested no further
CONTINUED = 0.5  # of the methods, which are still tested after the first look (docs/results/calibration.md)
IMAGES = "images"  # the choice of how many
MARGIN, ALMOST = 0.9, 0.9  # of the time that is left: what is measured on two images is not exact
REPORT = 5.0  # seconds
FULL, TOO_LONG = "no time left", "about "  # how reasons begin that more minutes help against
TRIED = 32  # images on which the network's answers are checked
TIMED = 4  # images of a pass, to choose the number of threads
KEYS = ("images: ", "model: ", "model.checkpoints: ", "model.layer: ")  # of a study that no user wrote
SHARE = 0.004  # of the audit that one timing trial may be expected to take
FLOOR_VOTE = 0.4  # of a vote: a floor's control maps under random weights are itself, which costs no pass
EVIDENCE_VOTE = 30 / 72  # of a vote, by inputs per image; evidence takes at most 30
MetricGroup = tuple[str, ...]  # metrics that share their passes


@dataclass(frozen=True)
class Inspection:
    """A checked study before anything is chosen."""

    resolved: ResolvedStudy
    classes: int  # of the network
    head: str | None  # that had to be named
    notes: tuple[str, ...]
    labels: bool = True  # whether the images' classes are the network's


def inspect(
    settings: AuditSettings, tables: Mapping[str, Any], folder: Path, network: Model | None
) -> Inspection:
    """Resolve the study in `tables`; where the network has other classes than the images, without labels.

    folder: what its paths are relative to.
    """
    library, _, name = settings.model.partition(":")
    if library in LIBRARIES_WITHOUT_WEIGHTS and name and not settings.checkpoint and not settings.pretrained:
        check_name(settings.model)
        raise CheckpointError(
            f"{settings.model} has random weights, whose maps explain nothing: name yours with --checkpoint "
            "FILE, or use --pretrained to download the library's"
        )
    if network is None:
        check_network(settings.model, settings.checkpoint)
    tries = [(None, settings.head), (None, Multilabel.name), ("predicted", settings.head)]
    if settings.head or not tables["images"].get("options"):
        del tries[1]  # one label each: the head is what it seems to be
    refusal: HeatproofError | None = None
    least = {"methods": ["random"], "metrics": [follow_metric().name], **tables}
    for targets, head in tries:
        run, model = {**tables["run"], "targets": targets}, {**tables["model"], "head": head}
        wanted = least | {"run": run, "model": model}
        try:
            resolved = open_study(ResolvedStudy(study_from(wanted), folder, network=network))
            resolve_defaults(resolved, None)
            check_study(resolved)
        except HeatproofError as error:
            refusal = refusal or error
            continue
        check_accuracy(resolved, settings.expect_accuracy)
        classes = check_classes(resolved, resolved.model(resolved.checkpoints[-1].name))
        if targets is None:
            return Inspection(resolved, classes, head, tuple(_warnings(resolved)))
        why = _without_key(refusal).partition(";")[0]
        note = f"labels are not used, predictions are explained: {why}"
        return Inspection(resolved, classes, head, (note,), labels=False)
    raise InputError(_without_key(refusal)) from refusal


def pass_threads(resolved: ResolvedStudy) -> int:
    """Number of threads with which a pass is fastest, which depends on the load of the machine."""
    model = resolved.model(resolved.checkpoints[-1].name)
    images = model.preprocess.blank.repeat_interleave(TIMED, 0)
    return fastest_threads(lambda: all_logits(model, images), resolved.threads)


def _without_key(error: HeatproofError | None) -> str:
    text = str(error)
    for key in KEYS:
        text = text.removeprefix(key)
    return text


def _warnings(resolved: ResolvedStudy) -> list[str]:
    """Conclusions that these labels do not allow."""
    source = resolved.source
    if not source.labelled:
        return ["the images have no labels: predictions are explained, and their accuracy is unknown"]
    used = {label for sample in source.samples for label in sample.stated}
    if len(used) == 1:
        name = source.classes[used.pop()]
        return [f"all images are of class {name}, so whether the network can distinguish classes is unknown"]
    answers = first_answers(resolved, TRIED)
    warnings = list(filter(None, [answers.order(source.classes)])) if answers else []
    if answers is None or not answers.single or len(answers.truth) < TRIED:
        return warnings
    chance = 1 / len(source.classes)
    if answers.right / TRIED <= chance + 2 * math.sqrt(chance * (1 - chance) / TRIED):
        warnings.append(
            f"{answers.right} of {TRIED} images are classified correctly, which is close to chance"
        )
    return warnings


class CostModel:
    """Seconds per image at the last checkpoint, each part measured once, when it is first needed.

    An image costs its decoding, and each method its own passes. Where a method is tested, it also costs its
    passes under every draw of random weights, and those of each group of metrics.
    """

    def __init__(
        self,
        resolved: ResolvedStudy,
        wanted: Sequence[str],
        seconds: float = math.inf,
        trying: Callable[[str], object] = lambda what: None,
    ) -> None:
        """wanted: the first of these that the network takes is the one that metrics are timed with.

        seconds: of the whole audit, of which trials take a small share. trying: called with what is timed.
        """
        self.resolved, self.patience, self.trying = resolved, min(CHEAP, SHARE * seconds), trying
        self.worker = Worker(resolved, RunFolder(Path(), Manifest(resolved.config)))
        self._methods: dict[str, float] = {}
        self._inputs: dict[str, float] = {}
        self._groups: dict[MetricGroup, float] = {}
        self._reruns: dict[MetricGroup, float] = {}  # of the method, beside those of the vote
        for method in wanted[:-1]:
            with suppress(HeatproofError):
                self.method(method)
                self.first = method
                return
        self.method(wanted[-1])
        self.first = wanted[-1]

    def image(self, methods: Sequence[str]) -> float:
        """Seconds of an image and its maps, without tests."""
        return self.decoding + sum(map(self.method, methods))

    def test(self, method: str, groups: Sequence[MetricGroup]) -> float:
        """Seconds of the test of one map, and of these groups of metrics."""
        others = sum(self.group(group) for group in groups)
        if is_floor(method):
            return FLOOR_VOTE * self.group(VOTE) + others
        reruns = sum(self._reruns.get(group, 0.0) for group in groups)
        others += reruns * max(0.0, self.method(method) - self.method(self.first))
        return DRAWS * self.method(method) + self.group(VOTE) + others

    def method(self, method: str) -> float:
        """Seconds of its own passes; raises if the network refuses it."""
        if method not in self._methods:
            each = self._trials(method).per_image()
            self._methods[method] = max(0.0, each.seconds - self.decoding)
            self._inputs[method] = max(1.0, each.inputs)
        return self._methods[method]

    def group(self, group: MetricGroup) -> float:
        """Seconds of a group of metrics for one method."""
        if group not in self._groups:
            maps = (1 + DRAWS * (group == VOTE)) * self.method(self.first)
            whole = self._trials(self.first, group).per_image(warm=group == VOTE)
            self._groups[group] = max(0.0, whole.seconds - self.decoding - maps)
            if group in FURTHER:
                self._reruns[group] = whole.inputs / self._inputs[self.first] - 1
        return self._groups[group]

    @cached_property
    def decoding(self) -> float:
        return self._trials("random").decoding

    @property
    def evidence(self) -> float:
        """Seconds per image of the interventions, at most."""
        return EVIDENCE_VOTE * self.group(VOTE)

    def _trials(self, method: str, group: MetricGroup = ()) -> Trials:
        self.trying(", ".join(group) or method)
        # A whole unit: what it costs once is spread over its images.
        checkpoint, count = self.resolved.checkpoints[-1].name, min(BATCH, len(self.resolved.source))
        seed = self.resolved.study.run.seed
        unit = PlannedUnit(checkpoint, (0, count), (method,), (*PER_MAP, *group), seed)
        return Trials(self.worker, unit, lambda text: None, self.patience)


class Choice(NamedTuple):
    """One decision."""

    what: str
    taken: bool
    why: str


@dataclass(frozen=True)
class Selection:
    """Methods, metrics and number of images of a run, and every decision behind them."""

    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    images: int
    choices: tuple[Choice, ...] = ()
    tested: tuple[tuple[int, tuple[str, ...]], ...] = ()  # run.tested of the study

    def tested_images(self, method: str) -> int:
        """Number of images on which a method is tested."""
        return max((images for images, methods in self.tested if method in methods), default=0)

    @property
    def groups(self) -> list[MetricGroup]:
        """Metrics with passes of their own, beside the vote."""
        return [group for group in (CURVES, *FURTHER) if {*group} <= {*self.metrics}]

    def same_run(self, other: Selection | None) -> bool:
        """Whether both lead to the same run."""
        return other is not None and replace(other, choices=self.choices) == self

    @property
    def out_of_time(self) -> list[str]:
        """What was left out only for lack of time."""
        return [c.what for c in self.choices if not c.taken and c.why.startswith((FULL, TOO_LONG))]

    def noting(self, what: str, taken: bool, why: str) -> Selection:
        """Add a decision, replacing an earlier one about the same item."""
        before = (choice for choice in self.choices if choice.what != what)
        return replace(self, choices=(*before, Choice(what, taken, why)))


def in_minutes(count: float) -> str:
    """A number of minutes in words.

    >>> in_minutes(1), in_minutes(2.5)
    ('1 minute', '2.5 minutes')
    """
    return f"{count:g} minute{'s' * (count != 1)}"


@dataclass
class BudgetPlanner:
    """Add rungs while there is time. left: returns the remaining seconds, called at every rung."""

    resolved: ResolvedStudy
    costs: CostModel
    classes: int  # of the network
    left: Callable[[], float]
    minutes: float
    most: int = MANY  # images
    labels: bool = True  # whether the network has the classes of the images
    measured: float = 0.0  # seconds of the steps so far
    expected: float = 0.0  # seconds of the same steps, by their parts
    done: Selection | None = None  # what the run has already
    decided: frozenset[str] = frozenset()  # methods that need no further test
    growth: Mapping[str, float] = field(default_factory=dict)  # of its images, to decide an undecided method

    @property
    def checkpoints(self) -> int:
        return len(self.resolved.checkpoints)

    @property
    def scale(self) -> float:
        """Measured over expected seconds, of all steps: a short one is mostly the start and end of a run."""
        return self.measured / self.expected if self.expected else 1.0

    def seconds(self, chosen: Selection) -> float:
        """Seconds that a selection takes from now on, with the tests that are expected."""
        # Evidence is reserved from the start, although it is computed last, when the images are known.
        return self._seconds(self._finished(chosen), lambda method: self._expected_tests(chosen, method))

    def step_seconds(self, step: Selection) -> float:
        """Seconds that a step takes, with its tests."""
        return self._seconds(step, step.tested_images)

    def _seconds(self, chosen: Selection, tests: Callable[[str], float]) -> float:
        before = self._cost(self.done, self.done.tested_images) if self.done else 0.0
        each = self.costs.evidence * self._computes_evidence(chosen)
        return self.scale * (self._cost(chosen, tests) - before + self.checkpoints * chosen.images * each)

    def _computes_evidence(self, step: Selection) -> bool:
        """Whether a step computes evidence: once, and again over all images if there are more."""
        known = self.done and EVIDENCE in self.done.metrics and step.images == self.done.images
        return EVIDENCE in step.metrics and not known

    def _cost(self, chosen: Selection, tests: Callable[[str], float]) -> float:
        """Expected seconds at scale 1 without evidence. tests: number of images with tests of a method."""
        tested = sum(tests(method) * self.costs.test(method, chosen.groups) for method in chosen.methods)
        return self.checkpoints * (chosen.images * self.costs.image(chosen.methods) + tested)

    def _expected_tests(self, chosen: Selection, method: str) -> float:
        tested = self.done.tested_images(method) if self.done else 0
        first = min(chosen.images, FIRST_LOOK)
        if method in self.decided or is_floor(method):
            return max(tested, 0 if is_floor(method) and CURVES not in chosen.groups else first)
        if tested:
            return chosen.images if self._may_be_decided(method, chosen.images) else tested
        return first + CONTINUED * (chosen.images - first)

    def _may_be_decided(self, method: str, images: int) -> bool:
        """Whether tests on so many images are likely enough to decide a method."""
        tested = self.done.tested_images(method) if self.done else 0
        return method not in self.decided and self.growth.get(method, 0.0) * tested <= PATIENCE * images

    def record(self, step: Selection, seconds: float) -> None:
        """Record the time of a step, which corrects later estimates; that of evidence does not: a maximum."""
        if not self._computes_evidence(step):
            expected = self.step_seconds(step) / self.scale
            self.measured, self.expected = self.measured + seconds, self.expected + expected
        self.done = step

    def step(self, wanted: Sequence[str]) -> tuple[Selection | None, Selection]:
        """The next step, None if nothing is left that fits; and all that fits. wanted: as for plan."""
        steps = self.plan(wanted)
        if self.done is None:
            return self._with_tests(steps[0], steps[-1].images), steps[-1]
        # At most twice the images, so that a step with a wrong cost estimate stays short.
        more = replace(steps[0], images=min(steps[0].images, 2 * self.done.images))
        if {*LAST} & ({*more.metrics} - {*self.done.metrics}):  # only after all tests
            more = replace(self.done, choices=steps[-1].choices)
        more = self._with_tests(more, steps[-1].images)
        if more.same_run(self.done):
            more = replace(steps[-1], tested=self.done.tested)
        return None if more.same_run(self.done) else more, steps[-1]

    def _with_tests(self, chosen: Selection, most: int) -> Selection:
        """With the next tests of undecided methods, as far as there is time; most: images at the end."""
        done = self.done or replace(chosen, tested=())
        left = self.affordable - self._seconds(self._finished(chosen), done.tested_images)
        named = {method for _, methods in done.tested for method in methods}
        steps: dict[int, tuple[str, ...]] = {}
        for method in chosen.methods:
            tested = done.tested_images(method)
            goal = FIRST_LOOK * (CURVES in chosen.groups) if is_floor(method) else max(FIRST_LOOK, 2 * tested)
            if goal > chosen.images:  # too few images for the next look, except for the last one
                goal = chosen.images if not tested or chosen.images >= most else tested
            price = self.scale * self.checkpoints * self.costs.test(method, chosen.groups) * (goal - tested)
            is_open = goal > tested and self._may_be_decided(method, most)
            if method not in named or (is_open and price <= left):
                steps[goal] = (*steps.get(goal, ()), method)
                left -= price
        return replace(chosen, tested=(*done.tested, *sorted(steps.items())))

    @property
    def _first_look(self) -> int:
        """Number of images after which the first answers are expected."""
        return min(len(self.resolved.source), FIRST_LOOK, self.most)

    @property
    def affordable(self) -> float:
        return MARGIN * (self.left() - REPORT * max(1.0, self.scale))

    def plan(self, wanted: Sequence[str]) -> list[Selection]:
        """What to have after each step from here; the last is all that fits, with what was left out.

        wanted: methods that the user named, which are then the only ones.
        """
        start = self.done or self._required(wanted)
        groups: tuple[tuple[str, ...], ...] = ((), (), ()) if wanted else (CORE, MORE, EXPENSIVE)
        if not wanted and self.costs.first in FORWARD_ONLY:
            groups = FORWARD_ONLY[1:2], (), (*FORWARD_ONLY[2:], *EXPENSIVE)
        core, more, expensive = groups
        start = self._methods(start, wanted[1:], "requested", required=True)
        start = self._methods(start, core, "one pass per image", 2)
        start = self._images(start, FIRST_LOOK)
        small = start if self._unavailable[EVIDENCE] else self._images(start, FOR_EVIDENCE)
        small = self._methods(small, core, "one pass per image", 4)
        small = self._methods(small, FLOORS, FLOOR)
        small = self._metrics(self._methods(small, more, "one pass per image"), CURVES)
        some = rich = self._images(small, SOME)
        if expensive:
            fewer = with_sufficient_repeats(expensive)
            rich = self._methods(rich, [*fewer.values()], "many passes per image")
        for group in FURTHER:
            rich = self._metrics(rich, group)
        last = self._images(rich, self.most)
        if not any(not is_floor(m) and self._may_be_decided(m, last.images) for m in rich.methods):
            last = rich
        whole = self._count_noted(self._finished(last))
        steps = [replace(step, choices=whole.choices) for step in (start, small, some, rich, last, whole)]
        before = [self.done, *steps[:-1]]
        return [s for s, old in zip(steps, before, strict=True) if not s.same_run(old)] or [steps[-1]]

    def _required(self, wanted: Sequence[str]) -> Selection:
        """The minimum that the verdict needs, on fewer images than it needs if there is no time for more."""
        reasons = {text: self._unavailable[text] for text in PASSLESS}
        free = [Choice(text, not why, why or FREE) for text, why in reasons.items()]
        most = self._first_look
        chosen = (*VOTE, *(choice.what for choice in free if choice.taken))
        start = Selection((self.costs.first, "random"), chosen, most, tuple(free))
        fits = int(self.affordable / self.seconds(start) * most) if self.seconds(start) > 0 else most
        if fits < most:
            start = replace(start, images=min(most, max(FEWEST, fits // BATCH * BATCH)))
        start = start.noting(start.methods[0], True, "requested" if wanted else "default method")
        start = start.noting("random", True, FLOOR)
        return start.noting(", ".join(VOTE), True, "decides the verdict: compares maps with control maps")

    def _why_not(self, text: str) -> str:
        """Why a metric cannot be computed; "" if it can."""
        why = MetricAvailability(self.resolved, self.classes, self.labels).why_not(text)
        if not why:
            try:
                check_head(read_metrics([text]), self.resolved.model(self.resolved.checkpoints[-1].name).head)
            except HeatproofError as error:
                return str(error)
        return why

    @cached_property
    def _unavailable(self) -> dict[str, str]:
        """Why a metric without tests cannot be computed; "" if it can."""
        return {text: self._why_not(text) for text in (*PASSLESS, *LAST)}

    def _finished(self, chosen: Selection) -> Selection:
        """The selection with the metrics that need all images and therefore come last."""
        for text, why in LAST.items():
            available = not self._unavailable[text]
            if available and text not in chosen.metrics:
                chosen = replace(chosen, metrics=(*chosen.metrics, text))
            chosen = chosen.noting(text, available, why if available else self._unavailable[text])
        return chosen

    def _methods(
        self, chosen: Selection, names: Sequence[str], why: str, most: int = 99, required: bool = False
    ) -> Selection:
        """Add methods until there are `most`, floors not counted."""
        for method in names:
            if method not in chosen.methods and sum(not is_floor(m) for m in chosen.methods) < most:
                more = replace(chosen, methods=(*chosen.methods, method))
                chosen = self._add(chosen, more, method, why, required)
        return chosen

    def _metrics(self, chosen: Selection, group: MetricGroup) -> Selection:
        if group in chosen.groups:
            return chosen
        more = replace(chosen, metrics=(*chosen.metrics, *group))
        return self._add(chosen, more, ", ".join(group), "additional information")

    def _add(
        self, chosen: Selection, more: Selection, what: str, why: str, required: bool = False
    ) -> Selection:
        """`more` if there is time for it, else `chosen` with the reason; required: raise if it is refused."""
        if chosen.images < self._first_look or self.seconds(chosen) > ALMOST * self.affordable:
            return chosen.noting(what, False, FULL)  # no time left to measure its cost
        try:
            cost = self.seconds(more)
        except HeatproofError as error:
            if required:
                raise
            return chosen.noting(what, False, str(error))
        if cost <= self.affordable:
            return more.noting(what, True, why)
        extra = spell(cost - self.seconds(chosen))
        return chosen.noting(what, False, f"{TOO_LONG}{extra} more, beyond {in_minutes(self.minutes)}")

    def _images(self, chosen: Selection, most: int) -> Selection:
        """As many images as there is time for, in whole units, to which more can be added later."""
        most = min(most, self.most, len(self.resolved.source))
        first, second = (self.seconds(replace(chosen, images=chosen.images + n)) for n in (1, 2))
        each = second - first  # the first one also costs what is computed again over all images
        more = 1 + (self.affordable - first) / each if each else math.inf
        fits = most if chosen.images + more >= most else int(chosen.images + more) // BATCH * BATCH
        return replace(chosen, images=max(chosen.images, fits))

    def _count_noted(self, chosen: Selection) -> Selection:
        """Record the number of images, and what so few of them cannot decide."""
        total, n = len(self.resolved.source), chosen.images
        if n < ENOUGH:
            remedy = "add images" if n == total else "more minutes or a larger limit use more"
            why = f"{n} of {total}: the verdict needs {ENOUGH}, so it will be undecided; {remedy}"
        elif n < total:
            why = f"{n} of {total}, sampled in proportion to the classes; more minutes use more"
        else:
            why = f"all {total}"
        return chosen.noting(IMAGES, True, why)
