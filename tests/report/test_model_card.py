"""Model cards, read back by huggingface_hub itself; result files and their board."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from heatproof.cli.read import board_command, export_command, report_command
from heatproof.errors import InputError, StoreError
from heatproof.report.model_card import (
    SCHEMA,
    card_markdown,
    read_result,
    write_board,
    write_model_card,
    write_result,
    yaml_scalar,
)
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


def test_a_result_file_holds_both_answers_and_no_image(
    data: RunData, verdict: Verdict, tmp_path: Path
) -> None:
    result = read_result(write_result(data, verdict, tmp_path / "a.json"))
    assert (result.schema, result.network, result.checkpoint) == (SCHEMA, "net <1>", "epoch02")
    assert (result.follow, result.uses_object, result.headline) == ("yes", "yes", verdict.headline)
    assert result.methods["gradcam"]["tests"]["specificity_weights"]["value"] == 0.4
    assert result.methods["lime(samples=9)"] == {"follows": "no", "tests": {}}
    assert result.images == len(data.images.ids) and result.accuracy == pytest.approx(0.8)
    assert result.data_hash == data.manifest.data and result.versions == data.manifest.versions
    text = (tmp_path / "a.json").read_text()
    assert not any(name in text for name in EVIL) and str(data.folder.path.parent) not in text


def test_a_result_file_has_the_error_rates_of_such_runs(
    data: RunData, verdict: Verdict, tmp_path: Path
) -> None:
    rates = {"rates": {"networks": 112}, "such_runs": {"methods": 1, "networks": 74}}
    for known in (rates, {"rates": rates["rates"]}):
        path = write_result(data, replace(verdict, rates=known), tmp_path / "a.json")
        assert read_result(path).rates["follow"] == list(known.values())[-1]


def test_the_commands_write_a_result_and_a_board(run: RunFolder, tmp_path: Path) -> None:
    file, page = tmp_path / "a.json", tmp_path / "board.html"
    assert CliRunner().invoke(export_command, [str(run.path), "--result", str(file)]).exit_code == 0
    other = json.loads(file.read_text()) | {"network": "<script>alert(1)</script>", "accuracy": None}
    (tmp_path / "b.json").write_text(json.dumps(other))
    files = [str(file), str(tmp_path / "b.json")]
    assert CliRunner().invoke(board_command, [*files, "--out", str(page)]).exit_code == 0
    text = page.read_text()
    assert text.count("<tr>") == 3 and "net &lt;1&gt;" in text and "&lt;script&gt;alert" in text
    assert text.count("<script") == 1 and "src=" not in text and "http" not in text.partition("</style>")[2]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": "heatproof-result-1"}'])
def test_another_file_is_no_result(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=r"is no result file .*heatproof export RUN --result FILE"):
        write_board([tmp_path / "a.json"], tmp_path / "board.html")


def test_a_result_of_another_schema_is_refused(data: RunData, verdict: Verdict, tmp_path: Path) -> None:
    path = write_result(data, verdict, tmp_path / "a.json")
    path.write_text(path.read_text().replace(SCHEMA, "heatproof-result-9"))
    with pytest.raises(InputError, match="has the schema 'heatproof-result-9'"):
        read_result(path)


def test_a_click_on_a_heading_sorts_the_board(data: RunData, verdict: Verdict, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("there is no chromium")
    path = write_result(data, verdict, tmp_path / "a.json")
    files = []
    for name, images in (("b", 9), ("c", 100), ("a", 20)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(json.loads(path.read_text()) | {"network": name, "images": images}))
    page_file = write_board(files, tmp_path / "board.html")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(page_file.as_uri())
        for heading, order in (("Images", "bac"), ("Images", "cab"), ("Network", "abc")):
            page.locator("thead button", has_text=heading).first.click()
            assert "".join(page.locator("tbody th").all_inner_texts()) == order
        browser.close()
