"""A run folder, which can be left at any moment and continued.

    run.json               the manifest
    plan.json              the units the run is made of; status.json, the last state of each shard
    images.json            hash of each image's content (SHA-256); hashes.json, a cache that saves hashing
    scores/UNIT.parquet    rows of a finished unit; UNIT.npz, thumbnails and sizes of its images
    maps/...               see maps.py
    evidence/CHECKPOINT.json  results of the metric evidence (metrics/evidence_record.py)
    pictures/NAME.png|jpg  the images as the model received them, NAME from the hash of the image's id
    seals/UNIT.json        checksums of the unit's files, written last: then the unit is done (see ledger.py)
    locks/                 which processes write (see ledger.py)

Every file is whole or absent, so a resume depends only on which seals exist. Several processes may write
different units at the same time, and the same unit twice does no harm: the bytes are equal.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from glob import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from heatproof.disk import Content, clear_failure, digest, valid_unicode, write_whole
from heatproof.errors import HeatproofError, StoreError
from heatproof.rows import Score, Unit
from heatproof.show import Sheet
from heatproof.store import ledger
from heatproof.store.ledger import Lease, Ledger, Seal
from heatproof.store.manifest import GROWING, Change, LaterFormatError, Manifest, maker
from heatproof.store.maps import MapStore, PictureStore, save, shard_files
from heatproof.store.scores import Scores, write_part

if TYPE_CHECKING:
    from heatproof.types import Maps

State = Literal["started", "stopped", "failed", "complete", "unknown"]
KILLED = "its process was killed or the machine stopped"
NOT_RECORDED = "plan.json, the list of units, is missing: run the study again"
# An image counts as used if the network's output was finite at every planned checkpoint.
IMAGES = """
    select count(*) filter (not broken and answers >= ?) as used, count(*) filter (broken) as broken,
           count(*) filter (unanswered) as unanswered
    from (select image, bool_or(metric = 'image') as broken,
                 bool_or(metric = 'predicted' and isnan(value)) as unanswered,
                 count(distinct checkpoint) filter (metric = 'predicted') as answers
          from scores where metric in ('image', 'predicted') group by image)
"""
Identity = Sequence[tuple[str, str]]  # id and hash of the content of each image, in order


class StopRequested(Exception):
    """Raised when a stop of the run was requested; all finished units are on disk."""


class SeenImages(NamedTuple):
    """Thumbnails and sizes of images, to count distinct ones."""

    ids: Sequence[str]
    thumbnails: np.ndarray  # "n SIDE SIDE c", uint8
    sides: np.ndarray  # "n 2", the shorter side in pixels of the image's file and of the network's input


@dataclass(frozen=True)
class Status:
    """Progress of a run, derived from the files in its folder.

    The state is "started" while a process works on it; "stopped" on request, or while other shards are to
    come; "failed" where an error ended it or its process was killed; "complete" where every planned unit is
    there; "unknown" without plan.json, which never counts as complete.
    """

    state: State
    reason: str  # why it is not complete
    planned: int  # images of the run
    used: int
    broken: int  # images that could not be read
    missing: int  # images without a row at one checkpoint or more
    unanswered: int  # of those used, images for which the network's output was NaN
    units: int  # of the plan
    done: int  # of them the finished ones

    @property
    def complete(self) -> bool:
        return self.state == "complete"

    @property
    def usable(self) -> float:
        """Share of planned images with a finite output of the network."""
        return (self.used - self.unanswered) / self.planned if self.planned else 0.0

    @property
    def sentence(self) -> str:
        images = f"{self.used} of {self.planned} images used, {self.broken} broken, {self.missing} missing"
        if self.unanswered:
            images += f", {self.unanswered} answered with NaN"
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.state}{why}: {self.done} of {self.units} units, {images}"

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "usable": self.usable}


class RunFolder:
    """A run on disk: its manifest, its finished units, their scores and maps."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run, to read it or to add units; nothing on disk is changed.

        path: of the run, or of a study with its run in run/.
        """
        path = run_in(path)
        _refuse_links(path)
        return cls(path, Manifest.read(path / "run.json"))

    @classmethod
    def resume(
        cls, path: str | Path, manifest: Manifest,
        growing: Collection[str] = GROWING, free: Collection[str] = (),
        pictures: Identity = (), forgiven: Collection[str] = (),
        filled: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    ) -> RunFolder:  # fmt: skip
        """Continue a run, or start it if there is none.

        Raises StoreError, with what changed, unless the manifest is the same or only adds (see
        `compare_configs`); additions are written to run.json, with the earlier manifest.

        Args:
            growing, free: see `compare_configs`.
            pictures: written to images.json.
            forgiven: images that may differ from what they were.
            filled: adds the defaults of settings that are younger than the run.
        """
        path = Path(path)
        _refuse_links(path)
        with ledger.turn(path):
            recorded: Identity = []
            with suppress(StoreError):
                recorded = cls(path, manifest).images()
            before, now = dict(recorded), dict(pictures)
            other = [i for i in {**before, **now} if before.get(i) != now.get(i)] if before and now else []
            if stored := (path / "run.json").exists():
                old = Manifest.read(path / "run.json")
                changes = filled(old).changes(manifest, growing, free)
                more = any(change.addition and "images" in change.key.split(".") for change in changes)
                if more and recorded != list(pictures[: len(recorded)]) and len(pictures) > len(recorded):
                    changes.append(Change("images", "the images are not those of the run", False))
                if other and set(other) <= set(forgiven):
                    changes = [change for change in changes if change.key != "images"]
                    old = replace(old, data=manifest.data, pictures=manifest.pictures)
                cls(path, old)._refuse_changes(changes, other)
                manifest = manifest.grown_from(old) if changes else old.completed_by(manifest)
            if not stored or Manifest.read(path / "run.json") != manifest:
                manifest.write(path / "run.json")
            if pictures and (other or not (path / "images.json").exists()):
                ledger.write_record(path / "images.json", {"images": list(map(list, pictures))}, indent=None)
        return cls(path, manifest)

    def _refuse_changes(self, changes: Sequence[Change], images: Sequence[str]) -> None:
        """Raise StoreError for changes that are no additions; images: those that differ."""
        more = f" and {len(images) - 1} more" if len(images) > 1 else ""
        named = f" ({images[0]}{more})" if images else ""
        refused = [c.sentence + named * (c.key == "images") for c in changes if not c.addition]
        if refused:
            remedy = "undo the change or choose another folder"
            if images and set(map(valid_unicode, images)) <= self.broken():
                remedy = "use --retry-broken to read images again that could not be read, or undo the change"
            raise StoreError(f"{self.path} was started with other settings: {'; '.join(refused)}; {remedy}")

    @contextmanager
    def lock(self, name: str = "0/1") -> Iterator[None]:
        """Lock one shard of the run; raises StoreError if another process has it, or one that overlaps.

        Temporary files of killed processes are removed, and the final state of the work is recorded.
        """
        with ledger.writing(self.path) as lease:
            with ledger.turn(self.path):
                ledger.claim(lease, self.path, name)
                self._record_state(lease, name, "started")
            state, reason = "stopped", ""
            try:
                with ledger.without_leftovers(self.path):
                    yield
                whole = (plan := self.planned()) is not None and set(plan["units"]) <= self.done()
                state = "complete" if whole else "ended"
            except BaseException as error:
                if not isinstance(error, KeyboardInterrupt | StopRequested):
                    text = " ".join(str(error).split()) or type(error).__name__
                    text = text if isinstance(error, HeatproofError) else f"{type(error).__name__}: {text}"
                    state, reason = "failed", text
                raise
            finally:
                if self.path.exists():  # on a full disk the state cannot be recorded
                    with suppress(StoreError), ledger.turn(self.path):
                        self._record_state(lease, name, state, reason)
                lease.hold([shard for shard in lease.shards if shard != name])

    def plan(
        self, units: Collection[str], images: int, checkpoints: Collection[str],
        superseded: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Record the units of the run. Those from before it grew stay, except the `superseded`."""
        with ledger.turn(self.path):
            old = self.planned()
            past = old["units"] if old and old["run"] == self.manifest.id else []
            past = [unit for unit in past if unit not in superseded]
            plan = {
                "run": self.manifest.id, "images": images, "checkpoints": list(checkpoints),
                "units": list(dict.fromkeys([*past, *units])),
                "records": [name for name in ("images.json", "hashes.json") if (self.path / name).exists()],
            }  # fmt: skip
            if plan != old:
                ledger.write_record(self.path / "plan.json", plan)
        self.drop(superseded)

    def planned(self) -> dict[str, Any] | None:
        """The recorded plan (run, images, checkpoints, units); None if there is none."""
        return ledger.known_record(self.path / "plan.json")

    def images(self) -> list[tuple[str, str]]:
        """Id and content hash of every image when the run began, if they were recorded."""
        record = ledger.known_record(self.path / "images.json") or {}
        return [(name, mark) for name, mark in record.get("images", ())]

    def broken(self) -> set[str]:
        """Images that could not be read, including those that a stopped `--retry-broken` has not read yet."""
        rows = self.scores().sql("select distinct image from scores where metric = 'image'")
        return {row["image"] for row in rows} | set((self.planned() or {}).get("retry", ()))

    def shard_states(self) -> dict[str, dict[str, str]]:
        """State and reason that each shard recorded last."""
        try:
            return ledger.known_record(self.path / "status.json") or {}
        except StoreError:  # only a hint: the existing units decide
            return {}

    def status(self) -> Status:
        """Whether the run is complete, and how many of its images could be used."""
        plan, done = self.planned(), self.done()
        checkpoints = len(plan["checkpoints"]) if plan else len(self.manifest.models)
        (counts,) = self.scores().sql(IMAGES, [max(1, checkpoints)])
        used, broken = counts["used"], counts["broken"]
        units = set(plan["units"]) if plan else done
        planned = plan["images"] if plan else used + broken
        missing = max(0, planned - used - broken)
        how, unanswered = self._state(plan is not None, done, units), counts["unanswered"]
        return Status(*how, planned, used, broken, missing, unanswered, len(units), len(done & units))

    def _state(self, is_planned: bool, done: set[str], units: set[str]) -> tuple[State, str]:
        if not is_planned:
            return "unknown", NOT_RECORDED
        if units <= done:
            return "complete", ""
        if working := ledger.claims(self.path):
            return "started", f"shard {', '.join(working)} is running"
        left = f"{len(units - done)} of {len(units)} units are missing"
        states = self.shard_states()
        for shard, last in states.items():
            where = "" if shard == "0/1" else f"shard {shard}: "
            if last["state"] in ("failed", "started"):
                return "failed", where + (last["reason"] if last["state"] == "failed" else KILLED)
        recorded = {last["state"] for last in states.values()}
        if "stopped" in recorded:
            return "stopped", f"on request; {left}"
        return ("failed", f"{left}, though it was complete") if "complete" in recorded else ("stopped", left)

    def write_unit(
        self, unit: Unit, scores: Sequence[Score] = (), maps: Mapping[str, Maps] | None = None,
        pictures: Mapping[str, np.ndarray | Sheet] | None = None, seen: SeenImages | None = None,
        records: Mapping[Path, Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        """Write a finished unit: maps, images and rows, then its seal. Safe in any thread or process.

        Args:
            maps: by the method as the rows name it.
            pictures: "H W 3" uint8 by image; those that are stored are left alone.
            seen: thumbnails and sizes of the images.
            records: further JSON files of the unit, by path.
        """
        files: dict[Path, Content] = shard_files(self.path / "maps", unit, maps or {})
        for name in self.unstored(pictures or {}):
            files |= self.pictures().files(name, (pictures or {})[name])
        part = self.path / "scores" / f"{unit.hash}.parquet"
        if seen is not None:
            named = seen._asdict() | {"ids": np.array([valid_unicode(name) for name in seen.ids])}
            files[part.with_suffix(".npz")] = partial(save, write=np.savez, **named)
        files |= {path: ledger.record_text(content) for path, content in (records or {}).items()}
        files[part] = partial(write_part, scores=scores, unit=unit.hash)
        with ledger.writing(self.path) as lease:
            self.ledger.forget(unit.hash)  # first: no seal may describe files that are being replaced
            digests = write_whole(files, lease.id)
            marks = {path.relative_to(self.path).as_posix(): mark for path, mark in digests.items()}
            device = self.manifest.config.get("run", {}).get("device") or self.manifest.machine.get("device")
            # The seal is written last: a process that dies before leaves a unit that is absent, never a
            # partial one.
            self.ledger.write(unit, marks, maker(device or "cpu"), lease.id)

    def seen(self, checkpoint: str) -> SeenImages | None:
        """Thumbnails and sizes of the images of a checkpoint; None if they were not stored."""
        known = valid_unicode(checkpoint)
        parts = []
        for unit, seal in self.units().items():
            name = f"scores/{unit}.npz"
            if name in seal.files and valid_unicode(seal.unit["checkpoint"]) == known:
                ledger.check_file(self.path / name, seal.files[name])
                with np.load(self.path / name, allow_pickle=False) as part:
                    parts.append((part["ids"].tolist(), part["thumbnails"], part["sides"]))
        if not parts:
            return None
        ids, thumbnails, sides = zip(*parts, strict=True)
        return SeenImages(list(chain(*ids)), np.concatenate(thumbnails), np.concatenate(sides))

    def units(self) -> dict[str, Seal]:
        """Planned units with rows and a seal."""
        seals, plan = self.ledger.seals(), self.planned()
        parts = {path.stem for path in (self.path / "scores").glob("*.parquet")}
        allowed = parts & set(plan["units"]) if plan else parts
        return {unit: seals[unit] for unit in sorted(allowed & set(seals))}

    def done(self) -> set[str]:
        """Hashes of the finished units: those with a seal and all their files."""
        there, units = self.ledger.present(), self.units()
        wanted = {u: {f for f in seal.files if not f.startswith("pictures/")} for u, seal in units.items()}
        return {unit for unit, files in wanted.items() if files <= there}

    def drop(self, units: Collection[str]) -> None:
        """Remove units from the run, so that they are computed again."""
        seals = self.ledger.seals()
        for unit in units:
            self.ledger.forget(unit)
            named = [self.path / file for file in seals[unit].files] if unit in seals else []
            unsealed = [self.path / f"scores/{unit}.parquet", self.path / f"maps/{unit}.json.gz"]
            shards = (self.path / "maps").glob(f"*/{escape(unit)}*.npy")
            ledger.remove(self.path, [*named, *unsealed, *shards])

    def retry(self, units: Collection[str], images: Collection[str]) -> None:
        """Remove units from the run and its plan; the contents of their images may differ from now on."""
        with ledger.turn(self.path):
            plan = self.planned() or {}
            left = [unit for unit in plan.get("units", ()) if unit not in set(units)]
            ledger.write_record(self.path / "plan.json", plan | {"units": left, "retry": sorted(images)})
        self.drop(units)

    def makers(self) -> list[dict[str, Any]]:
        """Versions and devices that computed the units, with the number of units of each, most first."""
        counts = Counter(tuple(sorted(seal.made.items())) for seal in self.units().values())
        return [{**dict(key), "parts": n} for key, n in counts.most_common()]

    def unstored(self, names: Collection[str]) -> list[str]:
        """Images that are not stored, or were left unsealed by a process that ended."""
        paths = {name: self.pictures().path(name) for name in names}
        return [name for name, path in paths.items() if not (path and self.ledger.picture_hash(path))]

    def scores(self) -> Scores:
        return Scores(self.path / "scores", self.checked_parts, lambda: self.status().row())

    def maps(self) -> MapStore:
        return MapStore(self.path / "maps", self.units)

    def pictures(self) -> PictureStore:
        return PictureStore(self.path / "pictures", self.ledger)

    @property
    def page(self) -> Path:
        """Path of the report: for an audit beside its run folder, else inside the run folder."""
        beside = [self.path.parent / name for name in ("audit.json", "study.toml", "report.html")]
        in_audit = beside[0].exists() or all(path.exists() for path in beside[1:])
        return beside[2] if in_audit and self.path.name == "run" else self.path / "report.html"

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.path)

    def checked_parts(self) -> list[Path]:
        """Files of rows, after comparing each with its seal."""
        parts = {self.path / "scores" / f"{unit}.parquet": seal for unit, seal in self.units().items()}
        for path, seal in parts.items():
            ledger.check_file(path, seal.files[f"scores/{path.name}"])
        return list(parts)

    def _record_state(self, lease: Lease, shard: str, state: str, reason: str = "") -> None:
        count = shard.rpartition("/")[2]
        states = {name: s for name, s in self.shard_states().items() if name.rpartition("/")[2] == count}
        states[shard] = {"state": state, "reason": reason}
        ledger.write_record(self.path / "status.json", states, lease.id)


def run_in(path: str | Path) -> Path:
    """The folder itself, or the run folder inside a study's folder."""
    path = Path(path)
    inside = path / "run"
    whole = not (path / "run.json").exists() and (inside / "run.json").exists() and not inside.is_symlink()
    return inside if whole else path


def _refuse_links(root: Path) -> None:
    """Raise StoreError if a part of a run folder is a link."""
    for name in ledger.linked_folders(root):
        ledger.plain(root / name)


class Finding(NamedTuple):
    """A file of a run folder that is damaged, missing or foreign (no seal or plan names it)."""

    path: str  # relative to the folder
    problem: str
    unit: str = ""  # the unit it belongs to


def inspect(path: Path) -> list[Finding]:
    """All findings of a run folder, which is read completely; raises for a later format."""
    if not (path / "run.json").exists() and not (path / "seals").is_dir():
        RunFolder.open(path)  # raises if it is not a run folder
    findings, folder = list(_records(path)), RunFolder(path, Manifest({}))
    plan = None if any(finding.path == "plan.json" for finding in findings) else folder.planned()
    seals = folder.ledger.all()
    planned = set(plan["units"]) if plan else set(seals)
    foreign, left = set(seals) - planned, planned - set(seals)
    damaged = {unit for unit in planned & set(seals) if seals[unit] is None}
    lost = left if any(last["state"] == "complete" for last in folder.shard_states().values()) else ()
    findings += [Finding(_seal(unit), "foreign: this unit is not in the plan") for unit in sorted(foreign)]
    findings += [Finding(_seal(unit), "missing", unit) for unit in sorted(lost)]
    findings += [Finding(_seal(unit), "damaged", unit) for unit in sorted(damaged)]
    whole = {unit: seal.files for unit, seal in seals.items() if seal and unit in planned}
    expected = {file: (mark, unit) for unit, files in whole.items() for file, mark in files.items()}
    there = set(_files(path))
    for name in sorted(there | set(expected)):
        is_seal = name.startswith("seals/") and name.endswith(".json")
        is_named_otherwise = name.startswith(("pictures/", "evidence/"))  # than its unit
        own = "" if is_named_otherwise else name.rpartition("/")[2].partition(".")[0]
        mark, unit = expected.get(name, ("", own))
        if name not in there:
            findings.append(Finding(name, "missing", unit))
        elif not ledger.is_plain(path / name):
            findings.append(Finding(name, "foreign: a link, not a file"))
        elif mark and digest(path / name) != mark:
            findings.append(Finding(name, "damaged", unit))
        elif mark or is_seal or unit in damaged | left or (left and is_named_otherwise):
            continue  # as written, or of a unit that is not finished
        else:
            findings.append(Finding(name, "foreign: it belongs to no unit of this run"))
    return findings


def _seal(unit: str) -> str:
    return f"seals/{unit}.json"


def _records(path: Path) -> Iterator[Finding]:
    """Records that are damaged, or missing although the others show that they were written."""
    required = {"run.json", "plan.json"}
    if any(Ledger(path).all()):
        required.add("status.json")
    try:
        if Manifest.read(path / "run.json").pictures:
            required.add("images.json")
    except LaterFormatError:
        raise
    except StoreError:
        if (path / "run.json").exists():
            yield Finding("run.json", "damaged")
    by_0_2 = False  # whose verdict.json has no checksum
    for name in ledger.RECORDS:
        try:
            record = ledger.known_record(path / name)
            if name == "plan.json" and record:
                by_0_2 = "records" not in record
                required.update(ledger.RECORDS.keys() & record.get("records", ()))
        except StoreError:
            if not (name == "verdict.json" and by_0_2):
                yield Finding(name, "damaged")
    yield from (Finding(name, "missing") for name in sorted(required) if not (path / name).exists())


def repair(path: Path, findings: Sequence[Finding]) -> list[str]:
    """Drop the units of findings and move foreign files aside; returns the units to compute again."""
    readable = not any(finding.path == "run.json" for finding in findings)
    folder = RunFolder(path, Manifest.read(path / "run.json") if readable else Manifest({}))
    units = {finding.unit for finding in findings if finding.unit}
    links = {finding.path for finding in findings if (path / finding.path).is_symlink()}
    for name in links:  # which hold nothing, and before anything is done behind them
        with clear_failure(path / name):
            (path / name).unlink()
    with folder.lock():
        folder.drop(units)
        for finding in findings:
            source, target = path / finding.path, path / ledger.ASIDE / finding.path
            if not finding.unit and finding.path not in links and os.path.lexists(source):
                with clear_failure(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(source, target)
    return sorted(units)


def _files(root: Path) -> Iterator[str]:
    linked = ledger.linked_folders(root)
    yield from linked
    for folder in ledger.FOLDERS:
        if folder in linked:
            continue
        for parent, below, names in os.walk(root / folder):
            below_links = [name for name in below if Path(parent, name).is_symlink()]
            for name in (*names, *below_links):
                if ledger.lease_of(name) is None:  # its lease shows whether it is still being written
                    yield Path(parent, name).relative_to(root).as_posix()
