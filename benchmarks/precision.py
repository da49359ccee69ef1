"""What a precision changes: the same study run in fp32 and in another, maps and rows side by side.

    python -m benchmarks --section precision --data DATA --csv docs/results/precision      needs DATA/cifar10

The network is the trained ResNet-20 for CIFAR-10 that DATA holds, with as many test pictures of each class.
Writes maps.csv (rank correlation of each method's maps, picture by picture) and rows.csv (every metric).
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.common import Part, rounded
from benchmarks.sections import BenchOptions
from heatproof.errors import InputError
from heatproof.images.preprocess import Preprocess
from heatproof.metrics.agreement import map_similarity
from heatproof.models.model import Model
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from research.calibration.population import CifarResNet

METHODS = (
    "gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam", "gradient",
    "integrated-gradients(steps=8)", "rise(masks=60)", "edges",
)  # fmt: skip
METRICS = (
    "insertion(steps=10)", "deletion(steps=10)", "randomisation(depths=2)", "fragility(draws=1)",
    "input_shift", "cscore", "method_agreement", "accuracy",
)  # fmt: skip
QUICK_METHODS, QUICK_METRICS = ("gradcam", "gradient"), ("insertion(steps=10)", "method_agreement")
REFERENCE = "fp32"
Cells = Mapping[str, object]


def parts(options: BenchOptions) -> Iterator[Part]:
    """Both runs are in the first part, their rows in the second."""
    if options.data is None or not (options.data / "cifar10").is_dir():
        raise InputError(
            "the section precision needs a trained network: "
            "name a folder with cifar10/resnet20.safetensors and cifar10/cifar10.npz by --data"
        )
    data, images = options.data.resolve(), options.pictures or (2 if options.quick else 20)
    with tempfile.TemporaryDirectory() as place:
        runs = {}

        def run(precision: str) -> RunFolder:
            if precision not in runs:
                done = run_study(study(data, precision, images, options), Path(place) / precision)
                if done.stopped:
                    raise KeyboardInterrupt
                runs[precision] = done.folder
            return runs[precision]

        def compared(by: Callable[..., Iterator[Cells]], precision: str) -> list[Cells]:
            table = by(run(REFERENCE), run(precision), precision)
            return rounded({**row, "images": images} for row in table)

        for precision in options.precision or ("bf16",):
            for name, by in {"maps": map_rows, "rows": metric_rows}.items():
                yield Part(f"{name}, {precision}", partial(compared, by, precision), options.device, name)


def resnet20() -> Model:
    """The network of He et al. 2016, section 4.2, for pictures of 32x32; weights come from a checkpoint."""
    return Model(CifarResNet(3).eval(), "resnet20", Preprocess((32, 32), 32))


def study(data: Path, precision: str, images: int, options: BenchOptions) -> dict[str, Any]:
    return {
        "methods": list(QUICK_METHODS if options.quick else METHODS),
        "metrics": list(QUICK_METRICS if options.quick else METRICS),
        "run": {"precision": precision, "device": options.device, "targets": "predicted", "pictures": False},
        "model": {
            "spec": f"{__file__}:resnet20",
            "name": "resnet20",
            "checkpoints": [str(data / "cifar10" / "resnet20.safetensors")],
        },
        "images": {
            "kind": "npz", "path": str(data / "cifar10" / "cifar10.npz"), "limit": images,
            "options": {"split": "test"},
        },
    }  # fmt: skip


def map_rows(first: RunFolder, other: RunFolder, precision: str) -> Iterator[Cells]:
    rows = first.scores().sql(
        "select distinct checkpoint, image, method from scores where metric = 'degenerate'"
    )
    ids: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: str(row["image"])):
        ids[row["checkpoint"], row["method"]].append(row["image"])
    for (checkpoint, method), names in sorted(ids.items()):
        a, b = (run.maps().read(checkpoint, method, names) for run in (first, other))
        ranks = [value for value in map_similarity(a, b)["spearman"].tolist() if not math.isnan(value)]
        yield {
            "precision": precision, "method": method, "maps": len(ranks),
            "spearman_median": median(ranks), "spearman_lowest": min(ranks),
            "difference": float((a.normalised() - b.normalised()).abs().mean()),
            "same_class": fmean((a.explained == b.explained).float().tolist()),
        }  # fmt: skip


def metric_rows(first: RunFolder, other: RunFolder, precision: str) -> Iterator[Cells]:
    query = "select image, method, metric, label, explained, value from scores"
    sides = [_by_key(run.scores().sql(query)) for run in (first, other)]
    pairs: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for (image, method, metric, label), value in sides[0].items():
        beside = sides[1].get((image, method, metric, label), math.nan)
        if not (math.isnan(value) or math.isnan(beside)) and "_at_" not in metric:
            pairs[metric][method].append((value, beside))
    for metric, methods in sorted(pairs.items()):
        rows = [pair for of in methods.values() for pair in of]
        means = [(fmean(a for a, _ in of), fmean(b for _, b in of)) for of in methods.values()]
        yield {
            "precision": precision, "metric": metric, "rows": len(rows), "methods": len(methods),
            "mean": fmean(a for a, _ in rows), "mean_other": fmean(b for _, b in rows),
            "row_change": fmean(abs(a - b) for a, b in rows),
            "largest_mean_change": max(abs(a - b) for a, b in means),
            "spread_of_methods": max(a for a, _ in means) - min(a for a, _ in means),
        }  # fmt: skip


def _by_key(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], float]:
    """A row of an image is known by its picture, method and metric; probabilities also by their class."""
    return {
        (
            r["image"],
            r["method"],
            r["metric"],
            r["explained"] if r["metric"] == "probability" else r["label"],
        ): r["value"]
        for r in rows
    }
