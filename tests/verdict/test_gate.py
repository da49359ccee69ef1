"""Rules about a real run folder: what they mean, what they refuse, exit codes, files for CI systems."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from torch import nn

from heatproof.cli import main
from heatproof.errors import InputError, UnknownNameError
from heatproof.images import batches
from heatproof.run.engine import run_study
from heatproof.run.study import open_study
from heatproof.store import Manifest, RunFolder
from heatproof.types import Score, Unit
from heatproof.verdict.alarms import find_alarms
from heatproof.verdict.gate import RuleResult, check, read_rule
from heatproof.verdict.trajectory import Trajectory
from tiny_study import make_study

METHODS = ["gradcam", "gradcam++"]
METRICS = ["cscore", "accuracy", "auc", "recall", "insertion(steps=4)"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("gate")
    study = make_study(
        folder, 16, METHODS, METRICS, extra='options.class_names = ["cat", "dog"]\nlimit = 16\n'
    )
    run_study(study, folder / "out")
    return RunFolder.open(folder / "out")


def only(run: RunFolder, rule: str, min_n: int = 1) -> RuleResult:
    _, verdict = check(run, [rule], min_n)
    return verdict


def stored(run: RunFolder, where: str) -> float:
    return run.scores().sql(f"select avg(value) as v from scores where {where}")[0]["v"]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["gate", *map(str, arguments)])


def test_values_are_those_of_the_rows(run: RunFolder) -> None:
    last = "checkpoint = 'epoch02' and "
    expected = {
        "cscore.gradcam.cat": last + "metric = 'cscore' and method = 'gradcam' and label = 0",
        "CScore.0.Grad-CAM": last + "metric = 'cscore' and method = 'gradcam' and label = 0",
        "cscore.gradcam++": last + "metric = 'cscore' and method = 'gradcam++' and label is null",
        "auc": last + "metric = 'auc' and label is null",
        "recall.CAT": last + "metric = 'recall' and label = 0",
        "insertion.gradcam": last + "metric = 'insertion(steps=4)' and method = 'gradcam'",
        "insertion(steps=4).gradcam++.dog": last
        + "metric = 'insertion(steps=4)' and method = 'gradcam++' and label = 1",
        "auc@epoch01": "checkpoint = 'epoch01' and metric = 'auc' and label is null",
        "auc@1": "checkpoint = 'epoch01' and metric = 'auc' and label is null",
        "degenerate.gradcam": last + "metric = 'degenerate' and method = 'gradcam'",
    }
    for quantity, where in expected.items():
        (value,) = only(run, f"{quantity} >= 0").values
        assert value.value == pytest.approx(stored(run, where), abs=1e-12), quantity


def test_all_methods_must_hold_unless_one_is_enough(run: RunFolder) -> None:
    values = {v.method: v.value for v in only(run, "insertion >= 0").values}
    assert set(values) == set(METHODS)
    between = sum(values.values()) / 2
    assert min(values.values()) < between < max(values.values())
    assert not only(run, f"insertion >= {between}").holds
    assert not only(run, f"insertion <= {between}").holds
    assert only(run, f"any(insertion >= {between})").holds
    assert not only(run, f"any(insertion >= {max(values.values()) + 0.01})").holds
    assert only(run, f"insertion >= {between}").values[0].value == min(values.values())  # the worst first


def test_the_limit_itself_counts_as_written(run: RunFolder) -> None:
    value = only(run, "auc >= 0").values[0].value
    assert only(run, f"auc >= {value!r}").holds and only(run, f"auc == {value!r}").holds
    assert not only(run, f"auc > {value!r}").holds and not only(run, f"auc < {value!r}").holds


def test_every_checkpoint(run: RunFolder) -> None:
    assert [v.checkpoint for v in only(run, "auc@all >= 0").values] != []
    assert {v.checkpoint for v in only(run, "auc >= 0 @all").values} == {"epoch01", "epoch02"}
    assert {v.checkpoint for v in only(run, "auc@last >= 0").values} == {"epoch02"}


def test_what_is_not_defined_fails_with_its_reason(run: RunFolder) -> None:
    verdict = only(run, "accuracy.dog >= 0")  # there is recall by class, but no accuracy
    assert not verdict.holds and math.isnan(verdict.values[0].value)
    assert verdict.values[0].reason == "there is no accuracy of dog at epoch02"


def row(metric: str, value: float, reason: str = "", **more: object) -> Score:
    cells = {
        "model": "m",
        "checkpoint": "epoch1",
        "image": "",
        "label": None,
        "explained": None,
        "method": "",
    }
    return Score(**{**cells, **more}, metric=metric, value=value, reason=reason)  # type: ignore[arg-type]


def small_folder(
    path: Path, rows: list[Score], checkpoints: tuple[str, ...] = ("epoch1",), answered: int = 80
) -> RunFolder:
    manifest = Manifest.collect({}, models={name: name for name in checkpoints}, classes=["left.lung", "2 b"])
    folder = RunFolder.resume(path, manifest)
    places = {(r.model, r.checkpoint) for r in rows}
    answers = [
        row(metric, 0.9, model=model, checkpoint=checkpoint, image=f"{i}.png", label=i % 2, explained=0)
        for model, checkpoint in sorted(places)
        for i in range(answered)
        for metric in ("probability", "predicted")
    ]
    folder.write_unit(Unit("epoch1", (0, 1), (), ("any",)), [*rows, *answers])
    folder.plan(folder.ledger.seals(), answered, checkpoints)
    return folder


def test_nan_is_skipped_in_a_mean_and_fails_alone(tmp_path: Path) -> None:
    rows = [row("bl", v, "an empty map" if math.isnan(v) else "", image=str(v), method="lime(samples=9)")
            for v in (0.1, 0.3, math.nan)]  # fmt: skip
    rows.append(row("dts", math.nan, "no structure", image="0.1", method="lime(samples=9)"))
    folder = small_folder(tmp_path / "run", rows)
    verdict = only(folder, "bl.lime <= 0.2")
    assert verdict.holds and verdict.values[0].value == pytest.approx(0.2) and verdict.values[0].n == 2
    assert verdict.values[0].reason == "not defined for 1 of 3 images: an empty map"
    for rule in ("dts >= 0", "dts <= 1", "any(dts < 9)"):
        assert not only(folder, rule).holds and only(folder, rule).values[0].reason == "no structure"


def test_a_planned_checkpoint_without_rows_fails(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "run", [row("auc", 0.9)], ("epoch1", "epoch2"))
    verdict = only(folder, "auc >= 0.5")
    assert not verdict.holds and verdict.values[0].reason == "there is no auc at epoch2"
    assert only(folder, "auc@1 >= 0.5").holds


def test_several_models_are_all_judged(tmp_path: Path) -> None:
    rows = [row("auc", 0.9), row("auc", 0.6, model="other", checkpoint="epoch7")]
    verdict = only(small_folder(tmp_path / "run", rows), "auc >= 0.8")
    assert [(v.model, v.checkpoint, v.holds) for v in verdict.values] == [
        ("other", "epoch7", False), ("m", "epoch1", True),
    ]  # fmt: skip


def test_class_names_with_dots_go_in_quotes_and_a_name_beats_a_number(tmp_path: Path) -> None:
    rows = [row("recall", 0.4, label=0), row("recall", 0.7, label=1)]
    folder = small_folder(tmp_path / "run", rows)
    assert only(folder, "recall.'left.lung' >= 0").values[0].value == 0.4
    assert only(folder, "recall.2-B >= 0").values[0].value == 0.7
    assert only(folder, "recall.1 >= 0").values[0].value == 0.7


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("cscore", "expected one of >= <= > < ==, but the rule ends there"),
        ("cscore >= high", "expected a number, but 'high' stands there"),
        ("cscore. >= 0.5", "expected a method or a class, but '>= 0.5' stands there"),
        ("any(auc >= 0.5", "expected a closing bracket"),
        ("auc >= 0.5 or else", "expected the end, but 'or else' stands there"),
        ("no-alarms(4)", r"mechanisms such as \(1\)"),
        ("folows", "did you mean 'follows'"),
        ("folows gradcam@5", "did you mean 'follows'"),
        ("looks_there pneumonia", "did you mean 'looks-there'"),
        ("follows gradcam layercam", "write it like"),
        ("auc@ >= 1", "expected a checkpoint"),
        ("", "expected a metric"),
        (">= 3", "expected a metric"),
    ],
)
def test_a_rule_that_cannot_be_read_says_where(rule: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_rule(rule)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("cscor >= 1", "unknown metric 'cscor'; did you mean 'cscore'"),
        ("cscore.gradcan >= 1", "'gradcan'; did you mean 'gradcam'"),
        ("cscore.dogs >= 1", "'dogs'; did you mean 'dog'"),
        ("cscore.7 >= 1", "unknown method or class"),
        ("auc@epoch09 >= 1", "unknown checkpoint 'epoch09'; did you mean 'epoch02' or 'epoch01'"),
        ("deletion >= 1", "holds no deletion; add it to the metrics of its study"),
        ("auc.gradcam >= 1", "auc has no value of that method, only one for the classifier"),
        ("cscore.cat.dog >= 1", "'dog' is one too many"),
    ],
)
def test_a_name_that_the_run_does_not_have_is_refused(run: RunFolder, rule: str, message: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=message):
        check(run, ["auc >= 0", rule])


def test_a_class_cannot_be_named_in_a_run_without_labels(tmp_path: Path) -> None:
    folder = RunFolder.resume(tmp_path / "run", Manifest.collect({}, models={"epoch1": "a"}))
    folder.write_unit(Unit("epoch1", (0, 1), (), ("any",)), [row("bl", 0.1, image="a.png", method="gradcam")])
    with pytest.raises(InputError, match="no class can be named: the images of the run have no labels"):
        check(folder, ["looks-there pneumonia"])


def test_the_trajectory_of_a_run_is_what_its_rows_say(run: RunFolder) -> None:
    trajectory = Trajectory.from_run(run)
    assert [(c.name, c.epoch) for c in trajectory] == [("epoch01", 1), ("epoch02", 2)]
    assert trajectory.class_names == ("cat", "dog")
    for checkpoint in trajectory:
        at = f"checkpoint = '{checkpoint.name}' and "
        assert checkpoint.auc == stored(run, at + "metric = 'auc' and label is null")
        assert checkpoint.accuracy == pytest.approx(stored(run, at + "metric = 'accuracy'"))
        assert {c: s.total for c, s in checkpoint.classes.items()} == {0: 8, 1: 8}
        for method in METHODS:
            own = at + f"method = '{method}' and metric = "
            for c, score in checkpoint.methods[method].classes.items():
                assert (
                    score.n == checkpoint.classes[c].gold == stored(run, f"{own}'cscore_n' and label = {c}")
                )
                for name, value in (("cscore", score.value), ("cscore_low", score.interval[0])):
                    np.testing.assert_equal(value, stored(run, f"{own}'{name}' and label = {c}"))
            assert checkpoint.methods[method].overall.value == stored(run, own + "'cscore' and label is null")


def test_auc_is_computed_where_a_run_was_not_asked_for_it(run: RunFolder, tmp_path: Path) -> None:
    names = "model, checkpoint, image, label, explained, method, metric, value, reason"
    rows = run.scores().sql(f"select {names} from scores where metric <> 'auc' and metric not like 'recall%'")
    folder = RunFolder.resume(tmp_path / "run", run.manifest)
    folder.write_unit(Unit("epoch01", (0, 1), (), ("any",)), [Score(**row) for row in rows])
    assert [c.auc for c in Trajectory.from_run(folder)] == [c.auc for c in Trajectory.from_run(run)]


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose last checkpoint has its threshold shifted: it still ranks, but calls nothing a cat."""
    folder = tmp_path_factory.mktemp("collapsed")
    study = make_study(folder, 16, ["eigencam"], ["cscore"])
    for file in (folder / "pictures").rglob("*.png"):  # cats are bright, dogs are dark
        noise = np.random.default_rng(int(file.stem)).integers(-40, 40, (36, 40, 3))
        Image.fromarray((noise + (200 if file.parent.name == "cat" else 60)).astype(np.uint8)).save(file)
    opened = open_study(study)
    model = opened.model("epoch01")
    assert isinstance(model.module, nn.Sequential)
    head = model.module[-1]
    (loaded,) = batches(opened.source, model.preprocess, 16)
    with torch.no_grad():
        labels = loaded.batch.labels
        centres = torch.stack([model.module[:-1](loaded.batch.images)[labels == c].mean(0) for c in (0, 1)])
        head.weight.copy_((centres - centres.mean(0)) * 20)
        head.bias.copy_(-(head.weight * centres.mean(0)).sum(1))  # the middle between the classes
    torch.save(model.module.state_dict(), folder / "epochs" / "epoch01.pt")
    with torch.no_grad():
        logits = model.logits(loaded.batch.images)
        head.bias[1] += (logits[:, 0] - logits[:, 1]).max() + 1
    torch.save(model.module.state_dict(), folder / "epochs" / "epoch02.pt")
    run_study(study, folder / "out")
    return folder / "out"


def test_no_alarms(collapsed: Path) -> None:
    folder = RunFolder.open(collapsed)
    (alarm,) = find_alarms(Trajectory.from_run(folder))
    assert (alarm.mechanism, alarm.checkpoint, alarm.class_name) == (1, "epoch02", "cat")
    for rule, holds in (
        ("no-alarms", False), ("no-alarms(1)", False), ("no-alarms(1, 3)", False), ("no-alarms@last", False),
        ("no-alarms(2,3)", True), ("no-alarms@epoch01", True),
    ):  # fmt: skip
        verdict = only(folder, rule)
        assert (verdict.holds, len(verdict.alarms)) == (holds, 0 if holds else 1), rule


def test_no_alarms_fails_without_explanation_metrics(tmp_path: Path) -> None:
    verdict = only(small_folder(tmp_path / "run", [row("auc", 0.9)]), "no-alarms")
    assert not verdict.holds and "holds no C-Score; add cscore" in verdict.reasons[0]


def test_no_alarms_cannot_hold_with_one_checkpoint(tmp_path: Path) -> None:
    run_study(
        make_study(tmp_path, 4, ["eigencam"], ["cscore"], checkpoints="epochs/epoch01.pt"), tmp_path / "out"
    )
    verdict = only(RunFolder.open(tmp_path / "out"), "no-alarms")
    assert not verdict.holds and "need at least two" in verdict.reasons[0]


def test_exit_codes_and_table(run: RunFolder, collapsed: Path) -> None:
    good = invoke(run.path, "--rule", "auc >= 0", "--rule", "any(cscore.gradcam >= 0)", "--min-n", 1)
    assert good.exit_code == 0 and "3 of 3 rules hold" in good.output
    bad = invoke(collapsed, "--rule", "cscore_n.cat >= 2", "--rule", "no-alarms")
    assert bad.exit_code == 1
    assert "FAIL" in bad.output and "1 of 3 rules hold" in bad.output and "gold-list collapse" in bad.output
    assert invoke(run.path, "--rule", "auc >").exit_code == 2
    assert invoke(run.path, "--rule", "acu >= 1").exit_code == 2
    assert invoke(run.path).exit_code == 2
    assert invoke(run.path / "nowhere", "--rule", "auc >= 0").exit_code == 2


def test_exit_code_of_a_process(collapsed: Path) -> None:
    command = [sys.executable, "-m", "heatproof", "gate", str(collapsed), "--rule", "no-alarms"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "images of cat" in " ".join(done.stdout.split()), done.stderr


def test_junit_and_json(collapsed: Path, tmp_path: Path) -> None:
    xml, text = tmp_path / "new" / "gate.xml", tmp_path / "gate.json"
    rules = ["cscore.eigencam.cat >= 0.5", "no-alarms", "cscore.dog > 0"]
    arguments = [part for rule in rules for part in ("--rule", rule)]
    assert invoke(collapsed, *arguments, "--min-n", 1, "--junit", xml, "--json", text).exit_code == 1
    root = ElementTree.parse(xml).getroot()
    suite = root.find("testsuite")
    assert root.tag == "testsuites" and suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("4", "2")
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases[1:]] == rules and cases[3].find("failure") is None
    failure = cases[2].find("failure")
    assert failure is not None and "0 of 8 images of cat" in str(failure.text)
    content = json.loads(text.read_text())
    assert content["holds"] is False and [rule["holds"] for rule in content["rules"]] == [
        True,
        False,
        False,
        True,
    ]
    assert content["rules"][1]["values"][0]["value"] is None and content["rules"][1]["values"][0]["n"] == 0
    assert content["rules"][2]["alarms"][0]["evidence"]["gold"] == 0


def test_a_rule_without_a_method_leaves_floors_alone(tmp_path: Path) -> None:
    """Maps of a floor are all alike or all noise; a build must not fail, or pass, because of them."""
    values = {"gradcam": 0.6, "layercam": 0.55, "random": 0.2, "sobel": 0.9, "centre": 1.0}
    rows = [row("cscore", v, method=m, label=0) for m, v in values.items()]
    rows += [row("cscore_n", 40, method=m, label=0) for m in values]
    rows += [row("method_agreement_spearman", v, method=f"gradcam ~ {m}")
             for m, v in (("layercam", 0.7), ("random", 0.0))]  # fmt: skip
    rows += [row("bl", 0.5, method="random", image=f"{i}.png") for i in range(40)]
    folder = small_folder(tmp_path / "run", rows)
    assert {v.method for v in only(folder, "cscore.'left.lung' >= 0.5").values} == {"gradcam", "layercam"}
    _, verdict = check(folder, ["cscore.'left.lung' >= 0.5"])
    assert verdict.holds
    assert not only(folder, "any(cscore.'left.lung' >= 0.8)").holds
    assert not only(folder, "cscore.random.'left.lung' >= 0.5").holds  # where it is named
    assert only(folder, "method_agreement_spearman >= 0.5").holds
    with pytest.raises(InputError, match="only controls have that metric; name one of them"):
        only(folder, "bl <= 1")
    assert only(folder, "bl.random <= 1").holds


def test_every_rule_says_n_and_too_few_images_keep_no_rule(tmp_path: Path) -> None:
    rows = [row("cscore", 0.9, method="gradcam", label=0), row("cscore_n", 5, method="gradcam", label=0)]
    rows += [row("cscore_low", 0.8, method="gradcam", label=0), row("auc", 0.95), row("recall", 0.9, label=1)]
    rows += [row("bl", 0.1, method="gradcam", image=f"{i}.png", label=i % 2) for i in range(40)]
    folder = small_folder(tmp_path / "run", rows, answered=80)
    expected = {
        "cscore.0 >= 0.5": 5, "cscore_low.0 >= 0.5": 5, "cscore_n.0 >= 5": 40, "auc >= 0.9": 80,
        "recall.1 >= 0.8": 40, "bl <= 0.2": 40, "bl.1 <= 0.2": 20,
    }  # fmt: skip
    for rule, n in expected.items():
        _, result = check(folder, [rule])
        assert (result.n, result.holds) == (n, n >= 30), rule
        assert only(folder, rule, n).holds and not only(folder, rule, n + 1).holds
    assert check(folder, ["cscore.0 >= 0.5"])[1].values[0].reason == "5 images are fewer than 30"
    outcome = invoke(folder.path, "--rule", "auc >= 0.9", "--rule", "cscore.0 >= 0.5")
    assert outcome.exit_code == 1 and re.search(r"ok +auc >= 0.9 +0.95 +80 ", outcome.output)
    assert re.search(r"FAIL +cscore.0 >= 0.5 +0.9 +5 .*5 images are fewer than 30", outcome.output)
    assert invoke(folder.path, "--rule", "cscore.0 >= 0.5", "--min-n", 5).exit_code == 0


def test_half_a_run_and_broken_pictures_are_refused(tmp_path: Path) -> None:
    study = make_study(tmp_path, 40, ["gradcam"], ["accuracy"])
    for picture in sorted((tmp_path / "pictures").rglob("*.png"))[:3]:
        picture.write_bytes(b"not an image")
    run_study(study, tmp_path / "out")
    folder = RunFolder.open(tmp_path / "out")
    first, _ = check(folder, ["accuracy >= 0"])
    assert (first.rule, first.holds, first.n) == ("complete run, usable >= 0.95", False, 40)
    assert first.values[0].value == pytest.approx(37 / 40) and "3 broken" in first.values[0].reason
    assert invoke(folder.path, "--rule", "accuracy >= 0").exit_code == 1
    assert invoke(folder.path, "--rule", "accuracy >= 0", "--min-usable", 92).exit_code == 0
    part = next(iter(sorted((folder.path / "scores").glob("*.parquet"))))
    part.unlink()
    result = invoke(folder.path, "--rule", "degenerate <= 1", "--min-usable", 0)
    assert result.exit_code == 1 and "units are missing" in " ".join(result.output.split())


def test_an_empty_gold_list_keeps_no_rule(tmp_path: Path) -> None:
    """Its C-Score is stored as 0, which must not pass for a small one."""
    rows = [row("cscore", 0.0, "the gold list is empty", method="gradcam", label=0),
            row("cscore_n", 0, method="gradcam", label=0)]  # fmt: skip
    verdict = only(small_folder(tmp_path / "run", rows), "cscore.0 <= 0.5")
    assert not verdict.holds and math.isnan(verdict.values[0].value)
    assert verdict.values[0].reason == "the gold list is empty"


def test_no_alarms_needs_enough_images(run: RunFolder) -> None:
    """16 images: too few to say that nothing is wrong."""
    _, verdict = check(run, ["no-alarms(2)"])
    assert (verdict.holds, verdict.n) == (False, 16) and "16 images are fewer than 30" in verdict.reasons
    assert only(run, "no-alarms(2)", 16).reasons == ()


def test_a_crash_is_no_broken_rule(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 is what Python itself ends with, so a build could not tell a bug from a broken rule."""

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(RunFolder, "scores", out_of_memory)
    assert invoke(run.path, "--rule", "auc >= 0").exit_code == 3


def test_json_writes_null_for_what_is_not_defined(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "run", [row("dts", math.nan, "no structure\x00\x07", image="a")])
    xml, text = tmp_path / "gate.xml", tmp_path / "gate.json"
    assert invoke(folder.path, "--rule", "dts < 1", "--json", text, "--junit", xml).exit_code == 1
    assert json.loads(text.read_text())["rules"][1]["values"][0]["value"] is None
    assert "no structure" in ElementTree.parse(xml).getroot()[0][1][0].get("message", "")
