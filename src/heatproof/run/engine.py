"""A run from start to end: open the study and its folder, plan, and let an engine compute the units.

The numbers depend on neither engine, shards nor workers: a unit is one batch, decoded, explained and scored
separately, with the number of torch threads the run began with. (On a CPU the order in which torch adds up
follows the number of threads, so it is part of the run; on a GPU, bits also depend on the kind of GPU.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heatproof.disk import valid_unicode
from heatproof.errors import InputError, ModelError, StoreError, counted, did_you_mean
from heatproof.models.accel import Accelerator
from heatproof.models.load import best_device
from heatproof.models.model import Model
from heatproof.models.running import is_out_of_memory, usual_precision
from heatproof.run.checks import check_accuracy, check_study, method_hashes
from heatproof.run.plan import BY_MTIME, FREE, Origin, RunPlan, code_hashes, filled, growing, make_plan
from heatproof.run.process import fixed_threads, stop_on_signal, usual_threads
from heatproof.run.profile import Profiler
from heatproof.run.progress import Progress
from heatproof.run.ray_engine import run_ray
from heatproof.run.study import ResolvedStudy, StudySource, open_study
from heatproof.run.worker import PendingUnits, run_local
from heatproof.show import Sheet
from heatproof.store import Manifest, RunFolder
from heatproof.store.folder import StopRequested
from heatproof.store.manifest import maker
from heatproof.timeline import span
from heatproof.types import Maps, Score, Unit

ENGINES = {"local": run_local, "ray": run_ray}
MANY = 1000  # images whose hashing takes a while
Say = Callable[[str], object]
# What RunFolder.write_unit takes: a unit, its rows, its maps, and the images to store.
UnitRows = (
    tuple[Unit, Sequence[Score], Mapping[str, Maps]]
    | tuple[Unit, Sequence[Score], Mapping[str, Maps], Mapping[str, np.ndarray | Sheet]]
)


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Args:
        folder: its run folder.
        units, done: of the whole run, and of them the finished ones.
        computed: images that were computed in this call, once for each checkpoint.
        broken: image and reason of every image that could not be read.
        stopped: whether it was asked to stop.
        seconds: of its units, in this call.
    """

    folder: RunFolder
    units: int
    done: int
    computed: int
    broken: list[dict[str, Any]]
    stopped: bool = False
    seconds: float = 0.0

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
    with enough_memory(opened.study.run.batch_size):
        hashes = check_study(opened)
        expected = opened.study.run.expect_accuracy if expect_accuracy is None else expect_accuracy
        check_accuracy(opened, expected)
    # Measured once and recorded: another batch size would change the last bits of later rows.
    if begun is None and opened.inputs_per_pass is None:
        with fixed_threads(opened.threads):
            model = opened.model(opened.checkpoints[-1].name)
            opened.set_inputs_per_pass(Accelerator(model).measured_batch_size(opened.least_inputs))
    if opened.warning:
        say(opened.warning)
    if opened.study.preprocess.spacing is None and (warning := opened.source.warning):
        say(warning)
    by_mtime = begun.pictures.startswith(BY_MTIME) if begun and begun.pictures else trust_mtime
    if begun is None and len(opened.source) >= MANY and not by_mtime:
        say(f"reading {counted(len(opened.source), 'image')} to identify them by content")
    # Contents, not paths, identify images, so that a run can move to another machine.
    opened.origin = Origin.of(opened.source, path, by_mtime)
    manifest = Manifest.collect(
        opened.config,
        device=opened.device,
        seed=opened.study.run.seed,
        models=hashes,
        data=opened.source.hash,
        classes=list(opened.source.classes),
        pictures=opened.origin.hash,
        code=code_hashes(opened.study.model.spec, opened.folder),
        brought=method_hashes(opened),
        preprocess=opened.preprocess,
        warnings=list(opened.warnings),
    )
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
    profiler: Profiler | None = None,
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
        profiler: that of an open `profiling()`.
        network: used instead of the one that the study names; for the local engine.
        expect_accuracy: stop before work starts if the measured accuracy is far off (run/checks.py).
    """
    if engine not in ENGINES:
        raise InputError(f"there is no engine {engine!r}; {did_you_mean(engine, ENGINES)}")
    if profiler and engine != "local":
        raise InputError(
            "only the local engine can be profiled; for one worker's share: --shard 0/N --profile"
        )
    progress = progress or Progress(quiet=True)
    with span("checking"):
        prepared = prepare(study, out, trust_mtime, progress.say, network, expect_accuracy)
    opened, pictures = prepared.opened, prepared.pictures
    if profiler:
        profiler.on(opened.device)
    folder = RunFolder.resume(
        prepared.path, prepared.manifest, growing(prepared.manifest.config), FREE, pictures,
        forgiven=forget_broken(prepared.path, pictures) if retry_broken else (), filled=filled,
    )  # fmt: skip
    if opened.origin:
        opened.origin.remember(folder.path)
    # Of several processes that start a run together, the first to write run.json decides.
    begun = folder.manifest.config["run"].get("inputs_per_pass")
    opened.set_inputs_per_pass(opened.study.run.inputs_per_pass or begun)
    plan = make_plan(folder.manifest, len(opened.source), pictures)
    if not folder.done():
        for line in opened.describe():
            progress.say(line)
    hashes = {unit.hash for unit in plan.units}
    superseded = superseded_units(folder, plan, pictures)
    # Recorded before any work: whether a run is complete is decided by the plan, not by what exists.
    folder.plan([unit.hash for unit in plan.units], len(opened.source), plan.checkpoints(), superseded)
    stopped = False
    try:
        with (
            folder.lock(f"{shard[0]}/{shard[1]}"),
            stop_on_signal(progress.say_at_once) as stop,
            fixed_threads(opened.threads),
            enough_memory(opened.study.run.batch_size),
        ):
            done = folder.done()
            blocks = plan.shard(*shard)
            own = {unit.hash for block in blocks for unit in block}
            # A crash or a deleted file leaves units whose files are incomplete; they are computed again.
            drop_incomplete_units(folder, own | {unit.hash for unit in plan.groups}, progress.say)
            report_makers(folder, opened.device, progress.say)
            left = [tuple(unit for unit in block if unit.hash not in done) for block in blocks]
            left = [block for block in left if block]
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


def superseded_units(folder: RunFolder, plan: RunPlan, pictures: Sequence[tuple[str, str]]) -> set[str]:
    """Units over fewer images than the run has now: of whole checkpoints, and the last short block."""
    before = (folder.planned() or {}).get("images", 0)
    if not 0 < before < len(pictures):
        return set()
    old = make_plan(folder.manifest, before, pictures)
    return {unit.hash for unit in old.units} - {unit.hash for unit in plan.units}


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
        other = {key: made[key] for key in now if made.get(key, now[key]) != now[key]}
        if other:
            named = ", ".join(f"{key} {value} (now {now[key]})" for key, value in other.items())
            say(f"{made['parts']} units were computed with {named}; numbers may differ in their last digits")


@contextmanager
def enough_memory(batch_size: int) -> Iterator[None]:
    """Raise ModelError if memory runs out; commands print it without a traceback."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"there is not enough memory for a batch of {batch_size} images; close other programs and run "
            "again, or start a new run folder with a smaller run.batch_size"
        ) from error
