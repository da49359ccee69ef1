"""The calibration: its counting, its files, and that the published page is what its tables say."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import binomtest

from heatproof.cli import main
from heatproof.errors import InputError
from heatproof.studies.calibrate.collect import CONTROLS
from heatproof.studies.calibrate.population import Member, members, open_pictures
from heatproof.studies.calibrate.thresholds import Share, calibrate, read_members, separation
from heatproof.verdict.follow import calibration

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def member(seed: int, follower: float = 0.5, control: float = 0.0) -> dict[str, Any]:
    """Two networks, two methods that follow, one that does not, every control."""
    rng = np.random.default_rng(seed)

    def test(mean: float) -> dict[str, list[float]]:
        return {f"specificity_{kind}": rng.normal(mean, 0.2, 60).tolist() for kind in ("weights", "place")}

    means = {"gradcam": follower, "layercam": follower, "poor": 0.0, **dict.fromkeys(CONTROLS, control)}
    truth = {m: {"auc": 0.9 if mean == follower else 0.5, "low": 0.8 * (mean == follower), "high": 1.0}
             for m, mean in means.items()}  # fmt: skip
    about = {"data": "made", "network": "none", "token": "tag", "strength": 1.0, "seed": seed}
    tests = {network: {m: test(mean) for m, mean in means.items()} for network in "AB"}
    return {"member": about, "holds": True, "flips": [1.0, 0.0], "contrast": truth, "tests": tests}


def write(folder: Path, *found: dict[str, Any]) -> Path:
    (folder / "members").mkdir(parents=True)
    for i, one in enumerate(found):
        (folder / "members" / f"{i}.json").write_text(json.dumps(one))
    return folder


def test_clear_cut_networks_are_told_apart_without_an_error() -> None:
    _, chosen, published = calibrate([member(seed) for seed in range(6)])
    for rates in (chosen, published):
        assert (rates.false_alarm.share, rates.miss.share, rates.networks) == (0, 0, 6)
    assert published.false_alarm.n == 2 * 6 and published.miss.n == len(CONTROLS) * 6
    assert separation([member(1)])["specificity_place"][0] == 1


def test_where_controls_look_like_methods_that_follow_they_are_missed() -> None:
    _, _, published = calibrate([member(seed, control=0.5) for seed in range(4)])
    assert published.miss.share > 0.9


@pytest.mark.parametrize(("count", "n"), [(0, 20), (3, 50), (20, 20)])
def test_shares_have_exact_intervals(count: int, n: int) -> None:
    share, theirs = Share.of(count, n), binomtest(count, n).proportion_ci(method="exact")
    assert (share.share, share.n) == (count / n, n)
    assert (share.low, share.high) == pytest.approx((theirs.low, theirs.high))


def test_too_few_pairs_are_refused(tmp_path: Path) -> None:
    failed = member(9) | {"holds": False}
    with pytest.raises(InputError, match="holds 1 pairs whose planting held; 4 are the fewest"):
        read_members(write(tmp_path, member(1), failed))


def test_the_command_judges_what_was_measured(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *(member(seed) for seed in range(4)))
    told = CliRunner().invoke(main, ["calibrate", "--out", str(folder), "--only-judge"])
    assert told.exit_code == 0, told.output
    assert "false alarm" in told.output
    made = json.loads((folder / "rates.json").read_text())
    assert made["schema"] == 1 and made["population"]["pairs"] == 4
    with (folder / "judged.csv").open(newline="") as file:
        assert {row["answer"] for row in csv.DictReader(file)} <= {"yes", "no", "undecided"}


def test_a_shard_that_is_none_is_refused(tmp_path: Path) -> None:
    told = CliRunner().invoke(main, ["calibrate", "--out", str(tmp_path), "--shard", "4/4"])
    assert told.exit_code == 2 and "a shard is its number" in told.output


def test_the_population_is_as_wide_as_it_says() -> None:
    planned = members()
    assert len(planned) >= 30 and len({m.name for m in planned}) == len(planned)
    assert len({m.network for m in planned}) >= 5 and len({m.data for m in planned}) >= 3
    assert len({m.token for m in planned}) == 4


def test_generated_pictures_have_both_classes_and_real_ones_need_a_folder() -> None:
    for data in ("qr", "crops"):
        found = open_pictures(Member(data, "small", "tag", 1.0, 0), None)
        assert found.images.shape[1:] == (3, 64, 64) and set(found.labels.tolist()) == {0, 1}
    with pytest.raises(InputError, match="name their folder with --data"):
        open_pictures(Member("xrays", "small", "tag", 1.0, 0), None)


def test_the_published_rates_follow_from_the_published_rows() -> None:
    """Counted again from judged.csv, on the pairs that chose nothing."""
    with (RESULTS / "calibration" / "judged.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    pair = [
        "{data}-{network}-{token}-{share}-{seed}".format(**r, share=round(100 * float(r["strength"])))
        for r in rows
    ]
    other_half = set(sorted(set(pair))[1::2])
    held = [row for row, name in zip(rows, pair, strict=True) if name in other_half]
    methods = [row for row in held if row["control"] == "False"]
    following = [row for row in methods if float(row["contrast_low"]) > 0.5]
    controls = [row for row in held if row["control"] == "True"]
    known = calibration()["rates"]
    for kind, lot, said in (
        ("false_alarm", following, "no"), ("miss", controls, "yes"), ("undecided", methods, "undecided"),
    ):  # fmt: skip
        assert known[kind]["n"] == len(lot)
        assert known[kind]["share"] == pytest.approx(sum(row["answer"] == said for row in lot) / len(lot))
    page = (RESULTS / "calibration.md").read_text()
    shown = [
        "{share:.1%} ({low:.1%} to {high:.1%}, n = {n})".format(**known[k]) for k in known if k != "networks"
    ]
    assert all(one in page for one in shown)
    assert f"{calibration()['population']['pairs']} pairs of networks" in page
