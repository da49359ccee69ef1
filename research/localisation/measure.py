"""Maps and scores of some photographs with one network: a unit of work.

    filtered   photographs with one box that covers 10 to 80 % of them (the thesis's filter): all methods
    lime       one filtered photograph of each class: LIME with other segments and samples, two seeds
    others     photographs that the filter leaves out: Grad-CAM, LIME and the controls

The true class is explained, as in the thesis. Photographs are in an order in which classes take turns, so
that the first units cover all classes. Passes of LIME, RISE, insertion and deletion are in half precision
(autocast) on a GPU; CAMs and SmoothGrad are not. Insertion and deletion compute a third of their 101 points,
where the curves bend (docs/results/passes.md: the area is off by 0.0008 on average).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heatproof.explain.api import explain
from heatproof.images import batches, open_source, select
from heatproof.images.preprocess import Preprocess
from heatproof.images.source import Source, in_turn
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.faithfulness import insertion_deletion
from heatproof.metrics.localisation import budget_masks, dispersion, localise, localise_curve, mask_overlap
from heatproof.models.load import load_model
from heatproof.models.model import Model
from heatproof.types import Batch, Maps
from research.evidence.networks import as_float, lite0, resnet50
from research.jobs import Place

NETWORKS = ("lite0", "resnet50", "squeezenet", "mobilenet")
CONTROLS = ("random", "edges", "centre")
METHODS = (
    "gradcam", "lime", "gradcam++", "layercam", "eigencam", "scorecam", "smoothgrad", "rise", *CONTROLS,
)  # fmt: skip
MASKING = ("lime", "rise")  # in half precision
SAMPLES, SEGMENTS = 1000, 100  # of LIME, in the thesis
VARIANTS = ((30, 1000), (100, 1000), (300, 1000), (100, 250))  # segments and samples
SEEDS = (0, 1)
BUDGET, BUDGETS = 0.2, (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
BOX_SHARE = (0.1, 0.8)
PARTS = {"filtered": 16, "lime": 7, "others": 22}  # photographs of a unit


class Sizes(NamedTuple):
    """How much is computed for each photograph."""

    samples: int = SAMPLES  # of LIME, at most
    masks: int = 1024  # of RISE
    channels: int = 256  # of Score-CAM
    noisy: int = 50  # samples of SmoothGrad
    steps: int = 100  # of insertion and deletion

    def calls(self) -> dict[str, str]:
        """The methods as they are called."""
        options = {
            "lime": self.lime(),
            "scorecam": f"scorecam(channels={self.channels})",
            "smoothgrad": f"smoothgrad(samples={self.noisy})",
            "rise": f"rise(masks={self.masks})",
        }
        return {name: options.get(name, name) for name in METHODS}

    def lime(self, segments: int = SEGMENTS, samples: int = SAMPLES) -> str:
        """LIME as the lime package draws its samples."""
        return f"lime(samples={min(samples, self.samples)}, segment_count={segments}, form='published')"


FULL, SMALL = Sizes(), Sizes(40, 16, 4, 2, 40)
SMALL_UNIT = 2  # photographs


@dataclass(frozen=True)
class Unit:
    """Some photographs with one network. small: two photographs and little computation, to test a machine."""

    part: str
    network: str
    block: int
    small: bool = False

    @property
    def photographs(self) -> int:
        return SMALL_UNIT if self.small else PARTS[self.part]

    @property
    def name(self) -> str:
        return f"{self.part}-{self.network}-{self.block}"


def open_photographs(data: Path) -> dict[str, Source]:
    """The photographs of each part, in an order in which classes take turns."""
    source = open_source("imagenet", data / "imagenet")
    filtered = select(source, single_object=True, box_share=BOX_SHARE)
    names = {sample.id for sample in filtered.samples}
    others = source.subset([i for i, sample in enumerate(source.samples) if sample.id not in names])
    parts = {"filtered": _in_turn(filtered), "others": _in_turn(others)}
    classes = len({sample.label for sample in filtered.samples})
    return parts | {"lime": parts["filtered"].subset(range(classes))}


def _in_turn(source: Source) -> Source:
    return source.subset(in_turn([sample.label for sample in source.samples]))


def plan(
    data: Path, networks: Sequence[str] = (), parts: Sequence[str] = (), small: bool = False
) -> list[Unit]:
    """Units in the order in which they are run; photographs outermost. small: the first of each part."""
    sources = open_photographs(data)
    blocks = {part: 1 if small else math.ceil(len(sources[part]) / size) for part, size in PARTS.items()}
    return [
        Unit(part, network, block, small)
        for part in PARTS if part in (parts or PARTS)
        for block, network in product(range(blocks[part]), networks or NETWORKS)
    ]  # fmt: skip


def inputs_of(unit: Unit) -> int:
    """How many inputs pass through the network, roughly; SmoothGrad's gradients count three times."""
    sizes = SMALL if unit.small else FULL
    if unit.part == "lime":
        return unit.photographs * sum(min(n, sizes.samples) for _, n in VARIANTS) * len(SEEDS)
    points = 2 * sizes.steps // 3
    if unit.part == "others":
        return unit.photographs * (sizes.samples + points * (2 + len(CONTROLS)))
    masking = sizes.samples + sizes.masks + sizes.channels + 3 * sizes.noisy
    return unit.photographs * (masking + points * len(METHODS))


class Halved(nn.Module):
    """A network that computes in half precision on a GPU."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.float16, enabled=images.is_cuda):
            output: Tensor = self.module(images)
        return output.float()


def open_network(name: str, data: Path) -> Model:
    weights = data / "weights"
    if name == "lite0":
        made = lite0(data)
    elif name == "resnet50":
        made = resnet50(data)
    elif name == "squeezenet":
        made = load_model("torchvision:squeezenet1_1", str(weights / "squeezenet1_1.pt"))
    else:
        made = mobilenet(weights / "mobilenet_v2.pt")
    return replace(made, preprocess=replace(made.preprocess, resize=256, interpolation="bicubic"))


def mobilenet(file: Path) -> Model:
    """MobileNetV2 with the padding of TensorFlow, with which its weights were trained."""
    from torchvision.models import mobilenet_v2

    module = mobilenet_v2()
    stored = torch.load(file, weights_only=True)
    module.load_state_dict({name: as_float(values) for name, values in stored.items()})
    for block in list(module.modules()):
        for name, part in list(block.named_children()):
            if isinstance(part, nn.Conv2d) and part.stride == (2, 2):
                part.padding = (0, 0)
                setattr(block, name, nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), part))
    return Model(module.eval(), "mobilenet", Preprocess((224, 224), 256, (0.5,) * 3, (0.5,) * 3))


@lru_cache(maxsize=len(NETWORKS))
def _on_device(name: str, data: Path, device: str) -> Model:
    """A network, read once by each process."""
    made = open_network(name, data)
    made.module.to(device)
    return made


def run(unit: Unit, data: Path, device: str) -> dict[str, Any]:
    """The scores of a unit, as JSON."""
    start = time.perf_counter()
    source, size = open_photographs(data)[unit.part], unit.photographs
    rows = range(unit.block * size, min(len(source), (unit.block + 1) * size))
    exact = _on_device(unit.network, data, device)
    fast = Model(Halved(exact.module).eval(), unit.network, exact.preprocess)
    loaded = next(batches(source, exact.preprocess, len(rows), rows, workers=0, fail_fast=True))
    batch = loaded.batch
    images = batch.images.to(device)
    measured = (variants if unit.part == "lime" else scores)(unit, exact, fast, batch, images)
    result = {"name": unit.name, "part": unit.part, "network": unit.network, **measured}
    return result | {
        "inputs": inputs_of(unit),
        "seconds": round(time.perf_counter() - start, 1),
        "device": device,
    }


def scores(unit: Unit, exact: Model, fast: Model, batch: Batch, images: Tensor) -> dict[str, Any]:
    """A row per photograph, and one per photograph and method."""
    assert batch.labels is not None and batch.truth is not None
    sizes = SMALL if unit.small else FULL
    names = METHODS if unit.part == "filtered" else ("gradcam", "lime", *CONTROLS)
    calls, maps = sizes.calls(), dict[str, Maps]()
    for model, masking in ((exact, False), (fast, True)):
        chosen = {name: calls[name] for name in names if (name in MASKING) == masking}
        made = explain(model, images, list(chosen.values()), targets=batch.labels)
        maps |= {name: made[call] for name, call in chosen.items()}
    maps = {name: maps[name] for name in names}
    curves = insertion_deletion(
        maps, batch.labels, model=fast, images=images, steps=sizes.steps, adaptive=True
    )
    boxes, rows = batch.truth.boxes, []
    for name, own in maps.items():
        areas, hit = localise_curve(own, boxes, budgets=BUDGETS), localise(own, boxes, budget=BUDGET)
        columns = {f"mask_iou_{round(100 * budget)}": areas["mask_iou"][:, i]
                   for i, budget in enumerate(BUDGETS)}  # fmt: skip
        columns |= {key: hit[key] for key in ("box_iou", "inside", "pointing")}
        columns |= {"insertion": curves[name].insertion_auc, "deletion": curves[name].deletion_auc}
        columns["dispersion"] = dispersion(own, budget=BUDGET)["dispersion"]
        rows += list(_rows(batch.ids, {"method": name}, columns))
    probabilities, halved = (model.logits(images).float().softmax(1).cpu() for model in (exact, fast))
    confidence, predicted = probabilities.max(1)
    own_class = torch.arange(len(predicted)), batch.labels.cpu()
    shared = mask_overlap(*(budget_masks(maps[name], BUDGET).flatten(1) for name in ("gradcam", "lime")))
    area = localise_curve(maps["gradcam"], boxes, budgets=(1.0,))["reachable"][:, 0]
    photographs = _rows(batch.ids, {}, {
        "label": batch.labels, "predicted": predicted, "probability": probabilities[own_class],
        "confidence": confidence, "overlap": shared, "box_share": area,
        "half_precision": (halved - probabilities)[own_class].abs(),
    })  # fmt: skip
    return {"photographs": list(photographs), "scores": rows}


def variants(unit: Unit, exact: Model, fast: Model, batch: Batch, images: Tensor) -> dict[str, Any]:
    """A row per photograph and form of LIME: scores of the first seed, similarity of both."""
    assert batch.labels is not None and batch.truth is not None
    sizes, rows = SMALL if unit.small else FULL, []
    for segments, samples in VARIANTS:
        call = sizes.lime(segments, samples)
        first, second = (explain(fast, images, [call], targets=batch.labels, seed=s)[call] for s in SEEDS)
        own = localise(first, batch.truth.boxes, budget=BUDGET)
        columns = {key: own[key] for key in ("mask_iou", "box_iou", "inside", "pointing")}
        columns["overlap"] = mask_overlap(*(budget_masks(m, BUDGET).flatten(1) for m in (first, second)))
        columns["spearman"] = map_similarity(first, second)["spearman"]
        rows += list(_rows(batch.ids, {"segments": segments, "samples": samples}, columns))
    return {"lime": rows}


def _rows(
    ids: Sequence[str], head: Mapping[str, Any], columns: Mapping[str, Tensor]
) -> Iterator[dict[str, Any]]:
    """A row per image; its name is the number of the photograph in ImageNet's validation set."""
    values = {key: column.tolist() for key, column in columns.items()}
    for i, image in enumerate(ids):
        numbers = {key: v if isinstance(v := of[i], int) else round(v, 4) for key, of in values.items()}
        yield {"image": int(Path(image).stem.rpartition("_")[2]), **head, **numbers}


def measure_unit(unit: Unit, place: Place) -> dict[str, Any]:
    return run(unit, place.real_data, place.device)


def describe(result: Mapping[str, Any]) -> str:
    return f"{result['inputs']:,} inputs"
