"""A run folder, which can be left at any moment and continued.

    run.json               the manifest
    plan.json              the units the run is made of; status.json, the last state of each shard
    images.json            hash of each image's content (SHA-256); hashes.json, a cache that saves hashing
    scores/UNIT.parquet    rows of a finished unit; UNIT.npz, thumbnails and sizes of its images
    maps/...               see maps.py
    pictures/NAME.png|jpg  the images as the model saw them, NAME from the hash of the image's id
    seals/UNIT.json        checksums of the unit's files, written last: then the unit is done (see ledger.py)
    locks/                 which processes write (see lease.py)

Every file is whole or absent, so a resume depends only on which seals exist. Several processes may write
different units at the same time, and the same unit twice does no harm: the bytes are equal.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from heatproof.disk import Content, clear_failure, valid_unicode, write_whole
from heatproof.errors import HeatproofError, StoreError
from heatproof.rows import Score, Unit
from heatproof.show import Sheet
from heatproof.store.lease import Lease, Leftovers, claim, claims, turn, writing
from heatproof.store.ledger import (
    Ledger,
    Seal,
    check_file,
    damaged,
    known_record,
    plain,
    refuse_links,
    remove,
    write_record,
)  # fmt: skip
from heatproof.store.manifest import GROWING, Change, Manifest, maker
from heatproof.store.maps import MapStore, shard_files
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
FEW_COLOURS = 256  # images with at most so many (codes, drawings) are stored as PNG, the others as JPEG
QUALITY = 90
MOST_BYTES, MOST_PIXELS = 1 << 26, 1 << 26
NO_PICTURE = (
    OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip
PLANES = re.compile(r"planes (\d{1,6}(?: \d{1,6}){2})")
Identity = Sequence[tuple[str, str]]  # id and hash of the content of each image, in order


class StopRequested(Exception):
    """Raised when the run was asked to stop; all finished units are on disk."""


class SeenImages(NamedTuple):
    """Thumbnails and sizes of images, to count distinct ones."""

    ids: Sequence[str]
    thumbnails: np.ndarray  # "n SIDE SIDE c", uint8
    sides: np.ndarray  # "n 2", the shorter side in pixels of the image's file and of the network's input


@dataclass(frozen=True)
class Status:
    """Progress of a run, derived from the files in its folder.

    Args:
        state: "started" while a process works on it; "stopped" on request, or while other shards are to come;
            "failed" where an error ended it or its process was killed; "complete" where every planned unit
            is there; "unknown" without plan.json, which never counts as complete.
        reason: why it is not complete.
        planned, used, broken, missing: images of the run, those that were used, could not be read, or have no
            row yet at one checkpoint or more.
        unanswered: of those used, images for which the network's output was NaN.
        units, done: of the plan, and of them the finished ones.
    """

    state: State
    reason: str
    planned: int
    used: int
    broken: int
    missing: int
    unanswered: int
    units: int
    done: int

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
    def create(cls, path: str | Path, manifest: Manifest) -> RunFolder:
        """Start a new run; raises StoreError if the folder already holds one."""
        path = Path(path)
        with _turn(path):
            if (path / "run.json").exists():
                raise StoreError(f"{path} already holds a run; resume it or choose another folder")
            manifest.write(path / "run.json")
        return cls(path, manifest)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run, to read it or to add units; nothing on disk is changed.

        path: of the run, or of a study with its run in run/.
        """
        path = run_in(path)
        refuse_links(path)
        return cls(path, Manifest.read(path / "run.json"))

    @classmethod
    def resume(
        cls,
        path: str | Path,
        manifest: Manifest,
        growing: Collection[str] = GROWING,
        free: Collection[str] = (),
        pictures: Identity = (),
        forgiven: Collection[str] = (),
        filled: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    ) -> RunFolder:
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
        refuse_links(path)
        with _turn(path):
            if not (path / "run.json").exists():
                return cls._written(path, manifest, pictures)
            old = Manifest.read(path / "run.json")
            changes = filled(old).changes(manifest, growing, free)
            other = _differing(path, pictures)
            more = [change for change in changes if change.addition and "images" in change.key.split(".")]
            if more and not _goes_on(_recorded(path), pictures):
                changes.append(Change("images", "the images are not those of the run", False))
            if other and set(other) <= set(forgiven):
                changes = [change for change in changes if change.key != "images"]
                old = replace(old, data=manifest.data, pictures=manifest.pictures)
            refused = [
                change.sentence + (_named(other) if change.key == "images" else "")
                for change in changes
                if not change.addition
            ]
            if refused:
                remedy = "undo the change or choose another folder"
                if other and set(map(valid_unicode, other)) <= cls(path, old).broken():
                    remedy = (
                        "use --retry-broken to read images again that could not be read, or undo the change"
                    )
                raise StoreError(f"{path} was started with other settings: {'; '.join(refused)}; {remedy}")
            manifest = manifest.grown_from(old) if changes else old.completed_by(manifest)
            return cls._written(path, manifest, pictures)

    @classmethod
    def _written(cls, path: Path, manifest: Manifest, pictures: Identity) -> RunFolder:
        if not (path / "run.json").exists() or Manifest.read(path / "run.json") != manifest:
            manifest.write(path / "run.json")
        if pictures and (_differing(path, pictures) or not (path / "images.json").exists()):
            write_record(path / "images.json", {"images": list(map(list, pictures))}, indent=None)
        return cls(path, manifest)

    @contextmanager
    def lock(self, name: str = "0/1") -> Iterator[None]:
        """Lock one shard of the run; raises StoreError if another process has it, or one that overlaps.

        Temporary files of killed processes are removed, and the final state of the work is recorded.
        """
        with writing(self.path) as lease:
            with _turn(self.path):
                claim(lease, self.path, name)
                self._record_state(lease, name, "started")
            try:
                leftovers = Leftovers(self.path)
                yield
                leftovers.look_again()
            except BaseException as error:
                stopped = isinstance(error, KeyboardInterrupt | StopRequested)
                self._record_end(lease, name, *(("stopped", "") if stopped else ("failed", _sentence(error))))
                raise
            else:
                whole = (plan := self.planned()) is not None and set(plan["units"]) <= self.done()
                self._record_end(lease, name, "complete" if whole else "ended")
            finally:
                lease.hold([shard for shard in lease.shards if shard != name])

    def plan(
        self, units: Collection[str], images: int, checkpoints: Collection[str],
        superseded: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Record the units of the run. Those from before it grew stay, except the `superseded`."""
        with _turn(self.path):
            old = self.planned()
            past = old["units"] if old and old["run"] == self.manifest.id else []
            past = [unit for unit in past if unit not in superseded]
            plan = {
                "run": self.manifest.id, "images": images, "checkpoints": list(checkpoints),
                "units": list(dict.fromkeys([*past, *units])),
                "records": [name for name in ("images.json", "hashes.json") if (self.path / name).exists()],
            }  # fmt: skip
            if plan != old:
                write_record(self.path / "plan.json", plan)
        self.drop(superseded)

    def planned(self) -> dict[str, Any] | None:
        """The recorded plan (run, images, checkpoints, units); None if there is none."""
        return known_record(self.path / "plan.json")

    def images(self) -> list[tuple[str, str]]:
        """Id and content hash of every image when the run began, if they were recorded."""
        record = known_record(self.path / "images.json") or {}
        return [(name, mark) for name, mark in record.get("images", ())]

    def broken(self) -> set[str]:
        """Images that could not be read, including those that a stopped `--retry-broken` has not read yet."""
        rows = self.scores().sql("select distinct image from scores where metric = 'image'")
        return {row["image"] for row in rows} | set((self.planned() or {}).get("retry", ()))

    def shard_states(self) -> dict[str, dict[str, str]]:
        """State and reason that each shard recorded last."""
        try:
            return known_record(self.path / "status.json") or {}
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
        state, reason = self._state(plan is not None, done, units)
        finished = len(done & units)
        return Status(
            state, reason, planned, used, broken, missing, counts["unanswered"], len(units), finished
        )

    def _state(self, is_planned: bool, done: set[str], units: set[str]) -> tuple[State, str]:
        if not is_planned:
            return "unknown", NOT_RECORDED
        if units <= done:
            return "complete", ""
        if working := claims(self.path):
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
        self,
        unit: Unit,
        scores: Sequence[Score] = (),
        maps: Mapping[str, Maps] | None = None,
        pictures: Mapping[str, np.ndarray | Sheet] | None = None,
        seen: SeenImages | None = None,
    ) -> None:
        """Write a finished unit: maps, images and rows, then its seal. Safe in any thread or process.

        Args:
            maps: by the method as the rows name it.
            pictures: "H W 3" uint8 by image; those that are stored are left alone.
            seen: thumbnails and sizes of the images.
        """
        files: dict[Path, Content] = {}
        if maps:
            files = shard_files(self.path / "maps", unit, maps)
        pictures = pictures or {}
        for name in self.unstored(pictures):
            files |= self.pictures().files(name, pictures[name])
        if seen is not None:
            files[self.path / "scores" / f"{unit.hash}.npz"] = partial(_save_seen, seen=seen)
        part = self.path / "scores" / f"{unit.hash}.parquet"
        files[part] = partial(write_part, scores=scores, unit=unit.hash)
        with writing(self.path) as lease:
            self.ledger.forget(unit.hash)  # first: no seal may describe files that are being replaced
            digests = write_whole(files, lease.id)
            named = {path.relative_to(self.path).as_posix(): mark for path, mark in digests.items()}
            device = self.manifest.config.get("run", {}).get("device") or self.manifest.machine.get("device")
            # The seal is written last: a process that dies before leaves a unit that is absent, never a
            # partial one.
            self.ledger.write(unit, named, maker(device or "cpu"), lease.id)

    def seen(self, checkpoint: str) -> SeenImages | None:
        """Thumbnails and sizes of the images of a checkpoint; None if they were not stored."""
        known = valid_unicode(checkpoint)
        parts = []
        for unit, seal in self.units().items():
            name = f"scores/{unit}.npz"
            if name in seal.files and valid_unicode(seal.unit["checkpoint"]) == known:
                check_file(self.path / name, seal.files[name])
                with np.load(self.path / name, allow_pickle=False) as part:
                    parts.append((part["ids"].tolist(), part["thumbnails"], part["sides"]))
        if not parts:
            return None
        ids, thumbnails, sides = zip(*parts, strict=True)
        return SeenImages(
            [name for part in ids for name in part], np.concatenate(thumbnails), np.concatenate(sides)
        )

    def units(self) -> dict[str, Seal]:
        """Planned units with rows and a seal."""
        seals, plan = self.ledger.seals(), self.planned()
        parts = {path.stem for path in (self.path / "scores").glob("*.parquet")}
        allowed = parts & set(plan["units"]) if plan else parts
        return {unit: seals[unit] for unit in sorted(allowed & set(seals))}

    def done(self) -> set[str]:
        """Hashes of the finished units: those with a seal and all their files."""
        there = self.ledger.present()
        return {
            unit
            for unit, seal in self.units().items()
            if all(f in there for f in seal.files if not f.startswith("pictures/"))
        }

    def drop(self, units: Collection[str]) -> None:
        """Remove units from the run, so that they are computed again."""
        seals = self.ledger.seals()
        for unit in units:
            self.ledger.forget(unit)
            named = [self.path / file for file in seals[unit].files] if unit in seals else []
            unsealed = [self.path / f"scores/{unit}.parquet", self.path / f"maps/{unit}.json.gz"]
            shards = (self.path / "maps").glob(f"*/{escape(unit)}*.npy")
            remove(self.path, [*named, *unsealed, *shards])

    def retry(self, units: Collection[str], images: Collection[str]) -> None:
        """Remove units from the run and its plan; the contents of their images may differ from now on."""
        with _turn(self.path):
            plan = self.planned() or {}
            left = [unit for unit in plan.get("units", ()) if unit not in set(units)]
            write_record(self.path / "plan.json", plan | {"units": left, "retry": sorted(images)})
        self.drop(units)

    def makers(self) -> list[dict[str, Any]]:
        """Versions and devices that computed the units, with the number of units of each, most first."""
        counts = Counter(tuple(sorted(seal.made.items())) for seal in self.units().values())
        return [{**dict(key), "parts": n} for key, n in counts.most_common()]

    def unstored(self, names: Collection[str]) -> list[str]:
        """Images that are not stored, or were left unsealed by a process that ended."""
        stored = self.pictures()
        paths = {name: stored.path(name) for name in names}

        def sealed(path: Path | None) -> bool:
            return path is not None and f"pictures/{path.name}" in self.ledger.files

        if not all(sealed(path) for path in paths.values() if path):
            self.ledger.seals()
        return [name for name, path in paths.items() if not sealed(path)]

    def scores(self) -> Scores:
        return Scores(self.path / "scores", self.checked_parts, lambda: self.status().row())

    def maps(self) -> MapStore:
        return MapStore(self.path / "maps", self.units)

    def pictures(self) -> PictureStore:
        return PictureStore(self.path / "pictures", self._sealed_picture)

    def _sealed_picture(self, file: str) -> str:
        """SHA-256 of a stored image; "" if no seal names it."""
        if f"pictures/{file}" not in self.ledger.files:
            self.ledger.seals()
        return self.ledger.files.get(f"pictures/{file}", "")

    @property
    def page(self) -> Path:
        """Path of the report: for an audit beside its run folder, else inside the run folder."""
        beside = {name: self.path.parent / name for name in ("audit.json", "study.toml", "report.html")}
        there = {name for name, path in beside.items() if path.exists()}
        in_audit = self.path.name == "run" and ("audit.json" in there or len(there) == 2)
        return beside["report.html"] if in_audit else self.path / "report.html"

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.path)

    def checked_parts(self) -> list[Path]:
        """Files of rows, after comparing each with its seal."""
        parts = {self.path / "scores" / f"{unit}.parquet": seal for unit, seal in self.units().items()}
        for path, seal in parts.items():
            check_file(path, seal.files[f"scores/{path.name}"])
        return list(parts)

    def _record_state(self, lease: Lease, shard: str, state: str, reason: str = "") -> None:
        count = shard.rpartition("/")[2]
        states = {name: s for name, s in self.shard_states().items() if name.rpartition("/")[2] == count}
        states[shard] = {"state": state, "reason": reason}
        write_record(self.path / "status.json", states, lease.id)

    def _record_end(self, lease: Lease, shard: str, state: str, reason: str = "") -> None:
        if self.path.exists():
            with suppress(StoreError), _turn(self.path):  # on a full disk the state cannot be recorded
                self._record_state(lease, shard, state, reason)


def _save_seen(path: Path, seen: SeenImages) -> None:
    ids = np.array([valid_unicode(name) for name in seen.ids])
    with path.open("wb") as file:
        np.savez(file, ids=ids, thumbnails=seen.thumbnails, sides=seen.sides)


def run_in(path: str | Path) -> Path:
    """The folder itself, or the run folder inside a study's folder."""
    path = Path(path)
    inside = path / "run"
    whole = not (path / "run.json").exists() and (inside / "run.json").exists() and not inside.is_symlink()
    return inside if whole else path


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    with clear_failure(path):
        path.mkdir(parents=True, exist_ok=True)
    with turn(path):
        yield


def _differing(path: Path, pictures: Identity) -> list[str]:
    """Images whose hash is not that of images.json; none where it has none."""
    old, new = dict(_recorded(path)), dict(pictures)
    return [name for name in {**old, **new} if old.get(name) != new.get(name)] if old and new else []


def _recorded(path: Path) -> Identity:
    try:
        return RunFolder(path, Manifest({})).images()
    except StoreError:
        return []


def _goes_on(old: Identity, new: Identity) -> bool:
    """Whether the earlier images come first, unchanged."""
    return len(new) <= len(old) or list(new[: len(old)]) == list(old)


def _named(images: Sequence[str]) -> str:
    more = f" and {len(images) - 1} more" if len(images) > 1 else ""
    return f" ({images[0]}{more})" if images else ""


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, HeatproofError) else f"{type(error).__name__}: {text}"


class PictureStore:
    """The images of a run by their ids. sealed: returns the SHA-256 that a file must have."""

    def __init__(self, root: Path, sealed: Callable[[str], str]) -> None:
        self.root, self._sealed = root, sealed

    def path(self, name: str) -> Path | None:
        """The file of an image, if it is stored."""
        files = (self.root / f"{file_stem(name)}{suffix}" for suffix in (".png", ".jpg"))
        return next((file for file in files if file.exists()), None)

    def read(self, name: str) -> bytes | None:
        """PNG or JPEG bytes; None if not stored. Raises DamagedError if they differ from what was written."""
        path = self.path(name)
        if path is None:
            return None
        with plain(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if hashlib.sha256(content).hexdigest() != self._sealed(path.name):
            raise damaged(path, "its content is not what was written")
        why = "it is too large"
        try:
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as picture:
                if len(content) <= MOST_BYTES and math.prod(picture.size) <= MOST_PIXELS:
                    return content
        except NO_PICTURE:
            why = "its image size is implausible"
        raise StoreError(f"cannot show {path}: {why}; heatproof verify names all damage")

    def planes(self, name: str) -> tuple[int, ...] | None:
        """The planes of a volume that its image shows, from the file's comment; None without one."""
        content = self.read(name)
        if content is None:
            return None
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as picture:
            note = picture.info.get("comment", "")
        match = PLANES.fullmatch(str(note, "ascii", "replace") if isinstance(note, bytes) else str(note))
        return tuple(map(int, match[1].split())) if match else None

    def files(self, name: str, picture: np.ndarray | Sheet) -> dict[Path, Content]:
        """The file of one image, "H W 3" uint8, and its content."""
        content, suffix = encode(*picture) if isinstance(picture, Sheet) else encode(picture)
        return {self.root / f"{file_stem(name)}{suffix}": content}


def encode(pixels: np.ndarray, planes: Sequence[int] = ()) -> tuple[bytes, str]:
    """An image as a file, and its suffix; planes: of a volume, written to the file's comment."""
    picture, out = Image.fromarray(pixels), io.BytesIO()
    note = f"planes {' '.join(map(str, planes))}" if planes else ""
    if picture.getcolors(FEW_COLOURS) is not None:
        info = PngInfo()
        if note:
            info.add_text("comment", note)
        picture.save(out, "PNG", pnginfo=info)
        return out.getvalue(), ".png"
    picture.save(out, "JPEG", quality=QUALITY, subsampling=0, comment=note.encode())
    return out.getvalue(), ".jpg"


def file_stem(name: str) -> str:
    """A name for an image's file that is valid for any id."""
    return hashlib.sha256(valid_unicode(name).encode()).hexdigest()[:24]
