"""Runs with the metric evidence, from images to every reader, which all say the same."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from html import unescape
from pathlib import Path

import pytest

from evidence_study import CLASSES, make_evidence_study
from heatproof.errors import InputError
from heatproof.metrics.evidence_record import EvidenceRecord, evidence_file
from heatproof.report.model_card import md_text
from heatproof.run.engine import prepare, run_study
from heatproof.store import RunFolder
from heatproof.store.ledger import known_record
from heatproof.verdict.answers import HEADLINES
from heatproof.verdict.data import read_evidence, read_run
from heatproof.verdict.gate import check
from heatproof.verdict.judge import FILE, conclude, judge
from heatproof.verdict.uses import NOT_TESTED
from made_run import made_record, make_run
from verdict.test_verdict import TESTS, heatproof, scores

EVIDENCE = evidence_file(Path(), "final").as_posix()
RULES = ("no-shortcut", "looks-there", "looks-there code")


@pytest.fixture(scope="module")
def cheats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of a network that answers by a token, and its finished run in `out`."""
    folder = tmp_path_factory.mktemp("evidence")
    study = make_evidence_study(folder, "cheating")
    conclude(run_study(study, folder / "out").folder)
    return study


@pytest.fixture
def study(cheats: Path, tmp_path: Path) -> Path:
    shutil.copytree(cheats.parent, tmp_path / "copy")
    return tmp_path / "copy" / cheats.name


def page_of(run: Path) -> str:
    """The text of the report."""
    assert heatproof("report", run, "-o", run / "page.html", "--gallery", 2).exit_code == 0
    return unescape((run / "page.html").read_text(encoding="utf-8"))


def test_a_run_finds_a_token_and_every_reader_says_so(cheats: Path) -> None:
    out = cheats.parent / "out"
    folder = RunFolder.open(out)
    assert folder.status().complete
    query = "select metric, value, label from scores where metric like 'evidence%' and method = ''"
    rows = {(row["metric"], row["label"]): row["value"] for row in folder.scores().sql(query)}
    parts = ("recurring", "property", "removal", "exchange", "n")
    names = {"evidence", *(f"evidence_{part}" for part in parts)}
    assert rows.keys() == {(name, label) for name in names for label in (None, 0, 1)}
    assert rows["evidence", 1] > 0.5 and rows["evidence_recurring", 1] > 0.5
    record = read_evidence(folder, "final")
    assert record is not None and record.has_regions and record.checkpoint == "final"
    assert record.methods == ("gradcam",) and record.classes == CLASSES
    assert rows["evidence_n", None] == len(record.label) and record.scores.value == rows["evidence", None]

    verdict = known_record(out / FILE)
    assert verdict and verdict["schema"] == 2 and verdict["network"]["answer"] == "no"
    assert verdict["headline"] == HEADLINES["undecided", "no"]
    found = "'code' images contain this patch off the object"
    assert found in verdict["network"]["note"]
    assert json.loads(heatproof("verdict", out, "--json").output) == verdict
    output = " ".join(heatproof("verdict", out).output.split())
    assert found in output and "uses something else" in output
    gate = heatproof("gate", out, "--rule", "no-shortcut")
    assert gate.exit_code == 1 and found in " ".join(gate.output.split())
    page = page_of(out)
    section = page.partition('id="evidence"')[2].partition("</section>")[0]
    assert found in section and section.count("<img") >= 4 and "Something other than the object" in page


def test_resume_and_growth_do_not_run_the_interventions_again(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heatproof.metrics import interventions

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the interventions ran again")

    out = study.parent / "out"
    before = (out / EVIDENCE).read_bytes()
    monkeypatch.setattr(interventions, "Interventions", refuse)
    assert run_study(study, out).computed == 0
    study.write_text(study.read_text().replace('"random"]', '"random", "gradient"]'))
    assert run_study(study, out).computed > 0 and (out / EVIDENCE).read_bytes() == before


def test_a_variant_with_options_has_a_file_of_its_own(study: Path) -> None:
    out = study.parent / "out"
    before = (out / EVIDENCE).read_bytes()
    variant = "evidence(donors=12)"
    study.write_text(study.read_text().replace('"evidence"', f'"evidence", "{variant}"'))
    result = run_study(study, out)
    assert result.done == result.units == 4
    path = evidence_file(out, "final", variant)
    own = EvidenceRecord.from_json(known_record(path) or {})
    assert (out / EVIDENCE).read_bytes() == before and len(own.label) == 24
    record = read_evidence(RunFolder.open(out), "final")
    assert record is not None and len(record.label) > 24
    assert heatproof("verify", out).exit_code == 0
    (out / EVIDENCE).unlink()
    alone = read_evidence(RunFolder.open(out), "final")
    assert alone is not None and len(alone.label) == 24


@pytest.mark.parametrize("harm", ["edit", "delete"])
def test_an_edited_or_lost_file_is_noticed_and_computed_again(study: Path, harm: str) -> None:
    out = study.parent / "out"
    path, before = out / EVIDENCE, (out / EVIDENCE).read_bytes()
    assert heatproof("verify", out).exit_code == 0
    if harm == "edit":
        path.write_bytes(before.replace(b'"has_regions": true', b'"has_regions":false', 1))
        refused = heatproof("verdict", out)
        assert refused.exit_code == 2 and "content is not what was written" in refused.output
    else:
        path.unlink()
        verdict = judge(read_run(RunFolder.open(out)))
        assert verdict.network.note == f"{NOT_TESTED}: its file is missing; run the study again"
        assert verdict.notes[0].startswith("the run is not complete")
    verify = heatproof("verify", out, "--repair")
    assert verify.exit_code == 1 and path.name in verify.output, verify.output
    result = run_study(study, out)
    assert result.done == result.units and path.read_bytes() == before
    assert heatproof("verify", out).exit_code == 0


def test_a_run_that_was_killed_before_the_seal_is_whole_after_the_next(study: Path) -> None:
    """The file exists, its unit is not finished: it is not foreign."""
    out = study.parent / "out"
    seals = {path: known_record(path) for path in (out / "seals").glob("*.json")}
    (own,) = (path for path, seal in seals.items() if seal and EVIDENCE in seal["files"])
    own.unlink()
    (out / "status.json").unlink()
    verify = heatproof("verify", out)
    assert "foreign" not in verify.output, verify.output
    result = run_study(study, out)
    assert result.done == result.units and heatproof("verify", out).exit_code == 0


def test_without_labels_the_metric_is_refused_in_one_sentence(tmp_path: Path) -> None:
    study = make_evidence_study(tmp_path, "honest", 8, boxes=False, labels=False, metrics=["evidence"])
    with pytest.raises(InputError, match=r"^[^\n]*evidence[^\n]*labels[^\n]*$"):
        prepare(study, tmp_path / "out")


def test_without_boxes_evidence_is_shown_and_not_judged(tmp_path: Path) -> None:
    study = make_evidence_study(tmp_path, "cheating", 40, boxes=False)
    folder = run_study(study, tmp_path / "out").folder
    verdict = conclude(folder)
    assert verdict.network.answer == "undecided" and verdict.network.recurring and not verdict.no_shortcut
    assert {test.answer for c in verdict.network.classes for test in c.tests} == {"undecided"}
    rules = check(folder, RULES)[1:]
    assert not any(rule.holds for rule in rules)
    assert {re.split(r": | \(", rule.reasons[0])[1] for rule in rules} == {"undecided"}
    assert "judge whether it belongs to 'code'" in page_of(folder.path)


def test_a_network_that_cannot_be_tested_says_why(tmp_path: Path) -> None:
    """It answers one class alone: there is no image to move evidence into."""
    study = make_evidence_study(tmp_path, "honest", 8, metrics=["evidence"])
    text = (tmp_path / "net.py").read_text()
    (tmp_path / "net.py").write_text(text.replace("amax((2, 3)) + self.bias", "amax((2, 3)) * 0 + self.bias"))
    folder = run_study(study, tmp_path / "out").folder
    verdict = judge(read_run(folder))
    assert not verdict.network.is_tested
    assert verdict.network.note.startswith(f"{NOT_TESTED}: no image can be tested: 4 of 8 images")
    (rule,) = check(folder, ["no-shortcut"])[1:]
    assert not rule.holds and "no image can be tested" in rule.reasons[0]


record_of = partial(made_record, classes=CLASSES)
RECORDS = {
    "no": record_of(("no", "no")),
    "yes": record_of(),
    "one of two": record_of(("yes", "no")),
    "undecided": record_of(("undecided", "undecided")),
    "recurring": record_of(("undecided", "yes"), recurring=True),
    "recurring but harmless": record_of(recurring=True),
    "without objects": record_of(("no", "no"), regions=False),
    "without objects, recurring": record_of(("no", "no"), regions=False, recurring=True),
    "few images": record_of(each=4),
    "not tested": None,
}


@pytest.mark.parametrize("name", RECORDS)
def test_verdict_gate_and_report_never_contradict_each_other(tmp_path: Path, name: str) -> None:
    record: EvidenceRecord | None = RECORDS[name]
    run = make_run(
        tmp_path / "run", scores(), metrics=TESTS, images=60, maps=False, classes=CLASSES, evidence=record
    )
    verdict = conclude(run)
    network, stored = verdict.network, known_record(run.path / FILE)
    expected = {"yes": "yes", "recurring but harmless": "yes", "no": "no", "one of two": "no"}
    assert verdict.follow == "yes" and network.answer == expected.get(name, "undecided")
    assert stored == verdict.as_json() and stored["network"]["answer"] == network.answer
    assert network.is_tested == (record is not None)
    assert verdict.level == {"yes": "clear", "no": "stop"}.get(network.answer, "care")
    says = {"yes": "and the network uses the object", "no": "and that is not only the object"}
    assert [text for text in says.values() if text in verdict.headline] == [
        text for answer, text in says.items() if answer == network.answer
    ]

    _, shortcut, there, code = check(run, RULES, min_n=1)
    assert there.holds == (network.answer == "yes") == bool(verdict.looks_there())
    if record is not None:
        assert code.holds == bool(verdict.looks_there("code"))
    assert shortcut.holds == bool(verdict.no_shortcut)
    assert shortcut.holds or network.answer != "yes", "whoever uses the object uses no shortcut"
    assert not shortcut.holds or network.answer != "no"
    for rule in (shortcut, there, code):
        if not rule.holds:
            assert rule.reasons and network.note in rule.reasons[0]
            assert f": {'no' if network.answer == 'no' else 'undecided'} (" in rule.reasons[-1]

    page = page_of(run.path)
    head = page.partition('<section class="verdict')[2].partition("</section>")[0]
    assert head.startswith(f" {verdict.level}") and verdict.headline in head and network.note in head
    section = page.partition('<section id="evidence"')[2].partition("</section>")[0]
    assert (network.note in section) == (record is not None)
    card = heatproof("report", run.path, "-o", tmp_path / "r.html", "--model-card")
    assert card.exit_code == 0
    text = (run.path / "model-card.md").read_text(encoding="utf-8")
    assert ("looks-there" in text) == (record is not None) and md_text(network.note) in text


def test_classes_with_few_images_are_asked_by_their_own_names(tmp_path: Path) -> None:
    record = made_record(("yes",) * 6, each=9, classes=tuple("abcdef"))
    run = make_run(tmp_path / "run", scores(), metrics=TESTS, maps=False, classes="abcdefg", evidence=record)
    verdict = judge(read_run(run))
    assert [c.name for c in verdict.network.classes] == ["all classes"] and verdict.network.answer == "yes"
    one, all_of_them, untested = check(run, ["looks-there b", "looks-there", "looks-there g"])[1:]
    assert one.holds and all_of_them.holds and one.n == all_of_them.n == 54 and verdict.looks_there("b")
    assert not untested.holds and "none of its images could be tested" in untested.reasons[0]
