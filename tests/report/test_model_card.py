"""Model cards: read back by huggingface_hub itself, and by the names of CHAI's schema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from heatproof.cli.report import report_command
from heatproof.errors import StoreError
from heatproof.report.health_card import SCHEMA, accuracy, bibliography, health_card, left_out
from heatproof.report.model_card import card_markdown, write_model_card, yaml_lines
from heatproof.store import RunFolder
from heatproof.verdict.answers import ClassAnswer, MethodAnswer, NetworkAnswer, Test, Verdict
from heatproof.verdict.data import RunData, read_run
from heatproof.verdict.judge import judge
from made_run import CLASSES, EVIL, make_run

HUB = "huggingface_hub is not installed: pip install huggingface_hub"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("card") / "run")


@pytest.fixture(scope="module")
def data(run: RunFolder) -> RunData:
    return read_run(run)


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    vote = Test("specificity_weights", "better than untrained", "yes", 0.4, 0.3, 0.5, 60, votes=True)
    there = Test("pointing", "peak above chance", "yes", 0.00001, float("nan"), float("nan"), 40)
    classes = (ClassAnswer(0, CLASSES[0], "yes", there),)
    methods = (MethodAnswer("gradcam", "yes", (vote,)), MethodAnswer("lime(samples=9)", "no", (), note="a|b"))
    return Verdict("epoch02", methods, NetworkAnswer("yes", "yes", classes, ("gradcam",), there))


def test_the_hub_reads_the_results(data: RunData, verdict: Verdict) -> None:
    hub = pytest.importorskip("huggingface_hub", reason=HUB)
    card = hub.ModelCard(card_markdown(data, verdict))
    assert card.data.model_name == "net <1>" and "heatproof" in card.data.tags
    found = {(one.metric_type, (one.metric_args or {}).get("method")): one for one in card.data.eval_results}
    assert found["follows", "gradcam"].metric_value == "yes"
    assert found["follows", "lime(samples=9)"].metric_value == "no"
    vote = found["specificity_weights", "gradcam"]
    assert vote.metric_value == 0.4 and vote.metric_args == {
        "method": "gradcam", "n": 60, "low": 0.3, "high": 0.5,
    }  # fmt: skip
    assert found["accuracy", None].metric_value == pytest.approx(0.8)
    assert found["pointing", None].metric_value == pytest.approx(0.00001)
    assert {one.task_type for one in card.data.eval_results} == {"image-classification"}
    again = hub.ModelCard(str(card))  # as the hub writes it
    assert len(again.data.eval_results) == len(card.data.eval_results)
    assert "Do its saliency maps deserve trust?" in card.text


def test_names_cannot_break_out_of_the_card(data: RunData, verdict: Verdict) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    texts = [*EVIL, *CLASSES, "no", "1e5", "a: b", "- x", "---", "", "'", "\x7f\x85\u2028\ufeff", "#", "~"]
    head = {"a": [{"b": text} for text in texts], "c": {"d": texts, "n": [1, True, 2.5, 1e-7, -3.0]}}
    read = yaml.safe_load("\n".join(yaml_lines(head)))
    assert [each["b"] for each in read["a"]] == texts and read["c"]["d"] == texts
    assert read["c"]["n"] == [1, True, 2.5, 0.0, -3.0]
    body = card_markdown(data, verdict).partition("---\n<!--")[2]
    assert "<b>" not in body.replace("\\<b\\>", "") and "a\\|b" in body
    rows = [line for line in body.splitlines() if line.startswith(("| gradcam", "| lime"))]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}


def elements(schema: Any, above: str = "") -> set[str]:
    return {above + name for name in schema} | {
        path for name, inside in schema.items() if inside for path in elements(inside, f"{above}{name}/")
    }


def paths(card: Any, above: str = "") -> set[str]:
    if isinstance(card, list):
        return set().union(*(paths(each, above) for each in card))
    if not isinstance(card, dict):
        return set()
    return {above + name for name in card} | {
        p for n, own in card.items() for p in paths(own, f"{above}{n}/")
    }


def in_order(card: Any, schema: Any) -> bool:
    if isinstance(card, list):
        return all(in_order(each, schema) for each in card)
    if not isinstance(card, dict):
        return True
    names = [name for name in schema if name in card]
    return list(card) == names and all(in_order(card[name], schema[name]) for name in names)


def test_the_health_card_has_elements_of_the_schema_only(data: RunData, verdict: Verdict) -> None:
    card = health_card(data, verdict)
    assert paths(card) <= elements(SCHEMA) and in_order(card, SCHEMA), "a sequence of XML has an order"
    results = card["KeyMetrics"]["SafetyReliability"]["Results"]["MetricResult"]
    assert json.loads(results[0]["ValueJson"]) == {
        "kind": "estimate_ci", "estimate": 0.4, "lower": 0.3, "upper": 0.5, "level": 95,
    }  # fmt: skip
    assert json.loads(results[1]["ValueJson"]) == {"kind": "estimate", "estimate": 0.00001}
    assert "hash of the weights abc" in card["ReleaseInfo"]["ReleaseVersion"]
    missing = left_out(card)
    assert "BasicInfo/ModelDeveloper" in missing and "KeyMetrics/FairnessEquity" in missing
    assert not paths(card) & set(missing)
    assert "@" in bibliography(data) and "petsiuk2018" in bibliography(data)
    found = accuracy(data)
    assert found is not None and found.n == 60 and found.low < found.value < found.high


def test_a_run_without_votes_has_a_card_too(data: RunData) -> None:
    card = health_card(data, judge(data))
    assert "Results" not in card["KeyMetrics"]["SafetyReliability"]
    hub = pytest.importorskip("huggingface_hub", reason=HUB)
    read = hub.ModelCard(card_markdown(data, judge(data))).data.eval_results
    assert [one.metric_value for one in read if one.metric_type == "follows"] == ["undecided"] * 3


def test_the_command_writes_both_and_no_foreign_card(run: RunFolder, data: RunData, tmp_path: Path) -> None:
    args = [str(run.path), "--out", str(tmp_path / "r.html"), "--model-card"]
    for _ in range(2):  # its own card may be written again
        result = CliRunner().invoke(report_command, args, catch_exceptions=False)
        assert result.exit_code == 0 and "left to you in the card: BasicInfo/ModelDeveloper" in result.output
    assert "AppliedModelCard" in json.loads((run.path / "model-card.json").read_text())
    turned = ["--out", str(tmp_path / "r.html"), "--model-card", str(run.path)]  # the option takes RUN
    assert "left to you" in CliRunner().invoke(report_command, turned, catch_exceptions=False).output
    nobody = CliRunner().invoke(report_command, ["--model-card", "--pdf"])
    assert nobody.exit_code == 2 and "name the folder of a run" in nobody.output
    (tmp_path / "README.md").write_text("# mine")
    with pytest.raises(StoreError, match="did not write; name another file"):
        write_model_card(data, judge(data), tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == "# mine"
