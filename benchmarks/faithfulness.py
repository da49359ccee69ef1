"""Insertion and deletion beside the bare forward passes they need, and how their cost grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.common import RECORDED, Part, Row, cost, network, side_by_side
from benchmarks.sections import BenchOptions
from heatproof.metrics.faithfulness import insertion_deletion
from heatproof.metrics.results import Curve
from heatproof.models.accel import Accelerator
from heatproof.models.model import Model

SIZE = (224, 224)
STEPS = 100
FEW_STEPS = 20  # enough to see how the cost grows
GROWTH = "<= 2.2"


def parts(options: BenchOptions) -> Iterator[Part]:
    """ResNet-50, or ResNet-18 when quick."""
    device = options.device
    torch.manual_seed(0)
    model = network("resnet18" if options.quick else "resnet50", device)
    count = 8 if options.gpu else 1
    repeat = 1 if options.quick and not options.gpu else 3
    yield Part("beside bare passes", partial(_beside_bare, model, count, repeat, device), device)
    yield Part("growth", partial(_growth, model, count, repeat, device), device)
    yield Part("adaptive steps", partial(_adaptive, model, count, device), device)


def _beside_bare(model: Model, count: int, repeat: int, device: str) -> list[Row]:
    images, maps = _inputs(count, device)
    batch = Accelerator(model).batch_size(SIZE)
    passes = count * 2 * STEPS
    full = torch.randn(batch, 3, *SIZE, device=device).contiguous(memory_format=torch.channels_last)
    rest = full[: passes % batch].contiguous(memory_format=torch.channels_last)

    def bare() -> None:
        with torch.inference_mode():
            for _ in range(passes // batch):
                model.module(full)
            if len(rest):
                model.module(rest)

    ours = partial(insertion_deletion, maps, 0, model=model, images=images)
    ms = side_by_side({"ours": ours, "bare": bare}, repeat, device)
    what = f"insertion and deletion, {STEPS} steps, images {count}, {model.name}"
    other = f"{passes} bare forward passes, batch {batch}"
    return [cost(what, ms["ours"], other, ms["bare"], "<= 1.15")]


def _growth(model: Model, count: int, repeat: int, device: str) -> list[Row]:
    """Time with the images doubled, and with the methods doubled, relative to neither doubled."""
    images, maps = _inputs(2 * count, device)
    half = {"a": maps[:count]}
    walk = partial(insertion_deletion, targets=0, model=model, steps=FEW_STEPS)
    contenders: dict[str, Callable[[], object]] = {
        "one": partial(walk, half, images=images[:count]),
        "images": partial(walk, {"a": maps}, images=images),
        "methods": partial(walk, half | {"b": maps[count:]}, images=images[:count]),
    }
    ms = side_by_side(contenders, repeat, device)
    return [
        cost(f"insertion and deletion, {what} doubled", ms[what], "not doubled", ms["one"], GROWTH)
        for what in ("images", "methods")
    ]


def _adaptive(model: Model, count: int, device: str) -> list[Row]:
    """Passes saved; the error is that of a network with random weights, whose curves are smooth."""
    images, maps = _inputs(count, device)
    curves: dict[str, Curve] = {}

    def run(adaptive: bool) -> None:
        curves["adaptive" if adaptive else "full"] = insertion_deletion(
            maps, 0, model=model, images=images, adaptive=adaptive
        )

    ways = {"adaptive": partial(run, True), "full": partial(run, False)}
    ms = side_by_side(ways, 1, device, warmup=0 if device == "cpu" else RECORDED)
    full, adaptive = curves["full"], curves["adaptive"]
    errors = (full.insertion_auc - adaptive.insertion_auc, full.deletion_auc - adaptive.deletion_auc)
    error = torch.stack(errors).abs().max().item()
    note = f"passes {adaptive.passes} of {full.passes}; largest error of an area {error:.1e}"
    what, share = "adaptive steps, share of the passes", adaptive.passes / full.passes
    return [Row(what, ms["adaptive"], "100 steps", ms["full"], share, "<= 0.3334", note)]


def _inputs(count: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, *SIZE, generator=generator)
    return images.to(device), torch.rand(count, 7, 7, generator=generator).to(device)
