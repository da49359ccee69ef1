"""Do metrics rank methods alike, and as the truth does?

    python -m research.replication rank --data DATA --out OUT

Pairs of networks with planted evidence (research/calibration/population.py). For network A, which uses a
token, every metric scores every method on the same images with the token in them. Two rankings are the truth:

    contrast     share of a method's budget on the token for A, less the share for B, which does not use it
    transplant   share of images whose patch under the map turns other images, less that of control patches

A metric is as good as its rank correlation with these. One file per pair; a command that was stopped
continues where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from heatproof.contrast.pair import HELD_OUT, Pair, inside_token
from heatproof.disk import write_whole
from heatproof.explain.api import explain
from heatproof.images import make_qr
from heatproof.images.transforms import draw
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.cscores import cscore
from heatproof.metrics.faithfulness import insertion_deletion
from heatproof.metrics.interventions import evidence
from heatproof.metrics.localisation import localise
from heatproof.metrics.on_parts import structure
from heatproof.metrics.results import percentile_interval
from heatproof.metrics.specific import specificity
from heatproof.metrics.stability import cose
from heatproof.models.model import all_logits
from heatproof.show import eight_bit
from heatproof.studies.common import write_rows
from heatproof.studies.cose.protocol import input_pairs
from heatproof.train.loop import stratified_split
from heatproof.types import Maps
from research.calibration.collect import FLOORS, METHODS, NOISE, _signs, prepare
from research.calibration.population import SIDES, Member, members, open_pictures

IMAGES = 60
STEPS = 10  # of insertion and deletion
VARIANTS = 2  # magnitudes per transform of COSE
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
RESAMPLES = 2000
Scores = dict[str, dict[str, float]]  # by metric or truth, by method


def plan(networks: Sequence[str]) -> list[Member]:
    """Pairs of the calibration's population, cheap ones first."""
    wanted = [member for member in members(not {*networks} - {*SIDES}) if member.network in networks]
    return sorted(wanted, key=lambda member: (networks.index(member.network), member.seed, member.data))


def measure_all(
    networks: Sequence[str], data: Path, out: Path, device: str, say: Callable[[str], object]
) -> None:
    """Measure the pairs that are missing."""
    for member in plan(networks):
        path = out / f"{member.name}.json"
        if path.exists():
            continue
        pair, objects = prepare(member, data, device)
        content: dict[str, Any] = {"member": asdict(member), "holds": pair.holds}
        if pair.holds:
            content["scores"] = scores_of(member, pair, objects, open_pictures(member, data))
        write_whole({path: json.dumps(content)})
        say(f"{member.name}: {pair.planting.sentence}")


def scores_of(member: Member, pair: Pair, objects: Tensor | None, pictures: Any) -> Scores:
    """Scores of every method by all metrics that apply, and by both truths; more is better."""
    images, masks = pair.images[:IMAGES].to(pair.a.device), pair.masks[:IMAGES]
    methods, network, positive = [*METHODS, *FLOORS], pair.a, pair.positive
    maps, others = (explain(n, images, methods, positive, seed=member.seed) for n in (pair.a, pair.b))
    inputs: dict[str, Any] = {"model": network, "images": images}
    every = {m: specificity({m: own}, seed=member.seed, **inputs)[m] for m, own in maps.items()}
    areas = insertion_deletion(maps, positive, steps=STEPS, **inputs)
    result: Scores = {
        "contrast": by(maps, lambda m: inside_token(maps[m], masks) - inside_token(others[m], masks)),
        "specificity": {m: min(mean(own["weights"]), mean(own["place"])) for m, own in every.items()},
        "insertion": by(maps, lambda m: areas[m].insertion_auc),
        "deletion": by(maps, lambda m: -areas[m].deletion_auc),
    }
    probabilities = network.probabilities(all_logits(network, images))[:, positive].cpu()
    result["cscore"] = {m: cscore(own, probabilities, seed=member.seed).value for m, own in maps.items()}
    result |= {"cose": coses(pair, images, maps, member.seed), "stability": stabilities(pair, images, maps)}
    if objects is not None:
        scores = {m: localise(own, masks=objects[:IMAGES]) for m, own in maps.items()}
        for kind in ("inside", "pointing"):
            result[f"object {kind}"] = {method: mean(own[kind]) for method, own in scores.items()}
    if member.data == "qr":
        size, rows = SIDES.get(member.network, images.shape[-1]), [int(name) for name in pair.ids[:IMAGES]]
        drawn = make_qr(500, 500, size, seed=member.seed).masks
        finder, timing, box = (torch.from_numpy(drawn[name])[rows] for name in ("finder", "timing", "box"))
        result["structure"] = by(maps, lambda m: structure(maps[m], finder, timing, box)["score"])
    result["transplant"] = transplants(pair, images, pictures, methods)
    return result


def by(maps: Mapping[str, Maps], score: Callable[[str], Tensor]) -> dict[str, float]:
    return {method: mean(score(method)) for method in maps}


def mean(values: Tensor) -> float:
    return float(values.double().nanmean())


def coses(pair: Pair, images: Tensor, maps: Mapping[str, Maps], seed: int) -> dict[str, float]:
    """COSE of every method over transformed images, by eq. 4."""
    names = pair.ids[: len(images)]
    bytes_ = eight_bit(pair.a.preprocess.restore(images).clamp(0, 1))
    drawn = draw(seed, names, VARIANTS)
    ready = pair.a.preprocess.from_bytes(bytes_)
    own = explain(pair.a, ready, list(maps), seed=seed)
    pairs = input_pairs(pair.a, bytes_, own, drawn, seed=seed, same_seed=True)
    return {
        m: cose(values[pairs.same], values[~pairs.same], resamples=1).value
        for m, values in pairs.ssim.items()
    }


def stabilities(pair: Pair, images: Tensor, maps: Mapping[str, Maps]) -> dict[str, float]:
    """Rank correlation of maps under noise of two grey levels."""
    scale = torch.tensor(pair.a.preprocess.std).to(images)[:, None, None]
    noisy = images + _signs(images, pair.seed) * NOISE / scale
    moved = explain(pair.a, noisy, list(maps), pair.positive, seed=pair.seed)
    return by(maps, lambda m: map_similarity(maps[m], moved[m])["spearman"])


def transplants(pair: Pair, images: Tensor, pictures: Any, methods: Sequence[str]) -> dict[str, float]:
    """Effect of the transplant test with the windows of each method's maps, for the positive class."""
    _, held_out = stratified_split(pictures.labels, HELD_OUT, pair.seed)
    rest = held_out[pictures.labels[held_out] != pair.positive][:IMAGES]
    plain = pair.a.preprocess.from_bytes(pictures.images[rest]).to(images)
    labels = [pair.positive] * len(images) + pictures.labels[rest].tolist()
    result = {}
    for method in methods:
        record = evidence(
            labels, model=pair.a, images=torch.cat([images, plain]), methods=[method], seed=pair.seed
        )
        own = record.scores.classes.get(pair.positive)
        result[method] = float("nan") if own is None else own.value
    return result


def read_scores(out: Path) -> list[dict[str, Any]]:
    """Stored pairs whose A uses the token and whose B does not."""
    stored = [json.loads(path.read_text("utf-8")) for path in sorted(out.glob("*.json"))]
    return [pair for pair in stored if pair["holds"]]


def score_rows(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per pair, score and method."""
    return [
        {"pair": Member(**pair["member"]).name, "score": name, "method": method, "value": round(value, 5)}
        for pair in pairs for name, own in pair["scores"].items() for method, value in own.items()
    ]  # fmt: skip


def correlation_rows(rows: Sequence[Mapping[str, Any]], controls: bool) -> list[dict[str, Any]]:
    """One row per two scores: mean Spearman correlation over pairs, with a bootstrap interval over pairs.

    rows: as of score_rows. controls: whether random, edges and centre are ranked among the methods.
    """
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if controls or row["method"] not in FLOORS:
            own = tables.setdefault(row["pair"], {}).setdefault(row["score"], {})
            own[row["method"]] = float(row["value"])
    names = [name for name in (*TRUTHS, *METRICS) if any(name in table for table in tables.values())]
    rng, result = np.random.default_rng(0), []
    for first, second in combinations(names, 2):
        rhos = np.array([_rho(table, first, second) for table in tables.values()])
        rhos = rhos[np.isfinite(rhos)]
        drawn = rhos[rng.integers(0, len(rhos), (RESAMPLES, len(rhos)))].mean(1) if len(rhos) else rhos
        low, high = percentile_interval(drawn)
        result.append({
            "first": first, "second": second, "ranked": "methods and controls" if controls else "methods",
            "rho": round(float(rhos.mean()), 3) if len(rhos) else "", "low": round(low, 3),
            "high": round(high, 3), "pairs": len(rhos),
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


def write_rankings(out: Path) -> None:
    """Write rankings.csv and correlations.csv from the stored pairs of a folder."""
    rows = score_rows(read_scores(out))
    correlations = [row for controls in (False, True) for row in correlation_rows(rows, controls)]
    for name, table in (("rankings", rows), ("correlations", correlations)):
        if table:
            write_rows(out / f"{name}.csv", list(table[0]), [list(row.values()) for row in table])
