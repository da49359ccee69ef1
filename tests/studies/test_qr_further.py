"""The rest of CAMBench-QR: axes, causality at one size, empty maps everywhere, scenes, edited finders."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy.stats import spearmanr

from heatproof.cli import main
from heatproof.images.codes import edit_finders, make_codes
from heatproof.registry import explainers
from heatproof.studies.qr.protocol import edit_scores, masses, scene_scores
from heatproof.studies.qr.results import axes_of, controlled, partial_rho, within_thirds
from heatproof.types import Maps

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
        "layercam": ("gradient", "layer-wise", "light"), "eigengradcam": ("gradient", "subspace", "light"),
        "eigencam": ("activation", "subspace", "light"),  # the paper calls it heavy; here it shares the pass
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
    for words in ("Families of methods", "Several codes, edited codes", "Counterfactual edits", "one size"):
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
    codes = make_codes("qr", 4, 0, 128, 1)
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
    assert within_thirds(columns) < spearmanr(columns[:, 0], columns[:, 1]).statistic
    own = np.stack([noise[0], noise[0] + 0.3 * noise[1], size], 1)
    assert partial_rho(own) > 0.9 and within_thirds(own) > 0.9
    value = controlled(own, partial_rho)
    assert value.interval and value.interval[0] < value.value < value.interval[1] + 1e-9
    assert math.isnan(controlled(own[:5], partial_rho).value)


def test_partial_correlation_equals_regressing_ranks() -> None:
    from scipy.stats import rankdata

    columns: Any = np.random.default_rng(1).random((40, 3))
    columns[:, 0] += columns[:, 2]
    ranks = np.stack([rankdata(column) for column in columns.T], 1)
    line = np.stack([np.ones(40), ranks[:, 2]], 1)
    left = [ranks[:, k] - line @ np.linalg.lstsq(line, ranks[:, k], rcond=None)[0] for k in (0, 1)]
    assert partial_rho(columns) == pytest.approx(np.corrcoef(*left)[0, 1])
