"""The top of the page: pictures that are not picked to please, and steps that follow from the verdict."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from heatproof.report.gallery import choose_front, front_images
from heatproof.report.page import NO_METHOD, next_steps, read_report
from heatproof.report.pieces import Section
from heatproof.store import RunFolder
from heatproof.verdict.answers import MethodAnswer, NetworkAnswer, Verdict
from heatproof.verdict.data import RunData, read_run
from heatproof.verdict.judge import judge
from heatproof.verdict.uses import network_answer
from made_run import made_record, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("front") / "run")


@pytest.fixture(scope="module")
def data(run: RunFolder) -> RunData:
    return read_run(run)


def test_pictures_are_spread_over_the_scores_with_two_wrong_answers(data: RunData) -> None:
    places = choose_front(data, "layercam")
    assert len(places) == len(set(places)) == 6
    assert [data.images.right[i] for i in places] == [True] * 4 + [False] * 2
    column = data.images.scores["insertion", "layercam"]
    pictures = data.folder.pictures()
    usable = [i for i, name in enumerate(data.images.ids) if data.images.right[i] and pictures.path(name)]
    assert len(usable) == 47, "one image was not kept"
    ranked = sorted(usable, key=lambda i: -column[i])
    assert places[0] == ranked[0] and places[3] == ranked[-1]
    ranks = [ranked.index(i) for i in places[:4]]
    assert np.ptp(np.diff(ranks)) <= 1


def test_each_picture_stands_beside_its_map_and_answer(data: RunData) -> None:
    front = front_images(data, judge(data), linked=True)
    assert front is not None and front.method == "gradcam"
    for image in front.images:
        place = data.images.ids.index(image.record["id"])
        assert image.score == pytest.approx(data.images.scores["insertion", "gradcam"][place])
        assert image.image != image.maps["gradcam"]
    html = str(front.__html__())
    assert ">Six examples<" in html
    assert "the most confident 2 wrong predictions; 60 images in all." in html
    assert html.count("✗ wrong") == 2 and html.count("<img") == 12 and html.count('href="#picture=') == 6


def test_damaged_and_missing_pictures_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", images=8).path
    for k, path in enumerate(sorted((folder / "pictures").iterdir())):
        path.write_bytes(path.read_bytes()[: 60 if k < 5 else None])
    data = read_run(RunFolder.open(folder))
    front = front_images(data, judge(data))
    assert front is not None and len(front.images) < 6
    without = read_run(make_run(tmp_path / "bare", images=8, maps=False))
    assert front_images(without, judge(without)) is None


def verdict(*methods: MethodAnswer, **more: object) -> Verdict:
    given = {"network": NetworkAnswer("undecided", note="Not asked"), **more}
    return Verdict("epoch02", methods, **given)  # type: ignore[arg-type]


def steps_of(judged: Verdict) -> list[str]:
    return [f"{step.text} {step.command}".strip() for step in next_steps(judged)]


def test_steps_follow_from_what_was_decided() -> None:
    mixed = steps_of(verdict(MethodAnswer("a", "yes"), MethodAnswer("b", "no")))
    assert "Show maps of a:" in mixed[0] and "Do not show maps of b." in mixed[0]
    assert any('gate RUN --rule "follows a"' in step for step in mixed)
    neither = steps_of(verdict(MethodAnswer("a", "no"), MethodAnswer("b", "no")))
    assert neither[0] == NO_METHOD and not any("gate RUN" in step for step in neither)


def test_what_is_undecided_becomes_a_step_for_each_reason() -> None:
    open_ones = [MethodAnswer(m, "undecided", note=note) for m, note in zip("abc", "xxy", strict=True)]
    steps = steps_of(verdict(*open_ones, notes=("the run is not complete",)))
    assert steps[0].endswith("the run is not complete.")
    assert steps[1:3] == ["To decide about a and b: x.", "To decide about c: y."]
    assert "Not asked." in steps


def test_a_network_that_uses_something_else_and_an_alarm_are_steps() -> None:
    network = network_answer(made_record(("no", "yes"), classes=("cat", "dog")))
    alarms = [
        {"name": "collapse", "checkpoint": at, "sentence": f"At {at}."} for at in ("epoch01", "epoch02")
    ]
    steps = steps_of(verdict(MethodAnswer("a", "yes"), network=network, alarms=tuple(alarms)))
    assert any("judged what it uses for cat: see What the network uses" in step for step in steps)
    assert "Check the training (collapse at epoch02): At epoch02." in steps
    assert not any("epoch01" in step for step in steps)
    earlier = steps_of(verdict(MethodAnswer("a", "yes"), alarms=tuple(alarms[:1])))
    assert any("Keep this checkpoint" in step for step in earlier)


def test_both_questions_have_a_short_answer(data: RunData) -> None:
    def answers(judged: Verdict) -> list[str]:
        page = read_report(data, judged, Section("pictures", "Pictures", missing="none"))
        return re.findall('<p class="short">(.*)</p>', page.fragments()["verdict"])

    front = verdict(MethodAnswer("a", "yes"), MethodAnswer("b", "no"))
    assert answers(front) == ["Yes: 1 of 2 methods", "Not tested"]
    short = {"yes": "The object", "no": "Something other than the object", "undecided": "Undecided"}
    for answer, text in short.items():
        network = network_answer(made_record((answer, answer)))
        other = verdict(MethodAnswer("a", "undecided"), network=network)
        assert answers(other) == ["Undecided for 1 method", text]
