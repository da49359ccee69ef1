"""Images of an audit that are in memory, written as files beside the study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from heatproof.errors import InputError, about
from heatproof.images.findings import check_labels
from heatproof.images.kinds import Guess, guess_source, to_pixels
from heatproof.models.model import Model
from heatproof.show import eight_bit
from heatproof.studies.common import write_rows

MOST = 1000  # images of a dataset that are used
TOLERANCE = 1 / 255  # beyond 0 and 1: rounding


class AuditImages(NamedTuple):
    """Where images are; and, of model-ready ones, what replaces parts of the model's preprocessing."""

    source: Guess
    preprocess: dict[str, Any]


def write_images(images: Any, labels: Any, model: Model | None, folder: Path) -> AuditImages:
    """Write Pillow images, arrays, model-ready tensors or a dataset as PNG files; a path is left as it is.

    Model-ready tensors lose what lies between the 256 levels of a PNG file.
    """
    if isinstance(images, str | Path):
        if labels is not None:
            raise InputError(
                f"labels belong to images in memory; {images} has its own: folders, or a CSV file"
            )
        return AuditImages(guess_source(images), {})
    names: Sequence[str] | None = getattr(images, "classes", None)
    if labels is None:
        images, labels = _split_pairs(images)
    preprocess: dict[str, Any] = {}
    if isinstance(images, np.ndarray | Tensor):
        if images.ndim != 4 and not (images.ndim == 3 and len(images)):
            raise InputError(f"images are 'n c H W'; got shape {tuple(images.shape)}")
        if images.ndim == 4 and torch.as_tensor(images).is_floating_point():
            images, preprocess = _restored(torch.as_tensor(images), model)
    if not len(images):
        raise InputError("there is no image to audit; give a folder, a tensor, Pillow images or a dataset")
    numbers, classes = check_labels(labels, len(images), names)
    if labels is not None and len(numbers) != len(images):
        raise InputError(f"labels has {len(numbers)} entries, but there are {len(images)} images")
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for i, (image, number) in enumerate(zip(images, numbers, strict=True)):
        path = f"pictures/{i:06d}.png"
        with about(f"image {i}"):
            Image.fromarray(to_pixels(image)).save(folder / path)
        rows.append([path, *([] if number is None else [classes[number]])])
    header = ["path", *(["label"] if classes else [])]
    table = write_rows(folder / "pictures.csv", header, rows)
    return AuditImages(Guess("csv", table, "images from Python"), preprocess)


def _split_pairs(images: Any) -> tuple[Any, Any]:
    """Images and labels of a dataset of pairs, evenly spaced if it is long; others as they are."""
    if isinstance(images, np.ndarray | Tensor) or not hasattr(images, "__len__") or not len(images):
        return images, None
    if not hasattr(images, "__getitem__"):
        raise InputError(
            "images are a folder, a tensor, Pillow images or a dataset; for a loader, its .dataset"
        )
    if not isinstance(images[0], tuple):
        return images, None
    places = np.unique(np.linspace(0, len(images) - 1, min(len(images), MOST)).round().astype(int))
    pairs = [images[int(i)] for i in places]
    chosen, labels = [pair[0] for pair in pairs], [int(pair[1]) for pair in pairs]
    return (torch.stack(chosen) if isinstance(chosen[0], Tensor) else chosen), labels


def _restored(tensors: Tensor, model: Model | None) -> tuple[list[Tensor], dict[str, Any]]:
    """Images in 8 bits that the returned preprocessing turns into these tensors."""
    if not torch.isfinite(tensors).all():
        raise InputError("images hold NaN or infinity; leave those images out")
    channels, *size = map(int, tensors.shape[1:])
    mean, std = (model.preprocess.mean, model.preprocess.std) if model else ((0.0,), (1.0,))
    images = _undone(tensors, mean, std) if len(mean) == channels else None
    if images is None or images.min() < -TOLERANCE or images.max() > 1 + TOLERANCE:
        low, high = float(tensors.min()), float(tensors.max())
        span = max(high - low, 1e-6)  # a pixel of 0 becomes the lowest value, one of 255 the highest
        mean, std = (-low / span,) * channels, (1 / span,) * channels
        images = _undone(tensors, mean, std)
    preprocess = {"size": size, "resize": size, "mean": list(mean), "std": list(std)}
    return list(eight_bit(images.clamp(0, 1))), preprocess


def _undone(tensors: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    return tensors.float() * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
