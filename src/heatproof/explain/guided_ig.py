"""Guided Integrated Gradients: a path that changes first what matters least, so noisy slopes add up less.

From the baseline x0 to the image x, `steps` steps. Each step takes the gradient once and closes 1/steps of
the L1 distance to x by moving only the `fraction` of features with the smallest |gradient|, in rounds, as far
as they may go: no feature leaves the straight line by more than `max_dist` of its way. The map sums
gradient * movement. Citation key: kapishnikov2021guidedig.

Follows the authors' package; different from it: all images of the batch walk together, one forward and one
backward pass per step, a round that can move nothing ends the step, and a feature's place is kept as the part
of its way it has done, in float64, so that all features share the same two bounds.

A caution: which features move is a hard choice by rank, so the rounding of a float32 network, which changes
with the batch size, can send the path another way and the map with it. A float64 network gives one answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.baselines import STARTS, baseline_images
from heatproof.explain.gradients import GRADIENT_CARD, check_counts, over_channels, working_images
from heatproof.registry import explainer
from heatproof.types import Signed, Trace

CLOSE = 1e-9  # relative and absolute: when a distance counts as reached


@explainer(
    "guided-ig",
    cite="kapishnikov2021guidedig",
    aliases=("guided-integrated-gradients", "gig"),
    card=GRADIENT_CARD,
    volumes=True,
)
def guided_ig(
    trace: Trace, *, steps: int = 200, fraction: float = 0.25, max_dist: float = 0.02, baseline: str = "zero"
) -> Signed:
    """The gradient summed on a path that avoids steep features as long as it can.

    sum_t dy/dx (x_t) * (x_t+1 - x_t). baseline: as for integrated-gradients.
    """
    check_counts("guided-ig", steps=steps)
    if not 0 <= fraction <= 1 or not 0 <= max_dist <= 1:
        raise InputError(f"guided-ig fraction and max_dist must be in [0, 1], got {fraction} and {max_dist}")
    images = working_images(trace)
    start = baseline_images(trace.model, images, baseline, trace.seed, STARTS).double().flatten(1)
    way = trace.images.double().flatten(1) - start
    done, attributions = torch.zeros_like(way), torch.zeros_like(way)
    for step in range(1, steps + 1):
        gradients = _gradients(trace, start + way * done)
        further = _advance(done, way.abs(), gradients.abs(), step / steps, fraction, max_dist)
        attributions += (further - done) * gradients
        done = further
    return over_channels((attributions * way).view_as(trace.images))


def _gradients(trace: Trace, points: Tensor) -> Tensor:
    """ "b n" gradients at "b n" points."""
    found: list[Tensor] = []
    trace.queue.input_gradients(
        len(points),
        lambda start, stop: (points[start:stop].view_as(trace.images[start:stop]), trace.targets[start:stop]),
        lambda gradients, _logits, _start, _stop: found.append(gradients.flatten(1)),
    )
    return torch.cat(found)


def _advance(
    done: Tensor, lengths: Tensor, slopes: Tensor, share: float, fraction: float, max_dist: float
) -> Tensor:
    """The part of its way "b n" that each feature has done after a step.

    done: the same before it; lengths: the features' ways; slopes: |gradient|; share: the part of the whole L1
    way to be done after the step.
    """
    least, most = max(share - max_dist, 0.0), min(share + max_dist, 1.0)
    wanted = lengths.sum(1, keepdim=True) * (1 - share)
    done = done.clamp(min=least)
    slopes = slopes.masked_fill(lengths == 0, torch.inf)  # these cannot move
    walking = torch.ones_like(wanted, dtype=torch.bool)
    while walking.any():
        remaining = _total(lengths, 1 - done)
        walking = walking & ~torch.isclose(remaining, wanted, rtol=CLOSE, atol=CLOSE)
        slopes = slopes.masked_fill_(done == most, torch.inf)
        chosen = walking & (slopes <= _lower_quantile(slopes, fraction)) & (slopes != torch.inf)
        room = (most - done) * chosen
        reach = _total(lengths, room)
        needed = torch.where(reach > 0, (remaining - wanted) / reach, 0.0)
        walking = walking & (needed > 1)
        done = torch.where(chosen & walking, most, done + room * needed)
    return done


def _total(lengths: Tensor, parts: Tensor) -> Tensor:
    """ "b 1": the L1 length of parts of ways."""
    total: Tensor = torch.linalg.vecdot(lengths, parts)
    return total[:, None]


def _lower_quantile(values: Tensor, fraction: float) -> Tensor:
    """ "b 1": the largest value at or below the quantile of each row."""
    rank = int(fraction * (values.shape[1] - 1))
    return values.topk(rank + 1, dim=1, largest=False, sorted=False).values.amax(1, keepdim=True)
