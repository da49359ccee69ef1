"""The pairs of an image and its transformed selves, all on the model's device.

    job j = variant j // b of image j % b

Variants are built when their batch comes, go through one shared pass for all methods, their maps are brought
back and compared, and only the SSIMs and the predictions stay: memory does not grow with the variants.

Originals are explained with the study's seed, their variants with the next one, so that the noise of a method
that draws random numbers counts against it, as it does for whoever runs it twice; `same_seed` repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heatproof.explain.api import explain
from heatproof.images.transforms import Drawn, Transform
from heatproof.metrics.checkpoint_pairs import alike, comparable
from heatproof.models.model import Model
from heatproof.models.queue import Queue
from heatproof.types import Maps


@dataclass(frozen=True)
class InputPairs:
    """What is known of each image and variant."""

    ssim: Mapping[str, np.ndarray]  # method -> "b v", NaN where it is not defined
    why: Mapping[str, np.ndarray]  # method -> "b v": which of `similarity.REASONS`
    predicted: np.ndarray  # "b v": the class predicted for the variant


def input_pairs(
    model: Model,
    pictures: Tensor,
    reference: Mapping[str, Maps],
    drawn: Drawn,
    *,
    seed: int = 0,
    same_seed: bool = False,
    similarity: str = "local5",
    layer: str | Sequence[str] | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> InputPairs:
    """Compare the maps of transformed pictures with those of the pictures.

    pictures: "b c h w" uint8 on the model's device. reference: their maps by method, made with `seed`.
    """
    count, methods = len(pictures), list(reference)
    originals = {method: comparable(maps) for method, maps in reference.items()}
    table = torch.from_numpy(drawn.magnitudes.T.copy()).to(pictures.device)  # "v b"
    size = int(pictures.shape[-2]), int(pictures.shape[-1])
    results: list[dict[str, tuple[Tensor, Tensor, Tensor]]] = []

    def work(start: int, stop: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        jobs = torch.arange(start, stop, device=pictures.device)
        which = jobs % count
        magnitudes = table[jobs // count, which]
        inputs, pieces = pictures[which], list(_pieces(drawn, count, start, stop))
        masks = {}
        for transform, part in pieces:
            inputs[part] = transform.apply(inputs[part], magnitudes[part])
            masks[transform.name] = transform.valid(size, magnitudes[part])
        maps = explain(
            model, model.preprocess.from_bytes(inputs), methods, layer=layer, seed=seed + (not same_seed),
            batch_size=stop - start, progress=progress,
        )  # fmt: skip
        result = {}
        for method in methods:
            heat = comparable(maps[method])
            compared = [
                alike(
                    originals[method][which[part]],
                    transform.inverse_maps(heat[part], magnitudes[part]),
                    masks[transform.name],
                    similarity,
                )
                for transform, part in pieces
            ]
            value, why = (torch.cat(column) for column in zip(*compared, strict=True))
            result[method] = value, why, maps[method].explained
        return result

    Queue(model, size, batch_size).each(count * len(drawn.names), work, results.append)

    def column(method: str, k: int) -> np.ndarray:
        """One of the results of all jobs as "b v"."""
        return torch.cat([result[method][k] for result in results]).view(-1, count).T.cpu().numpy()

    ssims, whys = ({method: column(method, k) for method in methods} for k in (0, 1))
    return InputPairs(ssims, whys, column(methods[0], 2))


def _pieces(drawn: Drawn, count: int, start: int, stop: int) -> list[tuple[Transform, slice]]:
    """The transforms of a batch of jobs, and the rows of the batch that each makes."""
    found = []
    for run in drawn.runs():
        low, high = max(start, run.first * count), min(stop, run.end * count)
        if low < high:
            found.append((run.transform, slice(low - start, high - start)))
    return found
