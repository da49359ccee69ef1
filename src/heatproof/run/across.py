"""COSE over the checkpoints of a run, from stored maps and stored predictions: no model pass.

A pair is one image under an earlier checkpoint and under the last one. Rows, for each method:

    cose                     at the last checkpoint; with it cose_consistency, cose_sensitivity, cose_same and
                             cose_changed (numbers of pairs), cose_low and cose_high (95 % interval)
    cose_to(LAST)            at each earlier checkpoint: mean SSIM of its maps with those of LAST

The maps must explain the predicted class, so run.targets is "predicted". See metrics/stability.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from heatproof.disk import valid_unicode
from heatproof.metrics.checkpoint_pairs import comparable
from heatproof.metrics.similarity import REASONS, ssim
from heatproof.run.group import cells
from heatproof.run.metrics import read_metrics
from heatproof.run.plan import Task
from heatproof.run.score import RowMaker
from heatproof.store import MapStore, RunFolder
from heatproof.types import Score

NO_PAIR = "no image has a map at both checkpoints"
PART = 256  # images compared at a time, so that memory does not grow with the run


def across_rows(folder: RunFolder, task: Task, model: str) -> list[Score]:
    """The rows of one group task that compares checkpoints."""
    (method,), (request,) = task.unit.methods, read_metrics(task.unit.metrics)
    *earlier, last = task.among
    maps, ssims, same, names = folder.maps(), [], [], []
    rows: list[Score] = []
    final = predictions(folder, last)
    for checkpoint in earlier:
        before = predictions(folder, checkpoint)
        shared = _shared(maps, method, checkpoint, last, [n for n in before if n in final])
        parts = _ssims(maps, method, checkpoint, last, shared)
        ssims.append(alike := np.concatenate([np.zeros(0), *parts], dtype=np.float64))
        same += [before[name] == final[name] for name in shared]
        names += shared
        defined = alike[~np.isnan(alike)]
        value = float(defined.mean()) if len(defined) else math.nan
        reason = NO_PAIR if not shared else "" if len(defined) else f"on every image {REASONS[1]}"
        rows.append(RowMaker(model, checkpoint).about(method, None, f"cose_to({last})", value, reason))
    images, kept, values = np.array(names, dtype=object), np.array(same, bool), np.concatenate(ssims)
    found = request.entry.function(
        values[kept], values[~kept], images[kept], images[~kept], seed=task.unit.seed, **dict(request.options)
    )
    end = RowMaker(model, last)
    return [*rows, *(end.about(method, *cell) for cell in cells(request, found))]


def predictions(folder: RunFolder, checkpoint: str) -> dict[str, int]:
    """The predicted class of every image that has one, in order of their names."""
    rows = folder.scores().columns(
        "select image, explained from scores where checkpoint = ? and metric = 'predicted' "
        "and not isnan(value) order by image",
        [valid_unicode(checkpoint)],
    )
    return dict(zip(rows["image"], map(int, rows["explained"]), strict=True))


def _shared(maps: MapStore, method: str, first: str, second: str, names: list[str]) -> list[str]:
    stored = zip(names, maps.known(first, method, names), maps.known(second, method, names), strict=True)
    return [name for name, here, there in stored if here and there]


def _ssims(maps: MapStore, method: str, first: str, second: str, names: list[str]) -> Iterator[np.ndarray]:
    for start in range(0, len(names), PART):
        part = names[start : start + PART]
        before, after = (comparable(maps.read(checkpoint, method, part)) for checkpoint in (first, second))
        yield ssim(before, after).double().numpy()
