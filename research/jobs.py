"""Units of work in several processes that share a device; one JSON file per unit, all joined into one file.

A unit has a `name`; `measure(unit, place)` returns its result, which JSON can hold. Both are pickled, so that
`measure` is a function of a module (or functools.partial of one). A unit with a result is not measured again.
A unit that fails is written to errors/NAME.txt, and the others go on.
"""

from __future__ import annotations

import functools
import gzip
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
import torch

from heatproof.cli._console import PATH, say
from heatproof.disk import write_whole
from heatproof.errors import InputError
from heatproof.models.load import best_device

JOIN_EVERY = 45  # seconds
POOLS = 3  # so often processes are started, if one of them ends unexpectedly (e.g. out of memory)


class Unit(Protocol):
    @property
    def name(self) -> str: ...


SomeUnit = TypeVar("SomeUnit", bound=Unit)
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Folders of data and results, the device, and the time after which no unit is started."""

    data: Path | None
    out: Path
    device: str = "cpu"
    until: float = math.inf  # time.time()
    joined: Path | None = None  # file for all results together; OUT/results.json.gz by default

    @property
    def real_data(self) -> Path:
        """The folder of data; raises InputError if there is none."""
        if self.data is None:
            raise InputError("real images or weights are needed; name their folder with --data")
        return self.data

    @property
    def joined_file(self) -> Path:
        return self.joined or self.out / "results.json.gz"

    def file(self, name: str) -> Path:
        """The file of a unit's result."""
        return self.out / "results" / f"{name}.json"

    def error(self, name: str) -> Path:
        return self.out / "errors" / f"{name}.txt"


def run_all(
    units: Sequence[SomeUnit],
    measure: Callable[[SomeUnit, Place], Result],
    place: Place,
    processes: int = 1,
    say: Callable[[str], object] = say,
    describe: Callable[[Result], str] | None = None,
    threads: int = 1,
) -> None:
    """Measure the units that have no result, in their order, and join all results.

    describe: a few words about a result, for the line that is printed (pickled as measure is).
    threads: CPU threads of each process if there are several.
    """
    if processes < 1:
        raise InputError(f"at least one process measures; got {processes}")
    missing = [unit for unit in units if not place.file(unit.name).exists()]
    say(f"{len(missing)} of {len(units)} results are missing")
    joined_at, pools = time.time(), POOLS

    def report(line: str) -> None:
        nonlocal joined_at
        say(line)
        if time.time() - joined_at > JOIN_EVERY:
            join(place.out, place.joined_file)
            joined_at = time.time()

    if processes == 1:
        for unit in missing:
            report(run_one(unit, measure, place, describe))
        missing = []
    while missing and pools:
        pools -= 1
        with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
            started = {pool.submit(run_one, unit, measure, place, describe): unit for unit in missing}
            missing = []
            for ready in as_completed(started):
                try:
                    report(ready.result())
                except BrokenProcessPool:
                    missing.append(started[ready])
        missing = [unit for unit in units if unit in missing]  # in their order
        if missing:
            say(f"a process ended unexpectedly; {len(missing)} results are missing")
    size = f"{join(place.out, place.joined_file)} results in {place.joined_file}"
    say(f"{size}, {place.joined_file.stat().st_size / 2**20:.1f} MiB")


def run_one(
    unit: SomeUnit,
    measure: Callable[[SomeUnit, Place], Result],
    place: Place,
    describe: Callable[[Result], str] | None = None,
) -> str:
    """Measure a unit and write its result; a line about it."""
    if time.time() > place.until:
        return f"{unit.name}: not started, the time is over"
    start = time.perf_counter()
    try:
        result = {"name": unit.name, **measure(unit, place)}
        words = describe(result) if describe else ""
    except Exception as error:  # the other units go on
        write_whole({place.error(unit.name): traceback.format_exc()})
        return f"{unit.name}: failed: {type(error).__name__}: {error}"
    write_whole({place.file(unit.name): _as_text(result)})
    return f"{unit.name}: {time.perf_counter() - start:.1f} s; {words}".rstrip("; ")


def _as_text(result: Result) -> str:
    return json.dumps(result, separators=(",", ":"))


def join(out: Path, joined: Path) -> int:
    """Write all results of a folder into one compressed file; returns their number."""
    files = sorted((out / "results").glob("*.json"))
    content = "[" + ",\n".join(path.read_text("utf-8") for path in files) + "]"
    write_whole({joined: gzip.compress(content.encode(), 6)})
    return len(files)


def read_results(*joined: Path) -> list[dict[str, Any]]:
    """The results of joined files, compressed or not; of a unit in several, the last counts."""
    by_name: dict[str, dict[str, Any]] = {}
    for content in map(Path.read_bytes, joined):
        text = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
        by_name |= {result["name"]: result for result in json.loads(text)}
    return list(by_name.values())


def unpack(joined: Path, place: Place) -> int:
    """Write the results of an earlier call into a folder, so that they are not measured again."""
    results = read_results(joined)
    new = {place.file(result["name"]): _as_text(result) for result in results}
    write_whole({path: text for path, text in new.items() if not path.exists()})
    return len(results)


def prepare_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of a command that packs files for another machine."""
    words = "A package for the other machine; repeatable."
    for option in (
        click.option("--wheel", "wheels", type=PATH, multiple=True, help=words),
        click.option("--out", type=PATH, required=True, help="A new folder."),
        click.option("--data", type=PATH, required=True, help="Folder of real images and weights."),
    ):
        command = option(command)
    return command


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of a command that calls run_all: it receives `place` and `processes` instead of them."""

    @click.option("--data", type=PATH, help="Folder of real images and weights.")
    @click.option("--out", type=PATH, required=True, help="Folder for the results, one file per unit.")
    @click.option(
        "--joined", type=PATH, help="File for all results together; OUT/results.json.gz by default."
    )
    @click.option("--earlier", type=PATH, multiple=True, help="Joined results of earlier calls; repeatable.")
    @click.option("--device", help="cuda, cpu, ...; the fastest available by default.")
    @click.option("--processes", type=click.IntRange(1), default=1, show_default=True)
    @click.option("--minutes", type=float, help="No unit is started later.")
    @functools.wraps(command)
    def with_place(
        data: Path | None, out: Path, joined: Path | None, earlier: tuple[Path, ...], device: str | None,
        processes: int, minutes: float | None, **others: Any,
    ) -> None:  # fmt: skip
        until = math.inf if minutes is None else time.time() + 60 * minutes
        place = Place(data, out, best_device(device), until, joined)
        for path in earlier:
            say(f"{unpack(path, place)} results of {path}")
        command(place=place, processes=processes, **others)

    return with_place
