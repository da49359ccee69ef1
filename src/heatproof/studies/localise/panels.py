"""Which pictures a localisation study shows, and their panels: case studies, confused classes side by side.

Maps come from the run folder; curves are taken again at all points, and wrongly classified pictures are
explained once more for the class they were taken for. That is all the model does here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from heatproof.disk import valid_unicode
from heatproof.explain.api import explain
from heatproof.explain.segments import segments_of, top_segments
from heatproof.images import Source
from heatproof.images.loader import batches
from heatproof.metrics import insertion_deletion
from heatproof.metrics.localisation import budget_masks
from heatproof.models import Model
from heatproof.registry import parse_call
from heatproof.report.case_study import ClassMap, View, case_study, confusion, tinted, with_boxes
from heatproof.report.panels import Tile, explains, sheet
from heatproof.show import pixels
from heatproof.store import MapStore
from heatproof.studies.localise.scored import KINDS, Flag, Scored
from heatproof.studies.localise.settings import LocaliseSettings
from heatproof.studies.skeleton import some
from heatproof.types import Batch, Maps, per_map, upsample

METHODS_SHOWN = 4  # rows of a panel
AT_ONCE = 8  # pictures in memory
Picked = tuple[str, str]  # image, why it is shown


@dataclass(frozen=True)
class Studio:
    """What drawing a panel needs."""

    scored: Scored
    maps: MapStore
    model: Model
    source: Source
    settings: LocaliseSettings

    @property
    def methods(self) -> list[str]:
        return self.scored.real_methods[:METHODS_SHOWN]

    def cases(self, picked: Sequence[Picked]) -> list[Path]:
        """A case-study panel of each picture."""
        return [path for lot in self.lots(picked) for path in self._cases(*lot)]

    def confused(self, picked: Sequence[Picked]) -> list[Path]:
        """True and predicted class side by side, for pictures that were classified wrongly."""
        return [path for lot in self.lots(picked) for path in self._confused(*lot)]

    def segment_sheet(self, maps: MapStore, methods: Mapping[int, str], images: Sequence[str]) -> Path:
        """The five segments that speak most for the class, for each number of segments."""
        rows: list[list[Tile]] = []
        for batch, _ in self.lots([(image, "") for image in images]):
            ids, best = [valid_unicode(name) for name in batch.ids], {}
            for count, method in methods.items():
                lot = maps.read(self.scored.checkpoint, method, ids).to(self.model.device)
                cut = self._segments(method, batch.images.to(self.model.device))
                best[count] = top_segments(upsample(lot.signed, lot.image_size), cut, 5).cpu()
            for i, (name, picture, boxes) in enumerate(self._pictures(batch)):
                shown = [
                    Tile(tinted(picture, five[i], dim=True), f"{n} segments") for n, five in best.items()
                ]
                rows.append([Tile(with_boxes(picture, boxes), name), *shown])
        return self.save(sheet(rows, heading="LIME: the five segments that speak most"), "counts", "segments")

    def lots(self, picked: Sequence[Picked]) -> list[tuple[Batch, dict[str, str]]]:
        """The pictures, a few at a time, with why they are shown."""
        place = {valid_unicode(sample.id): i for i, sample in enumerate(self.source.samples)}
        rows = [place[image] for image, _ in picked]
        loaded = batches(self.source, self.model.preprocess, AT_ONCE, rows)
        return [(one.batch, dict(picked)) for one in loaded]

    def _cases(self, batch: Batch, why: dict[str, str]) -> list[Path]:
        ids = [valid_unicode(name) for name in batch.ids]
        images = batch.images.to(self.model.device)
        lots = {m: self._stored(m, ids).to(self.model.device) for m in self.methods}
        targets = next(iter(lots.values())).explained
        options = some(self.settings, "steps", "baseline", "seed")
        walked = insertion_deletion(lots, targets, model=self.model, images=images, **options)
        views: dict[str, list[View]] = {name: [] for name in ids}
        for method, maps in lots.items():
            cut = self._segments(method, images)
            signed, walk = upsample(maps.signed, maps.image_size), walked[method]
            heat, kept = maps.for_display(), self._budget_masks(maps)
            first, both = top_segments(signed, cut, 5).cpu(), top_segments(signed, cut, 10, signed=True).cpu()
            for i, name in enumerate(ids):
                deletion, insertion = (c[i].tolist() for c in (walk.deletion, walk.insertion))
                tiles = heat[i], first[i], both[i], kept[i]
                views[name].append(View(method, *tiles, deletion, insertion, self._notes(method, name)))
        written = []
        for name, picture, boxes in self._pictures(batch):
            heading = f"{self._heading(name)}; {why[name]}"
            panel = case_study(picture, boxes, views[name], heading, self.scored.budget)
            written.append(self.save(panel, name, "case"))
        return written

    def _confused(self, batch: Batch, why: dict[str, str]) -> list[Path]:
        ids = [valid_unicode(name) for name in batch.ids]
        images, scored = batch.images.to(self.model.device), self.scored
        classes = ([scored.labels[name] for name in ids], [scored.predicted[name] for name in ids])
        sides: list[dict[str, tuple[Tensor, Tensor]]] = []
        for targets in classes:
            if all(scored.explained[name] == target for name, target in zip(ids, targets, strict=True)):
                lots = {m: self._stored(m, ids) for m in self.methods}
            else:
                told = self.settings
                lots = explain(self.model, images, self.methods, targets, told.layer, told.seed)
            sides.append({m: (one.for_display(), self._budget_masks(one)) for m, one in lots.items()})
        written = []
        for i, (name, picture, boxes) in enumerate(self._pictures(batch)):
            pairs = [[ClassMap(m, *(lot[i] for lot in side[m])) for side in sides] for m in self.methods]
            chances = [scored.chances.get((name, c[i]), math.nan) for c in classes]
            titles = [f"{scored.class_name(c[i])}, {p:.0%}" for c, p in zip(classes, chances, strict=True)]
            heading = f"{name}: the true label is {titles[0]}; the network says {titles[1]}; {why[name]}"
            panel = confusion(picture, boxes, pairs, (titles[0], titles[1]), heading, scored.budget)
            written.append(self.save(panel, name, "confused"))
        return written

    def _budget_masks(self, maps: Maps) -> Tensor:
        """Masks of the pixels that maps keep; a constant map keeps none."""
        kept = budget_masks(maps, self.scored.budget)
        return (kept & ~per_map(maps.degenerate, kept)).cpu()

    def _stored(self, method: str, ids: Sequence[str]) -> Maps:
        return self.maps.read(self.scored.checkpoint, method, ids)

    def _segments(self, method: str, images: Tensor) -> Tensor:
        """LIME's own segments; for other methods those LIME has by default."""
        name, options = parse_call(method)
        given = options if name.lower() == "lime" else {}
        return segments_of(
            self.model, images, given.get("segments", "slic"), given.get("segment_count", 100),
            given.get("compactness", 10.0), self.settings.seed,
        )  # fmt: skip

    def _pictures(self, batch: Batch) -> list[tuple[str, Image.Image, Sequence[Sequence[float]]]]:
        shown = pixels(batch.images, self.model.preprocess)
        boxes = batch.truth.boxes if batch.truth and batch.truth.boxes else [()] * len(batch.ids)
        return [
            (valid_unicode(n), Image.fromarray(p), b) for n, p, b in zip(batch.ids, shown, boxes, strict=True)
        ]

    def _notes(self, method: str, image: str) -> tuple[str, str]:
        at = {m: self.scored.column(method, m).get(image, math.nan) for m in (
            "mask_iou", "box_iou", "inside", "pointing", "insertion", "deletion")}  # fmt: skip
        hit = "hit" if at["pointing"] == 1 else "miss"
        curves = f"AUC: del {at['deletion']:.2f}, ins {at['insertion']:.2f}"
        return (
            f"mask {at['mask_iou']:.2f} box {at['box_iou']:.2f} in {at['inside']:.0%} {hit}",
            "empty map" if math.isnan(at["deletion"]) else curves,
        )

    def _heading(self, image: str) -> str:
        scored, guess = self.scored, self.scored.predicted[image]
        chance = scored.chances.get((image, guess), math.nan)
        told = explains(scored.explained[image], scored.labels[image], guess, scored.class_name)
        return f"{image}: {told}; {chance:.0%} sure"

    def save(self, panel: Image.Image, image: str, kind: str) -> Path:
        folder = self.settings.out / "panels"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{kind}-{Path(image).with_suffix('').as_posix().replace('/', '_')}.png"
        panel.save(path)
        return path


def pick_cases(scored: Scored, flags: Sequence[Flag], count: int) -> list[Picked]:
    """Up to `count` pictures: half the worst of each kind of flag in turn, half unflagged, class by class."""
    usable = [image for image in scored.images if _has_maps(scored, image)]
    queues = [[f for f in flags if f.kind == kind and f.image in set(usable)] for kind in KINDS]
    chosen: dict[str, str] = {}
    while any(queues) and len(chosen) < (count + 1) // 2:
        for queue in queues:
            while queue and queue[0].image in chosen:
                queue.pop(0)
            if queue and len(chosen) < (count + 1) // 2:
                flag = queue.pop(0)
                chosen[flag.image] = f"{flag.kind}{f' ({flag.method})' if flag.method else ''}"
    flagged = {flag.image for flag in flags}
    seen: Counter[int] = Counter()
    plain = []
    for image in (i for i in usable if i not in flagged):
        plain.append((seen[scored.labels[image]], image))
        seen[scored.labels[image]] += 1
    rest = {image: "no flag" for _, image in sorted(plain)} | {i: "flagged" for i in usable if i in flagged}
    return list((chosen | {image: why for image, why in rest.items() if image not in chosen}).items())[:count]


def pick_confused(scored: Scored, count: int) -> list[Picked]:
    """Wrongly classified pictures, the most confident first."""
    wrong = [i for i in scored.images if scored.predicted[i] != scored.labels[i] and _has_maps(scored, i)]
    wrong.sort(key=lambda i: (-scored.chances.get((i, scored.predicted[i]), 0.0), i))
    return [(image, "true and predicted class explained") for image in wrong[:count]]


def _has_maps(scored: Scored, image: str) -> bool:
    """Whether every method's map was stored: one that is not finite is not."""
    return not any(
        math.isnan(scored.column(m, "degenerate").get(image, math.nan)) for m in scored.real_methods
    )
