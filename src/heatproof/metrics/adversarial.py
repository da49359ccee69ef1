"""Adversarial fragility: the least similar map under an invisible change that keeps the prediction.

Noise of random signs (`fragility`) changes a map a little; a searched change can change it much
(ghorbani2019fragile). For every image, sign-gradient steps inside the ball |d| <= epsilon lower the
similarity of a map to the original's; a step that changes the predicted class is undone and halved. Scores
are SSIM and rank correlation of every method's map of the resulting image with the original's.

    x_{t+1} = clip(x_t - a sign(gradient of cos(S(x_t), S(x)))) to x +- epsilon,   a = 2.5 epsilon / steps

S is a differentiable map: for CAMs the weighted sum of Grad-CAM at their layer, for all others the gradient
at the input, with ReLUs replaced by softplus as in the paper, since a ReLU's second derivative is 0. One
search serves all CAMs and one all other methods, however expensive they are. A low score shows that a map can
be changed, a high one only that this search did not succeed.

Deviations: the paper's losses (top pixels, centre of mass, a target map) are replaced by one, the cosine
between the maps. The search starts at the first draw of `fragility`'s noise, at the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.errors import InputError
from heatproof.explain.api import explain, read_methods
from heatproof.explain.rules import RECTIFIERS, Rule, Rules, attend, rectifies
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.kit import NOT_FINITE, Passes, bound, refuse_volumes
from heatproof.metrics.results import Cause, PerImage
from heatproof.metrics.sanity import CHANGED, KINDS, Layers, Methods, in_a_run, value_range
from heatproof.models.capture import capture, tap
from heatproof.models.heads import Columns
from heatproof.models.layers import layout_of
from heatproof.models.model import Model, Queue, unbind_targets
from heatproof.models.running import frozen_eval
from heatproof.registry import metric
from heatproof.types import Images, size_of

Saliency = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # images, classes -> map "b n", logits
ROUNDING = 20.0  # how sharp the softplus is, in deviations of the values it takes


@metric(
    "adversarial_fragility", needs=("model", "images"), reruns=True, needs_gradients=True,
    higher_is_better=True, bounds=(-1.0, 1.0), cite="ghorbani2019fragile", family="Sanity", question="map",
    floors=(),  # maps that ignore the network are perfectly stable, so control maps are no reference
    parts={"ssim": "stable under the worst change found (SSIM)",
           "spearman": "stable under the worst change found (ranks)"},
    call=in_a_run,
)  # fmt: skip
def adversarial_fragility(
    methods: Methods = "gradcam", *, model: Model | nn.Module, images: Images, epsilon: float = 2 / 255,
    steps: int = 10, layer: Layers = None, seed: int = 0, **passes: Unpack[Passes],
) -> dict[str, PerImage]:  # fmt: skip
    """Similarity of maps of the predicted class under a searched change that keeps the prediction.

    Args:
        methods, model, images: as for fragility.
        epsilon: largest change of a pixel, for images between 0 and 1.
        steps: of the search, each a forward pass and a backward pass through it.
        layer, seed, passes: as for fragility; the seed is that of the noise the search starts with.

    Returns:
        By method: ssim and spearman of the maps with the original ones, and kept, whether a change was found
        that keeps the prediction.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2))
        >>> scores = adversarial_fragility("gradient", model=network, images=torch.rand(1, 3, 5, 5), steps=1)
        >>> list(scores["gradient"])
        ['ssim', 'spearman', 'kept']
    """
    if not epsilon > 0 or not isinstance(steps, int) or steps < 1:
        raise InputError(f"adversarial_fragility needs epsilon > 0 and steps >= 1; got {epsilon} and {steps}")
    model, inputs, columns = bound(model, images)
    refuse_volumes("adversarial_fragility", size_of(inputs))
    calls = read_methods(methods, again=True)
    cams = [c.text for c in calls if {"activations", "gradients", "scales"} & set(c.entry.needs)]
    result: dict[str, PerImage] = {}
    for names in (cams, [c.text for c in calls if c.text not in cams]):
        if not names:
            continue
        saliency = partial(_gradient, model)
        if names is cams:
            saliency = partial(_cam, model, _layer(model, inputs, layer))
        changed, succeeded = _search(model, inputs, saliency, epsilon, steps, seed, passes, columns)
        before, after = (
            explain(model, given, names, layer=layer, seed=seed, allow_nan=True, **passes)
            for given in (inputs, changed)
        )
        for name, maps in after.items():
            same = (maps.explained == before[name].explained) & succeeded.to(maps.explained.device)
            alike = map_similarity(before[name], maps)
            values = {kind: alike[kind] for kind in KINDS} | {"kept": same.float()}
            undefined = Cause(CHANGED, ~same | alike["ssim"].isnan() | alike["spearman"].isnan(), KINDS)
            infinite = [cause for cause in alike.causes if cause.sentence == NOT_FINITE]
            result[name] = PerImage(values, [*infinite, undefined])
    return {call.text: result[call.text] for call in calls}


def _search(
    model: Model, inputs: Tensor, saliency: Saliency, epsilon: float, steps: int, seed: int, passes: Passes,
    columns: Columns | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The least similar images that keep the prediction, and "b" bool: whether there is one."""
    reach = (epsilon * value_range(model, inputs)).expand_as(inputs)
    signs = np.random.default_rng((seed, 0)).integers(0, 2, inputs.shape[1:]) * 2 - 1
    noise = torch.from_numpy(signs).to(inputs)
    parts: list[tuple[Tensor, Tensor]] = []

    def work(start: int, stop: int) -> tuple[Tensor, Tensor]:
        images, ball = inputs[start:stop], reach[start:stop]
        with torch.no_grad():
            before = model.forward(model.ready(images))
            classes = model.predicted(before) if columns is None else columns.numbers[start:stop]
        best, lowest = images.clone(), images.new_full((len(images),), torch.inf)
        tried, stride = noise * ball, 2.5 * ball / steps
        change, downhill = torch.zeros_like(tried), tried.sign()
        with torch.inference_mode(False), torch.enable_grad():
            original = saliency(images.clone(), classes)[0].detach()
            for step in range(steps + 1):
                given = (images + tried).detach()
                current, logits = saliency(given, classes)
                alike = F.cosine_similarity(current, original)
                (slope,) = torch.autograd.grad(alike.sum(), given) if step < steps else (downhill,)
                same = model.same(before, logits.detach(), targets=classes)
                better = same & (alike.detach().to(lowest) < lowest)
                best[better], lowest[better] = given.detach()[better], alike.detach().to(lowest)[better]
                change[same], downhill[same] = tried[same], -slope.sign()[same].to(downhill)
                stride = torch.where(same[:, None, None, None], stride, stride / 2)
                tried = torch.maximum(torch.minimum(change + stride * downhill, ball), -ball)
        return best, lowest < torch.inf

    with frozen_eval(model.module):
        Queue(model, size_of(inputs), passes.get("batch_size"), passes.get("progress")).each(
            len(inputs), work, parts.append
        )
    images, succeeded = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(succeeded)


def _layer(model: Model, inputs: Tensor, layer: Layers) -> str:
    """The layer that CAMs read."""
    needs = frozenset({"activations"})
    with frozen_eval(model.module):
        name = capture(unbind_targets(model), inputs[:1], needs=needs, layer=layer).layer
    assert name is not None
    return name


def _cam(model: Model, layer: str, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    inputs = model.ready(images.requires_grad_())
    with Rules(SMOOTH), tap(model.module, (layer,), True, model.facts.layer_runs) as taken:
        logits = model.forward(inputs)
    output = taken[layer]
    (gradient,) = torch.autograd.grad(model.scores(logits, classes).sum(), output, create_graph=True)
    layout = layout_of(output, inputs, model.module)
    assert layout is not None
    weights = layout.picture(gradient).mean((2, 3), keepdim=True)
    return (weights * layout.picture(output)).sum(1).flatten(1), logits


def _gradient(model: Model, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    inputs = model.ready(images.requires_grad_())
    with Rules(ROUNDED):
        rounded = model.forward(inputs)
    score = model.scores(rounded, classes).sum()
    (gradient,) = torch.autograd.grad(score, inputs, create_graph=True)
    with torch.no_grad():
        logits = model.forward(model.ready(images))
    return gradient.abs().sum(1).flatten(1), logits


def _softplus(function: Any, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not rectifies(function, inputs, *args, **kwargs):
        output: Tensor = function(inputs, *args, **kwargs)
        return output
    sharpness = ROUNDING / inputs.detach().flatten(1).std(1).clamp(min=1e-6)
    sharpness = sharpness.view(-1, *[1] * (inputs.ndim - 1))
    return F.softplus(inputs * sharpness) / sharpness


# Fused attention has no second derivative.
SMOOTH: dict[str, Rule] = {
    "scaled_dot_product_attention": lambda _fused, *args, **kwargs: attend(*args, **kwargs)
}
ROUNDED: dict[str, Rule] = SMOOTH | dict.fromkeys(RECTIFIERS, _softplus)
