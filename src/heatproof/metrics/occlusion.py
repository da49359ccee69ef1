"""Does the model need the part that the map marks?

Occlude the pixels of a part (a QR code's finders, a lung field) and see how far the target's logit falls:

    drop = z(x) - z(x with the part's pixels replaced)

A map is right about the part where its mass on it (FMR, TMR) goes with that drop: Spearman's rho over images.

Cite: chakraborty2025cambench. It does not say with what it occludes; here that is a baseline of insertion and
deletion, by default the image under a Gaussian blur of sigma 10. Class 0 of a one-logit model is read as -z.
A mask without a pixel occludes nothing: NaN, with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor, nn

from heatproof.errors import InputError
from heatproof.explain.baselines import baseline_images, mixed
from heatproof.metrics.agreement import Correlation, rank_correlation
from heatproof.metrics.kit import Cause, Passes, PerImage, align
from heatproof.models.model import Model, as_model
from heatproof.models.queue import Queue
from heatproof.models.running import at_least_float, frozen_eval
from heatproof.models.targets import bind_targets
from heatproof.registry import metric
from heatproof.types import ArrayLike, Images, per_map, size_of

NO_PIXEL = "the mask has no pixel, so nothing is occluded"


def part_occlusion(
    masks: ArrayLike | Mapping[str, ArrayLike],
    targets: ArrayLike | None = None,
    *,
    model: Model | nn.Module,
    images: Images,
    fill: str = "blur",
    seed: int = 0,
    **passes: Unpack[Passes],
) -> PerImage:
    """Fall of the target's logit when a part of the images is occluded.

    Args:
        masks: "b H W" or one "H W" (any size; resized to the nearest pixel), or a dict of them by part. Each
            image is run once whole and once per part, all in one queue.
        targets: the class, one or one per image; the prediction where None.
        model, images: the network, and its images, as for hp.explain.
        fill: "blur", "black", "mean" or "noise", as baseline of insertion_deletion.
        seed: of noise.
        passes: batch_size and progress, as for hp.explain.

    Returns:
        drop, or drop_<part> of each part.
    """
    model = as_model(model)
    whole = at_least_float(model.check_images(images).to(model.device))
    model, targets = bind_targets(model, whole, targets)
    parts = (
        {f"drop_{name}": mask for name, mask in masks.items()}
        if isinstance(masks, Mapping)
        else {"drop": masks}
    )
    if not parts:
        raise InputError("masks is an empty dict; give at least one part, such as {'finder': mask}")
    size, count = size_of(whole), len(whole)
    hidden = torch.stack(
        [align(mask, size, whole, name).expand(count, *size) for name, mask in parts.items()]
    )
    filled = baseline_images(model, whole, fill, seed)

    def make(start: int, stop: int) -> Tensor:
        jobs = torch.arange(start, stop, device=whole.device)
        rows, part = jobs % count, jobs // count - 1  # -1: the whole image
        covered = hidden[part.clamp(min=0), rows]
        covered = covered & per_map(part >= 0, covered)
        return mixed(covered, filled, whole, rows)

    with frozen_eval(model.module):
        queue = Queue(model, size, **passes)
        logits = queue.predict(count * (1 + len(parts)), make, lambda logits, start, stop: logits)
    chosen = model.check_targets(targets, logits[:count])
    scores = model.scores(logits, chosen.repeat(1 + len(parts))).view(-1, count)
    drops = dict(zip(parts, scores[0] - scores[1:], strict=True))
    empty = ~hidden.flatten(2).any(2)
    return PerImage(drops, [Cause(NO_PIXEL, gone, (name,)) for name, gone in zip(parts, empty, strict=True)])


def occlusion_correlation(mass: ArrayLike, drop: ArrayLike) -> Correlation:
    """Spearman's rho, p and n of a part's mass (FMR, TMR) with the drop of the logit, over images.

    Args:
        mass, drop: one per image; images for which either is NaN are left out of n.

    >>> occlusion_correlation([0.1, 0.4, 0.2], [1.0, 3.0, 2.0])[::2]
    (1.0, 3)
    """
    return rank_correlation(mass, drop, ("mass", "drop"))


metric(
    "occlusion_drop", needs=("model", "images", "masks"), cite="chakraborty2025cambench",
    about="Fall of the class's logit when a part of the image is occluded.", family="Causes",
    not_in_a_run="it occludes one named part; call hp.metrics for it", volumes=True,
)(part_occlusion)  # fmt: skip
metric(
    "occlusion_correlation", needs=("scores",), level="checkpoint", higher_is_better=True, bounds=(-1.0, 1.0),
    cite="chakraborty2025cambench", family="Causes",
)(occlusion_correlation)  # fmt: skip
