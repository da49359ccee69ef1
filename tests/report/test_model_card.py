"""Model cards: read back by huggingface_hub itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from heatproof.cli.read import report_command
from heatproof.errors import StoreError
from heatproof.report.model_card import card_markdown, write_model_card, yaml_scalar
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
    there = Test("transplant", "turned", "undecided", 0.00001, float("nan"), float("nan"), 40, votes=True)
    classes = (ClassAnswer(0, CLASSES[0], "yes", (there,)),)
    methods = (MethodAnswer("gradcam", "yes", (vote,)), MethodAnswer("lime(samples=9)", "no", (), note="a|b"))
    return Verdict("epoch02", methods, NetworkAnswer("yes", classes, ("gradcam",), is_tested=True))


def test_the_hub_reads_the_results(data: RunData, verdict: Verdict) -> None:
    hub = pytest.importorskip("huggingface_hub", reason=HUB)
    card = hub.ModelCard(card_markdown(data, verdict))
    assert card.data.model_name == "net <1>" and "heatproof" in card.data.tags
    entries = {
        (entry.metric_type, (entry.metric_args or {}).get("method")): entry
        for entry in card.data.eval_results
    }
    assert entries["follows", "gradcam"].metric_value == "yes"
    assert entries["follows", "lime(samples=9)"].metric_value == "no"
    vote = entries["specificity_weights", "gradcam"]
    assert vote.metric_value == 0.4 and vote.metric_args == {
        "method": "gradcam", "n": 60, "low": 0.3, "high": 0.5,
    }  # fmt: skip
    assert entries["accuracy", None].metric_value == pytest.approx(0.8)
    assert entries["transplant", None].metric_value == pytest.approx(0.00001)
    assert entries["looks-there", None].metric_value == "yes"
    assert {entry.task_type for entry in card.data.eval_results} == {"image-classification"}
    again = hub.ModelCard(str(card))  # as the hub writes it
    assert len(again.data.eval_results) == len(card.data.eval_results)
    assert "Can the saliency maps of this model be trusted?" in card.text


def test_names_cannot_break_out_of_the_card(data: RunData, verdict: Verdict) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    texts = [*EVIL, *CLASSES, "no", "1e5", "a: b", "- x", "---", "", "'", "\x7f\x85\u2028\ufeff", "#", "~"]
    assert yaml.safe_load("\n".join(f"- a: {yaml_scalar(text)}" for text in texts)) == [
        {"a": text} for text in texts
    ]
    numbers = "\n".join(f"- {yaml_scalar(number)}" for number in (1, True, 2.5, 1e-7, -3.0))
    assert yaml.safe_load(numbers) == [1, True, 2.5, 0.0, -3.0]
    named = replace(verdict, methods=tuple(MethodAnswer(text, "no") for text in texts))
    head = yaml.safe_load(card_markdown(data, named).split("---\n")[1])
    metrics = head["model-index"][0]["results"][0]["metrics"]
    assert [metric["args"]["method"] for metric in metrics if metric["type"] == "follows"] == texts
    body = card_markdown(data, verdict).partition("---\n<!--")[2]
    assert "<b>" not in body.replace("\\<b\\>", "") and "a\\|b" in body
    rows = [line for line in body.splitlines() if line.startswith(("| gradcam", "| lime"))]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}


def test_a_run_without_votes_has_a_card_too(data: RunData) -> None:
    hub = pytest.importorskip("huggingface_hub", reason=HUB)
    read = hub.ModelCard(card_markdown(data, judge(data))).data.eval_results
    assert [entry.metric_value for entry in read if entry.metric_type == "follows"] == ["undecided"] * 3


def test_the_command_writes_its_card_and_no_foreign_card(
    run: RunFolder, data: RunData, tmp_path: Path
) -> None:
    args = [str(run.path), "--out", str(tmp_path / "r.html"), "--model-card"]
    for _ in range(2):  # its own card may be written again
        result = CliRunner().invoke(report_command, args, catch_exceptions=False)
        assert result.exit_code == 0
    assert "model-index" in (run.path / "model-card.md").read_text()
    turned = ["--out", str(tmp_path / "r.html"), "--model-card", str(run.path)]  # the option takes RUN
    assert "model-card.md" in CliRunner().invoke(report_command, turned, catch_exceptions=False).output
    refused = CliRunner().invoke(report_command, ["--model-card", "--pdf"])
    assert refused.exit_code == 2 and "name the folder of a run" in refused.output
    (tmp_path / "README.md").write_text("# mine")
    with pytest.raises(StoreError, match="did not write; name another file"):
        write_model_card(data, judge(data), tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == "# mine"
