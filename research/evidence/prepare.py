"""Pack what some members need into a small folder, for a machine without network and with little transfer.

Photographs are resized to 256 pixels at the shorter side, weights are stored in half precision (that of
ResNet-50, which is so already, compressed without loss), and packages that consist of Python code alone are
copied from this environment.
"""

from __future__ import annotations

import importlib.util
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from heatproof.errors import InputError
from heatproof.models.load import load_model
from research.evidence.networks import HALVES, NETWORKS, pack_halves
from research.evidence.plan import Member
from research.evidence.sources import read_cifar, xray_files

PACKAGES = ("click", "efficientnet_lite_pytorch", "lazy_loader", "rich", "segno")
SHORT_SIDE, QUALITY = 256, 88


def prepare(data: Path, out: Path, members: Sequence[Member], wheels: Sequence[Path] = ()) -> dict[str, int]:
    """Fill a new folder; returns the bytes of each part.

    wheels: of packages that are compiled for the other machine; they are unpacked.
    """
    if out.exists():
        raise InputError(f"{out} exists; remove it or name another folder")
    sources = {member.source for member in members}
    if "cifar" in sources:
        _pack_cifar(data, out)
    if "xrays" in sources:
        for path, _, _ in xray_files(data):
            _copy(path, out / path.relative_to(data))
    if sources & {"photographs", "scenes", "cifar"} or any(name.endswith("-photos") for name in sources):
        pack_photographs(data, out)
    for network in sorted({member.network for member in members}):
        for name in NETWORKS[network].weights:
            pack_weights(data / name, out / name)
    pack_packages(out, wheels)
    return part_sizes(out)


def pack_packages(out: Path, wheels: Sequence[Path] = ()) -> None:
    """Copy packages of this environment that consist of Python code, and unpack the wheels."""
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise InputError(f"the package {name} is not installed here; install heatproof[dev]")
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(Path(found.origin).parent, out / "packages" / name, ignore=ignored)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(out / "packages")


def part_sizes(out: Path) -> dict[str, int]:
    """The bytes of each part of a folder."""
    return {part.name: _bytes(part) for part in sorted(out.iterdir())}


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _pack_cifar(data: Path, out: Path) -> None:
    images, labels, held_out = read_cifar(data)
    (out / "cifar10").mkdir(parents=True)
    parts = {"train": ~held_out, "test": held_out}
    arrays = {f"{name}_images": images[part] for name, part in parts.items()}
    arrays |= {f"{name}_labels": labels[part].astype(np.uint8) for name, part in parts.items()}
    np.savez_compressed(out / "cifar10" / "cifar10.npz", **arrays)


def pack_photographs(data: Path, out: Path, quality: int = QUALITY) -> None:
    """Store the ImageNet photographs at the size to which networks resize them before they crop."""
    folder = out / "imagenet" / "images"
    folder.mkdir(parents=True)
    _copy(data / "imagenet" / "boxes.csv", out / "imagenet" / "boxes.csv")
    for path in sorted((data / "imagenet" / "images").iterdir()):
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        scale = SHORT_SIDE / min(image.size)
        size = (round(image.width * scale), round(image.height * scale))
        image.resize(size, Image.Resampling.BICUBIC).save(folder / path.name, "JPEG", quality=quality)


def pack_weights(source: Path, target: Path, head: bool = False) -> None:
    """Store weights in half precision. head: with the classifier of ResNet-50."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.stem == "resnet50":
        weights = {k: v for k, v in load_file(source).items() if head or not k.startswith("fc.")}
        target.with_suffix(HALVES).write_bytes(pack_halves(weights))
    elif source.stem == "lite0":
        save_file(_halved(load_model("lite0").module.state_dict()), target)
    elif source.suffix == ".pt":
        torch.save(_halved(torch.load(source, weights_only=True)), target)
    else:
        _copy(source, target)


def _halved(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of more than one axis in half precision; the statistics of BatchNorm stay."""
    return {k: (v.half() if v.ndim > 1 else v).contiguous() for k, v in weights.items()}
