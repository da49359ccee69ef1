"""How exactly a network computes: in float32, in TF32 on a GPU that has it, or in bfloat16.

    fp32   every product in float32, also where torch would let a GPU's convolutions use TF32
    tf32   products of a GPU rounded to 10 bits of mantissa, sums in float32; a CPU computes as in fp32
    bf16   convolutions and matrix products in bfloat16 (torch.autocast), sums in float32
    None   as the network and torch are set

Where one is named, as in every run, a GPU's convolutions are those that give the same bits each time.
A network whose weights are bfloat16 or float64 already keeps them. Maps are float32 in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from heatproof.errors import InputError, did_you_mean
from heatproof.models.specs import PRECISIONS as PRECISIONS


def check_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise InputError(f"precision cannot be {precision!r}; {did_you_mean(str(precision), PRECISIONS)}")


def usual_precision(device: str | torch.device) -> str:
    """What torch does on this device where nobody asks for anything."""
    rounds = torch.device(device).type == "cuda" and torch.backends.cudnn.allow_tf32
    return "tf32" if rounds else "fp32"


@contextmanager
def computing(precision: str | None, device: torch.device) -> Iterator[None]:
    """Compute so while the context is open; torch's settings come back."""
    if precision is None:
        yield
        return
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        if device.type != "cuda":
            yield
            return
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        before = products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
        try:
            products.allow_tf32 = convolutions.allow_tf32 = precision != "fp32"
            convolutions.deterministic = True
            yield
        finally:
            products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before
