"""Runs of networks that name no class: values, regions, boxes and similarities come out as rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import heatproof as hp
from heatproof.errors import InputError
from heatproof.run.engine import run_study
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import judge

NETWORKS = """
import torch
from torch import nn
from heatproof.images import Preprocess
from heatproof.models import Model

def body():
    torch.manual_seed(0)
    return nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()

def made(*parts):
    return Model(nn.Sequential(*parts), preprocess=Preprocess(size=(16, 16), resize=16))

def vector(d=1):
    return made(*body(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, d))

def pixels():
    return made(*body(), nn.Conv2d(8, 3, 1))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads")
    (path / "net.py").write_text(NETWORKS)
    draw = np.random.default_rng(0)
    for i in range(5):
        (path / "pictures" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        noise = draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path / "pictures" / "ab"[i % 2] / f"{i}.png")
    np.save(path / "references.npy", draw.standard_normal((2, 4)).astype(np.float32))
    return path


def study(folder: Path, metrics: list[str], **model: Any) -> dict[str, Any]:
    for key in ("spec", "references"):
        if key in model:
            model[key] = str(folder / model[key])
    return {
        "methods": ["gradcam", "gradient"],
        "metrics": metrics,
        "run": {"batch_size": 3, "threads": 1, "device": "cpu", "pictures": False},
        "model": model,
        "images": {"kind": "folder", "path": str(folder / "pictures")},
    }


METRICS = ["insertion(steps=4)", "specificity(draws=1, steps=2)", "fragility(draws=1)"]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("regression", {"spec": "net.py:vector", "head": "regression", "tolerance": 1.0}),
        ("segmentation", {"spec": "net.py:pixels"}),
        ("embedding", {"spec": "net.py:vector", "options": {"d": 4}, "references": "references.npy"}),
    ],
)
def test_a_run_has_rows_for_what_is_explained(folder: Path, name: str, model: dict[str, Any]) -> None:
    result = run_study(study(folder, METRICS, **model), folder / name)
    assert result.done == result.units and not result.broken
    rows = result.folder.scores().sql("select * from scores where method = '' order by metric, image")
    kinds = {"predicted", "value"} | ({"probability"} if name == "segmentation" else set())
    assert {row["metric"] for row in rows} == kinds and len(rows) == 5 * len(kinds)
    assert all(math.isfinite(row["value"]) and row["label"] is None for row in rows)
    scored = result.folder.scores().sql("select value, reason from scores where method <> ''")
    assert all(math.isfinite(row["value"]) or row["reason"] for row in scored)
    verdict = judge(read_run(result.folder))
    assert not any("not numbers" in sentence for sentence in verdict.notes)


def test_the_value_of_a_row_is_what_the_network_says(folder: Path) -> None:
    given = study(folder, [], spec="net.py:vector", head="regression")
    result = run_study(given, folder / "values")
    rows = result.folder.scores().sql("select image, value from scores where metric = 'value' order by image")
    model = hp.load_model(given["model"]["spec"])
    pictures = [folder / "pictures" / row["image"] for row in rows]
    with torch.no_grad():
        expected = model.module(model.see(pictures))[:, 0]
    assert [row["value"] for row in rows] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_monitor_and_the_contrast_test_need_classes(caplog: pytest.LogCaptureFixture) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 14 * 14, 1))
    model, inputs = hp.load_model(net.eval(), head="regression"), torch.randn(40, 3, 16, 16)
    labels = torch.arange(40) % 2
    hp.monitor.Monitor(inputs, labels, ["gradient"]).step(model, 1)  # a training goes on
    assert "head is 'regression', which has no classes" in caplog.text
    with pytest.raises(InputError, match="the contrast test needs a network that names one class"):
        hp.contrast(model, inputs, labels)


@pytest.mark.parametrize("metric", ["accuracy", "auc", "cscore"])
def test_metrics_of_classes_are_refused_before_anything_is_done(folder: Path, metric: str) -> None:
    given = study(folder, [metric], spec="net.py:vector", head="regression")
    with pytest.raises(InputError, match=f"head is 'regression', which has no classes.*{metric}") as caught:
        run_study(given, folder / "refused")
    assert "\n" not in str(caught.value) and not (folder / "refused").exists()
