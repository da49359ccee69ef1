"""CAMs from the main direction of a layer's activations (EigenCAM) or of gradient times activation.

A layer gives a matrix M "hw c": one row per place, one column per channel. The first left singular vector
of M is the first eigenvector of M M^T "hw hw" (49x49 for a ResNet), so no SVD of a 49x2048 matrix is needed.
Early layers have more places than channels; there the eigenvector u of the smaller M^T M "c c" gives it as
M u. Repeated squaring of the small matrix leaves only its first eigenvector; unlike an eigensolver it is a
few batched products, which a GPU runs for all images at once. There they run in float32, like the small
matrix itself: what is lost where two eigenvalues almost agree was lost when that was formed. On a CPU they
run in double precision, and end for each image when one direction is left: mostly after six or eight products
of twenty, which for 13 x 13 places take as long as the pass of a small network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heatproof.models.running import computing
from heatproof.registry import Card, explainer
from heatproof.types import Trace, per_map, spatial_dims

ROUNDS, SQUARINGS = 10, 2  # the matrix to the power 2**20: a second eigenvalue 1e-5 below the first is gone
LEFT = 1e-14  # of the trace, outside of the first direction: beyond what a float can tell


def leading_direction(features: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    """ "b c h w" -> "b h w" of unit length, the first left singular vector, and its singular value "b"."""
    columns = features.flatten(2)  # "b c hw"
    if centred:
        columns = columns - columns.mean(2, keepdim=True)
    few_channels = columns.shape[1] < columns.shape[2]
    rows = columns.transpose(1, 2) if few_channels else columns
    with computing("fp32", features.device):
        gram = rows.transpose(1, 2) @ rows
        if gram.device.type == "cuda":
            power = _high_power(gram)
        else:
            gram = gram.double()
            power = torch.cat([_high_power(one, ends=True) for one in gram.split(1)])
    # Every column is now a multiple of the eigenvector; the longest is the most exact.
    best = power.norm(dim=1).argmax(1)
    vector = power.gather(2, best[:, None, None].expand(-1, power.shape[1], 1))[..., 0]
    vector = _unit(vector)
    if few_channels:
        vector = torch.einsum("bi,bip->bp", vector, columns.to(vector.dtype))
        vector, value = _unit(vector), vector.norm(dim=1)
    else:
        value = torch.einsum("bi,bij,bj->b", vector, gram, vector).clamp(min=0).sqrt()
    return vector.unflatten(1, features.shape[2:]), value


def _high_power(gram: Tensor, ends: bool = False) -> Tensor:
    """ "b n n", scaled: a power in which one direction is left; the first such power where it `ends`."""
    power = gram
    for _ in range(ROUNDS):
        # Scaled by the trace, at least the first eigenvalue: squaring neither overflows nor vanishes.
        trace = power.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        power = power / torch.where(trace > 0, trace, 1.0)
        if ends and power.square().sum() > 1 - LEFT:  # the squares of shares that sum to 1
            break
        for _ in range(SQUARINGS):
            power = power @ power
    return power


def _unit(vectors: Tensor) -> Tensor:
    """ "b n" of length 1; zeros stay zeros."""
    length = vectors.norm(dim=1, keepdim=True)
    return vectors / torch.where(length > 0, length, 1.0)


def flip_to_larger_side(values: Tensor) -> Tensor:
    """Turn each map so that its largest deviation from zero is positive."""
    low, high = values.flatten(1).aminmax(dim=1)
    return values * per_map(torch.where(low.abs() > high.abs(), -1.0, 1.0), values)


@explainer(
    "eigencam",
    needs=("activations",),
    trace_only=True,
    volumes=True,
    cite="muhammad2020eigencam",
    card=Card(
        target="none: the same map for every class", relu="none", sign="turned so that its sum is >= 0"
    ),
)
def eigencam(trace: Trace, *, centred: bool = False) -> Tensor:
    """The main direction of the activations; knows neither class nor gradient.

    First right singular vector of the activations "c hw", not centred, turned so that its sum is >= 0.
    centred=true subtracts each channel's mean first and returns the projection on the first component, as
    the grad-cam package does; it is turned to its larger side, since such a projection sums to 0.
    """
    vector, value = leading_direction(trace.activation, centred)
    if centred:
        return flip_to_larger_side(vector * per_map(value, vector)).float()
    return (vector * per_map(torch.where(vector.sum(spatial_dims(vector)) < 0, -1.0, 1.0), vector)).float()


@explainer(
    "eigengradcam",
    needs=("activations", "gradients"),
    trace_only=True,
    volumes=True,
    cite="muhammad2020eigencam",
    card=Card(relu="none", sign="flipped where |min| > |max|"),
)
def eigengradcam(trace: Trace) -> Tensor:
    """The main direction of gradient times activation.

    Projection on the first principal component of g * A, centred per channel, flipped if |min| > |max|.
    """
    vector, value = leading_direction(trace.product, centred=True)
    return flip_to_larger_side(vector * per_map(value, vector)).float()
