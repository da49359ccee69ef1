"""Results of a monitor in experiment trackers; runs are never opened here.

A logger is anything with `log(report)`. The names of scalars are in docs/monitor.md; numbers that are not
defined are not sent.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from heatproof.errors import InputError, need
from heatproof.monitor.measure import StepResult

if TYPE_CHECKING:
    from heatproof.verdict.answers import Verdict

EXTRA = "trackers"
PICTURE, ALARMS = "heatproof/maps", "heatproof/alarms"


class Tracker(Protocol):
    """Interface of loggers, which a monitor calls after every step."""

    def log(self, report: StepResult) -> None: ...


class TensorBoard:
    """TensorBoard, through a SummaryWriter of yours or one for a folder."""

    def __init__(self, writer_or_folder: Any) -> None:
        self.writer = writer_or_folder
        if isinstance(writer_or_folder, (str, Path)):
            need("tensorboard", EXTRA)
            self.writer = need("torch.utils.tensorboard", EXTRA).SummaryWriter(str(writer_or_folder))

    def log(self, report: StepResult) -> None:
        for name, value in report.scalars().items():
            self.writer.add_scalar(name, value, report.epoch)
        if report.new_alarms:
            self.writer.add_text(ALARMS, _text(report), report.epoch)
        if (picture := report.picture()) is not None:
            self.writer.add_image(PICTURE, picture, report.epoch, dataformats="HWC")
        self.writer.flush()


class MLflow:
    """MLflow: the run of this id, or the active one.

    MLflow allows fewer letters in names: + becomes p, others an underscore.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self.mlflow = need("mlflow", EXTRA)
        self.run_id = run_id

    def log(self, report: StepResult) -> None:
        run_id = self.run_id
        if run_id is None:
            active = self.mlflow.active_run()
            if active is None:  # mlflow would open one, and leave it open
                raise InputError("there is no active MLflow run; start one, or give MLflow(run_id)")
            run_id = active.info.run_id
        named = {mlflow_name(name): value for name, value in report.scalars().items()}
        self.mlflow.log_metrics(named, step=report.epoch, run_id=run_id)
        client = self.mlflow.MlflowClient()
        if report.new_alarms:
            client.log_text(run_id, _text(report), f"{ALARMS}/{report.checkpoint}.txt")
        if (picture := report.picture()) is not None:
            client.log_image(run_id, picture, f"{PICTURE}/{report.checkpoint}.png")


class WandB:
    """Weights & Biases: this run, or the active one.

    heatproof/epoch is the axis of its charts. A result joins the user's current step and leaves it open:
    after a commit, wandb would refuse what is logged to that step later.
    """

    def __init__(self, run: Any = None) -> None:
        self.wandb = need("wandb", EXTRA)
        self.run = run
        self._defined: Any = None
        self._open: int | None = None  # the step of the last result

    def log(self, report: StepResult) -> None:
        run = self.run or self.wandb.run
        if run is None:
            raise InputError("there is no active wandb run; call wandb.init, or give WandB(run)")
        if self._defined is not run:
            run.define_metric("heatproof/epoch")
            run.define_metric("heatproof/*", step_metric="heatproof/epoch")
            self._defined = run
        content: dict[str, Any] = {"heatproof/epoch": report.epoch, **report.scalars()}
        if report.new_alarms:
            content[ALARMS] = self.wandb.Html(f"<pre>{html.escape(_text(report))}</pre>")
        if (picture := report.picture()) is not None:
            content[PICTURE] = self.wandb.Image(picture)
        if run.step == self._open:  # nothing was logged since: two epochs must not share a row
            run.log({})
        run.log(content, commit=False)
        self._open = run.step


def _text(report: StepResult) -> str:
    return "\n\n".join(map(str, report.new_alarms))


def mlflow_name(name: str) -> str:
    """A name in letters that MLflow allows.

    >>> mlflow_name("heatproof/cscore/gradcam++/all")
    'heatproof/cscore/gradcampp/all'
    """
    return re.sub(r"[^\w\-. /]", "_", name.replace("+", "p"))


def verdict_tags(verdict: Verdict) -> dict[str, str]:
    """Tags by which models can be filtered: tags.`heatproof.follows.gradcam` = 'yes'."""
    tags = {
        "heatproof.headline": verdict.headline,
        "heatproof.network": verdict.network.answer,
        "heatproof.checkpoint": verdict.checkpoint,
        "heatproof.alarms": str(len(verdict.alarms)),
    }
    return tags | {f"heatproof.follows.{mlflow_name(m.method)}": m.follows for m in verdict.methods}


def tag_model(name: str, version: str | int, run: str | Path | Verdict) -> dict[str, str]:
    """Write the verdict on a run to a version in MLflow's model registry, and return the tags.

    Args:
        name, version: of the registered model.
        run: the folder of a run, or a verdict.
    """
    from heatproof.store import RunFolder  # a monitor without a folder needs none of these
    from heatproof.verdict.answers import Verdict
    from heatproof.verdict.data import read_run
    from heatproof.verdict.judge import judge

    verdict = run if isinstance(run, Verdict) else judge(read_run(RunFolder.open(run)))
    client, tags = need("mlflow", EXTRA).MlflowClient(), verdict_tags(verdict)
    for key, value in tags.items():
        client.set_model_version_tag(name, str(version), key, value)
    return tags
