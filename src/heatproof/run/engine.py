"""A run from start to end: open the study and its folder, plan, and let an engine compute or time the units.

The numbers depend on neither engine, shards nor workers: a unit is one batch, decoded, explained and scored
separately, with the number of torch threads the run began with. (On a CPU the order in which torch adds up
follows the number of threads, so it is part of the run; on a GPU, bits also depend on the kind of GPU.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heatproof.disk import valid_unicode
from heatproof.errors import InputError, ModelError, StoreError, counted, did_you_mean
from heatproof.images import Loaded, batches
from heatproof.models.accel import Accelerator, limited_memory
from heatproof.models.capture import capture
from heatproof.models.load import best_device
from heatproof.models.model import Model
from heatproof.models.running import frozen_eval, is_out_of_memory, usual_precision
from heatproof.registry import REPEATS, call_text, explainers, metrics, parse_call
from heatproof.run.checks import check_accuracy, check_study, method_hashes
from heatproof.run.plan import BUILT_IN, FREE, Origin, PlannedUnit, code_hashes, filled, growing, make_plan
from heatproof.run.progress import Progress, spell
from heatproof.run.study import ResolvedStudy, StudySource, open_study
from heatproof.run.worker import (
    PendingUnits,
    Worker,
    expected_inputs,
    fixed_threads,
    run_local,
    run_ray,
    stop_on_signal,
    usual_threads,
)
from heatproof.show import Sheet
from heatproof.store import Manifest, RunFolder
from heatproof.store.folder import StopRequested
from heatproof.store.manifest import maker
from heatproof.timeline import span
from heatproof.types import Maps, Score, Unit

ENGINES = {"local": run_local, "ray": run_ray}
MANY = 1000  # images whose hashing takes a while
FEWEST, GROWTH = 4, 4  # repetitions to begin with, and the factor of the next trial
CHEAP = 2.0  # seconds a trial may be expected to take
LONG = 20.0  # seconds of the first trial above which inputs are counted instead
Say = Callable[[str], object]
Function = Callable[..., Any]
Counts = dict[Function, int]  # repetitions by the function that makes them, which several metrics may share
# What RunFolder.write_unit takes: a unit, its rows, its maps, and the images to store.
_Rows = tuple[Unit, Sequence[Score], Mapping[str, Maps]]
UnitRows = _Rows | tuple[*_Rows, Mapping[str, np.ndarray | Sheet]]


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    folder: RunFolder
    units: int  # of the whole run
    done: int  # of them the finished ones
    computed: int  # images that were computed in this call, once for each checkpoint
    broken: list[dict[str, Any]]  # image and reason of every image that could not be read
    stopped: bool = False  # whether it was asked to stop
    seconds: float = 0.0  # of its units, in this call

    @property
    def unanswered(self) -> int:
        """Images for which the network's output was NaN, at one checkpoint or more."""
        return self.folder.status().unanswered


@dataclass(frozen=True)
class Prepared:
    """A study that passed every check, and the manifest of its run."""

    opened: ResolvedStudy
    manifest: Manifest
    path: Path

    @property
    def pictures(self) -> list[tuple[str, str]]:
        return self.opened.origin.pictures if self.opened.origin else []


def prepare(
    study: StudySource, out: str | Path | None = None, trust_mtime: bool = False,
    say: Say = lambda text: None, network: Model | None = None, expect_accuracy: float | None = None,
) -> Prepared:  # fmt: skip
    """Check everything that can be checked before work starts, without writing. Args: see run_study."""
    opened = open_study(study, network)
    chosen, name = opened.study.run.out, Path(study).stem if isinstance(study, str | Path) else "study"
    path = Path(out or (os.path.normpath(opened.folder / chosen) if chosen else Path("runs") / name))
    begun = RunFolder.open(path).manifest if (path / "run.json").exists() else None
    # Settings that affect the last bits are fixed by the first start, so that a resumed run gets equal rows.
    resolve_defaults(opened, begun)
    with enough_memory(opened):
        hashes = check_study(opened)
        expected = opened.study.run.expect_accuracy if expect_accuracy is None else expect_accuracy
        check_accuracy(opened, expected)
        # Determined once and recorded: another batch size would change the last bits of later rows.
        if begun is None and opened.inputs_per_pass is None:
            model = opened.model(opened.checkpoints[-1].name)
            opened.set_inputs_per_pass(Accelerator(model).run_batch_size())
    if opened.warning:
        say(opened.warning)
    if opened.study.preprocess.spacing is None and (warning := opened.source.warning):
        say(warning)
    by_mtime = begun.pictures.startswith(Origin.BY_MTIME) if begun and begun.pictures else trust_mtime
    if begun is None and len(opened.source) >= MANY and not by_mtime:
        say(f"reading {counted(len(opened.source), 'image')} to identify them by content")
    # Contents, not paths, identify images, so that a run can move to another machine.
    opened.origin = Origin.of(opened.source, path, by_mtime)
    manifest = Manifest.collect(
        opened.config, device=opened.device, seed=opened.study.run.seed, models=hashes,
        data=opened.source.hash, classes=opened.source.classes, pictures=opened.origin.hash,
        code=code_hashes(opened.study.model.spec, opened.folder), brought=method_hashes(opened),
        preprocess=opened.preprocess, warnings=opened.warnings,
    )  # fmt: skip
    return Prepared(opened, manifest, path)


def resolve_defaults(opened: ResolvedStudy, manifest: Manifest | None) -> None:
    """Set device, threads, precision: from the study, else from the started run, else from this machine."""
    begun, settings = manifest.config.get("run", {}) if manifest else {}, opened.study.run
    opened.device = best_device(settings.device or begun.get("device"))
    opened.threads = settings.threads or begun.get("threads") or usual_threads()
    usual = None if manifest else usual_precision(opened.device)
    opened.precision = settings.precision or begun.get("precision") or usual
    opened.set_inputs_per_pass(settings.inputs_per_pass or begun.get("inputs_per_pass"))


def run_study(
    study: StudySource,
    out: str | Path | None = None,
    *,
    engine: str = "local",
    shard: tuple[int, int] = (0, 1),
    fail_fast: bool = False,
    progress: Progress | None = None,
    retry_broken: bool = False,
    trust_mtime: bool = False,
    network: Model | None = None,
    expect_accuracy: float | None = None,
) -> Result:
    """Run a study, or resume it: finished units are not computed again.

    Args:
        study: a TOML file, a dict of the same form, or a resolved study, whose loaded network is used.
        out: the run folder; default: run.out of the study, or runs/NAME.
        engine: "local" or "ray".
        shard: which of how many; each takes every n-th block, and the last to finish adds the group metrics.
        fail_fast: stop at the first image that cannot be read, instead of reporting it as a row.
        progress: displays progress.
        retry_broken: read images again that could not be read; their files may have changed since.
        trust_mtime: in a new run, identify images by size and modification time instead of their contents.
        network: used instead of the one that the study names; for the local engine.
        expect_accuracy: stop before work starts if the measured accuracy is far off (run/checks.py).
    """
    if engine not in ENGINES:
        raise InputError(f"there is no engine {engine!r}; {did_you_mean(engine, ENGINES)}")
    progress = progress or Progress(quiet=True)
    with span("checking"):
        prepared = prepare(study, out, trust_mtime, progress.say, network, expect_accuracy)
    opened, pictures = prepared.opened, prepared.pictures
    settings = opened.study.run
    folder = RunFolder.resume(
        prepared.path, prepared.manifest, growing(prepared.manifest.config), FREE, pictures,
        forgiven=forget_broken(prepared.path, pictures) if retry_broken else (), filled=filled,
    )  # fmt: skip
    if opened.origin:
        opened.origin.remember(folder.path)
    # Of several processes that start a run together, the first to write run.json decides.
    begun = folder.manifest.config["run"].get("inputs_per_pass")
    opened.set_inputs_per_pass(settings.inputs_per_pass or begun)
    plan = make_plan(folder.manifest, len(opened.source), pictures)
    if not folder.done():
        for line in opened.describe():
            progress.say(line)
    units = [unit.hash for unit in plan.units]
    hashes = set(units)
    superseded: set[str] = set()  # units over fewer images: of whole checkpoints, and the last short block
    if 0 < (before := (folder.planned() or {}).get("images", 0)) < len(pictures):
        superseded = {unit.hash for unit in make_plan(folder.manifest, before, pictures).units} - hashes
    # Recorded before any work: whether a run is complete is decided by the plan, not by what exists.
    folder.plan(units, len(opened.source), plan.checkpoints(), superseded)
    stopped = False
    try:
        with (
            folder.lock(f"{shard[0]}/{shard[1]}"),
            stop_on_signal(progress.say_at_once) as stop,
            fixed_threads(opened.threads),
            enough_memory(opened),
        ):
            done = folder.done()
            blocks = plan.shard(*shard)
            own = {unit.hash for block in blocks for unit in block}
            # A crash or a deleted file leaves units whose files are incomplete; they are computed again.
            drop_incomplete_units(folder, own | {unit.hash for unit in plan.groups}, progress.say)
            report_makers(folder, opened.device, progress.say)
            parts = (tuple(unit for unit in block if unit.hash not in done) for block in blocks)
            left = list(filter(None, parts))
            progress.start(sum(block[0].image_count for block in left), len(plan.units), len(done))
            try:
                ENGINES[engine](PendingUnits(opened, folder, plan, left, progress, stop, fail_fast))
            finally:
                progress.finish()
            check_written(folder, own if shard[1] > 1 else hashes)
    except StopRequested:
        stopped = True
    query = "select distinct image, reason from scores where metric = 'image' order by all"
    broken, done = folder.scores().sql(query), folder.done() & hashes
    return Result(folder, len(hashes), len(done), progress.images, broken, stopped, progress.seconds)


class UnitGroup(NamedTuple):
    """Units that share work, in order of computation; `compute` gets the missing ones."""

    units: Sequence[Unit]
    compute: Callable[[Sequence[Any]], Iterable[UnitRows]]
    images: int = 0  # of each unit, for the progress bar
    title: str = ""  # reported when the group is finished


def compute_units(
    folder: RunFolder, groups: Sequence[UnitGroup], checkpoints: Sequence[str], progress: Progress,
    images: int = 0,
) -> None:  # fmt: skip
    """Record the plan, then compute and write every unit that is missing or incomplete.

    For protocols and monitors that compute units themselves. images: number in the run; 0 if the rows are not
    about every image of a set.
    """
    units = [unit.hash for group in groups for unit in group.units]
    with folder.lock():
        folder.plan(units, images, checkpoints)
        drop_incomplete_units(folder, set(units), progress.say)
        done = folder.done()
        missing = [[unit for unit in group.units if unit.hash not in done] for group in groups]
        total = sum(group.images * len(left) for group, left in zip(groups, missing, strict=True))
        progress.start(total, len(units), len(units) - sum(map(len, missing)))
        try:
            for group, left in zip(groups, missing, strict=True):
                for computed in group.compute(left) if left else ():
                    folder.write_unit(*computed)
                    progress.advance(group.images, 1)
                if left and group.title:
                    progress.say(group.title)
        finally:
            progress.finish()
        check_written(folder, set(units))


def check_written(folder: RunFolder, units: set[str]) -> None:
    """Raise StoreError if files of finished units, or the run folder itself, vanished during the run."""
    seals, done = folder.ledger.seals(), folder.done()
    lost = [name for name in ("run.json", "plan.json") if not (folder.path / name).exists()]
    for unit in sorted(units - done):
        files = [f"seals/{unit}.json", *(seals[unit].files if unit in seals else ())]
        lost += [name for name in files if not (folder.path / name).exists()][:1]
    if lost:
        raise StoreError(
            f"{folder.path} lost {counted(len(lost), 'file')} during the run, such as {lost[0]}: "
            "another program deletes files there; run again to compute what is missing"
        )


def forget_broken(path: Path, pictures: Sequence[tuple[str, str]]) -> list[str]:
    """Drop the units with images that could not be read, and all units over whole checkpoints."""
    if not (path / "run.json").exists():
        return []
    folder = RunFolder.open(path)
    again = folder.broken()
    at = [i for i, (name, _) in enumerate(pictures) if valid_unicode(name) in again]
    plan = make_plan(folder.manifest, len(pictures), folder.images())
    if at:
        with folder.lock():
            units = [u.hash for u in plan.units if any(u.images[0] <= i < u.images[1] for i in at)]
            folder.retry(units, again)
    return [pictures[i][0] for i in at]


def drop_incomplete_units(folder: RunFolder, own: set[str], say: Say) -> None:
    """Drop incomplete units, so that they are computed again; raises StoreError for damaged parts."""
    if lost := own & (set(folder.ledger.all()) - folder.done()):
        say(f"{counted(len(lost), 'unit')} incomplete, computed again")
        folder.drop(lost)
    folder.checked_parts()


def report_makers(folder: RunFolder, device: str, say: Say) -> None:
    """Report units that were computed by other versions or on another device."""
    now = maker(device)
    for made in folder.makers():
        other = [f"{key} {made[key]} (now {now[key]})" for key in now if made.get(key, now[key]) != now[key]]
        if other:
            units = f"{made['parts']} units were computed with {', '.join(other)}"
            say(f"{units}; numbers may differ in their last digits")


@contextmanager
def enough_memory(opened: ResolvedStudy) -> Iterator[None]:
    """Limit the memory of a GPU, and raise ModelError if it does not hold a single input."""
    try:
        with limited_memory(opened.device):
            yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"there is not enough memory for a batch of {opened.study.run.batch_size} images; close other "
            "programs and run again, start a new run folder with a smaller run.batch_size, or set "
            "HEATPROOF_GPU_MEMORY=1 to use more than a quarter of a GPU's free memory"
        ) from error


def estimate(
    prepared: Prepared, shard: tuple[int, int] = (0, 1), say: Say = lambda text: None
) -> Iterator[tuple[str, str]]:
    """Estimate the cost of a run before it starts, counted from the plan and timed on its first images.

    Yields lines of a table: item and amount. say: called with a line about each trial.
    """
    manifest, done = prepared.manifest, set[str]()
    if (prepared.path / "run.json").exists():
        folder = RunFolder.open(prepared.path)
        changes = filled(folder.manifest).changes(manifest, growing(manifest.config), FREE)
        if refused := [change.sentence for change in changes if not change.addition]:
            raise StoreError(f"{prepared.path} was started with other settings: {'; '.join(refused)}")
        manifest = manifest.grown_from(folder.manifest) if changes else folder.manifest
        done = folder.done()
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
    yield "units", f"{plan.described(study.run.batch_size)}; {finished} done"
    units = f"{counted(len(pending), 'unit')} in this shard"
    yield "to do", f"{units}, then {len(groups)} about whole checkpoints"
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
    yield "units", plan.described(opened.study.run.batch_size)


def _timed(worker: Worker, pending: Sequence[PlannedUnit], say: Say) -> Iterator[tuple[str, str]]:
    total, basis = Trial(), []
    kinds: dict[tuple[str, ...], list[PlannedUnit]] = {}  # of all checkpoints, which cost the same
    for unit in pending:
        kinds.setdefault((unit.kind, *unit.methods, *unit.metrics), []).append(unit)
    for units in kinds.values():
        trials = Trials(worker, units[0], say)
        if not trials.indices:
            yield "estimated time", "unknown: the first images cannot be read"
            return
        total = total.plus(trials.per_image(longest=LONG), sum(unit.image_count for unit in units))
        basis.append(trials.basis)
    yield "forward passes", f"about {total.inputs:,.0f} inputs through the network"
    yield "estimated time", f"about {spell(total.seconds)}, metrics over whole checkpoints not counted"
    threads = counted(worker.opened.threads, "thread")
    yield "timed on", f"{worker.opened.device}, {threads}: {'; '.join(basis)}"


class Trial(NamedTuple):
    """Time and inputs of a part of a unit."""

    seconds: float = 0.0
    inputs: float = 0.0

    def plus(self, other: Trial, times: float = 1.0) -> Trial:
        return Trial(self.seconds + times * other.seconds, self.inputs + times * other.inputs)


class Trials:
    """Parts of the first unit of a kind, computed as in a run, with fewer images and fewer repetitions.

    Nothing is run at full length. Repeated passes (samples of LIME, steps of insertion) are cut down to a
    few, and each is raised separately while that is cheap, on one image; then the number of images is. Time
    and inputs are linear in all of these, so the last two points of each give the rest. Where everything is
    cheap nothing is cut, and the numbers are those of a real unit.
    """

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
            raise InputError(f"none of the images tried can be used; {first.id}: {first.reason}")
        self.decoding = (time.perf_counter() - began) / len(images)
        self.indices = [i for i in images if self.opened.source.samples[i].id in good]

    def per_image(self, warm: bool = False, longest: float | None = None) -> Trial:
        """The cost of one image of the unit with all its repetitions, decoding included.

        warm: do the first trial twice whatever it takes, where it may be the first of its kind. longest:
        seconds that the first trial may be expected to take; above, expected inputs are multiplied with the
        time of a bare pass.
        """
        full: Counts = {}
        for text in (*(self.unit.methods if self.unit.kind == "explain" else ()), *self.unit.metrics):
            for _, function, count in self._repeats(text):
                full[function] = max(count, full.get(function, 1))
        few = {function: min(FEWEST, count) for function, count in full.items()}
        if longest is not None and (bare := self._bare()) * self._expected(few) > longest:
            inputs = self._expected(full)
            self.basis = f"bare passes, for about {inputs:,.0f} inputs of each image"
            return Trial(self.decoding + inputs * bare, inputs)
        base = self._try(1, few)
        if warm or base.seconds * GROWTH < self.cheap:
            base = self._try(1, few)  # the first one warmed up
        whole, reached = base, 1.0
        passes = {explainers.get(parse_call(text)[0]).function for text in self.unit.methods}
        for function, count in full.items():
            leap = GROWTH if function in passes else 2  # a metric repeats its passes for every method

            def raised(more: int, function: Function = function) -> Trial:
                return self._try(1, few | {function: more})

            last, all_of_it = self._grow(raised, few[function], base, count, leap)
            more = all_of_it.plus(base, -1)
            # Between two short trials a busy machine hides what the passes cost, but not that they cost.
            long = last[1].seconds > self.cheap
            least = more.inputs * base.seconds / base.inputs / 2 if long else 0.0
            whole = whole.plus(more._replace(seconds=max(more.seconds, least)))
            reached = min(reached, last[0] / count)
        cheap, n = whole.seconds * GROWTH <= self.cheap, len(self.indices)
        counts = full if cheap else few
        begin = base if counts == few else self._try(1, full)
        last, all_of_it = self._grow(lambda images: self._try(images, counts), 1, begin, n)
        each = Trial(self.decoding).plus(all_of_it, 1 / n)
        self.basis = counted(last[0], "image")
        if not cheap:
            each = each.plus(whole).plus(base, -1)
            passes_of_it = "all" if reached == 1 else f"{reached:.1%} or more"
            self.basis += f", and 1 with {passes_of_it} of its repeated passes"
        return each

    def _grow(
        self, run: Callable[[int], Trial], start: int, first: Trial, end: int, leap: int = 2
    ) -> tuple[tuple[int, Trial], Trial]:
        """The last trial that was made, with its place, and what the last two extrapolate to at `end`.

        A second trial follows the first, a leap away if that was costly, and more while the next looks cheap.
        """
        before = last = start, first
        while last[0] < end:
            costly = last[1].seconds * GROWTH > self.cheap
            if costly and last is not before:
                break
            place = min(end, last[0] * (leap if costly else GROWTH))
            before, last = last, (place, run(place))
        steps = (end - last[0]) / (last[0] - before[0]) if last is not before else 0.0
        slope = last[1].plus(before[1], -1)
        return last, last[1].plus(slope._replace(seconds=max(0.0, slope.seconds)), steps)  # a fall is noise

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

    def _expected(self, counts: Counts) -> float:
        """About how many inputs one image takes with this many repetitions."""
        methods, metrics = self._cut(self.unit.methods, counts), self._cut(self.unit.metrics, counts)
        return expected_inputs(replace(self.unit, methods=methods, metrics=metrics)) / self.unit.image_count

    def _bare(self) -> float:
        """Seconds of a bare pass per image."""
        images, model = self._load(self.indices[:8], 0).batch.images, self.opened.model(self.unit.checkpoint)
        with fixed_threads(self.opened.threads):
            for _ in range(2):  # the first one warms up
                began = time.perf_counter()
                model.logits(images)
        return (time.perf_counter() - began) / len(images)

    def _load(self, indices: Sequence[int], workers: int | None) -> Loaded:
        preprocess = self.opened.model(self.unit.checkpoint).preprocess
        return next(iter(batches(self.opened.source, preprocess, len(indices), indices, workers)))

    def _passed(self, count: int) -> None:
        self.inputs += count

    def _repeats(self, text: str) -> list[tuple[str, Function, int]]:
        """Options of a method or metric that set the number of passes, and their values."""
        name, options = parse_call(text)
        if name in BUILT_IN:
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
