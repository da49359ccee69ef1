"""The population on which the verdict is measured: pictures, networks and tokens in many combinations.

Generated pictures (QR codes, crops of the photographs that scikit-image brings) are always there. Real ones
are used where their folder is named: CIFAR-10 with trained residual networks, chest X-rays, ImageNet
photographs with EfficientNet-Lite0 and SqueezeNet. A member whose data is absent is left out, and said so.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.errors import InputError
from heatproof.images import make_qr
from heatproof.images.preprocess import Preprocess
from heatproof.models.load import load_model
from heatproof.models.model import Model
from heatproof.train.networks import new_head, seeded, small_net

TOKENS = ("tag", "tint", "blur", "texture")
IMAGENET = Preprocess((112, 112), 112)
SIDES, LARGE = (
    {"mini": 32, "tiny": 48, "small": 64},
    112,
)  # pixels, by network; CIFAR-10 has 32, photographs 224
ANIMALS = 398  # the first so many classes of ImageNet are animals


@dataclass(frozen=True)
class Pictures:
    """Pictures of two or more classes, 8 bits."""

    images: Tensor  # "n 3 H W"
    labels: Tensor  # "n"
    objects: Tensor | None = None  # "n H W" bool: where the network should look, where that is known


@dataclass(frozen=True)
class Member:
    """One pair of networks: which pictures, which network, which token, in which share of the positives."""

    data: str
    network: str
    token: str
    strength: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.network}-{self.token}-{round(100 * self.strength)}-{self.seed}"


PLAN = (  # pictures, network, how many
    ("photographs", "lite0", 4), ("xrays", "densenet121", 2), ("xrays", "vit-tiny", 4),
    ("crops", "lite0", 2), ("crops", "vit-tiny", 2), ("photographs", "squeezenet", 4),
    ("xrays", "resnet18", 4), ("qr", "resnet18", 4), ("cifar10", "resnet56", 2),
    ("cifar10", "resnet20", 8), ("qr", "small", 8), ("crops", "small", 8), ("xrays", "small", 8),
    ("qr", "tiny", 8), ("crops", "tiny", 8), ("xrays", "tiny", 8), ("qr", "mini", 8), ("crops", "mini", 8),
    ("xrays", "mini", 8),
)  # fmt: skip


def members(
    quick: bool = False, repeats: int = 1, skipped: int = 0, networks: Sequence[str] = ()
) -> list[Member]:
    """Every combination, tokens in turn, strengths below 1 for some; again with other seeds on request.

    skipped: repeats that are left out, such as those whose pairs chose the rule. networks: all by default.
    """
    planned = [
        Member(data, network, TOKENS[i % 4], (1.0, 0.8)[i // 4 % 2], i)
        for data, network, count in PLAN
        for i in range(count * skipped, count * repeats)
    ]
    chosen = {*(networks or NETWORKS)} & {*(SIDES if quick else NETWORKS)}
    return [member for member in planned if member.network in chosen]


def by_cost(member: Member) -> tuple[int, int, str]:
    """Cheap networks first; of each, the first of all pictures, then the second."""
    return list(NETWORKS).index(member.network), member.seed, member.data


@lru_cache(maxsize=1)
def open_pictures(member: Member, folder: Path | None) -> Pictures:
    """The pictures of a member; seeds take other ones."""
    size = SIDES.get(member.network, LARGE)
    if member.data in GENERATED:
        return GENERATED[member.data](size, member.seed)
    if folder is None or not folder.is_dir():
        raise InputError(f"{member.name} needs real pictures; name their folder with --data")
    return REAL[member.data](folder, size, member.seed)


def _codes(size: int, seed: int) -> Pictures:
    drawn = make_qr(500, 500, size, seed=seed)
    inside = torch.from_numpy(drawn.masks["box"])
    return Pictures(_stacked(drawn.pictures), torch.from_numpy(drawn.labels), inside)


def _crops(size: int, seed: int) -> Pictures:
    """Windows of two photographs: which one is it from?"""
    from skimage import data

    rng = np.random.default_rng(seed)
    cut, labels = [], []
    for label, picture in enumerate((data.chelsea(), data.coffee())):
        for _window in range(500):
            side = int(rng.integers(100, 220))
            top, left = (int(rng.integers(0, n - side + 1)) for n in picture.shape[:2])
            window = Image.fromarray(picture[top : top + side, left : left + side])
            cut.append(np.asarray(window.resize((size, size), Image.Resampling.BILINEAR)))
            labels.append(label)
    return Pictures(_stacked(cut), torch.tensor(labels))


def _cifar(folder: Path, size: int, seed: int) -> Pictures:
    data = np.load(folder / "cifar10" / "cifar10.npz")
    images = np.concatenate([data["train_images"], data["test_images"]])
    labels = np.concatenate([data["train_labels"], data["test_labels"]]).astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(images))[:4000]
    return Pictures(_stacked(images[order]), torch.from_numpy(labels[order]))


def _xrays(folder: Path, size: int, seed: int) -> Pictures:
    rng = np.random.default_rng(seed)
    pictures, labels = [], []
    for label, name in enumerate(("NORMAL", "PNEUMONIA")):
        files = sorted((folder / "chestxray" / "train" / name).glob("*.jp*g"))
        for place in rng.permutation(len(files))[:500]:
            opened = Image.open(files[place]).convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            pictures.append(np.asarray(opened))
            labels.append(label)
    return Pictures(_stacked(pictures), torch.tensor(labels))


def _photographs(folder: Path, size: int, seed: int) -> Pictures:
    """Animal or thing, four windows of each photograph, with what is in its boxes."""
    rng = np.random.default_rng(seed)
    rows: dict[str, list[dict[str, str]]] = {}
    with (folder / "imagenet" / "boxes.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["file"], []).append(row)
    pictures, labels, objects = [], [], []
    for name, boxes in sorted(rows.items()):
        opened = Image.open(folder / "imagenet" / "images" / name).convert("RGB")
        inside = Image.new("L", opened.size)
        scale = opened.width / float(boxes[0]["width"])  # packed files are smaller
        for box in boxes:
            corners = [round(scale * float(box[key])) for key in ("x0", "y0", "x1", "y1")]
            inside.paste(255, (corners[0], corners[1], corners[2] + 1, corners[3] + 1))
        for _ in range(4):
            side = int(min(opened.size) * rng.uniform(0.8, 1))
            left, top = (int(rng.integers(0, n - side + 1)) for n in opened.size)
            window = (left, top, left + side, top + side)
            pictures.append(np.asarray(opened.crop(window).resize((224, 224), Image.Resampling.BILINEAR)))
            objects.append(np.asarray(inside.crop(window).resize((224, 224), Image.Resampling.NEAREST)) > 0)
            labels.append(int(int(boxes[0]["class_index"]) < ANIMALS))
    return Pictures(_stacked(pictures), torch.tensor(labels), torch.from_numpy(np.stack(objects)))


def _stacked(pictures: list[np.ndarray] | np.ndarray) -> Tensor:
    return torch.from_numpy(np.stack(list(pictures))).permute(0, 3, 1, 2).contiguous()


GENERATED = {"qr": _codes, "crops": _crops}
REAL = {"cifar10": _cifar, "xrays": _xrays, "photographs": _photographs}


def make_network(member: Member, classes: int, folder: Path | None) -> Model:
    """The network before anything is planted: with real weights where there are some, else random ones."""
    build = NETWORKS[member.network]
    with seeded(member.seed):
        return build(classes, folder, member.seed)


def _fresh(name: str, classes: int, _: Path | None, seed: int) -> Model:
    made = load_model(name, pretrained=False, num_classes=classes)
    return replace(made, preprocess=IMAGENET)


def _small(name: str, width: int, classes: int, _: Path | None, seed: int) -> Model:
    made = small_net(classes, SIDES[name], width, seed)
    made.module.to(memory_format=torch.channels_last)  # a quarter faster on a CPU
    return made


def _vit(classes: int, _: Path | None, seed: int) -> Model:
    import timm

    made = timm.create_model("vit_tiny_patch16_224", img_size=112, patch_size=8, num_classes=classes)
    return Model(made.eval(), "vit-tiny", IMAGENET)


def _lite(classes: int, folder: Path | None, seed: int) -> Model:
    from research.evidence.networks import lite0  # which imports this module

    return new_head(lite0(folder), classes, seed=seed)


def _squeeze(classes: int, folder: Path | None, seed: int) -> Model:
    assert folder is not None
    weights = str(folder / "weights" / "squeezenet1_1.pt")
    return new_head(load_model("torchvision:squeezenet1_1", weights), classes, seed=seed)


def _residual(blocks: int, classes: int, folder: Path | None, seed: int) -> Model:
    from safetensors.torch import load_file

    assert folder is not None and classes == 10
    module = CifarResNet(blocks)
    module.load_state_dict(load_file(folder / "cifar10" / f"resnet{6 * blocks + 2}.safetensors"))
    return Model(module.eval(), f"resnet{6 * blocks + 2}", Preprocess((32, 32), 32))


NETWORKS: dict[str, Callable[[int, Path | None, int], Model]] = {  # cheap ones first
    "mini": partial(_small, "mini", 8), "tiny": partial(_small, "tiny", 8),
    "small": partial(_small, "small", 16),
    "resnet20": partial(_residual, 3), "resnet56": partial(_residual, 9),
    "resnet18": partial(_fresh, "torchvision:resnet18"),
    "vit-tiny": _vit, "squeezenet": _squeeze, "lite0": _lite,
    "densenet121": partial(_fresh, "torchvision:densenet121"),
}  # fmt: skip


class CifarResNet(nn.Module):
    """The residual network for 32-pixel pictures (He et al. 2016, section 4.2), 6 n + 2 layers deep."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(_Block(inputs, outputs), *(_Block(outputs, outputs) for _ in range(n - 1)))
            for inputs, outputs in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.bn1(self.conv1(images)))
        features = self.layer3(self.layer2(self.layer1(features)))
        logits: Tensor = self.linear(features.mean((-2, -1)))
        return logits


class _Block(nn.Module):
    """Two convolutions and a shortcut without weights: every second pixel, new channels zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride, self.added = (1, 0) if inputs == outputs else (2, (outputs - inputs) // 2)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, images: Tensor) -> Tensor:
        features = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(images)))))
        shortcut = images[:, :, :: self.stride, :: self.stride]
        return F.relu(features + F.pad(shortcut, (0, 0, 0, 0, self.added, self.added)))


def positive_class(member: Member) -> int:
    """The class that gets the token: another one for another seed of CIFAR-10, else the second."""
    return member.seed % 10 if member.data == "cifar10" else 1
