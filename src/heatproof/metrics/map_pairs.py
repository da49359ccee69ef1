"""Soft IoU of every pair of maps: exact, one L1 distance per pair; sampled, where there are too many pairs.

    min(x, y) = (x + y - |x - y|) / 2  and  max(x, y) = (x + y + |x - y|) / 2, so that
    sIoU(a, b) = sum min / sum max = (A + B - L1(a, b)) / (A + B + L1(a, b)),  A = sum a, B = sum b.

Maps are rows of non-negative float32 pixels here ("n p"); what they mean is the caller's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

EXACT_UP_TO = 2000  # maps; beyond, pairs are sampled. 2,000 maps of 224x224 are 2 million pairs
HALF_WIDTH = 0.005  # what the sampled mode aims at
PILOT_PAIRS = 1000
MAX_PAIRS = 200_000  # HALF_WIDTH can never need more than 50,000: a score in [0, 1] has a deviation <= 1/2
Z95 = 1.959964

# Pixels per call of pdist. Sums inside a call are float32, across calls float64. With 512 the worst error
# found in a score is 5e-7 (a constant difference, whose roundings all lean one way; random maps: 3e-8) and
# no maps at all can exceed about 2e-6. A GPU sums as a tree and wants longer rows.
CPU_BLOCK, GPU_BLOCK = 512, 4096
PAIRS_AT_ONCE = 128  # bounds the memory of the sampled mode


class Rows(Protocol):
    """Maps as rows of pixels, made when they are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Tensor) -> Tensor: ...


def soft_iou_matrix(pixels: Tensor, block: int | None = None) -> Tensor:
    """ "n p" -> "n n" float64. Memory: the maps, one block of them, and n * n scores."""
    pixels, n = pixels.detach(), len(pixels)
    mass = pixels.sum(1, dtype=torch.float64)
    i, j = torch.triu_indices(n, n, 1, device=pixels.device)
    matrix = torch.diag((mass > 0).double())
    matrix[i, j] = matrix[j, i] = iou_from_distance(mass[i] + mass[j], _l1_pairs(pixels, block))
    return matrix


def _l1_pairs(pixels: Tensor, block: int | None) -> Tensor:
    """L1 distance of every pair i < j, in the order of triu_indices, float64.

    torch.pdist is the fastest exact kernel of those tried (855 maps of 224x224, 2 cores: 1.1 s): vectorised,
    all cores, each pair once. torch.cdist and NumPy in threads took several times as long, and so would
    scipy's cityblock, by its time on one thread.
    """
    pairs, p = len(pixels) * (len(pixels) - 1) // 2, pixels.shape[1]
    if not pixels.is_cpu:
        distance = torch.zeros(pairs, dtype=torch.float64, device=pixels.device)
        for start in range(0, p, block or GPU_BLOCK):
            distance += torch.nn.functional.pdist(pixels[:, start : start + (block or GPU_BLOCK)], p=1)
        return distance
    # Copy and sum in NumPy: torch would gather all its threads for each, and where cores are shared with
    # other work it is this gathering, not the arithmetic, that takes the time.
    rows, total = pixels.numpy(), np.zeros(pairs)
    for start in range(0, p, block or CPU_BLOCK):
        part = np.ascontiguousarray(rows[:, start : start + (block or CPU_BLOCK)])
        total += torch.nn.functional.pdist(torch.from_numpy(part), p=1).numpy()
    return torch.from_numpy(total)


def iou_from_distance(mass: Tensor, distance: Tensor) -> Tensor:
    """The identity above; two empty maps share nothing: 0."""
    return torch.where(mass > 0, (mass - distance) / (mass + distance), 0.0).clamp(0, 1)


def soft_iou_rows(a: Tensor, b: Tensor) -> Tensor:
    """ "m p", "m p" -> "m" float64: row by row."""
    mass = a.sum(1, dtype=torch.float64) + b.sum(1, dtype=torch.float64)
    return iou_from_distance(mass, (a - b).abs().sum(1, dtype=torch.float64))


@dataclass(frozen=True)
class Sampled:
    """An estimated mean with its 95 % interval's half-width and the number of pairs behind it."""

    value: float
    half_width: float
    pairs: int


def sampled_mean(
    rows: Rows,
    weights: np.ndarray,
    half_width: float = HALF_WIDTH,
    seed: int | tuple[int, ...] = 0,
    max_pairs: int = MAX_PAIRS,
) -> Sampled:
    """Estimate C = sum_{i<j} (w_i + w_j) s_ij / (n - 1), with weights that sum to 1, from random pairs.

    Draw i with probability w_i and j evenly from the n - 1 others. Then
        E[s_ij] = sum_i w_i sum_{j != i} s_ij / (n - 1) = sum_{i<j} (w_i + w_j) s_ij / (n - 1) = C,
    since s is symmetric. A pilot fixes the number of pairs and is then thrown away: were its draws kept,
    the number would depend on the scores being averaged and the mean would be biased.
    """
    rng = np.random.default_rng(seed)
    deviation = _draw(rows, weights, PILOT_PAIRS, rng).std(ddof=1)
    wanted = 1.2 * (Z95 * deviation / half_width) ** 2  # 1.2: the pilot's deviation is itself uncertain
    pairs = min(max(math.ceil(wanted), PILOT_PAIRS), max_pairs)
    scores = _draw(rows, weights, pairs, rng)
    error = Z95 * scores.std(ddof=1) / math.sqrt(pairs)
    # What happens in under 3 / pairs of the draws is missed altogether with a chance of 5 % or more,
    # so that no sample, however uniform, says more than that about a mean of numbers in [0, 1].
    return Sampled(float(scores.mean()), float(max(error, 3 / pairs)), pairs)


def _draw(rows: Rows, weights: np.ndarray, pairs: int, rng: np.random.Generator) -> np.ndarray:
    n = len(rows)
    first = rng.choice(n, size=pairs, p=weights)
    second = rng.integers(0, n - 1, size=pairs)
    second += second >= first
    drawn = torch.from_numpy(np.stack([first, second]))
    scores = []
    for part in drawn.split(PAIRS_AT_ONCE, dim=1):
        a, b = rows[part.flatten()].detach().chunk(2)
        scores.append(soft_iou_rows(a, b))
    return torch.cat(scores).cpu().numpy()
