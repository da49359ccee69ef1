"""The verdict on a run as data: answers to two questions, with their tests.

    Do the maps follow the network?             for each method, without annotations
    What does the network use?                  for the network and each class: "yes" if it is the object

Answers are "yes", "no" or "undecided". `Verdict.as_json` is the file verdict.json of a run folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from heatproof.errors import UnknownNameError, counted
from heatproof.metrics.evidence_record import HALF, EvidenceItem
from heatproof.registry import key_of
from heatproof.show import plain_table, text
from heatproof.store.manifest import Facts, MethodFacts, MetricFacts

SCHEMA = 2
Answer = Literal["yes", "no", "undecided"]
HEADLINES = {
    ("yes", "yes"): "The maps reflect what the network uses, and the network uses the object",
    ("yes", "no"): "The maps reflect what the network uses, and that is not only the object",
    ("no", "no"): "The maps do not reflect what the network uses, and that is not only the object",
    ("undecided", "no"): "The network uses something other than the object",
    ("yes", "undecided"): "The maps reflect what the network uses",
    ("no", "undecided"): "The maps do not reflect what the network uses",
}
UNDECIDED = "Undecided whether the maps reflect what the network uses"
QUESTIONS = ("Do the maps follow the network?", "What does the network use?")
PHRASES: dict[Answer, tuple[str, str]] = {
    "yes": ("follows the network", "follow the network"),
    "no": ("does not follow the network", "do not follow the network"),
    "undecided": ("is undecided", "are undecided"),
}
WORDS = {"yes": "follows", "no": "does not follow", "undecided": "undecided"}
LOW_ACCURACY = 0.8  # below it the verdict states the accuracy and is not green
USES = {"yes": "uses the object", "no": "uses something else", "undecided": "undecided"}


@dataclass(frozen=True)
class Test:
    """One test of one method or class: a mean over n images, compared with a threshold."""

    __test__ = False  # not a test case of pytest

    name: str  # of the rows
    title: str
    answer: Answer  # of this test alone
    value: float
    low: float
    high: float
    n: int
    threshold: float = math.nan  # the mean must surely be above it
    votes: bool = False  # else it is information
    rates: Mapping[str, Any] = field(default_factory=dict)  # its measured false alarms and misses

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
    """A yes or no with its reason: `assert claim` prints the sentence if it fails."""

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
    blank: float = math.nan  # share of its maps that are constant
    note: str = ""  # what would decide it, or what blank maps mean

    @property
    def why(self) -> str:
        """The note, and the tests that vote."""
        votes = [f"{t.title}: {t.value:+.3f}, n = {t.n}".replace("-", "−") for t in self.tests if t.votes]
        return "; ".join(filter(None, [self.note, *votes]))

    def __str__(self) -> str:
        return f"{self.method} {PHRASES[self.follows][0]}{f' ({self.why})' if self.why else ''}"


@dataclass(frozen=True)
class ClassAnswer:
    """What the network uses for one class, or for all classes with few images together."""

    label: int | None
    name: str
    answer: Answer
    tests: tuple[Test, ...]
    members: Mapping[int, str] = field(default_factory=dict)  # names of all classes judged together

    @property
    def test(self) -> Test:
        """The test that decided "no", else the transplant test."""
        return next((test for test in self.tests if test.answer == "no"), self.tests[0])

    def __str__(self) -> str:
        return f"{self.name}: {USES[self.answer]}; {self.test}"


MISSED = 0.2  # share of networks with a kind of shortcut from which on the limits name the kind
CUES = {
    "anywhere": "a token anywhere", "inside": "a token inside the object", "corner": "a corner mark",
    "word": "a printed word", "frame": "a frame", "tint": "a tint", "texture": "a texture",
    "sharpness": "sharpness",
}  # fmt: skip


@dataclass(frozen=True)
class NetworkAnswer:
    """Whether the network uses the object, and what was found to turn its answers."""

    answer: Answer = "undecided"
    classes: tuple[ClassAnswer, ...] = ()
    read_from: tuple[str, ...] = ()  # methods whose maps chose the patches
    evidence: tuple[EvidenceItem, ...] = ()
    has_regions: bool = False  # whether objects are annotated
    is_tested: bool = False
    note: str = ""
    inputs: int = 0  # that the tests ran the network on
    rates: Mapping[str, Any] = field(default_factory=dict)  # measured error rates

    @property
    def recurring(self) -> list[EvidenceItem]:
        """Evidence that recurs nearly unchanged and does not lie on an annotated object."""
        return [item for item in self.evidence if item.recurring and (item.on_object or 0.0) < HALF]

    @property
    def to_judge(self) -> list[EvidenceItem]:
        """Evidence for a person to judge: what recurs, and without annotations also properties."""
        properties = [item for item in self.evidence if item.kind == "property" and not self.has_regions]
        return [*self.recurring, *properties]

    @property
    def measured(self) -> str:
        """Measured error rates of this answer with annotated objects, and the kinds that are often missed."""
        if not self.is_tested or "all" not in self.rates:
            return ""
        shares = [rate_text(self.rates["all"][key]) for key in ("called_fine", "accused", "undecided")]
        stated = {CUES[kind]: self.rates[kind]["stated"] for kind in CUES if kind in self.rates}
        missed = [name for name, rate in stated.items() if rate["n"] and 1 - rate["share"] > MISSED]
        text = (
            f"What the network uses: of {self.rates['networks']} networks that were not used to choose "
            f"limits, {shares[0]} of those with a planted shortcut were judged to use the object, "
            f"{shares[1]} of those without one were judged to use something else, and {shares[2]} stayed "
            "undecided."
        )
        return text + f" Missed in more than {MISSED:.0%}: {listed(missed)}." * bool(missed)

    def __str__(self) -> str:
        return "\n".join([f"{self.note}.", *(f"  {answer}" for answer in self.classes)])

    def _repr_html_(self) -> str:
        rows = [[c.name, USES[c.answer], str(c.test)] for c in self.classes]
        return f"<p>{text(self.note)}.</p>" + plain_table(["class", "answer", "why"], rows)


@dataclass(frozen=True)
class LabelAgreement:
    """How far the network's predictions agree with the labels of the images."""

    accuracy: float = math.nan
    n: int = 0
    zero_recall: tuple[str, ...] = ()  # classes with enough images, none of which is predicted as labelled

    @property
    def faults(self) -> list[str]:
        """Signs that the network or the labels are wrong."""
        low = f"only {self.accuracy:.0%} of the predictions match the labels (n = {self.n})"
        faults = [low] * (self.accuracy < LOW_ACCURACY)
        if self.zero_recall:
            faults.append(f"no image of {listed(self.zero_recall, most=5)} is predicted as labelled")
        return faults


@dataclass(frozen=True, repr=False)
class Verdict:
    """Both answers for one checkpoint of a run, alarms over its training, obstacles and warnings."""

    checkpoint: str
    methods: tuple[MethodAnswer, ...]
    network: NetworkAnswer
    alarms: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()  # obstacles to a judgement: predictions, accuracy, the run itself
    rates: Mapping[str, Any] = field(default_factory=dict)  # of the whole verdict, and their source
    labels: LabelAgreement = LabelAgreement()
    warnings: tuple[str, ...] = ()  # about network and images; they change no answer

    @property
    def follow(self) -> Answer:
        """The answer for all maps: yes if a method follows, no if none does and all are decided."""
        answers = [method.follows for method in self.methods]
        if "yes" in answers:
            return "yes"
        return "no" if answers and set(answers) == {"no"} else "undecided"

    @property
    def alarms_here(self) -> list[Mapping[str, Any]]:
        """Alarms at this checkpoint."""
        return [alarm for alarm in self.alarms if alarm["checkpoint"] == self.checkpoint]

    @property
    def level(self) -> str:
        """The colour of a page: clear, care, stop, or thin if nothing is decided."""
        if "no" in (self.follow, self.network.answer):
            return "stop"
        if self.follow == "undecided":
            return "thin"
        faults = self.alarms_here or self.labels.faults or self.network.answer != "yes"
        return "care" if faults else "clear"

    @property
    def headline(self) -> str:
        answer = HEADLINES.get((self.follow, self.network.answer), UNDECIDED)
        if self.follow == "yes" and self.network.answer == "undecided":
            words = (
                "; judge what it uses"
                if self.network.to_judge
                else "; whether it uses the object is undecided"
            )
            answer += words if self.network.is_tested else "; what it uses was not tested"
        if self.follow != "yes" or not self.labels.faults:
            return answer
        faults = " and ".join(self.labels.faults)
        return f"{answer}; but {faults}: check the network and the labels"

    @property
    def sentence(self) -> str:
        """The methods by answer, with what would decide them if it is the same for all, then the network."""
        sentences = []
        for answer, (singular, plural) in PHRASES.items():
            methods = [m for m in self.methods if m.follows == answer]
            if methods:
                notes = {m.note for m in methods} if answer == "undecided" else {""}
                why = f" ({notes.pop()})" if len(notes) == 1 and notes != {""} else ""
                names = listed([m.method for m in methods], most=5)
                sentences.append(f"{names} {plural if methods[1:] else singular}{why}")
        sentences += [self.network.note] * bool(self.network.note)
        if self.labels.faults and self.follow != "yes":
            faults = " and ".join(self.labels.faults)
            sentences.append(faults[0].upper() + faults[1:])
        return ". ".join(sentences) + "."

    @property
    def measured(self) -> str:
        """Measured error rates of such a verdict; "" if no test that votes was calibrated."""
        known = self.rates.get("rates") or {}
        if not known or not any(test.votes for method in self.methods for test in method.tests):
            return self.network.measured
        names = ("false_alarm", "miss", "undecided")
        shares = [rate_text(known[name]) for name in names]
        kinds = ", ".join(f"{rate_text(r)} of {k}" for k, r in known.get("false_alarm_by_kind", {}).items())
        text = (
            f"Error rates, measured on {known['networks']} networks with planted evidence that were not used "
            f"to choose thresholds: {shares[0]} of the methods that follow were judged not to follow"
            f"{kinds and f' ({kinds})'}; {shares[1]} of the maps known not to follow were judged to follow; "
            f"{shares[2]} of the methods stayed undecided."
        )
        if such := self.rates.get("such_runs"):
            how = f"{counted(such['methods'], 'method')}, {such['looks']}"
            rates = listed([rate_text(such[name]) for name in names])
            text += f" With {how}, {such['images']} images of each of {such['networks']} networks: {rates}."
        return " ".join(filter(None, [text, self.network.measured]))

    def follows(self, method: str) -> Claim:
        """Whether the maps of a method follow the network; undecided is no, with what would decide it.

        Args:
            method: its name; without options, all its variants must follow.
        """
        names = [answer.method for answer in self.methods]
        meant = matching(method, names, Facts().method)
        if not meant:
            raise UnknownNameError("method in this verdict:", method, names)
        answers = [answer for answer in self.methods if answer.method in meant]
        return Claim(all(answer.follows == "yes" for answer in answers), "; ".join(map(str, answers)))

    def looks_there(self, name: str | None = None) -> Claim:
        """Whether the network uses the annotated object; undecided is no.

        Args:
            name: of a class; by default the network as a whole.
        """
        network = self.network
        if name is None:
            why = f" ({network.note})" if network.note else ""
            return Claim(network.answer == "yes", f"the network {USES[network.answer]}{why}")
        classes = {key_of(n): answer for answer in network.classes for n in answer.members.values()}
        classes |= {key_of(answer.name): answer for answer in network.classes}
        if not classes:
            return Claim(False, f"{name}: undecided, because no class was judged ({network.note})")
        if key_of(name) not in classes:
            known = [n for answer in network.classes for n in answer.members.values() or (answer.name,)]
            raise UnknownNameError("class with an answer in this verdict:", name, known)
        answer = classes[key_of(name)]
        return Claim(answer.answer == "yes", str(answer))

    @property
    def no_shortcut(self) -> Claim:
        """Whether the interventions found no shortcut: none surely off the object, none that recurs."""
        network = self.network
        unexplained = network.to_judge if network.answer == "undecided" else []
        holds = network.is_tested and network.answer != "no" and not unexplained
        return Claim(holds, network.note)

    def as_json(self) -> dict[str, Any]:
        """The content of verdict.json; NaN becomes null."""
        own = self.network
        network = {
            "answer": own.answer, "read_from": own.read_from, "has_regions": own.has_regions,
            "is_tested": own.is_tested, "inputs": own.inputs, "note": own.note, "rates": own.rates,
            "classes": {c.name: {"label": c.label, "answer": c.answer, "tests": [asdict(t) for t in c.tests]}
                        for c in own.classes},
            "evidence": [item.summary for item in own.evidence],
        }  # fmt: skip
        methods = [
            {"method": m.method, "follows": m.follows, "blank": m.blank, "note": m.note,
             "tests": [asdict(t) for t in m.tests]}
            for m in self.methods
        ]  # fmt: skip
        return dict(without_nan({
            "schema": SCHEMA, "headline": self.headline, "sentence": self.sentence, "checkpoint":
            self.checkpoint, "methods": methods, "network": network, "labels":
            asdict(self.labels), "alarms": list(self.alarms), "notes": list(self.notes), "warnings":
            list(self.warnings), "rates": dict(self.rates),
        }))  # fmt: skip

    def json(self) -> str:
        """The text of verdict.json."""
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False, allow_nan=False)

    def __repr__(self) -> str:
        return f"Verdict({self.checkpoint!r}: {self.headline})"

    def __str__(self) -> str:
        lines = [f"{self.headline}.", self.sentence]
        lines += [f"  {m.method}: {WORDS[m.follows]}{f' ({m.note})' if m.note else ''}" for m in self.methods]
        lines += [f"  {answer}" for answer in self.network.classes]
        return "\n".join([*lines, *(f"  note: {note}" for note in (*self.notes, *self.warnings))])

    def _repr_html_(self) -> str:
        rows = [[m.method, WORDS[m.follows], m.why] for m in self.methods]
        rows += [[c.name, USES[c.answer], str(c.test)] for c in self.network.classes]
        table = plain_table(["of", "answer", "why"], rows) if rows else ""
        alarms = "".join(f"<p>{text('Alarm: ' + alarm['sentence'])}</p>" for alarm in self.alarms_here)
        return f"<h3>{text(self.headline)}</h3><p>{text(self.sentence)}</p>{alarms}{table}"


def matching(
    given: str, stored: Sequence[str], registered: Callable[[str], MetricFacts | MethodFacts | None]
) -> list[str]:
    """Stored names that match a given name: the same one, or any variant if no option is given.

    registered: returns the facts of a name, Facts.metric or Facts.method.
    """
    exact = [name for name in stored if key_of(name) == key_of(given)]
    if exact or "(" in given:
        return exact

    def key(name: str) -> str:
        facts = registered(name)
        return key_of(facts.name if facts else name)

    return [name for name in stored if " ~ " not in name and key(name.partition("(")[0]) == key(given)]


def rate_text(rate: Mapping[str, Any]) -> str:
    """A measured share with its interval."""
    return f"{rate['share']:.1%} ({rate['low']:.1%} to {rate['high']:.1%}, n = {rate['n']})"


def listed(names: Sequence[str], last: str = "and", most: int | None = None) -> str:
    """Names in a sentence; three and a count if there are more than `most`.

    >>> listed(["a", "b"]), listed(["a", "b", "c"], "or"), listed(list("abcdef"), most=5)
    ('a and b', 'a, b or c', 'a, b, c and 3 more')
    """
    if most is not None and len(names) > most:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities by None, which JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return value
