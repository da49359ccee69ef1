"""The contrast test end to end, on somebody's own network and pictures: see contrast/ for what it means.

    plant     for each strength, A and B are trained from the given weights and asked (OUT/strength-100/a, b)
    explain   both explain the same held-out pictures with the token (OUT/strength-100/scores.json, maps.npz)
    report    OUT/contrast.json, OUT/contrast.csv and OUT/page.html

A study that was stopped goes on with the same call; methods and strengths may be added. The given network and
its pictures are only read. Floors (random, edges, centre) always stand beside the methods.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heatproof.contrast.api import FLOORS, Contrast, Progress, contrast, labelled
from heatproof.contrast.score import ContrastScore
from heatproof.contrast.tokens import Token
from heatproof.disk import write_whole
from heatproof.images import open_source
from heatproof.models.load import best_device, load_model
from heatproof.report.tables import Cell, Column, Table, Value
from heatproof.run.inputs import input_warnings, listed_classes
from heatproof.studies.common import floor_rows, with_floors
from heatproof.studies.contrast.page import contrast_page
from heatproof.studies.contrast.settings import ContrastSettings
from heatproof.verdict.answers import without_nan

SCHEMA = 1


@dataclass(frozen=True)
class ContrastOutcome:
    """What a study left behind."""

    page: Path
    table: Table
    found: Contrast


def contrast_study(
    settings: ContrastSettings,
    progress: Progress | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> ContrastOutcome:
    """Run the whole test, or go on with it; OUT/page.html is its page. say: gets a line on the input."""
    methods = with_floors(settings.methods, FLOORS)
    token = Token(settings.token, settings.token_size)
    model = load_model(
        settings.model, settings.checkpoint, pretrained=settings.checkpoint is None,
        device=best_device(settings.device), layer=settings.layer, allow_pickle=settings.allow_pickle,
        classes=settings.class_names or None, head=settings.head,
    )  # fmt: skip
    given = settings.preprocess.table
    model = replace(model, preprocess=model.preprocess.replaced(given))
    say(f"the network's input: {model.preprocess.description}")
    images = labelled(model, settings.images, limit=settings.limit, seed=settings.seed)
    names = [images.names.get(k, f"class {k}") for k in range(max(images.names) + 1)]
    say(f"classes, in the order of its outputs: {listed_classes(model.classes or names)}")
    files = [sample.content for sample in open_source("folder", settings.images).samples]
    own = settings.checkpoint is None and not settings.model.partition(":")[0].endswith(".py")
    for warning in input_warnings(model, files, given, own):
        say(f"warning: {warning}")
    found = contrast(
        model, images, None, methods,
        token=token, positive=settings.positive, strength=settings.strength, seed=settings.seed,
        out=settings.out, progress=progress, epochs=settings.epochs, lr=settings.lr,
    )  # fmt: skip
    table = contrast_table(found)
    page = settings.out / "page.html"
    write_whole(
        {
            settings.out / "contrast.json": json.dumps(as_json(found), indent=1) + "\n",
            settings.out / "contrast.csv": table.csv(),
            page: contrast_page(found),
        }
    )
    return ContrastOutcome(page, table, found)


def contrast_table(found: Contrast) -> Table:
    """A row for each strength and method."""
    rows: list[tuple[Cell, ...]] = [
        (f"{point.strength:.0%}", s.method, Value(s.auc, s.interval, s.n), s.seen, *s.blank)
        for point in found.points
        for s in point.scores.values()
    ]
    columns = (
        Column("positives with the token", ".0%"), Column("method"), Column("AUC of A against B"),
        Column("seen", ".0%"), Column("blank maps of A"), Column("of B"),
    )  # fmt: skip
    floors = floor_rows(str(row[1]) for row in rows)
    title = f"Which maps of {found.model} show the {found.token.name} that only A uses"
    return Table("contrast", title, columns, tuple(rows), unranked=floors)


def as_json(found: Contrast) -> dict[str, Any]:
    """Everything that was found but the maps, with a version."""
    points = [
        {
            "strength": point.strength, "epochs": point.epochs, "holds": point.holds,
            "sentence": point.planting.sentence,
            "planted": point.planting.a._asdict(), "clean": point.planting.b._asdict(),
            "methods": {method: _numbers(score) for method, score in point.scores.items()},
        }
        for point in found.points
    ]  # fmt: skip
    return {
        "schema": SCHEMA, "model": found.model, "token": found.token.name, "size": found.token.size,
        "positive": found.positive, "points": without_nan(points),
        "shown_from": {method: found.shown_from(method) for method in found.methods},
    }  # fmt: skip


def _numbers(score: ContrastScore) -> dict[str, Any]:
    low, high = score.interval
    return {
        "auc": score.auc, "low": low, "high": high, "seen": score.seen, "n": score.n, "shows": score.shows,
        "blank_a": score.blank[0], "blank_b": score.blank[1],
    }  # fmt: skip
