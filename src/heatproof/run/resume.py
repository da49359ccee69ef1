"""What a run does about an earlier one in its folder: try broken pictures again, make lost files again, say
that other versions made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heatproof.disk import valid_unicode
from heatproof.errors import ModelError
from heatproof.models.queue import is_out_of_memory
from heatproof.run.plan import make_plan
from heatproof.store import RunFolder
from heatproof.store.manifest import maker

Say = Callable[[str], object]


def broken_images(folder: RunFolder) -> list[dict[str, Any]]:
    """Image and reason of every picture that could not be used."""
    return folder.scores().sql(
        "select distinct image, reason from scores where metric = 'image' order by all"
    )


def forget_broken(path: Path, pictures: Sequence[tuple[str, str]]) -> list[str]:
    """Drop the units with pictures that could not be used, and all that is about whole checkpoints."""
    if not (path / "run.json").exists():
        return []
    folder = RunFolder.open(path)
    again = {row["image"] for row in broken_images(folder)} | set((folder.planned() or {}).get("retry", ()))
    at = [i for i, (name, _) in enumerate(pictures) if valid_unicode(name) in again]
    plan = make_plan(folder.manifest, len(pictures), folder.images())
    if at:
        with folder.lock():
            units = [u.hash for u in plan.units if any(u.images[0] <= i < u.images[1] for i in at)]
            folder.retry(units, again)
    return [pictures[i][0] for i in at]


def mend(folder: RunFolder, own: set[str], say: Say) -> None:
    """Units that are not whole are made again; damaged parts are refused before work starts."""
    if lost := own & (set(folder.ledger.all()) - folder.done()):
        say(f"{len(lost)} units are not whole and are made again")
        folder.drop(lost)
    folder.checked_parts()


def say_makers(folder: RunFolder, device: str, say: Say) -> None:
    now = maker(device)
    for made in folder.makers():
        if other := [
            f"{key} {made[key]} (now {now[key]})" for key in now if made.get(key, now[key]) != now[key]
        ]:
            changed = f"{made['parts']} units were made with {', '.join(other)}"
            say(f"{changed}; numbers may differ in their last digits")


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
