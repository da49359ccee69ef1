"""The results of a run as a Hugging Face model card: Markdown with `model-index` results in its head."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from heatproof.disk import output_path, write_whole
from heatproof.errors import StoreError
from heatproof.metrics.results import mean_interval
from heatproof.report.pieces import TEMPLATES
from heatproof.verdict.answers import USES, WORDS, Test, Verdict
from heatproof.verdict.data import RunData

MARK = "<!-- heatproof -->"  # of a card that heatproof wrote, and may overwrite
FORBIDDEN = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")  # unescaped in YAML
LIMITS = (
    "A map that follows the network shows what the network uses, not that its prediction is right.",
    "The answers hold for these images, this network and these weights; no groups of people were compared.",
    "Whether maps help people to make better decisions was not measured.",
)


def write_model_card(data: RunData, verdict: Verdict, path: str | Path) -> Path:
    """Write the card; raises StoreError instead of overwriting a card that heatproof did not write."""
    path = output_path(path)
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise StoreError(f"{path} is a card that heatproof did not write; name another file and copy from it")
    write_whole({path: card_markdown(data, verdict)})
    return path


def card_markdown(data: RunData, verdict: Verdict) -> str:
    """The text of the card: `model-index` results in YAML, then the section in Markdown."""
    images = data.manifest.config.get("images", {})
    kind, path = str(images.get("kind", "images")), str(images.get("path") or "")
    name = path if kind == "hf" else Path(path).name or kind  # without its folders
    content = {
        "mark": MARK,
        "metrics": _metrics(data, verdict),
        "data": data,
        "data_set": name,
        "kind": kind,
        "verdict": verdict,
        "words": WORDS,
        "uses": USES,
        "limits": LIMITS,
        "voting": voting,
        "votes": [test.title for test in voting(verdict.methods[0].tests)] if verdict.methods else [],
    }
    return TEMPLATES.get_template("report/templates/model_card.md").render(content)


def voting(tests: Sequence[Test]) -> list[Test]:
    """The tests that decide an answer."""
    return [test for test in tests if test.votes and math.isfinite(test.value)]


def _metrics(data: RunData, verdict: Verdict) -> Iterator[dict[str, Any]]:
    """Metrics of `model-index`: accuracy, the answer and tests of every method, then those of the network."""
    right = [float(right) for right in data.images.right if right is not None]
    if right and not data.manifest.is_multilabel:
        numbers = (sum(right) / len(right), *mean_interval(right), len(right))
        yield _metric(Test("accuracy", "share classified correctly", "undecided", *numbers))
    for answer in verdict.methods:
        name, own = f"maps of {answer.method} follow the network", {"method": answer.method}
        yield {"type": "follows", "name": name, "value": answer.follows, "args": own}
        for test in voting(answer.tests):
            yield _metric(test, f" ({answer.method})", own)
    network = verdict.network
    if network.is_tested:
        yield {"type": "looks-there", "name": "the network uses the object", "value": network.answer}
        for of in network.classes:
            yield from (_metric(test, f" ({of.name})") for test in voting(of.tests))


def _metric(test: Test, of: str = "", args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A mean over n images with its 95 % interval."""
    args = {**(args or {}), "n": test.n}
    if math.isfinite(test.low) and math.isfinite(test.high):
        args |= {"low": test.low, "high": test.high}
    return {"type": test.name, "name": test.title + of, "value": test.value, "args": args}


def yaml_scalar(value: Any) -> str:
    """A text or number in YAML; numbers without an exponent, which YAML would read as a text."""
    if isinstance(value, float):
        plain = 1e-4 <= abs(value) < 1e15 or value == 0
        return str(round(value, 6)) if plain else f"{value:.6f}" if math.isfinite(value) else ".nan"
    return FORBIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def md_text(text: str) -> str:
    r"""Escape a text for Markdown.

    >>> print(md_text("a|b <c>"))
    a\|b \<c\>
    """
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


TEMPLATES.filters.update(md=md_text, yaml=yaml_scalar)
