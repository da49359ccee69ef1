"""Class activation maps: the activations A of a layer, weighted.

Most weigh with the gradients g of the class's logit, and cost one forward and one partial backward pass
together. AblationCAM and ReciproCAM rerun only the part of the network behind the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from heatproof.errors import ModelError
from heatproof.explain import method
from heatproof.explain.baselines import variant_scores
from heatproof.models.capture import Tail
from heatproof.models.running import at_least_float, computing
from heatproof.types import Trace, extremes, normalise, per_map, spatial_dims, upsample

ROUNDS, SQUARINGS = 10, 2  # the matrix to the power 2**20: a second eigenvalue 1e-5 below the first is gone
REMAINDER = 1e-14  # of the trace, outside of the first direction: below the precision of a float
BUMPS = {
    "gaussian": ((1 / 16, 1 / 8, 1 / 16), (1 / 8, 1 / 4, 1 / 8), (1 / 16, 1 / 8, 1 / 16)),
    "cell": ((1.0,),),
}


def weighted_sum(weights: Tensor, activations: Tensor) -> Tensor:
    """ReLU of sum_k w_k A_k: "b c" and "b c h w" -> "b h w"."""
    return torch.einsum("bc,bc...->b...", weights, activations).relu()


def safe_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient, and 0 if the denominator is 0; no epsilon shifts the other values."""
    return numerator / denominator.masked_fill(denominator == 0, torch.inf)


@method("gradcam")
def gradcam(trace: Trace) -> Tensor:
    """Channels weighted by their mean gradient.

    ReLU(sum_k w_k A_k), w_k = mean_ij g_kij.
    """
    return weighted_sum(trace.gradient.mean(spatial_dims(trace.gradient, 2)), trace.activation)


def gradcam_plus_plus_map(
    activations: Tensor, gradients: Tensor, rectified: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Maps "b h w" of "b c h w" twice; rectified, total: ReLU(g) and sum_ij A "b c", if already computed."""
    positive = gradients.relu() if rectified is None else rectified
    summed = activations.sum(spatial_dims(activations, 2)) if total is None else total
    # alpha * ReLU(g) with g^2 divided out: a third of the work, and small gradients do not underflow. Where g
    # is not positive the numerator is 0, so ReLU(g) may stand below too.
    below = (summed.view(*summed.shape, *[1] * (positive.ndim - 2)) * positive).add_(2)
    weights = (positive / below.masked_fill_(below == 0, torch.inf)).sum(spatial_dims(positive, 2))
    return weighted_sum(weights, activations)


@method("gradcam++")
def gradcam_plus_plus(trace: Trace) -> Tensor:
    """Channels weighted by positive gradients, each position by its share in the class (eq. 19).

    w_k = sum_ij alpha_kij ReLU(g_kij), alpha_kij = g_kij^2 / (2 g_kij^2 + (sum_ab A_kab) g_kij^3).
    alpha is 0 where its denominator is 0; no epsilon is added. The factor exp(S) of the paper is the same
    for every weight of an image and drops out when the map is normalised.
    """
    return gradcam_plus_plus_map(trace.activation, trace.gradient, trace.rectified, trace.total)


@method("layercam")
def layercam(trace: Trace) -> Tensor:
    """Every position weighted by its own positive gradient.

    sum_k ReLU(g_k) * A_k. The paper's outer ReLU is applied when the map is normalised; it has no effect on
    activations that are never negative.
    """
    return (trace.rectified * trace.activation).sum(1)


@method("xgradcam")
def xgradcam(trace: Trace) -> Tensor:
    """Channels weighted by the share of the logit their activation explains.

    w_k = sum_ij g_kij A_kij / sum_ij A_kij, and 0 for a channel whose activations sum to 0.
    """
    share = safe_ratio(trace.product.sum(spatial_dims(trace.product, 2)), trace.total)
    return weighted_sum(share, trace.activation)


@method("hirescam")
def hirescam(trace: Trace) -> Tensor:
    """Every position weighted by its own gradient, sign included.

    ReLU(sum_k g_k * A_k).
    """
    return trace.product.sum(1).relu()


@method("cam")
def cam(trace: Trace) -> Tensor:
    """The class's weights applied to the feature maps, where pooling and one linear layer follow them.

    sum_k w_k A_k, w_k the weight of channel k for the class. The head qualifies if the gradient of the logit
    is w_k / (number of positions) at every position, for the weights of one of the network's layers.
    """
    gradient, activations = trace.gradient, trace.activation
    slopes = gradient.flatten(2) * math.prod(gradient.shape[2:])
    for part in trace.model.module.modules():
        if not isinstance(part, nn.Linear | nn.Conv2d | nn.Conv3d):
            continue
        columns = at_least_float(part.weight.detach()).flatten(1).T  # read as logits of as many images
        if columns.shape != (slopes.shape[1], trace.logits.shape[1]):
            continue
        rows = [trace.model.scores(columns, target.expand(len(columns))) for target in trace.targets]
        weights = torch.stack(rows).to(slopes)
        if torch.allclose(slopes, weights[..., None].expand_as(slopes), rtol=1e-3, atol=1e-5):
            return torch.einsum("bc,bc...->b...", weights, activations)
    raise ModelError(
        f"cam needs global average pooling and one linear layer behind {trace.layer}, and {trace.model.name} "
        "has another head; use gradcam instead"
    )


@method("ms-gradcam++")
def ms_gradcam_plus_plus(trace: Trace, *, scaled: bool = True) -> Tensor:
    """Mean over three depths of Grad-CAM++ maps, each scaled to [0, 1].

    The layers are the ends of the last three stages (DenseNet201: conv3_block12, pool4, conv5_block32;
    InceptionV3: mixed2, mixed7, mixed10; ResNet50V2: stages 3, 4, 5, and their twins), or those named.
    scaled=false averages the maps as they are, which is eq. 7 of the C-Score paper. Gradients and activations
    of the layers differ in size, so the mean is then mostly the map of the layer with the largest values.
    """
    maps = [gradcam_plus_plus_map(trace.activations[n], trace.gradients[n]) for n in trace.scales]
    maps = [normalise(m) for m in maps] if scaled else maps
    return torch.stack([upsample(m, trace.image_size) for m in maps]).mean(0)


@method("eigencam")
def eigencam(trace: Trace, *, centred: bool = False) -> Tensor:
    """The main direction of the activations; depends on neither class nor gradient.

    First right singular vector of the activations "c hw", not centred, signed so that its sum is >= 0.
    centred=true subtracts each channel's mean first and returns the projection on the first component, as
    the grad-cam package does; its sign makes the larger side positive, since such a projection sums to 0.
    """
    vector, value = leading_direction(trace.activation, centred)
    if centred:
        return flip_to_larger_side(vector * per_map(value, vector)).float()
    return (vector * per_map(torch.where(vector.sum(spatial_dims(vector)) < 0, -1.0, 1.0), vector)).float()


@method("eigengradcam")
def eigengradcam(trace: Trace) -> Tensor:
    """The main direction of gradient times activation.

    Projection on the first principal component of g * A, centred per channel, flipped if |min| > |max|.
    """
    vector, value = leading_direction(trace.product, centred=True)
    return flip_to_larger_side(vector * per_map(value, vector)).float()


def leading_direction(features: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    """Turn "b c h w" into "b h w" of unit length, the first left singular vector, and its singular value "b".

    It is the first eigenvector of the smaller of M M^T "hw hw" and M^T M "c c", M "hw c". Repeated squaring
    leaves only that eigenvector; unlike an eigensolver it is a few batched products. On a GPU they run in
    float32 for all images at once, on a CPU in float64 until a single direction is left in each image.
    """
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
            power = torch.cat([_high_power(matrix, early_stop=True) for matrix in gram.split(1)])
    # Every column is now a multiple of the eigenvector; the longest is the most exact.
    best = power.norm(dim=1).argmax(1)
    vector = _unit(power.gather(2, best[:, None, None].expand(-1, power.shape[1], 1))[..., 0])
    if few_channels:
        vector = torch.einsum("bi,bip->bp", vector, columns.to(vector.dtype))
        vector, value = _unit(vector), vector.norm(dim=1)
    else:
        value = torch.einsum("bi,bij,bj->b", vector, gram, vector).clamp(min=0).sqrt()
    return vector.unflatten(1, features.shape[2:]), value


def _high_power(gram: Tensor, early_stop: bool = False) -> Tensor:
    """Tensor "b n n": a scaled power of the matrix, in which a single direction is left."""
    power = gram
    for _ in range(ROUNDS):
        # Scaled by the trace, at least the first eigenvalue: squaring neither overflows nor vanishes.
        trace = power.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        power = power / torch.where(trace > 0, trace, 1.0)
        if early_stop and power.square().sum() > 1 - REMAINDER:  # the squares of shares that sum to 1
            break
        for _ in range(SQUARINGS):
            power = power @ power
    return power


def _unit(vectors: Tensor) -> Tensor:
    """Tensor "b n" of length 1; zeros stay zeros."""
    length = vectors.norm(dim=1, keepdim=True)
    return vectors / torch.where(length > 0, length, 1.0)


def flip_to_larger_side(values: Tensor) -> Tensor:
    """Turn each map so that its largest deviation from zero is positive."""
    low, high = values.flatten(1).aminmax(dim=1)
    return values * per_map(torch.where(low.abs() > high.abs(), -1.0, 1.0), values)


@method("scorecam")
def scorecam(trace: Trace, *, channels: int | str = 32, weights: str = "gain", integrate: int = 1) -> Tensor:
    """Channels weighted by the probability gained when the image is masked with them.

    ReLU(sum_k w_k A_k), w_k = p(c | x * M_k) - p(c | blank), M_k the channel scaled to [0, 1] at image size.
    channels: how many, those of highest spatial variance, ties to the lower index; "all" for every one.
    weights: "gain" as above, or "softmax": softmax over channels of the masked image's logits, as the
    grad-cam package does.
    integrate: the mean score over this many even steps from 0 to the mask (IS-CAM, naidu2020iscam: 10).
    """
    activations = trace.activation
    available = activations.shape[1]
    count = available if isinstance(channels, str) else min(channels, available)
    variance = activations.flatten(2).double().var(2, correction=0)
    chosen = variance.argsort(dim=1, descending=True, stable=True)[:, :count]
    rows = torch.arange(len(activations), device=activations.device)
    selected = activations[rows[:, None], chosen]

    def masked(which: Tensor, variant: Tensor) -> Tensor:
        masks = upsample(selected[which, variant // integrate], trace.image_size)
        low, high = extremes(masks, spatial_dims(masks))  # negatives stay: a mask orders places
        masks = (masks - low) / torch.where(high > low, high - low, torch.inf)
        return trace.images[which] * (masks * per_map((variant % integrate + 1) / integrate, masks))[:, None]

    read = trace.model.scores if weights == "softmax" else trace.model.measured
    scores = variant_scores(trace, rows, count * integrate, masked, read).unflatten(1, (count, -1)).mean(2)
    if weights == "softmax":
        return weighted_sum(scores.softmax(1), selected)
    assert trace.blank_logits is not None
    blank = trace.model.measured(trace.blank_logits.expand(len(activations), -1), trace.targets)
    return weighted_sum(scores - blank[:, None], selected)


def _by_image(trace: Trace, work: Callable[[Tail, Tensor], Tensor]) -> Tensor:
    """work(tail, target) of every image, stacked; the tail is the part of the network behind the layer."""
    assert trace.layer is not None
    pairs = zip(trace.images, trace.targets, strict=True)
    return torch.stack([work(Tail(trace.model, image, trace.layer), target) for image, target in pairs])


@method("ablationcam")
def ablationcam(trace: Trace, *, fill: str = "zero") -> Tensor:
    """Channels weighted by the share of the logit lost when the channel is set to 0.

    ReLU(sum_k w_k A_k), w_k = (y - y_k) / y. Only the part of the network behind the layer is rerun. In a
    transformer the channel is removed from every token, the class token included.
    fill: "zero", or "floor" to fill far below the smallest activation where that is not 0, as the grad-cam
    package does.
    """

    def drops(tail: Tail, target: Tensor) -> Tensor:
        """Share "c" of the logit that each channel carries."""
        original, axis = tail.activation, tail.layout.channel_axis
        lowest = float(original.min())
        value = lowest - 1e7 if fill == "floor" and lowest != 0 else 0.0

        def without(start: int, stop: int) -> Tensor:
            changed = original.repeat(stop - start, *[1] * (original.ndim - 1))
            for row in range(stop - start):
                changed[row].select(axis - 1 if axis > 0 else axis, start + row).fill_(value)
            return trace.model.scores(tail(changed), target.expand(stop - start))

        full = trace.model.scores(tail.logits, target[None])
        return safe_ratio(full - trace.queue.joined(original.shape[axis], without), full)

    return weighted_sum(_by_image(trace, drops), trace.activation)


@method("reciprocam")
def reciprocam(trace: Trace, *, mask: str = "gaussian") -> Tensor:
    """The class's probability when one cell of the layer and a little around it is left.

    p(c | g(A * M_ij)) for each cell, g the part of the network behind the layer. No gradient is needed. In a
    transformer the mask lies over the grid of tokens, and the class token stays, as in the authors' version.
    mask: "gaussian", 3 x 3 cells with weights 1/4 in the middle, 1/8 beside and 1/16 at the corners, cut off
    at the border; or "cell", the cell alone.
    """

    def probabilities(tail: Tail, target: Tensor) -> Tensor:
        """Tensor "h w", of the class of one image."""
        grid = tail.layout.picture(tail.activation)
        height, width = grid.shape[2:]
        masks = bumps(height, width, mask).to(grid)

        def masked(start: int, stop: int) -> Tensor:
            tokens = tail.activation.expand(stop - start, *tail.activation.shape[1:])
            logits = tail(tail.layout.put_back(grid * masks[start:stop, None], tokens))
            return trace.model.measured(logits, target.expand(stop - start))

        return trace.queue.joined(height * width, masked).view(height, width)

    return _by_image(trace, probabilities)


def bumps(height: int, width: int, mask: str = "gaussian") -> Tensor:
    """Tensor "n h w": the mask of every cell, row by row.

    >>> bumps(2, 2)[0].tolist()
    [[0.25, 0.125], [0.125, 0.0625]]
    """
    cells = torch.eye(height * width).view(-1, 1, height, width)
    weights = torch.tensor(BUMPS[mask])
    return torch.nn.functional.conv2d(cells, weights[None, None], padding=len(weights) // 2)[:, 0]
