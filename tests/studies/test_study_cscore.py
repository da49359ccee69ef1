"""The C-Score study end to end: training, checkpoints, tables that follow from the rows, new weights."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from heatproof.cli import main
from heatproof.errors import InputError
from heatproof.images import Preprocess, Source
from heatproof.metrics.results import PerClass
from heatproof.report.tables import Value
from heatproof.store import RunFolder
from heatproof.studies.cscore import protocol
from heatproof.studies.cscore.protocol import check, compare, cscore_study
from heatproof.studies.cscore.results import candidates, recommend
from heatproof.studies.settings import CscoreSettings
from heatproof.train import read_data
from heatproof.verdict.trajectory import CheckpointState, ClassState, Trajectory

pytestmark = pytest.mark.trains
NETWORK = """
from heatproof.train import small_net
def build(num_classes=2):
    return small_net(num_classes, size=32, width=4)
"""


def pictures(folder: Path, count: int = 24, classes: tuple[str, ...] = ("disc", "square")) -> Path:
    """Bright shapes at random places."""
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            random = np.random.default_rng((k, i))
            pixels = random.integers(0, 60, (32, 32, 3), dtype=np.uint8)
            y, x = random.integers(8, 24, 2)
            rows, columns = np.indices((32, 32))
            inside = (rows - y) ** 2 + (columns - x) ** 2 < 36
            if name == "square":
                inside = (abs(rows - y) < 5) & (abs(columns - x) < 5) & ((rows + columns) % 2 == 0)
            pixels[inside] = 230
            Image.fromarray(pixels).save(folder / name / f"{i:02d}.png")
    return folder


def settings(folder: Path, **changed: object) -> CscoreSettings:
    (folder / "net.py").write_text(NETWORK)
    given: dict[str, object] = {
        "images": (folder / "pictures",), "out": folder / "out", "model": f"{folder}/net.py:build",
        "methods": ("gradcam", "layercam"), "head_epochs": 2, "full_epochs": 2, "head_lr": 3e-3,
        "full_lr": 3e-3, "first_phase": "all", "keep": (1, 2, 4), "batch_size": 8, "device": "cpu",
        "threads": 1, "train_batch": 8,
    }  # fmt: skip
    return CscoreSettings(**(given | changed))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cscore")
    pictures(folder / "pictures")
    assert cscore_study(settings(folder)).page is not None
    return folder


def test_the_study_leaves_a_page_with_every_table_and_figure(finished: Path) -> None:
    out = finished / "out"
    text = (out / "summary.md").read_text()
    assert "## What to use" in text and "10 images held out (20% of each class)" in text
    for name in (
        "classifier",
        "training",
        "overall",
        "classes",
        "gaps",
        "methods-apart",
        "rises",
        "causes",
        "depth",
    ):
        assert (out / "tables" / f"{name}.csv").exists(), name
    for name in ("trajectories", "ends", "net-change", "by-class", "depth"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 2000, name
    assert sorted(p.name for p in (out / "training").glob("*.safetensors")) == [
        "epoch01.safetensors", "epoch02.safetensors", "epoch04.safetensors",
    ]  # fmt: skip


def test_the_tables_say_what_the_rows_say(finished: Path) -> None:
    rows = (
        RunFolder.open(finished / "out")
        .scores()
        .sql("select checkpoint, method, value from scores where metric = 'cscore' and label is null")
    )
    table = (finished / "out" / "tables" / "overall.csv").read_text().splitlines()
    checkpoints = table[0].split(",")[1:-1]
    assert table[-1].startswith("average,") and table[0].endswith(",change")
    for line in table[1:-1]:
        method, *values, change = line.split(",")
        assert float(change) == pytest.approx(float(values[2]) - float(values[1]))  # of epochs 4 and 2
        for name, value in zip(checkpoints, values, strict=True):
            (row,) = [r for r in rows if (r["checkpoint"], r["method"]) == (name, method)]
            assert float(value) == pytest.approx(row["value"], nan_ok=True)


def test_every_cam_of_one_layer_is_swept(finished: Path) -> None:
    with (finished / "out" / "tables" / "depth.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == {"gradcam", "layercam"}
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    assert len(layers) > 2 and len(rows) == len(layers) * 2 * 2


def test_lists_weights_and_gradients_may_be_chosen(tmp_path: Path) -> None:
    """All at once: the metric says so, the alarms count the anchored lists, the gradients are on the page."""
    pictures(tmp_path / "pictures", 12)
    chosen = {"tau": 0.3, "weights": "calibrated", "anchor": "last", "gradients": True, "sweep": False}
    outcome = cscore_study(settings(tmp_path, **chosen))
    rows = outcome.run.folder.scores().sql("select distinct metric from scores where metric like 'cscore(%'")
    assert [r["metric"] for r in rows] == ["cscore(tau=0.3, weights='calibrated', anchor='epoch04')"]
    lists = [tuple(c.classes.values()) for c in Trajectory.from_run(outcome.run.folder)]
    assert len(lists) == 3 and len(set(lists)) == 1, "the lists of the last epoch hold at all of them"
    assert "## Causes of collapse" in outcome.page.read_text()
    assert len(outcome.book.tables["gradients"].rows) == 4


def test_consistency_and_correctness_stand_in_one_table(tmp_path: Path) -> None:
    """Boxes of a CSV file come through the split; a box round the whole picture holds the whole map."""
    pictures(tmp_path / "pictures", 8)
    names = [f"{c}/{i:02d}.png" for c in ("disc", "square") for i in range(8)]
    lines = [f"pictures/{name},{name.split('/')[0]},0,0,31,31" for name in names]
    (tmp_path / "boxes.csv").write_text("\n".join(["path,label,x0,y0,x1,y1", *lines]) + "\n")
    given = settings(tmp_path, images=(tmp_path / "boxes.csv",), kind="csv", sweep=False, held_out=0.5)
    table = cscore_study(given).book.tables["places"]
    heads = [c.name for c in table.columns]
    assert heads[:3] == ["method", "class", "C-Score"] and len(table.rows) == 4
    inside = [row[heads.index("share inside")] for row in table.rows]
    assert all(isinstance(cell, Value) and (cell.n == 0 or cell.value == 1) for cell in inside)
    assert any(isinstance(cell, Value) and cell.n for cell in inside)


def test_held_out_pictures_were_not_trained_on(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[set[str]] = []

    def spy(source: Source, preprocess: Preprocess, rows: list[int]) -> Any:
        read.append({source.samples[i].id for i in rows})
        return read_data(source, preprocess, rows)

    monkeypatch.setattr(protocol, "read_data", spy)
    cscore_study(settings(finished))
    trained, held_out = read
    rows = (finished / "out" / "pictures.csv").read_text().splitlines()[1:]
    assert {row.split(",")[0] for row in rows} == held_out and not trained & held_out
    assert len(trained) == 38 and len(held_out) == 10


def test_a_picture_named_twice_counts_once_and_has_one_label(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "pictures", 3)
    source, _ = check(settings(tmp_path, images=(folder, folder), keep=(1,)))
    assert len(source) == 6
    for k, label in enumerate(("disc", "square")):
        (tmp_path / f"{k}.csv").write_text(f"path,label\npictures/disc/00.png,{label}\n")
    with pytest.raises(InputError, match="two labels, 'disc' and 'square'"):
        check(settings(tmp_path, images=(tmp_path / "0.csv", tmp_path / "1.csv"), kind="csv"))


def test_pictures_drawn_from_one_of_two_places_are_still_found(tmp_path: Path) -> None:
    places = pictures(tmp_path / "both" / "many"), pictures(tmp_path / "both" / "few", 1)
    source, root = check(settings(tmp_path, images=places, limit=2))
    assert all(sample.id.startswith("many/") for sample in source.samples)
    assert root == tmp_path / "both" and all((root / sample.id).exists() for sample in source.samples)


def test_running_again_changes_nothing(finished: Path) -> None:
    before = (finished / "out" / "summary.md").read_bytes()
    weights = (finished / "out" / "training" / "epoch04.safetensors").stat().st_mtime_ns
    cscore_study(settings(finished))
    assert (finished / "out" / "summary.md").read_bytes() == before
    assert (finished / "out" / "training" / "epoch04.safetensors").stat().st_mtime_ns == weights


def test_weights_that_exist_need_no_training(finished: Path, tmp_path: Path) -> None:
    given = settings(
        finished, out=tmp_path / "out", sweep=False,
        checkpoints=(str(finished / "out" / "training" / "epoch*.safetensors"),),
    )  # fmt: skip
    outcome = cscore_study(given)
    assert outcome.page is not None and not (tmp_path / "out" / "training").exists()
    assert "48 images:" in outcome.page.read_text()


VOLUMES = """
from torch import nn
from heatproof.images import Preprocess
from heatproof.models import Model
def build(num_classes=2):
    network = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 6, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, num_classes),
    )
    return Model(network, "volumes", Preprocess((8, 16, 16), (8, 16, 16), (0.5,), (0.5,)))
"""


def scans(folder: Path, count: int = 10) -> Path:
    """Scans with a bright ball, small or large, of which the window is a part."""
    z, y, x = np.indices((8, 16, 16))
    for k, name in enumerate(("large", "small")):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            random = np.random.default_rng((k, i))
            values = random.normal(40, 20, (8, 16, 16))
            ball = (z - 4) ** 2 + (y - 8) ** 2 + (x - 8) ** 2 < (16 if k == 0 else 4)
            values[ball] += 150
            np.save(folder / name / f"{i}.npy", values.astype(np.float32))
    return folder


def test_volumes_are_trained_on_and_scored(tmp_path: Path) -> None:
    """CT: values are windowed alike in training and in the run; a scan without a window is refused."""
    scans(tmp_path / "scans")
    (tmp_path / "volumes.py").write_text(VOLUMES)
    given = settings(
        tmp_path, images=(tmp_path / "scans",), kind="arrays", axes="dhw", window=(100.0, 250.0),
        model=f"{tmp_path}/volumes.py:build", methods=("gradcam", "eigencam"), held_out=0.4, full_lr=1e-2,
        head_lr=1e-2, sweep=False, gradients=True,
    )  # fmt: skip
    outcome = cscore_study(given)
    text = outcome.page.read_text()
    assert "8 images held out" in text and "## Causes of collapse" in text
    maps = outcome.run.folder.maps().read("epoch04", "gradcam")
    assert maps.image_size == (8, 16, 16) and maps.values.ndim == 4
    assert {row[0] for row in outcome.book.tables["causes"].rows} == {
        "gradient norm", "gradient norm over batches", "loss over batches", "learning rate",
    }  # fmt: skip
    (rows,) = outcome.run.folder.scores().sql(
        "select count(*) as n from scores where metric = 'f1' and label is null"
    )
    assert rows["n"] == 3
    with pytest.raises(InputError, match=r"nothing to train on: .* set preprocess\.window"):
        cscore_study(replace(given, window=(), out=tmp_path / "none"))
    with pytest.raises(InputError, match="these are volumes"):
        cscore_study(replace(given, transforms=True, out=tmp_path / "none"))


def test_nifti_volumes_come_from_a_csv_with_masks(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    scans(tmp_path / "scans", 6)
    lines = ["path,label,mask_ball"]
    for file in sorted((tmp_path / "scans").glob("*/*.npy")):
        values = np.load(file)
        for name, array in (("scan", values), ("ball", (values > 120).astype(np.uint8))):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), file.with_name(f"{file.stem}-{name}.nii.gz"))
        place = f"scans/{file.parent.name}/{file.stem}"
        lines.append(f"{place}-scan.nii.gz,{file.parent.name},{place}-ball.nii.gz")
    (tmp_path / "scans.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "volumes.py").write_text(VOLUMES)
    given = settings(
        tmp_path, images=(tmp_path / "scans.csv",), kind="nifti", window="range", methods=("gradcam",),
        model=f"{tmp_path}/volumes.py:build", held_out=0.5, sweep=False, head_epochs=1, full_epochs=1,
        keep=(2,),
    )  # fmt: skip
    table = cscore_study(given).book.tables["places"]
    assert len(table.rows) == 2 and "hits the object" in [c.name for c in table.columns]


def test_the_paper_s_form_of_the_multi_scale_map_is_an_option(tmp_path: Path) -> None:
    plain = settings(tmp_path, methods=("gradcam", "ms-gradcam++"))
    assert plain.explained == plain.methods
    assert replace(plain, paper=True).explained == ("gradcam", "ms-gradcam++(scaled=false)")


def heatproof(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_new_weights_are_compared_with_a_reference(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = finished / "out" / "training"
    new = ["--checkpoints", weights / "epoch04.safetensors", "--out", tmp_path / "same"]
    same = heatproof("study", "cscore", "--reference", finished / "out", *new)
    assert same.exit_code == 0, same.stderr
    assert "no worse" in same.stdout
    refused = heatproof("study", "cscore", "--reference", finished / "out")
    assert refused.exit_code == 2 and "name it with --checkpoints FILE" in refused.stderr


def test_other_pictures_than_the_reference_had_are_refused_before_any_work(
    finished: Path, tmp_path: Path
) -> None:
    pictures(tmp_path / "others", 5)
    lines = [f"others/{name}/{i:02d}.png,{name}" for name in ("disc", "square") for i in range(5)]
    (tmp_path / "others.csv").write_text("\n".join(["path,label", *(f"{tmp_path}/{x}" for x in lines)]))
    weights = finished / "out" / "training" / "epoch04.safetensors"
    with pytest.raises(InputError, match="the images are not those of"):
        compare(finished / "out" / "run", weights, tmp_path / "new", images=tmp_path / "others.csv")
    assert not (tmp_path / "new").exists()


def test_from_the_command_line_in_an_empty_folder(tmp_path: Path) -> None:
    pictures(tmp_path / "shapes", 8)
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "study.toml").write_text(
        'images = ["shapes"]\nmodel = "net.py:build"\nmethods = ["gradcam"]\nhead_epochs = 1\n'
        'full_epochs = 1\nkeep = "1,2"\nsweep = false\nout = "here"\ndevice = "cpu"\n'
    )
    done = CliRunner().invoke(main, ["study", "cscore", str(tmp_path / "study.toml"), "--model",
                                     f"{tmp_path}/net.py:build"])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "epoch 2, fine-tuning" in done.output
    assert (tmp_path / "here" / "summary.md").exists()


def test_bad_input_is_reported_before_training(tmp_path: Path) -> None:
    pictures(tmp_path / "pictures", 3, ("disc",))
    with pytest.raises(InputError, match="one class only"):
        check(settings(tmp_path))
    pictures(tmp_path / "pictures", 3)
    with pytest.raises(InputError, match="no checkpoint would be stored"):
        check(settings(tmp_path, keep=(9,)))
    with pytest.raises(InputError, match="seeds must differ; got 0,1,0"):
        settings(tmp_path, seeds=(0, 1, 0))
    with pytest.raises(InputError, match="there is no file"):
        cscore_study(settings(tmp_path, checkpoints=("none*.pt",)))
    assert not (tmp_path / "out" / "training").exists()


def state(value: float, low: float, n: int = 50) -> PerClass:
    return PerClass(value, n, 0.0, (low, min(1.0, value + value - low)))


def run_of(*checkpoints: tuple[float, dict[str, tuple[PerClass, PerClass]]]) -> Trajectory:
    made = []
    for k, (auc, methods) in enumerate(checkpoints, 1):
        states = {
            m: replace(
                state((a.value + b.value) / 2, (a.interval[0] + b.interval[0]) / 2), classes={0: a, 1: b}
            )
            for m, (a, b) in methods.items()
        }
        made.append(CheckpointState(f"e{k}", k, auc, auc, dict.fromkeys((0, 1), ClassState(60, 50)), states))
    return Trajectory(tuple(made), ("healthy", "ill"))


def test_the_recommendation_takes_the_highest_floor_where_auc_holds() -> None:
    good = {"gradcam": (state(0.8, 0.7), state(0.7, 0.65)), "layercam": (state(0.9, 0.85), state(0.6, 0.5))}
    better = {"gradcam": (state(0.95, 0.9), state(0.95, 0.9))}
    run = run_of((0.95, good), (0.6, better))
    chosen = candidates(run, [])
    assert [(c.checkpoint.name, c.method) for c in chosen] == [("e1", "gradcam"), ("e1", "layercam")]
    text = recommend(run, [])
    assert "**e1**" in text and "**gradcam**" in text and "ill, 50 images" in text
    nothing = run_of((0.9, {"gradcam": (PerClass(math.nan, 1, 0.0, reason="one"), state(0.5, 0.4))}))
    assert "No checkpoint can be recommended" in recommend(nothing, [])


def test_the_recommendation_compares_auc_image_by_image() -> None:
    """A checkpoint that is surely worse on the same images is no candidate, however wide each error is."""
    same = {"gradcam": (state(0.8, 0.7), state(0.8, 0.7))}
    run = run_of((0.95, same), (0.93, same))
    moves = {str(i): (-1) ** i * 0.002 for i in range(120)}
    nearly = {name: move * 1.1 for name, move in moves.items()}
    known = replace(run, checkpoints=tuple(
        replace(state, moves=each) for state, each in zip(run, (moves, nearly), strict=True)))  # fmt: skip
    assert [c.checkpoint.name for c in candidates(run, [])] == ["e1", "e2"]
    assert [c.checkpoint.name for c in candidates(known, [])] == ["e1"]
