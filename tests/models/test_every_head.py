"""What holds for every head: each method and each metric gives numbers, or says in one sentence why not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from conftest import needs_cuda, same, small_cnn, small_vit, state_of
from heatproof.errors import HeatproofError, InputError
from heatproof.metrics.kit import BatchContext, CheckpointContext, ImagePool, PerImage
from heatproof.metrics.on_parts import part_occlusion
from heatproof.models.accel import Accelerator
from heatproof.models.dense_heads import HEADS
from heatproof.models.model import Model, bind_targets
from heatproof.models.running import frozen_eval
from heatproof.registry import explainers, metrics
from heatproof.run.score import measure
from heatproof.types import Batch, Truth

SIDE = 16
LITTLE = {"samples": 6, "masks": 6, "steps": 4, "channels": 4, "segment_count": 9}  # work, of methods


def cheap_call(name: str) -> str:
    options = [f"{k}={v}" for k, v in LITTLE.items() if k in explainers.get(name).options]
    return f"{name}({', '.join(options)})" if options else name


CLASSES = 3


class Pixels(nn.Module):
    """A class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_cnn()[:9]
        self.end = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        grown = nn.functional.interpolate(self.end(self.body(x)), x.shape[-2:], mode="bilinear")
        return {"out": 5 * grown}


class Boxes(nn.Module):
    """A box in each of 4 x 4 cells, as torchvision's detectors give them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_cnn()[:9]
        self.end = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        chances = (5 * self.end(self.body(x))).sigmoid()
        cell = x.shape[-1] / chances.shape[-1]
        rows, columns = torch.meshgrid(*[torch.arange(n) for n in chances.shape[-2:]], indexing="ij")
        low = cell * torch.stack([columns, rows], -1).flatten(0, 1)
        boxes = torch.cat([low, low + cell], 1).to(x)
        return [
            {"boxes": boxes, "scores": chance.flatten(1).amax(0), "labels": chance.flatten(1).argmax(0)}
            for chance in chances
        ]


def first_logit(output: Tensor) -> Tensor:
    return output[:, 0]


def class_like(end: Callable[[nn.Module], nn.Module], classes: int = CLASSES) -> Callable[[bool], nn.Module]:
    return lambda vit: end((small_vit if vit else small_cnn)(classes)).eval()


def dense(make: Callable[[], nn.Module]) -> Callable[[bool], nn.Module]:
    def network(_vit: bool) -> nn.Module:
        torch.manual_seed(0)
        return make().eval()

    return network


REFERENCES = torch.randn(2, CLASSES, generator=torch.Generator().manual_seed(0))
NETWORKS: dict[str, tuple[Callable[[bool], nn.Module], dict[str, Any], Any]] = {
    "softmax": (class_like(lambda net: net), {}, None),
    "one logit": (class_like(lambda net: net, 1), {}, None),
    "probabilities": (class_like(lambda net: nn.Sequential(net, nn.Softmax(1))), {}, None),
    "one probability": (class_like(lambda net: nn.Sequential(net, nn.Sigmoid()), 1), {}, None),
    "multilabel": (class_like(lambda net: nn.Sequential(net, nn.Sigmoid())), {}, None),
    "regression": (class_like(lambda net: net, 1), {"head": "regression", "tolerance": 1e9}, None),
    "segmentation": (dense(Pixels), {}, None),
    "detection": (dense(Boxes), {}, None),
    "embedding": (class_like(lambda net: net), {"head": "embedding", "references": REFERENCES}, None),
    "callable": (class_like(lambda net: net), {}, first_logit),
}


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def network(head: str, vit: bool = False) -> tuple[Model, Any]:
    """A Model with that head, and what it is asked."""
    make, options, targets = NETWORKS[head]
    small = hp.images.Preprocess((SIDE, SIDE), SIDE)
    return hp.load_model(make(vit), preprocess=small, **options), targets


def test_every_head_has_a_network_here() -> None:
    assert set(NETWORKS) == {*HEADS, "callable"}


@pytest.mark.parametrize("head", NETWORKS)
def test_every_method_explains_every_head_or_refuses_with_a_clear_error(head: str) -> None:
    refused = {}
    for entry in explainers:
        vit = entry.architecture == "transformer" and head not in ("segmentation", "detection")
        model, targets = network(head, vit)
        before, call = state_of(model.module), cheap_call(entry.name)
        try:
            maps = hp.explain(model, images(2), [call], targets)[call]
        except HeatproofError as error:
            assert "\n" not in str(error), entry.name
            refused[entry.name] = str(error)
        else:
            assert torch.isfinite(maps.values).all() and len(maps) == 2, entry.name
            assert maps.explained.shape == (2,)
        assert same(before, state_of(model.module)), entry.name
        model.logits(images(1))
        assert model.head_name == (head if head != "callable" else "softmax")
    refused.pop("cam", None)  # its head is global average pooling and one linear layer
    assert set(refused) <= {"attnlrp", "chefer", "legrad", "rollout"}, refused
    assert not refused or head in ("segmentation", "detection")


@pytest.mark.parametrize("head", NETWORKS)
def test_inputs_per_pass_by_memory_suit_every_head(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU of 8 GiB, of which this process may use a quarter, where an input takes 32 MiB."""
    memory = {
        "memory_allocated": 0, "max_memory_allocated": 8 * 32 * 2**20, "mem_get_info": (0, 8 * 2**30),
        "get_per_process_memory_fraction": 0.25, "reset_peak_memory_stats": None,
    }  # fmt: skip
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    model, _ = network(head)
    before = state_of(model.module)
    with frozen_eval(model.module):
        assert Accelerator(model).fitting_batch_size(images(8)) == 64  # of 128 that are usual on a CPU
    assert same(before, state_of(model.module))


@needs_cuda
@pytest.mark.parametrize("head", NETWORKS)
def test_on_a_gpu_every_head_has_the_maps_of_a_cpu(head: str) -> None:
    """Also the fourth time, when passes are recorded. Noise of a GPU is another, for the same seed."""
    for entry in explainers:
        vit = entry.architecture == "transformer"
        noise = entry.name in ("smoothgrad", "smooth-gradcam++", "gradient-shap")
        if entry.name == "cam" or (vit and head in ("segmentation", "detection")):
            continue
        model, targets = network(head, vit)
        call = cheap_call(entry.name)
        expected = hp.explain(model, images(), [call], targets)[call]
        model.precision = "fp32"
        model.module.cuda()
        for turn in range(4):
            result = hp.explain(model, images(), [call], targets)[call]
            assert result.explained.cpu().equal(expected.explained), (entry.name, turn)
            expected = result.to("cpu") if noise and turn == 0 else expected
            gap = (result.normalised().cpu() - expected.normalised()).abs().mean()
            assert gap < 1e-3, (entry.name, turn, gap)


def truth(count: int) -> Truth:
    box, mask = (2.0, 2.0, 10.0, 10.0), torch.zeros(count, SIDE, SIDE, dtype=torch.bool)
    mask[:, 2:10, 2:10] = True
    return Truth(((box,),) * count, dict.fromkeys(("finder", "timing", "box"), mask))


CHEAP = {
    "insertion": "steps=4", "deletion": "steps=4", "specificity": "draws=1, steps=2",
    "randomisation": "depths=2", "adversarial_fragility": "steps=2", "fragility": "draws=1",
}  # fmt: skip
READS_A_HEAD = {"model", "probabilities"}
OF_IMAGES = [
    m.name for m in metrics if m.level == "image" and not m.not_in_a_run and "severities" not in m.needs
]
OF_CHANCES = [m.name for m in metrics if "probabilities" in m.needs]
OF_MOSAICS = [
    m.name for m in metrics if m.level == "checkpoint" and "model" in m.needs and m.question == "map"
]
# A callable is a target of a plain classifier, which evidence does not read.
CLASSES_OF_HEADS = {"softmax", "one logit", "probabilities", "one probability", "multilabel", "callable"}
CHANCE = {"regression", "embedding", "callable"}  # heads that have none


def test_every_metric_that_reads_a_head_is_tried_here() -> None:
    reads = {m.name for m in metrics if READS_A_HEAD & set(m.needs)}
    assert reads <= {*OF_IMAGES, *OF_CHANCES, *OF_MOSAICS, "occlusion_drop", "evidence"}


def every_number(scores: PerImage, where: str) -> None:
    """Finite, or NaN with a reason."""
    for part, values in scores.items():
        for value, reason in zip(values.tolist(), scores.reasons(part), strict=True):
            assert math.isfinite(value) or (math.isnan(value) and reason), (where, part, value, reason)


@pytest.mark.parametrize("head", NETWORKS)
def test_every_metric_of_images_gives_numbers_or_reasons(head: str) -> None:
    model, targets = network(head)
    inputs = images()
    model, columns = bind_targets(model, inputs, targets)
    maps = {name: hp.explain(model, inputs, name, columns)[name] for name in ("gradcam", "gradient")}
    explained = maps["gradcam"].explained
    scene = BatchContext(model, Batch(tuple("abcd"), inputs, explained, truth(4)), maps, explained)
    calls = [f"{name}({CHEAP[name]})" if name in CHEAP else name for name in OF_IMAGES]
    for method, metric, values, reasons in measure(calls, scene):
        for value, reason in zip(values, reasons, strict=True):
            assert math.isfinite(value) or (math.isnan(value) and reason), (method, metric, value, reason)
    every_number(part_occlusion(truth(4).masks["box"], columns, model=model, images=inputs), "occlusion_drop")


@pytest.mark.parametrize("head", NETWORKS)
@pytest.mark.parametrize("name", OF_CHANCES)
def test_what_needs_probabilities_gives_numbers_or_names_the_head(head: str, name: str) -> None:
    model, targets = network(head)
    if targets is not None:
        model, _ = bind_targets(model, images(), targets)
    entry, logits = metrics.get(name), model.logits(images())
    assert entry.call is not None
    if head in CHANCE:
        with pytest.raises(InputError, match=f"head is '{head}', which has no probabilities"):
            model.probabilities(logits)
        return
    chances = model.probabilities(logits).double()
    assert ((chances >= 0) & (chances <= 1)).all()
    y = torch.arange(4) % model.head.targets(logits.shape[1])
    if head == "multilabel" and name != "cscore":  # which gets the maps of one label after the other
        y = torch.nn.functional.one_hot(y, chances.shape[1]).bool()
    maps = hp.explain(model, images(), "gradcam", 0)["gradcam"]
    group = CheckpointContext(maps, y, chances, 0)
    assert entry.call(entry.function, group, {}) is not None


@torch.no_grad()
def centre(net: nn.Module, inputs: Tensor) -> None:
    """Move the last bias so that not all pictures are of one class."""
    last = [part for part in net.modules() if isinstance(part, (nn.Linear, nn.Conv2d))][-1]
    seen: list[Tensor] = []
    with last.register_forward_hook(lambda _m, _i, output: seen.append(output)):
        net(inputs)
    assert last.bias is not None
    last.bias -= seen[0].mean([axis for axis in range(seen[0].ndim) if axis != 1])


@pytest.mark.parametrize("head", NETWORKS)
def test_evidence_gives_numbers_or_a_sentence(head: str) -> None:
    model, _ = network(head)
    inputs = images(12)
    centre(model.module, inputs)
    entry, labels = metrics.get("evidence"), torch.arange(12) % 2
    if head in CLASSES_OF_HEADS:
        logits = model.logits(inputs)
        labels = model.predicted(logits).cpu()
        if head == "multilabel":
            labels = model.head.positive(logits).cpu()  # type: ignore[attr-defined]
    try:
        result = entry.function(labels, model=model, images=inputs)
    except HeatproofError as error:
        assert "\n" not in str(error)
        assert head not in CLASSES_OF_HEADS and f"head is '{head}'" in str(error), error
    else:
        assert head in CLASSES_OF_HEADS and (result.answered == len(inputs) or head == "multilabel")
        assert math.isfinite(result.scores.value)


@pytest.mark.parametrize("head", NETWORKS)
@pytest.mark.parametrize("name", OF_MOSAICS)
def test_mosaics_give_numbers_or_a_sentence(head: str, name: str) -> None:
    model, targets = network(head)
    if targets is not None:
        model, _ = bind_targets(model, images(), targets)
    entry = metrics.get(name)
    pictures = Batch(tuple("abcdefgh"), images(8))
    centre(model.module, pictures.images)
    gallery = ImagePool(model, ("gradcam",), lambda _: pictures, None, {"seed": 0}, lambda _: [pictures])
    assert entry.call is not None
    try:
        result = entry.call(entry.function, gallery, {"confident": 0.0})
    except HeatproofError as error:
        assert "\n" not in str(error)
        assert head in CHANCE or head == "detection", error
        assert head == "detection" or f"head is '{head}'" in str(error)
    else:
        assert head not in CHANCE
        every_number(result["gradcam"], name)
