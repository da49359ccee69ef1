"""Rows of the reference study: every method and every metric that a run computes, on a CNN and a ViT.

    python tests/reference_rows.py     runs the studies again and rewrites data/reference_rows.csv.gz

They stand for all numbers of a run. A change that is not meant to change numbers leaves the file alone; one
that is meant to rewrites it, and says in its message which rows changed and why.

What decides about the last bit of a number is recorded beside the rows (`made_with`). Elsewhere sums run in
another order, and the file cannot be met to the bit: see `strays` for what is asked then.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import platform
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import reference_networks
from heatproof.images.codes import make_qr, write_codes
from heatproof.run.config import toml
from heatproof.run.engine import run_study
from heatproof.store import RunFolder

FOLDER = Path(__file__).parent
ROWS = FOLDER / "data" / "reference_rows.csv.gz"
MADE_WITH = FOLDER / "data" / "reference_rows.json"
KEY = ("study", "model", "checkpoint", "image", "label", "explained", "method", "metric")
COLUMNS = (*KEY, "value", "reason")
SEEDS = {"cnn": (220, 438), "vit": (177, 14)}  # two checkpoints each: some answers right, some that change
CODES, OTHERS = 5, 3
METHODS = [
    "gradcam", "gradcam++", "ms-gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam",
    "scorecam(channels=8)", "ablationcam", "gradient", "smoothgrad(samples=4)",
    "integrated-gradients(steps=6)", "blur-ig(steps=6, sigma=8.0)", "guided-ig(steps=12)",
    "lime(samples=40, segment_count=20)", "rise(masks=40)", "random", "edges", "centre",
]  # fmt: skip
METRICS = [
    "localise", "structure", "insertion(steps=8)", "deletion(steps=8)", "randomisation(depths=2)",
    "input_shift", "fragility(draws=1)", "cscore", "cscore(tau='adaptive', weights='calibrated')",
    "accuracy", "recall", "f1", "auc", "method_agreement", "specificity(draws=2, steps=5)", "untrained",
]  # fmt: skip
MORE = [
    "gradient-x-input", "occlusion(window=12, stride=12)", "gradient-shap(samples=4)", "reciprocam",
    "kernel-shap(samples=40, segment_count=20)", "smooth-gradcam++(samples=3)",
]  # fmt: skip
ONLY = {  # for one kind of network
    "cnn": ["guided-backprop", "deeplift", "lrp", "fullgrad"],
    "vit": ["rollout", "chefer", "legrad", "attnlrp"],
}
MOSAICS = ["grid_pointing(mosaics=2)", "disconnected_grid(mosaics=1)"]  # the networks are sure, seldom right
STUDIES: dict[str, dict[str, Any]] = {  # COSE compares checkpoints, and wants maps of the predicted class
    "label": {"metrics": METRICS, "checkpoints": [1]},
    "predicted": {
        "metrics": ["cose", "cscore", *MOSAICS],
        "checkpoints": [1, 2],
        "methods": [*METHODS[::3], "random"],
    },
    "more": {
        "metrics": [
            "localise",
            "dispersion",
            "centre_bias",
            "adversarial_fragility(steps=2)",
            "structure_parts(region='box')",
            "model_edit",
        ],
        "checkpoints": [1],
        "methods": MORE,
        "targets": "label",
    },
    "dom": {  # compares checkpoints
        "metrics": ["dom"],
        "checkpoints": [1, 2],
        "methods": ["gradient-x-input", "reciprocam"],
        "targets": "label",
    },
}
Rows = dict[tuple[str, ...], tuple[str, str]]  # value (float.hex) and reason by key
NEAR = 2e-3  # two steps of the half precision in which maps are stored, at 1
SELDOM = 0.1


def made_with() -> dict[str, str]:
    cpus = Path("/proc/cpuinfo")
    vendor = re.search(r"vendor_id\s*:\s*(\S+)", cpus.read_text()) if cpus.exists() else None
    return {
        "processor": vendor[1] if vendor else platform.processor(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def compute(folder: Path) -> Rows:
    """The rows of all studies, which run in a new folder."""
    side = reference_networks.SIDE
    write_codes(make_qr(CODES, OTHERS, side, seed=0, versions=[1]), folder / "codes")
    rows: Rows = {}
    for network, seeds in SEEDS.items():
        for epoch, seed in enumerate(seeds, 1):
            weights = getattr(reference_networks, network)(seed).module.state_dict()
            torch.save(weights, folder / f"{network}-{epoch}.pt")
        for study in STUDIES:
            path = folder / f"{network}-{study}.toml"
            path.write_text(study_text(study, network))
            run_study(path, folder / f"{network}-{study}")
            rows |= read_run(study, folder / f"{network}-{study}")
    return rows


def methods_of(study: str, network: str) -> list[str]:
    """Few methods in a study: pairs of methods, and those of checkpoints, take most of its time."""
    return [*STUDIES[study].get("methods", METHODS), *(ONLY[network] if study == "more" else ())]


def study_text(study: str, network: str) -> str:
    settings = STUDIES[study]
    return toml(
        {
            "methods": methods_of(study, network),
            "metrics": settings["metrics"],
            "run": {
                "targets": settings.get("targets", study),
                "batch_size": 5,
                "threads": 1,
                "workers": 1,
                "device": "cpu",
            },
            "model": {
                "spec": f"{FOLDER / 'reference_networks.py'}:{network}",
                "name": network,
                "checkpoints": [f"{network}-{epoch}.pt" for epoch in settings["checkpoints"]],
            },
            "images": {"kind": "csv", "path": "codes/manifest.csv"},
        }
    )


def read_run(study: str, folder: Path) -> Rows:
    rows: Rows = {}
    for row in RunFolder.open(folder).scores().sql("from scores"):
        cells = [study, *("" if row[name] is None else str(row[name]) for name in KEY[1:])]
        assert tuple(cells) not in rows, f"two rows of {cells}"
        rows[tuple(cells)] = float(row["value"]).hex(), row["reason"]
    return rows


def strays(expected: Rows, actual: Rows) -> list[str]:
    """Metrics and methods more than a tenth of whose values are not near the expected ones.

    Single values may be far: where two pixels are almost equal, the last bit decides which is first, so
    pointing turns from 0 to 1, a curve of insertion takes another pixel, and guided-ig another path. On other
    instructions (SSE instead of AVX2) 0.4 % of all values were more than 0.001 away, and of no metric more
    than 5 %. Which values are defined is no matter of bits.
    """
    seen, far = Counter[str](), Counter[str]()
    for key, (text, _) in expected.items():
        method, metric = key[-2], key[-1].partition("_at_")[0]
        value, other = float.fromhex(text), float.fromhex(actual[key][0])
        names = [metric] if " ~ " in method or not method else [metric, method]
        seen.update(names)
        if math.isnan(value) != math.isnan(other) or abs(value - other) > NEAR * max(1, abs(value)):
            far.update(names)
    return [f"{name}: {far[name]} of {n} values" for name, n in seen.items() if far[name] > SELDOM * n]


def read_rows() -> Rows:
    with gzip.open(ROWS, "rt", newline="", encoding="utf-8") as file:
        return {tuple(row[: len(KEY)]): (row[-2], row[-1]) for row in list(csv.reader(file))[1:]}


def write_rows(rows: Rows) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((*key, *rows[key]) for key in sorted(rows))
    ROWS.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    MADE_WITH.write_text(json.dumps(made_with(), indent=2) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_rows(compute(Path(folder)))
    print(f"{len(read_rows())} rows, {ROWS.stat().st_size} bytes", file=sys.stderr)
