"""What a verdict is made of: two questions, their tests, and the one object that everybody shows.

    Does the map follow the network?            asked of each method, without annotation
    Does the network look where it should?      asked of the network and each class, where truth is given

Answers are "yes", "no" or "undecided". `Verdict.as_json` is the file verdict.json of a run folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from heatproof.errors import UnknownNameError
from heatproof.registry import key_of
from heatproof.show import plain_table, text
from heatproof.store.facts import Facts
from heatproof.verdict.rules import matching

SCHEMA = 1
Answer = Literal["yes", "no", "undecided"]
HEADLINES = {
    ("yes", "yes"): "Maps follow the network, and lie where they should",
    ("yes", "no"): "Maps follow the network, and the network looks elsewhere: look at what it uses",
    ("no", "yes"): "Maps look right, but are no evidence: they do not follow the network",
    ("no", "no"): "Maps do not follow the network, and lie elsewhere",
    ("yes", "undecided"): "Maps follow the network",
    ("no", "undecided"): "Maps do not follow the network",
}
UNDECIDED = "Not decided yet whether the maps follow the network"
SAID: dict[Answer, tuple[str, str]] = {
    "yes": ("follows the network", "follow the network"),
    "no": ("does not follow the network", "do not follow the network"),
    "undecided": ("is undecided", "are undecided"),
}
WORDS = {"yes": "follows", "no": "does not follow", "undecided": "undecided"}
LOW_ACCURACY = 0.8  # below it the verdict states the accuracy and is not green
LOOKS = {"yes": "looks there", "no": "looks elsewhere", "undecided": "undecided"}


@dataclass(frozen=True)
class Test:
    """One test of one method or class: a mean over n images, held against a threshold."""

    __test__ = False  # pytest would take it for a case

    name: str  # of the rows
    title: str  # in plain words
    answer: Answer  # of this test alone
    value: float
    low: float
    high: float
    n: int
    threshold: float = math.nan  # what the mean must surely lie above
    votes: bool = False  # else it is information
    rates: Mapping[str, Any] = field(default_factory=dict)  # its own false alarms and misses, as measured

    @property
    def numbers(self) -> str:
        if math.isnan(self.value):
            return "not measured"
        interval = "" if math.isnan(self.low) else f"95 % interval {self.low:+.3f} to {self.high:+.3f}, "
        return f"{self.value:+.3f} ({interval}n = {self.n})".replace("-", "−")

    def __str__(self) -> str:
        return f"{self.title}: {self.numbers}"


@dataclass(frozen=True, repr=False)
class Claim:
    """Yes or no, with the reason: `assert claim` shows the sentence where it fails."""

    holds: bool
    sentence: str

    def __bool__(self) -> bool:
        return self.holds

    def __repr__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class MethodAnswer:
    """Whether one method's maps follow this network."""

    method: str
    follows: Answer
    tests: tuple[Test, ...] = ()
    blank: float = math.nan  # the share of its maps that are constant
    note: str = ""  # what would decide it, or what blank maps mean

    @property
    def why(self) -> str:
        """What would decide it, and the tests that did."""
        votes = [f"{t.title}: {t.value:+.3f}, n = {t.n}".replace("-", "−") for t in self.tests if t.votes]
        return "; ".join(filter(None, [self.note, *votes]))

    def __str__(self) -> str:
        return f"{self.method} {SAID[self.follows][0]}{f' ({self.why})' if self.why else ''}"


@dataclass(frozen=True)
class ClassAnswer:
    """Whether the network looks where it should for pictures of one class."""

    label: int | None
    name: str
    looks_there: Answer
    test: Test

    def __str__(self) -> str:
        return f"{self.name}: {LOOKS[self.looks_there]}; {self.test}"


@dataclass(frozen=True)
class NetworkAnswer:
    """Whether the network looks where it should, read from the methods that follow it."""

    looks_there: Answer  # undecided where no method follows
    maps_lie: Answer = "undecided"  # there or elsewhere, whether or not they follow
    classes: tuple[ClassAnswer, ...] = ()
    read_from: tuple[str, ...] = ()  # methods
    test: Test | None = None
    context: Mapping[str, float] = field(default_factory=dict)  # the same number of the floors
    note: str = ""

    @property
    def as_well(self) -> list[str]:
        """Floors that lie there as well as the maps do, where these do: then lying there says little."""
        if self.test is None or self.maps_lie != "yes":
            return []
        return [floor for floor, value in self.context.items() if value >= self.test.value]


@dataclass(frozen=True)
class LabelAgreement:
    """How far the network's answers agree with the labels of the images."""

    accuracy: float = math.nan  # share of the images that are answered as labelled
    n: int = 0
    zero_recall: tuple[str, ...] = ()  # classes with enough images, none of which is answered as labelled

    @property
    def faults(self) -> list[str]:
        """What speaks against the network or the labels; empty where nothing does."""
        low = f"only {self.accuracy:.0%} of its answers agree with the labels (n = {self.n})"
        faults = [low] * (self.accuracy < LOW_ACCURACY)
        if self.zero_recall:
            faults.append(f"it answers no image of {listed(list(self.zero_recall))} as labelled")
        return faults


@dataclass(frozen=True, repr=False)
class Verdict:
    """Both answers for one checkpoint of a run, the alarms over its training, and what was not asked."""

    checkpoint: str
    methods: tuple[MethodAnswer, ...]
    network: NetworkAnswer
    alarms: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()  # what stands in the way of a judgement: answers, accuracy, the run itself
    rates: Mapping[str, Any] = field(default_factory=dict)  # of the whole verdict, and where they are from
    labels: LabelAgreement = LabelAgreement()
    warnings: tuple[str, ...] = ()  # what to check about network and images; changes no answer

    @property
    def follow(self) -> Answer:
        """Of the maps as a whole: yes where a method follows, no where every one was found not to."""
        answers = [one.follows for one in self.methods]
        if "yes" in answers:
            return "yes"
        return "no" if answers and set(answers) == {"no"} else "undecided"

    @property
    def level(self) -> str:
        """How a page colours it: clear, care, stop, or thin where nothing is decided."""
        if self.follow == "undecided":
            return "thin"
        if self.follow == "no":
            return "stop"
        here = any(alarm["checkpoint"] == self.checkpoint for alarm in self.alarms)
        return "care" if here or self.network.looks_there == "no" or self.labels.faults else "clear"

    @property
    def headline(self) -> str:
        answer = HEADLINES.get((self.follow, self.network.maps_lie), UNDECIDED)
        if self.follow != "yes" or not self.labels.faults:
            return answer
        faults = " and ".join(self.labels.faults)
        return (
            f"{answer}; but {faults}: the network or the labels are wrong there, and maps do not show which"
        )

    @property
    def sentence(self) -> str:
        """The methods by answer, with what would decide them where it is one thing, then the network."""
        told = []
        for answer, (one, several) in SAID.items():
            methods = [m for m in self.methods if m.follows == answer]
            if methods:
                notes = {m.note for m in methods} if answer == "undecided" else {""}
                why = f" ({notes.pop()})" if len(notes) == 1 and notes != {""} else ""
                told.append(f"{listed([m.method for m in methods])} {several if methods[1:] else one}{why}")
        told += [self.network.note] * bool(self.network.note)
        if self.labels.faults and self.follow != "yes":
            told.append(f"Of the network, {' and '.join(self.labels.faults)}")
        if self.network.as_well:
            names = listed(self.network.as_well)
            told.append(
                f"Maps of {names}, which never look at it, lie there as well, so that this says little"
            )
        return ". ".join(told) + "."

    @property
    def measured(self) -> str:
        """How often such a verdict is wrong, as it was counted; "" where no test that votes was measured."""
        known = self.rates.get("rates") or {}
        if not known or not any(test.votes for one in self.methods for test in one.tests):
            return ""
        shares = [f"{known[kind]['share']:.1%} ({known[kind]['low']:.1%} to {known[kind]['high']:.1%}, "
                  f"n = {known[kind]['n']})" for kind in ("false_alarm", "miss", "undecided")]  # fmt: skip
        return (
            f"Measured on {known['networks']} networks with planted evidence that chose no threshold: of "
            f"methods that follow, {shares[0]} were said not to; of maps known not to follow, {shares[1]} "
            f"were said to; {shares[2]} of the methods stayed undecided."
        )

    def follows(self, method: str) -> Claim:
        """Whether the maps of a method follow the network; undecided is no, and says what would decide it.

        Args:
            method: its name; without options, all its variants must follow.
        """
        names = [one.method for one in self.methods]
        meant = matching(method, names, Facts().method)
        if not meant:
            raise UnknownNameError("method in this verdict:", method, names)
        asked = [one for one in self.methods if one.method in meant]
        return Claim(all(one.follows == "yes" for one in asked), "; ".join(map(str, asked)))

    def looks_there(self, name: str | None = None) -> Claim:
        """Whether the network looks where it should; undecided is no.

        Args:
            name: of a class; the network as a whole where None.
        """
        if name is None:
            said = f"the network {LOOKS[self.network.looks_there]}"
            why = f" ({self.network.note})" if self.network.note else ""
            return Claim(self.network.looks_there == "yes", said + why)
        classes = {key_of(one.name): one for one in self.network.classes}
        if not classes:
            why = self.network.note or "no image has a box or a mask"
            return Claim(False, f"{name}: undecided, because no class was judged ({why})")
        if key_of(name) not in classes:
            known = [one.name for one in self.network.classes]
            raise UnknownNameError("class with an answer in this verdict:", name, known)
        one = classes[key_of(name)]
        return Claim(one.looks_there == "yes", str(one))

    def as_json(self) -> dict[str, Any]:
        """The content of verdict.json; NaN becomes null."""
        network = {
            "looks_there": self.network.looks_there,
            "maps_lie": self.network.maps_lie,
            "read_from": list(self.network.read_from),
            "test": asdict(self.network.test) if self.network.test else None,
            "context": dict(self.network.context),
            "classes": {
                one.name: {"label": one.label, "looks_there": one.looks_there, "test": asdict(one.test)}
                for one in self.network.classes
            },
            "note": self.network.note,
        }
        methods = [
            {"method": m.method, "follows": m.follows, "blank": m.blank, "note": m.note,
             "tests": [asdict(t) for t in m.tests]}
            for m in self.methods
        ]  # fmt: skip
        found: dict[str, Any] = without_nan({
            "schema": SCHEMA, "headline": self.headline, "sentence": self.sentence,
            "checkpoint": self.checkpoint, "methods": methods, "network": network,
            "labels": asdict(self.labels),
            "alarms": list(self.alarms), "notes": list(self.notes), "warnings": list(self.warnings),
            "rates": dict(self.rates),
        })  # fmt: skip
        return found

    def json(self) -> str:
        """The text of verdict.json."""
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False, allow_nan=False)

    def __repr__(self) -> str:
        return f"Verdict({self.checkpoint!r}: {self.headline})"

    def __str__(self) -> str:
        lines = [f"{self.headline}.", self.sentence]
        lines += [f"  {m.method}: {WORDS[m.follows]}{f' ({m.note})' if m.note else ''}" for m in self.methods]
        lines += [f"  {one}" for one in self.network.classes]
        return "\n".join([*lines, *(f"  note: {note}" for note in (*self.notes, *self.warnings))])

    def _repr_html_(self) -> str:
        rows = [[m.method, WORDS[m.follows], m.why] for m in self.methods]
        rows += [[one.name, LOOKS[one.looks_there], str(one.test)] for one in self.network.classes]
        table = plain_table(["of", "answer", "why"], rows) if rows else ""
        here = [alarm for alarm in self.alarms if alarm["checkpoint"] == self.checkpoint]
        alarms = "".join(f"<p>{text('Alarm: ' + alarm['sentence'])}</p>" for alarm in here)
        return f"<h3>{text(self.headline)}</h3><p>{text(self.sentence)}</p>{alarms}{table}"


def listed(names: list[str], most: int = 5) -> str:
    """
    >>> listed(["a", "b"]), listed(list("abcdef"))
    ('a and b', 'a, b, c and 3 more')
    """
    if len(names) > most:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def without_nan(value: Any) -> Any:
    """As JSON holds it: what is not defined is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return value
