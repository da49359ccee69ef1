"""Images selected for a page, with the data that its script needs to draw any method's map over them.

    best, worst    highest and lowest mean over methods of the headline metric, negated if lower is better
    disputed       lowest mean rank correlation between the methods' maps at 32 x 32, floors left out; in runs
                   of more than 2,000 images, of every k-th image

A map is encoded as deflated bytes, 0 to 63 between its least and largest positive value (or its 99th
percentile, see show.py), at its own size but at most 56 x 56: the script enlarges it bilinearly. Images are
embedded once.

The top of a page shows six others, each beside its map: at most two wrong predictions, those with the highest
confidence, and images spread evenly from the highest to the lowest score.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import rankdata

from heatproof.report.panels import which_class
from heatproof.report.pieces import Piece
from heatproof.rows import of_prediction
from heatproof.show import AXES, COLOUR_MAPS, address, brightened, middle, overlay, plane_words, sections
from heatproof.store.ledger import DamagedError
from heatproof.store.maps import MapStore, StoredMaps
from heatproof.verdict.answers import WORDS, Verdict
from heatproof.verdict.data import Measure, RunData, mean_over_methods

MOST = 48
MOST_COMPARED = 2000  # images whose maps are compared
LARGEST, LEVELS = 56, 63  # cells of a map's side, and steps of its values: as many as are visible
SHEET = (LARGEST, 3 * LARGEST)  # of three planes of a volume
CIVIDIS = (
    "00224e 002e6c 1e3a6f 35456c 47516c 575d6d 666970 757575 848279 948e77 a59c74 b7a96e c8b866 dbc75a "
    "eed649 fee838"
)
JET = "000080 0000ff 0080ff 00ffff 80ff80 ffff00 ff8000 ff0000 800000"
ORDERS: dict[str, dict[str, Any]] = {
    "nifti": {"order": "xyz", "canonical": True},
    "dicom-series": {"order": "zyx"},
}  # defaults of sources
ACROSS = {"x": "sagittal", "y": "coronal", "z": "axial"}
UNAVAILABLE = "image unavailable: the stored file is damaged; run heatproof verify"
GROUPS = {"best": "Best", "worst": "Worst", "disputed": "Most disputed"}
MOST_FRONT, MOST_WRONG = 6, 2  # images at the top of a page
FRONT_SIDE = 208  # pixels of the longer side


def normalised(values: np.ndarray) -> np.ndarray:
    """Clip negatives, then min-max each map "b h w" to [0, 1]; a constant map becomes all zeros."""
    positive, axes = np.maximum(values, 0), tuple(range(1, values.ndim))
    low, high = positive.min(axes, keepdims=True), positive.max(axes, keepdims=True)
    return np.asarray((positive - low) / np.where(high > low, high - low, np.inf), np.float32)


def resized(values: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Maps "b h w" at another size, linear along each axis (as torch's interpolate, align_corners=False).

    >>> resized(np.array([[[0.0, 1.0]]]), (1, 4)).tolist()
    [[[0.0, 0.25, 0.75, 1.0]]]
    """
    for axis, length in enumerate(size, 1):
        last = values.shape[axis] - 1
        at = np.clip((np.arange(length) + 0.5) * (last + 1) / length - 0.5, 0, last)
        before = at.astype(int)
        weight = (at - before).astype(values.dtype).reshape(-1, *[1] * (values.ndim - axis - 1))
        first, second = values.take(before, axis), values.take(np.minimum(before + 1, last), axis)
        values = first + (second - first) * weight
    return values


def pooled(values: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Means of "b h w" over size[0] x size[1] windows of equal length (as torch's adaptive_avg_pool2d)."""
    for axis, length in enumerate(size, 1):
        n, i = values.shape[axis], np.arange(length)
        starts, stops = i * n // length, -(-(i + 1) * n // length)
        sums = np.insert(values.cumsum(axis, dtype=np.float64), 0, 0, axis)
        counts = (stops - starts).reshape(-1, *[1] * (values.ndim - axis - 1))
        values = (sums.take(stops, axis) - sums.take(starts, axis)) / counts
    return values.astype(np.float32)


def standard_ranks(maps: StoredMaps) -> np.ndarray:
    """Array "b p": ranks of the maps' pixels at 32 x 32 (16 x 16 x 16 of volumes) with mean 0 and length 1.

    The product of two maps' rows is their rank correlation; rows of constant maps are NaN.
    """
    size = (32, 32) if len(maps.image_size) == 2 else (16, 16, 16)
    ranks = rankdata(np.maximum(resized(maps.values, size), 0).reshape(len(maps.ids), -1), axis=1)
    ranks -= ranks.mean(1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.asarray(ranks / np.linalg.norm(ranks, axis=1, keepdims=True))


def for_display(maps: StoredMaps) -> np.ndarray:
    """Array "b H W" in [0, 1] at the images' size, brightened if the method has a value for every pixel."""
    heat = normalised(resized(maps.values, maps.image_size))
    return brightened(heat) if maps.values.shape[1:] == tuple(maps.image_size) else heat


def gallery(
    data: RunData, most: int = MOST, jet: bool = False, besides: Sequence[str] = ()
) -> dict[str, Any]:
    """The script's data: chosen images with their predictions, scores, curves, pixels and maps.

    besides: ids of further images, in no group.
    """
    agreement = map_agreement(data)
    groups = choose(data, agreement, most)
    also = [data.images.ids.index(name) for name in besides]
    chosen = list(dict.fromkeys([i for places in groups.values() for i in places] + also))
    if data.manifest.is_multilabel:  # with every other label of these images
        files = {data.images.ids[i].rpartition("#")[0] for i in chosen}
        entries = [i for i, name in enumerate(data.images.ids) if name.rpartition("#")[0] in files]
        chosen = list(dict.fromkeys([*chosen, *entries]))
    ids = [data.images.ids[i] for i in chosen]
    maps = {method: packed_maps(data, method, ids) for method in data.methods}
    others = {method: packed_maps(data, of_prediction(method), ids) for method in data.real}
    percents, curves = image_curves(data, ids)
    return {
        **offered(data, jet),
        "percents": percents,
        "several": data.manifest.is_multilabel,
        "groups": {key: GROUPS[key] for key, places in groups.items() if places},
        "images": [
            {
                **image_record(data, i),
                "groups": {key: places.index(i) for key, places in groups.items() if i in places},
                "agreement": json_number(agreement[i]),
                "curves": curves.get(name, {}),
                **stored_image(data, name),
                "maps": [maps[method].get(name) for method in data.methods],
                "instead": [others.get(method, {}).get(name) for method in data.methods],
            }
            for i, name in zip(chosen, ids, strict=True)
        ],
    }


def offered(data: RunData, jet: bool = False) -> dict[str, Any]:
    """The choices of a page: methods, metrics with a value per image, and points of the colour maps."""
    scored = {metric for metric, method in data.images.scores if method in data.methods}
    tables = {name: COLOUR_MAPS[name] for name in ("inferno", "viridis")} | {"cividis": CIVIDIS}
    tables |= {"jet": JET} if jet else {}
    return {
        "methods": [{"name": m, "floor": m in data.floors} for m in data.methods],
        "metrics": [
            {"name": of.name, "plain": of.plain, "up": of.higher_is_better}
            for of in data.measures
            if of.name in scored
        ],
        "headline": data.headline.name if data.headline else None,
        "colours": {name: points.split() for name, points in tables.items()},
    }


def image_record(data: RunData, place: int) -> dict[str, Any]:
    """An image's predictions and scores: scores[metric][method] in the order of the data's methods."""
    images, explained = data.images, data.images.explained[place]
    at = data.folder.pictures().planes(images.ids[place])
    return {
        "id": images.ids[place],
        "label": data.class_name(images.labels[place]),
        "predicted": data.class_name(images.predicted[place]),
        "confidence": json_number(images.confidence[place]),
        "right": images.right[place],
        "explains": data.class_name(explained),
        "which": which_class(explained, images.labels[place], images.predicted[place]),
        "planes": plane_words(at, volume_axes(data.manifest.config.get("images", {}))) if at else "",
        "scores": {
            metric: [
                None if (column := images.scores.get((metric, m))) is None else json_number(column[place])
                for m in data.methods
            ]
            for metric in dict.fromkeys(metric for metric, _ in images.scores)
        },
    }


def volume_axes(images: Mapping[str, Any]) -> Sequence[str]:
    """Names of the axes of volumes, from the table `images` of a run's config."""
    options = {**ORDERS.get(str(images.get("kind")), {}), **images.get("options", {})}
    if not (order := options.get("order")):
        return AXES
    return [f"{ACROSS[axis]} {axis}" if options.get("canonical") else axis for axis in order]


def choose(data: RunData, agreement: np.ndarray, most: int) -> dict[str, list[int]]:
    """Indices of the images of each group, the most extreme first; no image is both best and worst."""
    each, merit = max(1, most // len(GROUPS)), merits(data)
    ranked = [int(i) for i in np.argsort(-merit, kind="stable") if math.isfinite(merit[i])]
    half = (len(ranked) + 1) // 2
    disputed = [int(i) for i in np.argsort(agreement, kind="stable") if math.isfinite(agreement[i])]
    best, worst = ranked[:half], ranked[half:][::-1]
    if not ranked and not disputed:
        best = list(range(len(data.images.ids)))
    return {"best": best[:each], "worst": worst[:each], "disputed": disputed[:each]}


def merits(data: RunData, methods: Sequence[str] = ()) -> np.ndarray:
    """Mean "n" of the headline metric over methods (default: no floors), negated if lower is better."""
    name = data.headline.name if data.headline else ""
    known = [data.images.scores[name, m] for m in methods or data.real if (name, m) in data.images.scores]
    if data.headline is None or not known:
        return np.full(len(data.images.ids), np.nan)
    return _sign(data) * mean_over_methods(np.stack(known))


def _sign(data: RunData) -> float:
    return -1.0 if data.headline and data.headline.higher_is_better is False else 1.0


def map_agreement(data: RunData) -> np.ndarray:
    """Mean rank correlation "n" between the methods' maps of an image; NaN if fewer than two have one."""
    ids, store = data.images.ids, data.folder.maps()
    agreement = np.full(len(ids), np.nan)
    places = range(0, len(ids), max(1, -(-len(ids) // MOST_COMPARED)))
    stored = [store.known(data.checkpoint, method, [ids[i] for i in places]) for method in data.real]
    common = [i for i, *has in zip(places, *stored, strict=True) if all(has)]
    if len(data.real) < 2 or not common:
        return agreement
    names = [ids[i] for i in common]
    ranks = [standard_ranks(store.read_arrays(data.checkpoint, m, names)) for m in data.real]
    pairs = np.stack([(a * b).sum(1).clip(-1, 1) for a, b in combinations(ranks, 2)])
    agreement[common] = mean_over_methods(pairs).astype(np.float32)
    return agreement


def packed_maps(
    data: RunData, method: str, ids: Sequence[str], store: MapStore | None = None
) -> dict[str, dict[str, Any]]:
    """By image that has one: the map's size, its bytes in base64, and the class it explains."""
    store = store or data.folder.maps()
    known = store.known(data.checkpoint, method, ids)
    names = [name for name, stored in zip(ids, known, strict=True) if stored]
    if not names:
        return {}
    maps = store.read_arrays(data.checkpoint, method, names)
    classes = [data.class_name(c if c >= 0 else None) for c in maps.explained.tolist()]
    stored = data.folder.pictures()
    planes = [stored.planes(name) if len(maps.image_size) > 2 else None for name in names]
    return {name: pack(maps, i, classes[i], planes[i]) for i, name in enumerate(names)}


def pack(maps: StoredMaps, place: int, explained: str, planes: Sequence[int] | None = None) -> dict[str, Any]:
    """One map as bytes; of a volume the planes of its stored image."""
    heat, largest = normalised(maps.values[place : place + 1]), (LARGEST, LARGEST)
    if heat.ndim == 4:
        volume = resized(heat, maps.image_size)[0]
        heat, largest = sections(volume, planes or middle(volume.shape))[None], SHEET
    size = tuple(min(side, most) for side, most in zip(heat.shape[1:], largest, strict=True))
    if size != heat.shape[1:]:
        heat = normalised(pooled(heat, size))
    if maps.values.shape[1:] == tuple(maps.image_size):
        heat = brightened(heat)
    levels = zlib.compress((heat[0] * np.float32(LEVELS)).round().astype(np.uint8).tobytes(), 9)
    return {"h": size[0], "w": size[1], "data": base64.b64encode(levels).decode(), "explains": explained}


def unpack(packed: Mapping[str, Any]) -> np.ndarray:
    """Array "h w" in [0, 1]: the map that was packed, rounded to its levels."""
    levels = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), np.uint8)
    return np.asarray(levels.reshape(packed["h"], packed["w"]) / np.float32(LEVELS))


def image_curves(
    data: RunData, ids: Sequence[str]
) -> tuple[dict[str, list[int]], dict[str, dict[str, list[list[int | None]]]]]:
    """Insertion and deletion of single images, if their points were stored.

    Returns:
        The percentages of each kind, and by image and kind the probability in per cent, by method and
        percentage.
    """
    rows = data.folder.scores().sql(
        r"""select image, method, regexp_extract(metric, '^(insertion|deletion)', 1) as kind,
                   regexp_extract(metric, '_at_(\d+)', 1)::int as percent, max(value) as value
            from scores where model = ? and checkpoint = ? and image in (select unnest(?))
                 and method in (select unnest(?))
                 and regexp_matches(metric, '^(insertion|deletion)_at_\d+') and not isnan(value)
            group by all""",
        [data.model, data.checkpoint, list(ids), list(data.methods)],
    )
    values = {tuple(row.values())[:4]: round(100 * row["value"]) for row in rows}
    kinds = sorted({kind for _, _, kind, _ in values}, reverse=True)
    percents = {kind: sorted({at for _, _, own, at in values if own == kind}) for kind in kinds}
    curves: dict[str, dict[str, list[list[int | None]]]] = {}
    for image, kind in dict.fromkeys((image, kind) for image, _, kind, _ in values):
        curves.setdefault(image, {})[kind] = [
            [values.get((image, method, kind, at)) for at in percents[kind]] for method in data.methods
        ]
    return percents, curves


def stored_image(data: RunData, name: str) -> dict[str, str | None]:
    """The stored image as a data: address (None if the run stored none), and why it is unavailable."""
    try:
        content = data.folder.pictures().read(name)
    except DamagedError:
        return {"picture": None, "unavailable": UNAVAILABLE}
    link = content and f"data:{media_type(content)};base64,{base64.b64encode(content).decode()}"
    return {"picture": link or None, "unavailable": ""}


def media_type(content: bytes) -> str:
    """Of a stored image, which is PNG or JPEG."""
    return "image/png" if content.startswith(b"\x89PNG") else "image/jpeg"


def json_number(value: float) -> float | None:
    """A number for JSON, which has no NaN."""
    return round(float(value), 6) if math.isfinite(value) else None


@dataclass(frozen=True)
class DrawnImage:
    """An image and maps over it, as data: addresses, with its record and score."""

    record: Mapping[str, Any]
    image: str
    maps: Mapping[str, str]  # by method
    score: float = math.nan
    linked: bool = False  # to its place in the gallery


@dataclass(frozen=True)
class FrontImages(Piece):
    """Images at the top of a page, with maps of one method."""

    method: str
    follows: str  # the verdict on the method
    images: Sequence[DrawnImage]
    headline: Measure | None
    total: int


def front_images(data: RunData, verdict: Verdict, linked: bool = False) -> FrontImages | None:
    """None if the run stored no maps or no images. linked: each leads to its place in the gallery."""
    follows = {answer.method: answer.follows for answer in verdict.methods}
    method = next((m for m in data.real if follows.get(m) == "yes"), next(iter(data.real), None))
    if method is None:
        return None
    images = draw_images(data, choose_front(data, method), [method], linked=linked)
    if not images:
        return None
    answer = WORDS[follows.get(method, "undecided")]
    return FrontImages(method, answer, images, data.headline, len(data.images.ids))


def choose_front(data: RunData, method: str) -> list[int]:
    """Indices of the images: evenly from best to worst, then wrong predictions by falling confidence."""
    images, stored, merit = data.images, data.folder.pictures(), merits(data, [method])
    known = data.folder.maps().known(data.checkpoint, method, images.ids)
    usable = [i for i, has_map in enumerate(known) if has_map and stored.path(images.ids[i]) is not None]
    order = sorted(usable, key=lambda i: -merit[i] if math.isfinite(merit[i]) else math.inf)
    confidence = np.nan_to_num(images.confidence)
    wrong = sorted((i for i in order if images.right[i] is False), key=lambda i: -confidence[i])[:MOST_WRONG]
    others = [i for i in order if images.right[i] is not False] or [i for i in order if i not in wrong]
    count = min(MOST_FRONT - len(wrong), len(others))
    steps = [round(k * (len(others) - 1) / max(1, count - 1)) for k in range(count)]
    return [others[step] for step in steps] + wrong


def draw_images(
    data: RunData, places: Sequence[int], methods: Sequence[str], side: int = FRONT_SIDE, linked: bool = False
) -> list[DrawnImage]:
    """Images with maps over them; those that the run did not store, or that are damaged, are left out."""
    ids = [data.images.ids[i] for i in places]
    packed = {method: packed_maps(data, method, ids) for method in methods}
    score, drawn = _sign(data) * merits(data, methods), []
    jpeg = partial(address, form="JPEG", quality=82)
    for place, name in zip(places, ids, strict=True):
        stored = data.folder.pictures().open(name)
        if stored is None:
            continue
        image = stored.convert("RGB")
        image.thumbnail((side, side))
        laid = {}
        for method in methods:
            if name in packed[method]:
                heat = normalised(resized(unpack(packed[method][name])[None], (image.height, image.width)))[0]
                laid[method] = jpeg(overlay(image, heat))
        drawn.append(DrawnImage(image_record(data, place), jpeg(image), laid, float(score[place]), linked))
    return drawn
