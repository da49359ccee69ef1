"""Units that a study computes by itself, planned, resumed, written and checked as in an ordinary run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from heatproof.run.engine import check_written, drop_incomplete_units
from heatproof.run.progress import Progress
from heatproof.store import RunFolder
from heatproof.types import Maps, Score, Unit

UnitRows = tuple[Unit, Sequence[Score], Mapping[str, Maps]]  # a unit, its rows and the maps to store


class UnitGroup(NamedTuple):
    """Units that share work; `compute` gets those that are missing, in this order."""

    units: Sequence[Unit]
    compute: Callable[[Sequence[Unit]], Iterable[UnitRows]]
    images: int = 0  # of each unit, for the progress bar
    title: str = ""  # reported when the group is finished


def compute_units(
    folder: RunFolder, groups: Sequence[UnitGroup], checkpoints: Sequence[str], progress: Progress
) -> None:
    """Record the plan, then compute and write every unit that is missing or incomplete."""
    units = [unit.hash for group in groups for unit in group.units]
    with folder.lock():
        folder.plan(units, 0, checkpoints)  # 0: the rows are not about every image of a set
        drop_incomplete_units(folder, set(units), progress.say)
        done = folder.done()
        missing = [[unit for unit in group.units if unit.hash not in done] for group in groups]
        images = sum(group.images * len(left) for group, left in zip(groups, missing, strict=True))
        progress.start(images, len(units), len(units) - sum(map(len, missing)))
        try:
            for group, left in zip(groups, missing, strict=True):
                for unit, rows, maps in group.compute(left) if left else ():
                    folder.write_unit(unit, rows, maps)
                    progress.advance(group.images, 1)
                if left and group.title:
                    progress.say(group.title)
        finally:
            progress.finish()
        check_written(folder, set(units))
