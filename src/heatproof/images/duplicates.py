"""Near-duplicates among images: repeated files, and mirrored, cropped, brightened or compressed copies.

Each image is kept as a thumbnail of SIDE x SIDE pixels. Two textured images are near-duplicates if the
central window of one correlates by SAME or more with a window of the other, possibly mirrored, shifted or
scaled by up to 10 %. Low frequencies (DCT) are compared, weighted by frequency, and brightness and contrast
cancel.

Images of one scene by a fixed camera, or of registered anatomy, correlate as they lie without being copies. A
pair counts only if the images correlate by less than UNLIKE or by IDENTICAL or more as they lie: a copy that
is only brighter, with clipped values, may be missed.

On a flat background a moved object looks like another crop of the same image. Images with few edges are
therefore near-duplicates only if their thumbnails are equal up to CLOSE grey levels.

SAME was chosen on 450 chest X-rays. What is recognised and what is merged: docs/verdict.md and
research/near_duplicates.csv.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import product

import numpy as np

SIDE = 32
SAME, UNLIKE, IDENTICAL = 0.9, 0.8, 0.995
CLOSE = 8
TEXTURED = 0.1  # participation ratio of the squared gradient, as a share of the pixels
CENTRAL = 0.8  # side of the central window, as a share of the image
SCALES, SHIFTS = (0.72, 0.76, 0.8, 0.84, 0.88), (-0.08, -0.04, 0.0, 0.04, 0.08)
SAMPLES, FREQUENCIES = 24, 16  # along the sides of a window
MOST_CROPS, MOST = 300, 3000  # images: of more, shifted windows, then all but equal thumbnails are left out
BLOCK = 1000  # images compared with all others at once


def near_duplicates(thumbnails: np.ndarray) -> np.ndarray:
    """Group of each image: the number of the first image that it is a near-duplicate of, or its own.

    Args:
        thumbnails: "n SIDE SIDE c", uint8.
    """
    return _groups(thumbnails.tobytes(), thumbnails.shape).copy()


@lru_cache(maxsize=2)  # the live page reads a run again and again
def _groups(content: bytes, shape: tuple[int, ...]) -> np.ndarray:
    thumbnails = np.frombuffer(content, np.uint8).reshape(shape)
    flat = thumbnails.reshape(len(thumbnails), -1)
    _, first, place = np.unique(flat, axis=0, return_index=True, return_inverse=True)
    equal_to = first[place.reshape(-1)]
    different = np.sort(first)
    group = np.arange(len(thumbnails))
    for i, j in different[_similar_pairs(thumbnails[different])].tolist():
        if group[i] == i and group[j] == j:  # not through a third image: similarity is not transitive
            group[j] = i
    return np.asarray(group[equal_to])


def _similar_pairs(images: np.ndarray) -> np.ndarray:
    """Array "p 2", i < j, in order: near-duplicates among different thumbnails."""
    if not 1 < len(images) <= MOST:
        return np.zeros((0, 2), int)
    from scipy.spatial import cKDTree

    close = cKDTree(images.reshape(len(images), -1)).query_pairs(CLOSE, p=np.inf, output_type="ndarray")
    grey = images.mean(-1, dtype=np.float32)
    textured = np.flatnonzero(_texture(grey) >= TEXTURED)
    pairs = np.concatenate([close.astype(int), textured[_correlated(grey[textured])]])
    return np.unique(np.sort(pairs, axis=1), axis=0)


def _texture(grey: np.ndarray) -> np.ndarray:
    """Array "n": how evenly the squared gradient is spread over the image, 0 to 1."""
    energy = np.square(np.gradient(grey, axis=(1, 2))).sum(0).reshape(len(grey), -1)
    return np.asarray(energy.sum(1) ** 2 / np.maximum(energy.shape[1] * (energy**2).sum(1), 1e-9))


def _correlated(grey: np.ndarray) -> np.ndarray:
    """Array "p 2": pairs in which a window of one image correlates with the central window of the other."""
    places = product(SCALES, SHIFTS, SHIFTS) if len(grey) <= MOST_CROPS else [(CENTRAL, 0.0, 0.0)]
    windows = [_frequencies(grey, *place, mirrored) for place in places for mirrored in (False, True)]
    central, pairs = _frequencies(grey, CENTRAL), [np.zeros((0, 2), int)]
    for start in range(0, len(grey), BLOCK):
        block = central[start : start + BLOCK]
        best, as_is = np.maximum.reduce([block @ window.T for window in windows]), block @ central.T
        copied = (best >= SAME) & ((as_is < UNLIKE) | (as_is >= IDENTICAL))
        rows, columns = np.nonzero(copied)
        pairs.append(np.stack([rows + start, columns], 1)[rows + start != columns])
    return np.concatenate(pairs)


def _frequencies(
    grey: np.ndarray, scale: float, down: float = 0.0, right: float = 0.0, mirrored: bool = False
) -> np.ndarray:
    """Array "n f": the weighted low frequencies of a window, as unit vectors."""
    rows, columns = _cosines(scale, down), _cosines(scale, right, mirrored)
    weights = np.hypot(*np.indices((FREQUENCIES, FREQUENCIES))).astype(np.float32)  # none for the mean
    flat = (rows @ grey @ columns.T * weights).reshape(len(grey), FREQUENCIES**2)
    return np.asarray(flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-6))


@cache
def _cosines(scale: float, shift: float, mirrored: bool = False) -> np.ndarray:
    """Array "f SIDE": linear interpolation of the samples of a window along one axis, then their DCT."""
    from scipy.fft import dct

    at = (((np.arange(SAMPLES) + 0.5) / SAMPLES - 0.5) * scale + 0.5 + shift) * SIDE - 0.5
    weights = np.maximum(0, 1 - abs(np.clip(at, 0, SIDE - 1)[:, None] - np.arange(SIDE)))
    weights = weights[::-1] if mirrored else weights
    return np.asarray(dct(weights, axis=0, norm="ortho")[:FREQUENCIES], np.float32)
