"""How many passes the answers need: methods and curves, old form and new, beside runs 16 times as long.

    python -m heatproof.bench.passes docs/results/passes --data FOLDER

writes maps.csv, reduced.csv, curves.csv and audit.csv. FOLDER holds trained networks and pictures: cifar10
with resnet20.safetensors and cifar10.npz, and weights/squeezenet1_1.pt. Long maps are kept, not made twice.

    maps      each method that repeats a pass, in its forms, against a map of 16 times the old length that
              shares no draw with any of them: Spearman's correlation of the pixels, and the root mean squared
              difference of their ranks, from 0 to 1
    reduced   randomisation and fragility, with methods that repeat a pass at full length and cut down
    curves    areas of insertion and deletion, exact and as a run walks them
    audit     inputs of the standard audit for each picture, counted on a small network, before and after
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from heatproof.bench.audit import FULL, standard_metrics
from heatproof.bench.common import Row, cost, side_by_side
from heatproof.errors import need
from heatproof.explain import explain
from heatproof.images.preprocess import Preprocess
from heatproof.metrics.faithfulness import DECIDED, insertion_deletion
from heatproof.metrics.kit import PerImage
from heatproof.metrics.sanity import fragility, parameter_randomisation
from heatproof.metrics.scene import Scene
from heatproof.models import load_model
from heatproof.models.model import Model
from heatproof.registry import explainers, metrics, parse_call
from heatproof.run.measure import measure
from heatproof.types import Batch

LONGER, FAR = 16, 999  # how much, and the seed of the longer run
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
Cells = dict[str, object]


@dataclass(frozen=True)
class Subject:
    """A trained network and pictures of its kind."""

    model: Model
    pictures: Sequence[str]
    images: Tensor

    def one(self, i: int) -> Tensor:
        return self.images[i : i + 1]

    def map_of(self, method: str, i: int, seed: int = 0, model: Model | None = None) -> Tensor:
        """ "H W", at the picture's size."""
        (maps,) = explain(
            model or self.model, self.one(i), [method], self.classes[i : i + 1], seed=seed
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
    from heatproof.studies.calibrate.population import CifarResNet

    module = CifarResNet({"resnet20": 3, "resnet56": 9}[name])
    module.load_state_dict(need("safetensors.torch", "references").load_file(folder / f"{name}.safetensors"))
    ready = Preprocess((32, 32), 32)
    with np.load(folder / "cifar10.npz") as file:
        pixels = torch.from_numpy(file["test_images"][:count]).float() / 255
    images = ready.normalise(pixels.permute(0, 3, 1, 2) if pixels.shape[-1] == 3 else pixels)
    return Subject(Model(module.eval(), name, ready), [f"test {i}" for i in range(count)], images)


def closeness(found: Tensor, long: Tensor) -> tuple[float, float]:
    """Spearman's correlation of two maps, and the RMSE of their ranks as shares of the picture.

    >>> closeness(torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([[3.0, 2.0], [1.0, 0.0]]))[0]
    -1.0
    """
    from scipy.stats import rankdata

    ranks = [rankdata(one.double().numpy().ravel()) / one.numel() for one in (found, long)]
    if min(np.ptp(one) for one in ranks) == 0:
        return float("nan"), float("nan")
    return float(np.corrcoef(*ranks)[0, 1]), float(np.sqrt(np.mean((ranks[0] - ranks[1]) ** 2)))


def inputs_of(method: str) -> int:
    """How often a method repeats its pass."""
    name, options = parse_call(method)
    for option in ("masks", "samples", "steps", "channels"):
        if option in explainers.get(name).options:
            return int(options[option])
    raise ValueError(method)


def map_rows(subject: Subject, i: int, methods: Sequence[str], kept: Path) -> Iterator[Cells]:
    """Each form of each method against the longer run."""
    for name in methods:
        forms = (OLD[name], *STEPS_TO_NEW[name], NEW[name]) if name in OLD else (SAME[name][0],)
        longer = LONG.get(name) or SAME[name][1]
        long = _kept(kept / f"{subject.model.name}-{i}-{name}.npy", partial(subject.map_of, longer, i, FAR))
        for form in forms:
            rank, rmse = closeness(subject.map_of(form, i), long)
            yield {
                "network": subject.model.name, "picture": subject.pictures[i], "method": name, "form": form,
                "inputs": inputs_of(form), "longer": longer, "rank": rank, "rmse": rmse,
            }  # fmt: skip


def reduced_rows(subject: Subject, count: int) -> Iterator[Cells]:
    """Scores of checks that compare a method with itself, by the repetitions that are enough and by all."""
    shown: dict[str, Any] = {"model": subject.model, "images": subject.images[:count]}
    checks: dict[str, Callable[[str], Mapping[str, PerImage]]] = {
        "randomisation": lambda b: parameter_randomisation(CHECKED, budget=b, depths=3, **shown).mean(),
        "fragility": lambda b: fragility(CHECKED, budget=b, draws=1, **shown),
    }
    for check, scores in checks.items():
        full, enough = scores("full"), scores("enough")
        for method in CHECKED:
            for kind in ("ssim", "spearman"):
                pairs = zip(full[method][kind].tolist(), enough[method][kind].tolist(), strict=True)
                for picture, (one, other) in zip(subject.pictures, pairs, strict=False):
                    yield {
                        "network": subject.model.name, "picture": picture, "check": f"{check}_{kind}",
                        "method": method, "full": one, "enough": other,
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
                **{f"{kind}{end}": float(getattr(found[method], f"{kind}_auc")[i])
                   for kind in ("insertion", "deletion")
                   for end, found in (("", exact), ("_walked", walked))},
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
        scene = Scene(model, Batch(("picture",), picture), maps, targets, passed=passed)
        for text in standard_metrics(small=False):
            entry = metrics.get(text)
            if (
                entry.level == "image" and "model" in entry.needs and text != "deletion"
            ):  # comes with insertion
                part = text
                measure([f"{text}({options[text]})" if text in options else text], scene)
        yield from ({"part": name, "when": when, "inputs": n} for name, n in counts.items())


def _smooth(size: tuple[int, int]) -> Tensor:
    coarse = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")


def _kept(path: Path, make: partial[Tensor]) -> Tensor:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, make().numpy())
    return torch.from_numpy(np.load(path))


def _write(path: Path, rows: Iterator[Cells]) -> None:
    """Row by row, so that what was measured stands when the rest is cut off."""
    writer = None
    with path.open("w", newline="", encoding="utf-8") as file:
        for row in rows:
            writer = writer or csv.DictWriter(file, list(row), lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
            file.flush()


def rows(quick: bool = False, device: str = "cpu") -> list[Row]:
    """Lite0 on one photograph: what the new forms take of the time of the old ones."""
    subject = photographs("lite0", names=PHOTOGRAPHS[:1])
    subject.model.module.to(device)
    found = []
    for name in OLD:
        old, new = (_shortened(text, 16 if quick else 1) for text in (OLD[name], NEW[name]))
        ms = side_by_side(
            {text: partial(subject.map_of, text, 0) for text in (old, new)}, 1, device, warmup=0
        )
        found.append(cost(new, ms[new], old, ms[old], "" if quick else "<= 0.3"))
    return found


def _shortened(method: str, by: int) -> str:
    count = str(inputs_of(method))
    return method.replace(f"={count}", f"={int(count) // by}")


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--data", type=click.Path(exists=True, path_type=Path), required=True, help="Networks, pictures."
)
@click.option(
    "--kept", type=click.Path(path_type=Path), help="Where long maps are kept; OUT/long where None."
)
@click.option("--part", multiple=True, help="maps, reduced, curves or audit; all where none is named.")
def main(out: Path, data: Path, kept: Path | None, part: tuple[str, ...]) -> None:
    """Measure, and write OUT/*.csv."""
    out.mkdir(parents=True, exist_ok=True)
    small, kept = cifar("resnet20", data / "cifar10"), kept or out / "long"
    squeeze = photographs("torchvision:squeezenet1_1", data / "weights" / "squeezenet1_1.pt")

    def maps() -> Iterator[Cells]:
        for i in range(2):
            yield from map_rows(small, i, tuple(LONG), kept)
        yield from map_rows(small, 0, tuple(SAME), kept)
        yield from map_rows(squeeze, 0, tuple(LONG), kept)

    def reduced() -> Iterator[Cells]:
        return reduced_rows(small, 4)

    def curves() -> Iterator[Cells]:
        yield from curve_rows(small)
        yield from curve_rows(squeeze)

    for name, make in {"audit": audit_rows, "reduced": reduced, "curves": curves, "maps": maps}.items():
        if not part or name in part:
            _write(out / f"{name}.csv", make())


if __name__ == "__main__":
    main()
