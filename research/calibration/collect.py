"""What is measured of one member: the contrast result of every method, and every cheap test's number.

Beside the methods, controls go through everything, as if they were methods, and are known not to follow:

    untrained network   Grad-CAM (and the gradient) of the same network with other, random weights
    other image         Grad-CAM of another of the pictures
    other class         Grad-CAM of the class that the network thinks of second
    other network       Grad-CAM of the twin
    smooth noise        noise at the resolution of the CAM
    random, edges, centre

A cheap test sees what a user's run would show it: one network and its pictures, nothing about its twin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heatproof.contrast.pair import Pair, contrast_auc, inside_token, make_pair
from heatproof.explain.api import explain
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.faithfulness import insertion_deletion
from heatproof.metrics.localisation import localise
from heatproof.metrics.specific import DRAWS, STEPS, against_untrained, gains, under_random_weights
from heatproof.models.derived import untrained_copy
from heatproof.models.model import Model, all_logits
from heatproof.run.score import as_stored
from heatproof.train.loop import Data, fit, stratified_split
from heatproof.train.recipe import Phase, Recipe
from heatproof.types import Maps
from research.calibration.population import Member, make_network, open_pictures, positive_class

METHODS = (
    "gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam", "gradient",
    "smoothgrad(samples=8)", "integrated-gradients(steps=8)", "rise(masks=100)",
)  # fmt: skip
FLOORS = ("random", "edges", "centre")
CONTROLS = (
    "untrained network", "untrained gradient", "other image", "other class", "other network", "smooth noise",
    *FLOORS,
)  # fmt: skip
IMAGES = 100
TWIN, STRANGER = 50, 1000  # seeds of untrained networks other than the metric's: the twin's, the controls'
NOISE = 2 / 255  # of the fragility test
TRAINED = {"resnet20", "resnet56"}  # networks that know their classes already


@dataclass(frozen=True)
class Collected:
    """Everything measured of one member."""

    member: Member
    flips: tuple[float, float]
    holds: bool
    accuracy: tuple[float, float]  # of A and B, on held-out pictures of the positive class with the token
    contrast: Mapping[str, Mapping[str, float]]  # method or control -> auc, low, high, seen
    tests: Mapping[tuple[str, str], Mapping[str, np.ndarray]]  # (network, method) -> test -> "n"

    def as_json(self) -> dict[str, Any]:
        tests: dict[str, dict[str, dict[str, list[float | None]]]] = {"A": {}, "B": {}}
        for (network, method), by_test in self.tests.items():
            tests[network][method] = {
                test: [round(float(v), 4) if np.isfinite(v) else None for v in values]
                for test, values in by_test.items()
            }
        facts = {"flips": self.flips, "holds": self.holds, "accuracy": self.accuracy}
        return {"member": asdict(self.member), **facts, "contrast": self.contrast, "tests": tests}


def prepare(
    member: Member,
    data: Path | None,
    device: str,
    out: Path | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> tuple[Pair, Tensor | None]:
    """The member's two networks, trained, and where objects lie in the pair's pictures, if that is known."""
    pictures = open_pictures(member, data)
    classes = int(pictures.labels.max()) + 1
    model = make_network(member, classes, data)
    model.module.to(device)
    if member.network not in TRAINED:
        train, held_out = stratified_split(pictures.labels, 0.4, member.seed)
        whole = Data(pictures.images, pictures.labels).near(torch.device(device))
        lr = 3e-4 if member.network in ("lite0", "squeezenet", "vit-tiny") else 1e-3
        recipe = Recipe((Phase(8, lr, clip=1.0),), 32, flip=True)
        fit(
            model, whole.take(train), whole.take(held_out), recipe, out and out / "base", member.seed,
            progress=lambda state: progress(f"learning its classes, epoch {state.epoch} of {state.epochs}"),
        )  # fmt: skip
    ready = model.preprocess.from_bytes(pictures.images.to(device))
    pair = make_pair(
        model, ready, pictures.labels, member.token, positive_class(member), member.strength, member.seed,
        out and out / "pair",
        lambda which, state: progress(f"training {which}, epoch {state.epoch} of at most {state.epochs}"),
    )  # fmt: skip
    places = [int(name) for name in pair.ids]
    return pair, None if pictures.objects is None else pictures.objects[places]


def collect(
    member: Member, pair: Pair, objects: Tensor | None = None, methods: Sequence[str] = METHODS,
    informative: bool = True,
) -> Collected:  # fmt: skip
    """The contrast result and every cheap test, on at most 100 held-out pictures with the token."""
    images = pair.images[:IMAGES].to(pair.a.device)
    masks = pair.masks[:IMAGES].to(pair.a.device)
    twins = {"A": (pair.a, pair.b), "B": (pair.b, pair.a)}
    maps = {
        name: all_maps(*both, images, pair.positive, methods, member.seed, member.seed + STRANGER)
        for name, both in twins.items()
    }
    inside = {
        name: {m: _array(inside_token(method_maps, masks)) for m, method_maps in made.items()}
        for name, made in maps.items()
    }
    contrast = {}
    for method in maps["A"]:
        a, b = inside["A"][method], inside["B"][method]
        auc, (low, high) = contrast_auc(a, b, member.seed)
        contrast[method] = {"auc": auc, "low": low, "high": high, "seen": float((a >= 0.5).mean())}
    tests: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for name, (model, twin) in twins.items():
        results = cheap_tests(
            model, twin, images, pair.positive, methods, maps[name], member.seed, informative
        )
        for method, numbers in results.items():
            tests[name, method] = {**numbers, "inside": inside[name][method]}
            if objects is not None:
                tests[name, method] |= on_object(maps[name][method], objects[:IMAGES], masks)
    right = [
        float((m.predicted(all_logits(m, images)) == pair.positive).float().mean()) for m, _ in twins.values()
    ]
    planting = pair.planting
    return Collected(
        member, (planting.a.share, planting.b.share), pair.holds, (right[0], right[1]), contrast, tests
    )


def all_maps(
    model: Model, twin: Model, images: Tensor, positive: int, methods: Sequence[str], seed: int, stranger: int
) -> dict[str, Maps]:
    """Maps of every method and control for one network, rounded as a run stores them.

    stranger: seed of the untrained network whose maps are controls; another one than those of the metric's
    control maps, or they would equal them.
    """
    made = explain(model, images, [*methods, *FLOORS], positive, seed=seed)
    scores = all_logits(model, images)
    scores[:, positive] = -torch.inf
    cam = made.get("gradcam") or explain(model, images, "gradcam", positive, seed=seed)["gradcam"]
    apart = explain(
        untrained_copy(model, images, stranger), images, ["gradcam", "gradient"], positive, seed=seed
    )
    noise = np.random.default_rng((seed, _number(model))).random(cam.values.shape, dtype=np.float32)
    every = made | {
        "untrained network": apart["gradcam"],
        "untrained gradient": apart["gradient"],
        "other image": replace(cam, values=cam.values.roll(1, 0)),
        "other class": explain(model, images, "gradcam", scores.argmax(1), seed=seed)["gradcam"],
        "other network": explain(twin, images, "gradcam", positive, seed=seed)["gradcam"],
        "smooth noise": replace(cam, values=torch.from_numpy(noise).to(cam.values)),
    }
    return {name: as_stored(method_maps) for name, method_maps in every.items()}


def _number(model: Model) -> int:
    """A number that differs from network to network."""
    total = sum(float(weight.detach().double().abs().sum()) for weight in model.module.parameters())
    return int(abs(hash(round(total, 6)))) % 2**31


def cheap_tests(
    model: Model, twin: Model, images: Tensor, positive: int, methods: Sequence[str],
    maps: Mapping[str, Maps], seed: int, informative: bool = True,
) -> dict[str, dict[str, np.ndarray]]:  # fmt: skip
    """By method and control, every test's number for each picture; only those that vote, on request."""
    inputs: dict[str, Any] = {"model": model, "images": images}

    def drawn(draw: int) -> dict[str, Maps]:
        other = untrained_copy(twin, images, seed + draw + TWIN)
        return under_random_weights(
            lambda m: all_maps(m, other, images, positive, methods, seed, seed + STRANGER + 1 + draw),
            model, images, draw, seed,
        )  # fmt: skip

    untrained = [drawn(draw) for draw in range(DRAWS)]
    result: dict[str, dict[str, np.ndarray]] = {}
    half = STEPS // 2
    coarse = gains(maps, untrained, steps=half, seed=seed, **inputs)
    for name, gain in gains(maps, untrained, seed=seed, **inputs).items():
        result[name] = {f"specificity_{kind}": _array(values) for kind, values in gain.scores.items()}
        for kind, values in coarse[name].scores.items():
            result[name][f"specificity_{kind}_at_{half}"] = _array(values)
        result[name] |= {"gain": _array(gain.own), "gain_turned": _array(gain.turned)}
        result[name] |= {f"gain_untrained_{i}": _array(values) for i, values in enumerate(gain.untrained)}
        result[name] |= {"fall": _array(gain.fall), "blank": _array(maps[name].degenerate.float())}
    if not informative:
        return result
    areas = insertion_deletion(maps, positive, steps=STEPS, **inputs)
    floor = areas["random"]
    noisy = (
        images
        + random_signs(images, seed) * NOISE / torch.tensor(model.preprocess.std).to(images)[:, None, None]
    )
    moved = all_maps(model, twin, noisy, positive, methods, seed, seed + STRANGER)
    for name, method_maps in maps.items():
        against = against_untrained(method_maps, untrained[0][name], untrained[1][name])
        others = [map_similarity(method_maps, maps[m])["spearman"] for m in methods if m != name]
        result[name] |= {
            "insertion": _array(areas[name].insertion_auc - floor.insertion_auc),
            "deletion": _array(floor.deletion_auc - areas[name].deletion_auc),
            **{f"untrained_{kind}": _array(values) for kind, values in against.items()},
            "fragility": _array(map_similarity(method_maps, moved[name])["spearman"]),
            "agreement": _array(torch.stack(others).nanmean(0)),
        }
    return result


def on_object(maps: Maps, objects: Tensor, token: Tensor) -> dict[str, np.ndarray]:
    """Where the network should look: the pointing game, less what a point by chance would get.

    Pictures whose token lies on the object decide nothing: both are in the same place.
    """
    objects = objects.to(maps.values.device)
    hit = localise(maps, masks=objects)["pointing"]
    chance = objects.flatten(1).float().mean(1)
    covered = (objects & token).flatten(1).sum(1) > 0.1 * token.flatten(1).sum(1)
    return {"on_object": _array((hit - chance).masked_fill(covered, torch.nan))}


def random_signs(images: Tensor, seed: int) -> Tensor:
    """-1 or 1 for every pixel and channel, the same for all images."""
    drawn = np.random.default_rng(seed).integers(0, 2, tuple(images.shape[1:])) * 2 - 1
    return torch.from_numpy(drawn).to(images)


def _array(values: Tensor) -> np.ndarray:
    return np.asarray(values.detach().double().cpu().numpy())
