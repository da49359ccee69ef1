"""Exact Euclidean distance to the nearest pixel of a mask, in pixels.

scipy's transform is the field's own and exact. It is slow beside everything else a structure score does, and
masks repeat (every method is scored on the same images), so each distinct mask is transformed once.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt
from torch import Tensor


def distance_to(masks: Tensor) -> Tensor:
    """ "b h w" bool -> "b h w" float32 on the same device; infinite where a mask has no pixel.

    >>> distance_to(torch.tensor([[[True, False, False]]])).tolist()
    [[[0.0, 1.0, 2.0]]]
    """
    height, width = masks.shape[-2:]
    packed = np.packbits(masks.flatten(1).cpu().numpy(), axis=1)
    fields = [_transform(height, width, bits.tobytes()) for bits in packed]
    stacked = np.stack(fields) if fields else np.zeros((0, height, width), np.float32)
    return torch.from_numpy(stacked).to(masks.device)


@lru_cache(maxsize=512)
def _transform(height: int, width: int, packed: bytes) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=height * width)
    mask = bits.reshape(height, width).astype(bool)
    if not mask.any():
        return np.full((height, width), np.inf, np.float32)
    field: np.ndarray = distance_transform_edt(~mask).astype(np.float32)
    return field
