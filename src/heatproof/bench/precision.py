"""What a precision changes: the same study run in fp32 and in another, maps and rows side by side.

    python -m heatproof.bench.precision DATA --csv docs/results/precision      needs DATA/cifar10

The networks are the trained residual networks of CIFAR-10 that DATA holds, with test pictures of all classes.
Writes maps.csv (rank correlation of each method's maps, picture by picture) and rows.csv (every metric).
"""

from __future__ import annotations

import csv
import math
import platform
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import torch

from heatproof.images.preprocess import Preprocess
from heatproof.metrics.agreement import map_similarity
from heatproof.models.model import Model
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from heatproof.studies.calibrate.population import CifarResNet

METHODS = (
    "gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam", "gradient",
    "integrated-gradients(steps=8)", "rise(masks=60)", "edges",
)  # fmt: skip
METRICS = (
    "insertion(steps=10)", "deletion(steps=10)", "randomisation(depths=2)", "fragility(draws=1)",
    "input_shift", "cscore", "method_agreement", "accuracy",
)  # fmt: skip
REFERENCE = "fp32"
Table = list[dict[str, Any]]


def resnet20() -> Model:
    """The network of He et al. 2016, section 4.2, for pictures of 32x32; weights come from a checkpoint."""
    return Model(CifarResNet(3).eval(), "resnet20", Preprocess((32, 32), 32))


def study(data: Path, precision: str, images: int) -> dict[str, Any]:
    return {
        "methods": list(METHODS),
        "metrics": list(METRICS),
        "run": {"precision": precision, "device": "cpu", "targets": "predicted", "pictures": False},
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


def compare(one: RunFolder, other: RunFolder, precision: str) -> tuple[Table, Table]:
    """Rows of maps.csv and of rows.csv for two runs of the same study."""
    return list(_maps(one, other, precision)), list(_rows(one, other, precision))


def _maps(one: RunFolder, other: RunFolder, precision: str) -> Iterator[dict[str, Any]]:
    found = one.scores().sql(
        "select distinct checkpoint, image, method from scores where metric = 'degenerate'"
    )
    ids: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in sorted(found, key=lambda row: str(row["image"])):
        ids[row["checkpoint"], row["method"]].append(row["image"])
    for (checkpoint, method), names in sorted(ids.items()):
        a, b = (run.maps().read(checkpoint, method, names) for run in (one, other))
        ranks = [value for value in map_similarity(a, b)["spearman"].tolist() if not math.isnan(value)]
        yield {
            "precision": precision, "method": method, "maps": len(ranks),
            "spearman_median": median(ranks), "spearman_lowest": min(ranks),
            "difference": float((a.normalised() - b.normalised()).abs().mean()),
            "same_class": fmean((a.explained == b.explained).float().tolist()),
        }  # fmt: skip


def _rows(one: RunFolder, other: RunFolder, precision: str) -> Iterator[dict[str, Any]]:
    query = "select image, method, metric, label, explained, value from scores"
    sides = [_by_key(run.scores().sql(query)) for run in (one, other)]
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


def write(table: Table, path: Path, images: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*table[0], "images", "machine"], lineterminator="\n")
        writer.writeheader()
        for row in table:
            numbers = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(numbers | {"images": images, "machine": machine})


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--csv", "out", type=click.Path(path_type=Path), required=True, help="Folder of the tables.")
@click.option("--images", default=30, show_default=True, help="Test pictures, the same number of each class.")
@click.option("--precision", default="bf16", show_default=True, help="What fp32 is compared with.")
def main(data: Path, out: Path, images: int, precision: str) -> None:
    """Run a study in fp32 and in another precision on the networks in DATA, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / name for name in (REFERENCE, precision)]
        for run in runs:
            run_study(study(data, run.name, images), run)
        maps, rows = compare(RunFolder.open(runs[0]), RunFolder.open(runs[1]), precision)
    write(maps, out / "maps.csv", images)
    write(rows, out / "rows.csv", images)


if __name__ == "__main__":
    main()
