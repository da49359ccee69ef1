"""Whether a run is complete: derived from what is in its folder, never from what was promised.

started     somebody is at work
stopped     somebody asked it to, or other shards are still to come; the same command goes on
failed      an error ended it, or its process ended without a word
complete    every planned unit is there
unknown     plan.json is missing; never treated as complete
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from heatproof.store.lease import claims

if TYPE_CHECKING:
    from heatproof.store.folder import RunFolder

State = Literal["started", "stopped", "failed", "complete", "unknown"]
NO_WORD = "its process ended without a word, as when it is killed or the machine stops"
NOT_RECORDED = "plan.json, the list of units, is missing: run the study again"
# An image counts as used where the network answered it at every checkpoint that is planned.
IMAGES = """
    select count(*) filter (not broken and answers >= ?) as used, count(*) filter (broken) as broken,
           count(*) filter (unanswered) as unanswered
    from (select image, bool_or(metric = 'image') as broken,
                 bool_or(metric = 'predicted' and isnan(value)) as unanswered,
                 count(distinct checkpoint) filter (metric = 'predicted') as answers
          from scores where metric in ('image', 'predicted') group by image)
"""


@dataclass(frozen=True)
class Status:
    """Where a run stands."""

    state: State
    reason: str  # why it is not complete
    planned: int  # images
    used: int
    broken: int  # could not be read
    missing: int  # have no row yet, at one checkpoint or more
    unanswered: int  # of those used: the network's output was not a number
    units: int
    done: int

    @property
    def complete(self) -> bool:
        return self.state == "complete"

    @property
    def usable(self) -> float:
        """The share of planned images that the network answered."""
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


def read_status(folder: RunFolder) -> Status:
    plan = folder.planned()
    done = folder.done()
    checkpoints = len(plan["checkpoints"]) if plan else len(folder.manifest.models)
    (counts,) = folder.scores().sql(IMAGES, [max(1, checkpoints)])
    units = set(plan["units"]) if plan else done
    state, reason = _state(folder, plan, done, units)
    planned = plan["images"] if plan else counts["used"] + counts["broken"]
    missing = max(0, planned - counts["used"] - counts["broken"])
    return Status(
        state, reason, planned, counts["used"], counts["broken"], missing, counts["unanswered"],
        len(units), len(done & units),
    )  # fmt: skip


def _state(
    folder: RunFolder, plan: Mapping[str, Any] | None, done: set[str], units: set[str]
) -> tuple[State, str]:
    if plan is None:
        return "unknown", NOT_RECORDED
    if units <= done:
        return "complete", ""
    if working := claims(folder.path):
        return "started", f"shard {', '.join(working)} is at work"
    said = folder.said()
    left = f"{len(units - done)} of {len(units)} units are not there"
    for shard, last in said.items():
        where = "" if shard == "0/1" else f"shard {shard}: "
        if last["state"] == "failed":
            return "failed", f"{where}{last['reason']}"
        if last["state"] == "started":
            return "failed", f"{where}{NO_WORD}"
    if any(last["state"] == "stopped" for last in said.values()):
        return "stopped", f"on request; {left}"
    if any(last["state"] == "complete" for last in said.values()):
        return "failed", f"{left}, though it was complete"
    return "stopped", left
