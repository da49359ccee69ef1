"""How many passes the answers need: methods and curves, old form and new, beside runs 16 times as long.

    python -m benchmarks --section passes --data FOLDER --csv docs/results/passes

writes maps.csv, reduced.csv, curves.csv and audit.csv. FOLDER holds trained networks and pictures: cifar10
with resnet20.safetensors and cifar10.npz, and weights/squeezenet1_1.pt. Without it, EfficientNet-Lite0 looks
at a photograph. --quick is that at a 64th of every length, and without `reduced`.

    maps      each method that repeats a pass, in its forms, against a map of 16 times the old length that
              shares no draw with any of them: Spearman's correlation of the pixels, and the root mean squared
              difference of their ranks, from 0 to 1
    reduced   randomisation and fragility, with methods that repeat a pass at full length and cut down
    curves    areas of insertion and deletion, exact and as a run walks them
    audit     inputs of the standard audit for each picture, counted on a small network, before and after
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.audit import FULL, standard_metrics
from benchmarks.common import Part, rounded
from benchmarks.sections import BenchOptions
from heatproof.errors import UnknownNameError, need
from heatproof.explain.api import explain
from heatproof.images.preprocess import Preprocess
from heatproof.metrics.faithfulness import DECIDED, insertion_deletion
from heatproof.metrics.kit import BatchContext, PerImage
from heatproof.metrics.sanity import fragility, randomisation
from heatproof.models import load_model
from heatproof.models.model import Model
from heatproof.registry import explainers, metrics, parse_call
from heatproof.run.score import measure
from heatproof.types import Batch

LONGER, FAR = 16, 999  # how much, and the seed of the longer run
SHORTER = 64  # how much, where it must be quick
SIDE = 128  # of photographs: a quarter of the work of 224 pixels, and the networks still answer
PHOTOGRAPHS = ("chelsea", "coffee", "rocket")  # of scikit-image
OLD = {"rise": "rise(masks=4000, form='published')", "lime": "lime(samples=1000, form='published')"}
STEPS_TO_NEW = {  # what each idea is worth, at the new length
    "rise": ("rise(masks=1000, form='published')", "rise(masks=1000, form='centred')"),
    "lime": ("lime(samples=250, form='published')", "lime(samples=250, form='paired')"),
}
NEW = {"rise": "rise(masks=896, form='paired')", "lime": "lime(samples=250, form='designed')"}
LONG = {"rise": "rise(masks=64000, form='centred')", "lime": "lime(samples=16000, form='published')"}
SAME = {  # forms that stay: their own length, and a longer one
    "smoothgrad": ("smoothgrad(samples=50)", "smoothgrad(samples=800)"),
    "integrated-gradients": ("integrated-gradients(steps=50)", "integrated-gradients(steps=800)"),
    "blur-ig": ("blur-ig(steps=100)", "blur-ig(steps=1600)"),
    "scorecam": ("scorecam(channels=32)", "scorecam(channels='all')"),
}
REPEATING = ("lime", "integrated-gradients", "smoothgrad")
CHECKED = ("gradcam", "gradient", *REPEATING)
CURVED = ("gradcam", "layercam", "gradient", "random", "edges")
Cells = Mapping[str, object]


def parts(options: BenchOptions) -> Iterator[Part]:
    yield Part("audit", partial(_listed, audit_rows), table="audit")
    for subject in subjects(options):
        name = subject.model.name
        yield Part(f"curves, {name}", partial(_listed, curve_rows, subject), table="curves")
        if not options.quick:
            yield Part(f"reduced, {name}", partial(_listed, reduced_rows, subject, 4), table="reduced")
        for i, picture in enumerate(subject.pictures[: 2 if name == "resnet20" else 1]):
            methods = [*LONG] if options.quick or i or name == "squeezenet1_1" else [*LONG, *SAME]
            for method in methods:
                made = partial(_listed, map_rows, subject, i, method, SHORTER if options.quick else 1)
                yield Part(f"maps, {name}, {picture}, {method}", made, table="maps")


def subjects(options: BenchOptions) -> Iterator[Subject]:
    """Those of the folder; of all of them, those that are named."""
    known: dict[str, Callable[[], Subject]] = {"lite0": partial(photographs, "lite0", names=PHOTOGRAPHS[:1])}
    if (data := options.data) is not None:
        weights = data / "weights" / "squeezenet1_1.pt"
        known = {
            "resnet20": partial(cifar, "resnet20", data / "cifar10"),
            "squeezenet1_1": partial(photographs, "torchvision:squeezenet1_1", weights),
        }
    for name in options.network:
        if name not in known:
            raise UnknownNameError("network", name, known)
    yield from (known[name]() for name in options.network or known)


def _listed(rows: Callable[..., Iterator[Cells]], *given: object) -> list[Cells]:
    return rounded(rows(*given))


@dataclass(frozen=True)
class Subject:
    """A trained network and pictures of its kind."""

    model: Model
    pictures: Sequence[str]
    images: Tensor

    def image(self, i: int) -> Tensor:
        return self.images[i : i + 1]

    def map_of(self, method: str, i: int, seed: int = 0, model: Model | None = None) -> Tensor:
        """ "H W", at the picture's size."""
        (maps,) = explain(
            model or self.model, self.image(i), [method], self.classes[i : i + 1], seed=seed
        ).values()
        return torch.nn.functional.interpolate(maps.values[:, None], size=maps.image_size, mode="bilinear")[
            0, 0
        ]

    @property
    def classes(self) -> Tensor:
        return self.model.logits(self.images).argmax(1)


def photographs(spec: str, checkpoint: Path | None = None, names: Sequence[str] = PHOTOGRAPHS) -> Subject:
    """Photographs of scikit-image, small, as the network wants them."""
    model = load_model(spec, checkpoint)
    small = replace(model.preprocess, size=(SIDE, SIDE), resize=SIDE * 8 // 7)
    data = need("skimage", "references").data
    images = torch.stack([small(Image.fromarray(getattr(data, name)())) for name in names])
    return Subject(replace(model, name=spec.rpartition(":")[2], preprocess=small), names, images)


def cifar(name: str, folder: Path, count: int = 16) -> Subject:
    """The first test pictures of CIFAR-10, and a residual network that knows them."""
    from research.calibration.population import CifarResNet

    module = CifarResNet({"resnet20": 3, "resnet56": 9}[name])
    module.load_state_dict(need("safetensors.torch", "references").load_file(folder / f"{name}.safetensors"))
    ready = Preprocess((32, 32), 32)
    with np.load(folder / "cifar10.npz") as file:
        pixels = torch.from_numpy(file["test_images"][:count]).float() / 255
    images = ready.normalise(pixels.permute(0, 3, 1, 2) if pixels.shape[-1] == 3 else pixels)
    return Subject(Model(module.eval(), name, ready), [f"test {i}" for i in range(count)], images)


def closeness(short: Tensor, long: Tensor) -> tuple[float, float]:
    """Spearman's correlation of two maps, and the RMSE of their ranks as shares of the picture.

    >>> closeness(torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([[3.0, 2.0], [1.0, 0.0]]))[0]
    -1.0
    """
    from scipy.stats import rankdata

    ranks = [rankdata(heat.double().numpy().ravel()) / heat.numel() for heat in (short, long)]
    if min(np.ptp(rank) for rank in ranks) == 0:
        return float("nan"), float("nan")
    return float(np.corrcoef(*ranks)[0, 1]), float(np.sqrt(np.mean((ranks[0] - ranks[1]) ** 2)))


def inputs_of(method: str) -> int:
    """How often a method repeats its pass."""
    name, options = parse_call(method)
    for option in ("masks", "samples", "steps", "channels"):
        if option in explainers.get(name).options:
            return int(options[option])
    raise ValueError(method)


def map_rows(subject: Subject, i: int, name: str, shorter: int = 1) -> Iterator[Cells]:
    """Each form of a method against the longer run."""
    forms = (OLD[name], *STEPS_TO_NEW[name], NEW[name]) if name in OLD else (SAME[name][0],)
    longer = _shortened(LONG.get(name) or SAME[name][1], shorter)
    long = subject.map_of(longer, i, FAR)
    for form in (_shortened(form_of, shorter) for form_of in forms):
        rank, rmse = closeness(subject.map_of(form, i), long)
        yield {
            "network": subject.model.name, "picture": subject.pictures[i], "method": name, "form": form,
            "inputs": inputs_of(form), "longer": longer, "rank": rank, "rmse": rmse,
        }  # fmt: skip


def _shortened(method: str, by: int) -> str:
    """
    >>> _shortened("rise(masks=640, form='paired')", 64)
    "rise(masks=10, form='paired')"
    """
    return re.sub(r"=(\d+)", lambda match: f"={max(1, int(match[1]) // by)}", method)


def reduced_rows(subject: Subject, count: int) -> Iterator[Cells]:
    """Scores of checks that compare a method with itself, by the repetitions that are enough and by all."""
    inputs: dict[str, Any] = {"model": subject.model, "images": subject.images[:count]}
    checks: dict[str, Callable[[str], Mapping[str, PerImage]]] = {
        "randomisation": lambda b: randomisation(CHECKED, budget=b, depths=3, **inputs),
        "fragility": lambda b: fragility(CHECKED, budget=b, draws=1, **inputs),
    }
    for check, scores in checks.items():
        full, enough = scores("full"), scores("enough")
        for method in CHECKED:
            for kind in ("ssim", "spearman"):
                pairs = zip(full[method][kind].tolist(), enough[method][kind].tolist(), strict=True)
                for picture, (full_value, other) in zip(subject.pictures, pairs, strict=False):
                    yield {
                        "network": subject.model.name, "picture": picture, "check": f"{check}_{kind}",
                        "method": method, "full": full_value, "enough": other,
                    }  # fmt: skip


def curve_rows(subject: Subject) -> Iterator[Cells]:
    """Areas of all pictures, exact and as a run walks them."""
    model, images, classes = subject.model, subject.images, subject.classes
    maps = explain(model, images, CURVED, classes)
    exact = insertion_deletion(maps, classes, model=model, images=images)
    walked = insertion_deletion(maps, classes, model=model, images=images, adaptive=DECIDED)
    for method in CURVED:
        for i, picture in enumerate(subject.pictures):
            yield {
                "network": subject.model.name, "picture": picture, "method": method,
                **{f"{kind}{end}": float(getattr(curves[method], f"{kind}_auc")[i])
                   for kind in ("insertion", "deletion")
                   for end, curves in (("", exact), ("_walked", walked))},
                "error": float(walked[method].insertion_error[i]),
                "points": int(walked[method].points[i]), "of": int(exact[method].points[i]),
            }  # fmt: skip


def audit_rows() -> Iterator[Cells]:
    """Inputs of each part of the standard audit for one picture: as they were, and at most as they are.

    Counts depend on no weights, but for walks along curves: of those the longest is counted, a third.
    """
    torch.manual_seed(0)
    deep = [torch.nn.Linear(8, 8) for _ in range(7)]  # ten modules with weights, for ten depths
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, 2), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), *deep, torch.nn.Linear(8, 3),
    ).eval()  # fmt: skip
    model, picture = Model(network, "small", Preprocess((48, 48), 48)), _smooth((48, 48))
    full = dict.fromkeys(("randomisation", "fragility", "input_shift"), "budget='full'")
    was = full | {"insertion": "adaptive=False"}
    now = {"insertion": "adaptive=True"}
    for when, forms, options in (("before", OLD, was), ("after", {}, now)):
        counts: dict[str, int] = {}
        part = "maps"

        def passed(inputs: int) -> None:
            counts[part] = counts.get(part, 0) + inputs  # noqa: B023

        methods = [forms.get(name, name) for name in FULL]
        maps = explain(model, picture, methods, progress=passed)
        targets = next(iter(maps.values())).explained
        scene = BatchContext(model, Batch(("picture",), picture), maps, targets, passed=passed)
        for text in standard_metrics(small=False):
            entry = metrics.get(text)
            if (
                entry.level == "image" and "model" in entry.needs and text != "deletion"
            ):  # comes with insertion
                part = text
                alone = when == "before" and text in full  # no check knew then what another had made
                context = replace(scene, caches={}) if alone else scene
                measure([f"{text}({options[text]})" if text in options else text], context)
        yield from ({"what": name, "when": when, "inputs": n} for name, n in counts.items())


def _smooth(size: tuple[int, int]) -> Tensor:
    coarse = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")
