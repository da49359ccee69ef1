"""Is the map about the model at all, and does it stay where nothing that matters changes?

parameter_randomisation: give the network's modules fresh random weights, from the head down, and compare the
map of each half-random network with the original's. A map that explains what was learned must change; one
that stays (as an edge detector does) explains the picture. (adebayo2018sanity)

input_shift: add a constant to every pixel and take it back in the first layer's bias. Both networks are the
same function of the picture, so the map must stay: similarity 1. (kindermans2019unreliability)

fragility: add noise too small to change the prediction; the map should stay. (ghorbani2019fragile)

Similarity is SSIM (local5) and Spearman's rank correlation of maps at image size; where a map is constant
both are NaN, with a reason. The user's model is never changed: weights are redrawn in a deep copy.

Deviations. Randomised modules start anew as their own reset_parameters has it, statistics of normalisation
layers included; parameters of modules without one are drawn from a normal distribution with the mean and
deviation they had. The class explained stays the original network's. A bias per channel undoes a shift only
without zero padding, which does not shift along; here the first layer's response to the shift is measured and
subtracted place by place, which away from the border is that bias. The copy's preprocessing shifts along, so
that methods that look at the picture see the same one. Ghorbani et al. search for the worst noise; here it is
random signs, which they use as a baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.errors import InputError
from heatproof.explain.api import begin_ahead, explain, with_sufficient_repeats
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.kit import Cause, Passes, PerImage
from heatproof.metrics.scene import BatchContext
from heatproof.models.derived import copy_of, from_the_head, twin_of
from heatproof.models.heads.classes import OneOfMany
from heatproof.models.model import Model, as_model
from heatproof.models.queue import all_logits
from heatproof.models.targets import bind_targets
from heatproof.registry import metric
from heatproof.types import ArrayLike, Images, Maps, per_map

Methods = str | Sequence[str]
Layers = str | Sequence[str] | None
KINDS = ("ssim", "spearman")
NEVER_DEFINED = "the similarity is not defined at any depth"
NOT_UNDONE = "no bias of the first layer undoes the shift: the logits differ"
CHANGED = "the noise changed the prediction or left no map to compare, in every draw"
TOLERANCE = 1e-3  # of the largest logit; rounding alone stays far below
Known = dict[Any, dict[str, Maps]]  # maps of the network as it is, by what was asked for


class Depth(NamedTuple):
    """How alike the maps still are once `randomised` modules, down to `module`, are random."""

    module: str
    randomised: int
    similarity: dict[str, PerImage]  # by method: ssim, spearman, each "b"


@dataclass(frozen=True)
class Cascade:
    """Similarity to the original maps at each depth, head first."""

    depths: tuple[Depth, ...]

    def mean(self) -> dict[str, PerImage]:
        """By method: ssim and spearman, "b", averaged over the depths at which they are defined."""
        found = {}
        for method in self.depths[0].similarity:
            tables = {k: torch.stack([depth.similarity[method][k] for depth in self.depths]) for k in KINDS}
            never = [Cause(NEVER_DEFINED, table.isnan().all(0), (k,)) for k, table in tables.items()]
            of_one = [cause for cause in self.depths[0].similarity[method].causes if cause.names]
            found[method] = PerImage({k: t.nanmean(0) for k, t in tables.items()}, [*of_one, *never])
        return found


def parameter_randomisation(
    methods: Methods = "gradcam",
    targets: ArrayLike | None = None,
    *,
    model: Model | nn.Module,
    images: Images,
    depths: int | None = 10,
    budget: str = "enough",
    layer: Layers = None,
    seed: int = 0,
    known: Known | None = None,
    **passes: Unpack[Passes],
) -> Cascade:
    """Similarity of maps to the original's as modules become random from the head down.

    Args:
        methods: whose maps; names, with options where they have some.
        targets: the class that is explained, one or one per image; the prediction where None.
        model, images: as for hp.explain.
        depths: at how many depths to look, from the head alone to the whole network, evenly spread over its
            modules; every module where None. Each depth is one shared pass for all methods.
        budget: "enough": methods that repeat a pass do so no more often than the ranks of their pixels need;
            "full": as often as ever.
        layer: where CAMs look, as for hp.explain.
        seed: of the weights, and of methods that draw.
        known: maps of the network as it is that another check made of these images; what is made is put in.
        passes: batch_size and progress, as for hp.explain.
    """
    if depths is not None and (not isinstance(depths, int) or depths < 1):
        raise InputError(
            f"depths must be a whole number of at least 1, or None for every module; got {depths!r}"
        )
    model = as_model(model)
    pictures = model.check_images(images)
    made = _Maker(methods, budget, layer=layer, seed=seed, **passes)
    model, targets = bind_targets(model, pictures, targets)
    before = made.once(model, pictures, targets, known)
    explained = next(iter(before.values())).explained
    twin = twin_of(model, pictures)
    names, random = twin.names, twin.random(seed)
    found, done = [], 0
    for stop in _stops(len(names), depths):
        twin.takes(random, names[done:stop])
        done = stop
        after = made(twin.copy, pictures, explained)
        similarity = {method: map_similarity(before[method], maps) for method, maps in after.items()}
        found.append(Depth(names[stop - 1] or "(top)", stop, similarity))
    return Cascade(tuple(found))


class _Maker:
    """Explains a model's pictures by all methods, under the names that they were given."""

    def __init__(self, methods: Methods, budget: str, **options: Any) -> None:
        if budget not in ("enough", "full"):
            raise InputError(f"budget must be 'enough' or 'full', got {budget!r}")
        enough = with_sufficient_repeats(methods)
        self.texts, self.options = enough if budget == "enough" else {text: text for text in enough}, options

    def __call__(self, model: Model, pictures: Tensor, targets: Any) -> dict[str, Maps]:
        found = explain(model, pictures, list(self.texts.values()), targets, allow_nan=True, **self.options)
        return {text: found[fewer] for text, fewer in self.texts.items()}

    def once(self, model: Model, pictures: Tensor, targets: Any, known: Known | None) -> dict[str, Maps]:
        """The same for the network as it is, of which the next check need not make them again."""
        if known is None or not isinstance(targets, Tensor) or not targets.is_cpu:
            return self(model, pictures, targets)
        key = *self.texts.items(), *targets.tolist(), self.options["seed"], repr(self.options["layer"])
        if key not in known:
            known[key] = self(model, pictures, targets)
        return known[key]


def _stops(count: int, depths: int | None) -> list[int]:
    """How many modules are random at each depth: the first alone, all at last."""
    if depths is None or depths >= count:
        return list(range(1, count + 1))
    return sorted({int(stop) for stop in np.linspace(1, count, depths).round()}) if depths > 1 else [count]


def input_shift(
    methods: Methods = "gradcam",
    targets: ArrayLike | None = None,
    *,
    model: Model | nn.Module,
    images: Images,
    shift: float = 1.0,
    budget: str = "enough",
    layer: Layers = None,
    seed: int = 0,
    known: Known | None = None,
    **passes: Unpack[Passes],
) -> dict[str, PerImage]:
    """Similarity of maps before and after a constant shift that the first layer takes back; 1 is right.

    Args:
        methods, targets, model, images: as for parameter_randomisation.
        shift: added to every value of the model-ready images.
        budget, layer, seed, known, passes: as for parameter_randomisation.

    Returns:
        ssim and spearman, each "b", by method.
    """
    model = as_model(model)
    pictures = model.check_images(images).to(model.device)
    made = _Maker(methods, budget, layer=layer, seed=seed, **passes)
    model, targets = bind_targets(model, pictures, targets)
    before = made.once(model, pictures, targets, known)
    shifted, twin = pictures + shift, _shifted_copy(model, pictures, shift)
    logits = [all_logits(m, x, passes.get("batch_size")) for m, x in ((model, pictures), (twin, shifted))]
    gap = (logits[0] - logits[1]).abs().amax(1)
    undone = gap <= TOLERANCE * logits[0].abs().amax(1).clamp(min=1)
    after = made(twin, shifted, next(iter(before.values())).explained)
    found = {method: map_similarity(before[method], maps) for method, maps in after.items()}
    return {method: PerImage(one, [Cause(NOT_UNDONE, ~undone), *one.causes]) for method, one in found.items()}


def _shifted_copy(model: Model, images: Tensor, shift: float) -> Model:
    """The same function, of shifted images: its first layer subtracts what the shift adds."""
    twin = copy_of(model)
    parts = [twin.module.get_submodule(name) for name in from_the_head(twin, images[:1])]
    # A parent with weights of its own (class tokens) starts before its children but ends after them.
    first = next(part for part in reversed(parts) if not any(part.children()))
    outputs: list[Any] = []
    handle = first.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        for value in (0.0, shift):
            twin.logits(torch.full_like(images[:1], value))
    finally:
        handle.remove()
    if all(isinstance(output, Tensor) for output in outputs):
        response = outputs[1] - outputs[0]
        first.register_forward_hook(lambda _module, _inputs, output: output - response)
    kept = model.preprocess
    mean = tuple(m - shift * s for m, s in zip(kept.mean, kept.std, strict=True))
    return replace(twin, preprocess=replace(kept, mean=mean))


def fragility(
    methods: Methods = "gradcam",
    *,
    model: Model | nn.Module,
    images: Images,
    epsilon: float = 2 / 255,
    draws: int = 3,
    budget: str = "enough",
    layer: Layers = None,
    seed: int = 0,
    **passes: Unpack[Passes],
) -> dict[str, PerImage]:
    """Similarity of maps of the predicted class under noise that leaves the prediction as it is.

    Args:
        methods, model, images: as for parameter_randomisation.
        epsilon: how far each pixel moves, up or down by chance, on the scale where pictures run from 0 to 1.
        draws: how often; the noise of a draw follows the seed and is the same for every image.
        budget, layer, seed, passes: as for parameter_randomisation.

    Returns:
        ssim and spearman, means over the draws that keep the prediction, and kept, their share, by method.
    """
    if not epsilon > 0 or not isinstance(draws, int) or draws < 1:
        raise InputError(f"fragility needs epsilon > 0 and draws >= 1; got {epsilon} and {draws}")
    model = as_model(model)
    pictures = model.check_images(images).to(model.device)
    made = _Maker(methods, budget, layer=layer, seed=seed, **passes)
    model, targets = bind_targets(model, pictures, None)
    reach = _picture_range(model, pictures)

    def noisy(draw: int) -> Tensor:
        random = np.random.default_rng((seed, draw))
        signs = random.integers(0, 2, pictures.shape[1:]) * 2 - 1
        return pictures + epsilon * reach * torch.from_numpy(signs).to(pictures)

    for draw in range(draws) if pictures.is_cuda else ():  # which else would wait for the last draw's cuts
        begin_ahead(methods, model, noisy(draw), seed)
    before = made(model, pictures, targets)
    stays = partial(_stays, model, pictures, targets, passes.get("batch_size"))
    tables: dict[str, list[Tensor]] = {method: [] for method in before}
    of_one: list[Cause] = []
    for draw in range(draws):
        changed = noisy(draw)
        stayed = stays(changed)
        for method, maps in made(model, changed, targets).items():
            same = (maps.explained == before[method].explained) & stayed.to(maps.explained.device)
            found = map_similarity(before[method], maps)
            of_one = [cause for cause in found.causes if cause.names]
            rows = [found[kind].masked_fill(~same, torch.nan) for kind in KINDS]
            tables[method].append(torch.stack([*rows, same.float()]))
    result = {}
    for method, rows in tables.items():
        table = torch.stack(rows)  # "draws 3 b"
        ssim, spearman = table[:, :2].nanmean(0)
        scores = {"ssim": ssim, "spearman": spearman, "kept": table[:, 2].mean(0)}
        gone = [Cause(CHANGED, scores[kind].isnan(), (kind,)) for kind in KINDS]
        result[method] = PerImage(scores, [*of_one, *gone])
    return result


def _stays(model: Model, pictures: Tensor, targets: Any, batch_size: int | None, changed: Tensor) -> Tensor:
    """ "b" bool: whether the prediction stays, beyond that one class is explained again."""
    if isinstance(model.head, OneOfMany):  # whose prediction is the class that is explained
        return torch.ones(len(pictures), dtype=torch.bool)
    before, after = (all_logits(model, shown, batch_size) for shown in (pictures, changed))
    return model.same(before, after, model.check_targets(targets, before))


def _picture_range(model: Model, images: Tensor) -> Tensor:
    """The way from black to white in model-ready values: per channel, or per image where it is unknown."""
    kept = model.preprocess
    if kept.channels == images.shape[1]:
        std = torch.tensor(kept.std, device=images.device, dtype=images.dtype)
        return 1 / per_map(std, images[0])
    low, high = images.flatten(1).aminmax(dim=1)
    return per_map(high - low, images)


def _in_a_run(
    function: Callable[..., Any], scene: BatchContext, options: dict[str, Any]
) -> dict[str, PerImage]:
    named: dict[str, Any] = {"model": scene.model, "images": scene.batch.images, "layer": scene.layer}
    if function is not fragility:  # which explains the predicted class
        named["targets"] = scene.classes
        named["known"] = scene.kept.setdefault("maps of the network as it is", {})
    found = function(list(scene.maps), **named, **scene.passes, **options)
    return found.mean() if isinstance(found, Cascade) else found


# A map that ignores the network is perfectly stable, so floors say nothing about these.
for _name, _function, _said, _cite in (
    ("randomisation", parameter_randomisation, "unchanged by random weights", "adebayo2018sanity"),
    ("fragility", fragility, "stable under noise", "ghorbani2019fragile"),
    ("input_shift", input_shift, "stable under a constant shift", "kindermans2019unreliability"),
):
    metric(
        _name, needs=("model", "images"), higher_is_better=_name != "randomisation", bounds=(-1.0, 1.0),
        cite=_cite, family="Sanity", floors=(), question="map", reruns=True,
        needs_gradients=_name != "fragility",
        parts={"ssim": f"{_said} (SSIM)", "spearman": f"{_said} (ranks)"}, volumes=True,
        call=_in_a_run,
    )(_function)  # fmt: skip
