"""Sanity checks: dependence of maps on the weights, and stability under changes that do not matter.

parameter_randomisation: give the network's modules fresh random weights, from the head down, and compare the
map of each half-random network with the original's. A map that explains what was learned must change; one
that stays (as an edge detector does) explains the image. (adebayo2018sanity)

input_shift: add a constant to every pixel and take it back in the first layer's bias. Both networks are the
same function of the image, so the map must stay: similarity 1. (kindermans2019unreliability)

fragility: add noise too small to change the prediction; the map should stay. (ghorbani2019fragile)

adversarial_fragility: search for the change of this size under which the map stays least similar; see below.

model_edit: edit the network where the effect on its answer is known, and compare the maps before and after:
    zeroed = similarity after the layer's weakest channel was set to 0 - the same after its strongest one
    swapped = similarity of the edited network's map of class c to the map of class d before - to that of c
The strongest channel contributes most to the logit (sum of gradient times activation), the weakest least. In
the second edit the last layer's weights of c and of the runner-up d are exchanged, so that the logit of c is
what that of d was. A map that ignores the network scores 0 in both. (chakraborty2025cambench names such tests
as future work and defines none.)

Similarity is SSIM (local5) and Spearman's rank correlation of maps at image size; where a map is constant
both are NaN, with a reason. The user's model is never changed: weights are redrawn in a deep copy.

Deviations. Randomised modules start anew as their own reset_parameters has it, statistics of normalisation
layers included; parameters of modules without one are drawn from a normal distribution with the mean and
deviation they had. The class explained stays the original network's. A bias per channel undoes a shift only
without zero padding, which does not shift along; here the first layer's response to the shift is measured and
subtracted place by place, which away from the border is that bias. The copy's preprocessing shifts along, so
that methods that look at the image see the same one. Noise is random signs, a baseline of Ghorbani et al.,
who search for the worst.

Adversarial fragility: noise of random signs changes a map a little; a searched change can change it much
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

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.errors import InputError
from heatproof.explain.api import begin_ahead, explain, read_methods, with_sufficient_repeats
from heatproof.explain.rules import RECTIFIERS, Rule, Rules, attend, rectifies
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.kit import NOT_FINITE, BatchContext, Passes, bound, cached, members, refuse_volumes
from heatproof.metrics.results import Cause, Curve, PerImage
from heatproof.models.capture import capture, tap
from heatproof.models.derived import copy_of, from_the_head, swap_classes, twin_of, without_channel
from heatproof.models.heads import Columns, Multilabel, OneOfMany
from heatproof.models.layers import layout_of
from heatproof.models.model import Model, Queue, all_logits, unbind_targets
from heatproof.models.running import frozen_eval
from heatproof.registry import metric
from heatproof.types import ArrayLike, Images, Maps, per_map, size_of

Methods = str | Sequence[str]
Layers = str | Sequence[str] | None
KINDS = ("ssim", "spearman")
NEVER_DEFINED = "the similarity is not defined at any depth"
NOT_UNDONE = "no bias of the first layer undoes the shift: the logits differ"
CHANGED = "the noise changed the prediction or left no map to compare, in every draw"
NO_CLASSES = "model_edit exchanges two classes, and the network's head has none"
NOT_SWAPPED = "no two rows of the last layer's weights exchange the classes' logits"
BLANK_EDIT = "a map is constant before or after the edit"
TOLERANCE = 1e-3  # of the largest logit; rounding alone stays far below
Known = dict[Any, dict[str, Maps]]  # maps of the unchanged network, by the arguments of explain
Saliency = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # images, classes -> map "b n", logits
ROUNDING = 20.0  # how sharp the softplus is, in deviations of the values it takes


def in_a_run(
    function: Callable[..., Any], context: BatchContext, options: dict[str, Any]
) -> dict[str, PerImage]:
    """Call a metric that runs methods again; without `targets` it explains the predicted class."""
    named: dict[str, Any] = {"model": context.model, "images": context.batch.images, "layer": context.layer}
    if "targets" in inspect.signature(function).parameters:
        named |= {"targets": context.classes, "known": context.cache("maps of the unchanged network")}
    return dict(function(list(context.maps), **named, **context.passes, **options))


def _titles(text: str) -> dict[str, str]:
    return {"ssim": f"{text} (SSIM)", "spearman": f"{text} (ranks)"}


_metric = partial(  # maps that ignore the network are perfectly stable, so control maps are no reference
    metric, needs=("model", "images"), bounds=(-1.0, 1.0), family="Sanity", floors=(), question="map",
    reruns=True, volumes=True, call=in_a_run,
)  # fmt: skip


def parameter_randomisation(
    methods: Methods = "gradcam", targets: ArrayLike | None = None, *, model: Model | nn.Module,
    images: Images, depths: int | None = 10, budget: str = "enough", layer: Layers = None, seed: int = 0,
    known: Known | None = None, **passes: Unpack[Passes],
) -> dict[str, Curve]:  # fmt: skip
    """Similarity of maps to the original's at each depth, as modules become random from the head down.

    Args:
        methods: names, with optional options.
        targets: the explained class, one or one per image; default: the prediction.
        model, images, layer, passes: as for hp.explain; passes are batch_size and progress.
        depths: number of depths, from the head alone to the whole network, evenly spread over its
            modules; None: every module. Each depth is one shared pass for all methods.
        budget: "enough": methods that repeat a pass do so only as often as the ranks of their pixels require;
            "full": as often as by default.
        seed: of the weights, and of methods that draw.
        known: cache of maps of the unchanged network; a run shares it between the metrics of one batch.

    Returns:
        By method: curves ssim and spearman, "b depths"; x: the module down to which the network is random,
        with `randomised`, the number of these modules. `scores` are the means over the depths.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(75, 2))
        >>> curves = parameter_randomisation("gradient", model=network, images=torch.rand(2, 3, 5, 5))
        >>> curves["gradient"].x, curves["gradient"].ssim.shape
        (['1'], torch.Size([2, 1]))
    """
    if depths is not None and (not isinstance(depths, int) or depths < 1):
        raise InputError(f"depths must be a whole number from 1, or None for every module; got {depths!r}")
    model, inputs, targets = bound(model, images, targets)
    explain_all = _Explain(methods, budget, layer=layer, seed=seed, **passes)
    before = explain_all.original(model, inputs, targets, known)
    explained = next(iter(before.values())).explained
    twin = twin_of(model, inputs)
    names, random = twin.names, twin.random(seed)
    stops, done = _stops(len(names), depths), 0
    similarity: dict[str, list[PerImage]] = {method: [] for method in before}
    for stop in stops:
        twin.takes(random, names[done:stop])
        done = stop
        for method, maps in explain_all(twin.copy, inputs, explained).items():
            similarity[method].append(map_similarity(before[method], maps))
    modules = [names[stop - 1] or "(top)" for stop in stops]
    result = {}
    for method, every in similarity.items():
        values = {kind: torch.stack([own[kind] for own in every], 1) for kind in KINDS}
        summary = partial(_mean_over_depths, [cause for cause in every[0].causes if cause.names])
        result[method] = Curve(modules, values, summary, {**values, "randomised": stops})
    return result


def _mean_over_depths(causes: Sequence[Cause], curve: Curve) -> PerImage:
    """SSIM and Spearman, "b", averaged over the depths at which they are defined."""
    never = [Cause(NEVER_DEFINED, table.isnan().all(1), (kind,)) for kind, table in curve.values.items()]
    means = {kind: table.T.contiguous().nanmean(0) for kind, table in curve.values.items()}
    return PerImage(means, [*causes, *never])


def _means(curves: Mapping[str, Curve], name: str) -> dict[str, PerImage]:
    return {method: curve.scores for method, curve in curves.items()}


RETURNS = 'By method: ssim and spearman, each "b", means over the depths.'
EXAMPLE = """
>>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(75, 2))
>>> scores = randomisation("gradient", model=network, images=torch.rand(2, 3, 5, 5), depths=1)
>>> scores["gradient"]["ssim"].shape""".strip()
_score = members(_metric, parameter_randomisation, _means, RETURNS, EXAMPLE)
randomisation = _score(
    "randomisation", "Similarity of maps to the original's as modules become random from the head down.",
    "torch.Size([2])", higher_is_better=False, cite="adebayo2018sanity", needs_weights=True,
    parts=_titles("unchanged by random weights"),
)  # fmt: skip


class _Explain:
    """Explain images by all methods, under the names as given."""

    def __init__(self, methods: Methods, budget: str, **options: Any) -> None:
        if budget not in ("enough", "full"):
            raise InputError(f"budget must be 'enough' or 'full', got {budget!r}")
        enough = with_sufficient_repeats(methods)
        self.texts, self.options = enough if budget == "enough" else {text: text for text in enough}, options

    def __call__(self, model: Model, inputs: Tensor, targets: Any) -> dict[str, Maps]:
        maps = explain(model, inputs, list(self.texts.values()), targets, allow_nan=True, **self.options)
        return {text: maps[fewer] for text, fewer in self.texts.items()}

    def original(self, model: Model, inputs: Tensor, targets: Any, known: Known | None) -> dict[str, Maps]:
        """Maps of the unchanged network, from the cache if the targets are known."""
        if not isinstance(targets, Tensor) or not targets.is_cpu:
            return self(model, inputs, targets)
        key = *self.texts.items(), *targets.tolist(), self.options["seed"], repr(self.options["layer"])
        return cached(known, key, lambda: self(model, inputs, targets))


def _stops(count: int, depths: int | None) -> list[int]:
    """Number of random modules at each depth, from the head alone to all."""
    if depths is None or depths >= count:
        return list(range(1, count + 1))
    return sorted({int(stop) for stop in np.linspace(1, count, depths).round()}) if depths > 1 else [count]


@_metric("fragility", higher_is_better=True, cite="ghorbani2019fragile", parts=_titles("stable under noise"))
def fragility(
    methods: Methods = "gradcam", *, model: Model | nn.Module, images: Images, epsilon: float = 2 / 255,
    draws: int = 3, budget: str = "enough", layer: Layers = None, seed: int = 0, **passes: Unpack[Passes],
) -> dict[str, PerImage]:  # fmt: skip
    """Similarity of maps of the predicted class under noise that keeps the prediction.

    Args:
        methods, model, images: as for parameter_randomisation.
        epsilon: change of each pixel, up or down at random, for images between 0 and 1.
        draws: number of noise patterns, which follow from the seed and are the same for every image.
        budget, layer, seed, passes: as for parameter_randomisation.

    Returns:
        By method: ssim and spearman, means over the draws that keep the prediction, and kept, their share.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(75, 2))
        >>> scores = fragility("gradient", model=network, images=torch.rand(2, 3, 5, 5), draws=1)
        >>> scores["gradient"]["kept"].shape
        torch.Size([2])
    """
    if not epsilon > 0 or not isinstance(draws, int) or draws < 1:
        raise InputError(f"fragility needs epsilon > 0 and draws >= 1; got {epsilon} and {draws}")
    model, inputs, targets = bound(model, images)
    explain_all = _Explain(methods, budget, layer=layer, seed=seed, **passes)
    reach = value_range(model, inputs)

    def noisy(draw: int) -> Tensor:
        signs = np.random.default_rng((seed, draw)).integers(0, 2, inputs.shape[1:]) * 2 - 1
        return inputs + epsilon * reach * torch.from_numpy(signs).to(inputs)

    for draw in range(draws) if inputs.is_cuda else ():  # segments in threads, ahead of the GPU
        begin_ahead(methods, model, noisy(draw), seed)
    before = explain_all(model, inputs, targets)
    tables: dict[str, list[Tensor]] = {method: [] for method in before}
    causes: list[Cause] = []
    for draw in range(draws):
        changed = noisy(draw)
        stayed = torch.ones(len(inputs), dtype=torch.bool)
        if not isinstance(model.head, OneOfMany):  # whose prediction is the class that is explained
            first, then = (all_logits(model, given, passes.get("batch_size")) for given in (inputs, changed))
            stayed = model.same(first, then, model.check_targets(targets, first))
        for method, maps in explain_all(model, changed, targets).items():
            same = (maps.explained == before[method].explained) & stayed.to(maps.explained.device)
            similar = map_similarity(before[method], maps)
            causes = [cause for cause in similar.causes if cause.names]
            rows = [similar[kind].masked_fill(~same, torch.nan) for kind in KINDS]
            tables[method].append(torch.stack([*rows, same.float()]))
    result = {}
    for method, draws_of_method in tables.items():
        table = torch.stack(draws_of_method)  # "draws 3 b"
        ssim, spearman = table[:, :2].nanmean(0)
        scores = {"ssim": ssim, "spearman": spearman, "kept": table[:, 2].mean(0)}
        gone = [Cause(CHANGED, scores[kind].isnan(), (kind,)) for kind in KINDS]
        result[method] = PerImage(scores, [*causes, *gone])
    return result


@_metric(
    "input_shift", higher_is_better=True, cite="kindermans2019unreliability", needs_weights=True,
    parts=_titles("stable under a constant shift"),
)  # fmt: skip
def input_shift(
    methods: Methods = "gradcam", targets: ArrayLike | None = None, *, model: Model | nn.Module,
    images: Images, shift: float = 1.0, budget: str = "enough", layer: Layers = None, seed: int = 0,
    known: Known | None = None, **passes: Unpack[Passes],
) -> dict[str, PerImage]:  # fmt: skip
    """Similarity of maps before and after a constant shift that the first layer undoes; 1 is correct.

    Args:
        methods, targets, model, images: as for parameter_randomisation.
        shift: added to every value of the model-ready images.
        budget, layer, seed, known, passes: as for parameter_randomisation.

    Returns:
        By method: ssim and spearman, each "b".

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2))
        >>> scores = input_shift("gradient", model=network, images=torch.rand(2, 3, 5, 5))
        >>> bool((scores["gradient"]["spearman"] > 0.99).all())
        True
    """
    model, inputs, targets = bound(model, images, targets)
    explain_all = _Explain(methods, budget, layer=layer, seed=seed, **passes)
    before = explain_all.original(model, inputs, targets, known)
    shifted, twin = inputs + shift, _shifted_copy(model, inputs, shift)
    logits = [all_logits(m, x, passes.get("batch_size")) for m, x in ((model, inputs), (twin, shifted))]
    undone = (logits[0] - logits[1]).abs().amax(1) <= TOLERANCE * logits[0].abs().amax(1).clamp(min=1)
    after = explain_all(twin, shifted, next(iter(before.values())).explained)
    scores = {method: map_similarity(before[method], maps) for method, maps in after.items()}
    return {name: PerImage(own, [Cause(NOT_UNDONE, ~undone), *own.causes]) for name, own in scores.items()}


@_metric(
    "model_edit", higher_is_better=True, bounds=(-2.0, 2.0), cite="chakraborty2025cambench",
    needs_gradients=True, floors=("random", "edges"),
    parts={"zeroed": "follows a removed channel", "swapped": "follows exchanged classes"},
)  # fmt: skip
def model_edit(
    methods: Methods = "gradcam", targets: ArrayLike | None = None, *, model: Model | nn.Module,
    images: Images, budget: str = "enough", layer: Layers = None, seed: int = 0, known: Known | None = None,
    **passes: Unpack[Passes],
) -> dict[str, PerImage]:  # fmt: skip
    """Whether maps follow edits of the network: a channel set to 0, the weights of two classes exchanged.

    Args:
        methods, targets, model, images: as for parameter_randomisation.
        budget, layer, seed, known, passes: as for parameter_randomisation.

    Returns:
        By method: zeroed and swapped, differences of rank correlations, each "b"; 0 for maps that ignore
        the network.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
        >>> scores = model_edit(["gradcam", "edges"], model=network, images=torch.rand(1, 3, 5, 5))
        >>> scores["edges"]["swapped"]
        tensor([0.])
    """
    model, inputs, targets = bound(model, images, targets)
    explain_all = _Explain(methods, budget, layer=layer, seed=seed, **passes)
    before = explain_all.original(model, inputs, targets, known)
    if not model.head.names_classes:
        undefined = torch.full((len(inputs),), math.nan)
        parts, cause = dict.fromkeys(("zeroed", "swapped"), undefined), Cause(NO_CLASSES, undefined.isnan())
        return {method: PerImage(parts, [cause]) for method in before}
    explained = next(iter(before.values())).explained.to(inputs.device)
    edited = replace(copy_of(model), accelerate=False)  # recorded passes would repeat an earlier edit
    with frozen_eval(edited.module):
        trace = capture(edited, inputs, explained, layer=layer)
    contributions, logits = trace.product.flatten(2).sum(2), trace.logits
    channels = {"strong": contributions.argmax(1), "weak": contributions.abs().argmin(1)}
    if logits.shape[1] == 1 and isinstance(model.head, Multilabel):
        raise InputError(f"model_edit exchanges two labels, and {model.name} has one; leave model_edit out")
    both = logits if logits.shape[1] > 1 else torch.cat([-logits, logits], 1)
    rivals = both.scatter(1, explained[:, None], -torch.inf).argmax(1)
    wanted, of_rivals = model.scores(logits, rivals), explain_all(model, inputs, rivals)
    head, tables, gaps = from_the_head(edited, inputs[:1])[0], dict[str, list[Tensor]](), list[Tensor]()
    for i, (own, rival) in enumerate(zip(explained.tolist(), rivals.tolist(), strict=True)):
        image, after = inputs[i : i + 1], dict[str, dict[str, Maps]]()
        for edit, chosen in channels.items():
            with without_channel(edited, image, str(trace.layer), int(chosen[i])):
                after[edit] = explain_all(edited, image, [own])
        swap_classes(edited, head, own, rival)
        after["swap"] = explain_all(edited, image, [own])
        gaps.append(edited.scores(edited.logits(image), explained[i : i + 1]).to(wanted) - wanted[i])
        swap_classes(edited, head, own, rival)
        for method, maps in before.items():
            pairs = (maps, "weak"), (maps, "strong"), (of_rivals[method], "swap"), (maps, "swap")
            similar = [map_similarity(old.take([i]), after[edit][method])["spearman"] for old, edit in pairs]
            tables.setdefault(method, []).append(torch.stack(similar))
    result = {}
    undone = torch.cat(gaps).abs() > TOLERANCE * logits.abs().amax(1).clamp(min=1)
    for method, rows in tables.items():
        weak, strong, new, old = torch.cat(rows, 1)
        scores = {"zeroed": weak - strong, "swapped": new - old}
        blank = [Cause(BLANK_EDIT, values.isnan(), (name,)) for name, values in scores.items()]
        result[method] = PerImage(scores, [Cause(NOT_SWAPPED, undone.to(weak.device), ("swapped",)), *blank])
    return result


def _shifted_copy(model: Model, images: Tensor, shift: float) -> Model:
    """The same function of shifted images: its first layer subtracts the effect of the shift."""
    twin = copy_of(model)
    parts = [twin.module.get_submodule(name) for name in from_the_head(twin, images[:1])]
    # A parent with weights of its own (class tokens) starts before its children but ends after them.
    first = next(part for part in reversed(parts) if not any(part.children()))
    outputs: list[Any] = []
    responses: list[Any] = []
    with first.register_forward_hook(lambda _module, _inputs, output: outputs.append(output)):
        for value in (0.0, shift):
            twin.logits(torch.full_like(images[:1], value))
            responses.append(outputs[-1])  # a pass that ran out of memory is repeated
    if all(isinstance(response, Tensor) for response in responses):
        response = responses[1] - responses[0]
        first.register_forward_hook(lambda _module, _inputs, output: output - response)
    usual = model.preprocess
    mean = tuple(m - shift * s for m, s in zip(usual.mean, usual.std, strict=True))
    return replace(twin, preprocess=replace(usual, mean=mean))


def value_range(model: Model, images: Tensor) -> Tensor:
    """Distance from black to white in model-ready values: per channel, or per image where it is unknown."""
    usual = model.preprocess
    if usual.channels == images.shape[1]:
        return 1 / per_map(torch.tensor(usual.std, device=images.device, dtype=images.dtype), images[0])
    low, high = images.flatten(1).aminmax(dim=1)
    return per_map(high - low, images)


@_metric(
    "adversarial_fragility", higher_is_better=True, cite="ghorbani2019fragile", needs_gradients=True,
    parts=_titles("stable under the worst change found"), volumes=False,
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
            len(inputs), work, parts.append, "gradients"
        )
    images, succeeded = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(succeeded)


def _layer(model: Model, inputs: Tensor, layer: Layers) -> str:
    """The layer that CAMs read."""
    with frozen_eval(model.module):
        name = capture(unbind_targets(model), inputs[:1], needs=frozenset({"activations"}), layer=layer).layer
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
    (gradient,) = torch.autograd.grad(model.scores(rounded, classes).sum(), inputs, create_graph=True)
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
