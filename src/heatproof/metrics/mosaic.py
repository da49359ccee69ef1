"""Grid pointing: whether the map of a class lies on the images of that class in a mosaic.

A mosaic is n x n images of different classes, each classified with high confidence. Each class in it is
explained, and it is known where its evidence lies: in its own cells. No training, no annotation.

    share_c = positive mass of the map of class c inside the cells of c / its positive mass
    grid_pointing_inside = mean of share_c over the k classes in the mosaic
    grid_pointing_above  = mean of (share_c - the area of c's cells)

The cells of all classes together are the mosaic, so a map that is the same for every class (edges, centre,
any map that ignores the network) has a mean share of exactly 1 / k, and is exactly 0 above chance. So does
EigenCAM, which reads the network but no class: the test is whether a map depends on the class.

In a mosaic a network sees all cells at once, so a map may be right and still lie outside its cell. Not so
where the cells are disconnected (models/derived.py): one alone reaches the answer.

    disconnected_grid_outside = mean over the cells of the share of positive mass outside the cell explained
    disconnected_grid_above   = the same less 1 - 1 / n^2, which is what a map that ignores the network has

All of it is provably false. Gradients of the input and HiResCAM have 0; Grad-CAM, which weighs a channel by
its mean gradient wherever it is active, has not. A run makes its mosaics of at most 200 images.

Cite: rao2022towards (GridPG and DiFull). There mosaics hold n^2 classes; here fewer will do, with k = 2 for
two classes. Mass is counted on the map's own grid, each value evenly over its square: enlarged bilinearly, a
correct map would spill over the border. Cells have the images' size where the network takes mosaics that
large; otherwise images are shrunk, and the network must be sure of them shrunk (and enlarged again) too. A
class whose map is constant is left out of its mosaic's mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.errors import HeatproofError, InputError
from heatproof.explain.api import MethodCall, explain, read_methods
from heatproof.metrics.kit import ImagePool, Passes, refuse_volumes
from heatproof.metrics.results import Cause, PerImage
from heatproof.metrics.sanity import Layers, Methods
from heatproof.models.derived import disconnected
from heatproof.models.model import Model, all_logits, as_model, unbind_targets
from heatproof.models.running import is_out_of_memory
from heatproof.registry import metric
from heatproof.types import ArrayLike, Images, size_of

BLANK = "every map of the mosaic is constant, so nothing in it stands out"
AT_ONCE = 16  # mosaics in memory
IN_A_RUN = 200  # images of a checkpoint that a run makes mosaics of


@dataclass(frozen=True)
class Mosaics:
    """Images that a network classifies confidently, and their places in mosaics.

    Args:
        pictures, classes: "p c h w" and "p".
        places: "m n n", the image in each cell.
        rows, columns: where cells begin, and the last ends: n + 1 pixels each.
    """

    pictures: Tensor
    classes: Tensor
    places: Tensor
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def cell_classes(self) -> Tensor:
        """Tensor "m n n"."""
        return self.classes[self.places]

    @property
    def areas(self) -> Tensor:
        """Tensor "n n", each cell's share of the mosaic."""
        heights, widths = (torch.tensor(edges).double().diff() for edges in (self.rows, self.columns))
        return torch.outer(heights, widths) / (self.rows[-1] * self.columns[-1])

    def images(self, which: slice | Tensor = slice(None)) -> Tensor:
        """Tensor "m c H W", model-ready, with each image in its cell."""
        lines = []
        for line, height in zip(self.places[which].unbind(1), np.diff(self.rows).tolist(), strict=True):
            cells = zip(line.unbind(1), np.diff(self.columns).tolist(), strict=True)
            lines.append(torch.cat([shrunk(self.pictures[p], (height, width)) for p, width in cells], -1))
        return torch.cat(lines, -2)

    def mass(self, values: Tensor) -> Tensor:
        """Tensor "m n n", float64: the positive mass of maps "m h w" in each cell."""
        shares = []  # "n count": how much of each of `count` equal steps lies in each cell
        for count, edges in zip(values.shape[1:], (self.rows, self.columns), strict=True):
            # In whole numbers, so that a step outside a cell counts 0 there, not a rounding error.
            start, whole = torch.arange(count) * edges[-1], edges[-1]
            ends = [(start + whole).clamp(max=last * count) for last in edges[1:]]
            inside = [end - start.clamp(min=first * count) for end, first in zip(ends, edges, strict=False)]
            shares.append(torch.stack(inside).clamp(min=0).double().to(values.device) / whole)
        return torch.einsum("rh,mhw,cw->mrc", shares[0], values.clamp(min=0).double(), shares[1])


def shrunk(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Images "p c h w" at another size."""
    if tuple(pictures.shape[-2:]) == size:
        return pictures
    return F.interpolate(pictures.float(), size=size, mode="bilinear", antialias=True).to(pictures.dtype)


def make_mosaics(
    images: Images, labels: ArrayLike | None = None, *, model: Model | nn.Module, cells: int = 2,
    confident: float = 0.5, mosaics: int | None = None, full_size: bool | None = None, seed: int = 0,
    **passes: Unpack[Passes],
) -> Mosaics:  # fmt: skip
    """Make mosaics of images that a network classifies confidently; arguments as of grid_pointing.

    full_size: whether cells have the images' size; default: if the network takes such mosaics.
    """
    if not isinstance(cells, int) or cells < 2:
        raise InputError(f"cells must be a whole number of at least 2, got {cells!r}")
    if not 0 <= confident <= 1:
        raise InputError(f"confident must be a probability from 0 to 1, got {confident!r}")
    if mosaics is not None and (not isinstance(mosaics, int) or mosaics < 1):
        raise InputError(f"mosaics must be a whole number of at least 1, or None; got {mosaics!r}")
    if seed < 0:
        raise InputError(f"seed must be 0 or more, got {seed}")
    model = unbind_targets(as_model(model))
    inputs = model.check_images(images).to(model.device)
    refuse_volumes("grid_pointing", size_of(inputs))
    height, width = int(inputs.shape[-2]), int(inputs.shape[-1])
    classes, sure = _sure(model, inputs, labels, confident, passes)
    if full_size is None:
        full_size = _takes(model, inputs[:1].repeat(1, 1, cells, cells))
    if not full_size and cells > min(height, width):
        raise InputError(f"images of {height}x{width} cannot be shrunk into mosaics of {cells}x{cells} cells")
    scale = cells if full_size else 1
    rows, columns = (
        tuple(round(i * scale * side / cells) for i in range(cells + 1)) for side in (height, width)
    )
    if not full_size:
        again = shrunk(shrunk(inputs, (rows[1], columns[1])), (height, width))
        sure &= _sure(model, again, classes, confident, passes)[1]
    count, known = int(sure.sum()), classes[sure].unique().tolist()
    if count < cells**2 or len(known) < 2:
        rightly, small = "correctly " * (labels is not None), ", also shrunk to their cell" * (not full_size)
        only = f", all of class {known[0]}" if len(known) == 1 else ""
        raise InputError(
            f"{count} of {len(inputs)} images are {rightly}classified with a probability of at least "
            f"{confident:g}{small}{only}; a mosaic of {cells}x{cells} cells takes {cells**2}, of two classes "
            "or more: give more images, or lower confident"
        )
    places = _arranged(classes[sure].tolist(), cells, mosaics or count // cells**2, seed)
    return Mosaics(inputs[sure], classes[sure], places.to(inputs.device), rows, columns)


def _sure(
    model: Model, inputs: Tensor, labels: ArrayLike | None, confident: float, passes: Passes
) -> tuple[Tensor, Tensor]:
    """Classes "b" and "b" bool: whether the network is confident, and correct if there are labels."""
    logits = all_logits(model, inputs, **passes)
    highest, classes = model.probabilities(logits).max(1)
    sure = highest >= confident
    return classes, sure if labels is None else sure & (classes == model.check_targets(labels, logits))


def _takes(model: Model, mosaic: Tensor) -> bool:
    """Whether a network accepts an image of this size, by trying."""
    try:
        model.logits(mosaic)
    except (RuntimeError, ValueError, AssertionError, TypeError, IndexError, HeatproofError) as error:
        if is_out_of_memory(error):
            raise
        return False
    return True


def _arranged(classes: Sequence[int], cells: int, mosaics: int, seed: int) -> Tensor:
    """Tensor "m n n": images of as many classes as fit, each class about equally often."""
    random = np.random.default_rng(seed)
    kinds, kind_of = np.unique(classes, return_inverse=True)
    waiting = [cycle(random.permutation(np.flatnonzero(kind_of == kind))) for kind in range(len(kinds))]
    places = []
    for _ in range(mosaics):
        chosen = np.resize(random.permutation(len(kinds)), cells**2)  # repeated if there are fewer
        places.append([int(next(waiting[kind])) for kind in random.permutation(chosen)])
    return torch.tensor(places).view(-1, cells, cells)


# A network, "m": the class to explain in every mosaic, and "m n n" bool: the cells of its evidence.
Question = tuple[Model, Tensor, Tensor]


def _shares(
    calls: Sequence[MethodCall], questions: Sequence[Question], mosaics: Mosaics, layer: Layers, seed: int,
    passes: Passes,
) -> dict[str, Tensor]:  # fmt: skip
    """By method "m k", float64: the share of positive mass inside; NaN where a map is blank."""
    methods = [call.text for call in calls]
    table: dict[str, list[Tensor]] = {method: [] for method in methods}
    for part in torch.arange(len(mosaics.places)).split(AT_ONCE):
        images = mosaics.images(part)
        explained = [explain(model, images, methods, targets[part], layer=layer, seed=seed,
                             allow_nan=True, **passes) for model, targets, _ in questions]  # fmt: skip
        for method, rows in table.items():
            shares = []
            for (_, _, cells), maps in zip(questions, explained, strict=True):
                mass = mosaics.mass(maps[method].values)
                inside = (mass * cells[part]).sum((1, 2)) / mass.sum((1, 2))
                shares.append(inside.masked_fill(maps[method].degenerate, torch.nan))
            rows.append(torch.stack(shares, 1).cpu())
    return {method: torch.cat(rows) for method, rows in table.items()}


def _in_a_run(function: Callable[..., Any], pool: ImagePool, options: dict[str, Any]) -> dict[str, PerImage]:
    batch = pool.pictures(IN_A_RUN)
    network = {"model": pool.model, "images": batch.images, "layer": pool.layer}
    return dict(function(pool.methods, batch.labels, **network, **pool.passes, **options))


_metric = partial(
    metric, needs=("model", "images"), level="checkpoint", cite="rao2022towards", family="Faithfulness",
    floors=(), question="map", bounds=(-1.0, 1.0), reruns=True, call=_in_a_run,
)  # fmt: skip


@_metric(
    "grid_pointing", higher_is_better=True,
    parts={"inside": "share of the map on the images of its class, in mosaics",
           "above": "map on the images of its class, above chance"},
)  # fmt: skip
def grid_pointing(
    methods: Methods = "gradcam", labels: ArrayLike | None = None, *, model: Model | nn.Module,
    images: Images, cells: int = 2, confident: float = 0.5, mosaics: int | None = None,
    layer: Layers = None, seed: int = 0, **passes: Unpack[Passes],
) -> dict[str, PerImage]:  # fmt: skip
    """Share of a class's map that lies on the images of that class in mosaics, and its distance from chance.

    Args:
        methods: names, with optional options.
        labels: "b", the images' classes: only correctly classified images are used; default: all that the
            network classifies confidently.
        model, images, layer, passes: as for hp.explain; passes are batch_size and progress.
        cells: along each side of a mosaic.
        confident: the least probability of an image's class.
        mosaics: their number; default: as many as use each image about once.
        seed: of the places of images, and of methods that draw random numbers.

    Returns:
        By method: inside and above (chance), each "m", one for each mosaic.

    Example:
        >>> network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> images = torch.eye(3)[[0, 1, 2, 0]].view(4, 3, 1, 1).expand(4, 3, 8, 8)
        >>> scores = grid_pointing("gradient", model=network, images=images, confident=0.4)
        >>> list(scores["gradient"])
        ['inside', 'above']
    """
    model, calls = unbind_targets(as_model(model)), read_methods(methods, again=True)
    built = make_mosaics(
        images, labels, model=model, cells=cells, confident=confident, mosaics=mosaics, seed=seed, **passes
    )
    classes = built.cell_classes
    kinds = torch.stack([own.unique() for own in classes.flatten(1)])  # "m k": as many in every mosaic
    questions = [(model, kind, classes == kind[:, None, None]) for kind in kinds.unbind(1)]
    areas = torch.stack([(cells_of.cpu() * built.areas).sum((1, 2)) for _, _, cells_of in questions], 1)
    result = {}
    for method, shares in _shares(calls, questions, built, layer, seed, passes).items():
        blank = shares.isnan()
        # Rounded before the subtraction, so that a map at chance has exactly 0.
        inside, chance = shares.nanmean(1).float(), areas.masked_fill(blank, torch.nan).nanmean(1).float()
        result[method] = PerImage({"inside": inside, "above": inside - chance}, [Cause(BLANK, blank.all(1))])
    return result


@_metric(
    "disconnected_grid", higher_is_better=False, needs_weights=True,
    parts={"outside": "share of the map without possible influence, in mosaics",
           "above": "map without possible influence, above chance"},
)  # fmt: skip
def disconnected_grid(
    methods: Methods = "gradcam", labels: ArrayLike | None = None, *, model: Model | nn.Module,
    images: Images, cells: int = 2, confident: float = 0.5, mosaics: int | None = None,
    layer: Layers = None, seed: int = 0, **passes: Unpack[Passes],
) -> dict[str, PerImage]:  # fmt: skip
    """Share of a map on cells that cannot influence the output; 0 is correct.

    Args:
        methods, labels, model, images, cells, confident, mosaics, layer, seed, passes: as for grid_pointing.

    Returns:
        By method: outside and above (chance), each "m", one for each mosaic.

    Example:
        >>> network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> images = torch.eye(3)[[0, 1, 2, 0]].view(4, 3, 1, 1).expand(4, 3, 8, 8)
        >>> scores = disconnected_grid("gradient", model=network, images=images, confident=0.4)
        >>> list(scores["gradient"])
        ['outside', 'above']
    """
    model, calls = unbind_targets(as_model(model)), read_methods(methods, again=True)
    built = make_mosaics(
        images, labels, model=model, cells=cells, confident=confident, mosaics=mosaics, full_size=True,
        seed=seed, **passes,
    )  # fmt: skip
    needs = frozenset[str]().union(*(call.entry.needs for call in calls))
    alone = disconnected(model, built.pictures, needs, layer, cells)
    every = torch.eye(cells**2, dtype=torch.bool, device=model.device).unflatten(1, (cells, cells))
    questions = [
        (network, targets, cell.expand_as(built.places))
        for network, targets, cell in zip(alone, built.cell_classes.flatten(1).unbind(1), every, strict=True)
    ]
    result = {}
    for method, shares in _shares(calls, questions, built, None, seed, passes).items():
        outside = (1 - shares).nanmean(1).float()
        above = outside - (1 - 1 / cells**2)
        result[method] = PerImage({"outside": outside, "above": above}, [Cause(BLANK, shares.isnan().all(1))])
    return result
