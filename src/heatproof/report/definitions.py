"""How each number and method is defined: from the registry, the words of its own file, and references.bib."""

from __future__ import annotations

import inspect
import math
import re
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from importlib.resources import files

from heatproof.errors import HeatproofError
from heatproof.registry import Entry, explainers, parse_call
from heatproof.report.measures import Measure

ACCENTS = {
    '"': "\u0308",
    "'": "\u0301",
    "`": "\u0300",
    "^": "\u0302",
    "~": "\u0303",
    "c": "\u0327",
    "v": "\u030c",
}


@dataclass(frozen=True)
class Reference:
    """One entry of the bibliography, as a line of text."""

    key: str
    text: str
    address: str  # where it can be read, or ""


@lru_cache
def references() -> dict[str, Reference]:
    """Every entry of references.bib by its key."""
    text = files("heatproof").joinpath("references.bib").read_text(encoding="utf-8")
    return {key: _reference(key, body) for key, body in re.findall(r"@\w+\{([^,\s]+),(.*?)\n\}", text, re.S)}


def _reference(key: str, body: str) -> Reference:
    fields = {
        name.lower(): plain_latex(value)
        for name, value in re.findall(r"(\w+)\s*=\s*\{(.*?)\}\s*,?\s*(?=\n|$)", body, re.S)
    }
    people = fields.get("author", "").split(" and ")
    names = [person.split(",")[0].strip() for person in people]
    who = (
        names[0]
        if len(names) == 1
        else f"{names[0]} and {names[1]}"
        if len(names) == 2
        else f"{names[0]} et al."
    )
    venue = (
        fields.get("journal") or fields.get("booktitle") or fields.get("school") or fields.get("howpublished")
    )
    venue = venue or (f"arXiv:{fields['eprint']}" if "eprint" in fields else "")
    parts = [f"{who} ({fields.get('year', 'no year')})", fields.get("title", ""), venue]
    address = fields.get("url", "") or (f"https://doi.org/{fields['doi']}" if "doi" in fields else "")
    if not address and "eprint" in fields:
        address = f"https://arxiv.org/abs/{fields['eprint']}"
    return Reference(key, ". ".join(part for part in parts if part) + ".", address)


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


def anchor(kind: str, name: str) -> str:
    """An id for a definition, whatever letters its name has."""
    return f"def-{kind}-" + "".join(c if c.isascii() and c.isalnum() else f"-{ord(c):x}-" for c in name)


def metric_definitions(measures: Sequence[Measure]) -> str:
    """One fold per file that defines metrics, with its own words, and a line for each of its numbers."""
    by_file: dict[str, list[Measure]] = {}
    for of in measures:
        module = of.entry.function.__module__ if of.entry else ""
        by_file.setdefault(module, []).append(of)
    return "".join(_fold(module, lot) for module, lot in by_file.items())


def _fold(module: str, lot: Sequence[Measure]) -> str:
    words = (inspect.getdoc(sys.modules[module]) or "") if module in sys.modules else ""
    title = f"{lot[0].facts.family}: {', '.join(dict.fromkeys(of.base for of in lot))}"
    lines = "".join(_line(of) for of in lot)
    cited = list(dict.fromkeys(of.entry.cite for of in lot if of.entry and of.entry.cite))
    own = f'<pre class="words" tabindex="0">{escape(words)}</pre>' if words else ""
    papers = "".join(map(_cited, cited))
    return f"<details><summary>{escape(title)}</summary><dl>{lines}</dl>{own}{papers}</details>"


def _line(of: Measure) -> str:
    low, high = of.facts.bounds
    between = ""
    if not (math.isinf(low) and math.isinf(high)):
        between = f" Between {_bound(low)} and {_bound(high)}."
    options = f" Options: {of.options}." if of.options else ""
    text = f"{_dot(of.facts.summary)} {of.direction.capitalize()}.{between}{options}"
    name = f"<code>{escape(of.name)}</code> {escape(of.plain)} {of.arrow}"
    return f'<dt id="{anchor("metric", of.name)}">{name}</dt><dd>{escape(text)}</dd>'


def method_definitions(methods: Sequence[str]) -> str:
    """One fold per method: its idea, its conventions, its paper."""
    return "".join(_method(method) for method in methods)


def _method(method: str) -> str:
    try:
        entry = explainers.get(parse_call(method)[0])
    except HeatproofError:
        about = "<p>Nobody registered this method: its rows are shown as they are.</p>"
    else:
        card = "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
            for name, value in vars(entry.card).items()
        )
        about = f"<p>{escape(_dot(entry.summary))}</p><dl>{card}</dl>{_cited(entry.cite)}{_defaults(entry)}"
    title = f"<summary><bdi>{escape(method)}</bdi></summary>"
    return f'<details id="{anchor("method", method)}">{title}{about}</details>'


def _defaults(entry: Entry) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in entry.options.items())
    return f"<p>Options and their defaults: <code>{escape(options)}</code></p>" if options else ""


def _cited(key: str) -> str:
    found = references().get(key)
    if found is None:
        return ""
    text = escape(found.text)
    if found.address.startswith("https://"):
        text = f'<a href="{escape(found.address)}" rel="noreferrer">{text}</a>'
    return f'<p class="cite">{text}</p>'


def _bound(number: float) -> str:
    return {math.inf: "∞", -math.inf: "−∞"}.get(number, f"{number:g}".replace("-", "−"))


def _dot(sentence: str) -> str:
    return sentence if not sentence or sentence.endswith((".", "?", "!")) else f"{sentence}."
