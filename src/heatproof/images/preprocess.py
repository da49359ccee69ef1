"""The preprocessing that belongs to a model: an 8-bit picture becomes the tensor the model was trained on."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from heatproof.errors import InputError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocess:
    """Resize the shorter side, crop the centre, scale to [0, 1], subtract the mean, divide by the deviation."""

    size: tuple[int, int] = (224, 224)  # height, width of what the model sees
    resize: int | tuple[int, int] = 256  # shorter side before the crop, or an exact height and width
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bilinear"

    @property
    def channels(self) -> int:
        return len(self.mean)

    def crop(self, picture: Image.Image) -> Image.Image:
        """The 8-bit picture the model sees, after resize and centre crop."""
        picture = picture.convert("L" if self.channels == 1 else "RGB")
        width, height = picture.size
        if isinstance(self.resize, int):
            short = min(width, height)
            scaled = (max(1, int(width * self.resize / short)), max(1, int(height * self.resize / short)))
        else:
            scaled = (self.resize[1], self.resize[0])
        if scaled != picture.size:
            picture = picture.resize(scaled, Image.Resampling[self.interpolation.upper()])
        left = round((picture.width - self.size[1]) / 2)
        top = round((picture.height - self.size[0]) / 2)
        return picture.crop((left, top, left + self.size[1], top + self.size[0]))

    def normalise(self, pixels: Tensor) -> Tensor:
        """ "... c H W" in [0, 1] -> model-ready."""
        mean = torch.tensor(self.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(-1, 1, 1)
        return (pixels - mean) / std

    def restore(self, images: Tensor) -> Tensor:
        """The inverse of normalise, clipped to [0, 1]."""
        mean = torch.tensor(self.mean, device=images.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(-1, 1, 1)
        return (images * std + mean).clamp(0, 1)

    def __call__(self, picture: Image.Image) -> Tensor:
        return self.normalise(to_tensor(self.crop(picture)))


def to_tensor(picture: Image.Image) -> Tensor:
    """ "c H W" in [0, 1]."""
    array = np.asarray(picture, dtype=np.float32) / 255
    return torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1)


def open_image(path: str | Path) -> Image.Image:
    """Read a picture completely, or say in one sentence why that is not possible."""
    try:
        with Image.open(io.BytesIO(Path(path).read_bytes())) as picture:
            picture.load()
            return picture.copy()
    except FileNotFoundError:
        raise InputError(f"no such image: {path}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot read {path} as an image: {str(error).splitlines()[0]}") from error
