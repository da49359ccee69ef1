"""COSE over the checkpoints of a run, from stored maps: no model pass.

A pair is one image under an earlier checkpoint and under the last one. Rows, for each method:

    cose                     at the last checkpoint; with it cose_consistency, cose_sensitivity, cose_same and
                             cose_changed (numbers of pairs), cose_low and cose_high (95 % interval)
    cose_to(LAST)            at each earlier checkpoint: mean SSIM of its maps with those of LAST

The maps must explain the predicted class, so run.targets is "predicted". See metrics/stability.py.
"""

from __future__ import annotations

import math

import numpy as np

from heatproof.metrics.checkpoint_pairs import checkpoint_pairs
from heatproof.metrics.similarity import REASONS
from heatproof.run.group import cells
from heatproof.run.metrics import read_metrics
from heatproof.run.plan import Task
from heatproof.run.score import RowMaker
from heatproof.store import RunFolder
from heatproof.types import Score

NO_PAIR = "no image has a map at both checkpoints"
PART = 256  # images compared at a time, so that memory does not grow with the run


def across_rows(folder: RunFolder, task: Task, model: str) -> list[Score]:
    """The rows of one group task that compares checkpoints."""
    (method,), (request,) = task.unit.methods, read_metrics(task.unit.metrics)
    *earlier, last = task.among
    maps, rows = folder.maps(), []
    ssims: list[float] = []
    same: list[bool] = []
    names: list[str] = []
    for checkpoint in earlier:
        shared = maps.shared([(checkpoint, method), (last, method)])
        before = len(ssims)
        for start in range(0, len(shared), PART):
            part = shared[start : start + PART]
            pairs = checkpoint_pairs(*(maps.read(one, method, part) for one in (checkpoint, last)))
            ssims += pairs.ssim.tolist()
            same += pairs.same.tolist()
        names += shared
        defined = [value for value in ssims[before:] if not math.isnan(value)]
        value = float(np.mean(defined)) if defined else math.nan
        reason = NO_PAIR if not shared else "" if defined else f"on every image {REASONS[1]}"
        rows.append(RowMaker(model, checkpoint).about(method, None, f"cose_to({last})", value, reason))
    images, kept, values = np.array(names, dtype=object), np.array(same, bool), np.array(ssims, np.float64)
    found = request.entry.function(
        values[kept], values[~kept], images[kept], images[~kept], seed=task.unit.seed, **dict(request.options)
    )
    end = RowMaker(model, last)
    return [*rows, *(end.about(method, *cell) for cell in cells(request, found))]
