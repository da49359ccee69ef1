"""Do metrics rank methods alike, and as the truth does?

    python -m research.replication rank --data DATA --out OUT

Pairs of networks with planted evidence (research/calibration/population.py). For network A, which uses a
token, every metric scores every method on the same images with the token in them. Two rankings are the truth:

    contrast     share of a method's budget on the token for A, less the share for B, which does not use it
    transplant   mean share of images of other classes that A calls positive after a window is pasted into
                 them: as large as the token, where the mean of the map is largest

A constant map marks nothing: both are 0. A metric is as good as its rank correlation with these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from heatproof.contrast.pair import HELD_OUT, Pair, inside_token
from heatproof.explain.api import explain
from heatproof.images import make_qr
from heatproof.images.transforms import draw
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.cscores import cscore
from heatproof.metrics.faithfulness import insertion_deletion
from heatproof.metrics.interventions import Interventions
from heatproof.metrics.kit import pixel_maps
from heatproof.metrics.localisation import localise
from heatproof.metrics.on_parts import structure
from heatproof.metrics.specific import specificity
from heatproof.metrics.stability import cose
from heatproof.models.model import all_logits
from heatproof.show import eight_bit
from heatproof.studies.cose.protocol import input_pairs
from heatproof.train.loop import stratified_split
from heatproof.types import Maps
from research.calibration.collect import FLOORS, NOISE, prepare, random_signs
from research.calibration.population import SIDES, Member, Pictures, members, open_pictures
from research.jobs import Place
from research.replication.claims import t_interval

# The most expensive networks first in each round. ResNet-50, DenseNet-121 and the two smallest are left out.
NETWORKS = ("lite0", "squeezenet", "vit-tiny", "resnet18", "resnet56", "resnet20", "small")
ROUNDS = {"lite0": 2, "squeezenet": 2}  # of 224-pixel networks; the others have all four tokens
MOST_ROUNDS = 4
# HiResCAM, XGrad-CAM and LayerCAM equal one of these in networks with global average pooling.
METHODS = (
    "gradcam", "gradcam++", "ms-gradcam++", "eigencam", "eigengradcam", "scorecam(channels=16)", "gradient",
    "gradient-x-input", "smoothgrad(samples=8)", "integrated-gradients(steps=8)", "rise(masks=100)",
)  # fmt: skip
IMAGES = 60  # of each pair
CURVES, TRANSFORMED = 30, 16  # of these, the first ones: for insertion, deletion and specificity; for COSE
STEPS = 40  # of insertion and deletion: the smallest token covers 4 % of the image
TRUTHS = ("contrast", "transplant")
METRICS = {  # name -> where it is from
    "specificity": "this project",
    "insertion": "budgeted localisation",
    "deletion": "budgeted localisation",
    "object inside": "budgeted localisation",
    "object pointing": "budgeted localisation",
    "structure": "CAMBench-QR",
    "cscore": "C-Score",
    "cose": "COSE",
    "stability": "noise that keeps the prediction",
}
Scores = dict[str, dict[str, float]]  # by metric or truth, by method


def plan(networks: Sequence[str] = NETWORKS) -> list[Member]:
    """Pairs of the calibration's population; all networks and pictures once, then again with other seeds."""
    wanted = [m for m in members() if m.network in networks and m.seed < ROUNDS.get(m.network, MOST_ROUNDS)]
    return sorted(wanted, key=lambda m: (m.seed, networks.index(m.network), m.data))


def measure(member: Member, place: Place) -> dict[str, Any]:
    """Train a pair of networks and compute all scores."""
    pair, objects = prepare(member, place.data, place.device)
    flips = [pair.planting.a.share, pair.planting.b.share]
    content: dict[str, Any] = {"member": asdict(member), "holds": pair.holds, "flips": flips}
    if pair.holds:
        content["scores"] = scores_of(member, pair, objects, open_pictures(member, place.data))
    return content


def describe(result: Mapping[str, Any]) -> str:
    return f"flips {result['flips'][0]:.2f} and {result['flips'][1]:.2f}"


def scores_of(member: Member, pair: Pair, objects: Tensor | None, pictures: Pictures) -> Scores:
    """Scores of every method by all metrics that apply, and by both truths; more is better."""
    network, positive, seed = pair.a, pair.positive, member.seed
    bytes_ = eight_bit(network.preprocess.restore(pair.images[:IMAGES].to(network.device)))
    images, masks = network.preprocess.from_bytes(bytes_), pair.masks[:IMAGES]
    maps, others = (explain(n, images, [*METHODS, *FLOORS], positive, seed=seed) for n in (network, pair.b))
    inputs: dict[str, Any] = {"model": network, "images": images[:CURVES]}
    first = {method: own.take(slice(CURVES)) for method, own in maps.items()}
    every = specificity(first, seed=seed, **inputs)
    areas = insertion_deletion(first, positive, steps=STEPS, **inputs)
    probabilities = network.probabilities(all_logits(network, images)).cpu()
    result: Scores = {
        "contrast": by(maps, lambda m: inside_token(maps[m], masks) - inside_token(others[m], masks)),
        "transplant": transplants(pair, images, pictures, maps),
        "specificity": {m: min(mean(own["weights"]), mean(own["place"])) for m, own in every.items()},
        "insertion": by(maps, lambda m: areas[m].insertion_auc),
        "deletion": by(maps, lambda m: -areas[m].deletion_auc),
        "cscore": {m: cscore(own, probabilities[:, positive], seed=seed).value for m, own in maps.items()},
        "cose": coses(pair, bytes_, maps, probabilities.argmax(1) == positive, seed),
        "stability": stabilities(pair, images, maps),
    }
    if objects is not None:
        scores = {m: localise(own, masks=objects[:IMAGES].to(images.device)) for m, own in maps.items()}
        for kind in ("inside", "pointing"):
            result[f"object {kind}"] = {method: mean(own[kind]) for method, own in scores.items()}
    if member.data == "qr":
        size, rows = SIDES.get(member.network, images.shape[-1]), [int(name) for name in pair.ids[:IMAGES]]
        drawn = make_qr(500, 500, size, seed=seed).masks
        finder, timing, box = (torch.from_numpy(drawn[name])[rows] for name in ("finder", "timing", "box"))
        result["structure"] = by(maps, lambda m: structure(maps[m], finder, timing, box)["score"])
    return result


def by(maps: Mapping[str, Maps], score: Callable[[str], Tensor]) -> dict[str, float]:
    return {method: mean(score(method)) for method in maps}


def mean(values: Tensor) -> float:
    return float(values.double().nanmean())


def coses(
    pair: Pair, images: Tensor, maps: Mapping[str, Maps], answered: Tensor, seed: int
) -> dict[str, float]:
    """COSE of every method by eq. 4, over transforms of some images that A calls positive.

    images: 8 bits. answered: bool "b", whether A calls them positive.
    """
    rows = answered.nonzero()[:TRANSFORMED, 0]
    own = {method: of_method.take(rows) for method, of_method in maps.items()}
    drawn = draw(seed, [pair.ids[i] for i in rows.tolist()], 1)
    pairs = input_pairs(pair.a, images[rows.to(images.device)], own, drawn, seed=seed, same_seed=True)
    return {
        m: cose(values[pairs.same], values[~pairs.same], resamples=1).value
        for m, values in pairs.ssim.items()
    }


def stabilities(pair: Pair, images: Tensor, maps: Mapping[str, Maps]) -> dict[str, float]:
    """Rank correlation of maps under noise of two grey levels."""
    scale = torch.tensor(pair.a.preprocess.std).to(images)[:, None, None]
    noisy = images + random_signs(images, pair.seed) * NOISE / scale
    moved = explain(pair.a, noisy, list(maps), pair.positive, seed=pair.seed)
    return by(maps, lambda m: map_similarity(maps[m], moved[m])["spearman"])


def transplants(pair: Pair, images: Tensor, pictures: Pictures, maps: Mapping[str, Maps]) -> dict[str, float]:
    """Mean share of images of other classes that the windows of each method's maps turn."""
    _, held_out = stratified_split(pictures.labels, HELD_OUT, pair.seed)
    rest = held_out[pictures.labels[held_out] != pair.positive][:IMAGES]
    plain = pair.a.preprocess.from_bytes(pictures.images[rest]).to(images)
    labels = [pair.positive] * len(images) + pictures.labels[rest].tolist()
    tests = Interventions(pair.a, torch.cat([images, plain]), labels, methods=["random"], seed=pair.seed)
    own = tests.label == pair.positive
    tests.image, tests.label, tests.recipients = tests.image[own], tests.label[own], tests.recipients[own]
    side, result = max(pair.token.pixels(tests.size)) / min(tests.size), {}
    for method, of_method in maps.items():  # donors, recipients and their answers are the same for all
        tests.heat = pixel_maps(of_method.take(torch.from_numpy(tests.image)), tests.size).to(images.device)
        turned = np.array(tests.transplant(side, off_object=True).turned, float)
        result[method] = float(np.nan_to_num(turned).mean())
    return result


def pair_rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per pair of networks, with those whose planting failed."""
    return [
        {"pair": result["name"], **result["member"], "flips_a": result["flips"][0],
         "flips_b": result["flips"][1], "planted": int(result["holds"])}
        for result in results
    ]  # fmt: skip


def score_rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per planted pair, score and method."""
    return [
        {"pair": result["name"], "score": name, "method": method, "value": round(value, 5)}
        for result in results if result["holds"]
        for name, own in result["scores"].items() for method, value in own.items()
    ]  # fmt: skip


def correlation_rows(rows: Sequence[Mapping[str, Any]], controls: bool) -> list[dict[str, Any]]:
    """One row per two scores: mean Spearman correlation over pairs, with a 95 % t interval over pairs.

    rows: as of score_rows. controls: whether random, edges and centre are ranked among the methods.
    """
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if controls or row["method"] not in FLOORS:
            own = tables.setdefault(row["pair"], {}).setdefault(row["score"], {})
            own[row["method"]] = float(row["value"])
    names = [name for name in (*TRUTHS, *METRICS) if any(name in table for table in tables.values())]
    result = []
    for first, second in combinations(names, 2):
        rhos = [rho for table in tables.values() if math.isfinite(rho := _rho(table, first, second))]
        rho, low, high = t_interval(rhos)
        result.append({
            "first": first, "second": second, "ranked": "methods and controls" if controls else "methods",
            "rho": round(rho, 3) if rhos else "", "low": round(max(low, -1), 3),
            "high": round(min(high, 1), 3), "pairs": len(rhos),
        })  # fmt: skip
    return result


def _rho(table: Mapping[str, Mapping[str, float]], first: str, second: str) -> float:
    """Spearman's correlation over methods; NaN if one of the scores is missing or the same for all."""
    if first not in table or second not in table:
        return float("nan")
    both = np.array([(value, table[second][method]) for method, value in table[first].items()])
    both = both[np.isfinite(both).all(1)]
    if len(both) < 4 or (np.ptp(both, axis=0) == 0).any():
        return float("nan")
    return float(spearmanr(*both.T).statistic)
