"""Members one after the other, in several processes that share a device; one JSON file per network.

A finished network is never measured again. The files are joined into one compressed file after every minute
and at the end, so that a command that is stopped loses little.
"""

from __future__ import annotations

import gzip
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from heatproof.disk import write_whole
from heatproof.errors import InputError
from heatproof.metrics.interventions import evidence
from heatproof.models.model import Model
from research.evidence.plan import Member
from research.evidence.train import (
    NEITHER,
    Explained,
    Trained,
    described,
    explained_images,
    open_member,
    train_pair,
)

METHODS = ("gradcam",)
SIDES = (1 / 5,)  # of the windows, as shares of the image's side
JOIN_EVERY = 60  # seconds


@dataclass(frozen=True)
class Measuring:
    """Where data and results are, and how long members may be started."""

    out: Path
    data: Path | None = None
    device: str = "cpu"
    until: float = float("inf")  # time.time(): no member is started later
    evidence: bool = True  # False: train and test only

    def file(self, member: Member, network: str) -> Path:
        return self.out / "networks" / f"{member.name}-{network}.json"

    def finished(self, member: Member) -> bool:
        return all(self.file(member, network).exists() for network in "AB")


def measure_members(
    wanted: Measuring,
    members: Sequence[Member],
    processes: int = 1,
    joined: Path | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """Measure the members that are missing, and join all results."""
    if processes < 1:
        raise InputError(f"at least one process measures; got {processes}")
    missing = [member for member in members if not wanted.finished(member)]
    say(f"{len(missing)} of {len(members)} pairs are missing")
    joined_at = time.time()
    if processes == 1:
        for member in missing:
            say(measure(member, wanted))
    else:
        threads = max(1, (os.cpu_count() or 1) // processes)
        with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
            for ready in as_completed([pool.submit(measure, member, wanted) for member in missing]):
                say(ready.result())
                if joined and time.time() - joined_at > JOIN_EVERY:
                    join(wanted.out, joined)
                    joined_at = time.time()
    if joined:
        say(f"{join(wanted.out, joined)} networks in {joined}, {joined.stat().st_size / 2**20:.1f} MiB")


def measure(member: Member, wanted: Measuring) -> str:
    """Train and measure both networks of a member; the result in a line."""
    if time.time() > wanted.until:
        return f"{member.name}: not started, the time is over"
    start = time.perf_counter()
    try:
        return f"{member.name}: {_measure(member, wanted)}; {time.perf_counter() - start:.0f} s"
    except Exception as error:  # the other members must go on
        text = traceback.format_exc()
        write_whole({wanted.out / "errors" / f"{member.name}.txt": text})
        return f"{member.name}: failed: {type(error).__name__}: {error}"


def _measure(member: Member, wanted: Measuring) -> str:
    start = time.perf_counter()
    source = open_member(member, wanted.data, wanted.device)
    explained = explained_images(member, source)
    opened = time.perf_counter() - start
    pair = train_pair(member, source, wanted.data, wanted.device)
    seconds = {"opening": opened, "training": time.perf_counter() - start - opened}
    results = []
    for network, trained in zip("AB", pair, strict=True):
        content = network_record(member, network, trained, explained, wanted.evidence)
        content["seconds"] |= {name: round(value, 1) for name, value in seconds.items()}
        content["device"] = wanted.device
        path = wanted.file(member, network)
        write_whole({path: json.dumps(content, separators=(",", ":"))})
        facts = trained.facts
        results.append(
            f"{network} {trained.truth} (accuracy {facts.accuracy:.2f}, "
            f"moved {facts.correct_after_moving:.2f}, changed {facts.changed_by_adding:.2f}, "
            f"{trained.steps} steps"
            f"{', carriers' if trained.carriers_from else ''}, "
            f"{content['seconds'].get('evidence', 0):.0f} s evidence)"
        )
    return "; ".join(results)


def network_record(
    member: Member, network: str, trained: Trained, explained: Explained, with_evidence: bool = True
) -> dict[str, Any]:
    """What is stored about one network."""
    record: dict[str, Any] = {
        "name": f"{member.name}-{network}", "member": asdict(member), "network": network,
        "truth": trained.truth, "facts": described(trained), "images": explained.facts, "seconds": {},
        "with_regions": None, "without_regions": None,
    }  # fmt: skip
    if trained.truth != NEITHER and with_evidence:
        start = time.perf_counter()
        record["with_regions"] = _evidence(trained.model, explained, True)
        record["without_regions"] = _evidence(trained.model, explained, False)
        record["seconds"]["evidence"] = round(time.perf_counter() - start, 1)
    return record


def _evidence(model: Model, explained: Explained, regions: bool) -> dict[str, Any]:
    images = model.preprocess.normalise(explained.images)
    result = evidence(
        explained.labels, model=model, images=images, regions=explained.regions if regions else None,
        methods=METHODS, sides=SIDES,
    )  # fmt: skip
    content: dict[str, Any] = result.as_json()
    for item in content.get("items", ()):  # images would make the files large
        for images_of in ("crops", "examples", "control"):
            item.pop(images_of, None)
    return content


def join(out: Path, joined: Path) -> int:
    """Write all results of a folder into one compressed file; returns the number of networks."""
    files = sorted((out / "networks").glob("*.json"))
    content = "[" + ",\n".join(path.read_text("utf-8") for path in files) + "]"
    write_whole({joined: gzip.compress(content.encode(), 6)})
    return len(files)


def read_joined(path: Path) -> list[dict[str, Any]]:
    """The networks of a joined file, compressed or not."""
    content = path.read_bytes()
    records: list[dict[str, Any]] = json.loads(
        gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    )
    return records


def unpack(joined: Path, out: Path) -> int:
    """Write the networks of an earlier call into a folder, so that they are not measured again."""
    records = read_joined(joined)
    for record in records:
        path = out / "networks" / f"{record['name']}.json"
        if not path.exists():
            write_whole({path: json.dumps(record, separators=(",", ":"))})
    return len(records)
