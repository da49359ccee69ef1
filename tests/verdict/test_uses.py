"""The second answer: what the network uses, from interventions on networks with known evidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from evidence_networks import Images, as_network, cheating, honest, make_images, tinted
from heatproof.errors import UnknownNameError
from heatproof.metrics.evidence_record import EvidenceRecord
from heatproof.metrics.interventions import METHODS, SIDES, evidence
from heatproof.models.model import Model
from heatproof.verdict.answers import CUES, MethodAnswer, Verdict
from heatproof.verdict.follow import calibration
from heatproof.verdict.uses import FEWEST, Effects, groups, network_answer, paired_test
from made_run import made_record

EFFECTS = Effects(0.1, 0.25, 0.2, 0.25, 0.5, 0.45)
CLASSES = ("plain", "code")


def record_of(
    model: Model, images: Images, regions: bool = True, classes: tuple[str, ...] = CLASSES
) -> EvidenceRecord:
    return evidence(
        images.labels, model=model, images=images.images, regions=images.regions if regions else None,
        sides=(1 / 4,), classes=classes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def images() -> Images:
    return make_images(80)


@pytest.fixture(scope="module")
def cheats(images: Images) -> EvidenceRecord:
    return record_of(cheating(), images)


@pytest.fixture(scope="module")
def clean(images: Images) -> EvidenceRecord:
    return record_of(honest(), images)


def verdict_of(record: EvidenceRecord | None, follows: str = "yes") -> Verdict:
    network = network_answer(record, follows == "yes", EFFECTS)
    return Verdict("final", (MethodAnswer("gradcam", follows),), network)  # type: ignore[arg-type]


def test_a_cheating_network_gets_no_with_its_evidence(cheats: EvidenceRecord) -> None:
    verdict = verdict_of(cheats)
    assert verdict.network.answer == "no" and verdict.level == "stop"
    assert "not only the object" in verdict.headline
    note = verdict.network.note
    assert "'code' images contain this patch off the object" in note and "control patches turn" in note
    by_name = {answer.name: answer for answer in verdict.network.classes}
    assert by_name["code"].answer == "no" and by_name["code"].test.answer == "no"
    assert not verdict.no_shortcut and not verdict.looks_there() and not verdict.looks_there("code")
    item = verdict.network.recurring[0]
    assert item.crops[0].dtype == np.uint8 and item.crops[0].ndim == 3


def test_an_honest_network_gets_yes(clean: EvidenceRecord) -> None:
    verdict = verdict_of(clean)
    assert verdict.network.answer == "yes", verdict.network
    assert verdict.level == "clear" and verdict.no_shortcut and verdict.looks_there("plain")
    assert verdict.headline.endswith("and the network uses the object")


def test_a_shortcut_needs_no_method_that_follows_but_a_yes_does(
    clean: EvidenceRecord, cheats: EvidenceRecord
) -> None:
    assert verdict_of(cheats, "undecided").network.answer == "no"
    assert verdict_of(cheats, "undecided").headline == "The network uses something other than the object"
    answer = verdict_of(clean, "no").network
    assert answer.answer == "undecided" and "is known to follow the network" in answer.note


def test_without_regions_evidence_is_listed_and_not_judged(images: Images) -> None:
    for model in (cheating(), honest()):
        verdict = verdict_of(record_of(model, images, regions=False))
        assert verdict.network.answer == "undecided" and verdict.level == "care"
        assert "annotate the objects" in verdict.network.note and not verdict.looks_there()
    verdict = verdict_of(record_of(cheating(), images, regions=False))
    assert "judge whether it belongs to 'code'" in verdict.network.note
    assert not verdict.no_shortcut and verdict.headline.endswith("judge what it uses")


def test_a_tint_is_named(images: Images) -> None:
    tint = make_images(80, tint=True, token="none")
    answer = network_answer(record_of(tinted(), tint), True, EFFECTS)
    assert answer.answer == "no" and "colour: transferred" in answer.note


def test_not_tested_is_never_green() -> None:
    verdict = verdict_of(None)
    assert verdict.network.answer == "undecided" and not verdict.network.is_tested
    assert verdict.level == "care" and "was not tested" in verdict.headline and not verdict.no_shortcut


def test_few_images_are_pooled_and_named(images: Images) -> None:
    few = Images(*(part[:12] for part in images))
    answer = network_answer(record_of(honest(), few), True, EFFECTS)
    assert [c.name for c in answer.classes] == ["all classes"] and answer.classes[0].label is None
    assert answer.answer == "undecided"
    two = Images(*(part[:4] for part in images))
    answer = network_answer(record_of(cheating(), two), True, EFFECTS)
    assert answer.answer == "undecided" and f"{FEWEST} are needed" in answer.note


def test_an_untrained_network_and_shuffled_labels_decide_nothing(images: Images) -> None:
    torch.manual_seed(0)
    untrained = as_network(
        nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
        "u",
    )
    predicted = untrained.logits(images.images).argmax(1)
    median = untrained.logits(images.images).diff(dim=1)[:, 0].median()
    untrained.module[4].bias.data[0] += median
    predicted = untrained.logits(images.images).argmax(1)
    assert 0 < predicted.float().mean() < 1
    shuffled = images.labels[torch.randperm(80, generator=torch.Generator().manual_seed(1))]
    for model in (untrained, cheating()):
        record = evidence(shuffled, model=model, images=images.images, regions=images.regions, sides=(1 / 4,))
        assert network_answer(record, True, EFFECTS).answer != "yes"
    record = evidence(shuffled, model=untrained, images=images.images, regions=images.regions, sides=(1 / 4,))
    for answer in network_answer(record, True, EFFECTS).classes:
        for test in answer.tests:
            if test.answer == "no":  # evidence must exceed its control
                assert test.low > 0


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 0, 0, 0, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
def test_two_images_per_class_and_one_image_repeated_decide_nothing(images: Images, rows: list[int]) -> None:
    few = evidence(
        images.labels[rows], model=cheating(), images=images.images[rows], regions=images.regions[rows],
        sides=(1 / 4,),
    )  # fmt: skip
    assert 0 < len(few.label) <= 4 and not any(item.recurring for item in few.items)
    answer = network_answer(few)
    assert answer.answer == "undecided" and "are needed; add images" in answer.note


def test_classes_must_be_known(clean: EvidenceRecord) -> None:
    with pytest.raises(UnknownNameError, match="cod"):
        verdict_of(clean).looks_there("cod")


def test_json_of_the_answer(cheats: EvidenceRecord) -> None:
    content = verdict_of(cheats).as_json()
    assert content["schema"] == 2
    network = content["network"]
    assert network["answer"] == "no" and network["is_tested"] and network["inputs"] == cheats.inputs
    assert {"transplant", "removal", "exchange", "recurring"} <= {
        t["name"] for t in network["classes"]["code"]["tests"]
    }
    item = network["evidence"][0]
    assert {"donors", "turned", "control_turned", "on_object", "recurring"} <= item.keys()
    assert 1 <= len(item["crops"]) <= 3 and "examples" not in item


def test_groups_of_a_record(cheats: EvidenceRecord) -> None:
    assert [group.name for group in groups(cheats)] == ["plain", "code"]


def test_paired_test_against_scipy() -> None:
    from scipy.stats import binomtest

    test, p = paired_test("transplant", 8, 1, 40)
    assert test.value == pytest.approx(7 / 40) and p == pytest.approx(
        binomtest(8, 9, alternative="greater").pvalue
    )
    assert test.low < test.value < test.high
    empty, p = paired_test("transplant", 0, 0, 0)
    assert np.isnan(empty.value) and p == 1


def test_a_class_without_objects_does_not_forbid_a_yes() -> None:
    """Its donors have no region: no window off the object, no removal."""
    record = made_record(("yes", "yes"), 40)
    empty = [label == 1 for label in record.label]
    (test,), removal = record.off_object, record.removal
    assert removal is not None

    def known(values: tuple[float | None, ...]) -> tuple[float | None, ...]:
        return tuple(None if e else value for e, value in zip(empty, values, strict=True))

    without = replace(
        record, object_share=known(record.object_share), removal=replace(removal, kept=known(removal.kept)),
        off_object=(replace(test, turned=known(test.turned)),),
    )  # fmt: skip
    answer = network_answer(without)
    assert answer.answer == "yes" and [c.answer for c in answer.classes] == ["yes", "yes"]
    assert "removal" not in {t.name for t in answer.classes[1].tests}
    turning = replace(test, turned=tuple(float(e) for e in empty))
    covers = network_answer(replace(without, anywhere=(turning,)))
    assert covers.answer == "undecided" and covers.classes[1].answer == "undecided"


def test_measured_rates_name_the_kinds_that_are_missed() -> None:
    answer = network_answer(made_record())
    text = answer.measured
    rates = answer.rates
    assert f"of {rates['networks']} networks" in text and f"n = {rates['all']['accused']['n']})" in text
    for kind, name in CUES.items():
        assert (name in text) == (rates[kind]["stated"]["share"] < 0.8)
    assert replace(answer, is_tested=False).measured == ""
    assert replace(answer, rates={}).measured == ""


def test_the_published_rates_are_those_of_the_form_that_the_metric_has() -> None:
    form = calibration()["network"]["form"]
    assert (form["method"],) == METHODS and form["sides"] == list(SIDES)
    assert form["statistics"] == "whole image"
    rates = calibration()["network"]["rates"]["all"]
    assert rates["called_fine"]["share"] <= 0.05 and rates["accused"]["share"] <= 0.05
    assert rates["undecided"]["share"] <= 0.3
