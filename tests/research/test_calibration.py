"""The calibration: its counting, its files, and that the published page is what its tables say."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy.stats import binomtest

import heatproof as hp
from contrast.discs import TAG, model_ready, network
from forked import Forked
from heatproof.contrast import make_pair
from heatproof.errors import InputError
from heatproof.metrics.specific import Gains, specificity
from heatproof.run.score import as_stored
from heatproof.verdict.follow import calibration, rule
from research.calibration.__main__ import calibrate_command
from research.calibration.collect import CONTROLS, collect
from research.calibration.population import SIDES, Member, members, open_pictures
from research.calibration.protocol import ELSEWHERE, Measuring, left_out, measure
from research.calibration.sequential import AUDIT, AUDIT_LOOKS, SIZES, count, rates_by_size
from research.calibration.thresholds import (
    CHOSE,
    OTHER,
    SINCE,
    SUMMARIES,
    Share,
    by_other_summaries,
    calibrate,
    is_gradient,
    made_by,
    rates,
    rates_of,
    read_judged,
    read_members,
    separation,
)

pytestmark = pytest.mark.trains

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


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


def write(folder: Path, *members: dict[str, Any]) -> Path:
    (folder / "members").mkdir(parents=True)
    for i, content in enumerate(members):
        (folder / "members" / f"{i}.json").write_text(json.dumps(content))
    return folder


def test_clear_cut_networks_are_judged_without_an_error() -> None:
    calibration = calibrate([member(seed) for seed in range(6)])
    assert calibration.clean == [OTHER]
    for group in (CHOSE, OTHER):
        rates = calibration.rates(group)
        assert (rates.false_alarm.share, rates.miss.share, rates.networks) == (0, 0, 6)
        assert rates.false_alarm.n == 2 * 6 and rates.miss.n == len(CONTROLS) * 6
    assert separation([member(1)])["specificity_place"][0] == 1


def test_where_controls_look_like_methods_that_follow_they_are_missed() -> None:
    calibration = calibrate([member(seed, control=0.5) for seed in range(4)])
    assert calibration.rates(OTHER).miss.share > 0.9


def test_pairs_measured_since_choose_nothing_and_are_counted_apart(tmp_path: Path) -> None:
    first = write(tmp_path / "first", *(member(seed) for seed in range(4)))
    since = [member(seed, control=0.5) for seed in range(10, 13)]
    CliRunner().invoke(calibrate_command, ["--out", str(first), "--only-judge"], catch_exceptions=False)
    earlier = read_judged(first / "judged.csv")
    assert {name: rates_of(rows).networks for name, rows in earlier.items()} == {CHOSE: 4, OTHER: 4}
    judged = calibrate(since, earlier)
    assert judged.rule == rule() and judged.clean == [OTHER, SINCE]
    assert judged.rates(OTHER).miss.share == 0 and judged.rates(SINCE).miss.share > 0.9
    made = judged.as_json(calibration())
    assert made["made_by"] == (
        "python -m research.calibration --data DATA --methods gradcam,layercam,poor --earlier JUDGED"
    )
    assert made["rates"]["networks"] == 2 * (2 + 3) and made["population"]["pairs"] == 7
    assert made["rates"]["miss"]["n"] == sum(
        made["rates_by_group"][group]["miss"]["n"] for group in judged.clean
    )
    by_kind = made["rates"]["false_alarm_by_kind"]
    assert by_kind["class activation maps"]["n"] == 2 * 10 and by_kind["input gradients"]["n"] == 0
    assert {row["group"] for row in judged.rows()} == {CHOSE, OTHER, SINCE}


def test_raw_numbers_give_the_same_rates_and_those_of_other_summaries() -> None:
    measured = [member(seed) for seed in range(4)]
    rule = calibrate(measured).rule
    assert by_other_summaries(measured, rule) == {}  # they kept no raw numbers
    for measurement in measured:
        for tests in measurement["tests"].values():
            for values in tests.values():
                weights = np.array(values["specificity_weights"])
                values["gain"] = weights.tolist()
                values |= {"gain_untrained_0": [0.0] * 60, "gain_untrained_1": [-9.0] * 60}
    values = by_other_summaries(measured, rule)
    assert values["largest"] == rates(measured, rule) and values["largest"].miss.share == 0
    assert (
        values["mean"].miss.share > values["largest"].miss.share
    )  # lower control maps are passed more easily
    assert calibrate(measured).summary == "largest"  # by which no control is missed


def test_the_rule_in_the_package_holds_maps_against_what_the_metric_does() -> None:
    own, untrained = torch.tensor([1.0]), torch.tensor([[0.5], [0.2], [0.2]])
    scores = Gains(own, own, untrained, own, []).scores["weights"]
    summaries = {name: float(own[0]) - float(of(untrained.numpy())[0]) for name, of in SUMMARIES.items()}
    assert float(scores[0]) == pytest.approx(summaries[calibration()["summary"]])


@pytest.mark.parametrize(("count", "n"), [(0, 20), (3, 50), (20, 20)])
def test_shares_have_exact_intervals(count: int, n: int) -> None:
    share, theirs = Share.of(count, n), binomtest(count, n).proportion_ci(method="exact")
    assert (share.share, share.n) == (count / n, n)
    assert (share.low, share.high) == pytest.approx((theirs.low, theirs.high))


def test_too_few_pairs_are_refused(tmp_path: Path) -> None:
    failed = member(9) | {"holds": False}
    with pytest.raises(InputError, match="holds 1 pairs whose planting held; at least 4"):
        read_members(write(tmp_path, member(1), failed))


def test_the_command_judges_what_was_measured(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", *(member(seed) for seed in range(4)))
    result = CliRunner().invoke(calibrate_command, ["--out", str(folder), "--only-judge"])
    assert result.exit_code == 0, result.output
    assert "false alarm" in result.output
    made = json.loads((folder / "rates.json").read_text())
    assert made["schema"] == 1 and made["population"]["pairs"] == 4
    with (folder / "judged.csv").open(newline="") as file:
        assert {row["answer"] for row in csv.DictReader(file)} <= {"yes", "no", "undecided"}


def test_no_worker_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(calibrate_command, ["--out", str(tmp_path), "--workers", "0"])
    assert result.exit_code == 2 and "at least 1; got 0" in result.output


HOLD = """
import sys, time
from pathlib import Path
from research.calibration.protocol import sole
with sole(Path(sys.argv[1])) as mine:
    print(mine, flush=True)
    time.sleep(60)
"""


def test_a_member_that_is_being_measured_is_left_alone_until_its_process_dies(tmp_path: Path) -> None:
    wanted = Measuring(tmp_path, None)
    first = Member("xrays", "tiny", "tag", 1.0, 0)
    lock = wanted.file(first).with_suffix(".lock")
    holder = Forked(HOLD, lock, cwd=ROOT)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "True\n"
        assert measure(first, wanted) == f"{first.name}: {ELSEWHERE}"
    finally:
        holder.kill()
        holder.communicate()
    assert lock.exists()  # left behind, and no claim any more
    assert "left out: xrays-tiny-tag-100-0 needs real pictures" in measure(first, wanted)
    assert not lock.exists()


def test_what_is_measured_is_not_measured_again_and_the_order_is_by_cost(tmp_path: Path) -> None:
    cheap = Measuring(tmp_path, quick=True).missing()
    assert cheap[0].network == "mini" and cheap[-1].network == "small"
    assert {m.data for m in cheap} == {"qr", "crops"} and {m.strength for m in cheap} == {1.0, 0.8}
    assert len(Measuring(tmp_path, quick=True, repeats=2).missing()) == 2 * len(cheap)
    slow = Measuring(tmp_path, tmp_path, "cuda").missing()
    assert slow[0].network == "densenet121" and slow[-1].network == "mini"
    path = Measuring(tmp_path).file(cheap[0])
    path.parent.mkdir()
    path.write_text("{}")
    assert Measuring(tmp_path, quick=True).missing() == cheap[1:]
    assert Measuring(tmp_path, quick=True, at_most=2).missing() == cheap[1:3]


def test_the_networks_of_the_plan_can_be_chosen(tmp_path: Path) -> None:
    chosen = Measuring(tmp_path, tmp_path, networks=("resnet18", "tiny"))
    assert chosen.missing() == [
        m for m in Measuring(tmp_path, tmp_path).missing() if m.network in ("resnet18", "tiny")
    ]
    assert {m.network for m in replace(chosen, quick=True).missing()} == {"tiny"}
    assert left_out(Measuring(tmp_path, networks=("resnet20",))) == ["cifar10"]
    options = ["--out", str(write(tmp_path, *map(member, range(4)))), "--network"]
    result = CliRunner().invoke(calibrate_command, [*options, "resnet56"], catch_exceptions=False)
    assert (
        "without --data there is nothing of cifar10" in result.output and "4 pairs measured" in result.output
    )
    result = CliRunner().invoke(calibrate_command, [*options, "resnet57"])
    assert result.exit_code == 2 and "'resnet57' is not one of 'mini', 'tiny'" in result.output


def test_what_is_collected_is_what_a_run_measures() -> None:
    """The same control maps, rounded alike; and the raw numbers give the ones that vote."""
    model = network()
    pair = make_pair(model, *model_ready(model), TAG, positive=1, lr=3e-3)
    methods = ("gradcam", "smoothgrad(samples=2)", "random")
    about = Member("made", "discs", "tag", 1.0, 5)
    collected = collect(about, pair, methods=methods, informative=False).as_json()
    for name, twin in (("A", pair.a), ("B", pair.b)):
        maps = hp.explain(twin, pair.images, methods, 1, seed=5)
        stored = {method: as_stored(values) for method, values in maps.items()}
        theirs = specificity(stored, model=twin, images=pair.images, seed=5, then=as_stored)
        for method, scores in theirs.items():
            mine = {
                test: np.array(values, float) for test, values in collected["tests"][name][method].items()
            }
            for kind in ("weights", "place"):
                expected = scores[kind].numpy()
                np.testing.assert_allclose(mine[f"specificity_{kind}"], expected, atol=2e-4)
            controls = np.mean([mine[f"gain_untrained_{i}"] for i in range(3)], axis=0)
            known = np.isfinite(mine["specificity_weights"])
            np.testing.assert_allclose(
                (mine["gain"] - controls)[known], mine["specificity_weights"][known], atol=3e-4
            )
    assert collected["contrast"]["gradcam"]["low"] > 0.5 and collected["contrast"]["edges"]["auc"] == 0.5
    for control in (
        "untrained network",
        "untrained gradient",
    ):  # drawn anew, or they would equal their control maps
        assert any(collected["tests"]["A"][control]["specificity_weights"])


def test_the_population_is_as_wide_as_it_says() -> None:
    planned = members()
    assert len(planned) >= 30 and len({m.name for m in planned}) == len(planned)
    assert len({m.network for m in planned}) >= 5 and len({m.data for m in planned}) >= 3
    assert len({m.token for m in planned}) == 4


def test_generated_pictures_have_both_classes_and_real_ones_need_a_folder() -> None:
    for data in ("qr", "crops"):
        dataset = open_pictures(Member(data, "small", "tag", 1.0, 0), None)
        assert dataset.images.shape[1:] == (3, 64, 64) and set(dataset.labels.tolist()) == {0, 1}
    with pytest.raises(InputError, match="name their folder with --data"):
        open_pictures(Member("xrays", "small", "tag", 1.0, 0), None)


def test_the_published_rates_follow_from_the_published_rows() -> None:
    """Counted again from judged.csv, on the pairs that chose nothing."""
    with (RESULTS / "calibration" / "judged.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    held = [row for row in rows if row["group"] != CHOSE]
    methods = [row for row in held if row["control"] == "False"]
    following = [row for row in methods if float(row["contrast_low"]) > 0.5]
    controls = [row for row in held if row["control"] == "True"]
    known = calibration()["rates"]
    for kind, group, answer in (
        ("false_alarm", following, "no"), ("miss", controls, "yes"), ("undecided", methods, "undecided"),
    ):  # fmt: skip
        assert known[kind]["n"] == len(group)
        assert known[kind]["share"] == pytest.approx(
            sum(row["answer"] == answer for row in group) / len(group)
        )
    for kind, by_kind in known["false_alarm_by_kind"].items():
        own = [row for row in following if is_gradient(row["method"]) == (kind == "input gradients")]
        assert by_kind["n"] == len(own)
        assert by_kind["share"] == pytest.approx(sum(row["answer"] == "no" for row in own) / len(own))
    cams, gradients = known["false_alarm_by_kind"].values()
    assert cams["high"] < gradients["low"]
    wrong: dict[bool, list[float]] = {True: [], False: []}  # of the methods that README.md names, of others
    for method in {row["method"] for row in following}:
        answers = [row["answer"] == "no" for row in following if row["method"] == method]
        wrong[is_gradient(method) or method == "eigengradcam"].append(sum(answers) / len(answers))
    assert min(wrong[True]) > max(wrong[False])
    named = list(dict.fromkeys(row["method"] for row in rows if row["control"] == "False"))
    kinds, tests = calibration()["population"], list(calibration()["tests"])
    assert calibration()["made_by"] == made_by(kinds["data"], kinds["network"], named, tests, since=True)
    page = (RESULTS / "calibration.md").read_text()
    sentences = [
        "{share:.1%} ({low:.1%} to {high:.1%}, n = {n})".format(**known[k])
        for k in ("false_alarm", "miss", "undecided")
    ]
    assert all(sentence in page for sentence in sentences)
    assert f"{calibration()['population']['pairs']} pairs of networks" in page


def test_the_table_of_the_sequential_test_follows_from_the_published_members() -> None:
    measured = read_members(RESULTS / "calibration" / "members.json.gz")
    with (RESULTS / "calibration" / "sequential.csv").open(newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["looks"] == AUDIT and row["random networks"] == "2"
        ]
    small = [m for m in measured if m["member"]["network"] in SIDES]
    (published,) = (row for row in rows if row["pairs"] == f"small ones ({len(small)})")
    counted = count(small, rule(), AUDIT_LOOKS, draws=2).row()
    assert counted == [*published.values()][4:]
    assert len(measured) == calibration()["rates_by_group"][SINCE]["networks"] / 2


def test_rates_by_the_number_of_methods_follow_from_the_published_members() -> None:
    by_size = rates_by_size(read_members(RESULTS / "calibration" / "members.json.gz"))
    assert by_size == calibration()["rates_by_size"]
    assert all([*own] == [str(size) for size in SIZES] for own in by_size.values())
    once, sequentially = by_size.values()
    for own in (once, sequentially):
        # A method alone sets its own scale: it is never below it, and a wrong map has nothing beside it.
        assert own["1"]["false_alarm"]["share"] == 0 and own["1"]["miss"]["share"] > own["9"]["miss"]["share"]
    with (RESULTS / "calibration" / "sequential.csv").open(newline="") as file:
        audit = next(
            row for row in csv.DictReader(file) if row["looks"] == AUDIT and row["random networks"] == "2"
        )
    assert audit["miss"] == Share(**sequentially["9"]["miss"]).text
