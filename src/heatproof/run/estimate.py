"""Estimate the cost of a run before it starts: counted from the plan, timed on its first images.

Nothing is run at full length. Repeated passes (samples of LIME, steps of insertion) are cut down to a few,
and each is raised separately while that is cheap, on one image; then the number of images is. Time and inputs
are linear in all of these, so the last two points of each give the rest. Where everything is cheap nothing is
cut, and the numbers are those of a real unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from heatproof.errors import InputError, StoreError, counted
from heatproof.images import Loaded, batches
from heatproof.models.capture import capture
from heatproof.models.running import frozen_eval
from heatproof.registry import REPEATS, call_text, explainers, metrics, parse_call
from heatproof.run.engine import Prepared
from heatproof.run.plan import ANSWERS, FREE, PER_MAP, PlannedUnit, RunPlan, filled, growing, make_plan
from heatproof.run.process import fixed_threads
from heatproof.run.progress import spell
from heatproof.run.study import ResolvedStudy
from heatproof.run.worker import Worker
from heatproof.store import Manifest, RunFolder

FEWEST = 4  # repetitions to begin with
GROWTH = 4
CHEAP = 2.0  # seconds a trial may be expected to take

Say = Callable[[str], object]
Function = Callable[..., Any]
Counts = dict[Function, int]  # repetitions by the function that makes them, which several metrics may share


def estimate(
    prepared: Prepared, shard: tuple[int, int] = (0, 1), say: Say = lambda text: None
) -> Iterator[tuple[str, str]]:
    """Yield lines of a table: item and amount. say: called with a line about each trial."""
    manifest, done = _existing(prepared)
    source, study = prepared.opened.source, prepared.opened.study
    plan = make_plan(manifest, len(source), prepared.pictures)
    pending = [unit for block in plan.shard(*shard) for unit in block if unit.hash not in done]
    groups = [unit for unit in plan.groups if unit.hash not in done]
    classes = counted(len(source.classes), "class") if source.classes else "no classes"
    yield "images", f"{len(source):,} ({study.images.kind}), {classes}"
    yield "checkpoints", ", ".join(plan.checkpoints())
    yield "methods", ", ".join(study.methods)
    yield "metrics", ", ".join(request.text for request in prepared.opened.metrics) or "none"
    yield "explained class", prepared.opened.targets
    yield "network's output", prepared.opened.head_description
    yield "run folder", str(prepared.path)
    finished = sum(unit.hash in done for unit in plan.units)
    yield "units", f"{_units(plan, study.run.batch_size)}; {finished} done"
    yield (
        "to do",
        f"{counted(len(pending), 'unit')} in this shard, then {len(groups)} about whole checkpoints",
    )
    if pending:
        yield from _timed(Worker(prepared.opened, RunFolder(prepared.path, manifest)), pending, say)


def outline(opened: ResolvedStudy) -> Iterator[tuple[str, str]]:
    """Yield lines about a study without loading its model: item and amount."""
    checkpoints = [checkpoint.name for checkpoint in opened.checkpoints]
    plan = make_plan(Manifest(opened.config, models=dict.fromkeys(checkpoints, "")), len(opened.source))
    yield "images", f"{len(opened.source):,}"
    yield "checkpoints", f"{len(checkpoints)}: {', '.join(checkpoints)}"
    yield "methods", ", ".join(opened.study.methods)
    yield "metrics", ", ".join(opened.study.metrics)
    yield "units", _units(plan, opened.study.run.batch_size)


def _units(plan: RunPlan, batch_size: int) -> str:
    groups = len(plan.groups)
    text = f"{len(plan.units) - groups:,} of up to {counted(batch_size, 'image')}"
    return f"{text}, {groups} about whole checkpoints" if groups else text


def _existing(prepared: Prepared) -> tuple[Manifest, set[str]]:
    """The manifest that the run would have, and hashes of its finished units; nothing is written."""
    if not (prepared.path / "run.json").exists():
        return prepared.manifest, set()
    folder = RunFolder.open(prepared.path)
    added = growing(prepared.manifest.config)
    changes = filled(folder.manifest).changes(prepared.manifest, added, FREE)
    if refused := [change.sentence for change in changes if not change.addition]:
        raise StoreError(f"{prepared.path} was started with other settings: {'; '.join(refused)}")
    manifest = prepared.manifest.grown_from(folder.manifest) if changes else folder.manifest
    return manifest, folder.done()


def _timed(worker: Worker, pending: Sequence[PlannedUnit], say: Say) -> Iterator[tuple[str, str]]:
    seconds, inputs, basis = 0.0, 0.0, []
    kinds: dict[tuple[str, ...], list[PlannedUnit]] = {}  # of all checkpoints, which cost the same
    for unit in pending:
        kinds.setdefault((unit.kind, *unit.methods, *unit.metrics), []).append(unit)
    for units in kinds.values():
        trials = Trials(worker, units[0], say)
        if not trials.indices:
            yield "estimated time", "unknown: the first images cannot be read"
            return
        each, images = trials.per_image(), sum(unit.image_count for unit in units)
        seconds, inputs = seconds + images * each.seconds, inputs + images * each.inputs
        basis.append(trials.basis)
    yield "forward passes", f"about {inputs:,.0f} inputs through the network"
    yield "estimated time", f"about {spell(seconds)}, metrics over whole checkpoints not counted"
    threads = counted(worker.opened.threads, "thread")
    yield "timed on", f"{worker.opened.device}, {threads}: {'; '.join(basis)}"


class Trial(NamedTuple):
    """Time and inputs of a part of a unit."""

    seconds: float
    inputs: float

    def __add__(self, other: object) -> Trial:
        assert isinstance(other, Trial)
        return Trial(self.seconds + other.seconds, self.inputs + other.inputs)

    def __mul__(self, factor: Any) -> Trial:
        return Trial(self.seconds * factor, self.inputs * factor)


Points = list[tuple[int, Trial]]


def _grow(
    run: Callable[[int], Trial], start: int, first: Trial, end: int, leap: int = 2, cheap: float = CHEAP
) -> Points:
    """Add a second trial, a leap away if the first was costly, and more while the next looks cheap."""
    points = [(start, first)]
    while (last := points[-1][0]) < end:
        costly = points[-1][1].seconds * GROWTH > cheap
        if costly and len(points) > 1:
            break
        place = min(end, last * (leap if costly else GROWTH))
        points.append((place, run(place)))
    return points


def _at(points: Points, place: int) -> Trial:
    """Extrapolate the last two trials linearly; time that falls is noise."""
    (before, a), (last, b) = points[max(0, len(points) - 2)], points[-1]
    steps = (place - last) / (last - before) if last > before else 0.0
    return b + Trial(max(0.0, b.seconds - a.seconds), b.inputs - a.inputs) * steps


class Trials:
    """Parts of the first unit of a kind, computed as in a run, with fewer images and fewer repetitions."""

    def __init__(self, worker: Worker, unit: PlannedUnit, say: Say, cheap: float = CHEAP) -> None:
        """cheap: seconds that a trial is allowed to take."""
        self.unit, self.say, self.inputs, self.basis, self.cheap = unit, say, 0, "", cheap
        self.worker, self.opened = replace(worker, passed=self._passed), worker.opened
        images = range(*unit.images)
        began = time.perf_counter()
        tried = self._load(images, self.opened.study.run.workers)
        good = set(tried.batch.ids)
        if tried.failures and not good:
            first = tried.failures[0]
            raise InputError(f"no image that was tried can be used; of {first.id}: {first.reason}")
        self.decoding = (time.perf_counter() - began) / len(images)
        self.indices = [i for i in images if self.opened.source.samples[i].id in good]

    def per_image(self, warm: bool = False) -> Trial:
        """The cost of one image of the unit with all its repetitions, decoding included.

        warm: do the first trial twice whatever it takes, where it may be the first of its kind.
        """
        full: Counts = {}
        for text in self._texts():
            for _, function, count in self._repeats(text):
                full[function] = max(count, full.get(function, 1))
        few = {function: min(FEWEST, count) for function, count in full.items()}
        base = self._try(1, few)
        if warm or base.seconds * GROWTH < self.cheap:
            base = self._try(1, few)  # the first one warmed up
        whole, reached = base, 1.0
        passes = {explainers.get(parse_call(text)[0]).function for text in self.unit.methods}
        for function, count in full.items():
            leap = GROWTH if function in passes else 2  # a metric repeats its passes for every method
            points = _grow(
                partial(self._with_count, few, function), few[function], base, count, leap, self.cheap
            )
            more = _at(points, count) + base * -1
            # Between two short trials a busy machine hides what the passes cost, but not that they cost.
            least = (
                more.inputs * base.seconds / base.inputs / 2 if points[-1][1].seconds > self.cheap else 0.0
            )
            whole += more._replace(seconds=max(more.seconds, least))
            reached = min(reached, points[-1][0] / count)
        cheap = whole.seconds * GROWTH <= self.cheap
        begin = base if not cheap or full == few else self._try(1, full)
        some = _grow(
            lambda n: self._try(n, full if cheap else few), 1, begin, len(self.indices), cheap=self.cheap
        )
        each = _at(some, len(self.indices)) * (1 / len(self.indices))
        self.basis = counted(some[-1][0], "image")
        if not cheap:
            each += whole + base * -1
            passes_of_it = "all" if reached == 1 else f"{reached:.1%} or more"
            self.basis += f", and 1 with {passes_of_it} of its repeated passes"
        return each + Trial(self.decoding, 0)

    def _with_count(self, few: Counts, function: Function, count: int) -> Trial:
        return self._try(1, few | {function: count})

    def _try(self, images: int, counts: Counts) -> Trial:
        """Time this many images with this many repetitions, without decoding."""
        unit, loaded = self.unit, self._load(self.indices[:images], 0)
        methods = unit.methods if unit.kind == "score" else self._cut(unit.methods, counts)
        cut = replace(unit, methods=methods, metrics=self._cut(unit.metrics, counts))
        self.inputs, began = 0, time.perf_counter()
        with fixed_threads(self.opened.threads):
            self.worker.compute(cut, loaded)
        trial = Trial(time.perf_counter() - began, self.inputs)
        passed = f"{counted(images, 'image')}, {counted(self.inputs, 'input')} through the network"
        self.say(f"timed {passed}: {trial.seconds:.1f} s")
        return trial

    def _load(self, indices: Sequence[int], workers: int | None) -> Loaded:
        preprocess = self.opened.model(self.unit.checkpoint).preprocess
        return next(iter(batches(self.opened.source, preprocess, len(indices), indices, workers)))

    def _passed(self, count: int) -> None:
        self.inputs += count

    def _texts(self) -> Iterator[str]:
        yield from self.unit.methods if self.unit.kind == "explain" else ()
        yield from self.unit.metrics

    def _repeats(self, text: str) -> list[tuple[str, Function, int]]:
        """Options of a method or metric that set the number of passes, and their values."""
        name, options = parse_call(text)
        if name in (*ANSWERS, *PER_MAP):
            return []
        entry = (explainers if text in self.unit.methods else metrics).get(name)
        values = {option: (entry.options | options).get(option) for option in REPEATS}
        counts = {option: self.channels if value == "all" else value for option, value in values.items()}
        return [(option, entry.function, n) for option, n in counts.items() if isinstance(n, int)]

    def _cut(self, texts: Sequence[str], counts: Counts) -> tuple[str, ...]:
        cut = []
        for text in texts:
            name, options = parse_call(text)
            less = {o: counts[f] for o, f, count in self._repeats(text) if counts[f] < count}
            cut.append(call_text(name, options | less) if less else text)
        return tuple(cut)

    @cached_property
    def channels(self) -> int:
        """Channels of the layer: the number of repetitions for "all"."""
        model = self.opened.model(self.unit.checkpoint)
        needs, layer = frozenset({"activations"}), self.opened.study.model.layer
        with frozen_eval(model.module):
            trace = capture(model, model.preprocess.blank, None, needs, layer)
        return int(trace.activation.shape[1])
