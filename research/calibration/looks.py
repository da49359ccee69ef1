"""Does the verdict say where a network looks? Asked in real runs of pairs whose objects, QR codes, are known.

A uses the token, B the code. Held-out pictures of codes with the token somewhere off the code, the same ones
for both, go through a run with its verdict: A should look elsewhere, B there. Once with the pointing game and
once with the structure score. Pairs whose planting fails are passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from heatproof.verdict.look import looks
from torch import Tensor

from heatproof.contrast.pair import Pair, make_pair
from heatproof.contrast.tokens import Token
from heatproof.images import make_qr
from heatproof.images.codes import QRSet, write_codes
from heatproof.show import pixels
from heatproof.studies.common import named_run, write_rows
from heatproof.studies.qr.trainings import NETWORK, as_data
from heatproof.train.loop import fit, stratified_split
from heatproof.train.networks import small_net
from heatproof.train.recipe import Phase, Recipe
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import judge

SIDE, WIDTH, EACH = 48, 8, 300
FASTER = 2e-3  # learning rate: these networks know little that could be lost
TOKENS = tuple(Token(kind, 0.2) for kind in ("tag", "tint", "texture"))
TRIES = 50  # places of a token
MOST = 60  # pictures
METHODS = ("gradcam", "layercam")
COLUMNS = ("pair", "network", "metric", "above_chance", "low", "high", "n", "read_from", "looks_there")


def measure_looks(
    out: Path,
    pairs: int,
    done: Callable[[str], object] = lambda text: None,
    now: Callable[[str], object] = lambda text: None,
) -> Path:
    """Measure so many pairs on the CPU; the table, a row for each network and metric."""
    path = out / "looks.csv"
    rows: list[dict[str, Any]] = []
    for seed in islice(count(), 2 * pairs):
        token = TOKENS[seed % len(TOKENS)]
        name = f"qr-{token.name}-{seed}"
        now(f"{name}, training")
        drawn = make_qr(EACH, EACH, SIDE, seed=seed)
        pair = code_pair(drawn, token, seed)
        now(f"{name}, {pair.planting.sentence}")
        if pair.holds:
            own = [{"pair": name, **row} for row in answers(pair, drawn, out / name)]
            rows += own
            write_rows(path, COLUMNS, ([row[name] for name in COLUMNS] for row in rows))
            summary = ", ".join(f"{row['network']} {row['metric']} {row['looks_there']}" for row in own)
            done(f"{name}: {summary}")
        if len(rows) == 4 * pairs:
            break
    return path


def code_pair(drawn: QRSet, token: Token, seed: int) -> Pair:
    """A small network that knows codes from other pictures, and its two copies."""
    data, model = as_data(drawn), small_net(2, SIDE, WIDTH, seed)
    train, held_out = stratified_split(data.labels, 0.4, seed)
    fit(model, data.take(train), data.take(held_out), Recipe((Phase(4, FASTER, clip=1.0),), 32), seed=seed)
    ready = model.preprocess.from_bytes(data.images)
    return make_pair(model, ready, data.labels, token, 1, seed=seed, lr=FASTER)


def off_the_code(pair: Pair, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The pair's pictures with the token off the code, and which of them have room for that."""
    marked, placed = pair.plain.clone(), torch.zeros(len(codes), dtype=torch.bool)
    for attempt in range(TRIES):
        ids = [f"{name} {attempt}" for name in pair.ids]
        tried, masks = pair.token.plant(pair.plain, ids, pair.a.preprocess, pair.seed)
        valid = ~(masks & codes).flatten(1).any(1) & ~placed
        marked[valid] = tried[valid]
        placed |= valid
    return marked, placed


def answers(pair: Pair, drawn: QRSet, folder: Path) -> list[dict[str, Any]]:
    """What the verdicts of both networks' runs say; runs, pictures and weights stay in the folder."""
    selected = drawn.take(np.array([int(name) for name in pair.ids]))
    marked, placed = off_the_code(pair, torch.from_numpy(selected.masks["box"]))
    chosen = placed.nonzero().flatten()[:MOST].numpy()
    marked_codes = selected._replace(pictures=pixels(marked, pair.a.preprocess)).take(chosen)
    write_codes(marked_codes, folder / "pictures", overwrite=True)
    (folder / "network.py").write_text(NETWORK.format(size=SIDE, width=WIDTH, seed=pair.seed))
    results = []
    for name, network in (("planted", pair.a), ("clean", pair.b)):
        torch.save(network.module.state_dict(), folder / f"{name}.pt")
        followed: list[str] | None = None
        for metric in ("pointing", "structure_score"):
            metrics = ["specificity", metric] if followed is None else [metric]
            data = read_run(named_run(folder, f"{name}-{metric}", _study(name, metrics), None).folder)
            if followed is None:
                followed = [answer.method for answer in judge(data).methods if answer.follows == "yes"]
            looked = looks(data, followed)
            assert looked.test is not None
            numbers = {"above_chance": looked.test.value, "low": looked.test.low, "high": looked.test.high}
            results.append({
                "network": name, "metric": metric, **{k: round(v, 4) for k, v in numbers.items()},
                "n": looked.test.n, "read_from": " ".join(followed), "looks_there": looked.looks_there,
            })  # fmt: skip
    return results


def _study(name: str, metrics: list[str]) -> dict[str, Any]:
    return {
        "methods": [*METHODS, "random"], "metrics": metrics,
        "run": {"targets": "label", "device": "cpu", "threads": 1},
        "model": {"spec": "network.py:build", "checkpoints": [f"{name}.pt"]},
        "images": {"kind": "csv", "path": "pictures/manifest.csv",
                   "options": {"class_names": ["none", "code"]}},
    }  # fmt: skip
