"""Results of a run for others: a Hugging Face model card, a result file, and a board of result files.

The card is Markdown with `model-index` results in its head. A result file is JSON with the fields of
`Result`; it holds no image, no name of an image and no path.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heatproof.disk import output_path, write_whole
from heatproof.errors import InputError, StoreError
from heatproof.metrics.results import mean_interval
from heatproof.report.pieces import TEMPLATES, Grid, asset, html_page, named, number
from heatproof.store.ledger import check_types
from heatproof.verdict.answers import USES, WORDS, Test, Verdict, without_nan
from heatproof.verdict.data import RunData

MARK = "<!-- heatproof -->"  # of a card that heatproof wrote, and may overwrite
FORBIDDEN = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")  # unescaped in YAML
LIMITS = (
    "A map that follows the network shows what the network uses, not that its prediction is right.",
    "The answers hold for these images, this network and these weights; no groups of people were compared.",
    "Whether maps help people to make better decisions was not measured.",
)


SCHEMA = "heatproof-result-1"


@dataclass(frozen=True)
class Result:
    """The content of a result file."""

    schema: str
    network: str
    checkpoint: str
    weights: str  # hash
    data: str  # name of the dataset,
    data_hash: str  # of names and contents of the images,
    images: int  # that could be used,
    classes: list[str]
    accuracy: float | None  # None without labels
    headline: str
    follow: str  # do the maps follow the network? yes, no or undecided
    uses_object: str  # does the network use the object?
    note: str  # why
    methods: dict[str, dict[str, Any]]  # "follows", and "tests" that decided it: value, low, high, n
    rates: dict[str, Any]  # measured error rates of both answers
    versions: dict[str, str]
    started: str  # of the run


def write_result(data: RunData, verdict: Verdict, path: str | Path) -> Path:
    """Write the result file of a run at one checkpoint."""
    path, manifest, rates = output_path(path), data.manifest, verdict.rates
    right = [float(right) for right in data.images.right if right is not None]
    methods = {
        m.method: {"follows": m.follows, "tests": {
            t.name: {"value": t.value, "low": t.low, "high": t.high, "n": t.n} for t in voting(m.tests)
        }}
        for m in verdict.methods
    }  # fmt: skip
    result = Result(
        SCHEMA, data.model, data.checkpoint, manifest.models.get(data.checkpoint, ""), data_set(data)[0],
        manifest.data, len(data.images.ids), list(manifest.classes),
        sum(right) / len(right) if right and not manifest.is_multilabel else None,
        verdict.headline, verdict.follow, verdict.network.answer, verdict.network.note, methods,
        {"follow": rates.get("such_runs") or rates.get("rates", {}), "uses_object": verdict.network.rates},
        dict(manifest.versions), manifest.started,
    )  # fmt: skip
    write_whole({path: json.dumps(without_nan(asdict(result)), indent=1, ensure_ascii=False) + "\n"})
    return path


def read_result(path: Path) -> Result:
    """Read a result file; raises InputError for any other content."""
    try:
        result: Result = check_types(json.loads(path.read_text(encoding="utf-8")), Result)
    except (OSError, ValueError, RecursionError) as error:
        remedy = "write one with heatproof export RUN --result FILE"
        raise InputError(f"{path} is no result file ({error}); {remedy}") from error
    if result.schema != SCHEMA:
        raise InputError(f"{path} has the schema {result.schema!r}, not {SCHEMA}; export the run again")
    return result


def write_board(files: Iterable[Path], path: str | Path) -> Path:
    """Write one sortable HTML page of result files."""
    path, script = output_path(path), asset("board.js")
    heads = [
        "Network", "Checkpoint", "Dataset", "Images", "Accuracy", "Maps that follow the network", "Answer",
        "Weights", "Data", "heatproof", "Date",
    ]  # fmt: skip
    rows = []
    for r in map(read_result, files):
        answers = {method: answer.get("follows") for method, answer in r.methods.items()}
        follow = [method for method, answer in answers.items() if answer == "yes"]
        undecided = sum(answer == "undecided" for answer in answers.values())
        counted = f"{len(follow)} of {len(answers)}" + f", {undecided} undecided" * bool(undecided)
        counted += f": {', '.join(follow)}" * bool(follow)
        accuracy = number(math.nan if r.accuracy is None else r.accuracy)
        rows.append([
            named(r.network), named(r.checkpoint), named(r.data), str(r.images), accuracy, named(counted),
            named(USES.get(r.uses_object, r.uses_object)), named(r.weights[:8]), named(r.data_hash[:8]),
            named(r.versions.get("heatproof", "")), named(r.started[:10]),
        ])  # fmt: skip
    content = {"table": Grid(heads, rows, "Results"), "count": len(rows)}
    write_whole({path: html_page("board", content, script).encode("utf-8", errors="replace")})
    return path


def data_set(data: RunData) -> tuple[str, str]:
    """Name of the dataset without its folders, and its kind."""
    images = data.manifest.config.get("images", {})
    kind, path = str(images.get("kind", "images")), str(images.get("path") or "")
    return path if kind == "hf" else Path(path).name or kind, kind


def write_model_card(data: RunData, verdict: Verdict, path: str | Path) -> Path:
    """Write the card; raises StoreError instead of overwriting a card that heatproof did not write."""
    path = output_path(path)
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise StoreError(f"{path} is a card that heatproof did not write; name another file and copy from it")
    write_whole({path: card_markdown(data, verdict)})
    return path


def card_markdown(data: RunData, verdict: Verdict) -> str:
    """The text of the card: `model-index` results in YAML, then the section in Markdown."""
    name, kind = data_set(data)
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
