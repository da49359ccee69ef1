"""Localisation: whether maps point at the object, and whether their pixels form one area near the centre.

Every method may mark the same number of pixels: each map keeps its floor(K H W) largest ones (K = 0.2 keeps
10,035 of 224x224). With P the kept pixels and A the truth:

    mask_iou = |P & A| / |P or A|                A: the mask where there is one, else the union of the boxes
    box_iou  = IoU of P's tight box with a box   the best over the boxes, else with the mask's tight box
    inside   = |P & A| / |P|                     share of the budget inside the boxes, else the mask
    pointing = 1 if the first largest pixel lies in A (boxes, else mask), else 0

A fixed budget of B = floor(K H W) pixels caps mask_iou at min(|A|, B) / max(|A|, B), reported as `reachable`.
Pixels at the map's minimum, after clipping, are never kept: where fewer than B pixels lie above it, P is
those, and `filled` is the share of the budget that is left unused. Such a map may exceed `reachable`. A
constant map marks nothing: mask_iou, box_iou and inside are undefined; in the pointing game it is a miss.

Cite: keak2026budget; zhang2018excitation for the pointing game.

Conventions: ties are kept in row-major order; the thesis states neither that nor what a map with too few
positive pixels keeps. Negatives are clipped; min-max does not change the order and is skipped. A box is
(x0, y0, x1, y1) in pixel indices from 0, both corners inside it, so it covers x0 <= x <= x1; x1 = W, where
tools count edges, means the last column. Class means are means of means (`macro_mean`), as in the thesis.

Dispersion and centre bias: the budget's pixels form areas whose pixels touch at a side or a corner. With n_i
pixels in area i and K in all:

    dispersion = 1 - sum_i (n_i / K)^2     the probability that two of them lie in different areas
    blobs      = the number of areas with at least 5 % of them

0 for one area, near 1 for scattered pixels. With m_i the normalised map and d_i the distance of pixel i from
the centre of the image:

    centre_bias = 1 - (sum_i m_i d_i / sum_i m_i) / mean_i d_i

1 for a dot in the centre, 0 for mass that is spread evenly, below 0 for mass near the border. keak2026budget
interprets spread "red blobs" as a sign of an uncertain network and states that networks tend to focus on the
centre, both without a number; these definitions are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.ndimage import label as label_areas
from torch import Tensor

from heatproof.errors import InputError
from heatproof.metrics.kit import (
    CONSTANT,
    BatchContext,
    align,
    ascending,
    chunks,
    members,
    pixel_maps,
    sized_maps,
)
from heatproof.metrics.results import Cause, PerClass, PerImage, as_numbers, same_length
from heatproof.registry import metric
from heatproof.types import ArrayLike, Maps, Truth, constant, size_of, spatial_dims, upsample

BUDGETS = tuple(percent / 100 for percent in range(5, 51, 5))
KEYS = ("mask_iou", "box_iou", "inside", "reachable", "filled")
NO_TRUTH = "the image has no box and no mask pixel"
BLOB = 0.05  # of the budget's pixels, at least


def _in_a_run(_: Callable[..., Any], context: BatchContext, options: dict[str, Any]) -> dict[str, PerImage]:
    """All scores, of which each metric reads its own."""
    truth = context.batch.truth
    assert truth is not None
    masks = torch.stack(list(truth.masks.values())).any(0) if truth.masks else None
    scores = {method: localise(maps, truth.boxes, masks, **options) for method, maps in context.maps.items()}
    return {method: name_losses(own, truth.lost) for method, own in scores.items()}


_metric = partial(
    metric, needs=("maps", "boxes"), higher_is_better=True, bounds=(0.0, 1.0), cite="keak2026budget",
    family="Localisation", bundle="localise", call=_in_a_run, question="network", volumes=True,
    floors=("random", "edges", "centre"),  # some objects are in the middle
)  # fmt: skip


def localise(
    maps: Maps | ArrayLike, boxes: ArrayLike | None = None, masks: ArrayLike | None = None,
    budget: float = 0.2,
) -> PerImage:  # fmt: skip
    """Budgeted overlap of maps with boxes or masks, and the pointing game.

    Args:
        maps: Maps, or "b h w".
        boxes: one (x0, y0, x1, y1) or a list of them for each image.
        masks: "b H W" or "H W", of any size; for volumes "b D H W", which have no boxes.
        budget: share of the pixels that a map may mark.

    Returns:
        mask_iou, box_iou, inside, pointing, reachable and filled, each "b".

    Example:
        >>> scores = localise([[[0.9, 0.1], [0.2, 0.0]]], boxes=[[0, 0, 1, 0]], budget=0.25)
        >>> scores["mask_iou"].tolist(), scores["pointing"].tolist()
        ([0.5], [1.0])
    """
    curves, hits, causes = _localise(maps, boxes, masks, (budget,))
    return PerImage({name: curve[:, 0] for name, curve in curves.items()} | {"pointing": hits}, causes)


EXAMPLE = '>>> {name}([[[0.9, 0.1], [0.2, 0.0]]], boxes=[[0, 0, 1, 0]], budget=0.25)["{key}"].tolist()'
_score = members(_metric, localise, PerImage.only, '{key}, "b".', EXAMPLE)
mask_iou = _score(
    "mask_iou", "Overlap (IoU) of the budget's strongest pixels with the object.", "[0.5]",
    title="overlap with the object", headline=True,
)  # fmt: skip
box_iou = _score(
    "box_iou", "Overlap (IoU) of the box around the budget's strongest pixels with the object's.", "[0.5]",
    title="overlap of boxes",
)  # fmt: skip
inside = _score(
    "inside", "Share of the budget's pixels that lie on the object.", "[1.0]",
    aliases=("inside_share",), title="share inside the object", headline=True,
)  # fmt: skip
pointing = _score(
    "pointing", "Pointing game: 1 if the map's peak lies on the object.", "[1.0]",
    aliases=("pointing_game",), cite="zhang2018excitation", title="peak on the object", votes=True,
)  # fmt: skip
reachable = _score(
    "reachable", "The best mask_iou of a map that spends the whole budget.", "[0.5]",
    higher_is_better=None, aliases=("reachable_mask_iou",), title="largest possible overlap",
)  # fmt: skip
filled = _score(
    "filled", "Share of the budget left unused because too few pixels lie above the map's minimum.", "[0.0]",
    higher_is_better=False, aliases=("filled_share",), title="budget left unused", floors=(),
)  # fmt: skip


def name_losses(scores: PerImage, lost: Sequence[Sequence[str]]) -> PerImage:
    """The same scores, with the reasons why boxes of an image were lost. lost: as in Truth."""
    missing = scores.causes[0]
    place = torch.arange(len(missing.where), device=missing.where.device)
    gone = [
        missing._replace(sentence="; ".join(why), where=missing.where & (place == i))
        for i, why in enumerate(lost)
        if why
    ]
    return PerImage(scores, [*gone, *scores.causes])


def localise_curve(
    maps: Maps | ArrayLike, boxes: ArrayLike | None = None, masks: ArrayLike | None = None,
    budgets: Sequence[float] = BUDGETS,
) -> PerImage:  # fmt: skip
    """Scores of localise at several budgets, each "b k"; a map is sorted once for all of them.

    Args:
        maps, boxes, masks: as for localise.
        budgets: shares of the pixels.

    Example:
        >>> localise_curve([[[0.9, 0.1], [0.2, 0.0]]], boxes=[[0, 0, 1, 0]], budgets=(0.25, 0.5))["mask_iou"]
        tensor([[0.5000, 0.3333]])
    """
    curves, _, causes = _localise(maps, boxes, masks, budgets)
    return PerImage(curves, causes)


def budget_masks(maps: Maps | ArrayLike, budget: float = 0.2) -> Tensor:
    """The pixels each map keeps, "b H W" bool: its floor(budget H W) largest, but none at its minimum.

    >>> budget_masks(torch.tensor([[[0.0, 2.0], [2.0, 1.0]]]), 0.25).int().tolist()
    [[[0, 1], [0, 0]]]
    """
    values, size = sized_maps(maps)
    values = values.detach()
    count = kept_pixels(budget, size)
    parts = []
    for part in chunks(values, size):
        pixels = upsample(values[part], size).clamp(min=0).flatten(1)
        parts.append(_keep(pixels, ascending(pixels), count).unflatten(1, size))
    return torch.cat(parts) if parts else torch.zeros((0, *size), dtype=torch.bool, device=values.device)


def kept_pixels(budget: float, size: tuple[int, ...]) -> int:
    """floor(budget H W) in exact arithmetic: 0.29 of 100 is 29, though 0.29 * 100 < 29 in floats.

    >>> kept_pixels(0.2, (224, 224))
    10035
    """
    if not 0 < budget <= 1:
        hint = f"; write {budget / 100:g} for {budget:g} %" if 1 < budget <= 100 else ""
        raise InputError(f"a budget is a share of the pixels, above 0 and at most 1; got {budget}{hint}")
    count = math.floor(budget * math.prod(size) + 1e-9)
    if not count:
        sides = "x".join(map(str, size))
        raise InputError(f"a budget of {budget:g} keeps no pixel of a {sides} map; use a larger one")
    return count


def _localise(
    maps: Maps | ArrayLike, boxes: ArrayLike | None, masks: ArrayLike | None, budgets: Sequence[float]
) -> tuple[dict[str, Tensor], Tensor, list[Cause]]:
    values, size = sized_maps(maps)
    values = values.detach()
    counts = [kept_pixels(budget, size) for budget in budgets]
    if boxes is None and masks is None:
        raise InputError("localise needs boxes or masks to compare the maps with")
    if boxes is not None and len(size) > 2:
        raise InputError("boxes are for images; give masks 'b D H W' for volumes")
    n = len(values)
    corners = None if boxes is None else _corners(boxes, n, size).to(values.device)
    objects = None if masks is None else align(masks, size, values, "masks").expand(n, *size)
    tables, points, known, blank = [], [], [], []
    for part in chunks(values, size):
        region, target, frames = _truth(
            None if corners is None else corners[part], None if objects is None else objects[part], size
        )
        pixels = upsample(values[part], size).clamp(min=0).flatten(1)
        order = ascending(pixels)
        steps = [
            _overlap(_keep(pixels, order, k).unflatten(1, size), region, target, frames, k) for k in counts
        ]
        positive = (pixels > order[:, :1]).sum(1)
        filled = [(k - positive).clamp(min=0) / k for k in counts]
        rows = [torch.stack([*step, share.double()], 1) for step, share in zip(steps, filled, strict=True)]
        tables.append(torch.stack(rows, 2).float())
        hit = region.flatten(1).gather(1, pixels.argmax(1, keepdim=True))[:, 0] & (positive > 0)
        points.append(hit.float())
        known.append(region.flatten(1).any(1))
        blank.append(positive == 0)
    if not tables:
        empty = torch.zeros((0, len(KEYS), len(counts)), device=values.device)
        return dict(zip(KEYS, empty.unbind(1), strict=True)), empty[:, 0, 0], []
    curves = dict(zip(KEYS, torch.cat(tables).unbind(1), strict=True))
    causes = [
        Cause(NO_TRUTH, ~torch.cat(known), (*KEYS[:4], "pointing")),
        Cause(CONSTANT, torch.cat(blank), KEYS[:3]),
    ]
    return curves, torch.cat(points), causes


def _keep(pixels: Tensor, ordered: Tensor, count: int) -> Tensor:
    """The `count` largest of each row, ties from the left; none at its minimum, unless all are equal, > 0."""
    threshold = ordered[:, -count, None]
    above, tied = pixels > threshold, pixels == threshold
    room = count - above.sum(1, keepdim=True)
    low, high = ordered[:, :1], ordered[:, -1:]
    return (above | (tied & (tied.cumsum(1) <= room))) & (pixels > torch.where(high > low, low, 0))


def mask_overlap(first: Tensor, second: Tensor) -> Tensor:
    """Pixels that two masks "b p" share, of the larger one: of the budget where both maps spend it; "b"."""
    return (first & second).sum(1) / torch.maximum(first.sum(1), second.sum(1))


def object_regions(truth: Truth | None, images: Tensor) -> Tensor:
    """Masks "b H W" of annotated objects: the mask of an image, else its boxes; all False without any."""
    size = size_of(images)
    if truth is None or not (truth.masks or truth.boxes):
        return torch.zeros(len(images), *size, dtype=torch.bool)
    masks = torch.stack(list(truth.masks.values())).any(0).cpu() if truth.masks else None
    return _truth(_corners(truth.boxes, len(images), size) if truth.boxes else None, masks, size)[1]


def _truth(
    corners: Tensor | None, objects: Tensor | None, size: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """The object: the region of the boxes, the target of mask_iou, the boxes "b m 4" themselves."""
    if corners is None:
        assert objects is not None
        return objects, objects, _tight(objects)[:, None]
    y, x = (torch.arange(side, device=corners.device) for side in size)
    x0, y0, x1, y1 = corners[..., None].unbind(2)
    columns, rows = (x >= x0) & (x <= x1), (y >= y0) & (y <= y1)  # NaN, no box, holds no pixel
    region = torch.einsum("bmh,bmw->bhw", rows.float(), columns.float()) > 0
    if objects is None:
        return region, region, corners
    boxed, masked = (m.flatten(1).any(1)[:, None, None] for m in (region, objects))
    frames = torch.where(boxed, corners, _tight(objects)[:, None])
    return torch.where(boxed, region, objects), torch.where(masked, objects, region), frames


def _overlap(marks: Tensor, region: Tensor, target: Tensor, frames: Tensor, budget: int) -> list[Tensor]:
    """mask_iou, box_iou, inside, reachable of one budget, a number of pixels; each "b" float64."""
    marked, area, shared = (m.flatten(1).sum(1).double() for m in (marks, target, marks & target))
    within = shared if region is target else (marks & region).flatten(1).sum(1).double()
    (low, high), (low_too, high_too) = (box.chunk(2, -1) for box in (_tight(marks)[:, None], frames))
    common = (torch.minimum(high, high_too) - torch.maximum(low, low_too) + 1).clamp(min=0).prod(-1)
    sizes = [(end - start + 1).prod(-1) for start, end in ((low, high), (low_too, high_too))]
    box_iou = (common / (sizes[0] + sizes[1] - common)).nan_to_num(0).amax(1)
    reachable = area.clamp(max=budget) / area.clamp(min=budget)
    return [shared / (marked + area - shared), box_iou.double(), within / marked, reachable]


def _tight(mask: Tensor) -> Tensor:
    """The smallest box around a mask: "b h w" -> "b 4" (x0, y0, x1, y1), of volumes "b 6"; NaN if empty."""
    ends, axes = [], spatial_dims(mask)
    for axis in reversed(axes):
        side = mask.any(dim=tuple(other for other in axes if other != axis))
        index = torch.arange(side.shape[1], device=mask.device, dtype=torch.float64)
        first = torch.where(side, index, torch.inf).amin(1)
        last = torch.where(side, index, -torch.inf).amax(1)
        ends.append((first, last))
    box = torch.stack([end for corner in zip(*ends, strict=True) for end in corner], 1)
    return box.masked_fill(torch.isinf(box), torch.nan)


def _corners(boxes: ArrayLike, n: int, size: tuple[int, ...]) -> Tensor:
    """Boxes in any accepted form -> "b m 4" whole pixels, both corners inside, NaN for no box."""
    entries: Any = boxes.detach().cpu().numpy() if isinstance(boxes, Tensor) else boxes
    same_length(boxes=entries, maps=range(n))
    lists = [_box_list(entry, i) for i, entry in enumerate(entries)]
    table = np.full((n, max([1, *map(len, lists)]), 4), np.nan)
    for i, entry in enumerate(lists):
        table[i, : len(entry)] = entry
    for i, j in np.argwhere(~np.isnan(table).all(2)):
        table[i, j] = _whole(table[i, j], f"box {j} of image {i}", size)
    return torch.from_numpy(table)


def _box_list(entry: Any, image: int) -> np.ndarray:
    wrong = f"image {image}: boxes are (x0, y0, x1, y1) or a list of such; got {entry!r}"
    try:
        boxes = np.asarray(entry.cpu() if isinstance(entry, Tensor) else entry, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(wrong) from None
    boxes = boxes.reshape(0, 4) if not boxes.size else np.atleast_2d(boxes)
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise InputError(wrong)
    return boxes


def _whole(box: np.ndarray, name: str, size: tuple[int, ...]) -> tuple[float, float, float, float]:
    height, width = size
    x0, y0, x1, y1 = (float(v) for v in box)
    text = f"{name} is ({x0:g}, {y0:g}, {x1:g}, {y1:g})"
    if not np.isfinite(box).all():
        raise InputError(f"{text}; give four finite numbers, or no box at all")
    if x0 > x1 or y0 > y1:
        raise InputError(f"{text}, which runs backwards; write x0, y0, x1, y1, not x, y, width, height")
    if x0 < 0 or y0 < 0 or x1 > width or y1 > height:
        raise InputError(
            f"{text}, outside its {width}x{height} image (width x height); "
            "carry boxes through the same resize and crop as the image, in the order x0, y0, x1, y1"
        )
    whole = math.ceil(x0), math.ceil(y0), min(math.floor(x1), width - 1), min(math.floor(y1), height - 1)
    if whole[0] > whole[2] or whole[1] > whole[3]:
        raise InputError(f"{text}, which holds no pixel; drop it or correct it")
    return whole


def macro_mean(values: ArrayLike, classes: ArrayLike | Sequence[Hashable]) -> PerClass:
    """Mean over classes of class means: every class counts the same, however many images it has.

    Args:
        values: one per image; NaNs are left out and counted.
        classes: of the images, numbers or names.

    Returns:
        The mean (NaN if no value is defined), the means and n by class, and `undefined`, the number of NaNs.

    Example:
        >>> macro_mean([1.0, 1.0, 1.0, 0.0], ["cat", "cat", "cat", "dog"]).value
        0.5
    """
    scores = as_numbers(values)
    given: Any = classes.tolist() if isinstance(classes, Tensor | np.ndarray) else classes
    labels: list[Hashable] = list(given)
    same_length(values=scores, classes=labels)
    groups: dict[Hashable, list[float]] = {label: [] for label in dict.fromkeys(labels)}
    for label, score in zip(labels, scores.tolist(), strict=True):
        if not math.isnan(score):
            groups[label].append(score)
    means = {label: math.fsum(group) / len(group) if group else math.nan for label, group in groups.items()}
    defined = [mean for mean in means.values() if not math.isnan(mean)]
    value = math.fsum(defined) / len(defined) if defined else math.nan
    sizes = {label: len(group) for label, group in groups.items()}
    return PerClass(value, sizes, classes=means, parts={"undefined": len(scores) - sum(sizes.values())})


@metric(
    "dispersion", needs=("maps",), bounds=(0.0, 1.0), cite="keak2026budget", family="Localisation",
    title="scatter of the map", parts={"blobs": "number of marked areas"}, floors=(), volumes=True,
)  # fmt: skip
def dispersion(maps: Maps | ArrayLike, *, budget: float = 0.2) -> PerImage:
    """Probability that two of the budget's pixels lie in different areas; 0 for one area.

    Args:
        maps: "b h w", at any size.
        budget: share of the pixels that are looked at.

    Returns:
        dispersion, and dispersion_blobs, the number of areas, each "b".

    Example:
        >>> apart = torch.zeros(1, 8, 8)
        >>> apart[0, 0, :4] = apart[0, 7, :4] = 1
        >>> scores = dispersion(apart, budget=1 / 8)
        >>> scores["dispersion"].tolist(), scores["dispersion_blobs"].tolist()
        ([0.5], [2.0])
    """
    values, _ = sized_maps(maps)
    # Areas are found on the CPU: scipy's union-find takes about a millisecond an image.
    areas = [area_shares(mask) for mask in budget_masks(maps, budget).cpu().numpy()]
    table = np.array([(1 - (s**2).sum(), (s >= BLOB).sum()) for s in areas], np.float32).reshape(-1, 2)
    scores = torch.from_numpy(table).to(values.device)
    return PerImage(
        {"dispersion": scores[:, 0], "dispersion_blobs": scores[:, 1]},
        [Cause(CONSTANT, constant(values))],
    )


@metric(
    "centre_bias", needs=("maps",), bounds=(-1.0, 1.0), cite="keak2026budget", family="Localisation",
    title="nearness to the centre", floors=(), volumes=True,
)  # fmt: skip
def centre_bias(maps: Maps | ArrayLike) -> PerImage:
    """How much nearer to the centre of the image the map's mass lies than evenly spread mass.

    Args:
        maps: "b h w", at any size; masks of objects too.

    Returns:
        centre_bias, "b": 1 for a dot in the centre, 0 for even mass, negative near the border.

    Example:
        >>> dot = torch.zeros(1, 5, 5)
        >>> dot[0, 2, 2] = 1
        >>> centre_bias(dot)["centre_bias"].tolist()
        [1.0]
    """
    values, size = sized_maps(maps)
    mass = pixel_maps(maps).double()
    sides = [(torch.arange(n, device=mass.device) - (n - 1) / 2).double() for n in size]
    far = torch.stack(torch.meshgrid(*sides, indexing="ij")).square().sum(0).sqrt()
    mean = (mass * far).flatten(1).sum(1) / mass.flatten(1).sum(1)
    return PerImage({"centre_bias": (1 - mean / far.mean()).float()}, [Cause(CONSTANT, constant(values))])


def area_shares(mask: np.ndarray) -> np.ndarray:
    """Shares of a mask's pixels in its areas, whose pixels touch at a side or a corner."""
    sizes = np.bincount(label_areas(mask, np.ones((3,) * mask.ndim, dtype=int))[0].ravel())[1:]
    return np.asarray(sizes / sizes.sum())
