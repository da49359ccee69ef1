"""hp.run, hp.audit and hp.open_run: a run in Python, with what people ask of it as methods."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from heatproof.errors import StoreError
from heatproof.registry import split_calls
from heatproof.show import MOST_SHOWN, plain_table, text
from heatproof.store import RunFolder, Status
from heatproof.verdict.answers import Verdict
from heatproof.verdict.data import RunData, order_methods, read_run, stands_beside
from heatproof.verdict.judge import conclude, judge, keep
from heatproof.verdict.trajectory import models, ordered

if TYPE_CHECKING:
    import pandas
    import pyarrow
    from torch import nn

    from heatproof.models.model import Model
    from heatproof.report.compare import RunComparison
    from heatproof.types import ArrayLike, Maps

MEANS = """
    select metric, method, avg(value order by value) filter (not isnan(value)) as mean,
           count(*) filter (not isnan(value)) as n
    from scores where method <> '' and image <> '' and checkpoint = ? group by all order by all
"""


class Run:
    """A run folder, to be asked: each answer is about what is finished when it is given.

    Args:
        folder: what hp.open_run opens.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @property
    def path(self) -> Path:
        return self.folder.path

    def status(self) -> Status:
        """Whether the run is complete, and how many of its images could be used."""
        return self.folder.status()

    def scores(self) -> pandas.DataFrame | pyarrow.Table | dict[str, np.ndarray]:
        """Every row: model, checkpoint, image, label, explained, method, metric, value, reason, unit.

        A pandas DataFrame where pandas is installed, else an Arrow table where pyarrow is, else one array
        per column. Rows about a whole class or checkpoint have image ''.
        """
        columns = self.folder.scores().columns("from scores order by all")
        if find_spec("pandas"):
            pandas = import_module("pandas")
            integers = {
                name: pandas.arrays.IntegerArray(column.data, np.ma.getmaskarray(column))
                for name, column in columns.items()
                if column.dtype.kind == "i" and isinstance(column, np.ma.MaskedArray)
            }
            return pandas.DataFrame(columns | integers)
        if find_spec("pyarrow"):
            pyarrow = import_module("pyarrow")
            masked = {name: (np.ma.getdata(c), np.ma.getmaskarray(c)) for name, c in columns.items()}
            return pyarrow.table({name: pyarrow.array(c, mask=m) for name, (c, m) in masked.items()})
        return columns

    def maps(self, method: str, checkpoint: str | None = None, ids: Sequence[str] | None = None) -> Maps:
        """The stored maps of a method.

        Args:
            method: its name, as the run has it.
            checkpoint: its name; the last one where None.
            ids: names of images; all where None.
        """
        store = self.folder.maps()
        if checkpoint is None:
            stored = store.contents()
            having = {c for c, m in stored if m == method} or {c for c, _ in stored}
            if not having:
                raise StoreError(f"{self.path} holds no maps yet; let the run finish a unit first")
            checkpoint = next((c for c in reversed(self._checkpoints()) if c in having), max(having))
        return store.read(checkpoint, method, ids)

    def verdict(self, checkpoint: str | None = None, model: str | None = None) -> Verdict:
        """Which maps follow the network, whether it looks where it should, and what would decide the rest.

        Args:
            checkpoint, model: their names; the last checkpoint, and the only model, where None.
        """
        return judge(self._data(checkpoint, model))

    def report(
        self, path: str | Path | None = None, checkpoint: str | None = None, model: str | None = None
    ) -> Path:
        """Write the report, one HTML file, or on paper where the file is a .pdf.

        Args:
            path: of the file; by default the page of the audit, else report.html in the run's folder.
            checkpoint, model: as for verdict.
        """
        from heatproof.report.page import write_page
        from heatproof.report.print_pdf import write_pdf

        path = Path(path) if path is not None else self.folder.page
        data = self._data(checkpoint, model)
        if path.suffix.lower() == ".pdf":
            write_pdf(data, judge(data), path)
        else:
            keep(data, write_page(data, path))
        return path

    def _data(self, checkpoint: str | None, model: str | None) -> RunData:
        return read_run(self.folder, model, checkpoint)

    def _checkpoints(self) -> list[str]:
        """Those that have rows, in the order of training."""
        rows = self.folder.scores().sql("select distinct checkpoint from scores")
        known = {row["checkpoint"] for row in rows}
        return [c for model in models(self.folder) for c in ordered(self.folder, model) if c in known]

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {self.status().sentence}"

    def _repr_html_(self) -> str:
        told = f"<p>{text(self.path)}: {text(self.status().sentence)}</p>"
        stored = self.folder.maps().contents()
        checkpoint = next(reversed(self._checkpoints()), "")
        rows = self.folder.scores().sql(MEANS, [checkpoint])
        methods = order_methods(list({row["method"] for row in rows}), self.folder.manifest)
        means, facts = {(row["metric"], row["method"]): row for row in rows}, self.folder.manifest.facts
        shown = [
            [metric, *(_cell(means.get((metric, method))) for method in methods)]
            for metric in dict.fromkeys(
                row["metric"] for row in rows if not stands_beside(row["metric"], facts)
            )
        ]
        table = plain_table([f"mean (n) at {checkpoint}", *methods], shown) if shown else ""
        first = next((method for method in methods if (checkpoint, method) in stored), None)
        return told + table + (self._pictures(first, checkpoint) if first else "")

    def _pictures(self, method: str, checkpoint: str) -> str:
        """The first pictures that were kept, under the method's maps."""
        kept = self.folder.pictures()
        ids = [name for name in self.folder.maps().ids(checkpoint, method)[:MOST_SHOWN] if kept.path(name)]
        opened = [Image.open(io.BytesIO(kept.read(name) or b"")) for name in ids]
        return self.maps(method, checkpoint, ids).overlay(opened)._repr_html_() if ids else ""


def _cell(row: Mapping[str, Any] | None) -> str:
    return "" if row is None or row["mean"] is None else f"{row['mean']:.3f} ({row['n']})"


def open_run(folder: str | Path) -> Run:
    """A run folder, finished or going on: what `hp.run`, a study, a monitor or the command line wrote.

    Args:
        folder: the run's folder, or that of a study with its run inside.
    """
    return Run(RunFolder.open(folder))


def run(
    study: str | Path | Mapping[str, object],
    out: str | Path | None = None,
    *,
    engine: str = "local",
    shard: tuple[int, int] = (0, 1),
    fail_fast: bool = False,
    retry_broken: bool = False,
    trust_mtime: bool = False,
) -> Run:
    """Explain and score what a study describes, or go on with it, and open the result.

    Args:
        study: a TOML file, or a dict of the same form, whose paths are relative to the working folder.
        out: the run's folder; the study's own run.out, else runs/STUDY, where None.
        engine: "local" or "ray".
        shard: which of how many; each takes every n-th block, and the last to finish adds the group metrics.
        fail_fast: stop at the first picture that cannot be used, instead of reporting it as a row.
        retry_broken: try pictures again that could not be used; their files may have changed meanwhile.
        trust_mtime: in a new run, know pictures by size and time of change instead of by their contents.
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
    """Runs side by side: what became better or worse from the first to each other one, with intervals.

    Args:
        runs: two or more: a Run, or its folder, perhaps with a checkpoint or a method behind @, as in
            "runs/a@epoch05" or "runs/a@gradcam".
        pictures: how many of those whose maps changed most are named and shown.

    Returns:
        `.headline`, `.differences`, `.moved`; `.report()` writes the page.
    """
    from heatproof.report.compare import compare_runs

    return compare_runs([run.folder if isinstance(run, Run) else run for run in runs], pictures)


def audit(
    model: str | Model | nn.Module,
    images: object,
    labels: ArrayLike | None = None,
    *,
    checkpoint: str | Path | Sequence[str | Path] = (),
    minutes: float = 5.0,
    methods: str | Sequence[str] = (),
    layer: str | None = None,
    seed: int = 0,
    out: str | Path = "audit",
    say: Callable[[str], object] = print,
) -> Run:
    """Which maps of a network can be trusted? Chooses what to compute, runs it, judges, writes the page.

    Args:
        model: a name as for load_model, what load_model gives, or a module; it is not changed.
        images: a folder or CSV file; Pillow pictures or arrays of 8 bits; model-ready tensors "n c H W"; or a
            dataset of pairs.
        labels: the class of each picture in memory.
        checkpoint: weight files of a network that is named; several for a whole training.
        minutes: about how long it may take, earlier calls counted; methods, metrics and pictures are chosen
            by it, and more minutes go on with the same folder.
        methods: names, instead of those it would choose.
        layer: where CAMs look, by name; found by itself where None.
        seed: everything follows from it.
        out: a folder; the same call goes on where one was stopped. The page is its report.html, the study
            its study.toml.
        say: told what was chosen and why.

    Returns:
        The run: `.verdict()`, `.scores()`, `.maps(...)`, `.report()`.
    """
    from heatproof.models.model import as_model
    from heatproof.studies.audit.memory_images import write_images
    from heatproof.studies.audit.protocol import plan_audit, run_audit
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
