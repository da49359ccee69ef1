"""ScoreCAM: a channel weighs what the class's probability gains when only its places are shown."""

from __future__ import annotations

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.cams import weighted_sum
from heatproof.registry import Card, explainer
from heatproof.types import Trace, spatial_dims, upsample


@explainer(
    "scorecam",
    needs=("activations", "blank"),
    cite="wang2020scorecam",
    card=Card(target="probability of the explained class", resize="masks bilinear to the image's size"),
    volumes=True,
)
def scorecam(trace: Trace, *, channels: int | str = 32, weights: str = "gain") -> Tensor:
    """Channels weighted by the probability gained when the image is masked with them.

    ReLU(sum_k w_k A_k), w_k = p(c | x * M_k) - p(c | blank), M_k the channel scaled to [0, 1] at image size.
    channels: how many, those of highest spatial variance, ties to the lower index; "all" for every one.
    weights: "gain" as above, or "softmax": softmax over channels of the masked image's logits, as the
    grad-cam package does.
    """
    activations = trace.activation
    available = activations.shape[1]
    count = available if channels == "all" else channels
    if not isinstance(count, int) or count < 1:
        raise InputError(f"scorecam channels must be a positive number or 'all', got {channels!r}")
    if weights not in ("gain", "softmax"):
        raise InputError(f"scorecam weights must be 'gain' or 'softmax', got {weights!r}")
    count = min(count, available)
    variance = activations.flatten(2).double().var(2, correction=0)
    chosen = variance.argsort(dim=1, descending=True, stable=True)[:, :count]
    rows = torch.arange(len(activations), device=activations.device)
    kept = activations[rows[:, None], chosen]

    def masked(start: int, stop: int) -> Tensor:
        jobs = torch.arange(start, stop, device=activations.device)
        return trace.images[jobs // count] * _scaled(kept.flatten(0, 1)[jobs], trace.image_size)[:, None]

    def score(logits: Tensor, start: int, stop: int) -> Tensor:
        targets = trace.targets[torch.arange(start, stop, device=logits.device) // count]
        if weights == "softmax":
            return trace.model.scores(logits, targets)
        return trace.model.measured(logits, targets)

    scores = trace.queue.predict(len(activations) * count, masked, score).view(-1, count)
    if weights == "softmax":
        return weighted_sum(scores.softmax(1), kept)
    assert trace.blank_logits is not None
    blank = trace.model.measured(trace.blank_logits.expand(len(activations), -1), trace.targets)
    return weighted_sum(scores - blank[:, None], kept)


def _scaled(channels: Tensor, size: tuple[int, ...]) -> Tensor:
    """Min-max at image size, negatives kept in the range: a mask orders places, it is not yet evidence."""
    masks = upsample(channels, size)
    low, high = (
        extreme(masks, dim=spatial_dims(masks), keepdim=True) for extreme in (torch.amin, torch.amax)
    )
    return (masks - low) / torch.where(high > low, high - low, torch.inf)
