"""MLflow's own evaluate with heatproof's evaluator, and tags in a real registry: a database in a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_monitor_training import data, network

import heatproof as hp
from heatproof.errors import InputError
from heatproof.monitor.mlflow import tag_model, verdict_tags
from heatproof.monitor.trackers import mlflow_name

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own parts are full of them
METHODS = ["gradcam", "gradcam++"]
CONFIG: dict[str, Any] = {"methods": METHODS, "metrics": ["specificity(draws=1, steps=2)"], "seed": 3}


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """With a database, an experiment and a registered network, all in one folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        folder = tmp_path_factory.mktemp("mlflow")
        patch.chdir(folder)
        mlflow = pytest.importorskip("mlflow")
        before = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri(f"sqlite:///{folder / 'runs.db'}")
        mlflow.set_experiment(
            experiment_id=mlflow.create_experiment("maps", artifact_location=(folder / "files").as_uri())
        )
        with mlflow.start_run():
            mlflow.pytorch.log_model(
                network().eval(),
                name="model",
                pip_requirements=[],
                registered_model_name="net",
                serialization_format="pickle",
            )
        yield mlflow
        mlflow.set_tracking_uri(before)


def evaluated(mlflow: Any, rows: Any, targets: Any, config: Any, **options: Any) -> tuple[Any, Any]:
    """What evaluate returned, and the run that it wrote to."""
    with mlflow.start_run() as run:
        result = mlflow.models.evaluate(
            "models:/net/1", rows, targets=targets, model_type="classifier", evaluators="heatproof",
            evaluator_config=config, **options,
        )  # fmt: skip
    return result, mlflow.MlflowClient().get_run(run.info.run_id)


def test_an_evaluation_measures_judges_and_keeps_it(mlflow: Any, tmp_path: Path) -> None:
    images, labels = data(64)
    rows = images.flatten(1).numpy()
    config = {**CONFIG, "shape": (3, 16, 16), "out": str(tmp_path / "run"), "class_names": ["a", "b"]}
    result, saved = evaluated(mlflow, rows, labels.numpy(), config)
    verdict = hp.open_run(tmp_path / "run").verdict()
    assert {method.method for method in verdict.methods} == set(METHODS)

    monitor = hp.monitor.Monitor(images, labels, METHODS, class_names=["a", "b"], seed=3)
    alone = monitor.step(mlflow.pytorch.load_model("models:/net/1"), 1)
    numbers = {mlflow_name(k): v for k, v in alone.scalars().items() if not k.endswith("seconds")}
    assert len(numbers) > 10
    for name, value in numbers.items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-6)
        assert saved.data.metrics[name] == pytest.approx(value, rel=1e-6)
    decided = {m.method: float(m.follows == "yes") for m in verdict.methods if m.follows != "undecided"}
    followed = {name: value for name, value in result.metrics.items() if "/follows/" in name}
    assert followed == {f"heatproof/follows/{mlflow_name(name)}": value for name, value in decided.items()}

    assert {k: v for k, v in saved.data.tags.items() if k.startswith("heatproof.")} == verdict_tags(verdict)
    stored = mlflow.artifacts.load_dict(f"{saved.info.artifact_uri}/heatproof/verdict.json")
    assert stored == json.loads(verdict.json())
    assert result.artifacts["heatproof/verdict.json"].content == stored


def test_pictures_are_read_as_the_network_wants_them(mlflow: Any, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    from heatproof.images import Preprocess

    files = [str(tmp_path / f"{i}.png") for i in range(8)]
    for i, file in enumerate(files):
        pixels = np.random.default_rng(i).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    ready = Preprocess(size=(16, 16), resize=16)
    table = pandas.DataFrame({"picture": files, "label": np.arange(8) % 2})
    result, _ = evaluated(mlflow, table, "label", {"methods": ["gradcam"], "preprocess": ready})
    images = torch.stack([ready(hp.open_image(file)) for file in files])
    alone = hp.monitor.Monitor(images, torch.arange(8) % 2, ["gradcam"])
    report = alone.step(mlflow.pytorch.load_model("models:/net/1"), 1)
    assert result.metrics["heatproof/auc"] == pytest.approx(report.auc)
    with pytest.raises(InputError, match="one column of image files"):
        evaluated(mlflow, data()[0].flatten(1).numpy(), data()[1].numpy(), {"methods": ["gradcam"]})


def test_only_requested_metrics_are_evaluated(mlflow: Any) -> None:
    from heatproof.monitor.mlflow import HeatproofEvaluator

    wanted = HeatproofEvaluator.can_evaluate
    assert "heatproof" in mlflow.models.list_evaluators()
    assert wanted(model_type="classifier", evaluator_config={"methods": ["gradcam"]})
    for kind, config in (("classifier", {}), ("classifier", None), ("classifier", {"pos_label": 1}),
                         ("regressor", {"methods": ["gradcam"]})):  # fmt: skip
        assert not wanted(model_type=kind, evaluator_config=config)
    with mlflow.start_run(), pytest.raises(InputError, match="explains PyTorch models"):
        mlflow.models.evaluate(
            lambda rows: np.zeros(len(rows)), data()[0].flatten(1).numpy(), targets=data()[1].numpy(),
            model_type="classifier", evaluators="heatproof", evaluator_config={"methods": ["gradcam"]},
        )  # fmt: skip


def test_a_registered_model_is_found_by_its_verdict(mlflow: Any, tmp_path: Path) -> None:
    images, labels = data(64)
    monitor = hp.monitor.Monitor(images, labels, METHODS, out=tmp_path / "run")
    monitor.step(network().eval(), 1)
    tags = tag_model("net", 1, tmp_path / "run")
    assert tags["heatproof.follows.gradcampp"] == "undecided" and tags["heatproof.checkpoint"] == "epoch-001"
    client = mlflow.MlflowClient()
    assert client.get_model_version("net", "1").tags == tags
    (outcome,) = client.search_model_versions("tags.`heatproof.follows.gradcam` = 'undecided'")
    assert outcome.version == 1 or outcome.version == "1"
    assert tag_model("net", 1, hp.open_run(tmp_path / "run").verdict()) == tags


def test_mlflow_starts_without_torch() -> None:
    """It loads evaluators when it is imported."""
    pytest.importorskip("mlflow")
    code = (
        "import sys, mlflow.models.evaluation.evaluator_registry as r\n"
        "assert r._model_evaluation_registry.is_registered('heatproof') and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
