"""Members one by one, each in a file of its own, so that a calibration can be stopped and shared out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from heatproof.disk import write_whole
from heatproof.errors import HeatproofError
from heatproof.studies.calibrate.collect import METHODS, collect, prepare
from heatproof.studies.calibrate.population import GENERATED, Member, members


def measure_members(
    out: Path,
    data: Path | None,
    device: str,
    *,
    quick: bool = False,
    shard: tuple[int, int] = (0, 1),
    methods: Sequence[str] = METHODS,
    say: Callable[[str], object] = lambda text: None,
) -> list[Path]:
    """Measure every member that is not yet, in this shard; the files of all that are."""
    planned = [m for m in members(quick) if data is not None or m.data in GENERATED]
    for member in planned[shard[0] :: shard[1]]:
        path = out / "members" / f"{member.name}.json"
        if path.exists():
            continue
        say(f"{member.name}: {_measure(member, path, data, device, methods)}")
    return sorted((out / "members").glob("*.json"))


def _measure(member: Member, path: Path, data: Path | None, device: str, methods: Sequence[str]) -> str:
    start = time.perf_counter()
    try:
        pair, objects = prepare(member, data, device)
        trained = time.perf_counter() - start
        found = collect(member, pair, objects, methods).as_json() | {"epochs": pair.epochs}
    except HeatproofError as error:
        return f"left out: {error}"
    seconds = {"training": round(trained, 1), "tests": round(time.perf_counter() - start - trained, 1)}
    write_whole({path: json.dumps(found | {"seconds": seconds}, separators=(",", ":"))})
    return f"{pair.planting.sentence}; {seconds['training']:.0f} s training, {seconds['tests']:.0f} s tests"
