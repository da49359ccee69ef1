"""An audit chooses by network, pictures and time, is an ordinary run, and says what it left out."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import heatproof as hp
from heatproof.cli import main
from heatproof.errors import HeatproofError, InputError
from heatproof.explain.baselines import is_floor
from heatproof.images import Preprocess, batches, open_source
from heatproof.run.checks import check_study
from heatproof.run.config import read_study
from heatproof.run.progress import Progress
from heatproof.run.study import ResolvedStudy, open_study
from heatproof.store import RunFolder
from heatproof.studies.audit import planner, protocol
from heatproof.studies.audit.planner import (
    CORE,
    CURVES,
    FIRST,
    FURTHER,
    LAST,
    MARGIN,
    MORE,
    VOTE,
    BudgetPlanner,
    CostModel,
    MetricGroup,
    Selection,
)
from heatproof.studies.audit.protocol import AuditScheduler, plan_audit, run_audit, write_images
from heatproof.studies.audit.settings import AuditSettings, EvidenceSettings
from heatproof.verdict.follow import calibration
from tiny_study import fingerprint, make_study

TRANSFORMER = """
import timm, torch
from heatproof.images import Preprocess
from heatproof.models import Model
def make():
    torch.manual_seed(0)
    net = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=2)
    return Model(net, preprocess=Preprocess(size=(32, 32), resize=32))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new user's folder: net.py, epochs/*.pt, pictures/cat and pictures/dog."""
    make_study(tmp_path, images=36)
    (tmp_path / "study.toml").unlink()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(planner, "FURTHER", ())  # many passes are for the tests of the ladder
    monkeypatch.setattr(planner, "EXPENSIVE", ("integrated-gradients",))
    return tmp_path


def heatproof(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def settings(out: str, **more: object) -> AuditSettings:
    wanted = {
        "methods": ("gradcam",),
        "checkpoint": ("epochs/epoch02.pt",),
        "minutes": 3.0,
        "limit": 12,
        **more,
    }
    return AuditSettings(model="net.py:tiny", images=Path("pictures"), out=Path(out), **wanted)  # type: ignore[arg-type]


class Fixed(CostModel):
    """So many seconds for a method's vote, a tenth for each lot of metrics, ten for a dear method."""

    def method(self, method: str) -> float:
        if method in ("lrp", "rollout"):
            raise InputError(f"{method} is for other networks")
        return 2.5 if method.partition("(")[0] in "integrated-gradients occlusion lime rise" else 0.0

    def group(self, group: MetricGroup) -> float:
        return 1.0 if group == VOTE else 0.1

    decoding = evidence = 0.0


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    make_study(folder, images=120)
    return folder


def opened_study(many: Path, limit: int = 1000) -> ResolvedStudy:
    config = {"methods": ["random"], "model": {"spec": "net.py:tiny", "checkpoints": "epochs/epoch02.pt"},
              "images": {"kind": "folder", "path": "pictures", "limit": limit}}  # fmt: skip
    opened = open_study(config)
    opened.folder = many
    check_study(opened)
    return opened


def chosen(many: Path, seconds: float, limit: int = 1000, wanted: tuple[str, ...] = ()) -> Selection:
    opened = opened_study(many, limit)
    return ladder(opened, seconds, wanted).plan(wanted)[-1]


def ladder(opened: ResolvedStudy, seconds: float, wanted: tuple[str, ...] = ()) -> BudgetPlanner:
    return BudgetPlanner(opened, Fixed(opened, wanted[:1] or FIRST), 2, lambda: seconds, seconds / 60)


def left_out(selection: Selection) -> set[str]:
    return {choice.what for choice in selection.choices if not choice.taken}


def test_with_all_the_time_there_is_everything_that_fits_the_network_is_taken(many: Path) -> None:
    result = chosen(many, 1e9)
    assert result.methods[:2] == ("gradcam", "random") and result.images == 120
    assert {"layercam", "gradcam++", "edges", "centre"} <= set(result.methods)
    assert any(m.startswith("lime(samples=") for m in result.methods)
    assert result.metrics[: len(VOTE)] == VOTE
    assert {"cscore", "auc", "insertion(steps=10)", "fragility"} <= set(result.metrics)
    refused = {c.what: c.why for c in result.choices if not c.taken}
    assert refused["rollout"] == "rollout is for other networks"
    assert refused["localise"] == "it needs boxes or masks, but the images have none"


def test_what_goes_first_when_time_is_short_stands_last_on_the_ladder(many: Path) -> None:
    whole = chosen(many, 1e9)
    before = set(whole.methods)
    for seconds in (3000, 900, 500, 300, 150, 60):
        result = chosen(many, seconds)
        now = set(result.methods)
        assert (
            now <= before and {*VOTE} <= {*result.metrics} <= {*whole.metrics} and 40 <= result.images <= 120
        ), seconds
        assert ladder(opened_study(many), seconds).seconds(result) <= MARGIN * seconds
        before = now
    assert result.methods == ("gradcam", "random") and 40 <= result.images <= 56
    assert set(CORE[:2]) | {MORE[0]} <= left_out(result)


@pytest.mark.parametrize(("seconds", "images"), [(60.0, 56), (45.0, 32), (35.0, 24), (20.0, 8), (1.0, 4)])
def test_any_budget_gives_an_answer_on_fewer_images(many: Path, seconds: float, images: int) -> None:
    """Methods are left out first, then images; 50 s are needed for one method on 40."""
    result = chosen(many, seconds)
    assert (result.methods, result.images) == (("gradcam", "random"), images)
    if images < 30:
        reason = result.choices[-1].why
        assert "the verdict needs 30, so it will be undecided; more minutes" in reason
    named = chosen(many, seconds, wanted=("layercam", "gradient"))
    assert "layercam" in named.methods and "gradient" in left_out(named)


def test_few_pictures_are_all_taken_and_it_is_reported_that_they_cannot_decide(many: Path) -> None:
    result = chosen(many, 1e9, limit=12)
    assert result.images == 12
    assert "the verdict needs 30, so it will be undecided" in result.choices[-1].why


def test_evidence_takes_one_method() -> None:
    with pytest.raises(InputError, match="methods must be one method, got gradcam, layercam"):
        EvidenceSettings(model="lite0", images=Path("pictures"), methods=("gradcam", "layercam"))


def test_methods_that_were_asked_for_are_the_only_ones(many: Path) -> None:
    result = chosen(many, 1e9, wanted=("layercam", "gradient"))
    assert set(result.methods) == {"layercam", "gradient", "random", "edges", "centre"}
    with pytest.raises(InputError, match="rollout is for other networks"):
        chosen(many, 1e9, wanted=("layercam", "rollout"))


def test_from_one_line_to_a_page_and_the_same_line_goes_on(folder: Path) -> None:
    line = ["audit", "net.py:tiny", "pictures", "--checkpoint", "epochs/epoch02.pt", "--methods",
            "gradcam,gradient", "--limit", "16", "--minutes", "3"]  # fmt: skip
    ran = heatproof(*line)
    assert ran.exit_code == 0, ran.output
    for word in ("chosen", "left out", "specificity", "16 of 36", "heatproof run audit/study.toml",
                 "open the page: file://"):  # fmt: skip
        assert word in ran.output, word
    verdict = json.loads((folder / "audit/run/verdict.json").read_text())
    assert verdict["headline"] in ran.output and (folder / "audit/report.html").stat().st_size > 50_000
    such = verdict["rates"]["such_runs"]
    methods = len(verdict["methods"])
    known = calibration()["rates_by_size"]["tested sequentially"]
    assert such == known[str(methods)] | {"methods": methods, "looks": "tested sequentially"}
    study = read_study("audit/study.toml")
    assert study.methods[:2] == ["gradcam", "random"] and study.model.checkpoints == ["../epochs/epoch02.pt"]
    rows = fingerprint(folder / "audit/run")
    again = heatproof(*line)
    assert again.exit_code == 0 and "chosen by an earlier call" in again.output
    assert fingerprint(folder / "audit/run") == rows
    run = heatproof("run", "audit/study.toml")
    assert run.exit_code == 0 and fingerprint(folder / "audit/run") == rows
    assert heatproof("run", "audit/study.toml", "--out", "fresh").exit_code == 0
    query = "select image, method, metric, label, value from scores order by all"
    steps, once = (RunFolder.open(run).scores().sql(query) for run in ("audit/run", "fresh"))
    values = [[row.pop("value") for row in every] for every in (steps, once)]
    assert steps == once
    np.testing.assert_allclose(values[0], values[1], rtol=1e-9)  # of all steps at once
    other = heatproof(*line[:8], "12", *line[9:])
    assert other.exit_code == 2 and "audit holds an audit with limit = 16, not 12" in other.output
    page = (folder / "audit/report.html").read_text()
    assert "Not computed:" in page and "it needs boxes or masks" in page
    for given in ("audit", "audit/run"):  # whichever is named, the page that the audit opened is renewed
        (folder / "audit/report.html").write_text("an older page")
        renewed = heatproof("report", given)
        assert renewed.exit_code == 0 and "wrote audit/report.html" in renewed.output
        assert (folder / "audit/report.html").stat().st_size > 50_000
        assert not (folder / "audit/run/report.html").exists()
    assert hp.open_run("audit").report() == Path("audit/report.html")
    assert study.run.both_classes and study.images.growing


def test_what_a_step_took_decides_what_follows(many: Path) -> None:
    opened = opened_study(many)
    budget = ladder(opened, 1000.0)
    first, *rest = budget.plan(())
    assert first.methods == ("gradcam", "random", "layercam") and first.images == 40
    requested = {(step.methods, step.metrics, step.images) for step in rest}
    assert len(requested) == len(rest) > 1 and rest[-1].images > 100
    step, _ = budget.step(())
    tested = ((0, ("random",)), (40, ("gradcam", "layercam")))  # a control has no part in the answers
    assert step is not None and step.same_run(replace(first, tested=tested))
    budget.record(step, 10 * budget.step_seconds(step))  # a busy machine: ten times as long as expected
    later = budget.plan(())
    assert budget.scale == pytest.approx(10) and len(later[-1].methods) < len(rest[-1].methods)
    assert budget.seconds(later[-1]) <= MARGIN * 1000
    assert {*later[-1].out_of_time} > {*rest[-1].out_of_time}
    for after, before in zip(later, [first, *later], strict=False):  # a run can only add at the end of a list
        assert after.methods[: len(before.methods)] == before.methods
        assert after.metrics[: len(before.metrics)] == before.metrics and after.images >= before.images
    budget = ladder(opened, 1000.0)
    budget.record(step, budget.step_seconds(step) / 20)
    assert budget.scale == pytest.approx(1 / 20)  # an idle one: more of it fits
    assert len(budget.plan(())[-1].methods) > len(rest[-1].methods)
    budget = ladder(opened, 1000.0)
    budget.done = first
    budget.record(replace(first, metrics=(*first.metrics, "evidence")), 0.0)
    assert budget.scale == 1  # its expected time is a maximum, and says nothing about tests


def test_a_short_step_does_not_change_the_estimates_of_long_ones(many: Path) -> None:
    budget = ladder(opened_study(many), 1000.0)
    first, _ = budget.step(())
    assert first is not None
    long = budget.step_seconds(first)
    budget.record(first, long)
    short = replace(first, images=first.images + 1, tested=first.tested)
    expected = budget.step_seconds(short)
    assert expected < long / 50
    budget.record(short, expected + 2.0)  # a run's start and end
    assert budget.scale == pytest.approx((long + expected + 2.0) / (long + expected)) and budget.scale < 1.1


def test_without_time_a_run_that_has_something_asks_for_nothing_more(many: Path) -> None:
    budget = ladder(opened_study(many), 80.0)
    first, _ = budget.step(())
    assert first is not None
    budget.record(first, 500.0)
    budget.left = lambda: -420.0
    last, whole = budget.step(())
    finished = replace(first, metrics=(*first.metrics, *LAST))  # whose time is reserved
    assert last is not None and last.same_run(finished) and {"layercam", "edges"} < {*whole.out_of_time}
    budget.done = last
    assert budget.step(())[0] is None


def test_a_decided_method_is_tested_on_no_further_image(many: Path) -> None:
    budget = ladder(opened_study(many), 1e9)
    steps, decided = [], set[str]()
    while (step := budget.step(("gradcam", "layercam"))[0]) is not None:
        steps.append(step)
        budget.record(step, budget.step_seconds(step))
        decided.add("gradcam")
        budget.decided = frozenset(decided)
    last = steps[-1]
    counts = {method: last.tested_images(method) for method in last.methods}
    assert not {*LAST} & {*steps[-2].metrics} and {*LAST} <= {*last.metrics}  # computed once, at the end
    assert counts == {"gradcam": 40, "layercam": 120, "random": 40, "edges": 40, "centre": 40}
    assert [step.images for step in steps] == [40, 64, 104, 104, 120, 120] and "evidence" in last.metrics
    looks = [images for images, methods in last.tested if "layercam" in methods]
    assert looks == [40, 80, 120]  # after each doubling and at the end
    everything = [(120, (*last.methods,))]
    saved = budget._cost(replace(last, tested=tuple(everything)), lambda _: 120.0)
    assert budget._cost(last, last.tested_images) < 0.6 * saved


def test_metrics_that_run_a_method_again_cost_its_passes(many: Path) -> None:
    costs = CostModel(opened_study(many), ("gradcam",))
    costs._methods |= {"gradcam": 0.1, "occlusion": 1.1}
    costs._inputs["gradcam"] = 1.0
    extra = [costs.test(method, FURTHER) - costs.test(method, ()) for method in ("gradcam", "occlusion")]
    assert extra[1] - extra[0] == pytest.approx(8.0)  # each four times: three depths and the network as it is
    assert costs.test("occlusion", (CURVES,)) - costs.test("occlusion", ()) == costs.group(CURVES)


def test_a_method_that_needs_too_many_images_is_tested_no_further(many: Path) -> None:
    methods = ("gradcam", "layercam", "gradient")
    budget = ladder(opened_study(many), 1e9)
    steps = []
    while (step := budget.step(methods)[0]) is not None:
        steps.append(step)
        budget.record(step, budget.step_seconds(step))
        last = step.tested_images("layercam")  # 240 images decide it: twice as many as there are
        budget.growth = {"gradcam": math.inf, "layercam": 240 / last, "gradient": 6.1}
    assert {m: steps[-1].tested_images(m) for m in methods} == {
        "gradcam": 40,
        "layercam": 120,
        "gradient": 40,
    }
    assert steps[-1].images == 120 and {*LAST} <= {*steps[-1].metrics}
    budget.growth |= {"layercam": 6.1}
    budget.done = steps[0]
    assert budget.step(methods)[1].images < 120  # more images would decide none of them


def test_images_after_evidence_cost_all_evidence_again(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed over all images, so it is computed again if there are more."""
    monkeypatch.setattr(Fixed, "method", lambda _self, method: 0.0 if is_floor(method) else 1.0)
    monkeypatch.setattr(Fixed, "evidence", 30.0)
    budget = ladder(opened_study(many), 1e9, ("gradcam",))
    first, _ = budget.step(("gradcam",))
    assert first is not None
    done = replace(first, metrics=(*first.metrics, "evidence"))
    budget.done, budget.decided = done, frozenset({"gradcam"})
    again = 30 * 40.0
    more = replace(done, images=48)
    assert budget.step_seconds(more) == pytest.approx(again + 8 * (30 + 1))
    for seconds, images in ((again / 2, 40), (3 * again, 104)):
        budget.left = partial(float, (seconds + 20 * (30 + 1)) / MARGIN)
        assert budget.plan(("gradcam",))[-1].images == images
    before = budget.scale
    budget.record(more, 0.1)
    assert budget.scale == before and budget.done == more


class Stop(Progress):
    """Somebody presses Ctrl-C twice after the first unit."""

    def advance(self, images: int, units: int) -> None:
        super().advance(images, units)
        raise KeyboardInterrupt


def test_an_audit_that_was_stopped_goes_on_to_the_same_rows(folder: Path) -> None:
    whole = settings("whole")
    run_audit(whole, plan_audit(whole))
    stopped = settings("stopped")
    plan = plan_audit(stopped)
    with pytest.raises(KeyboardInterrupt):
        run_audit(stopped, plan, Stop(quiet=True))
    assert not (folder / "stopped/report.html").exists()
    later = run_audit(stopped, plan_audit(stopped))
    assert later.plan.begun and later.verdict is not None and later.page is not None and later.page.exists()
    studies = [read_study(f"{name}/study.toml") for name in ("stopped", "whole")]
    assert studies[0] == studies[1] and studies[0].images.limit == 12 and "edges" in studies[0].methods
    assert fingerprint(folder / "stopped/run") == fingerprint(folder / "whole/run")


def test_more_minutes_go_on_with_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CostModel", Fixed)  # 1.4 s and more for each method and picture
    few = {
        "CORE": ("layercam",),
        "MORE": (),
        "EXPENSIVE": ("gradient",),
        "FLOORS": ("edges",),
        "CURVES": ("deletion(steps=4)",),
    }
    for name, value in few.items():
        monkeypatch.setattr(planner, name, value)
    monkeypatch.setattr(BudgetPlanner, "record", lambda self, step, seconds: setattr(self, "done", step))

    monkeypatch.setattr(protocol, "growth_needed", lambda data, answers: {})  # every test may decide

    def spent(self: AuditScheduler) -> float:  # a machine on which all takes a third longer than expected
        done = self.planner.done
        return 1.3 * self.planner._cost(done, done.tested_images) if done else 0.0

    monkeypatch.setattr(AuditScheduler, "spent", property(spent))
    short = settings("grown", methods=(), limit=None, minutes=0.7)
    first = run_audit(short, plan_audit(short))
    before = read_study("grown/study.toml")
    assert before.methods == ["gradcam", "random"] and before.images.limit == 32
    assert "left out for lack of time: layercam" in first.plan.more and "such as 1.4" in first.plan.more
    rows = Counter(
        row["unit"] for row in first.folder.scores().sql("select unit from scores where image <> ''")
    )
    long = settings("grown", methods=(), limit=None, minutes=60.0)
    second = run_audit(long, plan_audit(long))
    after = read_study("grown/study.toml")
    assert after.images.limit == 36 and {*after.methods} == {
        "gradcam",
        "random",
        "layercam",
        "edges",
        "gradient",
    }
    assert after.methods[:2] == before.methods and "deletion(steps=4)" in after.metrics
    now = Counter(
        row["unit"] for row in second.folder.scores().sql("select unit from scores where image <> ''")
    )
    assert rows.items() <= now.items() and second.verdict is not None  # nothing was computed twice
    every = second.folder.scores().sql(
        "select method, count(*) as n from scores where metric = 'degenerate' group by 1"
    )
    assert {row["n"] for row in every} == {36} and second.folder.status().state == "complete"
    cscores = second.folder.scores().sql("select 1 from scores where metric = 'cscore_n' and label is null")
    assert len(cscores) == len(after.methods)  # those over 32 pictures are gone
    less = plan_audit(short)
    assert less.begun and less.scheduler is None and read_study("grown/study.toml") == after


def test_the_files_of_the_walk_through_an_audit_run(folder: Path) -> None:
    """docs/architecture.md names at most 25 files, and all of them run."""
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text("utf-8")
    walk = page.partition("## The path of `heatproof audit`")[2].partition("\n## ")[0]
    named, root = set(re.findall(r"`([\w/]+\.py)`", walk)), f"{Path(hp.__file__).parent}{os.sep}"
    executed: set[str] = set()

    def note(frame: Any, _event: str, _argument: object) -> None:
        executed.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        done = heatproof("audit", "net.py:tiny", "pictures", "--methods", "gradcam", "--limit", "8")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert done.exit_code == 0, done.output
    files = {file.removeprefix(root).replace(os.sep, "/") for file in executed}
    assert len(named) <= 25 and named <= files, named - files


def test_several_checkpoints_are_a_training(folder: Path) -> None:
    result = settings("training", checkpoint=("epochs/*.pt",))
    done = run_audit(result, plan_audit(result))
    rows = done.folder.scores().sql(
        "select distinct checkpoint from scores where metric = 'cscore' order by 1"
    )
    assert [row["checkpoint"] for row in rows] == ["epoch01", "epoch02"]


def test_a_transformer_gets_methods_for_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    monkeypatch.setattr(planner, "MORE", ("lrp",))
    monkeypatch.setattr(planner, "EXPENSIVE", ("gradient",))
    (folder / "vit.py").write_text(TRANSFORMER)
    requested = AuditSettings(model="vit.py:make", images=Path("pictures"), minutes=3.0, limit=16)
    plan = plan_audit(requested)
    reasons = {c.what: c for c in plan.choices}
    assert reasons["gradcam"].taken and reasons["legrad"].taken
    assert not reasons["lrp"].taken and "vit.py:make has attention" in reasons["lrp"].why


def test_labels_that_are_not_the_networks_are_left_aside(folder: Path) -> None:
    (folder / "three.py").write_text(
        (folder / "net.py").read_text().replace("nn.Linear(8, 2)", "nn.Linear(8, 3)")
    )
    plan = plan_audit(AuditSettings(model="three.py:tiny", images=Path("pictures"), methods=("gradcam",)))
    assert "labels are not used, predictions are explained" in plan.notes[0]
    assert read_study(plan.study).run.targets == "predicted"
    assert not {"accuracy", "cscore"} & set(read_study(plan.study).metrics)
    assert "the network has other classes than the images" in {choice.why for choice in plan.choices}
    check_study(open_study(plan.study))  # with insertion, which reads no labels


def test_several_findings_are_seen_in_the_list_and_told_to_the_network(folder: Path) -> None:
    rows = [
        f"pictures/{k}/{i:03d}.png,{i % 3 % 2},{i % 2}" for i in range(36) for k in [("cat", "dog")[i % 2]]
    ]
    (folder / "list.csv").write_text("\n".join(["path,red,green", *rows]))
    requested = AuditSettings(model="net.py:tiny", images=Path("list.csv"), methods=("gradcam",), limit=8)
    plan = plan_audit(requested)
    study = read_study(plan.study)
    assert study.model.head == "multilabel" and study.images.options == {"label_columns": ["red", "green"]}
    done = run_audit(requested, plan)
    assert done.verdict is not None
    result = done.folder.scores().sql(
        "select distinct explained from scores where method = 'gradcam' and image <> ''"
    )
    assert {row["explained"] for row in result} == {0, 1}


def test_pictures_without_labels_and_of_one_class(folder: Path) -> None:
    loose = AuditSettings(
        model="net.py:tiny", images=Path("pictures/cat"), methods=("gradcam",), limit=8, out=Path("loose")
    )
    plan = plan_audit(loose)
    assert "the images have no labels" in plan.notes[0]
    (folder / "one").mkdir()
    (folder / "pictures/cat").rename(folder / "one/cat")
    table = {
        "model": "net.py:tiny",
        "images": Path("one"),
        "class_names": ("cat", "dog"),
        "methods": ("gradcam",),
        "limit": 8,
    }
    plan = plan_audit(AuditSettings(**table, out=Path("single")))  # type: ignore[arg-type]
    assert "all images are of class cat" in plan.notes[0]
    assert {c.what: c.why for c in plan.choices}["auc"] == "all images are of one class"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["net.py:tiny", "nowhere"], "there is no folder or file nowhere"),
        (["net.py:tiny", "empty"], "there is no image in empty"),
        (["net.py:tinny", "pictures"], "tinny"),
        (["timm:resnet18", "pictures"], "has random weights, whose maps explain nothing"),
        (["torchvision:squeezenet", "pictures"], "did you mean 'squeezenet1_1' or 'squeezenet1_0'?"),
        (["timm:resnet180", "pictures"], "unknown timm model 'resnet180'; did you mean"),
        (["nothing", "pictures"], "cannot read the model 'nothing'"),
        (["net.py:tiny", "pictures", "--checkpoint", "lost.pt"], "there is no file 'lost.pt'"),
        (["net.py:tiny", "pictures", "--minutes", "0"], "minutes must be above 0"),
        (["net.py:tiny", "pictures", "--methods", "gradcamm"], "gradcam"),
        (["net.py:tiny", "pictures", "--out", "taken"], "taken holds another run"),
    ],
)
def test_bad_input_raises_a_clear_error_before_any_work(
    folder: Path, words: list[str], sentence: str
) -> None:
    (folder / "empty").mkdir()
    (folder / "taken").mkdir()
    (folder / "taken/study.toml").write_text("")
    ran = heatproof("audit", *words, "--no-open")
    lines = ran.output.strip().splitlines()
    assert ran.exit_code == 2 and lines[-1].startswith("error: ") and sentence in lines[-1], ran.output
    assert not (folder / "audit").exists()


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
    )


def test_a_module_and_tensors_from_python(folder: Path) -> None:
    model, images, labels = small().train(), torch.randn(32, 3, 24, 24), torch.arange(32) % 2
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    messages: list[str] = []
    run = hp.audit(model, images, labels, methods="gradcam", minutes=3, out="mine", say=messages.append)
    assert model.training and all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert any(line.startswith("chosen: gradcam") for line in messages)
    assert run.status().state == "complete" and run.verdict().methods[0].method == "gradcam"
    assert (folder / "mine/report.html").exists()
    maps = run.maps("gradcam")
    own = hp.explain(model, images, "gradcam", labels)["gradcam"]
    by_id = [int(Path(name).stem) for name in maps.ids]
    torch.testing.assert_close(maps.upsample(), own.upsample()[by_id], atol=0.05, rtol=0)
    with pytest.raises(HeatproofError, match="was started with other settings"):
        hp.audit(model, images.flip(0), labels, methods="gradcam", minutes=3, out="mine", say=messages.append)


def test_model_ready_tensors_come_back_from_their_files(tmp_path: Path) -> None:
    model = hp.load_model(small(), preprocess=Preprocess(size=(20, 20), resize=20))
    pictures = torch.rand(4, 3, 20, 20)
    for images in ((pictures - torch.tensor(model.preprocess.mean)[:, None, None])
                   / torch.tensor(model.preprocess.std)[:, None, None], 40 * pictures - 7):  # fmt: skip
        result = write_images(images, [0, 1, 0, 1], model, tmp_path)
        ran = {k: tuple(v) for k, v in result.preprocess.items()}
        source = open_source("csv", result.source.path)
        back = next(iter(batches(source, Preprocess(**ran), 4, range(4), 0))).batch  # type: ignore[arg-type]
        levels = 1 / 255 / min(ran["std"])
        torch.testing.assert_close(back.images, images.float(), atol=levels, rtol=0)
        assert back.labels is not None and back.labels.tolist() == [0, 1, 0, 1]


def test_a_dataset_of_pairs_is_taken_apart(tmp_path: Path) -> None:
    pairs = [(torch.rand(3, 8, 8), i % 3) for i in range(9)]
    result = write_images(pairs, None, None, tmp_path)
    source = open_source("csv", result.source.path)
    assert len(source) == 9 and [s.label for s in source.samples] == [i % 3 for i in range(9)]
    with pytest.raises(InputError, match="labels has 2 entries, but there are 4 images"):
        write_images(torch.rand(4, 3, 8, 8), [0, 1], None, tmp_path)
    with pytest.raises(InputError, match="labels belong to images in memory"):
        write_images("pictures", [0], None, tmp_path)
    with pytest.raises(InputError, match="no image to audit"):
        write_images([], None, None, tmp_path)
