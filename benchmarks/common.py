"""How `python -m benchmarks` measures: contenders take turns in one process, medians are compared as ratios.

A row is ours beside something else. `cost` rows say what we take of the other's time, the less the better;
`speed` rows how many times as fast we are. Where a ratio is neither, the row says what it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from heatproof.errors import need
from heatproof.models import load_model
from heatproof.models.model import Model
from heatproof.run.config import toml

CAMS = ("gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam")
RECORDED = 4  # turns after which a pass on a GPU has been recorded as a CUDA graph, with one to spare
GRAD_CAM = ("GradCAM", "GradCAMPlusPlus", "LayerCAM", "XGradCAM", "HiResCAM", "EigenCAM", "EigenGradCAM")


@dataclass(frozen=True)
class Row:
    """One line of the table: ours against something else, measured side by side."""

    what: str
    ours_ms: float
    other: str
    other_ms: float
    ratio: float  # what the limit speaks of; its meaning is in `what`
    limit: str = ""  # such as "<= 1.25"
    note: str = ""


@dataclass(frozen=True)
class Part:
    """What is measured in one go: said before it begins, and its rows kept once it has ended.

    The name holds whatever the sizes are: rows of the same part replace each other.
    """

    name: str
    measure: Callable[[], Sequence[Row] | Sequence[Mapping[str, object]]]
    device: str = "cpu"
    table: str = ""  # whose rows have columns of their own: the file's name


def cost(what: str, ours: float, other: str, other_ms: float, limit: str = "", note: str = "") -> Row:
    """Our time as a multiple of the other's."""
    return Row(what, ours, other, other_ms, ours / other_ms, limit, note)


def speed(what: str, ours: float, other: str, other_ms: float, limit: str = "", note: str = "") -> Row:
    """How many times as fast as the other we are."""
    return Row(what, ours, other, other_ms, other_ms / ours, limit, note)


def side_by_side(
    contenders: Mapping[str, Callable[[], object]],
    repeat: int = 5,
    device: str = "cpu",
    warmup: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median milliseconds of each contender; they take turns in rotated order, so that drift, and what the
    one before leaves in caches, hit all alike.

    clock: of a CPU; time.process_time does not count other programs.
    """
    warmup = (1 if device == "cpu" else RECORDED) if warmup is None else warmup
    for contender in contenders.values():
        for _ in range(warmup):
            contender()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeat):
        first = turn % len(contenders)
        for name in (*list(contenders)[first:], *list(contenders)[:first]):
            times[name].append(_once(contenders[name], device, clock))
    return {name: statistics.median(values) for name, values in times.items()}


def _once(function: Callable[[], object], device: str, clock: Callable[[], float]) -> float:
    if device.startswith("cuda"):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))
    begin = clock()
    function()
    return (clock() - begin) * 1e3


def write_pictures(folder: Path, count: int) -> None:
    """Smooth noise as JPEG files of 400 x 320, in two classes."""
    random = np.random.default_rng(0)
    for i in range(count):
        file = folder / ("a", "b")[i % 2] / f"{i:03d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        small = random.integers(0, 256, (16, 20, 3), dtype=np.uint8)
        Image.fromarray(small).resize((400, 320), Image.Resampling.BICUBIC).save(file, quality=90)


def write_study(
    folder: Path,
    spec: Mapping[str, Any],
    pictures: int,
    methods: Sequence[str],
    metrics: Sequence[str] = (),
    **run: object,
) -> None:
    """study.toml of made-up pictures and a network with random weights; the run's settings are named."""
    write_pictures(folder / "pictures", pictures)
    torch.manual_seed(0)
    options = dict(spec)
    torch.save(load_model(options.pop("spec"), **options).module.state_dict(), folder / "weights.pt")
    config = {
        "methods": list(methods),
        "metrics": list(metrics),
        "run": {"threads": torch.get_num_threads(), **run},
        "model": {**spec, "checkpoints": "weights.pt"},
        "images": {"kind": "folder", "path": "pictures"},
    }
    (folder / "study.toml").write_text(toml(config), encoding="utf-8")


def rounded(rows: Iterable[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Numbers to six digits, as tables show them at most."""
    return [
        {name: float(f"{cell:.6g}") if isinstance(cell, float) else cell for name, cell in row.items()}
        for row in rows
    ]


def network(name: str, device: str) -> Model:
    """A network of torchvision with random weights."""
    models = need("torchvision", "torchvision").models
    return Model(getattr(models, name)(weights=None).eval().to(device), name)


def cam_like(n: int, seed: int = 0) -> Tensor:
    """Maps as a CAM gives them, "n 7 7": mostly one place, with noise of their own."""
    centre = torch.linspace(-1, 1, 7)
    blob = torch.exp(-2 * (centre[:, None] ** 2 + centre**2))
    noise = torch.randn(n, 7, 7, generator=torch.Generator().manual_seed(seed))
    return (blob + 0.3 * noise).clamp(min=0)
