"""One run, one folder, which can be left at any moment and taken up again.

    run.json               the manifest
    plan.json              the units the run is made of; status.json, what each shard said last
    images.json            what each picture was made of (SHA-256); hashes.json, a memory that saves hashing
    scores/UNIT.parquet    rows of a finished unit; UNIT.npz, thumbnails and sizes of its images
    maps/..., pictures/... maps (see maps.py), and the pictures as the model saw them (see pictures.py)
    seals/UNIT.json        checksums of the unit's files, written last: then the unit is done (see ledger.py)
    locks/                 who is writing (see lease.py)

Every file is whole or absent, so a resume asks only which seals stand. Several processes may write
different units at the same time, and the same unit twice does no harm: the bytes are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from heatproof.disk import Content, clear_failure, valid_unicode, write_whole
from heatproof.errors import HeatproofError, StoreError
from heatproof.rows import Score, Unit
from heatproof.show import Sheet
from heatproof.store.lease import Lease, Leftovers, claim, turn, writing
from heatproof.store.ledger import Ledger, Seal, check_file, known_record, refuse_links, remove, write_record
from heatproof.store.manifest import GROWING, Change, Manifest, maker
from heatproof.store.maps import MapStore, shard_files
from heatproof.store.pictures import PictureStore
from heatproof.store.scores import Scores, write_part
from heatproof.store.status import Status, read_status

if TYPE_CHECKING:
    from heatproof.types import Maps

Identity = Sequence[tuple[str, str]]  # of pictures: id and hash of the content, in order


class StopRequested(Exception):
    """Somebody asked the run to stop; everything finished is on disk."""


class SeenImages(NamedTuple):
    """What is kept of images to count distinct ones."""

    ids: Sequence[str]
    thumbnails: np.ndarray  # "n SIDE SIDE c", uint8
    sides: np.ndarray  # "n 2", the shorter side in pixels of the image's file and of the network's input


class RunFolder:
    """A run on disk: its manifest, its finished units, their scores and maps."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def create(cls, path: str | Path, manifest: Manifest) -> RunFolder:
        """Start a new run; a folder that already holds one is refused."""
        path = Path(path)
        with _turn(path):
            if (path / "run.json").exists():
                raise StoreError(f"{path} already holds a run; resume it or choose another folder")
            manifest.write(path / "run.json")
        return cls(path, manifest)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run, to read or to write more units; nothing on disk is touched.

        The folder of a study serves too: its run lies inside, in run/.
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
        """Go on with a run, or start it where there is none.

        Refused, with what changed, unless the manifest is the same or only adds (see `compare_configs`);
        additions are written to run.json, which keeps the earlier manifest too. `pictures` are written to
        images.json; those of the images in `forgiven` may differ from what they were. `filled` adds the
        defaults of settings that are younger than the run.
        """
        path = Path(path)
        refuse_links(path)
        with _turn(path):
            if not (path / "run.json").exists():
                return cls._keep(path, manifest, pictures)
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
            kept = manifest.grown_from(old) if changes else old.completed_by(manifest)
            return cls._keep(path, kept, pictures)

    @classmethod
    def _keep(cls, path: Path, manifest: Manifest, pictures: Identity) -> RunFolder:
        if not (path / "run.json").exists() or Manifest.read(path / "run.json") != manifest:
            manifest.write(path / "run.json")
        if pictures and (_differing(path, pictures) or not (path / "images.json").exists()):
            write_record(path / "images.json", {"images": list(map(list, pictures))}, indent=None)
        return cls(path, manifest)

    @contextmanager
    def lock(self, name: str = "0/1") -> Iterator[None]:
        """Hold one shard of the run; a second process on it, or on one that overlaps, is refused.

        What killed processes left half-written is cleaned up, and how the work ended is recorded.
        """
        with writing(self.path) as lease:
            with _turn(self.path):
                claim(lease, self.path, name)
                self._say(lease, name, "started")
            try:
                leftovers = Leftovers(self.path)
                yield
                leftovers.look_again()
            except BaseException as error:
                asked = isinstance(error, KeyboardInterrupt | StopRequested)
                state, why = ("stopped", "") if asked else ("failed", _sentence(error))
                self._last_words(lease, name, state, why)
                raise
            else:
                whole = (plan := self.planned()) is not None and set(plan["units"]) <= self.done()
                self._last_words(lease, name, "complete" if whole else "ended")
            finally:
                lease.hold([shard for shard in lease.shards if shard != name])

    def plan(
        self, units: Collection[str], images: int, checkpoints: Collection[str],
        outgrown: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Record what the run is made of. What it was made of before it grew stays, less the `outgrown`."""
        with _turn(self.path):
            old = self.planned()
            past = old["units"] if old and old["run"] == self.manifest.id else []
            past = [unit for unit in past if unit not in outgrown]
            plan = {
                "run": self.manifest.id, "images": images, "checkpoints": list(checkpoints),
                "units": list(dict.fromkeys([*past, *units])),
                "records": [name for name in ("images.json", "hashes.json") if (self.path / name).exists()],
            }  # fmt: skip
            if plan != old:
                write_record(self.path / "plan.json", plan)
        self.drop(outgrown)

    def planned(self) -> dict[str, Any] | None:
        """Keys run, images, checkpoints and units; None where nobody recorded it."""
        return known_record(self.path / "plan.json")

    def images(self) -> list[tuple[str, str]]:
        """Id and content hash of every picture when the run began, where that was recorded."""
        found = known_record(self.path / "images.json") or {}
        return [(name, mark) for name, mark in found.get("images", ())]

    def broken(self) -> set[str]:
        """Images that could not be read, also those that a stopped `--retry-broken` has still to read."""
        rows = self.scores().sql("select distinct image from scores where metric = 'image'")
        return {row["image"] for row in rows} | set((self.planned() or {}).get("retry", ()))

    def said(self) -> dict[str, dict[str, str]]:
        """State and reason that each shard recorded last."""
        try:
            return known_record(self.path / "status.json") or {}
        except StoreError:  # only a hint: what is there decides
            return {}

    def status(self) -> Status:
        """Whether the run is complete, and how many of its images could be used."""
        return read_status(self)

    def write_unit(
        self,
        unit: Unit,
        scores: Sequence[Score] = (),
        maps: Mapping[str, Maps] | None = None,
        pictures: Mapping[str, np.ndarray | Sheet] | None = None,
        seen: SeenImages | None = None,
    ) -> None:
        """Write a finished unit: its maps, pictures and rows (maybe none), then its seal: it is done.

        `maps` is keyed by the method as the rows name it, `pictures` ("H W 3" uint8) by the image; a picture
        that is there is left alone. May be called from any thread or process.
        """
        files: dict[Path, Content] = {}
        if maps:
            files = shard_files(self.path / "maps", unit, maps)
        for name in self.unstored(pictures or ()):
            files |= self.pictures().files(name, pictures[name])  # type: ignore[index]  # unstored() names what was given
        if seen is not None:
            files[self.path / "scores" / f"{unit.hash}.npz"] = partial(_save_seen, seen=seen)
        part = self.path / "scores" / f"{unit.hash}.parquet"
        files[part] = partial(write_part, scores=scores, unit=unit.hash)
        with writing(self.path) as lease:
            self.ledger.forget(unit.hash)  # a seal never stands beside files it does not describe
            digests = write_whole(files, lease.id)
            named = {path.relative_to(self.path).as_posix(): mark for path, mark in digests.items()}
            device = self.manifest.config.get("run", {}).get("device") or self.manifest.machine.get("device")
            self.ledger.write(unit, named, maker(device or "cpu"), lease.id)

    def seen(self, checkpoint: str) -> SeenImages | None:
        """Thumbnails and sizes of the images of a checkpoint; None where they were not kept."""
        known = valid_unicode(checkpoint)
        parts = []
        for unit, seal in self.units().items():
            name = f"scores/{unit}.npz"
            if seal and name in seal.files and valid_unicode(seal.unit["checkpoint"]) == known:
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
        """What may be read as rows: units with a part and a seal, that the plan names."""
        seals, plan = self.ledger.seals(), self.planned()
        parts = {path.stem for path in (self.path / "scores").glob("*.parquet")}
        allowed = parts & set(plan["units"]) if plan else parts
        return {unit: seals[unit] for unit in sorted(allowed & set(seals))}

    def done(self) -> set[str]:
        """Hashes of the finished units: those whose rows and maps are all there."""
        there = self.ledger.present()
        return {
            unit
            for unit, seal in self.units().items()
            if all(f in there for f in seal.files if not f.startswith("pictures/"))
        }

    def drop(self, units: Collection[str]) -> None:
        """Take units out of the run, so that they are made again."""
        seals = self.ledger.seals()
        for unit in units:
            self.ledger.forget(unit)
            named = [self.path / file for file in seals[unit].files] if unit in seals else []
            unsealed = [self.path / f"scores/{unit}.parquet", self.path / f"maps/{unit}.json.gz"]
            shards = (self.path / "maps").glob(f"*/{escape(unit)}*.npy")
            remove(self.path, [*named, *unsealed, *shards])

    def retry(self, units: Collection[str], images: Collection[str]) -> None:
        """Take units out of the run and its plan; their images may have other contents from now on."""
        with _turn(self.path):
            plan = self.planned() or {}
            left = [unit for unit in plan.get("units", ()) if unit not in set(units)]
            write_record(self.path / "plan.json", plan | {"units": left, "retry": sorted(images)})
        self.drop(units)

    def makers(self) -> list[dict[str, Any]]:
        """Versions and devices that made the parts, with the number of parts of each, most first."""
        counts: dict[tuple[tuple[str, str], ...], int] = {}
        for seal in self.units().values():
            key = tuple(sorted(seal.made.items())) if seal else ()
            counts[key] = counts.get(key, 0) + 1
        return [{**dict(key), "parts": n} for key, n in sorted(counts.items(), key=lambda pair: -pair[1])]

    def unstored(self, names: Collection[str]) -> list[str]:
        """Images whose picture is not kept, or was left by a process that did not come to seal it."""
        kept = self.pictures()
        paths = {name: kept.path(name) for name in names}

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
        """Where the report is written: of an audit, beside its run folder, else inside the run folder."""
        beside = {name: self.path.parent / name for name in ("audit.json", "study.toml", "report.html")}
        there = {name for name, path in beside.items() if path.exists()}
        in_audit = self.path.name == "run" and ("audit.json" in there or len(there) == 2)
        return beside["report.html"] if in_audit else self.path / "report.html"

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.path)

    def checked_parts(self) -> list[Path]:
        """The parts that hold rows, each compared with its seal."""
        parts = {self.path / "scores" / f"{unit}.parquet": seal for unit, seal in self.units().items()}
        for path, seal in parts.items():
            check_file(path, seal.files[f"scores/{path.name}"] if seal else None)
        return list(parts)

    def _say(self, lease: Lease, shard: str, state: str, reason: str = "") -> None:
        count = shard.rpartition("/")[2]
        kept = {name: last for name, last in self.said().items() if name.rpartition("/")[2] == count}
        said = {**kept, shard: {"state": state, "reason": reason}}
        write_record(self.path / "status.json", said, lease.id)

    def _last_words(self, lease: Lease, shard: str, state: str, reason: str = "") -> None:
        if not self.path.exists():
            return
        with suppress(StoreError), _turn(self.path):  # on a full disk nothing more can be said
            self._say(lease, shard, state, reason)


def _save_seen(path: Path, seen: SeenImages) -> None:
    ids = np.array([valid_unicode(name) for name in seen.ids])
    with path.open("wb") as file:
        np.savez(file, ids=ids, thumbnails=seen.thumbnails, sides=seen.sides)


def run_in(path: str | Path) -> Path:
    """The folder itself, or that of the run inside a study's folder."""
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
    """Images that are not what images.json says; none where it says nothing, or of other images."""
    old, new = dict(_recorded(path)), dict(pictures)
    return [name for name in {**old, **new} if old.get(name) != new.get(name)] if old and new else []


def _recorded(path: Path) -> Identity:
    try:
        return RunFolder(path, Manifest({})).images()
    except StoreError:
        return []


def _goes_on(old: Identity, new: Identity) -> bool:
    """Whether more pictures begin with those that were there."""
    return len(new) <= len(old) or list(new[: len(old)]) == list(old)


def _named(images: Sequence[str]) -> str:
    more = f" and {len(images) - 1} more" if len(images) > 1 else ""
    return f" ({images[0]}{more})" if images else ""


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, HeatproofError) else f"{type(error).__name__}: {text}"
