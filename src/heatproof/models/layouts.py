"""How a layer's output is a picture "b c h w" of the image, or "b c d h w" of a volume."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.models.model import CONVOLUTIONS
from heatproof.models.running import at_least_float
from heatproof.types import size_of

MOST_PREFIX_TOKENS = 16


@dataclass(frozen=True)
class Layout:
    """How one layer's output lies in memory."""

    kind: str  # "nchw", "nhwc" or "tokens"; of volumes, with depth before the height
    grid: tuple[int, ...]  # its sides, in the order of the image's
    prefix: int = 0

    def picture(self, tensor: Tensor) -> Tensor:
        """ "b c h w", in float32 or better."""
        if self.kind == "tokens":
            tensor = tensor[:, self.prefix :].unflatten(1, self.grid)
        if self.kind != "nchw":
            tensor = tensor.movedim(-1, 1)
        return at_least_float(tensor)

    def put_back(self, picture: Tensor, tensor: Tensor) -> Tensor:
        """The layer's output with this picture in the place of its own."""
        values = picture if self.kind == "nchw" else picture.movedim(1, -1)
        if self.kind == "tokens":
            values = torch.cat([tensor[:, : self.prefix], values.flatten(1, -2)], dim=1)
        return values.to(tensor.dtype)

    @property
    def channel_axis(self) -> int:
        return 1 if self.kind == "nchw" else -1


def first_tensor(output: Any) -> Tensor | None:
    """The tensor in a layer's output; Hugging Face layers return tuples and records."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return next((item for item in output if isinstance(item, Tensor)), None)
    return None


def layout_of(output: Tensor, images: Tensor, module: nn.Module) -> Layout | None:
    """How a layer's output is a picture of the images, or None where it is not one."""
    if len(output) != len(images) or not output.is_floating_point():
        return None
    size = size_of(images)
    if output.ndim == images.ndim:
        return _spatial_layout(tuple(output.shape[1:]), size, module)
    if output.ndim == 3:
        return _token_layout(int(output.shape[1]), size, module)
    return None


def _spatial_layout(shape: tuple[int, ...], size: tuple[int, ...], module: nn.Module) -> Layout | None:
    channels_first, channels_last = _aspect_error(shape[1:], size), _aspect_error(shape[:-1], size)
    last = getattr(module, "channels_last", None)  # our Keras wrapper knows
    if last is None:
        is_swin = "Swin" in type(module).__name__
        last = channels_last < channels_first or (channels_last == channels_first and is_swin)
    grid = shape[:-1] if last else shape[1:]
    return Layout("nhwc" if last else "nchw", grid) if math.prod(grid) > 1 else None


def _aspect_error(grid: tuple[int, ...], size: tuple[int, ...]) -> float:
    """How far a grid is from the image's aspect; a grid finer than the image is no grid of it."""
    if any(cells > side for cells, side in zip(grid, size, strict=True)):
        return math.inf
    if len(size) > 2:  # networks shrink depth at a pace of its own, so aspects say nothing
        return 0.0
    slack = 0 if size[0] == size[1] else max(size)  # a side may have been rounded by one cell
    if abs(grid[0] * size[1] - grid[1] * size[0]) <= slack:
        return 0.0
    return abs(math.log((grid[0] / grid[1]) / (size[0] / size[1])))


def _token_layout(length: int, size: tuple[int, ...], module: nn.Module) -> Layout | None:
    grid = _patch_grid(module, size)
    if grid is not None:
        for halvings in range(6):  # Swin merges 2x2 tokens between stages
            merged = tuple(math.ceil(side / 2**halvings) for side in grid)
            if math.prod(merged) == length > 1:
                return Layout("tokens", merged)
        prefix = length - math.prod(grid)
        return Layout("tokens", grid, prefix) if 0 < prefix <= MOST_PREFIX_TOKENS else None
    if len(size) > 2:
        return None
    for prefix in range(min(MOST_PREFIX_TOKENS, length - 1)):
        height = round(math.sqrt((length - prefix) * size[0] / size[1]))
        width = (length - prefix) // max(1, height)
        if height * width == length - prefix > 1 and height * size[1] == width * size[0]:
            return Layout("tokens", (height, width), prefix)
    return None


def _patch_grid(module: nn.Module, size: tuple[int, ...]) -> tuple[int, ...] | None:
    """The token grid that a patch embedding (a convolution with stride = kernel) makes of an image."""
    for part in module.modules():
        if isinstance(part, CONVOLUTIONS):
            kernel, stride = part.kernel_size, part.stride
            if kernel != stride or kernel[0] < 2 or isinstance(part.padding, str) or len(kernel) != len(size):
                return None
            steps = zip(size, part.padding, kernel, stride, strict=True)
            return tuple((side + 2 * pad - wide) // step + 1 for side, pad, wide, step in steps)
    return None
