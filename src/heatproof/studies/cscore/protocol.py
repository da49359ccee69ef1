"""C-Score over training: does the model look at the same place for every image of a class, and since when?

    split     four fifths of the pictures train, one fifth is held out, each class in proportion
    train     two phases (train/protocols.py), weights kept at seven epochs; or weights that exist are taken
    run       six CAMs at every checkpoint on the held-out pictures, C-Score per class: the engine
    sweep     the C-Score of every CAM at every depth of the network, at the end of each phase
    report    tables, figures, alarms, and a recommendation with its evidence (page.py)
    beside    several networks, each in a folder of its own, on one page (networks.py)

The run is an ordinary run folder (OUT/run, from OUT/study.toml): it can be killed and taken up again, and so
can the training (OUT/training). elangovan2026cscore.

Deviations: every number carries a 95 % interval; gold lists are drawn anew at each checkpoint (see
metrics/gold.py). With weights that exist nothing is held out: all pictures given are scored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heatproof.errors import InputError
from heatproof.explain.api import read_methods
from heatproof.images import Failure, Source, open_source
from heatproof.images.source import Sample
from heatproof.metrics.gold import FIRST, ListRule
from heatproof.models import Model, load_model
from heatproof.models.activated import default_layer
from heatproof.models.layers import known_scales, searched_scales
from heatproof.models.load import best_device
from heatproof.report.book import Book
from heatproof.run.config import study_from
from heatproof.run.engine import Result
from heatproof.run.progress import Progress
from heatproof.run.study import open_study
from heatproof.run.weights import find_checkpoints, seeded_builder
from heatproof.store import RunFolder
from heatproof.studies.cscore import networks, page
from heatproof.studies.cscore.networks import phase_ends
from heatproof.studies.cscore.settings import CscoreSettings
from heatproof.studies.skeleton import (
    local_spec,
    named_run,
    need_one_class,
    run_config,
    study_file,
    write_rows,
)
from heatproof.train import TrainProgress, read_data, stratified_split, two_phase
from heatproof.train.recipe import History
from heatproof.verdict.trajectory import Trajectory

METRICS = ("accuracy", "recall", "auc")
CORNERS = ("x0", "y0", "x1", "y1")
FRAME = ("width", "height")
LAST = "last"  # an anchor
DEPTHS_SWEPT = 5

Told = Callable[[TrainProgress], object]
TellOf = Callable[[str], Told]  # of a network
Images = Mapping[str, Any]  # the table of a study file


@dataclass(frozen=True)
class CscoreOutcome:
    """What a study left behind."""

    page: Path
    book: Book
    run: Result


def cscore_study(
    settings: CscoreSettings, progress: Progress | None = None, training: Told | None = None
) -> CscoreOutcome:
    """Run the whole protocol, or go on with it; OUT/summary.md is its page."""
    source, root = check(settings)
    untrained = build(settings, len(source.classes))
    need_one_class(untrained, "a C-Score study")
    history: History | None = None
    failures: list[Failure] = []
    weights = [str(Path(file).expanduser().absolute()) for file in settings.checkpoints]
    scored = list(range(len(source)))
    if not weights:
        labels = [sample.label for sample in source.samples]
        trained, held_out = stratified_split(labels, settings.held_out, settings.seed)
        scored = held_out.tolist()
        history, failures = train(settings, source, trained.tolist(), scored, training)
        weights = ["training/epoch*.safetensors"]
    samples = [source.samples[i] for i in scored]
    write_rows(settings.out / "pictures.csv", *listing(samples, source.classes, root))
    images = {
        "kind": "csv", "path": "pictures.csv",
        "options": {"root": str(root), "class_names": list(source.classes)},
    }  # fmt: skip
    layer = settings.layer or paper_layer(untrained)
    places = source.boxed or bool(source.parts)
    more = ("localise",) if places else ()
    config = config_of(settings, images, weights, settings.methods, layer, more)
    result = named_run(settings.out, "run", config, progress)
    ends = phase_ends(Trajectory.from_run(result.folder), history)
    swept = sweep_depths(settings, images, ends, progress) if settings.sweep else {}
    book = Book(settings.out, f"C-Score of {settings.model} over training" if history else "C-Score")
    share = settings.held_out if history else None
    page.write(book, result.folder, history, ends, swept, share, failures, places)
    return CscoreOutcome(book.write(), book, result)


@dataclass(frozen=True)
class NetworksOutcome:
    """What a study of several networks left behind."""

    page: Path
    book: Book
    broken: list[dict[str, str]]  # pictures that could not be used, of all of them


def networks_study(
    settings: CscoreSettings, progress: Progress | None = None, training: TellOf | None = None
) -> NetworksOutcome:
    """One study after the other, each in a folder of its own, then all of them on one page.

    training: called with a network's name, gives what is told about its training.
    """
    if len(settings.networks) + len(settings.beside) < 2:
        raise InputError("one network alone has nothing beside it; name two or more, or finished studies")
    finished = [networks.read_network(Path(folder)) for folder in settings.beside]
    own = [
        replace(settings, model=spec, networks=(), beside=(), out=settings.out / folder_name(spec))
        for spec in settings.networks
    ]
    for one in own:  # what cannot work is refused before the first is trained
        build(one, len(check(one)[0].classes))
    broken: list[dict[str, str]] = []
    found, places = [], {}
    for one in own:
        outcome = cscore_study(one, progress, training(one.model) if training else None)
        broken += outcome.run.broken
        found.append(networks.read_network(one.out, one.model))
        places[one.model] = f"{one.out.name}/{outcome.page.name}"
    found += finished
    names = [one.name for one in found]
    named = [
        one if names.count(one.name) == 1 else replace(one, name=f"{one.name} ({k})")
        for k, one in enumerate(found, 1)
    ]
    book = Book(settings.out, "C-Score of several networks")
    networks.write(book, named, lambda one: places.get(one.name))
    return NetworksOutcome(book.write(), book, broken)


def folder_name(spec: str) -> str:
    """
    >>> folder_name("torchvision:densenet201"), folder_name("nets/mine.py:build")
    ('torchvision-densenet201', 'mine.py-build')
    """
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", spec.rpartition("/")[2] or spec).strip("-") or "network"


def listing(
    samples: Sequence[Sample], classes: Sequence[str], root: Path
) -> tuple[list[str], list[list[object]]]:
    """A CSV manifest of pictures with their boxes and masks, as head and rows: one for each box."""
    parts = sorted({part for sample in samples for part in sample.masks})
    boxed = any(sample.boxes for sample in samples)
    head = ["path", "label", *(f"mask_{part}" for part in parts), *((*CORNERS, *FRAME) if boxed else ())]
    rows: list[list[object]] = []
    for sample in samples:
        masks = [os.path.relpath(sample.masks[part], root) if part in sample.masks else "" for part in parts]
        own = [sample.id, classes[sample.label or 0], *masks]
        frame = sample.frame or ("", "")
        rows += [[*own, *box, *frame] for box in sample.boxes]
        if not sample.boxes:
            rows.append([*own, *[""] * (6 * boxed)])
    return head, rows


def check(settings: CscoreSettings) -> tuple[Source, Path]:
    """The pictures and where their names start; what cannot work is refused before anything is trained."""
    read_methods(settings.methods)
    if not settings.images:
        raise InputError("no pictures were named; give a folder with one folder for each class")
    source, root = pooled(settings)
    if len(source.classes) < 2:
        raise InputError(
            f"the pictures have one class only ({source.classes[0]}); a classifier needs at least two"
        )
    last = settings.last_epoch
    if not settings.checkpoints and not any(1 <= epoch <= last for epoch in settings.keep):
        raise InputError(f"no checkpoint would be kept: there are {last} epochs and keep names none of them")
    return source, root


def pooled(settings: CscoreSettings) -> tuple[Source, Path]:
    """One source over all places named, and their common folder; a class may have pictures in each."""
    found: list[tuple[Path, str, Sample]] = []
    for path in settings.images:
        source = open_source(settings.kind, path)
        if not source.labelled:
            raise InputError(f"the pictures of {path} have no labels; put them in one folder for each class")
        known = [(sample, sample.label) for sample in source.samples if sample.label is not None]
        found += [(Path(s.content).resolve(), source.classes[label], s) for s, label in known]
    root = Path(os.path.commonpath([path.parent for path, *_ in found]))
    listed = settings.out / "all-pictures.csv"
    classes = sorted({name for _, name, _ in found})
    samples = [
        replace(sample, id=path.relative_to(root).as_posix(), label=classes.index(name))
        for path, name, sample in found
    ]
    write_rows(listed, *listing(samples, classes, root))
    drawn = {"limit": settings.limit, "seed": settings.seed}
    return open_source("csv", listed, root=root, class_names=classes, **drawn), root


def train(
    settings: CscoreSettings, source: Source, trained: list[int], held_out: list[int], told: Told | None
) -> tuple[History, list[Failure]]:
    """The two phases, from where they were left, and the pictures that could not be read."""
    model = build(settings, len(source.classes))
    model.module.to(best_device(settings.device))
    data, failed = read_data(source, model.preprocess, trained)
    valid, _ = read_data(source, model.preprocess, held_out)
    last = settings.last_epoch
    history = two_phase(
        model, data, valid, settings.out / "training", settings.seed,
        sorted({e for e in settings.keep if e <= last} | {last}), told,
        head_epochs=settings.head_epochs, full_epochs=settings.full_epochs, head_lr=settings.head_lr,
        full_lr=settings.full_lr, label_smoothing=settings.label_smoothing, clip=settings.clip,
        first_depth=settings.first_phase, batch_size=settings.train_batch, amp=settings.amp,
        transforms=settings.transforms,
        class_weights="balanced" if settings.class_weights else None, gradients=settings.gradients,
    )  # fmt: skip
    return history, failed


def build(settings: CscoreSettings, classes: int) -> Model:
    """The network before training, its new head drawn from the seed."""
    with seeded_builder(settings.seed):
        return load_model(
            settings.model, num_classes=classes, pretrained=settings.pretrained, head=settings.head,
            **settings.options,
        )  # fmt: skip


def paper_layer(model: Model) -> str | None:
    """The end of the last stage, which the paper reads in its three networks; else None, the default."""
    of_the_paper = re.search("densenet|inception_?v3|resnet50v2", model.name, re.IGNORECASE)
    scales = known_scales(model) if of_the_paper else None
    return scales[-1] if scales else None


def config_of(
    settings: CscoreSettings,
    images: Images,
    weights: Sequence[str],
    methods: Sequence[str],
    layer: str | None,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """A run over the pictures that are scored. more: metrics."""
    model = {
        "spec": local_spec(settings.model), "num_classes": len(images["options"]["class_names"]),
        "checkpoints": list(weights), "layer": layer, "name": settings.model, "head": settings.head,
        "options": dict(settings.options),
    }  # fmt: skip
    rule = ListRule(settings.tau, settings.weights, settings.anchor)  # type: ignore[arg-type]
    if rule.anchor == LAST:
        plain = study_from(run_config(settings, methods, METRICS, model, images))
        rule = replace(rule, anchor=find_checkpoints(plain, settings.out)[-1].name)
    return run_config(settings, methods, (*METRICS, rule.text, *more), model, images)


def sweep_depths(
    settings: CscoreSettings, images: Images, ends: tuple[str, str], progress: Progress | None
) -> dict[str, RunFolder]:
    """The C-Score of every CAM of one layer at every depth, one run folder each."""
    cams = [
        call.text for call in read_methods(settings.methods) if "activations" in call.entry.needs
    ]  # those of several layers have depths of their own
    if not cams:
        return {}
    own = replace(settings, anchor=settings.anchor if settings.anchor in (None, FIRST, LAST) else None)
    opened = open_study(study_file(settings.out))
    files = [str(c.file) for c in opened.checkpoints if c.name in ends and c.file is not None]
    model = opened.model(ends[-1])
    found: dict[str, RunFolder] = {}
    for number, layer in enumerate(depths(model, settings.layer or paper_layer(model))):
        config = config_of(own, images, files, cams, layer)
        found[layer] = named_run(settings.out, f"depth-{number}", config, progress).folder
    return found


def depths(model: Model, layer: str | None) -> tuple[str, ...]:
    """Layers from early to late: the last one at every size of the picture inside the network."""
    main = layer or default_layer(model)
    try:
        return searched_scales(model, model.preprocess.blank, main, DEPTHS_SWEPT)
    except InputError:
        return known_scales(model) or ()
