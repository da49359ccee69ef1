"""Pictures worth looking at, with what the page's script needs to lay any method's map over them.

    best, worst    highest and lowest mean over methods of the headline metric (turned around where less is
                   better)
    disputed       lowest mean rank correlation between the methods' maps at 32 x 32, floors left out; in runs
                   of more than 2,000 images, of every k-th image

Maps travel as deflated bytes, 0 to 63 between a map's least and largest positive value (or its 99th
percentile, see show.py), at their own size but at most 56 x 56: the script enlarges them bilinearly. Pictures
are embedded once, whatever groups they are in.

At the top of a page stand six others, each beside its map, which are not the best ones: two at most are wrong
answers, those the network is surest of, and the rest are spread evenly from the highest to the lowest score.
"""

from __future__ import annotations

import base64
import io
import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from heatproof.errors import StoreError
from heatproof.images.kinds import SOURCES, source_options
from heatproof.metrics.agreement import method_agreement
from heatproof.report.panels import which_class
from heatproof.report.pieces import Piece
from heatproof.rows import of_prediction
from heatproof.show import AXES, COLOUR_MAPS, address, brightened, middle, overlay, plane_words, sections
from heatproof.store.ledger import DamagedError
from heatproof.store.maps import MapStore
from heatproof.types import Maps, normalise, upsample
from heatproof.verdict.answers import WORDS, Verdict
from heatproof.verdict.data import RunData
from heatproof.verdict.look import over_methods
from heatproof.verdict.measures import Measure

MOST = 48
MOST_COMPARED = 2000
COMPARED_AT = 32
LARGEST, LEVELS = 56, 63  # cells of a side, and steps of a map's height: what an eye can tell under a picture
SHEET = (LARGEST, 3 * LARGEST)  # of three planes of a volume
CIVIDIS = (
    "00224e 002e6c 1e3a6f 35456c 47516c 575d6d 666970 757575 848279 948e77 a59c74 b7a96e c8b866 dbc75a "
    "eed649 fee838"
)
JET = "000080 0000ff 0080ff 00ffff 80ff80 ffff00 ff8000 ff0000 800000"
ACROSS = {"x": "sagittal", "y": "coronal", "z": "axial"}
UNAVAILABLE = (
    "image unavailable: the stored file is not what the run wrote; heatproof verify names the damage"
)
GROUPS = {"best": "Best", "worst": "Worst", "disputed": "Most disputed"}
MOST_FRONT, MOST_WRONG = 6, 2  # images at the top of a page
FRONT_SIDE = 208  # pixels of the longer side
NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six")


def colour_tables(jet: bool = False) -> dict[str, list[str]]:
    """The page's colour maps as points to interpolate; all but jet are perceptually uniform."""
    tables = {name: COLOUR_MAPS[name] for name in ("inferno", "viridis")} | {"cividis": CIVIDIS}
    return {name: points.split() for name, points in (tables | ({"jet": JET} if jet else {})).items()}


def gallery(
    data: RunData, most: int = MOST, jet: bool = False, besides: Sequence[str] = ()
) -> dict[str, Any]:
    """What the script shows: chosen images with their answers, scores, curves, pictures and maps.

    besides: ids of images that must be there too, in no group.
    """
    dispute = disagreement(data)
    groups = choose(data, dispute, most)
    also = [data.images.ids.index(name) for name in besides]
    chosen = list(dict.fromkeys([i for places in groups.values() for i in places] + also))
    if data.manifest.is_multilabel:  # with every other finding of these pictures
        pictures = {_picture(data.images.ids[i]) for i in chosen}
        chosen += [
            i for i, name in enumerate(data.images.ids) if _picture(name) in pictures and i not in chosen
        ]
    ids = [data.images.ids[i] for i in chosen]
    maps = {method: packed_maps(data, method, ids) for method in data.methods}
    others = {method: packed_maps(data, of_prediction(method), ids) for method in data.real}
    percents, curves = picture_curves(data, ids)
    return {
        **offered(data, jet),
        "percents": percents,
        "several": data.manifest.is_multilabel,
        "groups": {key: GROUPS[key] for key, places in groups.items() if places},
        "images": [
            {
                **image_record(data, i),
                "groups": {key: places.index(i) for key, places in groups.items() if i in places},
                "agreement": json_number(dispute[i]),
                "curves": curves.get(data.images.ids[i], {}),
                **stored_picture(data, data.images.ids[i]),
                "maps": [maps[method].get(data.images.ids[i]) for method in data.methods],
                "instead": [others.get(method, {}).get(data.images.ids[i]) for method in data.methods],
            }
            for i in chosen
        ],
    }


def _picture(entry: str) -> str:
    """Of an entry PICTURE#FINDING."""
    return entry.rpartition("#")[0]


def offered(data: RunData, jet: bool = False) -> dict[str, Any]:
    """What a page lets people choose from: methods, metrics with a number for each image, colours."""
    scored = {metric for metric, method in data.images.scores if method in data.methods}
    shown = [of for of in data.measures if of.name in scored]
    return {
        "methods": [{"name": m, "floor": m in data.floors} for m in data.methods],
        "metrics": [{"name": of.name, "plain": of.plain, "up": of.higher_is_better} for of in shown],
        "headline": data.headline.name if data.headline else None,
        "colours": colour_tables(jet),
    }


def image_record(data: RunData, place: int) -> dict[str, Any]:
    """An image's answers and scores: scores[metric][method] in the order of the data's methods."""
    images, explained = data.images, data.images.explained[place]
    return {
        "id": images.ids[place],
        "label": data.class_name(images.labels[place]),
        "predicted": data.class_name(images.predicted[place]),
        "confidence": json_number(images.confidence[place]),
        "right": images.right[place],
        "explains": data.class_name(explained),
        "which": which_class(explained, images.labels[place], images.predicted[place]),
        "planes": planes_shown(data, images.ids[place]),
        "scores": {
            metric: [
                None if (column := images.scores.get((metric, m))) is None else json_number(column[place])
                for m in data.methods
            ]
            for metric in dict.fromkeys(metric for metric, _ in images.scores)
        },
    }


def planes_shown(data: RunData, name: str) -> str:
    """Which planes of a volume its picture shows, in words; '' of a picture."""
    at = _planes(data, name)
    return plane_words(at, axes_of(data.manifest.config.get("images", {}))) if at else ""


def _planes(data: RunData, name: str) -> tuple[int, ...] | None:
    with suppress(DamagedError):  # the stored image is unavailable
        return data.folder.pictures().planes(name)
    return None


def axes_of(images: Mapping[str, Any]) -> Sequence[str]:
    """What a run's table of images calls the axes of its volumes."""
    kind = images.get("kind")
    options = (source_options(kind) if kind in SOURCES else {}) | images.get("options", {})
    if not (order := options.get("order")):
        return AXES
    turned = options.get("canonical")  # to where these names are true
    return [f"{ACROSS[axis]} {axis}" if turned else axis for axis in order]


def choose(data: RunData, dispute: np.ndarray, most: int) -> dict[str, list[int]]:
    """Places of the images of each group, the most telling first."""
    each = max(1, most // len(GROUPS))
    merit = merits(data)
    ranked = [int(i) for i in np.argsort(-merit, kind="stable") if math.isfinite(merit[i])]
    half = (len(ranked) + 1) // 2  # an image is not both
    order = [int(i) for i in np.argsort(dispute, kind="stable") if math.isfinite(dispute[i])]
    best, worst = ranked[:half], ranked[half:][::-1]
    if not ranked and not order:
        best = list(range(len(data.images.ids)))
    return {"best": best[:each], "worst": worst[:each], "disputed": order[:each]}


def merits(data: RunData, methods: Sequence[str] = ()) -> np.ndarray:
    """Of each image, the mean over methods (all but floors, or these) of the headline metric, turned so that
    more is better."""
    name = data.headline.name if data.headline else ""
    known = [data.images.scores[name, m] for m in methods or data.real if (name, m) in data.images.scores]
    if data.headline is None or not known:
        return np.full(len(data.images.ids), np.nan)
    sign = -1.0 if data.headline.higher_is_better is False else 1.0
    return sign * over_methods(np.stack(known))


def disagreement(data: RunData) -> np.ndarray:
    """Mean rank correlation between the methods' maps, image by image; NaN where fewer than two have one."""
    ids = data.images.ids
    found = np.full(len(ids), np.nan)
    step = max(1, -(-len(ids) // MOST_COMPARED))
    places, store = range(0, len(ids), step), data.folder.maps()
    known = [store.known(data.checkpoint, method, ids[::step]) for method in data.real]
    common = [i for i, *there in zip(places, *known, strict=True) if all(there)]
    if len(data.real) < 2 or not common:
        return found
    picked, read = [ids[i] for i in common], store.read
    volumes = len(read(data.checkpoint, data.real[0], picked[:1]).image_size) > 2
    size = (COMPARED_AT // 2,) * 3 if volumes else (COMPARED_AT,) * 2
    lots = {m: upsample(read(data.checkpoint, m, picked).values, size) for m in data.real}
    found[common] = method_agreement(lots).images["spearman"].numpy()
    return found


def packed_maps(
    data: RunData, method: str, ids: Sequence[str], store: MapStore | None = None
) -> dict[str, dict[str, Any]]:
    """By image that has one: the map's size, its bytes in base64, and the class it explains."""
    store = store or data.folder.maps()
    known = store.known(data.checkpoint, method, ids)
    wanted = [name for name, there in zip(ids, known, strict=True) if there]
    if not wanted:
        return {}
    maps = store.read(data.checkpoint, method, wanted)
    classes = [data.class_name(c if c >= 0 else None) for c in maps.explained.tolist()]
    planes = [_planes(data, name) if len(maps.image_size) > 2 else None for name in wanted]
    return {name: pack(maps, i, classes[i], planes[i]) for i, name in enumerate(wanted)}


def pack(maps: Maps, place: int, explained: str, planes: Sequence[int] | None = None) -> dict[str, Any]:
    """One map as bytes; of a volume the planes that its picture shows."""
    one, largest = normalise(maps.values[place : place + 1]), (LARGEST, LARGEST)
    if one.ndim == 4:
        whole = upsample(one, maps.image_size)[0]
        one, largest = torch.from_numpy(sections(whole, planes or middle(whole.shape)))[None], SHEET
    height, width = (min(int(side), most) for side, most in zip(one.shape[1:], largest, strict=True))
    if (height, width) != tuple(one.shape[1:]):
        one = normalise(F.adaptive_avg_pool2d(one[:, None], (height, width))[:, 0])
    if tuple(maps.values.shape[1:]) == tuple(maps.image_size):
        one = brightened(one)
    levels = zlib.compress((one[0] * LEVELS).round().byte().numpy().tobytes(), 9)
    return {"h": height, "w": width, "data": base64.b64encode(levels).decode(), "explains": explained}


def unpack(packed: Mapping[str, Any]) -> Tensor:
    """ "h w" in [0, 1]: the map that was packed, to a step of its height."""
    levels = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), np.uint8)
    return torch.from_numpy(levels.reshape(packed["h"], packed["w"]) / np.float32(LEVELS))


def picture_curves(
    data: RunData, ids: Sequence[str]
) -> tuple[dict[str, list[int]], dict[str, dict[str, list[list[int | None]]]]]:
    """Insertion and deletion of single images, where their points were kept.

    The percentages of each kind, and by image and kind the probability in per cent, by method and percentage.
    """
    rows = data.folder.scores().sql(
        r"""select image, method, regexp_extract(metric, '^(insertion|deletion)', 1) as kind,
                   regexp_extract(metric, '_at_(\d+)', 1)::int as percent, max(value) as value
            from scores where model = ? and checkpoint = ? and image in (select unnest(?))
                 and regexp_matches(metric, '^(insertion|deletion)_at_\d+') and not isnan(value)
            group by all""",
        [data.model, data.checkpoint, list(ids)],
    )
    kinds = sorted({row["kind"] for row in rows}, reverse=True)
    percents = {kind: sorted({row["percent"] for row in rows if row["kind"] == kind}) for kind in kinds}
    found: dict[str, dict[str, list[list[int | None]]]] = {}
    for row in rows:
        if row["method"] in data.methods:
            at = percents[row["kind"]]
            table = found.setdefault(row["image"], {}).setdefault(
                row["kind"], [[None] * len(at) for _ in data.methods]
            )
            table[data.methods.index(row["method"])][at.index(row["percent"])] = round(100 * row["value"])
    return percents, found


def stored_picture(data: RunData, name: str) -> dict[str, str | None]:
    """The stored image as a data: address (None if the run stored none), and why it is unavailable."""
    try:
        content = data.folder.pictures().read(name)
    except DamagedError:
        return {"picture": None, "unavailable": UNAVAILABLE}
    link = content and f"data:{media_type(content)};base64,{base64.b64encode(content).decode()}"
    return {"picture": link or None, "unavailable": ""}


def media_type(content: bytes) -> str:
    """Of a kept picture, which is PNG or JPEG."""
    return "image/png" if content.startswith(b"\x89PNG") else "image/jpeg"


def json_number(value: float) -> float | None:
    """JSON has no NaN."""
    return round(float(value), 6) if math.isfinite(value) else None


@dataclass(frozen=True)
class ShownPicture(Piece):
    """A picture and maps over it, as addresses, with its answer and what it scores."""

    record: Mapping[str, Any]
    picture: str
    maps: Mapping[str, str]  # by method
    score: float = math.nan
    linked: bool = False  # to its place in the gallery

    @property
    def wrong(self) -> bool:
        return self.record["right"] is False


@dataclass(frozen=True)
class FrontPictures(Piece):
    """Pictures that show the answer, with maps of one method."""

    method: str
    follows: str  # what the verdict says of the method
    pictures: Sequence[ShownPicture]
    headline: Measure | None
    total: int

    @property
    def title(self) -> str:
        count = len(self.pictures)
        return f"{NUMBERS[count]} picture{'s' * (count != 1)} that show{'s' * (count == 1)} it"

    @property
    def how_chosen(self) -> str:
        wrong = sum(one.wrong for one in self.pictures)
        rank = (
            f"from the highest to the lowest {self.headline.short}" if self.headline else "over all of them"
        )
        told = f"{len(self.pictures) - wrong} spread evenly {rank}"
        if wrong:
            surest = "the wrong answer" if wrong == 1 else f"the {wrong} wrong answers"
            told += f", and {surest} that the network is surest of"
        return f"{told}; {self.total:,} pictures in all"


def front_pictures(data: RunData, verdict: Verdict, linked: bool = False) -> FrontPictures | None:
    """None where the run kept no maps or no pictures. linked: each leads to its place in the gallery."""
    follows = {one.method: one.follows for one in verdict.methods}
    method = next((m for m in data.real if follows.get(m) == "yes"), next(iter(data.real), None))
    if method is None:
        return None
    places = choose_front(data, method)
    pictures = draw_pictures(data, places, [method], linked=linked)
    if not pictures:
        return None
    said = WORDS[follows.get(method, "undecided")]
    return FrontPictures(method, said, pictures, data.headline, len(data.images.ids))


def choose_front(data: RunData, method: str, most: int = MOST_FRONT) -> list[int]:
    """Places of the pictures: evenly from best to worst, then wrong answers, the surest first."""
    images, kept, merit = data.images, data.folder.pictures(), merits(data, [method])
    known = data.folder.maps().known(data.checkpoint, method, images.ids)
    usable = [i for i, there in enumerate(known) if there and kept.path(images.ids[i]) is not None]
    order = sorted(usable, key=lambda i: -merit[i] if math.isfinite(merit[i]) else math.inf)
    sure = [c if math.isfinite(c) else 0.0 for c in images.confidence]
    wrong = sorted((i for i in order if images.right[i] is False), key=lambda i: -sure[i])[:MOST_WRONG]
    others = [i for i in order if images.right[i] is not False] or [i for i in order if i not in wrong]
    count = min(most - len(wrong), len(others))
    steps = [round(k * (len(others) - 1) / max(1, count - 1)) for k in range(count)]
    return [others[step] for step in steps] + wrong


def draw_pictures(
    data: RunData, places: Sequence[int], methods: Sequence[str], side: int = FRONT_SIDE, linked: bool = False
) -> list[ShownPicture]:
    """Pictures with maps laid over them; one whose picture the run did not keep is left out."""
    ids = [data.images.ids[i] for i in places]
    packed = {method: packed_maps(data, method, ids) for method in methods}
    merit, shown = merits(data, methods), []
    for place, name in zip(places, ids, strict=True):
        picture = _kept(data, name, side)
        if picture is None:
            continue
        heats = {method: found[name] for method, found in packed.items() if name in found}
        laid = {method: _jpeg(overlay(picture, _heat(heat, picture))) for method, heat in heats.items()}
        turned = data.headline is not None and data.headline.higher_is_better is False
        score = -float(merit[place]) if turned else float(merit[place])
        shown.append(ShownPicture(image_record(data, place), _jpeg(picture), laid, score, linked))
    return shown


def _kept(data: RunData, name: str, side: int) -> Image.Image | None:
    """A picture of the run, made small; None where it was not kept or is damaged, which `verify` tells."""
    try:
        content = data.folder.pictures().read(name)
        picture = None if content is None else Image.open(io.BytesIO(content)).convert("RGB")
    except (StoreError, OSError, SyntaxError):
        return None
    if picture is not None:
        picture.thumbnail((side, side))
    return picture


def _heat(packed: Mapping[str, Any], picture: Image.Image) -> Any:
    return normalise(upsample(unpack(packed)[None], (picture.height, picture.width)))[0]


def _jpeg(picture: Image.Image) -> str:
    return address(picture, "JPEG", quality=82)
