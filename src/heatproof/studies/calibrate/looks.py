"""Does the verdict say where a network looks? Asked in real runs of pairs whose objects, QR codes, are known.

A uses the token, B the code. Held-out pictures of codes in which the token lies off the code, the same ones
for both, go through a run with its verdict: A should look elsewhere, B there. Once with the pointing game and
once with the structure score. Pairs whose planting fails are passed over.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heatproof.contrast.pair import Pair
from heatproof.images import make_qr
from heatproof.images.codes import write_codes
from heatproof.show import pixels
from heatproof.studies.calibrate.collect import prepare
from heatproof.studies.calibrate.population import SIDES, Member
from heatproof.studies.qr.trainings import NETWORK
from heatproof.studies.skeleton import named_run
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import judge
from heatproof.verdict.look import looks

FIRST_SEED = 100  # pictures that no other member has
TOKENS = ("tag", "texture")  # of the others too few lie off the code
SIZE, WIDTH = "mini", 8
METHODS = ("gradcam", "layercam")
COLUMNS = ("pair", "network", "metric", "above_chance", "low", "high", "n", "read_from", "looks_there")


def measure_looks(
    out: Path,
    pairs: int,
    done: Callable[[str], object] = lambda text: None,
    now: Callable[[str], object] = lambda text: None,
) -> Path:
    """Measure so many pairs on the CPU; the table, a row for each network and metric."""
    path, rows = out / "looks.csv", []
    for seed in islice(count(FIRST_SEED), 2 * pairs):
        member = Member("qr", SIZE, TOKENS[seed % len(TOKENS)], 1.0, seed)
        pair, _ = prepare(member, None, "cpu", told=partial(_tell, now, member.name))
        if not pair.holds:
            now(f"{member.name}: {pair.planting.sentence}")
            continue
        own = [{"pair": member.name, **row} for row in answers(pair, seed, out / member.name)]
        rows += own
        _write(path, rows)
        done(f"{member.name}: " + ", ".join(f"{r['network']} {r['metric']} {r['looks_there']}" for r in own))
        if len(rows) == 4 * pairs:
            break
    return path


def _tell(now: Callable[[str], object], name: str, text: str) -> None:
    now(f"{name}, {text}")


def answers(pair: Pair, seed: int, folder: Path) -> list[dict[str, Any]]:
    """What the verdicts of both networks' runs say; runs, pictures and weights stay in the folder."""
    side = SIDES[SIZE]
    drawn = make_qr(500, 500, side, seed=seed).take(np.array([int(name) for name in pair.ids]))
    off = ~(torch.from_numpy(drawn.masks["box"]) & pair.masks.cpu()).flatten(1).any(1).numpy()
    marked = pixels(pair.images, pair.a.preprocess)
    write_codes(drawn._replace(pictures=marked).take(off), folder / "pictures", overwrite=True)
    (folder / "network.py").write_text(NETWORK.format(size=side, width=WIDTH, seed=seed))
    found = []
    for name, network in (("planted", pair.a), ("clean", pair.b)):
        torch.save(network.module.state_dict(), folder / f"{name}.pt")
        followed = None
        for metric in ("pointing", "structure_score"):
            asked = [metric] if followed is not None else ["specificity", metric]
            data = read_run(named_run(folder, f"{name}-{metric}", _study(name, asked), None).folder)
            if followed is None:
                followed = [one.method for one in judge(data).methods if one.follows == "yes"]
            said = looks(data, followed)
            assert said.test is not None
            numbers = {"above_chance": said.test.value, "low": said.test.low, "high": said.test.high}
            found.append({
                "network": name, "metric": metric, **{k: round(v, 4) for k, v in numbers.items()},
                "n": said.test.n, "read_from": " ".join(followed), "looks_there": said.looks_there,
            })  # fmt: skip
    return found


def _study(name: str, metrics: list[str]) -> dict[str, Any]:
    classes = {"class_names": ["none", "code"]}
    return {
        "methods": [*METHODS, "random"], "metrics": metrics,
        "run": {"targets": "label", "device": "cpu", "threads": 1},
        "model": {"spec": "network.py:build", "checkpoints": [f"{name}.pt"]},
        "images": {"kind": "csv", "path": "pictures/manifest.csv", "options": classes},
    }  # fmt: skip


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
