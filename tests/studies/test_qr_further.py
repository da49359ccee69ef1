"""The rest of CAMBench-QR: axes, size, empty maps, scenes, edited finders, two networks, guidance."""

from __future__ import annotations

import csv
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy.stats import spearmanr

from heatproof.cli import main
from heatproof.images.codes import edit_finders, make_qr
from heatproof.registry import explainers
from heatproof.report.tables import number
from heatproof.studies.qr.protocol import edit_scores, masses, scene_scores
from heatproof.studies.qr.results import (
    Results,
    axes_of,
    compared,
    guidance,
    ours,
    partial_rho,
    qr_table,
    stored_table,
)
from heatproof.studies.qr.trainings import Trained
from heatproof.studies.settings import QrSettings
from heatproof.train import DEPTHS, REGIMES, Epoch, History
from heatproof.types import Maps

pytestmark = pytest.mark.usefixtures("short_studies")

SMALL = [
    "--size", "64", "--width", "2", "--train", "16", "--test", "12", "--proxy", "0", "--head-epochs", "1",
    "--epochs", "1", "--train-batch", "16", "--subset", "2", "--robust", "2", "--causal", "12", "--threads",
    "1", "--device", "cpu", "--methods", "gradcam,eigencam", "--no-depth-study", "--no-ablation",
    "--no-figures", "--curves", "all", "--scenes", "3", "--edits", "6", "--layer", "last_conv",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("qr") / "out"
    result = CliRunner().invoke(main, ["study", "qr", *SMALL, "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out


def rows(out: Path, name: str) -> list[dict[str, str]]:
    with (out / "tables" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def drawn(values: np.ndarray) -> Maps:
    heat = torch.from_numpy(values.astype(np.float32))
    return Maps("made", heat, (values.shape[1], values.shape[2]), torch.ones(len(heat), dtype=torch.long))


def test_axes_are_the_papers() -> None:
    """Figure 3 names ten methods; a method of each kind stands where the paper puts it."""
    papers = {
        "gradcam": ("gradient", "global pooling", "light"),
        "xgradcam": ("gradient", "global pooling", "light"),
        "layercam": ("activation", "layer-wise", "light"), "eigengradcam": ("gradient", "subspace", "light"),
        "eigencam": ("activation", "subspace", "heavy"),
        "scorecam": ("perturbation", "global pooling", "heavy"),
        "ablationcam": ("perturbation", "global pooling", "heavy"),
    }  # fmt: skip
    assert {name: axes_of(explainers.get(name)) for name in papers} == papers


def test_every_table_has_its_empty_maps(finished: Path) -> None:
    for name in ("table-2", "coverage", "faithfulness", "table-3", "distortions", "table-4", "scenes"):
        ours = [row for row in rows(finished, name) if row.get("source") == "ours"]
        assert ours and all(0 <= float(row["empty maps"]) <= 1 for row in ours), name


def test_curves_on_all_codes(finished: Path) -> None:
    assert {row["n"] for row in rows(finished, "faithfulness") if row["method"] == "random"} == {"12"}


def test_axes_scenes_and_edits_are_on_the_page(finished: Path) -> None:
    page = (finished / "summary.md").read_text()
    for words in (
        "Families of methods",
        "Several codes, edited codes",
        "Counterfactual edits",
        "size taken out",
        "Our own view",
    ):
        assert words in page
    levels = {(row["axis"], row["level"]) for row in rows(finished, "axes")}
    assert ("importance", "gradient") in levels and ("importance", "activation") in levels
    edits = [row for row in rows(finished, "edits") if row["source"] == "ours"]
    assert {row["method"] for row in edits} == {"gradcam", "eigencam", "random", "edges"}
    assert all(float(row["leaves, remove"]) > 0 for row in edits if row["method"] == "edges")


def test_a_second_call_measures_nothing_again(finished: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in (finished / "measured" / "scores").glob("*.parquet")}
    result = CliRunner().invoke(main, ["study", "qr", *SMALL, "--out", str(finished)])
    assert result.exit_code == 0, result.output
    after = {p.name: p.stat().st_mtime_ns for p in (finished / "measured" / "scores").glob("*.parquet")}
    assert before == after


def test_an_oracle_finds_every_code_of_a_scene() -> None:
    codes, other = np.zeros((2, 2, 20, 20), bool), np.zeros((2, 1, 20, 20), bool)
    codes[:, 0, 2:6, 2:6], codes[:, 1, 12:16, 12:16], other[:, 0, 2:6, 12:16] = True, True, True
    half = codes[:, 0].astype(float)
    for made, expected in (
        (codes.any(1), (1, 0, 1, 1)),
        (half, (1, 0, 0.5, 0)),
        (other[:, 0], (0, 1, 0, math.nan)),
    ):
        scores = scene_scores(drawn(np.asarray(made, float)), codes, other)
        got = [float(scores[name][0]) for name in
               ("scene_codes", "scene_distractors", "scene_found", "scene_weakest")]  # fmt: skip
        assert got == pytest.approx(expected, nan_ok=True)
    empty = scene_scores(drawn(np.zeros((2, 20, 20))), codes, other)
    assert empty["scene_codes"].isnan().all() and "constant" in empty.reasons("scene_codes")[0]


def test_a_map_that_moves_with_the_finder_follows_the_edit() -> None:
    codes = make_qr(4, 0, 128, 1)
    edited = edit_finders(codes, "move", 0)
    before, after = drawn(edited.before.astype(float)), drawn(edited.after.astype(float))
    scores = edit_scores(before, after, edited, "move")
    done = torch.from_numpy(edited.done)
    assert (scores["edit_leaves(move)"][done] == 1).all() and (scores["edit_arrives(move)"][done] == 1).all()
    still = edit_scores(before, before, edited, "move")
    assert (still["edit_leaves(move)"][done] == 0).all() and (still["edit_arrives(move)"][done] == 0).all()
    assert scores["edit_leaves(move)"][~done].isnan().all()
    gone = edit_scores(before, after, edit_finders(codes, "remove", 0), "remove")
    assert gone["edit_arrives(remove)"].isnan().all()


def test_mass_is_a_share() -> None:
    heat = np.random.default_rng(0).random((3, 9, 9))
    masks = torch.zeros(3, 2, 9, 9, dtype=torch.bool)
    masks[:, 0, :4], masks[:, 1, 4:] = True, True
    assert torch.allclose(masses(drawn(heat), masks).sum(1), torch.ones(3, dtype=torch.float64))


def test_a_size_that_drives_both_is_taken_out() -> None:
    rng = np.random.default_rng(0)
    size = rng.random(600)
    noise = rng.normal(0, 0.05, (2, 600))
    columns = np.stack([size + noise[0], size + noise[1], size], 1)
    assert spearmanr(columns[:, 0], columns[:, 1]).statistic > 0.9
    assert abs(partial_rho(columns)) < 0.1
    own = np.stack([noise[0], noise[0] + 0.3 * noise[1], size], 1)
    assert partial_rho(own) > 0.9
    for count in (600, 5):
        by_image = {
            ("zs", "m", name): {str(i): float(value) for i, value in enumerate(own[:count, k])}
            for k, name in enumerate(("fmr", "drop"))
        }
        sizes = {str(i): float(value) for i, value in enumerate(size)}
        made = Results(QrSettings(), 0, Trained({}, {}), {"run": by_image}, sizes=sizes)
        value = made.rho_without_size("zs", "m", "fmr", "drop")
        if count < 9:
            assert math.isnan(value.value)
        else:
            assert value.interval and value.interval[0] < value.value < value.interval[1] + 1e-9


def test_partial_correlation_equals_regressing_ranks() -> None:
    from scipy.stats import rankdata

    columns: Any = np.random.default_rng(1).random((40, 3))
    columns[:, 0] += columns[:, 2]
    ranks = np.stack([rankdata(column) for column in columns.T], 1)
    line = np.stack([np.ones(40), ranks[:, 2]], 1)
    left = [ranks[:, k] - line @ np.linalg.lstsq(line, ranks[:, k], rcond=None)[0] for k in (0, 1)]
    assert partial_rho(columns) == pytest.approx(np.corrcoef(*left)[0, 1])


METHODS = ("gradcam", "layercam", "xgradcam", "eigengradcam")


def results_of(leaks: dict[str, float], accuracy: float = 1.0) -> Results:
    """A study whose means are known: leakage by method, 0.01 more with every regime."""
    settings = QrSettings(methods=tuple(leaks), ablation=False)
    columns: Any = {}
    for k, name in enumerate((*REGIMES, "depth-l3-l4", "depth-all")):
        for method, leak in (leaks | {"random": 0.7, "edges": 0.3}).items():
            for metric in ("bl", "fmr", "tmr", "dts", "structure_score(variant='mass')"):
                level = leak + 0.01 * k if metric == "bl" else 1 - leak if "score" in metric else 0.1
                columns[name, method, metric] = {str(i): level + 1e-4 * i for i in range(12)}
            columns[name, method, "degenerate"] = dict.fromkeys(map(str, range(12)), 0.0)
    epoch = Epoch(1, "all", 0.1, 0.1, accuracy, 1.0, 0.0)
    histories = {name: History((epoch,)) for name in (*REGIMES, "depth-l3-l4", "depth-all")}
    return Results(settings, 0, Trained(histories, dict.fromkeys(DEPTHS, 0.5)), {"run": columns})


def test_the_order_of_methods_on_two_networks(tmp_path: Path) -> None:
    same = qr_table(results_of(dict(zip(METHODS, (0.1, 0.2, 0.3, 0.4), strict=True))), "table-2")
    other = qr_table(results_of(dict(zip(METHODS, (0.4, 0.3, 0.2, 0.1), strict=True))), "table-2")
    for name, table in {"same": same, "other": other}.items():
        table.write(tmp_path / name / "tables")
        read = stored_table(tmp_path / name, table)
        for regime in REGIMES:
            for method, cell in ours(read, regime, "BL").items():
                assert number(cell) == pytest.approx(number(ours(table, regime, "BL")[method]))
    both, order = compared("a", same, {"b": tmp_path / "same"})
    assert {row[0] for row in both.rows} == {"a", "b", "paper, ResNet-50", "paper, ConvNeXt-B"}
    leaks = [row for row in order.rows if row[2] == "BL"]
    assert [row[3] for row in leaks] == [1.0] * 3 and {row[5] for row in order.rows} == {4}
    assert [row[4] for row in leaks] == pytest.approx([2 / 24] * 3)  # two of the 24 orders of four methods
    assert {row[6] for row in leaks} == {row[7] for row in leaks} == {"gradcam"}
    _, order = compared("a", same, {"b": tmp_path / "other"})
    leaks = [row for row in order.rows if row[2] == "BL"]
    assert [row[3] for row in leaks] == [-1.0] * 3 and {row[7] for row in leaks} == {"eigengradcam"}
    assert compared("a", same, {}) == []


def test_guidance_names_what_the_tables_say() -> None:
    made = results_of(dict(zip(METHODS, (0.2, 0.9, 0.3, 0.4), strict=True)))
    main_tables = {name: qr_table(made, name) for name in ("table-2", "coverage", "table-5")}
    given = guidance(main_tables, "eigengradcam")
    assert [method for _, method in given["order"]] == ["gradcam", "xgradcam", "eigengradcam", "layercam"]
    assert given["leaky"] == ["layercam"] and given["cells"] == []
    assert {depth for _, depth in given["depths"]} == set(DEPTHS)


def test_a_study_may_return_to_curves_of_the_subset(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "out")
    again = [*SMALL, "--curves", "subset", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, ["study", "qr", *again])
    assert result.exit_code == 0, result.output


def test_two_studies_on_one_page(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "wider"
    wider = [*SMALL, "--width", "3", "--beside", str(finished), "--out", str(out)]
    result = CliRunner().invoke(main, ["study", "qr", *wider])
    assert result.exit_code == 0, result.output
    page = (out / "summary.md").read_text()
    for words in (
        "Is the order of methods the same",
        "Several networks",
        "Guidance from this run",
        "premise does not hold",
    ):
        assert words in page, words
    networks = {row["network"] for row in rows(out, "backbones")}
    other = f"small ({os.path.relpath(finished, tmp_path)})"  # folders of one name stay apart
    assert {"small", other} <= networks
    first = {row["method"]: row["BL"] for row in rows(finished, "table-2") if row["source"] == "ours"}
    mine = {row["method"]: row["BL"] for row in rows(out, "backbones") if row["network"] == other}
    assert mine.keys() == first.keys()
    result = CliRunner().invoke(
        main, ["study", "qr", *wider, "--test", "10", "--out", str(tmp_path / "third")]
    )
    assert result.exit_code == 2 and "has other codes (test is 12, not 10)" in " ".join(result.output.split())
