"""What the runner adds to decoding and explaining: its checks, rows, maps, pictures and files.

Runs of n and of 2 n pictures take turns with a loop over n. The difference of the two runs is what n further
pictures cost, whatever opening and closing a run takes, which is a row of its own: with it, a short run would
be judged by its length.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import torch

from benchmarks.common import Part, Row, cost, side_by_side, write_pictures
from benchmarks.sections import BenchOptions
from heatproof.explain.api import explain
from heatproof.images import Source, batches, open_source
from heatproof.models import Model, load_model
from heatproof.run.config import toml
from heatproof.run.engine import run_study

METHODS = ["gradcam", "gradcam++", "layercam"]
BATCH = 16
LIMIT = "<= 1.15"


def parts(options: BenchOptions) -> Iterator[Part]:
    """Three CAMs of ResNet-50 (ResNet-18 when quick), decoded from JPEG files on both sides."""
    network, n = ("resnet18", 32) if options.quick else ("resnet50", 96)
    yield Part("a run and a loop", partial(rows, network, n, options.device), options.device)


def rows(network: str, n: int, device: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, network, n, device)
        model = load_model(f"torchvision:{network}", folder / "weights.pt", num_classes=2, device=device)
        number = count()

        def run(study: str) -> None:
            if run_study(folder / study, folder / f"run{next(number)}").stopped:
                raise KeyboardInterrupt

        source = open_source("folder", folder / "pictures")
        contenders: dict[str, Callable[[], object]] = {
            "loop": partial(loop, model, source, n),
            "n": partial(run, "n.toml"),
            "2n": partial(run, "2n.toml"),
        }
        ms = side_by_side(contenders, 3, device, warmup=1)
    return judged(f"a run of three CAMs, {network}", n, ms)


def judged(what: str, n: int, ms: dict[str, float]) -> list[Row]:
    """Each further picture, and what a run takes before the first one and after the last."""
    further, looped = (ms["2n"] - ms["n"]) / n, ms["loop"] / n
    other = "decode and explain in a loop"
    opening = max(0.0, 2 * ms["n"] - ms["2n"])
    return [
        cost(f"{what}: each further picture", further, other, looped, LIMIT, f"of {n}"),
        cost(f"{what}: opening and closing", opening, f"{other}, one picture", looped, note="once in a run"),
    ]


def loop(model: Model, source: Source, n: int) -> None:
    for loaded in batches(source, model.preprocess, BATCH, range(n)):
        explain(model, loaded.batch.images, METHODS, targets=loaded.batch.labels, batch_size=BATCH)


def write(folder: Path, network: str, n: int, device: str) -> None:
    write_pictures(folder / "pictures", 2 * n)
    model = load_model(f"torchvision:{network}", num_classes=2)
    torch.save(model.module.state_dict(), folder / "weights.pt")
    settings = {"batch_size": BATCH, "inputs_per_pass": BATCH, "threads": torch.get_num_threads()}
    for name, limit in (("n", n), ("2n", 2 * n)):
        config = {
            "methods": METHODS,
            "run": {**settings, "device": device},
            "model": {"spec": f"torchvision:{network}", "num_classes": 2, "checkpoints": "weights.pt"},
            "images": {"kind": "folder", "path": "pictures", "limit": limit},
        }
        (folder / f"{name}.toml").write_text(toml(config), encoding="utf-8")
