"""Adversarial fragility: the least alike map within reach of an invisible change that keeps the answer.

Noise of random signs (`fragility`) moves a map a little; a change that is searched for can move it far
(ghorbani2019fragile). For every picture, sign-gradient steps inside the ball |d| <= epsilon lower the
similarity of a map to the original's; a step that changes the predicted class is taken back and halved. What
is scored is the found picture: SSIM and rank correlation of every method's map with the original's.

    x_{t+1} = clip(x_t - a sign(gradient of cos(S(x_t), S(x)))) to x +- epsilon,   a = 2.5 epsilon / steps

S is a map with a gradient of its own: for CAMs the weighted sum of Grad-CAM at their layer, for all others
the gradient at the input, with ReLUs rounded to softplus as in the paper, since a ReLU's second derivative is
0. So one search serves all CAMs and one all others, however expensive they are, and each method is attacked
through its nearest relative: a low score shows that a map can be moved, a high one that this search did not.

Deviations: the paper's losses (top pixels, centre of mass, a target map) are replaced by one, the cosine
between the maps. The search starts at the first draw of `fragility`'s noise, at the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.errors import InputError
from heatproof.explain.api import explain, read_methods
from heatproof.explain.rules import RECTIFIERS, Rule, Rules, attend, rectifies
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.kit import NOT_FINITE, Passes, refuse_volumes
from heatproof.metrics.results import Cause, PerImage
from heatproof.metrics.sanity import CHANGED, KINDS, Layers, Methods, value_range
from heatproof.models.capture import capture
from heatproof.models.heads import Columns
from heatproof.models.layers import layout_of
from heatproof.models.model import Model, as_model
from heatproof.models.queue import Queue
from heatproof.models.running import frozen_eval
from heatproof.models.tap import tap
from heatproof.models.targets import bind_targets, unbind_targets
from heatproof.registry import metric
from heatproof.types import Images, size_of

ROUNDING = 20.0  # how sharp the softplus is, in deviations of the values it takes
Look = Callable[
    [Tensor, Tensor], tuple[Tensor, Tensor]
]  # images, classes -> a map "b n" with a graph, logits


@metric(
    "adversarial_fragility",
    needs=("model", "images"),
    reruns=True,
    needs_gradients=True,
    higher_is_better=True,
    bounds=(-1.0, 1.0),
    cite="ghorbani2019fragile",
    family="Sanity",
    floors=(),  # a map that ignores the network is perfectly stable
    question="map",
    parts={
        "ssim": "stable under the worst change found (SSIM)",
        "spearman": "stable under the worst change found (ranks)",
    },
    call=lambda function, scene, options: function(
        list(scene.maps), model=scene.model, images=scene.batch.images, layer=scene.layer,
        **scene.passes, **options,
    ),
)  # fmt: skip
def adversarial_fragility(
    methods: Methods = "gradcam", *, model: Model | nn.Module, images: Images, epsilon: float = 2 / 255,
    steps: int = 10, layer: Layers = None, seed: int = 0, **passes: Unpack[Passes],
) -> dict[str, PerImage]:  # fmt: skip
    """Similarity of maps of the predicted class under a searched change that leaves the prediction as it is.

    Args:
        methods, model, images: as for fragility.
        epsilon: how far a pixel may move, on the scale where pictures run from 0 to 1.
        steps: of the search, each a forward pass and a backward pass through it.
        layer, seed, passes: as for fragility; the seed is that of the noise the search starts with.

    Returns:
        ssim and spearman of the maps with the original ones, and kept, whether a change was found that keeps
        the prediction, by method.
    """
    if not epsilon > 0 or not isinstance(steps, int) or steps < 1:
        raise InputError(f"adversarial_fragility needs epsilon > 0 and steps >= 1; got {epsilon} and {steps}")
    model = as_model(model)
    pictures = model.check_images(images).to(model.device)
    refuse_volumes("adversarial_fragility", size_of(pictures))
    calls = read_methods(methods, again=True)
    model, columns = bind_targets(model, pictures, None)
    cams = [c.text for c in calls if {"activations", "gradients", "scales"} & set(c.entry.needs)]
    result: dict[str, PerImage] = {}
    for names in (cams, [c.text for c in calls if c.text not in cams]):
        if names:
            at = _layer(model, pictures, layer) if names is cams else None
            found = _search(model, pictures, at, epsilon, steps, seed, passes, columns)
            result |= _scored(model, pictures, found, names, layer, seed, passes)
    return {call.text: result[call.text] for call in calls}


class Searched(NamedTuple):
    """The least alike pictures that were found, and where there is one that keeps the prediction."""

    pictures: Tensor
    kept: Tensor


def _scored(
    model: Model,
    pictures: Tensor,
    found: Searched,
    names: list[str],
    layer: Layers,
    seed: int,
    passes: Passes,
) -> dict[str, PerImage]:
    shown = pictures, found.pictures
    before, after = (
        explain(model, one, names, layer=layer, seed=seed, allow_nan=True, **passes) for one in shown
    )
    scores = {}
    for name, maps in after.items():
        same = (maps.explained == before[name].explained) & found.kept.to(maps.explained.device)
        alike = map_similarity(before[name], maps)
        values = {kind: alike[kind] for kind in KINDS} | {"kept": same.float()}
        undefined = Cause(CHANGED, ~same | alike["ssim"].isnan() | alike["spearman"].isnan(), KINDS)
        scores[name] = PerImage(values, [*(c for c in alike.causes if c.sentence == NOT_FINITE), undefined])
    return scores


def _search(
    model: Model, pictures: Tensor, layer: str | None, epsilon: float, steps: int, seed: int, passes: Passes,
    columns: Columns | None = None,
) -> Searched:  # fmt: skip
    """Sign-gradient steps, each picture on its own, the best of those that keep the prediction kept."""
    reach = (epsilon * value_range(model, pictures)).expand_as(pictures)
    signs = np.random.default_rng((seed, 0)).integers(0, 2, pictures.shape[1:]) * 2 - 1
    noise = torch.from_numpy(signs).to(pictures)
    look: Look = partial(_gradient, model) if layer is None else partial(_cam, model, layer)
    parts: list[Searched] = []

    def work(start: int, stop: int) -> Searched:
        images, ball = pictures[start:stop], reach[start:stop]
        with torch.no_grad():
            before = model.forward(model.ready(images))
            classes = model.predicted(before) if columns is None else columns.numbers[start:stop]
        with torch.inference_mode(False), torch.enable_grad():
            original = look(images.clone(), classes)[0].detach()
            again = partial(_again, look, classes)
            holds = partial(model.same, before, targets=classes)
            return _steps(again, holds, images, original, ball, noise * ball, steps)

    size = (int(pictures.shape[-2]), int(pictures.shape[-1]))
    with frozen_eval(model.module):
        Queue(model, size, passes.get("batch_size"), passes.get("progress")).each(
            len(pictures), work, parts.append
        )
    return Searched(torch.cat([part.pictures for part in parts]), torch.cat([part.kept for part in parts]))


def _again(look: Look, classes: Tensor, shown: Tensor) -> tuple[Tensor, Tensor]:
    return look(shown, classes)


def _steps(
    look: Callable[[Tensor], tuple[Tensor, Tensor]],
    holds: Callable[[Tensor], Tensor],
    images: Tensor,
    original: Tensor,
    ball: Tensor,
    start: Tensor,
    steps: int,
) -> Searched:
    change, tried = torch.zeros_like(start), start
    downhill = start.sign()
    stride = 2.5 * ball / steps
    best, lowest = images.clone(), images.new_full((len(images),), torch.inf)
    for step in range(steps + 1):
        shown = (images + tried).detach()
        seen, logits = look(shown)
        alike = F.cosine_similarity(seen, original)
        (slope,) = torch.autograd.grad(alike.sum(), shown) if step < steps else (downhill,)
        held = holds(logits.detach())
        better = held & (alike.detach().to(lowest) < lowest)
        best[better], lowest[better] = shown.detach()[better], alike.detach().to(lowest)[better]
        change[held], downhill[held] = tried[held], -slope.sign()[held].to(downhill)
        stride = torch.where(held[:, None, None, None], stride, stride / 2)
        tried = torch.maximum(torch.minimum(change + stride * downhill, ball), -ball)
    return Searched(best, lowest < torch.inf)


def _layer(model: Model, pictures: Tensor, layer: Layers) -> str | None:
    """Where CAMs look."""
    with frozen_eval(model.module):
        return capture(
            unbind_targets(model), pictures[:1], needs=frozenset({"activations"}), layer=layer
        ).layer


def _cam(model: Model, layer: str, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    inputs = model.ready(images.requires_grad_())
    with Rules(SMOOTH), tap(model.module, (layer,), True, model.facts.layer_runs) as taken:
        logits = model.forward(inputs)
    output = taken.outputs[layer]
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
