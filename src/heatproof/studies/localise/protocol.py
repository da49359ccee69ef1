"""Localisation and faithfulness under a fair budget: the thesis's protocol, end to end.

    sift      pictures with one box that covers 10 to 80 % of them (pictures.py; filters in images/source.py)
    run       all methods in one shared pass, localisation at every budget, insertion and deletion: the engine
    report    tables per class and as macro means, budget and faithfulness curves, shortcut flags, panels

The run is an ordinary run folder (OUT/run, from OUT/study.toml), so it can be killed and taken up again, and
everything but the panels is rebuilt from it without a model pass. keak2026budget.

Deviations: the floors (random, edges, centre) are always beside the methods; means carry 95 % intervals; the
thesis resizes to 256 x 256 while preprocess="thesis" resizes the shorter side to 256, as its network's own
pipeline does; pictures whose label looks wrong to a person, which the thesis drops by hand, stay in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heatproof.errors import InputError
from heatproof.explain.api import read_methods
from heatproof.images import open_source, select
from heatproof.metrics.localisation import kept_pixels
from heatproof.models import Model
from heatproof.models.classes import model_classes
from heatproof.models.load import best_device
from heatproof.report.book import Book
from heatproof.report.figures.localise import budget_figure, faithfulness_figure
from heatproof.run.config import study_from
from heatproof.run.engine import Result
from heatproof.run.progress import Progress
from heatproof.run.study import LIBRARIES_WITHOUT_WEIGHTS, Opened, open_study
from heatproof.store import RunFolder
from heatproof.studies.localise import tables, thesis
from heatproof.studies.localise.flags import KINDS, count_table, flag_table, overlap_of_methods, raise_flags
from heatproof.studies.localise.panels import Studio, pick_cases, pick_confused
from heatproof.studies.localise.pictures import Sifted, reasons, sift, write_list
from heatproof.studies.localise.scored import FLOORS, Scored, at_budget, budgets_of, read_scores
from heatproof.studies.localise.settings import PREPROCESS, LocaliseSettings, Thresholds
from heatproof.studies.settings import with_floors
from heatproof.studies.skeleton import local_spec, whole_run, write_study

ON_THE_PAGE = 8  # flagged images of each kind; the rest is in the table's files


@dataclass(frozen=True)
class LocaliseOutcome:
    """What a study left behind."""

    page: Path
    book: Book
    run: Result
    sifted: Sifted
    panels: tuple[Path, ...]


def localise_study(settings: LocaliseSettings, progress: Progress | None = None) -> LocaliseOutcome:
    """Run the whole protocol, or go on with it; OUT/summary.md is its page."""
    read_methods(settings.methods)
    kept_pixels(settings.budget, (224, 224))  # refuses a budget before anything is loaded
    opened = Opened(study_from(_config(settings)), settings.out)
    opened.device = best_device(settings.device)
    model = opened.model(opened.checkpoints[0].name)
    blank = torch.zeros(1, model.preprocess.channels, *model.preprocess.size)
    count = max(2, model.logits(blank).shape[1])
    if settings.class_names and len(settings.class_names) != count:
        raise InputError(
            f"class_names lists {len(settings.class_names)} names, but {model.name} has {count} classes"
        )
    sifted = sift(settings.kind, settings.images, count, settings.class_names or model.classes)
    if model.classes and not settings.class_names:
        sifted = with_model_classes(sifted, model, count)
    write_list(sifted, settings.out / "pictures.csv")
    steps = filter_steps(sifted, settings)
    images = {"root": str(sifted.root.resolve()), "class_names": list(sifted.classes)}
    study = write_study(settings.out / "study.toml", _config(settings, images))
    result = whole_run(study, settings.out / "run", progress)
    scored = read_scores(result.folder, settings.budget)
    if not scored.images:
        raise InputError(f"no picture could be used; see the rows 'image' in {settings.out / 'run'}")
    book = Book(settings.out, f"Localisation and faithfulness of {model.name}")
    _write_filter(book, sifted, steps, scored)
    write_report(book, scored, result.folder, settings)
    panels: list[Path] = []
    if settings.panels:
        studio = Studio(
            scored, result.folder.maps(), model, open_study(study).source, settings.out / "panels",
            settings.layer, settings.seed, settings.steps, settings.baseline,
        )  # fmt: skip
        panels = _write_panels(book, studio, scored, settings)
    return LocaliseOutcome(book.write(), book, result, sifted, tuple(panels))


def with_model_classes(sifted: Sifted, model: Model, count: int) -> Sifted:
    """The pictures' classes as the model numbers them, or a sentence where they are not the model's."""
    used = {label: sifted.classes[label] for _, label in sifted.entries}
    numbers = model_classes(used, set(used), model.classes, count, model.name)
    return replace(sifted, entries=tuple((entry, numbers[label]) for entry, label in sifted.entries))


def _config(settings: LocaliseSettings, images: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The run that the protocol asks for, in the form of run/config.py."""
    budgets = budgets_of(settings.budget)
    options = "".join(
        f", {name}={value!r}"
        for name, value, usual in (("steps", settings.steps, 100), ("baseline", settings.baseline, "blur"))
        if value != usual
    )
    curve = f"({options[2:]})" if options else ""
    measured = [at_budget(m, b) for b in budgets for m in ("mask_iou", "box_iou", "inside", "reachable")]
    measured += [at_budget("pointing", settings.budget), at_budget("filled", settings.budget)]
    run = {
        "seed": settings.seed, "batch_size": settings.batch_size, "targets": settings.target,
        "device": settings.device, "threads": settings.threads,
    }  # fmt: skip
    library = settings.model.partition(":")[0] in LIBRARIES_WITHOUT_WEIGHTS
    model = {
        "spec": local_spec(settings.model), "name": Path(settings.model).name,
        "layer": settings.layer,
        "checkpoints": [str(settings.checkpoint.resolve())] if settings.checkpoint else None,
        "pretrained": True if library and not settings.checkpoint else None,
    }  # fmt: skip
    pictures = {
        "kind": "csv", "path": "pictures.csv", "limit": settings.limit, "single_object": True,
        "box_share": list(settings.box_share), "seed": settings.seed, "options": dict(images or {}),
    }  # fmt: skip
    config: dict[str, Any] = {
        "methods": list(with_floors(settings.methods, FLOORS)),
        "metrics": ["accuracy", "recall", *measured, f"insertion{curve}", f"deletion{curve}"],
    }
    parts: dict[str, dict[str, Any]] = {
        "run": run,
        "model": model,
        "images": pictures,
        "preprocess": PREPROCESS[settings.preprocess],
    }
    return config | {name: {k: v for k, v in part.items() if v is not None} for name, part in parts.items()}


def filter_steps(sifted: Sifted, settings: LocaliseSettings) -> list[tuple[str, int]]:
    """How many pictures are left after each step of the thesis's filter."""
    source = open_source(
        "csv", settings.out / "pictures.csv", root=sifted.root, class_names=list(sifted.classes)
    )
    single = select(source, single_object=True)
    fitting = select(single, box_share=settings.box_share)
    low, high = settings.box_share
    steps = [
        ("pictures in the list", len(sifted.entries) + len(sifted.aside)),
        ("with a usable box and a known class", len(source)),
        ("with one box", len(single)),
        (f"whose box covers {low:.0%} to {high:.0%} of the picture", len(fitting)),
    ]
    if settings.limit:
        steps.append((f"drawn (limit {settings.limit})", min(settings.limit, len(fitting))))
    return steps


def _write_filter(book: Book, sifted: Sifted, steps: Sequence[tuple[str, int]], scored: Scored) -> None:
    book.heading("Pictures")
    book.text("\n".join(f"- {count:,} {what}" for what, count in steps))
    classes = len(set(scored.labels.values()))
    book.text(f"Scored: {len(scored.images):,} pictures of {classes} classes.")
    if sifted.aside:
        listed = [f"- {count}, such as {image}: {reason}" for reason, count, image in reasons(sifted.aside)]
        book.text(f"Set aside ({len(sifted.aside)}):\n\n" + "\n".join(listed[:20]))
    if scored.broken:
        listed = [f"- {image}: {reason}" for image, reason in scored.broken.items()]
        book.text(f"Could not be read ({len(scored.broken)}):\n\n" + "\n".join(listed[:20]))


def write_report(book: Book, scored: Scored, folder: RunFolder, settings: LocaliseSettings) -> None:
    """Tables, figures and flags, from the run folder alone."""
    seed, budgets = settings.seed, budgets_of(settings.budget)
    recall = tables.recall_value(scored, seed)
    book.heading("Results")
    book.text(
        f"Explained class: the {'true' if settings.target == 'label' else 'predicted'} one. Budget: "
        f"{scored.budget:.0%} of the pixels. Mean recall over classes: {recall.value:.3f} "
        f"(thesis, ResNet-18: {thesis.RECALL:.3f})."
    )
    book.table(tables.method_table(scored, "localisation", "Localisation", tables.LOCALISATION, seed))
    book.table(tables.method_table(scored, "faithfulness", "Faithfulness", tables.FAITHFULNESS, seed))
    book.heading("Against the thesis")
    found = thesis.orders(scored, seed)
    book.text(thesis.order_text(found))
    if found:
        book.table(thesis.order_table(found))
    book.heading("Other budgets")
    book.table(tables.budget_table(scored, budgets))
    floors = {method for method in scored.methods if method not in scored.real_methods}
    curves = {
        thesis.NAMES[m]: {one: [scored.macro(one, m, b).value for b in budgets] for one in scored.methods}
        for m in ("mask_iou", "box_iou", "inside")
    }
    reach = [scored.macro(scored.methods[0], "reachable", b).value for b in budgets]
    with budget_figure(budgets, curves, reach, floors, scored.budget) as figure:
        book.figure(figure, "budgets", "Localisation against the budget, means over classes; grey: floors")
    book.heading("Deletion and insertion")
    means = {
        kind: {
            one: [scored.macro(one, f"{kind}_at_{p}").value for p in range(0, 101, 10)]
            for one in scored.methods
        }
        for kind in ("deletion", "insertion")
    }
    with faithfulness_figure(means, floors, "probability of the class") as figure:
        book.figure(
            figure, "faithfulness",
            "Mean curves over classes: pixels taken away (deletion) or shown (insertion), the best first",
        )  # fmt: skip
    book.heading("By class")
    for table in tables.class_tables(scored, seed):
        book.table(table)
    tables.long_table(scored, seed).write(book.folder / "tables")
    _write_flags(book, scored, folder, settings.thresholds)


def _write_flags(book: Book, scored: Scored, folder: RunFolder, limits: Thresholds) -> None:
    flags = raise_flags(scored, stored_overlaps(scored, folder), limits)
    book.heading("Shortcut flags")
    book.text(
        "Rules for what the thesis finds by eye. A flag asks for a look at the picture; it proves nothing. "
        f"Settings: {', '.join(f'{k} = {v}' for k, v in asdict(limits).items() if v is not None)}."
    )
    book.table(count_table(flags, scored, limits))
    if flags:
        flag_table(flags, scored).write(book.folder / "tables")
        every = "[tables/flagged_images.csv](tables/flagged_images.csv)"
        book.text(f"Every flag with its image: {every}. Here are the worst of each kind.")
        kinds = [[flag for flag in flags if flag.kind == kind] for kind in KINDS]
        book.text(flag_table([flag for lot in kinds for flag in lot[:ON_THE_PAGE]], scored).markdown())


def stored_overlaps(scored: Scored, folder: RunFolder) -> dict[str, float]:
    """How much the methods' kept pixels overlap on each image; nothing where there is one method."""
    store, methods = folder.maps(), scored.real_methods
    if len(methods) < 2:
        return {}
    shared = [set(store.ids(scored.checkpoint, method)) for method in methods]
    ids = sorted(set.intersection(*shared))
    overlaps: dict[str, float] = {}
    for start in range(0, len(ids), 64):
        some = ids[start : start + 64]
        maps = {method: store.read(scored.checkpoint, method, some) for method in methods}
        overlaps |= overlap_of_methods(maps, scored.budget)
    return overlaps


def _write_panels(book: Book, studio: Studio, scored: Scored, settings: LocaliseSettings) -> list[Path]:
    flags = raise_flags(
        scored, stored_overlaps(scored, RunFolder.open(settings.out / "run")), settings.thresholds
    )
    cases = studio.cases(pick_cases(scored, flags, settings.panels))
    confused = studio.confused(pick_confused(scored, settings.panels))
    book.heading("Case studies")
    book.text(
        "Original with its box, heatmap, the five segments that speak most for the class, the ten that weigh "
        "most (green for, red against), the budget's pixels, deletion (red) and insertion (green)."
    )
    for path in cases:
        book.text(f"![{path.stem}](panels/{path.name})")
    if confused:
        book.heading("Confused classes")
        book.text(
            "Pictures that were classified wrongly, explained for the true and for the predicted class."
        )
        for path in confused:
            book.text(f"![{path.stem}](panels/{path.name})")
    return [*cases, *confused]
