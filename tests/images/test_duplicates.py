"""Copies of an image are recognised; different images that look alike are not merged."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from heatproof.images.codes import make_qr
from heatproof.images.duplicates import MOST_CROPS, SIDE, near_duplicates
from heatproof.images.files import named_file, read_image

PHOTOGRAPHS = [
    read_image(named_file(f"example:{name}")).convert("RGB") for name in ("cat", "astronaut", "coffee")
]


def thumbnails(images: list[Image.Image]) -> np.ndarray:
    """As a run makes them: from the image at the network's input size."""
    resized = (image.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC) for image in images)
    return np.stack([np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX)) for image in resized])


def distinct(images: list[Image.Image]) -> int:
    return len(set(near_duplicates(thumbnails(images)).tolist()))


def cropped(image: Image.Image, share: float, seed: int) -> Image.Image:
    random, size = np.random.default_rng(seed), [int(share * side) for side in image.size]
    left, top = (
        int(random.integers(0, side - length + 1)) for side, length in zip(image.size, size, strict=True)
    )
    return image.crop((left, top, left + size[0], top + size[1]))


def compressed(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


COPIES = {
    "equal": lambda image, i: image,
    "mirrored": lambda image, i: ImageOps.mirror(image),
    "darker": lambda image, i: ImageEnhance.Brightness(image).enhance(0.6 + i / 100),
    "contrast": lambda image, i: ImageEnhance.Contrast(image).enhance(1.3 + i / 100),
    "compressed": lambda image, i: compressed(image, 30 + i),
    "small": lambda image, i: image.resize((150 + i, 150 + i), Image.Resampling.LANCZOS),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_count_once(kind: str) -> None:
    copies = [COPIES[kind](image, i) for i in range(10) for image in PHOTOGRAPHS]
    assert distinct(copies) == len(PHOTOGRAPHS)


def test_most_small_crops_count_with_their_image() -> None:
    crops = [cropped(image, 0.92, 9 * i) for i in range(10) for image in PHOTOGRAPHS]
    assert len(PHOTOGRAPHS) <= distinct(crops) <= 3 * len(PHOTOGRAPHS)  # of 30


def test_the_group_is_the_first_image_of_it() -> None:
    a, b, c = (ImageOps.fit(image, (64, 64)) for image in PHOTOGRAPHS[:3])
    assert near_duplicates(thumbnails([a, b, ImageOps.mirror(a), c, b])).tolist() == [0, 1, 0, 3, 1]
    assert near_duplicates(thumbnails([a])).tolist() == [0]


def tiles(side: int = 96) -> list[Image.Image]:
    """Different parts of the photographs, which share colours and texture."""
    results = []
    for image in PHOTOGRAPHS:
        for left in range(0, image.width - side, side):
            results += [
                image.crop((left, top, left + side, top + side))
                for top in range(0, image.height - side, side)
            ]
    return results


def shapes(count: int) -> list[Image.Image]:
    """One object on a flat background, of two kinds and one size, at random places."""
    random, images = np.random.default_rng(0), []
    for i, (x, y) in enumerate(random.permutation(np.indices((50, 50)).reshape(2, -1).T)[:count] + 7):
        image = Image.new("RGB", (64, 64), (120, 120, 120))
        draw = ImageDraw.Draw(image)
        (draw.ellipse if i % 2 else draw.rectangle)((x - 6, y - 6, x + 6, y + 6), fill=(220, 60, 40))
        images.append(image)
    return images


def test_different_images_that_look_alike_are_not_merged() -> None:
    codes = [Image.fromarray(code) for code in make_qr(60, 0, 224, seed=0, versions=[2]).pictures]
    for images in (tiles(), shapes(200), codes):
        assert distinct(images) == len(images)


def test_noise_and_more_images_than_crops_are_looked_for() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (MOST_CROPS + 20, SIDE, SIDE, 1), dtype=np.uint8)
    noise[-20:] = noise[:20, :, ::-1]
    assert len(set(near_duplicates(noise).tolist())) == MOST_CROPS


def test_images_of_one_scene_by_a_fixed_camera_are_different_images() -> None:
    """The same scene with noise, other light and a small defect, which is all that a network looks at."""
    random, scene = np.random.default_rng(0), np.asarray(ImageOps.fit(PHOTOGRAPHS[0], (128, 128)), float)
    images = []
    for _ in range(40):
        taken = scene * random.uniform(0.95, 1.05) + random.normal(0, 5, scene.shape)
        y, x = random.integers(10, 100, 2)
        taken[y : y + 12, x : x + 12] += 80
        images.append(Image.fromarray(taken.clip(0, 255).astype(np.uint8)))
    assert distinct(images) >= 36
    assert distinct([*images, *(ImageOps.mirror(image) for image in images)]) <= 44
