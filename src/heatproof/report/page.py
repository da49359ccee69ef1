"""One HTML file that says whether the maps of a run can be trusted; it opens from disk and loads nothing.

    verdict -> scores -> pictures -> training, classes, curves, speed, agreement -> provenance, definitions

The text and the charts are written here; the script only draws heatmaps and opens folds. A content policy in
the page allows this one script by its hash, styles, and pictures inside the page: nothing else runs or loads,
whatever a file or class is called.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from heatproof.disk import write_whole
from heatproof.errors import InputError, StoreError
from heatproof.report.data import RunData
from heatproof.report.definitions import method_definitions, metric_definitions
from heatproof.report.gallery import MOST, gallery
from heatproof.report.markup import Section, fold, name, table
from heatproof.report.score_table import scores
from heatproof.report.sections import SECTIONS
from heatproof.report.verdict import FAILURE, GOOD, WARNING, Fact, Verdict, judge
from heatproof.report.verdict import __doc__ as RULES

SIGNS = {"stop": "✕", "care": "!", "clear": "✓", "thin": "?"}
FACT_SIGNS = {FAILURE: "✕", WARNING: "!", GOOD: "✓"}
LISTED = 20


def write_page(
    data: RunData, path: str | Path, *, most: int = MOST, jet: bool = False, more: Sequence[Section] = ()
) -> Verdict:
    """Write the page of a run; the verdict it begins with. more: sections to stand right behind it."""
    path = Path(path)
    if most < 0:
        raise InputError(f"the gallery cannot hold {most} pictures; name 0 or more")
    if not path.parent.is_dir():
        raise StoreError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    verdict = judge(data)
    text = render(data, verdict, gallery(data, most, jet) if most else None, more)
    content = text.encode("utf-8", errors="replace")
    write_whole({path: lambda temporary: temporary.write_bytes(content)})
    return verdict


def render(
    data: RunData, verdict: Verdict, pictures: Mapping[str, Any] | None, more: Sequence[Section] = ()
) -> str:
    """The page as text."""
    script = asset("page.js")
    parts = {
        **pieces(data, verdict, _pictures(data, pictures), more),
        "policy": policy(script),
        "style": asset("page.css"),
        "script": script,
        "data": embed(pictures or {}),
    }
    return Template(asset("page.html")).substitute(parts)


def pieces(
    data: RunData, verdict: Verdict, pictures: Section, more: Sequence[Section] = ()
) -> dict[str, str]:
    """What the page says, as HTML: head, verdict, contents, the sections before and after the pictures."""
    first, rest = scores(data), [section(data) for section in SECTIONS] + [_made(data), _definitions(data)]
    shown = [section for section in (*more, first, pictures, *rest) if section.body]
    left_out = [section for section in (first, pictures, *rest) if not section.body]
    return {
        "title": escape(f"{verdict.title}: {data.model}"),
        "head": _head(data),
        "verdict": _verdict(verdict, {section.id: section.title for section in shown}),
        "contents": "".join(f'<li><a href="#{s.id}">{escape(s.title)}</a></li>' for s in shown),
        "scores": "".join(_section(section) for section in (*more, first) if section.body),
        "pictures": _section(pictures) if pictures.body else "",
        "sections": "".join(_section(section) for section in rest if section.body),
        "left_out": _left_out(left_out),
    }


def asset(file: str) -> str:
    """A file of the page: page.html, page.css or page.js."""
    return files("heatproof.report").joinpath("assets", file).read_text(encoding="utf-8")


def policy(script: str) -> str:
    """What the page may do: run this script, show its own styles and pictures. No network."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def embed(content: Any) -> str:
    """JSON that cannot end the <script> it stands in.

    >>> embed({"a": "</script>"})
    '{"a":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _head(data: RunData) -> str:
    n = len(data.images.ids)
    right = [r for r in data.images.right if r is not None]
    known = f", {sum(right) / len(right):.1%} classified rightly" if right else ""
    broken = f" {len(data.broken)} more could not be read." if data.broken else ""
    several = ""
    if len(data.models) > 1:
        others = ", ".join(name(m) for m in data.models if m != data.model)
        several = f" The run also holds {others}: choose with <code>--model</code>."
    counts = [(len(data.real), "method"), (len(data.floors), "floor")]
    methods = ", ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in counts)
    return (
        f'<p class="about">Model {name(data.model)} at {name(data.checkpoint)}, {n:,} images{known}, '
        f"{methods}. {data.explains}{broken}{several}</p>"
    )


def _verdict(verdict: Verdict, present: Mapping[str, str]) -> str:
    facts = "".join(_fact(fact, present.get(fact.section)) for fact in verdict.facts)
    rest = [fact for fact in verdict.every if fact not in verdict.facts]
    more = "".join(f"<li><strong>{escape(fact.kind)}</strong>: {_told(fact.sentence)}</li>" for fact in rest)
    rules = f'<pre class="words" tabindex="0">{escape(RULES or "")}</pre>'
    return (
        f'<section class="verdict {verdict.level}" aria-labelledby="verdict"><h1 id="verdict">'
        f'<span class="sign" aria-hidden="true">{SIGNS[verdict.level]}</span> {escape(verdict.title)}</h1>'
        f'<p class="lead">{_told(verdict.sentence)}</p><ol class="facts">{facts}</ol>'
        + (fold(f"All other findings ({len(rest)})", f"<ul>{more}</ul>") if rest else "")
        + fold("How the verdict is reached", rules)
        + "</section>"
    )


def _fact(fact: Fact, title: str | None) -> str:
    """A fact with the way to the section that shows it, where there is one."""
    sign = f'<span class="sign" aria-hidden="true">{FACT_SIGNS[fact.kind]}</span>'
    link = f' <a href="#{fact.section}">See {escape(title)}</a>' if title else ""
    text = f'<span class="kind">{escape(fact.kind)}</span> {_told(fact.sentence)}{link}'
    return f'<li class="{escape(fact.kind)}">{sign}<div>{text}</div></li>'


def _told(sentence: str) -> str:
    """A sentence with names from outside in it: what they contain must not turn it around."""
    return f'<span dir="auto">{escape(sentence)}</span>'


def _pictures(data: RunData, pictures: Mapping[str, Any] | None) -> Section:
    title = "Pictures"
    if not pictures or not pictures["images"]:
        why = "no picture was asked for" if pictures is None else "the run has no image"
        return Section("pictures", title, missing=why)
    by = f"by {escape(data.headline.short)}, mean over methods" if data.headline else "as they come"
    body = (
        f"<p>Best and worst {by}; most disputed where the methods’ maps agree least. "
        f"{len(pictures['images'])} of {len(data.images.ids):,} images. Colour shows a map from its least "
        "(dark) to its largest value (bright); the class it explains stands below it.</p>"
        '<div id="gallery"></div>'
        "<noscript><p>Heatmaps are drawn by a script, which is switched off here.</p></noscript>"
    )
    return Section("pictures", title, body)


def _maker(made: dict[str, Any]) -> str:
    """Versions and device behind some parts of a run; a run may be resumed under others."""
    known = ", ".join(f"{k} {v}" for k, v in made.items() if k != "parts") or "a version that kept no record"
    return f"{known}: {made['parts']} part{'s' * (made['parts'] != 1)}"


def _made(data: RunData) -> Section:
    manifest = data.manifest
    machine = {key: str(value) for key, value in manifest.machine.items() if key != "host"}
    git = manifest.git or {}
    commit = (
        f"{git.get('commit', '')}{' with changes' if git.get('dirty') else ''}"
        if git
        else "not in a repository"
    )
    rows = [
        ["Command", f"<code>{name(shlex.join(map(str, manifest.command)))}</code>"],
        ["Started", escape(manifest.started)],
        ["Status", escape(data.folder.status().sentence)],
        ["Seed", escape(str(manifest.seed))],
        [
            "Images",
            f"{len(data.images.ids):,} here; hash <code>{escape(manifest.data or 'none')}</code>",
        ],
        ["Versions", escape(", ".join(f"{k} {v}" for k, v in manifest.versions.items()))],
        ["Parts made by", "<br>".join(escape(_maker(made)) for made in data.folder.makers())],
        ["Code", f"<code>{escape(commit)}</code>"],
        ["Machine", escape(", ".join(f"{k}: {v}" for k, v in machine.items()))],
    ]
    weights = [[name(k), f"<code>{escape(v)}</code>"] for k, v in manifest.models.items()]
    config = json.dumps(manifest.config, indent=2, ensure_ascii=False, default=str)
    body = '<dl class="made">' + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in rows) + "</dl>"
    body += fold("Settings of the run", f'<pre tabindex="0">{escape(config)}</pre>')
    if weights:
        body += fold("Weights", table(["Checkpoint", "Hash"], weights, "Hashes of the weights"))
    if data.broken:
        listed = [[name(image), escape(reason)] for image, reason in data.broken[:LISTED]]
        title = f"Pictures that could not be used ({len(data.broken)})"
        body += fold(title, table(["Picture", "Why"], listed, title))
    return Section("made", "How this was made", body)


def _definitions(data: RunData) -> Section:
    numbers, methods = metric_definitions(data.measures), method_definitions(data.methods)
    intro = (
        "<p>Means are over images whose number is defined, intervals are 95 % percentile bootstrap intervals "
        "of the mean (1,000 resamples of the images, seeded).</p>"
    )
    body = f"{intro}<h3>Numbers</h3>{numbers}<h3>Methods</h3>{methods}"
    return Section("definitions", "Definitions", body)


def _section(section: Section) -> str:
    title = f'<h2 id="{section.id}-title">{escape(section.title)}</h2>'
    return f'<section id="{section.id}" aria-labelledby="{section.id}-title">{title}{section.body}</section>'


def _left_out(sections: Sequence[Section]) -> str:
    if not sections:
        return ""
    listed = "".join(f"<li>{escape(s.title)}: {escape(s.missing)}</li>" for s in sections)
    content = f"<h2>Not in this report</h2><ul>{listed}</ul>"
    return f'<section class="left-out" aria-label="Left out">{content}</section>'
