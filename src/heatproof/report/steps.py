"""What to do next, as steps: from a verdict's answers, what is undecided in it, and its alarms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from heatproof.verdict.answers import WORDS, Answer, Verdict
from heatproof.verdict.judge import SEE_NOTES

NO_METHOD = "No method was found to follow this network: do not show these maps as the reason for an answer."


@dataclass(frozen=True)
class Step:
    """One thing to do, and the command that does it where there is one."""

    text: str
    command: str = ""


def next_steps(verdict: Verdict) -> list[Step]:
    """In the order in which they help: what stands in the way, the maps, the network, the training."""
    return [*_in_the_way(verdict), *_maps(verdict), *_network(verdict), *_training(verdict), *_later(verdict)]


def advice(verdict: Verdict) -> str:
    """Which maps to show, in one or two sentences."""
    follows, no, undecided = (_methods(verdict, answer) for answer in WORDS)
    if not follows:
        return NO_METHOD
    keep = f"If you show maps of this network, take {listed(follows, 'or')}: what they show is its doing."
    left = [*no, *undecided]
    return f"{keep} Leave out {listed(left)}." if left else keep


def listed(words: Sequence[str], last: str = "and") -> str:
    """
    >>> listed(["a", "b", "c"], "or")
    'a, b or c'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _methods(verdict: Verdict, answer: Answer | str) -> list[str]:
    return [one.method for one in verdict.methods if one.follows == answer]


def _in_the_way(verdict: Verdict) -> Iterator[Step]:
    for note in verdict.notes:
        yield Step(f"Clear this first, it stands in the way of a judgement: {note}.")


def _maps(verdict: Verdict) -> Iterator[Step]:
    if verdict.follow != "undecided":
        yield Step(advice(verdict))
    open_questions: dict[str, list[str]] = {}
    for one in verdict.methods:
        if one.follows == "undecided":
            open_questions.setdefault(one.note, []).append(one.method)
    for note, methods in open_questions.items():
        why = "it waits for what stands above" if note in ("", SEE_NOTES) else note
        yield Step(f"Decide about {listed(methods)}: {why}.")


def _network(verdict: Verdict) -> Iterator[Step]:
    network = verdict.network
    away = [one.name for one in network.classes if one.test.answer == "no"]
    if network.looks_there == "no":
        on = f" for {listed(away)}" if away else ""
        yield Step(
            f"Find out what the network uses{on}, and let somebody who knows the pictures judge it before "
            "it is put to use. An album shows it in crops:",
            "heatproof verdict RUN --album",
        )
    elif network.looks_there == "undecided" and network.note and verdict.follow != "no":
        yield Step(f"{network.note}.")
    if network.as_well and verdict.follow == "yes":
        yield Step(
            f"Add pictures whose objects lie off the middle: maps of {listed(network.as_well)}, which never "
            "look at the network, lie where they should as well, so that lying there says little so far."
        )


def _training(verdict: Verdict) -> Iterator[Step]:
    """The alarms of the checkpoint shown, each kind once."""
    here = {alarm["name"]: alarm for alarm in verdict.alarms if alarm["checkpoint"] == verdict.checkpoint}
    for name, alarm in here.items():
        yield Step(f"Look into the training, {name} at {verdict.checkpoint}: {alarm['sentence']}")
    before = {alarm["checkpoint"] for alarm in verdict.alarms} - {verdict.checkpoint}
    if before and not here:
        yield Step(f"Earlier checkpoints raised alarms ({len(before)} of them); this one does not: keep it.")


def _later(verdict: Verdict) -> Iterator[Step]:
    if verdict.follow == "yes" and not verdict.notes:
        methods = _methods(verdict, "yes")
        rule = "follows" if len(methods) == len(verdict.methods) else f'"follows {methods[0]}"'
        yield Step(
            "Ask again when the network or the pictures change. In a build, this stops it where maps no "
            "longer follow:",
            f"heatproof gate RUN --rule {rule}",
        )
    yield Step("To hand it on, print it as a PDF of at most six pages.", "heatproof report RUN --pdf")
