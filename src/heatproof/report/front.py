"""The pictures at the top of a page: six that show what the verdict says, each beside its map.

They are not the best ones. Two at most are wrong answers, those the network is surest of; the others are
spread evenly from the highest to the lowest score.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from heatproof.errors import StoreError
from heatproof.report.gallery import image_record, merits, packed_maps, unpack
from heatproof.report.pieces import Piece
from heatproof.show import address, overlay
from heatproof.types import normalise, upsample
from heatproof.verdict.answers import WORDS, Verdict
from heatproof.verdict.data import RunData
from heatproof.verdict.measures import Measure

MOST, MOST_WRONG = 6, 2
SIDE = 208  # pixels of the longer side
NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six")


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


def choose_front(data: RunData, method: str, most: int = MOST) -> list[int]:
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
    data: RunData, places: Sequence[int], methods: Sequence[str], side: int = SIDE, linked: bool = False
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
