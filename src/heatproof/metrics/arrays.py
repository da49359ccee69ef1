"""Inputs of metrics as NumPy arrays, without torch."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, cast

import numpy as np

from heatproof.errors import InputError

if TYPE_CHECKING:
    from heatproof.types import ArrayLike


def as_array(values: ArrayLike) -> np.ndarray:
    """A tensor, array or nested list as an array, without torch where no tensor is given."""
    if hasattr(values, "detach"):
        given = values.detach().cpu()
        values = (given.double() if given.is_floating_point() else given).numpy()
    return np.asarray(values)


def as_numbers(values: ArrayLike) -> np.ndarray:
    """ "n" float64: numbers of any shape, one after the other."""
    return as_array(values).astype(np.float64).reshape(-1)


def same_length(**arrays: ArrayLike | Sized | None) -> int:
    """The common length of the named arguments, or a sentence that names the two that differ."""
    lengths = {name: len(cast("Sized", values)) for name, values in arrays.items() if values is not None}
    first, n = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != n:
            raise InputError(f"{name} has {length} entries but {first} has {n}; they must match")
    return n
