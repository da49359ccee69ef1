"""A run from start to end: open the study and its folder, plan, hand blocks to an engine, then the groups.

The numbers depend on neither engine, shards nor workers: a unit is one batch, decoded, explained and scored
by itself, with the number of torch threads the run began with. (On a CPU the order in which torch adds up
follows the number of threads, so it is part of the run; on a GPU, bits also depend on the kind of GPU.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heatproof.disk import valid_unicode
from heatproof.errors import InputError, ModelError, StoreError, counted, did_you_mean
from heatproof.models.accel import Accelerator
from heatproof.models.load import best_device
from heatproof.models.model import Model
from heatproof.models.running import is_out_of_memory, usual_precision
from heatproof.run.external_methods import map_names, method_hashes
from heatproof.run.inputs import check_accuracy
from heatproof.run.plan import RunPlan, make_plan
from heatproof.run.process import asking_to_stop, fixed_threads, usual_threads
from heatproof.run.profile import Profiler
from heatproof.run.progress import Progress
from heatproof.run.provenance import BY_MTIME, FREE, Origin, code_hashes, filled, growing
from heatproof.run.ray_engine import run_ray
from heatproof.run.study import ResolvedStudy, StudySource, check_study, open_study
from heatproof.run.worker import Job, Work, run_local
from heatproof.store import Manifest, RunFolder
from heatproof.store.folder import StopRequested
from heatproof.store.manifest import maker
from heatproof.timeline import span

ENGINES = {"local": run_local, "ray": run_ray}
MANY = 1000  # pictures whose hashing one may notice
Say = Callable[[str], object]


@dataclass(frozen=True)
class Result:
    """How a run went."""

    folder: RunFolder
    units: int  # of the whole run
    done: int  # of them, now
    computed: int  # pictures that went through this call, once for each checkpoint
    broken: list[dict[str, Any]]  # image and reason of every picture that could not be used
    stopped: bool = False
    seconds: float = 0.0  # of its units, in this call

    @property
    def unanswered(self) -> int:
        """Pictures for which the network's output was NaN, at one checkpoint or more."""
        return self.folder.status().unanswered


@dataclass(frozen=True)
class Prepared:
    """A study that passed every check, and the manifest of the run it asks for."""

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
    """Check everything that can be checked before work starts; nothing is written.

    trust_mtime: in a new run, sizes and times of files stand for their contents. network: in place of the one
    that the study names. expect_accuracy: raise where the measured one is far off; the study's where None.
    """
    opened = open_study(study, network)
    chosen, name = opened.study.run.out, Path(study).stem if isinstance(study, str | Path) else "study"
    path = Path(out or (os.path.normpath(opened.folder / chosen) if chosen else Path("runs") / name))
    begun = RunFolder.open(path).manifest if (path / "run.json").exists() else None
    resolve_defaults(opened, begun)
    with enough_memory(opened.study.run.batch_size):
        hashes = check_study(opened)
        expected = opened.study.run.expect_accuracy if expect_accuracy is None else expect_accuracy
        check_accuracy(opened, expected)
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
        say(f"reading {counted(len(opened.source), 'picture')} to know them by their contents")
    opened.origin = Origin.of(opened.source, path, by_mtime)
    manifest = Manifest.collect(
        opened.config,
        seed=opened.study.run.seed,
        models=hashes,
        data=opened.source.hash,
        device=opened.device,
        classes=opened.source.classes,
        pictures=opened.origin.hash,
        code=code_hashes(opened.study.model.spec, opened.folder),
        brought=method_hashes(
            opened.study.methods, opened.folder, map_names(opened.source, opened.is_multilabel)
        ),
        preprocess=opened.preprocess,
        warnings=opened.warnings,
    )
    return Prepared(opened, manifest, path)


def resolve_defaults(opened: ResolvedStudy, manifest: Manifest | None) -> None:
    """Device, threads, precision: as the study says, else as the run began, else what this machine has."""
    begun, asked = manifest.config.get("run", {}) if manifest else {}, opened.study.run
    opened.device = best_device(asked.device or begun.get("device"))
    opened.threads = asked.threads or begun.get("threads") or usual_threads()
    usual = None if manifest else usual_precision(opened.device)
    opened.precision = asked.precision or begun.get("precision") or usual
    opened.set_inputs_per_pass(asked.inputs_per_pass or begun.get("inputs_per_pass"))


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
    """Run a study, or go on with it: units that are done are left alone.

    study: a TOML file, a dict of the same form, or a resolved study, whose loaded network is used.
    shard: which of how many; each takes every n-th block, and the last to finish adds the group metrics.
    fail_fast: stop at the first picture that cannot be used, instead of reporting it as a row.
    retry_broken: try pictures again that could not be used; their files may have changed meanwhile.
    trust_mtime: in a new run, know pictures by size and time of change instead of by their contents.
    profiler: that of an open `profiling()`, which is told the device.
    network: one that Python holds, in place of the one that the study names; for the local engine.
    expect_accuracy: stop before work starts where the measured accuracy is far off (run/inputs.py).
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
    opened = prepared.opened
    if profiler:
        profiler.on(opened.device)
    folder = RunFolder.resume(
        prepared.path, prepared.manifest, growing(prepared.manifest.config), FREE, prepared.pictures,
        forgiven=forget_broken(prepared.path, prepared.pictures) if retry_broken else (), filled=filled,
    )  # fmt: skip
    if opened.origin:
        opened.origin.remember(folder.path)
    # Of several processes that begin a run together, one was first: its measurement counts.
    opened.set_inputs_per_pass(
        opened.study.run.inputs_per_pass or folder.manifest.config["run"].get("inputs_per_pass")
    )
    plan = make_plan(folder.manifest, len(opened.source), prepared.pictures)
    if not folder.done():
        for line in opened.describe():
            progress.say(line)
    gone = superseded_units(folder, plan, prepared.pictures)
    folder.plan([unit.hash for unit in plan.units], len(opened.source), plan.checkpoints(), gone)
    stopped = False
    try:
        with (
            folder.lock(f"{shard[0]}/{shard[1]}"),
            asking_to_stop(progress.say_at_once) as stop,
            fixed_threads(opened.threads),
            enough_memory(opened.study.run.batch_size),
        ):
            done = folder.done()
            blocks = plan.shard(*shard)
            own = {task.unit.hash for block in blocks for task in block.tasks}
            drop_incomplete_units(folder, own | {task.unit.hash for task in plan.groups}, progress.say)
            say_makers(folder, opened.device, progress.say)
            jobs = [Job(b, t) for b in blocks if (t := tuple(t for t in b.tasks if t.unit.hash not in done))]
            progress.start(sum(job.images for job in jobs), len(plan.units), len(done))
            try:
                ENGINES[engine](Work(opened, folder, plan, jobs, progress, stop, fail_fast))
            finally:
                progress.finish()
            check_written(folder, own if shard[1] > 1 else {unit.hash for unit in plan.units})
    except StopRequested:
        stopped = True
    hashes = {unit.hash for unit in plan.units}
    done = folder.done() & hashes
    broken, seconds = broken_images(folder), progress.seconds
    return Result(folder, len(hashes), len(done), progress.images, broken, stopped, seconds)


def superseded_units(folder: RunFolder, plan: RunPlan, pictures: Sequence[tuple[str, str]]) -> set[str]:
    """Units about fewer pictures than the run has by now: of whole checkpoints, and of a last short block."""
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
            f"{folder.path} lost {counted(len(lost), 'file')} while the run was going, such as {lost[0]}: "
            "something else deletes files there; run again to compute what is missing"
        )


def broken_images(folder: RunFolder) -> list[dict[str, Any]]:
    """Image and reason of every picture that could not be used."""
    query = "select distinct image, reason from scores where metric = 'image' order by all"
    return folder.scores().sql(query)


def forget_broken(path: Path, pictures: Sequence[tuple[str, str]]) -> list[str]:
    """Drop the units with pictures that could not be used, and all that is about whole checkpoints."""
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
    """Units that are not whole are made again; damaged parts are refused before work starts."""
    if lost := own & (set(folder.ledger.all()) - folder.done()):
        say(f"{counted(len(lost), 'unit')} not whole, made again")
        folder.drop(lost)
    folder.checked_parts()


def say_makers(folder: RunFolder, device: str, say: Say) -> None:
    now = maker(device)
    for made in folder.makers():
        other = {key: made[key] for key in now if made.get(key, now[key]) != now[key]}
        if other:
            named = ", ".join(f"{key} {value} (now {now[key]})" for key, value in other.items())
            say(f"{made['parts']} units were made with {named}; numbers may differ in their last digits")


@contextmanager
def enough_memory(batch_size: int) -> Iterator[None]:
    """Memory that runs out is no bug, so no traceback."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"there is not enough memory for a batch of {batch_size} images; close other programs and run "
            "again, or start a new run folder with a smaller run.batch_size"
        ) from error
