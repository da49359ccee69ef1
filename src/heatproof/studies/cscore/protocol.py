"""C-Score over training: consistency of the maps of a class at every checkpoint.

    split     four fifths of the images train, one fifth is held out, each class in proportion
    train     two phases (train/protocols.py), weights stored at seven epochs; or existing weights are used
    run       six CAMs at every checkpoint on the held-out images, C-Score per class: the engine
    sweep     the C-Score of every CAM at every depth of the network, at the end of each phase
    report    tables, alarms, recommendations and figures on a page (results.py)

The run is an ordinary run folder (OUT/run, from OUT/study.toml and OUT/pictures.csv): it can be killed and
resumed, and so can the training (OUT/training). elangovan2026cscore.

Deviations: every number carries a 95 % interval; gold lists are drawn anew at each checkpoint (see
metrics/classifier.py). With existing weights nothing is held out: all images given are scored.
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
from heatproof.images import Failure, Source, open_source, select
from heatproof.images.file_sources import CORNERS
from heatproof.images.source import Sample
from heatproof.metrics.classifier import ListRule
from heatproof.models import Model, load_model
from heatproof.models.layers import default_layer, known_scales, searched_scales
from heatproof.models.load import best_device
from heatproof.models.names import placed_spec
from heatproof.run.config import study_from
from heatproof.run.engine import Result
from heatproof.run.progress import Progress
from heatproof.run.study import ResolvedStudy, find_checkpoints, open_study, seeded_builder
from heatproof.store import RunFolder
from heatproof.store.scores import FIRST
from heatproof.studies import common
from heatproof.studies.common import Outcome, named_run, run_config, some, study_file
from heatproof.studies.cscore import results
from heatproof.studies.settings import CscoreSettings
from heatproof.train import TrainProgress, read_data, stratified_split, two_phase
from heatproof.train.recipe import History
from heatproof.verdict.alarms import Alarm, find_alarms
from heatproof.verdict.trajectory import Trajectory

METRICS = ("accuracy", "recall", "f1", "auc")
TRAINING = ("head_epochs", "full_epochs", "head_lr", "full_lr", "label_smoothing", "clip", "amp",
            "transforms", "gradients")  # fmt: skip
LAST = "last"  # an anchor
DEPTHS_SWEPT = 5
ProgressCallback = Callable[[str, TrainProgress], object]  # with the network's name


@dataclass(frozen=True)
class CscoreOutcome(Outcome):
    """Results of a study of one or several networks, or of new weights against a reference."""

    runs: Sequence[Result]
    fell: Sequence[results.Move] = ()  # scores that are worse than those of the reference
    alarms: Sequence[Alarm] = ()  # of the new weights

    @property
    def run(self) -> Result:
        return self.runs[-1]

    @property
    def broken(self) -> list[dict[str, str]]:
        """Images that could not be used."""
        return [row for run in self.runs for row in run.broken]


def cscore_study(
    settings: CscoreSettings, progress: Progress | None = None, training: ProgressCallback | None = None
) -> CscoreOutcome:
    """Run or resume the whole protocol; OUT/summary.md is its page."""
    source, root = check(settings)
    untrained = build(settings, len(source.classes))
    common.need_one_class(untrained, "a C-Score study")
    history: History | None = None
    failures: list[Failure] = []
    weights = [str(Path(file).expanduser().absolute()) for file in settings.checkpoints]
    samples: Sequence[Sample] = source.samples
    if not weights:
        labels = [sample.label for sample in samples]
        trained, held_out = (
            part.tolist() for part in stratified_split(labels, settings.held_out, settings.split_seed)
        )
        history, failures = train(settings, source, trained, held_out, training)
        weights, samples = ["training/epoch*.safetensors"], [samples[i] for i in held_out]
    write_list(settings.out / "pictures.csv", samples, source.classes, root)
    images = {
        "kind": "csv" if settings.kind == "folder" else settings.kind, "path": "pictures.csv",
        "options": {"root": str(root), "class_names": list(source.classes), **axes_of(settings)},
    }  # fmt: skip
    places = source.boxed or bool(source.parts)
    layer, more = settings.layer or paper_layer(untrained), ("localise",) if places else ()
    config = config_of(settings, images, weights, settings.explained, layer, more)
    result = named_run(settings.out, "run", config, progress)
    run = Trajectory.from_run(result.folder)
    network = results.Network(settings.model, run, results.phase_ends(run, history), history)
    swept = sweep_depths(settings, images, network.ends, progress) if settings.sweep else {}
    share = settings.held_out if history else None
    book = results.write_network(settings.out, network, result.folder, swept, share, failures, places)
    return CscoreOutcome(book, [result])


def networks_study(
    settings: CscoreSettings, progress: Progress | None = None, training: ProgressCallback | None = None
) -> CscoreOutcome:
    """One study for each network and seed, in a folder of its own, then all of them on one page."""
    if len(settings.runs) + len(settings.beside) < 2:
        raise InputError("a comparison needs two networks; name two or more, or seeds, or finished studies")
    finished = [results.read_network(Path(folder)) for folder in settings.beside]
    own = []
    for spec, seed in settings.runs:
        folder = folder_name(spec) + f"-seed{seed}" * bool(settings.seeds)
        seeds = (settings.split_seed,) if settings.seeds else ()
        out = settings.out / folder
        own.append(replace(settings, model=spec, networks=(), beside=(), seed=seed, seeds=seeds, out=out))
    for study in own:  # invalid settings are refused before the first is trained
        build(study, len(check(study)[0].classes))
    outcomes = [cscore_study(study, progress, training) for study in own]
    names = [study.model + f", seed {study.seed}" * bool(settings.seeds) for study in own]
    read = [results.read_network(study.out, name) for study, name in zip(own, names, strict=True)]
    networks = [*read, *finished]
    names = [network.name for network in networks]
    for k, name in enumerate(names):
        if names.count(name) > 1:
            networks[k] = replace(networks[k], name=f"{name} ({k + 1})")
    done = zip(networks, own, outcomes, strict=False)  # finished studies have no page here
    pages = {network.name: f"{study.out.name}/{outcome.page.name}" for network, study, outcome in done}
    return CscoreOutcome(results.write_networks(settings.out, networks, pages), [o.run for o in outcomes])


def compare(
    reference: Path, weights: Path, out: Path, images: Path | None = None, progress: Progress | None = None
) -> CscoreOutcome:
    """Score `weights` on the network, images, methods and metrics of the reference.

    Alarms are judged as if the new weights followed the reference's last checkpoint.
    """
    old = RunFolder.open(reference)
    known = Trajectory.from_run(old).checkpoints
    if not known:
        raise InputError(f"{reference} has no checkpoint with a C-Score to compare with; finish it first")
    if not weights.is_file():
        raise InputError(f"there is no weight file {weights}")
    config = old.manifest.config
    model = {"checkpoints": [str(weights.absolute())], "random_init": False, "pretrained": False}
    place = {"path": str((images or old.path.parent / config["images"]["path"]).absolute())}
    config = {**config, "model": config["model"] | model, "images": config["images"] | place}
    if ResolvedStudy(study_from(config), out).source.hash != old.manifest.data:
        raise InputError(
            f"the images are not those of {reference}; name their folder with --images, unchanged"
        )
    result = named_run(out, "run", config, progress)
    run = Trajectory.from_run(result.folder)
    before, after = replace(known[-1], epoch=None), run.checkpoints[-1]
    after = replace(after, name=f"{after.name} (new)", epoch=None)
    pair, moved = Trajectory((before, after), run.class_names), results.moves(before, after)
    alarms = [a for a in find_alarms(pair) if a.checkpoint == after.name]
    book = results.write_comparison(out, weights.name, pair, moved, alarms)
    return CscoreOutcome(book, [result], [move for move in moved if move.fell], alarms)


def folder_name(spec: str) -> str:
    """Folder name for a network.

    >>> folder_name("torchvision:densenet201"), folder_name("nets/mine.py:build")
    ('torchvision-densenet201', 'mine.py-build')
    """
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", spec.rpartition("/")[2] or spec).strip("-") or "network"


def write_list(path: Path, samples: Sequence[Sample], classes: Sequence[str], root: Path) -> None:
    """The images of the run as a CSV file with their boxes and masks, a row for each box."""
    parts = sorted({part for sample in samples for part in sample.masks})
    frame = (*CORNERS, "width", "height") if any(sample.boxes for sample in samples) else ()
    rows: list[list[object]] = []
    for sample in samples:
        masks = [os.path.relpath(sample.masks[part], root) if part in sample.masks else "" for part in parts]
        own = [sample.id, classes[sample.label or 0], *masks]
        rows += [[*own, *box, *(sample.frame or ("", ""))] for box in sample.boxes]
        if not sample.boxes:
            rows.append([*own, *[""] * len(frame)])
    common.write_rows(path, ["path", "label", *(f"mask_{part}" for part in parts), *frame], rows)


def check(settings: CscoreSettings) -> tuple[Source, Path]:
    """Check the settings before training; return the images and the folder their names are relative to."""
    read_methods(settings.explained)
    if not settings.images:
        raise InputError("no images were named; give a folder with one folder for each class")
    source, root = pooled(settings)
    if len(source.classes) < 2:
        raise InputError(
            f"the images have one class only ({source.classes[0]}); a classifier needs at least two"
        )
    last = settings.last_epoch
    if not settings.checkpoints and not any(1 <= epoch <= last for epoch in settings.keep):
        raise InputError(
            f"no checkpoint would be stored: there are {last} epochs and keep names none of them"
        )
    return source, root


def pooled(settings: CscoreSettings) -> tuple[Source, Path]:
    """Join all folders to one source, with their common folder; a class may have images in each."""
    listed: list[tuple[Path, str, Sample]] = []
    for path in settings.images:
        source = open_source(settings.kind, path, **axes_of(settings))
        if not source.labelled:
            raise InputError(f"the images of {path} have no labels; put them in one folder for each class")
        known = [(sample, sample.label) for sample in source.samples if sample.label is not None]
        listed += [(Path(s.content).resolve(), source.classes[label], s) for s, label in known]
    root = Path(os.path.commonpath([path.parent for path, *_ in listed]))
    classes = sorted({name for _, name, _ in listed})
    samples: dict[str, Sample] = {}
    for path, name, sample in listed:
        own = replace(sample, id=path.relative_to(root).as_posix(), label=classes.index(name), content=path)
        if samples.setdefault(own.id, own).label != own.label:
            other = classes[samples[own.id].label or 0]
            raise InputError(f"{own.id} is listed with two labels, {other!r} and {name!r}; remove one")
    every = replace(source, samples=tuple(samples.values()), classes=tuple(classes))
    return select(every, limit=settings.limit, seed=settings.split_seed), root


def axes_of(settings: CscoreSettings) -> dict[str, Any]:
    """Options of the source beside its path."""
    return {} if settings.axes is None else some(settings, "axes")


def train(
    settings: CscoreSettings,
    source: Source,
    trained: list[int],
    held_out: list[int],
    callback: ProgressCallback | None,
) -> tuple[History, list[Failure]]:
    """Run or resume the two phases; returns also the images that could not be read."""
    model = build(settings, len(source.classes))
    model.module.to(best_device(settings.device))
    data, failed = read_data(source, model.preprocess, trained)
    valid, _ = read_data(source, model.preprocess, held_out)
    last = settings.last_epoch
    history = two_phase(
        model, data, valid, settings.out / "training", settings.seed,
        sorted({e for e in settings.keep if e <= last} | {last}),
        callback and (lambda state: callback(settings.model, state)),
        first_depth=settings.first_phase, batch_size=settings.train_batch,
        class_weights="balanced" if settings.class_weights else None, **some(settings, *TRAINING),
    )  # fmt: skip
    return history, failed


def build(settings: CscoreSettings, classes: int) -> Model:
    """The network before training, with a new head drawn from the seed."""
    with seeded_builder(settings.seed):
        model = load_model(
            settings.model, num_classes=classes, pretrained=settings.pretrained, head=settings.head
        )
    return replace(model, preprocess=model.preprocess.replaced(settings.preprocess))


def paper_layer(model: Model) -> str | None:
    """The end of the last stage, which the paper reads in its three networks; else None, the default."""
    of_the_paper = re.search("densenet|inception_?v3|resnet50v2", model.name, re.IGNORECASE)
    scales = known_scales(model) if of_the_paper else None
    return scales[-1] if scales else None


def config_of(
    settings: CscoreSettings,
    images: Mapping[str, Any],
    weights: Sequence[str],
    methods: Sequence[str],
    layer: str | None,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """The configuration of a run over the images that are scored. more: metrics."""
    model = {
        "spec": placed_spec(settings.model, Path.cwd()), "num_classes": len(images["options"]["class_names"]),
        "checkpoints": list(weights), "layer": layer, "name": settings.model, "head": settings.head,
    }  # fmt: skip
    rule = ListRule(settings.tau, settings.weights, settings.anchor)  # type: ignore[arg-type]
    if rule.anchor == LAST:
        plain = study_from(
            run_config(settings, methods, METRICS, model, images, preprocess=settings.preprocess)
        )
        rule = replace(rule, anchor=find_checkpoints(plain, settings.out)[-1].name)
    metrics = (*METRICS, rule.text, *more)
    return run_config(settings, methods, metrics, model, images, preprocess=settings.preprocess)


def sweep_depths(
    settings: CscoreSettings, images: Mapping[str, Any], ends: tuple[str, str], progress: Progress | None
) -> dict[str, Trajectory]:
    """The C-Score of every CAM of one layer, by layer from early to late; one run folder for each layer."""
    calls = read_methods(settings.explained)  # methods of several layers have depths of their own
    cams = [call.text for call in calls if "activations" in call.entry.needs]
    if not cams:
        return {}
    own = replace(settings, anchor=settings.anchor if settings.anchor in (None, FIRST, LAST) else None)
    opened = open_study(study_file(settings.out))
    files = [str(c.file) for c in opened.checkpoints if c.name in ends and c.file is not None]
    model = opened.model(ends[-1])
    main = settings.layer or paper_layer(model) or default_layer(model)
    try:
        layers = searched_scales(model, model.preprocess.blank, main, DEPTHS_SWEPT)
    except InputError:
        layers = known_scales(model) or ()
    swept = {}
    for number, layer in enumerate(layers):
        config = config_of(own, images, files, cams, layer)
        result = named_run(settings.out, f"depth-{number}", config, progress)
        swept[layer] = Trajectory.from_run(result.folder)
    return swept
