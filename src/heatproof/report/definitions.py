"""Definitions of metrics and methods, from the facts of the run and references.bib."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from heatproof.report.pieces import Section
from heatproof.store.facts import MethodFacts
from heatproof.verdict.data import RunData
from heatproof.verdict.measures import Measure

ACCENTS = dict(zip("\"'`^~cv", "\u0308\u0301\u0300\u0302\u0303\u0327\u030c", strict=True))
VENUES = ("journal", "booktitle", "school", "howpublished")


@dataclass(frozen=True)
class Reference:
    """One entry of the bibliography, as a line of text."""

    key: str
    text: str
    address: str  # where it can be read, or ""
    bibtex: str


@lru_cache
def references() -> dict[str, Reference]:
    """Every entry of references.bib by its key."""
    text = files("heatproof").joinpath("references.bib").read_text(encoding="utf-8")
    found = re.findall(r"(@\w+\{([^,\s]+),(.*?)\n\})", text, re.S)
    return {key: _reference(key, body, entry) for entry, key, body in found}


def _reference(key: str, body: str, entry: str) -> Reference:
    fields = {
        name.lower(): plain_latex(value)
        for name, value in re.findall(r"(\w+)\s*=\s*\{(.*?)\}\s*,?\s*(?=\n|$)", body, re.S)
    }
    names = [person.split(",")[0].strip() for person in fields.get("author", "").split(" and ")]
    who = " and ".join(names) if len(names) <= 2 else f"{names[0]} et al."
    preprint = fields.get("eprint", "")
    venue = next((fields[kind] for kind in VENUES if fields.get(kind)), preprint and f"arXiv:{preprint}")
    parts = [f"{who} ({fields.get('year', 'no year')})", fields.get("title", ""), venue]
    address = fields.get("url", "") or (f"https://doi.org/{fields['doi']}" if "doi" in fields else "")
    address = address or (preprint and f"https://arxiv.org/abs/{preprint}")
    return Reference(key, ". ".join(part for part in parts if part) + ".", address, entry)


def plain_latex(text: str) -> str:
    r"""Letters instead of LaTeX's accents, without braces.

    >>> plain_latex(r'S{\"u}sstrunk, {SLIC}')
    'Süsstrunk, SLIC'
    """

    def accent(found: re.Match[str]) -> str:
        return unicodedata.normalize("NFC", found[2] + ACCENTS[found[1]])

    text = re.sub(r"""\{?\\(["'`^~]|[cv](?=\{))\s*\{?\\?([A-Za-z])\}?\}?""", accent, text)
    text = re.sub(r"[{}]", "", text)
    for latex, letter in (("--", "–"), ("\\&", "&"), ("``", "“"), ("''", "”")):
        text = text.replace(latex, letter)
    return " ".join(text.split())


def definitions(data: RunData) -> Section:
    """A fold for each file that defines metrics, with its own words, and one for each method."""
    by_file: dict[str, list[Measure]] = {}
    for of in data.measures:
        by_file.setdefault(of.facts.module, []).append(of)
    content = {
        "files": [_file(data.facts.definition(module), lot) for module, lot in by_file.items()],
        "methods": [_method(method, data.facts.method(method)) for method in data.methods],
    }
    return Section("definitions", "Definitions", content)


def _file(words: str, lot: list[Measure]) -> dict[str, Any]:
    cited = dict.fromkeys(of.facts.cite for of in lot if of.is_registered)
    return {
        "title": f"{lot[0].facts.family}: {', '.join(dict.fromkeys(of.base for of in lot))}",
        "numbers": [(of, _definition(of)) for of in lot],
        "words": words,
        "papers": [references().get(key) for key in cited],
    }


def _definition(of: Measure) -> str:
    low, high = (
        {math.inf: "∞", -math.inf: "−∞"}.get(bound, f"{bound:g}".replace("-", "−"))
        for bound in of.facts.limits
    )
    between = "" if (low, high) == ("−∞", "∞") else f" Between {low} and {high}."
    options = f" Options: {of.options}." if of.options else ""
    return f"{_dot(of.facts.summary)} {of.direction.capitalize()}.{between}{options}"


def _method(method: str, facts: MethodFacts | None) -> dict[str, Any]:
    """Its idea, its conventions, its paper."""
    if facts is None:
        return {"name": method, "known": False}
    return {
        "name": method,
        "known": True,
        "summary": _dot(facts.summary),
        "card": vars(facts.card),
        "paper": references().get(facts.cite),
        "options": facts.options,
    }


def _dot(sentence: str) -> str:
    return sentence if not sentence or sentence.endswith((".", "?", "!")) else f"{sentence}."
