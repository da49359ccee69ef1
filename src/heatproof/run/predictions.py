"""Predictions of a checkpoint, read from the rows of a run, without torch.

Classes are numbers from 0; an image without a label has -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from heatproof.disk import valid_unicode
from heatproof.errors import UnknownNameError
from heatproof.images.findings import THRESHOLD, entry_id, finding_limits, finding_name
from heatproof.metrics.gold import FIRST

if TYPE_CHECKING:
    from heatproof.store import Manifest, RunFolder


@dataclass(frozen=True)
class StoredPredictions:
    """Predictions of the images that could be read, in the source's order."""

    ids: tuple[str, ...]
    labels: np.ndarray  # "b"; multi-label: "b k" bool
    probabilities: np.ndarray  # "b k"; zero where a class's probability was not kept
    complete: bool  # every class's was
    findings: tuple[str, ...] = ()  # multi-label: names of the labels
    limits: tuple[float, ...] | None = None  # multi-label: threshold of each label

    @cached_property
    def places(self) -> dict[str, int]:
        """Index of each map's image, by the map's id, in the source's order."""
        if self.limits is None:
            return {name: i for i, name in enumerate(self.ids)}
        return {
            valid_unicode(entry_id(name, finding)): i
            for i, name in enumerate(self.ids)
            for finding in self.findings
        }


def read_predictions(
    folder: RunFolder, checkpoint: str, ids: Sequence[str] | None = None, model: str | None = None
) -> StoredPredictions:
    """Read the predictions of a checkpoint.

    ids: all images as the store writes them, in the order of the result; default: by name.
    """
    rows = folder.scores().columns(
        "select image, coalesce(label, -1) as label, explained, value from scores "
        "where checkpoint = ? and model = coalesce(?, model) and metric = 'probability' and not isnan(value)",
        [valid_unicode(checkpoint), model],
    )
    seen = set(rows["image"])
    known = tuple(sorted(seen) if ids is None else (name for name in ids if name in seen))
    place = {name: i for i, name in enumerate(known)}
    at = np.array([place[name] for name in rows["image"]], dtype=np.int64)
    classes, labels = (rows[name].astype(np.int64) for name in ("explained", "label"))
    table = np.zeros((len(known), max(2, classes.max(initial=-1) + 1)))
    table[at, classes] = rows["value"].astype(np.float64)
    complete = len(classes) == table.size
    if folder.manifest.is_multilabel:
        truth = np.zeros(table.shape, dtype=bool)
        truth[at, classes] = labels == classes
        names = tuple(finding_name(folder.manifest.classes, c) for c in range(table.shape[1]))
        return StoredPredictions(
            known, truth, table, complete, names, stored_limits(folder.manifest, len(names))
        )
    own = np.full(len(known), -1)
    own[at] = labels
    return StoredPredictions(known, own, table, complete)


def anchor_of(name: str, checkpoints: Sequence[str]) -> str:
    """The checkpoint that an anchor name refers to."""
    if name != FIRST and name not in checkpoints:
        raise UnknownNameError("checkpoint to anchor gold lists to", name, [FIRST, *checkpoints])
    return checkpoints[0] if name == FIRST else name


def anchor_probabilities(
    folder: RunFolder, checkpoint: str, ids: Sequence[str], model: str | None = None
) -> np.ndarray:
    """Array "b k": probabilities of these images at a checkpoint; zeros for images that could not be read."""
    stored = read_predictions(folder, checkpoint, ids, model)
    place = {name: i for i, name in enumerate(ids)}
    probabilities = np.zeros((len(ids), stored.probabilities.shape[1]))
    probabilities[[place[name] for name in stored.ids]] = stored.probabilities
    return probabilities


def stored_limits(manifest: Manifest, findings: int) -> tuple[float, ...]:
    """The threshold of each label."""
    limits = manifest.config.get("model", {}).get("thresholds")
    return finding_limits(THRESHOLD if limits is None else limits, findings)
