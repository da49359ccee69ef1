"""hp.run, hp.audit, hp.evidence, hp.check_data, hp.open_run, hp.compare and hp.drift: runs in Python."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
from PIL import Image

from heatproof.errors import MissingExtraError, StoreError
from heatproof.registry import split_calls
from heatproof.show import MOST_SHOWN, plain_table, text
from heatproof.store import RunFolder, Status
from heatproof.verdict.answers import NetworkAnswer, Verdict
from heatproof.verdict.data import order_methods, read_run, stands_beside
from heatproof.verdict.judge import conclude, judge, keep
from heatproof.verdict.trajectory import models, ordered

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from heatproof.metrics.kit import Passes
    from heatproof.metrics.sanity import Layers
    from heatproof.models.model import Model
    from heatproof.report.compare import RunComparison
    from heatproof.report.data_check import DataCheck
    from heatproof.report.drift import Drift
    from heatproof.types import ArrayLike, Images, Maps

MEANS = """
    select metric, method, avg(value order by value) filter (not isnan(value)) as mean,
           count(*) filter (not isnan(value)) as n
    from scores where method <> '' and image <> '' and checkpoint = ? group by all order by all
"""


class Run:
    """A run folder: its scores, maps, verdict and report, as far as the run has come.

    Args:
        folder: as hp.open_run opens it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @property
    def path(self) -> Path:
        return self.folder.path

    def status(self) -> Status:
        """Whether the run is complete, and how many of its images could be used."""
        return self.folder.status()

    def scores(self) -> pandas.DataFrame | dict[str, np.ndarray]:
        """All rows: model, checkpoint, image, label, explained, method, metric, value, reason, unit.

        A pandas DataFrame if pandas is installed, else a dict of arrays by column. Rows about a whole class
        or checkpoint have image ''.
        """
        columns = self.folder.scores().columns("from scores order by all")
        if not find_spec("pandas"):
            return columns
        pandas = import_module("pandas")
        integers = {
            name: pandas.arrays.IntegerArray(column.data, np.ma.getmaskarray(column))
            for name, column in columns.items()
            if column.dtype.kind == "i" and isinstance(column, np.ma.MaskedArray)
        }
        return pandas.DataFrame(columns | integers)

    def table(self, checkpoint: str | None = None, model: str | None = None) -> pandas.DataFrame:
        """Means over images with 95 % intervals: a row per method, columns (metric, mean/low/high/n).

        `table.xs("mean", axis=1, level=1)` has the means alone.

        Args:
            checkpoint, model: as for verdict.

        Raises:
            MissingExtraError: if pandas is not installed.
        """
        if not find_spec("pandas"):
            raise MissingExtraError("a table needs pandas; run: pip install pandas")
        data = read_run(self.folder, model, checkpoint)
        columns = {
            (of.name, part): [getattr(data.cells.get((of.name, m)), attribute, None) for m in data.methods]
            for of in data.measures
            for part, attribute in (("mean", "defined"), ("low", "low"), ("high", "high"), ("n", "n"))
        }
        frame = import_module("pandas").DataFrame(columns, index=data.methods, dtype=float)
        return frame.rename_axis("method").rename_axis(("metric", ""), axis=1)

    def maps(self, method: str, checkpoint: str | None = None, ids: Sequence[str] | None = None) -> Maps:
        """Load the stored maps of a method.

        Args:
            method: name of the method in the run.
            checkpoint: name of the checkpoint; default: the last.
            ids: names of images; default: all.
        """
        store = self.folder.maps()
        if checkpoint is None:
            stored = store.contents()
            candidates = {c for c, m in stored if m == method} or {c for c, _ in stored}
            if not candidates:
                raise StoreError(f"{self.path} holds no maps yet; let the run finish a unit first")
            checkpoint = next((c for c in reversed(self._checkpoints()) if c in candidates), max(candidates))
        return store.read(checkpoint, method, ids)

    def verdict(self, checkpoint: str | None = None, model: str | None = None) -> Verdict:
        """Compute the verdict: which methods follow the network, and whether it uses the object.

        Args:
            checkpoint, model: their names; default: the last checkpoint, and the only model.
        """
        return judge(read_run(self.folder, model, checkpoint))

    def report(
        self, path: str | Path | None = None, checkpoint: str | None = None, model: str | None = None
    ) -> Path:
        """Write the report, one HTML or PDF file.

        Args:
            path: name of the file, .html or .pdf; default: the audit's page, else report.html in the folder.
            checkpoint, model: as for verdict.
        """
        from heatproof.report.page import write_page
        from heatproof.report.print_pdf import write_pdf

        path = Path(path) if path is not None else self.folder.page
        data = read_run(self.folder, model, checkpoint)
        if path.suffix.lower() == ".pdf":
            write_pdf(data, judge(data), path)
        else:
            keep(data, write_page(data, path))
        return path

    def _checkpoints(self) -> list[str]:
        """Checkpoints with rows, in the order of training."""
        known = {r["checkpoint"] for r in self.folder.scores().sql("select distinct checkpoint from scores")}
        return [c for model in models(self.folder) for c in ordered(self.folder, model) if c in known]

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {self.status().sentence}"

    def _repr_html_(self) -> str:
        status = f"<p>{text(self.path)}: {text(self.status().sentence)}</p>"
        checkpoint = next(reversed(self._checkpoints()), "")
        rows = self.folder.scores().sql(MEANS, [checkpoint])
        methods = order_methods(list({row["method"] for row in rows}), self.folder.manifest)
        cells = {(r["metric"], r["method"]): f"{r['mean']:.3f} ({r['n']})" for r in rows if r["n"]}
        metrics = dict.fromkeys(row["metric"] for row in rows)
        lines = [
            [metric, *(cells.get((metric, method), "") for method in methods)]
            for metric in metrics
            if not stands_beside(metric, self.folder.manifest.facts)
        ]
        table = plain_table([f"mean (n) at {checkpoint}", *methods], lines) if lines else ""
        maps, pictures = self.folder.maps(), self.folder.pictures()
        stored = maps.contents()
        first = next((method for method in methods if (checkpoint, method) in stored), None)
        ids = maps.ids(checkpoint, first)[:MOST_SHOWN] if first else []
        ids = [name for name in ids if pictures.path(name)]
        if first is None or not ids:
            return status + table
        images = [Image.open(io.BytesIO(pictures.read(name) or b"")) for name in ids]
        return status + table + self.maps(first, checkpoint, ids).overlay(images)._repr_html_()


def open_run(folder: str | Path) -> Run:
    """Open a run folder, complete or not, written by hp.run, a study, a monitor or the command line.

    Args:
        folder: the run's folder, or that of a study with its run inside.
    """
    return Run(RunFolder.open(folder))


def run(
    study: str | Path | Mapping[str, object], out: str | Path | None = None, *, engine: str = "local",
    shard: tuple[int, int] = (0, 1), fail_fast: bool = False, retry_broken: bool = False,
    trust_mtime: bool = False,
) -> Run:  # fmt: skip
    """Run or resume a study, and open the result.

    Args:
        study: a TOML file, or a dict of the same form, whose paths are relative to the working folder.
        out: the run's folder; default: run.out of the study, else runs/STUDY.
        engine: "local" or "ray".
        shard: (i, n): compute every n-th block from i on; the last shard to finish adds the group metrics.
        fail_fast: stop at the first image that cannot be used, instead of reporting it as a row.
        retry_broken: try images again that could not be used.
        trust_mtime: in a new run, identify images by size and modification time instead of their contents.

    Raises:
        InputError: if the study has an unknown key or a value that cannot be used.
        StoreError: if the folder holds another study, or another process writes to it.
    """
    from heatproof.run.engine import run_study

    done = run_study(
        study, out, engine=engine, shard=shard, fail_fast=fail_fast, retry_broken=retry_broken,
        trust_mtime=trust_mtime,
    )  # fmt: skip
    if done.done == done.units:
        conclude(done.folder)
    return Run(done.folder)


def compare(*runs: str | Path | Run, pictures: int = 12) -> RunComparison:
    """Compare runs: differences between the first and each other run, with intervals.

    Args:
        runs: two or more: a Run, or its folder, optionally with a checkpoint or a method behind @, as in
            "runs/a@epoch05" or "runs/a@gradcam".
        pictures: number of images to show, those whose maps changed most.

    Returns:
        `.headline`, `.differences`, `.moved`; `.report()` writes the page.
    """
    from heatproof.report.compare import compare_runs

    return compare_runs([run.folder if isinstance(run, Run) else run for run in runs], pictures)


def drift(
    reference: str | Path | Run, live: str | Path | Run, *, out: str | Path | None = None, splits: int = 1000,
    seed: int = 0,
) -> Drift:  # fmt: skip
    """Test whether the maps of live images differ from those of a reference run; no labels are needed.

    Args:
        reference: a Run, or its folder, optionally with a checkpoint or a method behind @.
        live: a run in the same form; or a folder or CSV file of images, whose predictions are explained with
            the network, checkpoint and methods of the reference.
        out: the folder of drift.json and drift.html, and of the run of images; default: the live run's.
        splits, seed: random splits of the images of both, from which p values are computed.

    Returns:
        `.drifted`, `.headline`, `.tests` by statistic, and `.report(path)`, which writes the page.
    """
    from heatproof.report.drift import find_drift

    first, second = (run.folder if isinstance(run, Run) else run for run in (reference, live))
    return find_drift(first, second, out, splits, seed)


def evidence(
    model: Model | nn.Module, images: Images, labels: ArrayLike, regions: ArrayLike | None = None, *,
    methods: Sequence[str] = ("gradcam",), classes: Sequence[str] = (), layer: Layers = None, seed: int = 0,
    **passes: Unpack[Passes],
) -> NetworkAnswer:  # fmt: skip
    """Find out what a network uses, by moving evidence from images into images of other classes.

    Args:
        model: a network, or the result of load_model.
        images: model-ready, "b c H W".
        labels: "b" classes, or "b k" of 0 and 1 for multi-label images.
        regions: "b H W", masks of the objects; without them evidence is listed, not judged.
        methods: whose maps choose the patches.
        classes: names by number.
        layer, seed, passes: as for hp.explain.

    Returns:
        `.answer` ("no" if the network surely uses something other than the object, else "undecided": a "yes"
        also needs maps that follow the network, which hp.audit tests), `.note`, `.classes`, and `.evidence`,
        a list of what was found, each with `.crops` and `.examples` as arrays.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> images = torch.eye(3).repeat(4, 1).view(12, 3, 1, 1) + torch.rand(12, 3, 16, 16)
        >>> evidence(network, images, [0, 1, 2] * 4, methods=["gradient"]).answer
        'undecided'
    """
    from heatproof.metrics.interventions import evidence as measure
    from heatproof.verdict.uses import network_answer

    record = measure(
        labels, model=model, images=images, regions=regions, methods=methods, classes=classes, layer=layer,
        seed=seed, **passes,
    )  # fmt: skip
    return network_answer(record, follows=False)


def check_data(
    images: object, labels: ArrayLike | None = None, *, classes: Sequence[str] = (), limit: int | None = None,
    seed: int = 0,
) -> DataCheck:  # fmt: skip
    """Test whether whole-image properties predict the class, before any network is trained.

    Args:
        images: a folder or CSV file, or images in memory: Pillow images or arrays of 8 bits.
        labels: the class of each image in memory.
        classes: names by number, of images in memory.
        limit: images to read, drawn at random; at most 3,000 by default.
        seed: of the draw and of the permutations.

    Returns:
        `.named`, the properties that predict the class of held-out images surely better than with permuted
        labels, each with `.accuracy`, `.control`, `.p` and example images; `.report()` writes the page.

    Example:
        >>> import numpy as np
        >>> images = np.random.default_rng(0).integers(40, 200, (40, 32, 32, 3), np.uint8)
        >>> images[::2, ..., 0] += 30
        >>> images[::2, ..., 2] -= 30
        >>> check_data(images, [0, 1] * 20).named[0].name
        'tint'
    """
    from heatproof.images.kinds import guess_source, open_source
    from heatproof.report import data_check

    if isinstance(images, (str, Path)):
        guess = guess_source(images)
        source = open_source(guess.kind, guess.path, **guess.options)
    else:
        source = open_source("memory", images, labels=labels, class_names=list(classes) or None)
    return data_check.check_data(source, limit, seed)


def audit(
    model: str | Model | nn.Module, images: object, labels: ArrayLike | None = None, *,
    checkpoint: str | Path | Sequence[str | Path] = (), minutes: float = 5.0,
    methods: str | Sequence[str] = (), layer: str | None = None, seed: int = 0, out: str | Path = "audit",
    say: Callable[[str], object] = print,
) -> Run:  # fmt: skip
    """Choose methods, metrics and images for a network, run them, and write verdict and report.

    Args:
        model: a name as for load_model, the result of load_model, or a module; it is not changed.
        images: a folder or CSV file; Pillow images or arrays of 8 bits; model-ready tensors "n c H W"; or a
            dataset of pairs.
        labels: the class of each image in memory.
        checkpoint: weight files of a network that is named; several for a whole training.
        minutes: about how long it may take, earlier calls included; methods, metrics and images are chosen
            by it, and more minutes extend the same folder.
        methods: names, instead of the automatic choice.
        layer: the layer that CAMs read, by name; chosen automatically by default.
        seed: of all random numbers.
        out: a folder; the same call resumes a stopped one. It holds report.html and study.toml.
        say: called with sentences about the choices and their reasons.

    Returns:
        The run: `.verdict()`, `.scores()`, `.maps(...)`, `.report()`.
    """
    from heatproof.models.model import as_model
    from heatproof.studies.audit.protocol import plan_audit, run_audit, write_images
    from heatproof.studies.audit.settings import PYTHON, AuditSettings

    network = None if isinstance(model, str) else as_model(model)
    files = [checkpoint] if isinstance(checkpoint, (str, Path)) else checkpoint
    settings = AuditSettings(
        model=model if isinstance(model, str) else f"{PYTHON}{network and network.name}",
        images=Path(images) if isinstance(images, (str, Path)) else Path(out) / "pictures.csv",
        checkpoint=tuple(map(str, files)), minutes=minutes, layer=layer, seed=seed, out=Path(out),
        methods=tuple(split_calls(methods) if isinstance(methods, str) else methods),
        device=None if network is None else str(network.device),
    )  # fmt: skip
    plan = plan_audit(settings, network, partial(write_images, images, labels, network, Path(out)), say)
    for line in plan.lines():
        say(line)
    outcome = run_audit(settings, plan)
    if outcome.plan.more:
        say(outcome.plan.more)
    return Run(outcome.folder)
