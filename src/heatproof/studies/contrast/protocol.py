"""The contrast test end to end, on a network and images of the user; contrast/ defines it.

    plant     for each strength, A and B are trained from the given weights and tested (OUT/strength-100/a, b)
    explain   both explain the same held-out images with the token (OUT/strength-100/scores.json, maps.npz)
    report    OUT/contrast.json, OUT/contrast.csv and OUT/page.html, one file that loads nothing

A study that was stopped is resumed by the same call; methods and strengths may be added. Floors (random,
edges, centre) are always computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from heatproof.contrast.api import FLOORS, Contrast, ContrastPoint, ProgressCallback, contrast, labelled
from heatproof.contrast.pair import SHOWN, TOKEN_REMOVED
from heatproof.contrast.tokens import Token
from heatproof.disk import write_whole
from heatproof.explain.baselines import is_floor
from heatproof.images import open_source
from heatproof.models.load import best_device, load_model
from heatproof.report.panels import Tile, sheet
from heatproof.report.pieces import (
    Grid,
    Line,
    LinePanel,
    Panels,
    html_page,
    named,
    number,
    with_sub,
)
from heatproof.report.tables import Table, Value
from heatproof.run.checks import input_warnings
from heatproof.run.study import listed_classes
from heatproof.show import address, overlay
from heatproof.studies.common import TableFile, some, with_floors
from heatproof.studies.settings import ContrastSettings
from heatproof.types import Maps
from heatproof.verdict.answers import without_nan

SIDE = 112  # pixels of an image in a strip
SCHEMA = 1
TABLES = TableFile("heatproof.studies.contrast")


@dataclass(frozen=True)
class ContrastOutcome:
    """Results of a study."""

    page: Path
    table: Table
    result: Contrast


def contrast_study(
    settings: ContrastSettings,
    progress: ProgressCallback | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> ContrastOutcome:
    """Run or resume the whole test, and write its page. say: called with lines about the input."""
    methods = with_floors(settings.methods, FLOORS)
    token = Token(settings.token, settings.token_size)
    model = load_model(
        settings.model, settings.checkpoint, pretrained=settings.checkpoint is None,
        device=best_device(settings.device), layer=settings.layer, allow_pickle=settings.allow_pickle,
        classes=settings.class_names or None, head=settings.head,
    )  # fmt: skip
    changes = settings.preprocess.table
    model = replace(model, preprocess=model.preprocess.replaced(changes))
    say(f"the network's input: {model.preprocess.description}")
    images = labelled(model, settings.images, limit=settings.limit, seed=settings.seed)
    names = [images.names.get(k, f"class {k}") for k in range(max(images.names) + 1)]
    say(f"classes, in the order of its outputs: {listed_classes(model.classes or names)}")
    files = [sample.content for sample in open_source("folder", settings.images).samples]
    own = settings.checkpoint is None and not settings.model.partition(":")[0].endswith(".py")
    for warning in input_warnings(model, files, changes, own):
        say(f"warning: {warning}")
    chosen = some(settings, "positive", "strength", "seed", "out", "epochs", "lr")
    result = contrast(model, images, None, methods, token=token, progress=progress, **chosen)
    rows = [
        (f"{point.strength:.0%}", s.method, Value(s.auc, s.interval, s.n), s.seen, *s.blank)
        for point in result.points
        for s in point.scores.values()
    ]
    made = TABLES.fill("contrast", rows, result=result)
    page, numbers = settings.out / "page.html", json.dumps(as_json(result), indent=1) + "\n"
    content = {page: contrast_page(result), settings.out / "contrast.csv": made.csv()}
    write_whole({settings.out / "contrast.json": numbers, **content})
    return ContrastOutcome(page, made, result)


def as_json(result: Contrast) -> dict[str, Any]:
    """All results but the maps, with a version."""
    points = [
        {
            "strength": point.strength, "epochs": point.epochs, "holds": point.holds,
            "sentence": point.planting.sentence,
            "planted": point.planting.a._asdict(), "clean": point.planting.b._asdict(),
            "methods": {
                method: {
                    "auc": s.auc, "low": s.interval[0], "high": s.interval[1], "seen": s.seen, "n": s.n,
                    "shows": s.shows, "blank_a": s.blank[0], "blank_b": s.blank[1],
                }
                for method, s in point.scores.items()
            },
        }
        for point in result.points
    ]  # fmt: skip
    return {
        "schema": SCHEMA, "model": result.model, "token": result.token.name, "size": result.token.size,
        "positive": result.positive, "points": without_nan(points),
        "shown_from": {method: result.shown_from(method) for method in result.methods},
    }  # fmt: skip


def contrast_page(result: Contrast) -> str:
    """The page as HTML."""
    answers = []
    for method in result.methods:
        if method != TOKEN_REMOVED and not is_floor(method):
            scores = [point.scores[method] for point in result.points if method in point.scores]
            differs = any(score.interval[0] > 0.5 for score in scores)
            answers.append((method, result.shown_from(method), max(score.auc for score in scores), differs))
    judged = sum(bool(point.scores) for point in result.points)
    content = {
        "this": result, "answers": answers,
        "tables": [(point, table(point)) for point in result.points],
        "curves": _curves(result) if judged > 1 else None,
        "strips": [(m, address(strip(result, m))) for m, score in result.scores.items() if score.maps],
    }  # fmt: skip
    return html_page("contrast", content, room="studies/contrast")


def table(point: ContrastPoint) -> Grid | None:
    if not point.scores:
        return None
    rows = []
    for score in point.scores.values():
        kind = "floor" if is_floor(score.method) else "control" if score.method == TOKEN_REMOVED else ""
        means = (number(float(of.mean())) for of in (score.a, score.b))
        rows.append([
            with_sub(named(score.method), kind) if kind else named(score.method),
            with_sub(number(score.auc), " to ".join(map(number, score.interval))),
            "–" if math.isnan(score.seen) else f"{score.seen:.0%}", *means, "{} and {}".format(*score.blank),
        ])  # fmt: skip
    heads = ["Method", "AUC of A against B ↑", "visible", "score under A", "under B", "blank maps"]
    return Grid(heads, rows, f"Methods with the token in {point.strength:.0%} of the positives")


def _curves(result: Contrast) -> Panels:
    """A panel per method: AUC, and the share of images in which the token is seen, over the strengths."""
    ticks = [(strength, f"{strength:.0%}") for strength in sorted(point.strength for point in result.points)]
    panels = []
    for method in result.methods:
        if method == TOKEN_REMOVED:
            continue
        scored = [(p.strength, p.scores[method]) for p in reversed(result.points) if method in p.scores]
        lines = [
            Line("AUC", [(strength, score.auc) for strength, score in scored]),
            Line("seen", [(strength, score.seen) for strength, score in scored], "two"),
        ]
        n = max((score.n for _, score in scored), default=0)
        panels.append((f"{method}, n = {n}", LinePanel(f"{method} by strength", lines, ticks)))
    return Panels(panels)


def strip(result: Contrast, method: str, most: int = SHOWN, heading: str = "") -> Image.Image:
    """Images with the token, each beside its maps under A and under B; two of them in a row."""
    score, overlays = result.scores[method], maps_over_pictures(result, method)
    titles = ("A uses the token", "B does not")
    tiles = []
    for i, image in enumerate(result.pictures[:most]):
        tiles.append(Tile(image, "the image"))
        for drawn, inside, title in zip(overlays, (score.a, score.b), titles, strict=True):
            tiles.append(Tile(drawn[i], title, f"{inside[i]:.0%} on the token"))
    return sheet([tiles[start : start + 6] for start in range(0, len(tiles), 6)], heading=heading, side=SIDE)


def maps_over_pictures(result: Contrast, method: str) -> list[list[Image.Image]]:
    """A method's maps under A, then those under B, each laid over its image."""
    size = (result.pictures[0].height, result.pictures[0].width)
    maps = [
        Maps(method, torch.from_numpy(values), size, torch.zeros(len(values))).for_display()
        for values in result.scores[method].maps
    ]
    return [[overlay(*both) for both in zip(result.pictures, heats, strict=False)] for heats in maps]
