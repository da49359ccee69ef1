"""Members one after the other, in several processes that share a device; one JSON file per network.

A finished network is never measured again. Windows of two sizes by the maps of two methods, and transfers of
statistics with and without the object, are stored beside each other: the half of the networks that chooses
effect sizes chooses among them too. The files are joined into one compressed file after every minute and at
the end, so that a command that is stopped loses little.
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

import msgspec
import torch
from torch import Tensor

from heatproof.disk import write_whole
from heatproof.errors import InputError
from heatproof.metrics.interventions import Interventions
from heatproof.metrics.properties import STATISTICS, Transfer
from research.evidence.plan import Member
from research.evidence.train import (
    NEITHER,
    Explained,
    Trained,
    described,
    explained_images,
    first_model,
    open_member,
    train,
)

METHODS = ("gradcam", "ms-gradcam++")
SIDES = (1 / 5, 2 / 7)  # of the windows, as shares of the image's side
WHOLE = "whole image"  # statistics that the object takes over too
JOIN_EVERY = 60  # seconds


@dataclass(frozen=True)
class Measuring:
    """Where data and results are, and how long networks may be started."""

    out: Path
    data: Path | None = None
    device: str = "cpu"
    until: float = float("inf")  # time.time(): no network is started later
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
    first = first_model(member, wanted.data, wanted.device)
    opened, results = time.perf_counter() - start, []
    for network in "AB":
        path = wanted.file(member, network)
        if path.exists() or time.time() > wanted.until:
            continue
        start = time.perf_counter()
        trained = train(member, first, source, cheating=network == "A")
        content = network_record(member, network, trained, explained, wanted.evidence)
        seconds = {"opening": opened, "training": trained.seconds, "all": time.perf_counter() - start}
        content["seconds"] = {name: round(value, 1) for name, value in seconds.items()}
        content["device"] = wanted.device
        write_whole({path: json.dumps(content, separators=(",", ":"))})
        facts = trained.facts
        results.append(
            f"{network} {trained.truth} (accuracy {facts.accuracy:.2f}, "
            f"moved {facts.correct_after_moving:.2f}, changed {facts.changed_by_adding:.2f}, "
            f"{trained.steps} steps"
            f"{', carriers' if trained.carriers_from else ''}, "
            f"{seconds['training']:.0f} s training, {seconds['all'] - seconds['training']:.0f} s evidence)"
        )
    return "; ".join(results)


def network_record(
    member: Member, network: str, trained: Trained, explained: Explained, with_evidence: bool = True
) -> dict[str, Any]:
    """What is stored about one network."""
    record: dict[str, Any] = {
        "name": f"{member.name}-{network}", "member": asdict(member), "network": network,
        "truth": trained.truth, "facts": described(trained), "images": explained.facts,
        "evidence": None, "other_methods": {},
    }  # fmt: skip
    if trained.truth == NEITHER or not with_evidence:
        return record
    first, *others = METHODS
    model = trained.model
    images = model.preprocess.normalise(explained.images)
    tests = Interventions(model, images, explained.labels, methods=[first], regions=explained.regions)
    whole = {f"{name}, {WHOLE}": tests.transfers[name] for name in STATISTICS}
    off = {name: off_object(tests.transfers[name]) for name in STATISTICS}
    tests.transfers |= off | whole
    numbers = tuple(map(str, range(len(images))))
    record["evidence"] = tests.record(SIDES, numbers, (), None).as_json()
    for method in others:
        again = Interventions(model, images, explained.labels, methods=[method], regions=explained.regions)
        windows, anywhere = again.transplants(SIDES)
        results: dict[str, Any] = {"off_object": windows, "anywhere": anywhere, "exchange": again.exchange()}
        record["other_methods"][method] = msgspec.to_builtins(results)
    return record


def off_object(transfer: Transfer) -> Transfer:
    """The transfer without effect on the object."""

    def changed(images: Tensor, others: Tensor, weights: Tensor, other_weights: Tensor) -> Tensor:
        return torch.where(weights[:, None] > 0, transfer(images, others, weights, other_weights), images)

    return changed


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
