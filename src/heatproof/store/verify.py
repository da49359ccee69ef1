"""Verify a run folder: files against seals, seals against their own checksums.

A finding is a file that is damaged, missing or foreign (no seal or plan names it). Repair drops the units
that findings belong to, so that the run computes them again, and sets aside what is foreign.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from heatproof.disk import clear_failure, digest
from heatproof.errors import StoreError
from heatproof.store.folder import RunFolder
from heatproof.store.lease import lease_of
from heatproof.store.ledger import (
    ASIDE,
    FOLDERS,
    RECORDS,
    Ledger,
    Seal,
    is_plain,
    known_record,
    linked_folders,
)
from heatproof.store.manifest import LaterFormatError, Manifest


class Finding(NamedTuple):
    """One file that differs from what was written."""

    path: str  # relative to the folder
    problem: str
    unit: str = ""  # the unit it belongs to


def inspect(path: Path) -> list[Finding]:
    """All findings of a run folder, which is read completely; raises for a later format."""
    if not (path / "run.json").exists() and not (path / "seals").is_dir():
        RunFolder.open(path)  # raises if it is not a run folder
    findings = list(_records(path))
    broken = {finding.path for finding in findings}
    plan = None if "plan.json" in broken else RunFolder(path, Manifest({})).planned()
    seals = Ledger(path).all()
    if plan is not None:
        findings += _unplanned(path, plan, seals)
        seals = {unit: seal for unit, seal in seals.items() if unit in plan["units"]}
    findings += [
        Finding(f"seals/{unit}.json", "damaged", unit) for unit, seal in seals.items() if seal is None
    ]
    whole = {unit: seal for unit, seal in seals.items() if seal}
    expected = {file: (mark, unit) for unit, seal in whole.items() for file, mark in seal.files.items()}
    there = set(_files(path))
    for name in sorted(there | set(expected)):
        mark, unit = expected.get(name, ("", _unit_of(name)))
        if name not in there:
            findings.append(Finding(name, "missing", unit))
        elif not is_plain(path / name):
            findings.append(Finding(name, "foreign: a link, not a file"))
        elif mark and digest(path / name) != mark:
            findings.append(Finding(name, "damaged", unit))
        elif not (mark or (name.startswith("seals/") and name.endswith(".json"))):
            findings += _unsealed(name, unit, seals, plan)
    return findings


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
    for name in RECORDS:
        try:
            record = known_record(path / name)
            if name == "plan.json" and record:
                by_0_2 = "records" not in record
                required.update(RECORDS.keys() & record.get("records", ()))
        except StoreError:
            if not (name == "verdict.json" and by_0_2):
                yield Finding(name, "damaged")
    yield from (Finding(name, "missing") for name in sorted(required) if not (path / name).exists())


def _unsealed(
    name: str, unit: str, seals: dict[str, Seal | None], plan: dict[str, Any] | None
) -> Iterator[Finding]:
    """A file that no seal names, unless its unit is not finished."""
    left = set(plan["units"]) - set(seals) if plan else set()
    damaged_seal = unit in seals and seals[unit] is None
    if not (damaged_seal or unit in left or (left and name.startswith("pictures/"))):
        yield Finding(name, "foreign: it belongs to no unit of this run")


def _unplanned(path: Path, plan: dict[str, Any], seals: dict[str, Seal | None]) -> Iterator[Finding]:
    for unit in sorted(set(seals) - set(plan["units"])):
        yield Finding(f"seals/{unit}.json", "foreign: this unit is not in the plan")
    states = RunFolder(path, Manifest({})).shard_states().values()
    if any(last.get("state") == "complete" for last in states):
        for unit in sorted(set(plan["units"]) - set(seals)):
            yield Finding(f"seals/{unit}.json", "missing", unit)


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
            source, target = path / finding.path, path / ASIDE / finding.path
            if not finding.unit and finding.path not in links and os.path.lexists(source):
                with clear_failure(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(source, target)
    return sorted(units)


def _files(root: Path) -> Iterator[str]:
    linked = linked_folders(root)
    yield from linked
    for folder in FOLDERS:
        if folder in linked:
            continue
        for parent, below, names in os.walk(root / folder):
            below_links = [name for name in below if Path(parent, name).is_symlink()]
            for name in (*names, *below_links):
                if lease_of(name) is None:  # its lease shows whether it is still being written
                    yield Path(parent, name).relative_to(root).as_posix()


def _unit_of(name: str) -> str:
    return "" if name.startswith("pictures/") else name.rpartition("/")[2].partition(".")[0]
