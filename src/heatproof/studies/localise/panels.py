"""Panels of a localisation study: case studies, confused classes, segments, what flagged images share.

Maps come from the run folder; curves are computed again at all points, and wrongly classified images are
explained once more for the class they were taken for. That is all the model does here.

What the network uses off the object is determined by moving it into other images, and what the images of a
class share by the same comparison of patches (metrics/interventions.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn import functional as F

from heatproof.errors import InputError
from heatproof.explain.api import explain
from heatproof.explain.baselines import segments_of, top_segments
from heatproof.images import Source
from heatproof.images.files import Box
from heatproof.images.loader import batches
from heatproof.metrics import centre_bias, insertion_deletion
from heatproof.metrics.interventions import ALIKE, OFF_OBJECT, PATCH, SIDES, evidence, similarities
from heatproof.metrics.localisation import budget_masks, object_regions
from heatproof.models import Model
from heatproof.registry import parse_call
from heatproof.report.panels import Tile, explains, panel, sheet
from heatproof.show import overlay, pixels
from heatproof.store import MapStore
from heatproof.studies.common import some
from heatproof.studies.localise.results import KINDS, METRICS, MOST, Flag, LocaliseResults, Rows
from heatproof.studies.settings import LocaliseSettings
from heatproof.types import Batch, Maps, per_map, upsample

MAX_METHODS = 4  # rows of a panel
MAX_SWEPT = 3  # images on the sheet of variants of LIME
AT_ONCE = 8  # images in memory
FEWEST = 3  # correct images of a class whose features are compared
MAX_CROPS = 8  # crops of a group
GREEN, RED, BOX = (0, 158, 60), (213, 40, 30), (0, 220, 70)
SHADE = 0.5  # weight of green and red over a segment
DIM = 0.25  # brightness of the image outside a mask
Picked = tuple[str, str]  # image, why it is shown
View = tuple[Image.Image, Sequence[Box]]


@dataclass(frozen=True)
class Studio:
    """Draws panels of a run."""

    results: LocaliseResults
    maps: MapStore
    model: Model
    source: Source
    settings: LocaliseSettings

    @property
    def methods(self) -> list[str]:
        return self.results.real_methods[:MAX_METHODS] or list(self.results.methods[:1])

    def batches(self, images: Iterable[str]) -> list[Batch]:
        """The images, a few at a time."""
        place = {sample.id: i for i, sample in enumerate(self.source.samples)}
        rows = [place[image] for image in images]
        return [loaded.batch for loaded in batches(self.source, self.model.preprocess, AT_ONCE, rows)]

    @cached_property
    def held(self) -> list[Batch]:
        """The first images of the study whose maps are stored, in memory."""
        known = (image for image in sorted(self.results.explained) if _has_maps(self.results, image))
        return self.batches(islice(known, MOST))

    def _views(self, loaded: Iterable[Batch]) -> Iterator[tuple[tuple[str, ...], Tensor, list[View]]]:
        """Names, inputs of the model, and images with their boxes; a few at a time."""
        for batch in loaded:
            boxes = batch.truth.boxes if batch.truth and batch.truth.boxes else [()] * len(batch.ids)
            drawn = map(Image.fromarray, pixels(batch.images, self.model.preprocess))
            yield batch.ids, batch.images.to(self.model.device), list(zip(drawn, boxes, strict=True))

    def cases(self, picked: Sequence[Picked]) -> list[Path]:
        """A case-study panel of each image, a row per method.

        keak2026budget shows these for Grad-CAM and LIME; LIME's own images are the heatmap and the two with
        segments. Without segments of its own, a method's segment weighs the mean of the map in it.
        """
        reasons, paths, top = dict(picked), [], f"top {self.results.budget:.0%}"
        for ids, inputs, views in self._views(self.batches(reasons)):
            stored = {m: self._stored(m, ids).to(self.model.device) for m in self.methods}
            targets = next(iter(stored.values())).explained
            options = some(self.settings, "steps", "baseline", "seed")
            walked = insertion_deletion(stored, targets, model=self.model, images=inputs, **options)
            rows: dict[str, list[list[Tile]]] = {name: [] for name in ids}
            for method, maps in stored.items():
                cut, signed = self._segments(method, inputs), upsample(maps.signed, maps.image_size)
                heat, masks = maps.for_display(), self._budget_masks(maps)
                first, both = (top_segments(signed, cut, count, signed=count > 5).cpu() for count in (5, 10))
                for i, (name, (image, boxes)) in enumerate(zip(ids, views, strict=True)):
                    both_ways = walked[method].deletion, walked[method].insertion
                    deletion, insertion = (of[i].tolist() for of in both_ways)
                    notes = self._notes(method, name)
                    rows[name].append([
                        Tile(with_boxes(image, boxes), "original, box"),
                        Tile(overlay(image, heat[i]), method),
                        Tile(tinted(image, first[i], dim=True), "top 5 for the class"),
                        Tile(tinted(image, both[i]), "top 10, for and against"),
                        Tile(with_boxes(tinted(image, masks[i], dim=True), boxes), top, notes[0]),
                        Tile(curves(deletion, insertion, image.size), "deletion, insertion", notes[1]),
                    ])  # fmt: skip
            for name in ids:
                drawn = sheet(rows[name], heading=f"{self._heading(name)}; {reasons[name]}", cmap="inferno")
                paths.append(self.save(drawn, name, "case"))
        return paths

    def confused(self, picked: Sequence[Picked]) -> list[Path]:
        """Each method's map for the true and for the predicted class of wrongly classified images.

        Beside them the most certain correct image of the predicted class, as the thesis compares them.
        """
        results, settings, reasons, paths = self.results, self.settings, dict(picked), []
        guesses = {results.predicted[name] for name in reasons}
        examples = {label: most_certain(results, label) for label in guesses}
        wanted = sorted({name for name in examples.values() if name})
        drawn: dict[str, tuple[View, Mapping[str, Tensor]]] = {}
        for ids, _, views in self._views(self.batches(wanted)):
            heats = {m: self._stored(m, ids).for_display() for m in self.methods}
            for i, (name, view) in enumerate(zip(ids, views, strict=True)):
                drawn[name] = view, {m: heat[i] for m, heat in heats.items()}
        for ids, inputs, views in self._views(self.batches(reasons)):
            classes = [results.labels[name] for name in ids], [results.predicted[name] for name in ids]
            sides: list[dict[str, tuple[Tensor, Tensor]]] = []
            for targets in classes:
                if [results.explained[name] for name in ids] == targets:
                    maps: Mapping[str, Maps] = {m: self._stored(m, ids) for m in self.methods}
                else:
                    maps = explain(self.model, inputs, self.methods, targets, settings.layer, settings.seed)
                sides.append({m: (of.for_display(), self._budget_masks(of)) for m, of in maps.items()})
            for i, (name, (image, boxes)) in enumerate(zip(ids, views, strict=True)):
                true, guess = (
                    f"{results.class_name(c[i])}, {results.chance(name, c[i]):.0%}" for c in classes
                )
                rows = []
                for method in self.methods:
                    (heat, mask), (other_heat, other_mask) = (side[method] for side in sides)
                    apart = tinted(image, mask[i].int() - other_mask[i].int())
                    note = "green: true class, red: predicted"
                    rows.append([
                        Tile(with_boxes(image, boxes), method),
                        Tile(overlay(image, heat[i]), f"true: {true}"),
                        Tile(overlay(image, other_heat[i]), f"predicted: {guess}"),
                        Tile(apart, f"top {results.budget:.0%} of one class only", note),
                    ])  # fmt: skip
                    if example := examples[classes[1][i]]:
                        (other, frames), own = drawn[example]
                        rows[-1].append(Tile(with_boxes(other, frames), f"correct: {example}", guess))
                        rows[-1].append(Tile(overlay(other, own[method]), "its map"))
                heading = f"{name}: the true label is {true}; predicted as {guess}; {reasons[name]}"
                paths.append(self.save(sheet(rows, heading=heading, cmap="inferno"), name, "confused"))
        return paths

    def segment_sheet(self, maps: MapStore, methods: Mapping[str, str], images: Sequence[str]) -> Path:
        """The five segments with the strongest evidence for the class, for each variant of LIME."""
        rows: list[list[Tile]] = []
        for ids, inputs, views in self._views(self.batches(images[:MAX_SWEPT])):
            best = {}
            for name, method in methods.items():
                read = maps.read(self.results.checkpoint, method, ids).to(self.model.device)
                signed = upsample(read.signed, read.image_size)
                best[name] = top_segments(signed, self._segments(method, inputs), 5).cpu()
            for i, (name, (image, boxes)) in enumerate(zip(ids, views, strict=True)):
                tiles = (Tile(tinted(image, five[i], dim=True), variant) for variant, five in best.items())
                rows.append([Tile(with_boxes(image, boxes), name), *tiles])
        return self.save(sheet(rows, heading="LIME: the five largest weights"), "counts", "segments")

    def segments_used(self, methods: Mapping[str, str], images: Sequence[str]) -> dict[str, float]:
        """By variant of LIME: the mean number of segments of an image."""
        counts: dict[str, list[float]] = {name: [] for name in methods}
        for _, inputs, _ in self._views(self.batches(images)):
            for name, method in methods.items():
                counts[name] += (self._segments(method, inputs).flatten(1).amax(1) + 1).tolist()
        return {name: sum(of) / len(of) for name, of in counts.items()}

    def objects(self) -> dict[str, float]:
        """By image: centre bias of the annotated object."""
        return {
            name: value
            for batch in self.held
            for regions in [object_regions(batch.truth, batch.images).float()]
            for name, value in zip(batch.ids, centre_bias(regions)["centre_bias"].tolist(), strict=True)
        }

    def shared(self) -> tuple[Rows, list[Path]]:
        """What the strongest windows of the correctly answered images of a class have in common.

        Returns:
            Rows of class, correct images, largest group, its share, number of groups; and drawn crops.
        """
        results, rows, paths = self.results, Rows(), []
        patches: dict[int, list[tuple[Tensor, Image.Image]]] = {}
        for ids, inputs, views in self._views(self.held):
            side = max(1, round(SIDES[0] * min(inputs.shape[-2:])))
            heat = self._stored(self.methods[0], ids)
            means = F.avg_pool2d(heat.upsample()[:, None], side, stride=1)[:, 0]
            for i, name in enumerate(ids):
                if results.predicted[name] == results.labels[name] and not heat.degenerate[i]:
                    top, left = divmod(int(means[i].argmax()), means.shape[-1])
                    window = inputs[i : i + 1, :, top : top + side, left : left + side].float().cpu()
                    patch = F.interpolate(window, (PATCH, PATCH), mode="bilinear", antialias=True)
                    crop = views[i][0].crop((left, top, left + side, top + side))
                    patches.setdefault(results.labels[name], []).append((patch, crop))
        for label, own in sorted(patches.items()):
            if len(own) < FEWEST:
                continue
            alike = similarities(torch.cat([patch for patch, _ in own])).numpy() > ALIKE
            numbers = connected_components(alike | np.eye(len(own), dtype=bool))[1]
            sizes, name = np.bincount(numbers), results.class_name(label)
            several = int((sizes > 1).sum())
            most = int(sizes.max()) if several else 0
            rows.append((name, len(own), most, most / len(own), several))
            if several:
                crops = [crop for (_, crop), n in zip(own, numbers, strict=True) if n == sizes.argmax()]
                tiles = [Tile(crop, f"{i}") for i, crop in enumerate(crops[:MAX_CROPS], 1)]
                heading = f"{name}: shared by {most} of {len(own)} correct images"
                drawn = panel(tiles, columns=MAX_CROPS, heading=heading)
                paths.append(self.save(drawn, f"{label}", "shared"))
        return rows, paths

    def patterns(self) -> list[str]:
        """What turns answers off the object when it is moved into other images, as Markdown."""
        results, texts, loaded = self.results, [], self.held
        if not loaded:
            return ["Not computed: no image has a finite map of every method."]
        images = torch.cat([batch.images for batch in loaded])
        labels = [results.labels[name] for batch in loaded for name in batch.ids]
        regions = torch.cat([object_regions(batch.truth, batch.images) for batch in loaded])
        try:
            record = evidence(
                labels, model=self.model, images=images, regions=regions, methods=self.methods[:1],
                layer=self.settings.layer, seed=self.settings.seed, classes=results.classes,
            )  # fmt: skip
        except InputError as error:  # one class, or no correct answer
            return [f"Not computed: {error}."]
        items = [item for item in record.items if (item.on_object or 0.0) < OFF_OBJECT]
        for number, item in enumerate(sorted(items, key=lambda item: -item.donors)):
            name = results.class_name(item.label)
            drawn = panel([Tile(Image.fromarray(crop), f"{i}") for i, crop in enumerate(item.crops, 1)],
                          columns=MAX_CROPS, heading=f"{name}: {item.name or self.methods[0]}")  # fmt: skip
            path = self.save(drawn, f"{number}", "evidence")
            texts.append(f"{item.sentence(name)}.\n\n![{name}](panels/{path.name})")
        return texts

    def _budget_masks(self, maps: Maps) -> Tensor:
        """Masks of the pixels that maps keep; a constant map keeps none."""
        masks = budget_masks(maps, self.results.budget)
        return (masks & ~per_map(maps.degenerate, masks)).cpu()

    def _stored(self, method: str, ids: Sequence[str]) -> Maps:
        return self.maps.read(self.results.checkpoint, method, ids)

    def _segments(self, method: str, inputs: Tensor) -> Tensor:
        """LIME's own segments; for other methods those LIME has by default."""
        name, options = parse_call(method)
        given = options if name.lower() == "lime" else {}
        return segments_of(
            self.model, inputs, given.get("segments", "slic"), given.get("segment_count", 100),
            given.get("compactness", 10.0), self.settings.seed,
        )  # fmt: skip

    def _notes(self, method: str, image: str) -> tuple[str, str]:
        """Captions of the mask and of the curves."""
        at = {metric: self.results.value(method, metric, image) for metric in METRICS}
        hit = "hit" if at["pointing"] == 1 else "miss"
        aucs = f"AUC: del {at['deletion']:.2f}, ins {at['insertion']:.2f}"
        return (
            f"mask {at['mask_iou']:.2f} box {at['box_iou']:.2f} in {at['inside']:.0%} {hit}",
            "empty map" if math.isnan(at["deletion"]) else aucs,
        )

    def _heading(self, image: str) -> str:
        results, guess = self.results, self.results.predicted[image]
        about = explains(results.explained[image], results.labels[image], guess, results.class_name)
        return f"{image}: {about}; {results.chance(image, guess):.0%} sure"

    def save(self, drawn: Image.Image, image: str, kind: str) -> Path:
        folder = self.settings.out / "panels"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{kind}-{Path(image).with_suffix('').as_posix().replace('/', '_')}.png"
        drawn.save(path)
        return path


def pick_cases(results: LocaliseResults, flags: Sequence[Flag], count: int) -> list[Picked]:
    """Up to `count` images: half the worst of each kind of flag in turn, half unflagged, class by class."""
    usable = dict.fromkeys(image for image in results.images if _has_maps(results, image))
    queues = [iter([f for f in flags if f.kind == kind and f.image in usable]) for kind in KINDS]
    chosen: dict[str, str] = {}
    for queue in chain.from_iterable(repeat(queues, count)):
        flag = next((f for f in queue if f.image not in chosen), None)
        if flag and len(chosen) < (count + 1) // 2:
            chosen[flag.image] = f"{flag.kind}{f' ({flag.method})' if flag.method else ''}"
    flagged, seen, plain = {flag.image for flag in flags}, Counter[int](), []
    for image in (i for i in usable if i not in flagged):
        plain.append((seen[results.labels[image]], image))
        seen[results.labels[image]] += 1
    rest = {image: "no flag" for _, image in sorted(plain)} | {i: "flagged" for i in usable if i in flagged}
    return list((chosen | {image: why for image, why in rest.items() if image not in chosen}).items())[:count]


def pick_confused(results: LocaliseResults, count: int) -> list[Picked]:
    """Wrongly classified images, the most confident first."""
    wrong = [i for i in results.images if results.predicted[i] != results.labels[i] and _has_maps(results, i)]
    wrong.sort(key=lambda i: (-results.chances.get((i, results.predicted[i]), 0.0), i))
    return [(image, "true and predicted class explained") for image in wrong[:count]]


def most_certain(results: LocaliseResults, label: int) -> str:
    """The correctly answered image of a class with the highest probability; "" if there is none."""
    own = [
        i for i, c in results.predicted.items() if c == label == results.labels[i] and _has_maps(results, i)
    ]
    return max(own, key=lambda i: (results.chances.get((i, label), 0.0), i), default="")


def _has_maps(results: LocaliseResults, image: str) -> bool:
    """Whether every method's map was stored: one that is not finite is not."""
    return not any(math.isnan(results.value(m, "degenerate", image)) for m in results.real_methods)


def with_boxes(image: Image.Image, boxes: Sequence[Sequence[float]]) -> Image.Image:
    """The image with a green frame around each box."""
    drawn = image.convert("RGB")
    pen = ImageDraw.Draw(drawn)
    width = max(1, round(max(image.size) / 100))
    for x0, y0, x1, y1 in boxes:
        pen.rectangle((x0, y0, x1, y1), outline=BOX, width=width)
    return drawn


def tinted(image: Image.Image, marks: Any, dim: bool = False) -> Image.Image:
    """Green over marks above 0, red over those below; `dim`: marks stay as they are, the rest goes dark."""
    signs = np.asarray(marks).astype(int)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64)
    if dim:
        mixed = np.where((signs > 0)[..., None], pixels, DIM * pixels)
    else:
        colour = np.where((signs > 0)[..., None], GREEN, RED)
        mixed = np.where((signs != 0)[..., None], (1 - SHADE) * pixels + SHADE * colour, pixels)
    return Image.fromarray(mixed.round().astype(np.uint8))


def curves(deletion: Sequence[float], insertion: Sequence[float], size: tuple[int, int]) -> Image.Image:
    """Probability against the share of pixels that were taken away (red) or shown (green)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure([max(side, 224) / 100 for side in size], dpi=100)
    axes = drawing.add_axes((0.13, 0.1, 0.77, 0.86))
    for values, colour in ((deletion, RED), (insertion, GREEN)):
        axes.plot(np.linspace(0, 1, len(values)), values, color=np.array(colour) / 255, linewidth=1.5)
    axes.set(xlim=(0, 1), ylim=(-0.02, 1.02), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    axes.set_xticklabels(["0%", "50%", "100%"])
    axes.tick_params(labelsize=7)
    axes.grid(color="0.85", linewidth=0.8)
    canvas = FigureCanvasAgg(drawing)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
