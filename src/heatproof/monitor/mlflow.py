"""An evaluator for MLflow, and a verdict as tags of a registered model.

See docs/monitor.md. The data are a table with one column of image files, or rows of numbers with their
`shape` in the config, which must name the methods. Without `out` in it, the run folder is temporary.

Imports are inside functions because MLflow loads evaluators when it is imported itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from heatproof.errors import InputError, need
from heatproof.monitor import lazy_classes

if TYPE_CHECKING:
    from heatproof.monitor.measure import StepResult
    from heatproof.types import Batch
    from heatproof.verdict.answers import Verdict

EXTRA, BASE = "trackers", "mlflow.models.evaluation.base"
VERDICT = "heatproof/verdict.json"


class EvaluatorHooks:
    """Explain and judge a model that MLflow evaluates."""

    name = "heatproof"

    @classmethod
    def can_evaluate(cls, *, model_type: Any, evaluator_config: Any, **_: Any) -> bool:
        """Only if methods are configured: MLflow tries every evaluator that is installed."""
        return model_type == "classifier" and "methods" in (evaluator_config or {})

    def evaluate(
        self, *, dataset: Any, run_id: str, evaluator_config: Any, model: Any = None, **_: Any
    ) -> Any:
        result = _measured(_module(model), dataset, dict(evaluator_config), run_id)
        client, artifacts, numbers = need("mlflow", EXTRA).MlflowClient(), {}, result.scalars()
        if result.verdict is not None:
            for method in result.verdict.methods:
                if method.follows != "undecided":
                    numbers[f"heatproof/follows/{method.method}"] = float(method.follows == "yes")
            for key, value in verdict_tags(result.verdict).items():
                client.set_tag(run_id, key, value)
            content = result.verdict.as_json()
            client.log_dict(run_id, content, VERDICT)
            artifact = need("mlflow.models.evaluation.artifacts", EXTRA).JsonEvaluationArtifact
            uri = f"{client.get_run(run_id).info.artifact_uri}/{VERDICT}"
            artifacts[VERDICT] = artifact(uri=uri, content=content)
        metrics = {mlflow_name(name): value for name, value in numbers.items()}
        return need(BASE, EXTRA).EvaluationResult(metrics=metrics, artifacts=artifacts, run_id=run_id)


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
    from heatproof.store import RunFolder
    from heatproof.verdict.answers import Verdict
    from heatproof.verdict.data import read_run
    from heatproof.verdict.judge import judge

    verdict = run if isinstance(run, Verdict) else judge(read_run(RunFolder.open(run)))
    client, tags = need("mlflow", EXTRA).MlflowClient(), verdict_tags(verdict)
    for key, value in tags.items():
        client.set_model_version_tag(name, str(version), key, value)
    return tags


def _measured(module: Any, dataset: Any, config: dict[str, Any], run_id: str) -> StepResult:
    """Run one step of a monitor on the data, and log it to the run."""
    from heatproof.monitor.trackers import MLflow
    from heatproof.monitor.watch import Monitor

    if not dataset.has_targets:
        raise InputError("heatproof needs the class of each image; give mlflow.evaluate targets")
    shape, preprocess = config.pop("shape", None), config.pop("preprocess", None)
    batch = _batch(dataset, shape, preprocess, module)
    with TemporaryDirectory() as folder:
        out = config.pop("out", None) or folder
        monitor = Monitor([batch], out=out, loggers=[MLflow(run_id)], **config)
        monitor.check(module)
        result = monitor.step(module, len(monitor.trajectory) + 1)
    if result is None or result.problem:
        problem = result.problem if result else "nothing was measured"
        raise InputError(f"the model could not be explained: {problem}")
    return result


def _module(model: Any) -> Any:
    from torch import fx, nn

    raw = model.get_raw_model() if hasattr(model, "get_raw_model") else None
    if not isinstance(raw, nn.Module):
        raise InputError(
            "heatproof explains PyTorch models; give mlflow.evaluate one that mlflow.pytorch logged"
        )
    if isinstance(raw, fx.GraphModule):
        raise InputError(
            "the model was logged as a traced graph, which has no layers; log it with "
            "mlflow.pytorch.log_model(..., serialization_format='pickle')"
        )
    return raw


def _batch(dataset: Any, shape: Any, preprocess: Any, module: Any) -> Batch:
    """Model-ready images and their classes."""
    import numpy as np
    import torch

    from heatproof.images import open_image
    from heatproof.models import load_model
    from heatproof.types import Batch

    labels = torch.as_tensor(np.asarray(dataset.labels_data).astype(np.int64))
    rows = dataset.features_data
    if shape is not None:
        pixels = torch.as_tensor(np.asarray(rows, dtype=np.float32)).reshape(-1, *shape)
        return Batch(tuple(f"{i:06d}" for i in range(len(pixels))), pixels, labels)
    files = np.asarray(rows).reshape(len(labels), -1)
    if files.shape[1] != 1 or not all(isinstance(file, str) for file in files[:, 0]):
        raise InputError(
            "data are one column of image files, or numbers with the shape of an image in the config"
        )
    ready = preprocess or load_model(module).preprocess
    return Batch(tuple(files[:, 0]), torch.stack([ready(open_image(file)) for file in files[:, 0]]), labels)


__getattr__ = lazy_classes(
    __name__, {"HeatproofEvaluator": (EvaluatorHooks, lambda: need(BASE, EXTRA).ModelEvaluator)}
)
