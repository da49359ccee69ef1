"""python -m research.near_duplicates DATA: how often copies are recognised, and different images merged.

DATA holds chestxray/test, imagenet/images and cifar10/cifar10.npz. Writes research/near_duplicates.csv: for
each set of images, how many are merged although they are different files, and the share of copies that are
recognised, by kind.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from heatproof.images.codes import make_qr
from heatproof.images.duplicates import SIDE, near_duplicates

COPIES = 54  # images of each set that are copied


def thumbnails(images: list[Image.Image]) -> np.ndarray:
    resized = (image.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC) for image in images)
    return np.stack([np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX)) for image in resized])


def cropped(image: Image.Image, share: float, seed: int) -> Image.Image:
    random, size = np.random.default_rng(seed), [int(share * side) for side in image.size]
    left, top = (int(random.integers(0, w - s + 1)) for w, s in zip(image.size, size, strict=True))
    return image.crop((left, top, left + size[0], top + size[1]))


def compressed(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=30)
    return Image.open(file)


KINDS: dict[str, Callable[[Image.Image, int], Image.Image]] = {
    "mirrored": lambda image, i: ImageOps.mirror(image),
    "brightness 0.6": lambda image, i: ImageEnhance.Brightness(image).enhance(0.6),
    "brightness 1.4": lambda image, i: ImageEnhance.Brightness(image).enhance(1.4),
    "JPEG 30": lambda image, i: compressed(image),
    "crop 0.95": lambda image, i: cropped(image, 0.95, i),
    "crop 0.9": lambda image, i: cropped(image, 0.9, i),
    "crop 0.8": lambda image, i: cropped(image, 0.8, i),
}


def main(data: Path) -> None:
    xrays = sorted((data / "chestxray" / "test").glob("*/*.jpeg"))
    some = np.random.default_rng(1).permutation(len(xrays))[:450]
    photographs = [Image.open(file).convert("RGB") for file in sorted((data / "imagenet/images").glob("*"))]
    cifar = np.load(data / "cifar10" / "cifar10.npz")["test_images"][:500]
    codes = make_qr(300, 0, 224, seed=0, versions=[2]).pictures
    sets = {
        "chest X-rays": [Image.open(xrays[i]).convert("RGB") for i in some],
        "ImageNet photographs": photographs,
        "CIFAR-10": [Image.fromarray(image) for image in cifar],
        "QR codes": [Image.fromarray(image) for image in codes],
    }
    rows: list[tuple[str, str, int, float]] = []
    for name, images in sets.items():
        merged = int((near_duplicates(thumbnails(images)) != np.arange(len(images))).sum())
        rows.append((name, "merged although different files", len(images), merged))
        originals = images[:COPIES]
        for kind, copy in KINDS.items():
            copies = [copy(image, i) for i, image in enumerate(originals)]
            group = near_duplicates(thumbnails([*originals, *copies]))
            share = float((group[: len(originals)] == group[len(originals) :]).mean())
            rows.append((name, f"recognised: {kind}", len(originals), round(share, 3)))
    with Path(__file__).with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("images", "what", "n", "value"), *rows])
    print(*rows, sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
