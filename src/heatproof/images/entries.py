"""Images of several labels as one entry for each label."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heatproof.images.findings import entry_id, finding_name
from heatproof.types import Batch, Truth


def entries(batch: Batch, chosen: Tensor, names: Sequence[str]) -> tuple[Batch, Tensor]:
    """The chosen findings, "b k" bool, each as an image of its own, and "n", which finding each is about.

    An entry has the boxes and masks of its finding, and its label where the picture really has it, else -1.
    """
    pictures, findings = chosen.cpu().nonzero().unbind(1)
    pairs = list(zip(pictures.tolist(), findings.tolist(), strict=True))
    ids = tuple(entry_id(batch.ids[i], finding_name(names, f)) for i, f in pairs)
    labels = None
    if batch.findings is not None:
        labels = torch.where(batch.findings[pictures, findings], findings, -1)
    truth = None if batch.truth is None else _truth(batch, batch.truth, pairs)
    return Batch(ids, batch.images[pictures], labels, truth), findings


def _truth(batch: Batch, whole: Truth, pairs: Sequence[tuple[int, int]]) -> Truth:
    """What is known of each finding; nothing of one that a picture does not have."""
    known = [(batch.by_finding.get(f), i) for i, f in pairs]

    def mask(part: str, of: Truth | None, i: int) -> Tensor:
        return torch.zeros_like(whole.masks[part][i]) if of is None else of.masks[part][i]

    masks = {
        part: torch.stack([mask(part, of, i) for of, i in known]) if known else every[:0]
        for part, every in whole.masks.items()
    }
    if whole.boxes is None:
        return Truth(None, masks)
    boxes = tuple(() if of is None or of.boxes is None else of.boxes[i] for of, i in known)
    return Truth(boxes, masks, tuple(() if of is None else of.lost[i] for of, i in known))
