"""The demo, end to end and quick: what it prints is what it computed, and what it computed is there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from urllib.parse import unquote, urlparse

import numpy as np
import pytest
from click.testing import CliRunner, Result
from markupsafe import escape

from heatproof.cli import main
from heatproof.demo import QUICK, Sizes
from heatproof.demo.networks import (
    CLASSES,
    CODE,
    FOLDER,
    HARMFUL,
    HEALTHY,
    Twin,
    audit_methods,
    cheating_twin,
    gather_weights,
    settle,
    train_twins,
    write_pictures,
)
from heatproof.demo.story import first_alarms, same_maps, told_apart
from heatproof.errors import InputError
from heatproof.metrics.interventions import OFF_OBJECT
from heatproof.report.page import advice
from heatproof.report.pieces import number
from heatproof.run.worker import fixed_threads
from heatproof.store import RunFolder
from heatproof.studies.cose.results import read_pairs
from heatproof.train import TrainProgress
from heatproof.verdict.alarms import find_alarms
from heatproof.verdict.answers import USES, WORDS
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import judge
from heatproof.verdict.trajectory import Trajectory
from heatproof.verdict.uses import network_answer

pytestmark = pytest.mark.trains

TINY = Sizes(train=8, test=4, pixels=40, width=2, first_epochs=2, second_epochs=1, keep=(1, 2, 3))


def heatproof(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished quick demo and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "first look"
    result = heatproof("demo", "--quick", "--out", str(out))
    assert result.exit_code == 0, result.output
    return out, result.output


def of(out: Path, name: str) -> RunFolder:
    return RunFolder.open(out / name)


def test_it_ends_with_the_path_of_a_page_that_holds_everything(made: tuple[Path, str]) -> None:
    out, printed = made
    last = printed.strip().splitlines()[-1]
    page = Path(unquote(urlparse(last).path))
    assert last.startswith("file://") and page == (out / "report.html").resolve()
    text = page.read_text(encoding="utf-8")
    sections = re.findall(r'<section id="([a-z]+)"', text)
    in_order = [
        section
        for section in sections
        if section in ("evidence", "which", "twin", "trainings", "cose", "scores")
    ]
    assert in_order == ["evidence", "which", "twin", "trainings", "cose", "scores"]
    assert {"pictures", "curves", "agreement", "made"} <= set(sections)
    for link in re.findall(r'href="(?!https:)([^"#]+)"', text):
        assert (out / link).is_file(), f"the page leads to {link}"


def test_the_summary_fits_one_screen_without_warnings(made: tuple[Path, str]) -> None:
    out, printed = made
    summary = printed[printed.index(judge(read_run(of(out, "audit"))).headline) :]
    assert sum(-(-len(line) // 100) or 1 for line in summary.splitlines()) <= 30  # of 100 columns
    assert not re.search(r"softmax|batch norm|over all images|[Ww]arning", printed)


def test_the_healthy_network_is_not_accused_and_the_verdict_is_that_of_the_rows(
    made: tuple[Path, str],
) -> None:
    out, printed = made
    verdict = judge(read_run(of(out, "audit")))
    assert verdict.follow == "yes" and verdict.network.is_tested and verdict.no_shortcut
    # Images without a code have no object, so what is used for "no code" cannot be judged.
    assert (verdict.network.answer, verdict.level) == ("undecided", "care")
    assert "no code" in verdict.network.note
    assert next(method for method in verdict.methods if method.method == "gradcam").follows == "yes"
    assert f"{verdict.headline}\n{verdict.sentence}" in printed and advice(verdict) in printed
    assert all(
        f"{label.name}: {USES[label.answer]}; {label.test}" in printed for label in verdict.network.classes
    )


def test_every_margin_is_a_mean_over_stored_rows(made: tuple[Path, str]) -> None:
    """Mean difference to a floor on the same images, once more by hand."""
    out, _ = made
    data = read_run(of(out, "audit"))
    measure = next(m for m in data.measures if m.base == "structure_score")
    rows = (
        of(out, "audit")
        .scores()
        .sql("select method, image, value from scores where metric = ? and not isnan(value)", [measure.name])
    )
    table: dict[str, dict[str, float]] = {}
    for row in rows:
        table.setdefault(row["method"], {})[row["image"]] = row["value"]
    for method in data.real:
        shared = sorted(set(table[method]) & set(table["edges"]))
        mean = np.mean([table[method][i] - table["edges"][i] for i in shared])
        assert data.cells[measure.name, method].margins["edges"].mean == pytest.approx(mean)


def test_all_families_are_there_for_every_method(made: tuple[Path, str]) -> None:
    out, _ = made
    rows = (
        of(out, "audit")
        .scores()
        .sql(
            "select distinct method, regexp_extract(metric, '^[a-z_]+') as metric from scores "
            "where not isnan(value)"
        )
    )
    computed = {(row["method"], row["metric"]) for row in rows}
    wanted = ("cscore", "structure_score", "mask_iou", "insertion", "deletion", "randomisation_ssim",
              "specificity_weights", "specificity_place")  # fmt: skip
    missing = [(m, w) for m in audit_methods(QUICK) for w in wanted if (m, w) not in computed]
    assert missing == []
    pairs = read_pairs(of(out, "cose"))
    assert set(pairs.pairs.kind) == {"geometric", "photometric", "checkpoints"}
    assert any(score.n_same and score.n_changed for score in pairs.scores.values())


def test_the_harm_is_found_by_the_rules_and_said(made: tuple[Path, str]) -> None:
    out, printed = made
    trajectory = Trajectory.from_run(of(out, HARMFUL))
    last = trajectory.checkpoints[-1]
    alarms = find_alarms(trajectory)
    gold = [alarm for alarm in alarms if alarm.mechanism == 1 and alarm.label == CODE]
    assert gold and gold[-1].checkpoint == last.name, "the harm was not noticed"
    assert last.auc >= 0.75 and last.classes[CODE].gold < last.classes[CODE].total / 10
    assert all(alarm.sentence in printed for alarm in first_alarms(gold))
    assert f"{last.classes[CODE].gold} of {last.classes[CODE].total}" in (out / "report.html").read_text()


def test_the_healthy_training_is_shown_as_it_is(made: tuple[Path, str]) -> None:
    out, printed = made
    data = read_run(of(out, HEALTHY))
    assert "harmful" not in data.model
    healthy = printed.partition("The healthy training")[2].partition("The harmful training")[0]
    assert healthy.count("At epoch") == len(first_alarms(data.alarms))
    twins = [Trajectory.from_run(of(out, name)).checkpoints for name in (HEALTHY, HARMFUL)]
    shared = [(a.auc, a.accuracy) == (b.auc, b.accuracy) for a, b in zip(*twins, strict=True)]
    assert shared[0] and not shared[-1], "the first phase is one and the same, the second is not"
    assert twins[0][-1].accuracy > twins[1][-1].accuracy


def test_a_second_call_computes_nothing(made: tuple[Path, str]) -> None:
    out, printed = made
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.parquet")}
    before |= {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}
    result = heatproof("demo", "--quick", "--out", str(out))
    assert result.exit_code == 0 and "nothing had to be computed" in result.output
    assert {p: p.stat().st_mtime_ns for p in before} == before
    verdict = printed.partition("\n\n")[2].rpartition("\n\n")[0]
    assert verdict and verdict in result.output


def test_another_seed_needs_another_folder(made: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = made
    result = heatproof("demo", "--quick", "--seed", "1", "--out", str(out))
    assert result.exit_code == 2 and "seed = 0, not 1" in result.output
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        settle(tmp_path, QUICK, 0)


def test_every_method_is_judged_in_the_table(made: tuple[Path, str]) -> None:
    out, _ = made
    data = read_run(of(out, "audit"))
    text = (out / "report.html").read_text(encoding="utf-8")
    section = text.partition('<section id="which"')[2].partition("</section>")[0]
    for answer in judge(data).methods:
        row = section.partition(f"<bdi>{answer.method}</bdi>")[2].partition("</tr>")[0]
        assert f"<strong>{WORDS[answer.follows]}</strong>" in row, answer.method
        for test in answer.tests:
            if test.votes:
                value, low, high = (number(each, "+.3f") for each in (test.value, test.low, test.high))
                assert f'{value}<span class="sub">{low} to {high}, n = {test.n}</span>' in row, answer.method
    # A network that ends in a mean has the same gradient everywhere.
    assert any({"gradcam", "hirescam"} <= set(group) for group in same_maps(data))


@pytest.fixture(scope="module")
def twin(made: tuple[Path, str]) -> Twin:
    """The cheating twin that the demo left, read and not trained."""

    def on_progress(which: str, at: object) -> None:
        raise AssertionError(f"{which} was computed again")

    weights = gather_weights(made[0], HEALTHY, QUICK)[-1]
    return cheating_twin(made[0], QUICK, 0, weights, on_progress)


def test_the_twin_uses_the_tag_and_the_healthy_network_does_not(twin: Twin) -> None:
    a, b = twin.point.planting
    assert a.share >= 0.9 and b.share <= 0.1 and min(a.n, b.n) >= 16
    found = {which: [item for item in record.items if item.label == CODE]
             for which, record in twin.records.items()}  # fmt: skip
    tag = found["A"][0]
    assert tag.recurring and tag.on_object is not None and tag.on_object < OFF_OBJECT, "the tag, off the code"
    turned, control = tag.turned / tag.recipients, tag.control_turned / tag.recipients
    # 0.55 to 0.95 and 0 to 0.13 on six pairs of instruction sets of oneDNN and ATen
    assert turned - control >= 0.4 and control <= 0.3
    assert tag.changed_elsewhere <= 0.2 * tag.painted  # A may know the code beside the tag as well
    off = [item.donors for item in found["B"] if item.kind == "patch" and (item.on_object or 0) < OFF_OBJECT]
    assert tag.donors > sum(off), "of B, only patches at the border of the code"


def test_the_twin_has_a_shortcut_and_the_healthy_copy_is_not_accused(twin: Twin) -> None:
    answers = {name: network_answer(record) for name, record in twin.records.items()}
    assert answers["A"].recurring and answers["A"].answer != "yes"  # few images: not always surely a shortcut
    assert answers["B"].answer != "no"


def test_gradcam_tells_the_twins_apart_and_floors_cannot(twin: Twin) -> None:
    assert "gradcam" in twin.methods["show"]
    for floor in ("random", "edges", "centre"):
        assert twin.contrast.scores[floor].auc == 0.5
        assert not any(floor in methods for methods in twin.methods.values())


def test_the_twin_is_on_the_page_and_in_the_terminal(made: tuple[Path, str], twin: Twin) -> None:
    out, printed = made
    assert twin.flips in printed and told_apart(twin) in printed
    text = (out / "report.html").read_text(encoding="utf-8")
    section = text.partition('<section id="twin"')[2].partition("</section>")[0]
    assert str(escape(twin.flips[1:])) in section and str(escape(told_apart(twin))) in section
    for record in twin.records.values():
        for item in [item for item in record.items if item.label == CODE][:2]:
            assert str(escape(item.sentence(CLASSES[CODE]))) in section
    scores = twin.point.scores
    for method, score in scores.items():
        row = section.rpartition(f"<bdi>{escape(method)}</bdi>")[2].partition("</tr>")[0]
        assert number(score.auc) in row, method
    strip = section.partition("Maps of gradcam")[2].partition("</table>")[0]
    assert strip.count("data:image/png") == 3 * 3


def test_a_demo_killed_while_the_twin_was_trained_goes_on(made: tuple[Path, str], tmp_path: Path) -> None:
    """Killed once in an epoch of A and once before the maps: its maps are the same in the end."""
    shutil.copytree(made[0] / "weights", tmp_path / "weights")
    weights = gather_weights(made[0], HEALTHY, QUICK)[-1]
    trained: list[tuple[str, int]] = []
    stops = [("A", 3), ("maps", 0)]

    class KilledError(Exception):
        pass

    def on_progress(which: str, at: TrainProgress | int) -> None:
        epoch = 0 if isinstance(at, int) else at.epoch
        if not isinstance(at, int) and at.result is not None:
            trained.append((which, epoch))
        elif (which, epoch) in stops:
            stops.remove((which, epoch))
            raise KilledError

    # The demo computes with one thread; sums of another number of threads differ in their last bits.
    with fixed_threads(1):
        for _ in range(2):
            with pytest.raises(KilledError):
                cheating_twin(tmp_path, QUICK, 0, weights, on_progress)
        again = cheating_twin(tmp_path, QUICK, 0, weights, on_progress)
    each_once = [(which, i + 1) for which in "AB" for i in range(again.point.epochs)]
    assert trained[-len(each_once) :] == each_once
    restarted = (tmp_path / FOLDER / "strength-100" / "restart-1").exists()  # on some CPUs, after a collapse
    assert (len(trained) > len(each_once)) == restarted
    scores = Path(FOLDER, "strength-100", "scores.json")
    assert (tmp_path / scores).read_bytes() == (made[0] / scores).read_bytes()


def test_trainings_share_a_phase_resume_and_repeat(tmp_path: Path) -> None:
    epochs: list[tuple[str, int]] = []
    for out in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        histories = train_twins(out, TINY, 0, lambda name, epoch: epochs.append((name, epoch.epoch)))
        assert [epoch.epoch for epoch in histories[HARMFUL].epochs] == [1, 2, 3]
    once = [("first", 1), ("first", 2), (HEALTHY, 3), (HARMFUL, 3)]
    assert epochs == once * 2, "the second call had nothing to do"
    weights = {
        n: [tmp_path / "a" / f for f in gather_weights(tmp_path / "a", n, TINY)] for n in (HEALTHY, HARMFUL)
    }
    again = [tmp_path / "b" / f for f in gather_weights(tmp_path / "b", HARMFUL, TINY)]
    content = {name: [file.read_bytes() for file in files] for name, files in weights.items()}
    assert [a == b for a, b in zip(*content.values(), strict=True)] == [True, True, False]
    assert [file.read_bytes() for file in again] == content[HARMFUL]


def test_pictures_that_are_not_complete_are_made_again(tmp_path: Path) -> None:
    manifest = write_pictures(tmp_path, TINY, 0)
    whole = manifest.read_text()
    manifest.write_text("\n".join(whole.splitlines()[:3]) + "\n")
    assert write_pictures(tmp_path, TINY, 0).read_text() == whole
