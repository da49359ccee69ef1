"""Localisation and faithfulness under a fair budget: the thesis's protocol, end to end.

    sift      pictures with one box that covers 10 to 80 % of them (pictures.py; filters in images/source.py)
    run       all methods in one shared pass, localisation at every budget, insertion and deletion: the engine
    report    tables per class and as macro means, budget and faithfulness curves, shortcut flags, panels

The run is an ordinary run folder (OUT/run, from OUT/study.toml), so it can be killed and taken up again, and
everything but the panels is rebuilt from it without a model pass. keak2026budget.

Deviations: the floors (random, edges, centre) are always beside the methods; means carry 95 % intervals;
pictures whose label looks wrong to a person, which the thesis drops by hand, stay in unless `exclude` names
them; CAMs read behind the last activation, not in front of it, unless layer="last_conv" (the thesis: conv2 of
the last block) says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice, starmap
from pathlib import Path
from typing import Any

from heatproof.errors import InputError
from heatproof.explain.api import read_methods
from heatproof.explain.floors import is_floor
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
from heatproof.run.study import Opened, open_study
from heatproof.run.weights import LIBRARIES_WITHOUT_WEIGHTS
from heatproof.store import RunFolder
from heatproof.studies.localise import further, tables
from heatproof.studies.localise.groups import class_groups, excluded, group_table
from heatproof.studies.localise.panels import Studio, pick_cases, pick_confused
from heatproof.studies.localise.patterns import FEWEST, find_patterns
from heatproof.studies.localise.pictures import Aside, Sifted, reasons, sift, write_list
from heatproof.studies.localise.scored import Flag, Scored, at_budget, budgets_of, find_flags, read_scores
from heatproof.studies.localise.settings import FLOORS, PREPROCESS, FlagThresholds, LocaliseSettings
from heatproof.studies.settings import with_floors
from heatproof.studies.skeleton import local_spec, named_run, run_config, study_file

SHOWN_SWEPT = 3  # pictures
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
    opened = Opened(study_from(_config(settings)), settings.out, best_device(settings.device))
    model = opened.model(opened.checkpoints[0].name)
    sifted = known_pictures(settings, model)
    groups = class_groups(settings.groups, sifted.classes) if settings.groups else {}
    write_list(sifted, settings.out / "pictures.csv")
    steps = filter_steps(sifted, settings)
    images = {"root": str(sifted.root.resolve()), "class_names": list(sifted.classes)}
    result = named_run(settings.out, "run", _config(settings, images), progress)
    scored = read_scores(result.folder, settings.budget, settings.seed)
    if not scored.images:
        raise InputError(f"no picture could be used; see the rows 'image' in {settings.out / 'run'}")
    book = Book(settings.out, f"Localisation and faithfulness of {model.name}")
    _write_filter(book, sifted, steps, scored)
    flags = write_report(book, scored, result.folder, settings, groups)
    source = open_study(study_file(settings.out)).source
    studio = Studio(scored, result.folder.maps(), model, source, settings)
    _write_patterns(book, studio, flags)
    if settings.repeats > 1:
        _write_repeats(book, studio)
    if settings.segment_counts:
        _write_sweep(book, studio, images, progress)
    panels = _write_panels(book, studio, flags) if settings.panels else []
    return LocaliseOutcome(book.write(), book, result, sifted, tuple(panels))


def known_pictures(settings: LocaliseSettings, model: Model) -> Sifted:
    """The pictures, their classes numbered as the model does; a sentence where they are not the model's."""
    count, names = max(2, model.logits(model.preprocess.blank).shape[1]), settings.class_names
    model.read.need_one_class("a localisation study")
    if names and len(names) != count:
        raise InputError(f"class_names lists {len(names)} names, but {model.name} has {count} classes")
    sifted = without(sift(settings.kind, settings.images, count, names or model.classes), settings.exclude)
    if names or not model.classes:
        return sifted
    used = {label: sifted.classes[label] for _, label in sifted.entries}
    numbers = model_classes(used, set(used), model.classes, count, model.name)
    return replace(sifted, entries=tuple((entry, numbers[label]) for entry, label in sifted.entries))


def without(sifted: Sifted, exclude: str | None) -> Sifted:
    """Less what the user leaves out."""
    if exclude is None:
        return sifted
    labels, pictures = excluded(exclude, sifted.classes)
    asides = {
        entry.image: labels.get(label, f"it is listed in {Path(exclude).name}")
        for entry, label in sifted.entries
        if label in labels or entry.image in pictures
    }
    kept = tuple(pair for pair in sifted.entries if pair[0].image not in asides)
    if not kept:
        raise InputError(f"no picture is left: {exclude} leaves out all {len(sifted.entries)}")
    return replace(sifted, entries=kept, left_out=tuple(starmap(Aside, asides.items())))


def _config(
    settings: LocaliseSettings, images: Mapping[str, Any] | None = None, *, lime: Sequence[str] = ()
) -> dict[str, Any]:
    """The run that the protocol asks for, in the form of run/config.py; lime: the sweep over segments."""
    unusual = (("steps", settings.steps, 100), ("baseline", settings.baseline, "blur"))
    options = [f"{name}={value!r}" for name, value, usual in unusual if value != usual]
    curve, chosen = f"({', '.join([*options, 'adaptive=False'])})", settings.budget  # the thesis's own points
    areas = ("mask_iou", "box_iou", "inside", "reachable")
    measured = [at_budget(metric, budget) for budget in budgets_of(chosen) for metric in areas]
    measured += [at_budget(metric, chosen) for metric in ("pointing", "filled", "dispersion")]
    library = settings.model.partition(":")[0] in LIBRARIES_WITHOUT_WEIGHTS
    model = {
        "spec": local_spec(settings.model), "name": Path(settings.model).name, "layer": settings.layer,
        "head": settings.head,
        "checkpoints": [str(settings.checkpoint.resolve())] if settings.checkpoint else None,
        "pretrained": True if library and not settings.checkpoint else None,
    }  # fmt: skip
    pictures = {
        "kind": "csv", "path": "pictures.csv", "single_object": True,
        "limit": min(settings.limit or settings.subset, settings.subset) if lime else settings.limit,
        "box_share": list(settings.box_share), "seed": settings.seed, "options": dict(images or {}),
    }  # fmt: skip
    methods = lime or with_floors(settings.methods, FLOORS)
    metrics = ["accuracy", "recall", *measured, f"insertion{curve}", f"deletion{curve}"]
    own = PREPROCESS[settings.preprocess]
    return run_config(settings, methods, metrics, model, pictures, settings.target, preprocess=own)


def filter_steps(sifted: Sifted, settings: LocaliseSettings) -> list[tuple[str, int]]:
    """How many pictures are left after each step of the thesis's filter."""
    source = open_source(
        "csv", settings.out / "pictures.csv", root=sifted.root, class_names=list(sifted.classes)
    )
    single = select(source, single_object=True)
    fitting = select(single, box_share=settings.box_share)
    low, high = settings.box_share
    steps = [
        ("pictures in the list", len(sifted.entries) + len(sifted.aside) + len(sifted.left_out)),
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
    aside, left_out = (
        [f"- {count}, such as {image}: {reason}" for reason, count, image in reasons(lot)]
        for lot in (sifted.aside, sifted.left_out)
    )
    broken = [f"- {image}: {reason}" for image, reason in scored.broken.items()]
    for what, count, listed in (
        ("Left out, as asked", len(sifted.left_out), left_out),
        ("Set aside", len(sifted.aside), aside),
        ("Could not be read", len(broken), broken),
    ):
        if listed:
            book.text(f"{what} ({count}):\n\n" + "\n".join(listed[:20]))


def write_report(
    book: Book,
    scored: Scored,
    folder: RunFolder,
    settings: LocaliseSettings,
    groups: Mapping[str, set[int]] | None = None,
) -> list[Flag]:
    """Tables, figures and flags, from the run folder alone; the flags."""
    budgets = budgets_of(settings.budget)
    book.heading("Results")
    book.text(
        f"Explained class: the {'true' if settings.target == 'label' else 'predicted'} one. Budget: "
        f"{scored.budget:.0%} of the pixels. Mean recall over classes: {scored.mean_recall():.3f} "
        f"(thesis, ResNet-18: {tables.THESIS_RECALL:.3f})."
    )
    book.table(tables.method_table(scored, "localisation", "Localisation", tables.LOCALISATION))
    book.table(tables.method_table(scored, "faithfulness", "Faithfulness", tables.FAITHFULNESS))
    book.heading("Against the thesis")
    found = tables.orders(scored)
    book.text(tables.order_text(found))
    if found:
        book.table(tables.order_table(found))
    book.heading("Other budgets")
    book.table(tables.budget_table(scored, budgets))
    floors = set(filter(is_floor, scored.methods))
    located = {
        tables.NAMES[metric]: {m: [scored.macro(m, metric, b).value for b in budgets] for m in scored.methods}
        for metric in ("mask_iou", "box_iou", "inside")
    }
    reach = [scored.macro(scored.methods[0], "reachable", b).value for b in budgets]
    with budget_figure(budgets, located, reach, floors, scored.budget) as figure:
        book.figure(figure, "budgets", "Localisation against the budget, means over classes; grey: floors")
    book.heading("Deletion and insertion")
    tenths = range(0, 101, 10)
    walked = {
        kind: {m: [scored.macro(m, f"{kind}_at_{p}").value for p in tenths] for m in scored.methods}
        for kind in ("deletion", "insertion")
    }
    caption = "Mean curves over classes: pixels taken away (deletion) or shown (insertion), the best first"
    with faithfulness_figure(walked, floors, "probability of the class") as figure:
        book.figure(figure, "faithfulness", caption)
    book.table(further.sufficient_table(scored))
    book.table(further.dispersion_table(scored))
    if groups:
        book.heading("By group")
        table = group_table(scored, groups)
        if table is None:
            book.text("None of the groups has a picture here.")
        else:
            book.table(table)
    book.heading("By class")
    for table in tables.class_tables(scored):
        book.table(table)
    tables.long_table(scored).write(book.folder / "tables")
    flags = find_flags(scored, folder, settings.thresholds)
    _write_flags(book, scored, flags, settings.thresholds)
    return flags


def _write_flags(book: Book, scored: Scored, flags: list[Flag], limits: FlagThresholds) -> None:
    book.heading("Shortcut flags")
    book.text(
        "Rules for what the thesis finds by eye. A flag asks for a look at the picture; it proves nothing. "
        f"Settings: {', '.join(f'{k} = {v}' for k, v in asdict(limits).items() if v is not None)}."
    )
    book.table(tables.count_table(flags, scored, limits))
    if flags:
        tables.flag_table(flags, scored).write(book.folder / "tables")
        every = "[tables/flagged_images.csv](tables/flagged_images.csv)"
        book.text(f"Every flag with its image: {every}. Here are the worst of each kind.")
        kinds = groupby(flags, key=lambda flag: flag.kind)  # they are in order
        worst = [flag for _, lot in kinds for flag in islice(lot, ON_THE_PAGE)]
        book.text(tables.flag_table(worst, scored).markdown())


def _write_patterns(book: Book, studio: Studio, flags: list[Flag]) -> None:
    book.heading("What flagged pictures share")
    found = find_patterns(studio, flags)
    if not found:
        book.text(
            f"No class has {FEWEST} pictures that are faithful but off-object and look alike to the network."
        )
    for pattern in found:
        book.text(f"{pattern.sentence}\n\n![{pattern.class_name}](panels/{pattern.picture.name})")


def _write_repeats(book: Book, studio: Studio) -> None:
    scored, settings = studio.scored, studio.settings
    picked = [(image, "") for image in scored.images[: settings.subset]]
    batches = [batch for batch, _ in studio.lots(picked)]
    book.heading("Stability")
    book.table(further.repeated(studio.model, batches, scored.explained, settings))


def _write_sweep(book: Book, studio: Studio, images: Mapping[str, Any], progress: Progress | None) -> None:
    settings, methods = studio.settings, further.swept_methods(studio.settings)
    config = _config(settings, images, lime=list(methods.values()))
    result = named_run(settings.out, "segments", config, progress)
    book.heading("How many segments")
    scored = read_scores(result.folder, settings.budget, settings.seed)
    book.table(further.sweep_table(scored, methods))
    drawn = studio.segment_sheet(result.folder.maps(), methods, scored.images[:SHOWN_SWEPT])
    book.text(f"![LIME with other numbers of segments](panels/{drawn.name})")


def _write_panels(book: Book, studio: Studio, flags: list[Flag]) -> list[Path]:
    scored, count = studio.scored, studio.settings.panels
    cases = studio.cases(pick_cases(scored, flags, count))
    confused = studio.confused(pick_confused(scored, count))
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
