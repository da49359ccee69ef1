"""The results of a run as a Hugging Face model card: Markdown with `model-index` results in its head."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from heatproof.disk import write_whole
from heatproof.errors import StoreError
from heatproof.metrics.stats import mean_interval
from heatproof.report.pieces import TEMPLATES, output_path
from heatproof.verdict.answers import LOOKS, WORDS, Test, Verdict
from heatproof.verdict.data import RunData

MARK = "<!-- heatproof -->"  # a card that heatproof wrote, and may write again
FORBIDDEN = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")  # in YAML, as themselves

LIMITS = (
    "A map that follows the network shows what the network uses, not that its answer is right.",
    "The answers hold for these pictures, this network and these weights; no groups of people were compared.",
    "Whether maps help people to decide better was not measured.",
)


class CardNumber(NamedTuple):
    """A mean over n pictures with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def write_model_card(data: RunData, verdict: Verdict, path: str | Path) -> Path:
    """Write the card; raises StoreError instead of overwriting a card that heatproof did not write."""
    path = output_path(path)
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise StoreError(f"{path} is a card that heatproof did not write; name another file and copy from it")
    write_whole({path: card_markdown(data, verdict)})
    return path


def card_markdown(data: RunData, verdict: Verdict) -> str:
    """The section, below a head that the Hub reads."""
    index = {"name": data.model, "results": [_result(data, verdict)]}
    content = {
        "mark": MARK,
        "head": "\n".join(yaml_lines({"tags": ["heatproof", "explainability"], "model-index": [index]})),
        "data": data,
        "data_set": data_set(data),
        "verdict": verdict,
        "words": WORDS,
        "looks": LOOKS,
        "limits": LIMITS,
        "voting": voting,
        "votes": [test.title for test in voting(verdict.methods[0].tests)] if verdict.methods else [],
    }
    return TEMPLATES.get_template("report/templates/model_card.md").render(content)


def estimate(test: Test) -> CardNumber:
    return CardNumber(test.value, test.low, test.high, test.n)


def voting(tests: Sequence[Test]) -> list[Test]:
    """Those that an answer rests on."""
    return [test for test in tests if test.votes and math.isfinite(test.value)]


def accuracy(data: RunData) -> CardNumber | None:
    """The share of pictures that are classified rightly; None where no class is known, or several may be."""
    if data.manifest.is_multilabel:  # those that have a finding alone say nothing about false alarms
        return None
    right = [float(one) for one in data.images.right if one is not None]
    return CardNumber(sum(right) / len(right), *mean_interval(right), len(right)) if right else None


def data_set(data: RunData) -> str:
    """What the pictures are called, without the folders they lie in."""
    setting = data.manifest.config.get("images", {})
    path = str(setting.get("path") or "")
    return path if setting.get("kind") == "hf" else Path(path).name or str(setting.get("kind", "images"))


def _result(data: RunData, verdict: Verdict) -> dict[str, Any]:
    """One entry of `model-index`: accuracy, then what every method's answer rests on, then the network's."""
    metrics: list[dict[str, Any]] = []
    if found := accuracy(data):
        metrics.append(_metric("accuracy", "share classified rightly", found))
    for one in verdict.methods:
        name, own = f"maps of {one.method} follow the network", {"method": one.method}
        metrics.append({"type": "follows", "name": name, "value": one.follows, "args": own})
        for test in voting(one.tests):
            metrics.append(_metric(test.name, f"{test.title} ({one.method})", estimate(test), own))
    network = verdict.network
    if network.test is not None:
        name = "the network looks where it should"
        metrics.append({"type": "looks-there", "name": name, "value": network.looks_there})
        metrics.append(_metric(network.test.name, network.test.title, estimate(network.test)))
    kind = str(data.manifest.config.get("images", {}).get("kind", "images"))
    dataset = {"type": kind, "name": data_set(data), "revision": data.manifest.data or "unknown"}
    return {"task": {"type": "image-classification"}, "dataset": dataset, "metrics": metrics}


def _metric(kind: str, name: str, found: CardNumber, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    bounds = {"low": found.low, "high": found.high} if found.bounded else {}
    return {
        "type": kind,
        "name": name,
        "value": found.value,
        "args": {**(args or {}), "n": found.n, **bounds},
    }


def yaml_lines(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Mappings, lists of them or of texts, texts and numbers as YAML.

    >>> print("\\n".join(yaml_lines({"a": [{"b": 1.5, "c": "x: y"}], "d": ["no"]})))
    a:
    - b: 1.5
      c: "x: y"
    d:
    - "no"
    """
    for key, own in value.items():
        if isinstance(own, Mapping):
            yield f"{indent}{key}:"
            yield from yaml_lines(own, f"{indent}  ")
        elif isinstance(own, list):
            yield f"{indent}{key}:"
            for each in own:
                lines = yaml_lines(each, f"{indent}  ") if isinstance(each, Mapping) else [_scalar(each)]
                first, *rest = lines
                yield f"{indent}- {first.strip()}"
                yield from rest
        else:
            yield f"{indent}{key}: {_scalar(own)}"


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        return str(round(value, 6)) if 1e-4 <= abs(value) < 1e15 or value == 0 else _plain_float(value)
    return FORBIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _plain_float(value: float) -> str:
    """Without an exponent, which YAML would read as a text."""
    return f"{value:.6f}" if math.isfinite(value) else ".nan"


def md_text(text: str) -> str:
    """Text from outside as Markdown shows it.

    >>> print(md_text("a|b <c>"))
    a\\|b \\<c\\>
    """
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


TEMPLATES.filters["md"] = md_text
