"""Maps before and after, as pictures: a change that kept the answer, and one that changed it.

Of the pictures that have both, the first ones; of each the largest change that kept the answer and the
smallest that changed it, where one looks for what COSE is about. Maps of moved pictures are moved back, as
they are before they are compared; the number under a map is what the study stored for that pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from heatproof.disk import valid_unicode
from heatproof.explain.api import explain
from heatproof.explain.floors import is_floor
from heatproof.images import batches
from heatproof.images.transforms import TRANSFORMS
from heatproof.metrics.checkpoint_pairs import comparable
from heatproof.report.panels import Tile, sheet
from heatproof.run.study import Opened
from heatproof.show import as_pictures, eight_bit, overlay
from heatproof.studies.cose.found import CHECKPOINT, Found, PairColumns
from heatproof.studies.cose.settings import SIMILARITIES, CoseSettings

METHODS_SHOWN = 4


class AppliedChange(NamedTuple):
    """What was done to a picture, and what became of the answer."""

    transform: str
    magnitude: float
    same: bool

    @property
    def title(self) -> str:
        size = f" {self.magnitude:+.3g}" if TRANSFORMS[self.transform].signed else ""
        return f"{self.transform}{size}: {'same answer' if self.same else 'another answer'}"


def example_pairs(
    settings: CoseSettings, opened: Opened, found: Found, final: str
) -> list[tuple[str, Image.Image]]:
    """Each picture's name and its sheet of maps."""
    methods = [m for m in found.methods if not is_floor(m)][:METHODS_SHOWN] or list(found.methods[:1])
    picked = pick(found.of(methods[0]), settings.examples if settings.figures else 0)
    places = {valid_unicode(sample.id): i for i, sample in enumerate(opened.source.samples)}
    return [(image, _sheet(settings, opened, found, final, methods, places[image], changes))
            for image, changes in picked]  # fmt: skip


def pick(pairs: PairColumns, count: int) -> list[tuple[str, list[AppliedChange]]]:
    """Pictures with both kinds of change first; of each kind one change."""
    pairs = pairs.where((pairs.transform != CHECKPOINT) & ~np.isnan(pairs.ssim))
    found: list[tuple[str, list[AppliedChange]]] = []
    for image in dict.fromkeys(pairs.image):
        mine = pairs.where(pairs.image == image)
        kept, changed = mine.where(mine.same), mine.where(~mine.same)
        sides = [(kept, np.argmax), (changed, np.argmin)]
        found.append((image, [_change(side, int(best(side.step))) for side, best in sides if len(side)]))
    return sorted(found, key=lambda one: -len(one[1]))[:count]


def _change(pairs: PairColumns, row: int) -> AppliedChange:
    return AppliedChange(str(pairs.transform[row]), float(pairs.magnitude[row]), bool(pairs.same[row]))


def _sheet(
    settings: CoseSettings, opened: Opened, found: Found, final: str, methods: Sequence[str], place: int,
    changes: Sequence[AppliedChange],
) -> Image.Image:  # fmt: skip
    model = opened.model(final)
    (loaded,) = batches(opened.source, model.preprocess, 1, [place])
    picture = eight_bit(model.preprocess.restore(loaded.batch.images.to(model.device)))
    sizes = [torch.tensor([one.magnitude], device=model.device) for one in changes]
    turned = [TRANSFORMS[c.transform].apply(picture, m) for c, m in zip(changes, sizes, strict=True)]
    versions = model.preprocess.from_bytes(torch.cat([picture, *turned]))
    maps = explain(model, versions, methods, layer=settings.layer, seed=settings.seed)
    answers = [_called(opened, number) for number in maps[methods[0]].explained.tolist()]
    titles = ["as it is", *(change.title for change in changes)]
    shown = as_pictures(versions, model.preprocess)
    rows = [[Tile(p, t, f"answer: {a}") for p, t, a in zip(shown, titles, answers, strict=True)]]
    image = valid_unicode(loaded.batch.ids[0])
    for method in methods:
        heat = comparable(maps[method])
        back = [heat[:1], *(
            TRANSFORMS[c.transform].inverse_maps(heat[k : k + 1], m)
            for k, (c, m) in enumerate(zip(changes, sizes, strict=True), start=1)
        )]  # fmt: skip
        notes = ["", *(_stored(found, image, method, change) for change in changes)]
        laid = [overlay(shown[0], one[0].clamp(0, 1).cpu()) for one in back]
        rows.append([Tile(p, method, note) for p, note in zip(laid, notes, strict=True)])
    return sheet(rows, heading=f"{image}: maps laid over the picture as it is", cmap="inferno")


def _called(opened: Opened, number: int) -> str:
    names = opened.source.classes
    return names[number] if number < len(names) else f"class {number}"


def _stored(found: Found, image: str, method: str, change: AppliedChange) -> str:
    pairs = found.of(method)
    same = (pairs.image == image) & (pairs.transform == change.transform)
    values = pairs.ssim[same & np.isclose(pairs.magnitude, change.magnitude)]
    return (
        f"{SIMILARITIES[found.similarity]} {values[0]:.2f}" if len(values) and np.isfinite(values[0]) else ""
    )
