"""What Python holds, for an audit: a network as it is, pictures as files beside the study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from heatproof.errors import InputError
from heatproof.images.findings import check_labels
from heatproof.images.kinds import Guess, guess_source
from heatproof.images.memory import to_pixels
from heatproof.models.model import Model
from heatproof.show import eight_bit
from heatproof.studies.common import write_rows

MOST = 1000  # pictures of a dataset that are looked at
SMALLEST = 1 / 255  # beyond 0 and 1: rounding


class HeldPictures(NamedTuple):
    """Where they are, and what replaces parts of the model's preprocessing, where they are model-ready."""

    source: Guess
    preprocess: dict[str, Any]


def held_pictures(images: Any, labels: Any, model: Model | None, folder: Path) -> HeldPictures:
    """A path as it is. Pictures, arrays, model-ready tensors or a dataset are written as PNG files.

    Model-ready tensors lose what lies between the 256 levels of a PNG file.
    """
    if isinstance(images, str | Path):
        if labels is not None:
            raise InputError(
                f"labels belong to pictures in memory; {images} has its own: folders, or a CSV file"
            )
        return HeldPictures(guess_source(images), {})
    names: Sequence[str] | None = getattr(images, "classes", None)
    if labels is None:
        images, labels = _taken_apart(images)
    if (
        isinstance(images, np.ndarray | Tensor)
        and images.ndim != 4
        and not (images.ndim == 3 and len(images))
    ):
        raise InputError(f"images are 'n c H W'; got shape {tuple(images.shape)}")
    preprocess: dict[str, Any] = {}
    if _model_ready(images):
        images, preprocess = _restored(torch.as_tensor(images), model)
    if not len(images):
        raise InputError(
            "there is no picture to audit; give a folder, a tensor, Pillow pictures or a dataset"
        )
    numbers, classes = check_labels(labels, len(images), names)
    if labels is not None and len(numbers) != len(images):
        raise InputError(f"labels has {len(numbers)} entries, but there are {len(images)} pictures")
    files = folder / "pictures"
    files.mkdir(parents=True, exist_ok=True)
    rows = []
    for i, (image, number) in enumerate(zip(images, numbers, strict=True)):
        path = files / f"{i:06d}.png"
        Image.fromarray(to_pixels(image, f"picture {i}")).save(path)
        rows.append([f"pictures/{path.name}", *([] if number is None else [classes[number]])])
    header = ["path", *(["label"] if classes else [])]
    return HeldPictures(
        Guess("csv", write_rows(folder / "pictures.csv", header, rows), "pictures from Python"), preprocess
    )


def _taken_apart(images: Any) -> tuple[Any, Any]:
    """Pictures and labels of a dataset of pairs, evenly spaced where it is long; others as they are."""
    if isinstance(images, np.ndarray | Tensor) or not hasattr(images, "__len__") or not len(images):
        return images, None
    if not hasattr(images, "__getitem__"):
        raise InputError(
            "images are a folder, a tensor, Pillow pictures or a dataset; for a loader, its .dataset"
        )
    if not isinstance(images[0], tuple):
        return images, None
    places = np.unique(np.linspace(0, len(images) - 1, min(len(images), MOST)).round().astype(int))
    pairs = [images[int(i)] for i in places]
    pictures, labels = [pair[0] for pair in pairs], [int(pair[1]) for pair in pairs]
    return (torch.stack(pictures) if isinstance(pictures[0], Tensor) else pictures), labels


def _model_ready(images: Any) -> bool:
    return (
        isinstance(images, np.ndarray | Tensor)
        and images.ndim == 4
        and torch.as_tensor(images).is_floating_point()
    )


def _restored(images: Tensor, model: Model | None) -> tuple[list[Tensor], dict[str, Any]]:
    """Pictures in [0, 1] that the model's preprocessing turns into these tensors, and that preprocessing."""
    if not torch.isfinite(images).all():
        raise InputError("images hold NaN or infinity; leave those pictures out")
    count, (height, width) = images.shape[1], images.shape[2:]
    mean, std = (model.preprocess.mean, model.preprocess.std) if model else ((0.0,), (1.0,))
    if len(mean) != count or not _fits(images, mean, std):
        low, high = float(images.min()), float(images.max())
        span = max(high - low, 1e-6)  # a pixel of 0 becomes the lowest value, one of 255 the highest
        mean, std = (-low / span,) * count, (1 / span,) * count
    pictures = images.float() * _column(std) + _column(mean)
    size = [int(height), int(width)]
    told = {"size": size, "resize": size, "mean": list(mean), "std": list(std)}
    return list(eight_bit(pictures.clamp(0, 1))), told


def _fits(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> bool:
    pictures = images * _column(std) + _column(mean)
    return bool(pictures.min() >= -SMALLEST and pictures.max() <= 1 + SMALLEST)


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers)[:, None, None]
