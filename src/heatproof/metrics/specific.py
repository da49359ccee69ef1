"""Specificity: whether a map is more faithful to this network than its control maps.

A control map shares everything with the map except for one property:

    weights   the same method's maps of the same image and class under the network with random weights: they
              share image, architecture, layer and method, so the effects of these cancel
    place     the map rotated by 180 degrees: it shares size, smoothness and distance from the centre, so a
              map gains nothing from objects that lie in the centre

Maps are scored by insertion and deletion (see faithfulness.py), in the log-odds L of the explained class,
which do not saturate as probabilities do. Hidden pixels get the baseline (blur, mean, black, noise) under
which the class is least likely, image by image: one that keeps the class cannot rank any map.

    f(map) = (insertion area - deletion area) / (L(image) - L(baseline))               about -1 to 1
    specificity_weights = f(map) - the mean f of its control maps under random weights
    specificity_place   = f(map) - f(the rotated map)

A map that ignores the network is not expected to exceed its control maps; one that is the same for every
network has exactly 0. Which of the two votes, and its threshold, were calibrated on planted evidence
(docs/results/calibration.md). An image whose class no baseline removes is undecided.

untrained: similarity of the maps to those of an untrained network (spearman), similarity of the maps of two
different untrained networks (null: the effect of image and architecture alone), their difference (excess),
and the relative rise of the entropy of the map's histogram under random weights (entropy).

Cite: adebayo2018sanity for random weights, hedstrom2024sanity for `entropy`; the control maps are this
project's own. A constant control map has no order; `random` replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from heatproof.errors import InputError
from heatproof.explain.api import explain, is_stored
from heatproof.explain.baselines import baseline_images
from heatproof.explain.providers.files import CONTROLS, Stored, control_paths
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.faithfulness import area, insertion_deletion, not_above
from heatproof.metrics.kit import (
    NOT_FINITE,
    BatchContext,
    Change,
    Passes,
    blanked,
    bound,
    cached,
    finite,
    pixel_maps,
)
from heatproof.metrics.results import Cause, Curve, PerImage
from heatproof.metrics.sanity import Layers
from heatproof.models.derived import untrained_copy
from heatproof.models.heads import Columns
from heatproof.models.model import Model, Queue, bind_targets
from heatproof.models.running import frozen_eval, is_function
from heatproof.registry import explainers, metric, parse_call
from heatproof.types import Images, Maps, per_map, size_of, spatial_dims, upsample

STEPS = 10  # of each curve: enough for a difference of areas, and a tenth of the passes
DRAWS = 3  # of random weights
SURE = 1e-6  # of a probability: log-odds stay between -13.8 and 13.8
LEAST = 1.0  # by which a baseline must lower the log-odds
BINS = 64  # of the histogram
Known = dict[int, Mapping[str, Maps]]  # maps by method, by the draw of the random weights
BLANK = "the map is constant, so it cannot be compared with control maps"
STAYS = "no baseline removes the class from the image, so no order of pixels can be scored"


def _in_a_run(
    function: Callable[..., Any], context: BatchContext, options: dict[str, Any]
) -> dict[str, PerImage]:
    network = {"model": context.model, "images": context.batch.images, "layer": context.layer}
    maps = {name: replace(own, explained=context.classes) for name, own in context.maps.items()}
    shared = {"then": context.then, "known": context.cache("maps under random weights")}
    return dict(function(maps, **network, **shared, **context.passes, **options))


_metric = partial(
    metric, needs=("maps", "model", "images"), floors=(), question="map", call=_in_a_run, volumes=True
)


@_metric(
    "specificity", higher_is_better=True, cite="petsiuk2018rise", family="Faithfulness", votes=True,
    parts={"weights": "above its map under random weights",
           "place": "above the rotated map"},
    inputs=lambda options: 2 * (options["draws"] + 2) * (options["steps"] - 1),
)  # fmt: skip
def specificity(
    maps: Mapping[str, Maps], *, model: Model | nn.Module, images: Images, draws: int = DRAWS,
    steps: int = STEPS, layer: Layers = None, seed: int = 0, then: Change | None = None,
    known: Known | None = None, **passes: Unpack[Passes],
) -> dict[str, PerImage]:  # fmt: skip
    """Insertion minus deletion of a map, above that of its control maps.

    Args:
        maps: by method, as `hp.explain` returns them; the methods are run again under random weights. If
            that is impossible (maps from files without control maps beside them, or a network that is a
            function), `weights` is NaN.
        model, images: the network that was explained, and the images, model-ready, "b c H W".
        draws, steps: number of networks with random weights, and of steps of each curve.
        layer, passes: as for hp.explain; passes are batch_size and progress.
        seed: of the random weights, and of methods that draw, as given to `hp.explain`.
        then: function that was applied to the maps (a run rounds them to store them), and is applied to
            the control maps too, so that rounding is no difference between them.
        known: cache of maps under random weights by draw; new ones are added.

    Returns:
        By method: weights and place, each "b".

    Example:
        >>> import heatproof as hp
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(75, 2)).eval()
        >>> images = torch.rand(2, 3, 5, 5)
        >>> scores = specificity(hp.explain(network, images, "gradient"), model=network, images=images)
        >>> list(scores["gradient"])
        ['weights', 'place']
    """
    if not isinstance(draws, int) or draws < 1:
        raise InputError(f"draws must be a whole number of at least 1, got {draws!r}")
    model, inputs, _ = bound(model, images, next(iter(maps.values())).explained.clamp(min=0))
    rerun = {} if is_function(model.module) else {n: own for n, own in maps.items() if not is_stored(n)}
    make = partial(maps_untrained, rerun, model, inputs, seed=seed, layer=layer, then=then, **passes)
    drawn: list[Mapping[str, Maps]] = [cached(known, i, partial(make, i)) for i in range(draws) if rerun]
    controls = [dict(own) for own in drawn]
    for name, own in maps.items():
        for i, control in enumerate(_stored_controls(name, own)):
            controls += [{}] * (i == len(controls))
            controls[i] = {**controls[i], name: then(control) if then else control}
    every = gains(maps, controls, model=model, images=inputs, steps=steps, seed=seed, **passes)
    return {name: own.scores for name, own in every.items()}


class Gains(NamedTuple):
    """f of one method's maps and of their control maps, by image."""

    own: Tensor  # "b"
    turned: Tensor  # "b"
    untrained: Tensor  # "draws b"
    fall: Tensor  # "b": of the log-odds, when the image is replaced by its baseline
    causes: Sequence[Cause]

    @property
    def scores(self) -> PerImage:
        # The mean of differences, not the difference to the mean: a map equal to its controls gets exactly 0.
        above = {"weights": (self.own - self.untrained).mean(0), "place": self.own - self.turned}
        return PerImage(above, self.causes)


def gains(
    maps: Mapping[str, Maps], controls: Sequence[Mapping[str, Maps]], *, model: Model, images: Tensor,
    steps: int = STEPS, seed: int = 0, **passes: Unpack[Passes],
) -> dict[str, Gains]:  # fmt: skip
    """By method, f of its maps and of their control maps. controls: maps under random weights, by draw."""
    explained = next(iter(maps.values())).explained.clamp(min=0).to(model.device)
    images = images.to(model.device)
    noise = explain(model, images, "random", explained, seed=seed, allow_nan=True)["random"]
    model, targets = bind_targets(model, images, explained)
    baseline, fall = strongest_baseline(model, images, targets, seed, **passes)
    tested: dict[tuple[str, str | int], Maps | Tensor] = {}
    same: dict[tuple[str, int], Tensor] = {}
    lost = {name: torch.zeros(len(own), dtype=torch.bool) for name, own in maps.items()}
    for name, own in maps.items():
        tested[name, "own"] = own
        tested[name, "place"] = replace(own, values=own.values.flip(spatial_dims(own.values)))
        pixels = upsample(own.values, own.image_size)
        for i, drawn in enumerate(controls):
            if name not in drawn:
                continue
            lost[name] |= ~finite(drawn[name]).cpu()
            given = blanked(drawn[name])
            control = upsample(given.values, given.image_size)  # normalising would make pixels equal
            flat = per_map(given.degenerate, control)
            control = torch.where(flat, noise.values.to(control), control).to(pixels)
            same[name, i] = (control == pixels).flatten(1).all(1)
            tested[name, i] = control.masked_fill(per_map(same[name, i], control), 0)  # costs no pass
    network: dict[str, Any] = {"model": model, "images": images, "baseline": baseline, "steps": steps}
    curves = insertion_deletion(tested, explained, **network, **passes)

    def gain_of(both: Curve) -> Tensor:
        if not model.head.chance:  # whose curves are shares of what is lost already
            return (area(both.insertion) - area(both.deletion)).cpu()
        areas = [area(curve.clamp(SURE, 1 - SURE).logit()) for curve in (both.insertion, both.deletion)]
        return ((areas[0] - areas[1]) / fall).cpu()

    gain = {key: gain_of(both) for key, both in curves.items()}
    stays = Cause(STAYS, (fall < LEAST).cpu())
    if not model.head.chance:
        stays = Cause(not_above(model.head.name), gain[next(iter(maps)), "own"].isnan())
    result = {}
    for name, own in maps.items():
        value = gain[name, "own"]
        made = [i for i in range(len(controls)) if (name, i) in same]
        each = [torch.where(same[name, i].cpu(), value, gain[name, i]) for i in made]
        missing = Cause(_no_control(name), torch.ones_like(value, dtype=torch.bool), ("weights",))
        causes = [Cause(NOT_FINITE, lost[name]), Cause(BLANK, own.degenerate.cpu()), stays]
        random = torch.stack(each or [torch.full_like(value, torch.nan)])
        every = causes if made else [missing, *causes]
        result[name] = Gains(value, gain[name, "place"], random, fall.cpu(), every)
    return result


def strongest_baseline(
    model: Model, images: Tensor, targets: Tensor | Columns, seed: int = 0, **passes: Unpack[Passes]
) -> tuple[Tensor, Tensor]:
    """Each image under the baseline that removes its class best, and the fall of its log-odds."""
    kinds = ["blur", "mean", "noise"] + ["black"] * (model.preprocess.channels == images.shape[1])
    tried = torch.stack([images, *(baseline_images(model, images, kind, seed) for kind in kinds)])
    columns = targets.numbers if isinstance(targets, Columns) else targets
    flat, classes = tried.flatten(0, 1), columns.repeat(len(tried))
    queue = Queue(model, size_of(images), **passes)
    with frozen_eval(model.module):
        values = queue.predict(
            len(flat), lambda start, stop: flat[start:stop],
            lambda logits, start, stop: model.measured(logits, classes[start:stop]),
        )  # fmt: skip
    odds = (values.clamp(SURE, 1 - SURE).logit() if model.head.chance else values).view(len(tried), -1)
    # A network that standardises its input returns NaN for an image without contrast, which removes no class.
    least, best = odds[1:].nan_to_num(torch.inf).min(0)
    return tried[1:][best, torch.arange(len(images), device=best.device)], odds[0] - least


@_metric(
    "untrained", bounds=(-2.0, 2.0), cite="hedstrom2024sanity", family="Sanity", reruns=True,
    needs_weights=True,
    parts={"spearman": "similarity to an untrained network's map (ranks)",
           "null": "similarity of two untrained networks' maps (ranks)",
           "excess": "excess similarity to an untrained network's map",
           "entropy": "increase of entropy under random weights"},
)  # fmt: skip
def untrained(
    maps: Mapping[str, Maps], *, model: Model | nn.Module, images: Images, layer: Layers = None,
    seed: int = 0, then: Change | None = None, known: Known | None = None, **passes: Unpack[Passes],
) -> dict[str, PerImage]:  # fmt: skip
    """Similarity of maps to those of an untrained network, relative to two untrained networks.

    Args:
        maps, model, images, layer, then, known, passes: as for specificity.
        seed: of the first untrained network (the second has the next one), and of methods that draw.

    Returns:
        By method: spearman, null, excess and entropy, each "b".

    Example:
        >>> import heatproof as hp
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(75, 2)).eval()
        >>> images = torch.rand(2, 3, 5, 5)
        >>> scores = untrained(hp.explain(network, images, "gradient"), model=network, images=images)
        >>> list(scores["gradient"])
        ['spearman', 'null', 'excess', 'entropy']
    """
    model, inputs, _ = bound(model, images, next(iter(maps.values())).explained.clamp(min=0))
    make = partial(maps_untrained, maps, model, inputs, seed=seed, layer=layer, then=then, **passes)
    first, second = (cached(known, draw, partial(make, draw)) for draw in (0, 1))
    return {name: against_untrained(own, first[name], second[name]) for name, own in maps.items()}


def against_untrained(maps: Maps, first: Maps, second: Maps) -> PerImage:
    """Scores of untrained, from the maps under two untrained networks."""
    similar, null = map_similarity(maps, first), map_similarity(first, second)
    first = blanked(first)
    spearman, by_chance = similar["spearman"].cpu(), null["spearman"].cpu()
    own, random = entropy(maps), entropy(first)
    scores = {"spearman": spearman, "null": by_chance, "excess": spearman - by_chance}
    scores["entropy"] = (random - own) / own.clamp(min=1e-6)
    causes = [Cause(c.sentence, c.where.cpu()) for c in (*similar.causes, *null.causes) if not c.names]
    return PerImage(scores, causes)


def entropy(maps: Maps) -> Tensor:
    """Entropy "b" of the histogram of each map in [0, 1] at image size, in bits."""
    bins = (pixel_maps(maps).flatten(1) * (BINS - 1)).round().long()
    counts = torch.zeros(len(bins), BINS, device=bins.device)
    shares = counts.scatter_add_(1, bins, counts.new_ones(bins.shape)) / bins.shape[1]
    return -(shares * shares.clamp(min=1e-12).log2()).sum(1).cpu()


def _stored_controls(name: str, maps: Maps) -> list[Maps]:
    """Control maps stored beside stored maps."""
    entry = explainers.find(parse_call(name)[0])
    controls = entry.control_values(maps.ids, maps.image_size) if isinstance(entry, Stored) else []
    return [replace(maps, values=values.to(maps.values), signed_values=None) for values in controls]


def _no_control(name: str) -> str:
    """Why there are no control maps, and how to provide them."""
    if not isinstance(explainers.find(parse_call(name)[0]), Stored):
        return "there is no map under random weights: the network is a function, without weights"
    folder = control_paths(Path(name.partition(":")[2]))[0].name
    return (
        f"there is no map under random weights: store this method's maps of {CONTROLS} networks with "
        f"random weights beside them, in {folder}/0 to {folder}/{CONTROLS - 1}, or give the method as "
        "FILE.py:FUNCTION"
    )


def maps_untrained(
    maps: Mapping[str, Maps], model: Model, images: Tensor, draw: int = 0, *, seed: int = 0,
    then: Change | None = None, **options: Any,
) -> dict[str, Maps]:  # fmt: skip
    """Maps of the same methods, images and classes, with the same seed, under random weights."""
    explained = next(iter(maps.values())).explained.clamp(min=0)

    def make(network: Model) -> dict[str, Maps]:
        return explain(network, images, list(maps), explained, seed=seed, allow_nan=True, **options)

    return under_random_weights(make, model, images, draw, seed, then)


def under_random_weights(
    make: Callable[[Model], Mapping[str, Maps]], model: Model, images: Tensor, draw: int, seed: int,
    then: Change | None = None,
) -> dict[str, Maps]:  # fmt: skip
    """Maps that `make` computes of the network with random weights."""
    made = make(untrained_copy(model, images, seed + draw))
    return {name: then(maps) if then else maps for name, maps in made.items()}
