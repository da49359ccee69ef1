"""One HTML file that says whether the maps of a run can be trusted; it opens from disk and loads nothing.

    verdict, pictures that show it, next steps -> album -> gallery -> scores -> training, classes, curves,
    agreement -> provenance, definitions

The text and the charts are written here; the script only draws heatmaps, opens folds and keeps in the address
what is shown. A content policy in
the page allows this one script by its hash, styles, and pictures inside the page: nothing else runs or loads,
whatever a file or class is called.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from heatproof.disk import write_whole
from heatproof.errors import InputError, StoreError
from heatproof.registry import split_calls
from heatproof.report.definitions import definitions
from heatproof.report.gallery import MOST, FrontPictures, front_pictures, gallery
from heatproof.report.pieces import Grid, Section, fill, named, output_path
from heatproof.report.sections import (
    Step,
    agreement,
    album_section,
    classes,
    curves,
    made,
    next_steps,
    scores,
    trajectories,
)
from heatproof.store import RunFolder
from heatproof.store.ledger import known_record, write_record
from heatproof.verdict import follow, look
from heatproof.verdict.alarms import Alarm
from heatproof.verdict.answers import LOOKS, WORDS, Verdict
from heatproof.verdict.data import RunData
from heatproof.verdict.judge import judge
from heatproof.verdict.kept_album import read_album

LEFT_OUT = "left_out.json"
AFTER_THE_PICTURES = (scores, trajectories, classes, curves, agreement, made, definitions)


@dataclass(frozen=True)
class ReportPage:
    """What a page says about a run: the verdict, then sections, of which some only say why they are empty."""

    data: RunData
    verdict: Verdict
    first: Sequence[Section]
    pictures: Section
    rest: Sequence[Section]
    front: FrontPictures | None = None
    paper: bool = False  # on which nothing can be unfolded

    @property
    def title(self) -> str:
        return f"{self.verdict.headline}: {self.data.model}"

    @property
    def shown(self) -> list[Section]:
        return [s for s in (*self.first, self.pictures, *self.rest) if s.content is not None]

    @property
    def left_out(self) -> list[Section]:
        return [s for s in (*self.first, self.pictures, *self.rest) if s.content is None]

    @property
    def right(self) -> list[bool]:
        """Whether the network is right about each image whose class is known."""
        return [right for right in self.data.images.right if right is not None]

    words, looks = WORDS, LOOKS

    @property
    def followed(self) -> str:
        """The short answer to the first question."""
        answers = [one.follows for one in self.verdict.methods]
        if self.verdict.follow == "undecided":
            return f"Not decided yet, for {len(answers)} method{'s' * (len(answers) != 1)}"
        said = "Yes" if self.verdict.follow == "yes" else "No"
        return f"{said}: {answers.count('yes')} of {len(answers)} methods do"

    @property
    def looked(self) -> str:
        """The short answer to the second."""
        network = self.verdict.network
        if network.test is None:
            return "Not asked"
        said = {"yes": "Yes", "no": "No, it looks elsewhere", "undecided": "Not decided yet"}
        return f"{said[network.looks_there]}, n = {network.test.n}"

    @property
    def steps(self) -> list[Step]:
        return next_steps(self.verdict)

    @property
    def alarms(self) -> list[Alarm]:
        """Each at its last checkpoint, those of the checkpoint shown first."""
        last = {(alarm.mechanism, alarm.method, alarm.label): alarm for alarm in self.data.alarms}
        return sorted(last.values(), key=lambda alarm: alarm.checkpoint != self.data.checkpoint)

    @property
    def tests(self) -> Grid:
        """Every test of every method; those that do not vote are information."""
        rows = [
            [named(one.method), test.title, test.numbers, "votes" if test.votes else "information"]
            for one in self.verdict.methods
            for test in one.tests
        ]
        return Grid(["Method", "Test", "Mean over pictures", ""], rows, "Every test of every method")

    @property
    def rules(self) -> str:
        return "\n\n".join(filter(None, (follow.__doc__, look.__doc__)))

    def fragments(self) -> dict[str, str]:
        """The parts of the page as HTML, for a page that has the pictures already."""
        parts = {part: fill(part, {"this": self}) for part in ("head", "verdict", "contents", "left_out")}
        first, rest = (
            Markup().join(s for s in lot if s.content is not None) for lot in (self.first, self.rest)
        )
        return {"title": escape(self.title), **parts, "first": first, "sections": rest}


def read_report(
    data: RunData,
    verdict: Verdict,
    pictures: Section,
    more: Sequence[Section] = (),
    front: FrontPictures | None = None,
) -> ReportPage:
    """All sections of a run. more: sections to stand before its own."""
    rest = [section(data) for section in AFTER_THE_PICTURES]
    rest.insert(-1, limits(data, verdict))
    album = album_section(read_album(data.folder))
    return ReportPage(data, verdict, (*more, album), pictures, rest, front)


def limits(data: RunData, verdict: Verdict) -> Section:
    """What a reader must not take from the page."""
    content = {"images": len(data.images.ids), "measured": verdict.measured, "left_out": left_out(data)}
    return Section("limits", "What this does not tell", content)


def note_left_out(folder: RunFolder, reasons: Mapping[str, str]) -> None:
    """What an audit did not compute, each with its reason; kept for the page."""
    write_record(folder.path / LEFT_OUT, {"reasons": dict(reasons)})


def left_out(data: RunData) -> dict[str, list[str]]:
    """By reason, what an audit left out and nobody added since."""
    known = {*data.manifest.config.get("methods", ()), *data.manifest.config.get("metrics", ())}
    found: dict[str, list[str]] = {}
    with suppress(StoreError):  # of a record that is damaged, `verify` tells
        record = known_record(data.folder.path / LEFT_OUT) or {}
        for what, why in record.get("reasons", {}).items():
            if not known.issuperset(split_calls(what)):
                found.setdefault(why, []).append(what)
    return found


def write_page(
    data: RunData, path: str | Path, *, most: int = MOST, jet: bool = False, more: Sequence[Section] = ()
) -> Verdict:
    """Write the page of a run; the verdict it begins with. more: sections to stand right behind it."""
    path = output_path(path)
    if most < 0:
        raise InputError(f"the gallery cannot hold {most} pictures; name 0 or more")
    verdict = judge(data)
    front = front_pictures(data, verdict, linked=most > 0) if most else None
    besides = [one.record["id"] for one in front.pictures] if front else []
    text = render(data, verdict, gallery(data, most, jet, besides) if most else None, more, front)
    write_whole({path: text.encode("utf-8", errors="replace")})
    return verdict


def render(
    data: RunData,
    verdict: Verdict,
    pictures: Mapping[str, Any] | None,
    more: Sequence[Section] = (),
    front: FrontPictures | None = None,
) -> str:
    """The page as text. pictures: of the gallery. front: those at the top."""
    title, script = "Pictures", asset("page.js")
    if pictures and pictures["images"]:
        counts = {"shown": len(pictures["images"]), "total": len(data.images.ids)}
        planes = pictures["images"][0]["planes"]
        section = Section("pictures", title, {"headline": data.headline, "planes": planes, **counts})
    else:
        why = "no picture was asked for" if pictures is None else "the run has no image"
        section = Section("pictures", title, missing=why)
    content = {
        "this": read_report(data, verdict, section, more, front),
        "policy": policy(script),
        "style": Markup(asset("page.css")),
        "script": Markup(script),
        "data": Markup(embed(pictures or {})),
    }
    return str(fill("report", content))


def asset(file: str) -> str:
    """A style sheet or a script of the page."""
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
