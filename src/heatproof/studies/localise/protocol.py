"""Localisation and faithfulness under a fair budget: the thesis's protocol, end to end.

    sift      images with one box that covers 10 to 80 % of them (images.py; filters in images/source.py)
    run       all methods in one shared pass, localisation at every budget, insertion and deletion: the engine
    report    tables per class and as macro means (results.py), shortcut flags (flags.py), panels (panels.py)

The run is an ordinary run folder (OUT/run, from OUT/study.toml), so it can be killed and resumed, and
everything but the panels is rebuilt from it without a model pass. keak2026budget.

Deviations: the floors (random, edges, centre) are always beside the methods; means carry 95 % intervals;
images whose label looks wrong to a person, which the thesis drops by hand, stay in unless `exclude` names
them; CAMs read behind the last activation, not in front of it, unless layer="last_conv" (the thesis: conv2 of
the last block) says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from heatproof.errors import InputError
from heatproof.explain.api import read_methods
from heatproof.images import open_source, select
from heatproof.metrics.localisation import kept_pixels
from heatproof.models import Model
from heatproof.models.load import best_device
from heatproof.models.names import model_classes
from heatproof.report.figures.localise import curve_figure
from heatproof.report.markdown_report import MarkdownReport
from heatproof.run.config import study_from
from heatproof.run.engine import Result
from heatproof.run.progress import Progress
from heatproof.run.study import ResolvedStudy, open_study
from heatproof.run.weights import LIBRARIES_WITHOUT_WEIGHTS
from heatproof.store import RunFolder
from heatproof.studies.common import local_spec, named_run, run_config, study_file
from heatproof.studies.localise import results
from heatproof.studies.localise.flags import Flag, count_table, find_flags, flag_table
from heatproof.studies.localise.images import Sifted, class_groups, reasons, sift, without, write_list
from heatproof.studies.localise.panels import FEWEST, Studio, pick_cases, pick_confused
from heatproof.studies.localise.results import COLUMNS, Scored, at_budget, budgets_of, read_scores
from heatproof.studies.localise.settings import FLOORS, PREPROCESS, LocaliseSettings
from heatproof.studies.settings import with_floors

SHOWN_SWEPT = 3  # images
ON_THE_PAGE = 8  # flagged images of each kind; the rest is in the table's files


@dataclass(frozen=True)
class LocaliseOutcome:
    """Results of a study."""

    page: Path
    book: MarkdownReport
    run: Result
    sifted: Sifted
    panels: tuple[Path, ...]


def localise_study(settings: LocaliseSettings, progress: Progress | None = None) -> LocaliseOutcome:
    """Run or resume the whole protocol; OUT/summary.md is its page."""
    read_methods(settings.methods)
    kept_pixels(settings.budget, (224, 224))  # refuses a budget before anything is loaded
    opened = ResolvedStudy(study_from(_config(settings)), settings.out, best_device(settings.device))
    model = opened.model(opened.checkpoints[0].name)
    sifted = known_images(settings, model)
    groups = class_groups(settings.groups, sifted.classes) if settings.groups else {}
    write_list(sifted, settings.out / "pictures.csv")
    steps = filter_steps(sifted, settings)
    images = {"root": str(sifted.root.resolve()), "class_names": list(sifted.classes)}
    result = named_run(settings.out, "run", _config(settings, images), progress)
    scored = read_scores(result.folder, settings.budget, settings.seed)
    if not scored.images:
        raise InputError(f"no picture could be used; see the rows 'image' in {settings.out / 'run'}")
    book = MarkdownReport(settings.out, f"Localisation and faithfulness of {model.name}")
    _write_filter(book, sifted, steps, scored)
    flags = write_report(book, scored, result.folder, settings, groups)
    source = open_study(study_file(settings.out)).source
    studio = Studio(scored, result.folder.maps(), model, source, settings)
    book.heading("What flagged pictures share")
    none = f"No class has {FEWEST} pictures that are faithful but off-object and look alike to the network."
    for text in studio.patterns(flags) or [none]:
        book.text(text)
    if settings.repeats > 1:
        book.heading("Stability")
        batches = studio.batches(scored.images[: settings.subset])
        book.table(results.repeat_table(model, batches, scored.explained, settings))
    if settings.segment_counts:
        _write_sweep(book, studio, images, progress)
    panels = _write_panels(book, studio, flags) if settings.panels else []
    return LocaliseOutcome(book.write(), book, result, sifted, tuple(panels))


def known_images(settings: LocaliseSettings, model: Model) -> Sifted:
    """The images, their classes numbered as the model does.

    Raises InputError if the classes are not the model's.
    """
    count, names = max(2, model.logits(model.preprocess.blank).shape[1]), settings.class_names
    model.head.need_one_class("a localisation study")
    if names and len(names) != count:
        raise InputError(f"class_names lists {len(names)} names, but {model.name} has {count} classes")
    sifted = sift(settings.kind, settings.images, count, names or model.classes)
    if settings.exclude is not None:
        sifted = without(sifted, settings.exclude)
    if names or not model.classes:
        return sifted
    used = {label: sifted.classes[label] for _, label in sifted.entries}
    numbers = model_classes(used, set(used), model.classes, count, model.name)
    return replace(sifted, entries=tuple((entry, numbers[label]) for entry, label in sifted.entries))


def _config(
    settings: LocaliseSettings, images: Mapping[str, Any] | None = None, *, lime: Sequence[str] = ()
) -> dict[str, Any]:
    """The configuration of the run, in the form of run/config.py; lime: the sweep over segments."""
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
    listed = {
        "kind": "csv", "path": "pictures.csv", "single_object": True,
        "limit": min(settings.limit or settings.subset, settings.subset) if lime else settings.limit,
        "box_share": list(settings.box_share), "seed": settings.seed, "options": dict(images or {}),
    }  # fmt: skip
    methods = lime or with_floors(settings.methods, FLOORS)
    metrics = ["accuracy", "recall", *measured, f"insertion{curve}", f"deletion{curve}"]
    own = PREPROCESS[settings.preprocess]
    return run_config(settings, methods, metrics, model, listed, settings.target, preprocess=own)


def filter_steps(sifted: Sifted, settings: LocaliseSettings) -> list[tuple[str, int]]:
    """How many images are left after each step of the thesis's filter."""
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


def _write_filter(
    book: MarkdownReport, sifted: Sifted, steps: Sequence[tuple[str, int]], scored: Scored
) -> None:
    book.heading("Pictures")
    book.text("\n".join(f"- {count:,} {what}" for what, count in steps))
    classes = len(set(scored.labels.values()))
    book.text(f"Scored: {len(scored.images):,} pictures of {classes} classes.")
    aside, left_out = (
        [f"- {count}, such as {image}: {reason}" for reason, count, image in reasons(of)]
        for of in (sifted.aside, sifted.left_out)
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
    book: MarkdownReport,
    scored: Scored,
    folder: RunFolder,
    settings: LocaliseSettings,
    groups: Mapping[str, set[int]] | None = None,
) -> list[Flag]:
    """Write tables, figures and flags from the run folder alone; returns the flags."""
    book.heading("Results")
    recall = results.macro_value(scored.recall(), scored.seed).value
    book.text(
        f"Explained class: the {'true' if settings.target == 'label' else 'predicted'} one. Budget: "
        f"{scored.budget:.0%} of the pixels. Mean recall over classes: {recall:.3f} "
        f"(thesis, ResNet-18: {results.THESIS_RECALL:.3f})."
    )
    book.table(results.method_table(scored, "localisation", "Localisation", results.LOCALISATION))
    book.table(results.method_table(scored, "faithfulness", "Faithfulness", results.FAITHFULNESS))
    book.heading("Against the thesis")
    compared = results.orders(scored)
    book.text(results.order_text(compared))
    if compared:
        book.table(results.ORDER.fill((order,) for order in compared))
    book.heading("Other budgets")
    budgets, methods = budgets_of(settings.budget), scored.methods
    located = {
        COLUMNS[metric].name: {m: [scored.macro(m, metric, b).value for b in budgets] for m in methods}
        for metric in ("mask_iou", "box_iou", "inside")
    }
    reach = [scored.macro(methods[0], "reachable", b).value for b in budgets]
    book.table(results.budget_table(scored, located["Mask IoU"] | {"reachable": reach}, budgets))
    percents = [100 * budget for budget in budgets]
    with curve_figure(located, percents, "kept pixels, %", reach, 100 * scored.budget) as figure:
        book.figure(figure, "budgets", "Localisation against the budget, means over classes; grey: floors")
    book.heading("Deletion and insertion")
    tenths = range(0, 101, 10)
    walked = {
        kind: {m: [scored.macro(m, f"{kind}_at_{p}").value for p in tenths] for m in methods}
        for kind in ("deletion", "insertion")
    }
    caption = "Mean curves over classes: pixels taken away (deletion) or shown (insertion), the best first"
    with curve_figure(walked, tenths, "pixels, %", ylabel="probability of the class") as figure:
        book.figure(figure, "faithfulness", caption)
    book.table(results.sufficient_table(scored))
    book.table(results.dispersion_table(scored))
    if groups:
        book.heading("By group")
        table = results.group_table(scored, groups)
        if table.rows:
            book.table(table)
        else:
            book.text("None of the groups has a picture here.")
    book.heading("By class")
    for table in results.class_tables(scored):
        book.table(table)
    results.long_table(scored).write(book.folder / "tables")
    flags = find_flags(scored, folder, settings.thresholds)
    book.heading("Shortcut flags")
    limits = asdict(settings.thresholds).items()
    book.text(
        "Rules for what the thesis finds by eye. A flag asks for a look at the picture; it proves nothing. "
        f"Settings: {', '.join(f'{k} = {v}' for k, v in limits if v is not None)}."
    )
    book.table(count_table(flags, scored, settings.thresholds))
    if flags:
        flag_table(flags, scored).write(book.folder / "tables")
        every = "[tables/flagged_images.csv](tables/flagged_images.csv)"
        book.text(f"Every flag with its image: {every}. Here are the worst of each kind.")
        kinds = groupby(flags, key=lambda flag: flag.kind)  # they are in order
        worst = [flag for _, of in kinds for flag in islice(of, ON_THE_PAGE)]
        book.text(flag_table(worst, scored).markdown())
    return flags


def _write_sweep(
    book: MarkdownReport, studio: Studio, images: Mapping[str, Any], progress: Progress | None
) -> None:
    settings, methods = studio.settings, results.swept_methods(studio.settings)
    config = _config(settings, images, lime=list(methods.values()))
    result = named_run(settings.out, "segments", config, progress)
    book.heading("How many segments")
    scored = read_scores(result.folder, settings.budget, settings.seed)
    book.table(results.sweep_table(scored, methods))
    drawn = studio.segment_sheet(result.folder.maps(), methods, scored.images[:SHOWN_SWEPT])
    book.text(f"![LIME with other numbers of segments](panels/{drawn.name})")


def _write_panels(book: MarkdownReport, studio: Studio, flags: list[Flag]) -> list[Path]:
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
