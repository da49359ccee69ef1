"""Reports in TensorBoard, MLflow and Weights & Biases: written offline by the real packages and read back."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_monitor import Blanked, spots
from torch import nn

from heatproof.errors import InputError, MissingExtraError
from heatproof.monitor import trackers
from heatproof.monitor.watch import Monitor


def train(*loggers: Any) -> tuple[list[Any], nn.Module]:
    """Two epochs; the maps of class b go blank in the second, which is an alarm."""
    images, labels = spots()
    model = Blanked()
    monitor = Monitor(
        images, labels, ["layercam", "gradcam++"], layer="features", class_names=["a", "b"], loggers=loggers
    )
    reports = [monitor.step(model, 1)]
    model.blank = True
    reports.append(monitor.step(model, 2))
    assert reports[1].new_alarms
    return reports, model


def test_scalars_are_named_by_method_and_class() -> None:
    (report, _), _ = train()
    scalars = report.scalars()
    assert scalars["heatproof/cscore/layercam/all"] == report.cscore["layercam"]
    assert scalars["heatproof/cscore/gradcam++/b"] == report.by_class["gradcam++"]["b"].value
    assert scalars["heatproof/gold/layercam/a"] == 12
    assert scalars["heatproof/auc"] == report.auc
    assert all(map(math.isfinite, scalars.values()))


def test_the_picture_shows_each_class_under_each_map() -> None:
    (report, _), _ = train()
    picture = report.picture()
    assert picture.dtype == np.uint8 and picture.shape == (2 * 20, 3 * 20, 3)
    tile = picture[:16, 20:36].astype(int)
    redness = tile[..., 0] - tile[..., 2]
    assert redness[6:10, 6:10].min() > 50 > redness[12:, 12:].max()  # the spot is what the map shows


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reports, _ = train(trackers.TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for report in reports:
        for name, value in report.scalars().items():
            result = {e.step: e.value for e in events.Scalars(name)}
            assert result[report.epoch] == pytest.approx(value, rel=1e-6)
    (text,) = events.Tensors("heatproof/alarms/text_summary")
    assert text.step == 2
    assert "attribution collapse" in text.tensor_proto.string_val[0].decode()
    assert [(i.step, i.height, i.width) for i in events.Images("heatproof/maps")] == [
        (1, 40, 60),
        (2, 40, 60),
    ]


def test_tensorboard_takes_a_writer_of_the_user(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    assert trackers.TensorBoard(writer).writer is writer
    writer.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_mlflow(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    experiment = mlflow.create_experiment("monitored", artifact_location=(tmp_path / "files").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        reports, _ = train(trackers.MLflow())
    client = mlflow.MlflowClient()
    stored = client.get_metric_history(run.info.run_id, "heatproof/cscore/gradcampp/b")
    expected = [r.by_class["gradcam++"]["b"].value for r in reports]
    assert [(m.step, m.value) for m in stored] == list(enumerate(expected, 1))
    assert client.get_metric_history(run.info.run_id, "heatproof/auc")[0].value == reports[0].auc
    alarms = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/heatproof/alarms/epoch-002.txt")
    assert "attribution collapse" in alarms
    pictures = [f.path for f in client.list_artifacts(run.info.run_id, "heatproof/maps")]
    assert pictures == ["heatproof/maps/epoch-001.png", "heatproof/maps/epoch-002.png"]
    assert mlflow.active_run() is None
    reports, _ = train(trackers.MLflow(run.info.run_id))  # a run by its id need not be active
    assert len(client.get_metric_history(run.info.run_id, "heatproof/auc")) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", dir=tmp_path, project="monitored", settings=wandb.Settings(silent=True))
    reports, _ = train(trackers.WandB(run))
    run.log({"loss": 0.5}, step=1)  # not refused: the second epoch left the user's step open
    run.finish()
    wandb.teardown()  # offline, only this waits until the file is written
    (record,) = tmp_path.rglob("*.wandb")
    first, second = read_history(record)
    for row, report in zip((first, second), reports, strict=True):
        assert row["heatproof/epoch"] == report.epoch
        assert row["heatproof/cscore/layercam/all"] == report.cscore["layercam"]
    assert "loss" not in first and second["loss"] == 0.5
    assert [p.suffix for p in tmp_path.rglob("*.png")] == [".png", ".png"]
    (page,) = tmp_path.rglob("*.html")
    assert "attribution collapse" in page.read_text()


def read_history(path: Path) -> list[dict[str, Any]]:
    """The rows in a run file of wandb: records cut into blocks of 32 KiB, as LevelDB writes its log."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too short for a record's head
            at += 32768 - at % 32768
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            rows += [items] if items else []
    return rows


def test_a_tracker_without_a_run_or_that_fails_does_not_stop_training(caplog: Any) -> None:
    class Offline:
        def log(self, report: Any) -> None:
            raise ConnectionError("no route to host")

    reports, _ = train(Offline())
    assert [report.problem for report in reports] == ["", ""]
    assert "Offline could not log epoch 1: no route to host" in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_run_must_be_active() -> None:
    (report, _), _ = train()
    for package, tracker in (("mlflow", "MLflow"), ("wandb", "WandB")):
        pytest.importorskip(package)
        with pytest.raises(InputError, match="no active"):
            getattr(trackers, tracker)().log(report)


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: Any) -> None:
    import heatproof.errors

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

    monkeypatch.setattr(heatproof.errors.importlib, "import_module", absent)
    for make in (trackers.MLflow, trackers.WandB, lambda: trackers.TensorBoard("runs")):
        with pytest.raises(MissingExtraError, match=r"pip install 'heatproof\[trackers\]'"):
            make()


def test_loggers_do_not_change_what_training_draws() -> None:
    class Draws:
        def log(self, report: Any) -> None:
            torch.rand(3)
            np.random.rand(3)  # noqa: NPY002

    images, labels = spots()
    model = Blanked()
    monitor = Monitor(images, labels, layer="features", loggers=[Draws()])
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    assert monitor.step(model, 1) is not None
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
