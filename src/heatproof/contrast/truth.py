"""Is the evidence where we put it? Asked by counterfactuals, never taken from what was intended.

    flips of a network = of the held-out pictures of other classes that it does not call positive as they are,
                         the share that it calls positive once the token is in them

A is planted from 90 % of flips on, B is clean up to 10 %; both must leave at least half of those pictures to
ask about, for a network that calls everything positive uses nothing. Anything else is "planting failed": the
networks do not differ in what they use in the way that the test needs, and no method is judged by them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from heatproof.models.model import Model
from heatproof.models.queue import all_logits

PLANTED, CLEAN, ASKED = 0.9, 0.1, 0.5
MOST_ASKED = 200  # pictures


class Flips(NamedTuple):
    """A share of n pictures (NaN where there was none), which are those of `shown` not called positive."""

    share: float
    n: int
    shown: int

    @property
    def usable(self) -> bool:
        return self.n >= max(1, ASKED * self.shown)


class Planting(NamedTuple):
    """What the counterfactuals say about both networks."""

    a: Flips
    b: Flips

    @property
    def holds(self) -> bool:
        clear = self.a.share >= PLANTED and self.b.share <= CLEAN
        return clear and self.a.usable and self.b.usable

    @property
    def sentence(self) -> str:
        told = f"the token turns {_share(self.a)} of A's answers and {_share(self.b)} of B's"
        if self.holds:
            return f"planted: {told}"
        wanted = (
            f"at least {PLANTED:.0%} and at most {CLEAN:.0%}, each of {ASKED:.0%} of the pictures or more"
        )
        return f"planting failed: {told}; needed are {wanted}, so no method is judged"


def _share(flips: Flips) -> str:
    return f"{flips.share:.0%} ({flips.n} of {flips.shown} pictures)" if flips.n else "none (0 pictures)"


@torch.no_grad()
def flips(model: Model, plain: Tensor, marked: Tensor, positive: int) -> Flips:
    """How often the token moves the answer to the positive class; the same pictures without and with it."""
    if not len(plain):
        return Flips(math.nan, 0, 0)
    before, after = (model.predicted(all_logits(model, images)) == positive for images in (plain, marked))
    asked = int((~before).sum())
    share = int((after & ~before).sum()) / asked if asked else math.nan
    return Flips(share, asked, len(plain))
