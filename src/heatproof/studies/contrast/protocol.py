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
from markupsafe import Markup
from PIL import Image

from heatproof.contrast.api import FLOORS, Contrast, ContrastPoint, ProgressCallback, contrast, labelled
from heatproof.contrast.score import SHOWN, TOKEN_REMOVED, ContrastScore
from heatproof.contrast.tokens import Token
from heatproof.disk import write_whole
from heatproof.explain.floors import is_floor
from heatproof.images import open_source
from heatproof.models.load import best_device, load_model
from heatproof.report.panels import Tile, sheet
from heatproof.report.pieces import (
    Grid,
    Line,
    LinePanel,
    Panels,
    asset,
    fill,
    named,
    number,
    policy,
    with_sub,
)
from heatproof.report.tables import Cell, Column, Table, Value
from heatproof.run.checks import input_warnings
from heatproof.run.study import listed_classes
from heatproof.show import address, overlay
from heatproof.studies.common import floor_rows, with_floors
from heatproof.studies.contrast.settings import ContrastSettings
from heatproof.types import Maps
from heatproof.verdict.answers import without_nan

SIDE = 112  # pixels of an image in a strip
SCHEMA = 1


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
    result = contrast(
        model, images, None, methods,
        token=token, positive=settings.positive, strength=settings.strength, seed=settings.seed,
        out=settings.out, progress=progress, epochs=settings.epochs, lr=settings.lr,
    )  # fmt: skip
    table = contrast_table(result)
    page = settings.out / "page.html"
    numbers = json.dumps(as_json(result), indent=1) + "\n"
    out = settings.out
    write_whole(
        {out / "contrast.json": numbers, out / "contrast.csv": table.csv(), page: contrast_page(result)}
    )
    return ContrastOutcome(page, table, result)


def contrast_table(result: Contrast) -> Table:
    """A row for each strength and method."""
    rows: list[tuple[Cell, ...]] = [
        (f"{point.strength:.0%}", s.method, Value(s.auc, s.interval, s.n), s.seen, *s.blank)
        for point in result.points
        for s in point.scores.values()
    ]
    columns = (
        Column("positives with the token", ".0%"), Column("method"), Column("AUC of A against B"),
        Column("seen", ".0%"), Column("blank maps of A"), Column("of B"),
    )  # fmt: skip
    floors = floor_rows(str(row[1]) for row in rows)
    title = f"Which maps of {result.model} show the {result.token.name} that only A uses"
    return Table("contrast", title, columns, tuple(rows), unranked=floors)


def as_json(result: Contrast) -> dict[str, Any]:
    """All results but the maps, with a version."""
    points = [
        {
            "strength": point.strength, "epochs": point.epochs, "holds": point.holds,
            "sentence": point.planting.sentence,
            "planted": point.planting.a._asdict(), "clean": point.planting.b._asdict(),
            "methods": {method: _numbers(score) for method, score in point.scores.items()},
        }
        for point in result.points
    ]  # fmt: skip
    return {
        "schema": SCHEMA, "model": result.model, "token": result.token.name, "size": result.token.size,
        "positive": result.positive, "points": without_nan(points),
        "shown_from": {method: result.shown_from(method) for method in result.methods},
    }  # fmt: skip


def _numbers(score: ContrastScore) -> dict[str, Any]:
    low, high = score.interval
    return {
        "auc": score.auc, "low": low, "high": high, "seen": score.seen, "n": score.n, "shows": score.shows,
        "blank_a": score.blank[0], "blank_b": score.blank[1],
    }  # fmt: skip


def contrast_page(result: Contrast) -> str:
    """The page as HTML."""
    judged = sum(bool(point.scores) for point in result.points)
    content = {
        "this": result,
        "policy": policy(""),
        "style": Markup(asset("page.css")),
        "answers": answers(result),
        "tables": [(point, table(point)) for point in result.points],
        "curves": _curves(result) if judged > 1 else None,
        "strips": [(m, address(strip(result, m))) for m, score in result.scores.items() if score.maps],
    }
    return str(fill("contrast", content, "studies/contrast"))


def answers(result: Contrast) -> list[str]:
    """What each method shows, in a sentence."""
    sentences = []
    for method in result.methods:
        if method == TOKEN_REMOVED or is_floor(method):
            continue
        least = result.shown_from(method)
        best = max(point.scores[method].auc for point in result.points if method in point.scores)
        if least is not None:
            sentences.append(
                f"{method} shows the {result.token.name} once it is in {least:.0%} of the positives."
                if len(result.points) > 1
                else f"{method} shows the {result.token.name}."
            )
        elif any(p.scores[method].interval[0] > 0.5 for p in result.points if method in p.scores):
            sentences.append(
                f"{method} distinguishes the networks (AUC {best:.2f}), but the {result.token.name} is not "
                "visible in most of its maps."
            )
        else:
            sentences.append(f"{method} does not distinguish the networks (AUC {best:.2f}).")
    return sentences


def table(point: ContrastPoint) -> Grid | None:
    if not point.scores:
        return None
    rows = []
    for score in point.scores.values():
        kind = "floor" if is_floor(score.method) else "control" if score.method == TOKEN_REMOVED else ""
        low, high = score.interval
        seen = "–" if math.isnan(score.seen) else f"{score.seen:.0%}"
        rows.append(
            [
                with_sub(named(score.method), kind) if kind else named(score.method),
                with_sub(number(score.auc), f"{number(low)} to {number(high)}"),
                seen, number(float(score.a.mean())), number(float(score.b.mean())),
                f"{score.blank[0]} and {score.blank[1]}",
            ]
        )  # fmt: skip
    heads = ["Method", "AUC of A against B ↑", "visible", "score under A", "under B",
             "blank maps"]  # fmt: skip
    return Grid(heads, rows, f"Methods with the token in {point.strength:.0%} of the positives")


def _curves(result: Contrast) -> Panels:
    """A panel per method: AUC, and the share of images in which the token is seen, over the strengths."""
    strengths = sorted(point.strength for point in result.points)
    ticks = [(strength, f"{strength:.0%}") for strength in strengths]
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
    rows = [tiles[start : start + 6] for start in range(0, len(tiles), 6)]
    return sheet(rows, heading=heading, side=SIDE)


def maps_over_pictures(result: Contrast, method: str) -> list[list[Image.Image]]:
    """A method's maps under A, then those under B, each laid over its image."""
    size = (result.pictures[0].height, result.pictures[0].width)
    maps = [
        Maps(method, torch.from_numpy(values), size, torch.zeros(len(values))).for_display()
        for values in result.scores[method].maps
    ]
    return [[overlay(*both) for both in zip(result.pictures, heats, strict=False)] for heats in maps]
