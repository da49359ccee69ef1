"""Metrics registered from outside, one of each level, and networks that answer NaN: what the rows say."""

from __future__ import annotations

import doctest
import inspect
import math
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import heatproof as hp
from heatproof.cli.listing import list_command
from heatproof.errors import InputError
from heatproof.metrics.results import PerClass
from heatproof.registry import Metric, metric, metrics
from heatproof.report.gallery import gallery
from heatproof.report.page import render
from heatproof.run.config import read_metrics
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from heatproof.types import Maps
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import judge
from tiny_study import make_study, write_study


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    metrics.names()
    monkeypatch.setattr(metrics, "_entries", dict(metrics._entries))
    monkeypatch.setattr(metrics, "_keys", dict(metrics._keys))


@pytest.fixture
def plugins(registry: None) -> list[str]:
    @metric("own_sureness", needs=("probabilities", "labels"))
    def own_sureness(probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return probabilities.gather(1, labels[:, None])[:, 0]

    @metric("class_heat", needs=("maps", "labels"), level="class")
    def class_heat(maps: Maps, labels: torch.Tensor, power: int = 1) -> dict[int, float]:
        heat = maps.upsample().flatten(1).mean(1) ** power
        return {c: float(heat[labels == c].mean()) for c in (0, 1)} | {2: math.nan}

    @metric("mean_sureness", needs=("probabilities",), level="checkpoint")
    def mean_sureness(probabilities: torch.Tensor) -> float:
        return float(probabilities.amax(1).mean())

    @metric("two_numbers", needs=("maps", "probabilities"), level="checkpoint")
    def two_numbers(maps: Maps, probabilities: torch.Tensor) -> PerClass:
        return PerClass(float(len(maps)), len(maps), classes={0: 0.25, 1: 0.75}, reason="as a PerClass")

    return ["own_sureness", "class_heat(power=2)", "mean_sureness", "two_numbers"]


def cells(
    folder: RunFolder, name: str, columns: str = "method, label, value, reason"
) -> list[tuple[Any, ...]]:
    query = f"select {columns} from scores where metric = ? and checkpoint = 'epoch01' order by all"
    return [tuple(row.values()) for row in folder.scores().sql(query, [name])]


def test_a_plug_in_of_each_level_lands_in_the_rows_of_that_level(tmp_path: Path, plugins: list[str]) -> None:
    methods = ["gradcam", "gradient"]
    run_study(make_study(tmp_path, 8, methods, ["accuracy"]), tmp_path / "out")
    run_study(write_study(tmp_path, methods, ["accuracy", *plugins]), tmp_path / "out")  # added later
    folder = run_study(make_study(tmp_path, 8, methods, plugins), tmp_path / "at-once").folder
    later = RunFolder.open(tmp_path / "out")
    for name in plugins:
        assert repr(cells(folder, name)) == repr(cells(later, name))  # NaN is not equal to itself

    chances = dict(cells(folder, "probability", "image || '/' || explained, value"))
    rows = cells(folder, "own_sureness", "method, image, label, value")
    assert [(r[0], r[3]) for r in rows] == [(r[0], pytest.approx(chances[f"{r[1]}/{r[2]}"])) for r in rows]
    assert len(rows) == 8 * 2 and all(row[1] for row in rows)

    heat = cells(folder, "class_heat(power=2)", "method, image, label, explained, value, reason")
    assert [row[:4] for row in heat] == [(m, "", c, c) for m in methods for c in (0, 1, 2)]
    labels = dict(cells(folder, "predicted", "image, label"))
    for method in methods:
        maps = folder.maps().read("epoch01", method, sorted(labels))
        by_hand = maps.upsample().flatten(1).mean(1) ** 2
        for c in (0, 1):
            own = [i for i, name in enumerate(maps.ids) if labels[name] == c]
            assert heat[methods.index(method) * 3 + c][4] == pytest.approx(float(by_hand[own].mean()))
    assert math.isnan(heat[2][4]) and heat[2][5] == "the metric is not defined here"

    (sure,) = cells(folder, "mean_sureness", "method, image, label, value")
    best = [max(chances[f"{name}/{c}"] for c in (0, 1)) for name in labels]
    assert sure == ("", "", None, pytest.approx(np.mean(best)))
    assert cells(folder, "two_numbers") == [
        row
        for method in methods
        for row in ((method, 0, 0.25, ""), (method, 1, 0.75, ""), (method, None, 8.0, "as a PerClass"))
    ]


def test_a_plug_in_of_each_level_is_in_the_tables_the_report_the_verdict_and_the_list(
    tmp_path: Path, registry: None
) -> None:
    facts: dict[str, Any] = {"family": "Heat", "higher_is_better": True, "cite": "me2026warmth"}

    @metric(
        "warmth", needs=("maps",), title="warm places", votes=True, question="map", headline=True, **facts
    )
    def warmth(maps: Maps) -> torch.Tensor:
        """How warm a map is."""
        return maps.upsample().flatten(1).mean(1)

    @metric("class_warmth", needs=("maps", "labels"), level="class", title="warm classes", **facts)
    def class_warmth(maps: Maps, labels: torch.Tensor) -> dict[int, float]:
        """How warm the maps of a class are."""
        return {c: float(warmth(maps)[labels == c].mean()) for c in (0, 1)}

    @metric("all_warmth", needs=("maps",), level="checkpoint", title="warm all over", **facts)
    def all_warmth(maps: Maps) -> float:
        """How warm all maps are."""
        return float(warmth(maps).mean())

    names = ["warmth", "class_warmth", "all_warmth"]
    study = make_study(tmp_path, 32, ["gradcam", "random", "edges"], names)
    folder = run_study(study, tmp_path / "out").folder
    folder.scores().export(tmp_path / "table.tex", "latex")
    table = (tmp_path / "table.tex").read_text()
    data = read_run(folder)
    verdict = judge(data)
    page = render(data, verdict, gallery(data, 2))
    listed = CliRunner().invoke(list_command, ["metrics", "-v"]).output
    for name in names:
        assert metrics.get(name).title in page and name in listed
        assert name.replace("_", "\\_") in table
    assert "Heat" in page and data.headline is not None and data.headline.name == "warmth"
    (test,) = [test for test in verdict.methods[0].tests if test.title == "warm places"]
    assert not test.votes and test.n == 32, "what was not calibrated is information"


def test_a_level_that_cannot_be_served_is_refused_before_work_starts(tmp_path: Path, registry: None) -> None:
    with pytest.raises(InputError, match="level is image, class or checkpoint; got 'dataset'"):
        metric("wide", needs=("maps",), level="dataset")

    @metric("seen", needs=("maps", "images"), level="class")
    def seen(maps: Maps, images: torch.Tensor) -> dict[int, float]:
        raise AssertionError("never called")

    with pytest.raises(InputError, match=r"seen: at level 'class' it has maps, labels and .* but no images"):
        run_study(make_study(tmp_path, 4, ["gradcam"], ["seen"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_wrong_return_raises_a_clear_error(tmp_path: Path, registry: None) -> None:
    @metric("silent", needs=("labels",), level="class")
    def silent(labels: torch.Tensor) -> None:
        return None

    with pytest.raises(InputError, match=r"silent must return a number for each class, such as \{0: 0.5"):
        run_study(make_study(tmp_path, 4, ["gradcam"], ["silent"]), tmp_path / "out")


def test_a_plug_in_that_reads_all_probabilities_needs_all_of_them(registry: None) -> None:
    @metric("spread", needs=("probabilities",), level="checkpoint")
    def spread(probabilities: torch.Tensor) -> float:
        return 0.0

    texts = ["spread", "auc", "accuracy", "cscore", "cscore(tau='adaptive')", "insertion"]
    assert [r.every_class for r in read_metrics(texts)] == [True, True, False, False, True, False]


NAN_NETWORK = """
import torch
from torch import nn
from heatproof.images import Preprocess
from heatproof.models import Model

class Sometimes(nn.Sequential):
    def forward(self, x):
        bright = x.mean((1, 2, 3), keepdim=True)[:, :, 0, 0] > {above}
        return torch.where(bright, torch.nan, super().forward(x))

def tiny():
    torch.manual_seed(0)
    net = Sometimes(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.Conv2d(6, 8, 3, 2), nn.ReLU(),
                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    return Model(net, preprocess=Preprocess(size=(32, 32), resize=32, mean=(0.5,) * 3, std=(0.25,) * 3))
"""


@pytest.mark.parametrize("targets", ["label", "predicted"])
def test_an_output_of_nan_is_a_row_with_the_reason_and_no_prediction(tmp_path: Path, targets: str) -> None:
    metrics = ["accuracy", "auc", "insertion(steps=4)", "randomisation"]
    study = make_study(tmp_path, 8, ["gradcam", "edges"], metrics, run=f'targets = "{targets}"')
    (tmp_path / "net.py").write_text(NAN_NETWORK.format(above=0.0))
    result = run_study(study, tmp_path / "out")
    rows = cells(result.folder, "predicted", "image, explained, value, reason")
    lost = [row[0] for row in rows if math.isnan(row[2])]
    assert 0 < len(lost) < 8 and result.unanswered == len(lost)
    for image, explained, value, reason in rows:
        assert (explained is None, reason) == (
            math.isnan(value),
            "the network's output is NaN or infinite for this image" if image in lost else "",
        )
    assert {
        r[0] for r in cells(result.folder, "probability", "image, value, reason") if math.isnan(r[1])
    } == set(lost)
    known = [row for row in rows if row[0] not in lost]
    labels = dict(cells(result.folder, "predicted", "image, label"))
    (accuracy,) = cells(result.folder, "accuracy", "value")[0]
    assert accuracy == pytest.approx(sum(row[1] == labels[row[0]] for row in known) / len(known))
    columns = "method, image, explained, value, reason"
    flat = {row[1]: row[2:] for row in cells(result.folder, "degenerate", columns) if row[0] == "edges"}
    for image in lost:
        assert flat[image][0] == (None if targets == "predicted" else labels[image])
        assert math.isnan(flat[image][1]) and "NaN or infinite" in flat[image][2]


def test_a_network_that_always_answers_nan_runs_to_the_end(tmp_path: Path) -> None:
    study = make_study(tmp_path, 4, ["gradcam"], ["accuracy", "cscore", "cose"], run='targets = "predicted"')
    (tmp_path / "net.py").write_text(NAN_NETWORK.format(above=-9))
    result = run_study(study, tmp_path / "out")
    assert result.unanswered == 4 and result.done == result.units
    assert all(row[3] for name in ("accuracy", "cscore") for row in cells(result.folder, name))


@pytest.mark.parametrize("entry", list(metrics), ids=lambda entry: entry.name)
def test_every_metric_is_a_documented_public_function_of_its_name(entry: Metric) -> None:
    module = inspect.getmodule(entry.function)
    assert module is not None and module.__name__.startswith("heatproof.metrics.")
    public = getattr(hp.metrics, entry.name)
    others = {"cscore": hp.metrics.cscore_by_class, "structure_score": hp.metrics.structure_map_score}
    assert entry.function is others.get(entry.name, public) and entry.name in hp.metrics.__all__
    for function in {public, entry.function}:
        text = inspect.getdoc(function) or ""
        assert all(part in text for part in ("Args:", "Returns:", "Example:")), function.__name__
        tests = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs=vars(module))
        results = [doctest.DocTestRunner().run(test) for test in tests]
        assert sum(result.attempted for result in results) and not any(result.failed for result in results)


def test_no_module_hides_a_public_name_of_the_metrics() -> None:
    modules = {module.name for module in pkgutil.iter_modules(hp.metrics.__path__)}
    assert not modules & set(hp.metrics.__all__)
