"""Verdicts as tags in a real MLflow registry: a database in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_monitor_training import data, network

import heatproof as hp
from heatproof.monitor.trackers import tag_model

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own parts are full of them
METHODS = ["gradcam", "gradcam++"]


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
