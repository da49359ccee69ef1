"""Runs whose pictures may have several findings, as the verdict reads them.

A map is of one finding of a picture (PICTURE#FINDING); what the network said stands in the rows of the
picture. Here both are brought together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from heatproof.images.findings import entry_id, finding_name

if TYPE_CHECKING:
    from heatproof.store import RunFolder

NOT_THERE = -1  # predicted: the finding is not


def entry_rows(
    rows: Sequence[dict[str, Any]], select: Callable[..., list[dict[str, Any]]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows about maps, each with what the network said about its finding."""
    said = {
        entry_id(row["image"], finding_name(names, row["explained"])): row
        for row in select(
            """image, explained,
               max(value) filter (metric = 'probability' and not isnan(value)) as confidence,
               count(*) filter (metric = 'predicted') as predicted""",
            "explained is not null and method = '' and metric in ('probability', 'predicted') group by 1, 2",
        )
    }
    found = []
    for row in rows:
        if row["explained"] is not None and (answer := said.get(row["image"])):
            there = row["explained"] if answer["predicted"] else NOT_THERE
            predicted = None if answer["confidence"] is None else there  # None: the network gave no number
            found.append(row | {"predicted": predicted, "confidence": answer["confidence"]})
    return found


def no_skill(
    folder: RunFolder, model: str, checkpoint: str, fewest: int, copies: Collection[str] = ()
) -> Iterator[str]:
    """Findings that the network does not surely tell from their absence: by AUC, as all thresholds see it.

    copies: images that are near-duplicates of others, which do not count.
    """
    import math

    from heatproof.metrics.classifier import auc, auc_errors
    from heatproof.run.predictions import read_predictions

    answers = read_predictions(folder, checkpoint, model=model)
    own = [i for i, name in enumerate(answers.ids) if name not in copies]
    if answers.limits is None or len(own) < fewest:
        return
    labels, chances = answers.labels[own], answers.probabilities[own]
    found = auc(labels, chances)
    error = float((auc_errors(labels, chances) ** 2).sum()) ** 0.5
    low, high = found.value - 1.96 * error, found.value + 1.96 * error
    if not math.isnan(found.value) and not low > 0.5:
        yield (
            f"the network is not surely better than chance: mean AUC {found.value:.3f} over its findings "
            f"(95 % interval {low:.3f} to {high:.3f}, n = {found.n}), where guessing has 0.5"
        )
