"""Localisation and faithfulness under a fixed pixel budget: the thesis's protocol, end to end.

    sift      images with one box that covers 10 to 80 % of them (images.py; filters in images/source.py)
    run       all methods in one shared pass, localisation at every budget, insertion and deletion: the engine
    report    tables per class and as macro means, shortcut flags (results.py), panels (panels.py)

The run is an ordinary run folder (OUT/run, from OUT/study.toml), so it can be killed and resumed, and
everything but the panels is rebuilt from it without a model pass. keak2026budget.

Deviations: the floors (random, edges, centre) are always beside the methods; means carry 95 % intervals;
images whose label looks wrong to a person, which the thesis drops by hand, stay in unless `exclude` names
them; CAMs read behind the last activation, not in front of it, unless layer="last_conv" (the thesis: conv2 of
the last block) says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heatproof.errors import InputError
from heatproof.explain.api import read_methods
from heatproof.images import open_source, select
from heatproof.metrics.interventions import ALIKE
from heatproof.metrics.localisation import kept_pixels
from heatproof.models import Model
from heatproof.models.load import best_device
from heatproof.models.names import model_classes, placed_spec
from heatproof.run.config import study_from
from heatproof.run.engine import Result
from heatproof.run.progress import Progress
from heatproof.run.study import LIBRARIES_WITHOUT_WEIGHTS, ResolvedStudy, open_study
from heatproof.studies.common import Outcome, named_run, run_config, study_file, with_floors, write_page
from heatproof.studies.localise import results as rows
from heatproof.studies.localise.images import (
    Sifted,
    class_groups,
    cue_rows,
    read_cues,
    reasons,
    sift,
    without,
    write_list,
)
from heatproof.studies.localise.panels import Studio, pick_cases, pick_confused
from heatproof.studies.settings import LOCALISE_FLOORS, PREPROCESS, LocaliseSettings


@dataclass(frozen=True)
class LocaliseOutcome(Outcome):
    """Results of a study."""

    run: Result
    sifted: Sifted
    panels: tuple[Path, ...]


def localise_study(settings: LocaliseSettings, progress: Progress | None = None) -> LocaliseOutcome:
    """Run or resume the whole protocol; OUT/summary.md is its page."""
    methods = rows.swept_methods(settings)
    read_methods([*settings.methods, *methods.values()])
    kept_pixels(settings.budget, (224, 224))  # refuses a budget before anything is loaded
    opened = ResolvedStudy(study_from(_config(settings)), settings.out, best_device(settings.device))
    model = opened.model(opened.checkpoints[0].name)
    sifted = known_images(settings, model)
    groups = class_groups(settings.groups, sifted.classes) if settings.groups else {}
    cues = read_cues(settings.cues, sifted.classes, groups) if settings.cues else []
    write_list(sifted, settings.out / "pictures.csv")
    steps = filter_steps(sifted, settings)
    images = {"root": str(sifted.root.resolve()), "class_names": list(sifted.classes)}
    run = named_run(settings.out, "run", _config(settings, images), progress)
    results = rows.read_scores(run.folder, settings.budget, settings.seed)
    if not results.images:
        raise InputError(f"no image could be used; see the rows 'image' in {settings.out / 'run'}")
    flags = rows.find_flags(results, run.folder, settings.thresholds)
    studio = Studio(results, run.folder.maps(), model, open_study(study_file(settings.out)).source, settings)
    content = rows.table_content(results, groups, flags, settings.thresholds)
    make = rows.TABLES.page(**content)
    for table in filter(None, map(make, ("classes", "flagged_images"))):  # only as files
        table.write(settings.out / "tables")
    content |= {"repeats": max(2, settings.repeats), "variants": list(methods.items())}
    if settings.repeats > 1:
        subset = {image: results.explained[image] for image in results.images[: settings.subset]}
        stable = rows.stability(model, studio.batches(subset), subset, settings.methods, settings)
        content |= {"repeated": [(method, *of) for method, of in stable.items()], "subset": len(subset)}
    segments = ""
    if methods:
        config = _config(settings, images, lime=list(dict.fromkeys(methods.values())))
        sweep = named_run(settings.out, "segments", config, progress).folder
        swept = rows.read_scores(sweep, settings.budget, settings.seed)
        loaded = studio.batches(swept.images)
        content |= {
            "swept": swept, "swept_images": len(swept.images),
            "used": studio.segments_used(methods, swept.images),
            "stable": rows.stability(model, loaded, swept.explained, methods.values(), settings),
        }  # fmt: skip
        segments = studio.segment_sheet(sweep.maps(), methods, swept.images).name
    shared, features = studio.shared()
    cases = studio.cases(pick_cases(results, flags, settings.panels))
    confused = studio.confused(pick_confused(results, settings.panels))
    book = write_page(
        settings.out, "studies/localise/page.md", rows.TABLES, rows.report_figures(results), **content,
        model=model.name, steps=steps, settings=settings, sifted=sifted, reasons=reasons,
        objects=studio.objects(), shared=shared, alike=ALIKE, method=studio.methods[0],
        cue_answers=cue_rows(model, cues, settings.seed) if cues else [],
        recall=rows.macro_value(results.recall(), results.seed).value, thesis_recall=rows.THESIS_RECALL,
        probability=rows.macro_value(results.by_class(results.probability())).value,
        thresholds=vars(settings.thresholds).items(),
        worst=rows.worst_flags(flags, results), patterns=studio.patterns(), segments=segments,
        cases=cases, confused=confused, features=features,
    )  # fmt: skip
    return LocaliseOutcome(book, run, sifted, (*cases, *confused))


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
    measured = [rows.at_budget(metric, budget) for budget in rows.budgets_of(chosen) for metric in areas]
    measured += [rows.at_budget(metric, chosen) for metric in ("pointing", "filled", "dispersion")]
    measured.append("centre_bias")
    library = settings.model.partition(":")[0] in LIBRARIES_WITHOUT_WEIGHTS
    model = {
        "spec": placed_spec(settings.model, Path.cwd()), "name": Path(settings.model).name,
        "layer": settings.layer, "head": settings.head,
        "checkpoints": [str(settings.checkpoint.resolve())] if settings.checkpoint else None,
        "pretrained": True if library and not settings.checkpoint else None,
    }  # fmt: skip
    listed = {
        "kind": "csv", "path": "pictures.csv", "single_object": True,
        "limit": min(settings.limit or settings.subset, settings.subset) if lime else settings.limit,
        "box_share": list(settings.box_share), "seed": settings.seed, "options": dict(images or {}),
    }  # fmt: skip
    methods = lime or with_floors(settings.methods, LOCALISE_FLOORS)
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
        ("images in the list", len(sifted.entries) + len(sifted.aside) + len(sifted.left_out)),
        ("with a usable box and a known class", len(source)),
        ("with one box", len(single)),
        (f"whose box covers {low:.0%} to {high:.0%} of the image", len(fitting)),
    ]
    if settings.limit:
        steps.append((f"drawn (limit {settings.limit})", min(settings.limit, len(fitting))))
    return steps
