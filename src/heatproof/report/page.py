"""The report of a run as one HTML file, which opens from disk and loads nothing.

    verdict, images, next steps -> what the network uses -> gallery -> scores -> training, classes, curves,
    agreement -> provenance, limits, definitions

The text and the charts are written here; the script only draws heatmaps, opens folds and keeps in the address
what is shown. A content policy in the page allows this one script by its hash, styles, and images inside the
page: nothing else runs or loads, whatever a file or class is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from heatproof.disk import output_path, write_whole
from heatproof.errors import InputError, counted
from heatproof.report import sections
from heatproof.report.gallery import MOST, FrontImages, front_images, gallery
from heatproof.report.pieces import Grid, Section, asset, fill, html_page, named
from heatproof.verdict import follow, uses
from heatproof.verdict.alarms import Alarm
from heatproof.verdict.answers import QUESTIONS, USES, WORDS, Verdict, listed
from heatproof.verdict.data import RunData
from heatproof.verdict.judge import SEE_NOTES, judge

NO_METHOD = "Do not show these maps as reasons for predictions: no method follows this network."


@dataclass(frozen=True)
class Step:
    """An action for the user, with its command if there is one."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class ReportPage:
    """The content of a page: the verdict, then sections, or the reasons why sections are empty."""

    data: RunData
    verdict: Verdict
    first: Sequence[Section]
    pictures: Section
    rest: Sequence[Section]
    front: FrontImages | None = None
    paper: bool = False  # without folds

    words, uses, questions = WORDS, USES, QUESTIONS

    @property
    def title(self) -> str:
        return f"{self.verdict.headline}: {self.data.model}"

    @property
    def sections(self) -> list[Section]:
        return [*self.first, self.pictures, *self.rest]

    @property
    def included(self) -> list[Section]:
        return [section for section in self.sections if section.content is not None]

    @property
    def steps(self) -> list[Step]:
        return list(next_steps(self.verdict))

    @property
    def alarms(self) -> list[Alarm]:
        """Each at its last checkpoint, those of the checkpoint shown first."""
        last = {(alarm.mechanism, alarm.method, alarm.label): alarm for alarm in self.data.alarms}
        return sorted(last.values(), key=lambda alarm: alarm.checkpoint != self.data.checkpoint)

    @property
    def tests(self) -> Grid:
        """Every test of every method; those that do not vote are information."""
        rows = [
            [named(method.method), test.title, test.numbers, "votes" if test.votes else "information"]
            for method in self.verdict.methods
            for test in method.tests
        ]
        return Grid(["Method", "Test", "Mean over images", ""], rows, "Every test of every method")

    @property
    def rules(self) -> str:
        return "\n\n".join(filter(None, (follow.__doc__, uses.__doc__)))

    def fragments(self) -> dict[str, str]:
        """The parts of the page as HTML, for a page that has the images already."""
        parts = {part: fill(part, {"this": self}) for part in ("head", "verdict", "contents", "left_out")}
        first, rest = (
            Markup().join(s for s in some if s.content is not None and s.id != "evidence")
            for some in (self.first, self.rest)
        )
        return {"title": escape(self.title), **parts, "first": first, "sections": rest}


def read_report(
    data: RunData,
    verdict: Verdict,
    pictures: Section,
    more: Sequence[Section] = (),
    front: FrontImages | None = None,
) -> ReportPage:
    """All sections of a run. more: sections before its own."""
    rest = [
        sections.scores(data), sections.trajectories(data), sections.classes(data), sections.curves(data),
        sections.agreement(data), sections.made(data), sections.limits(data, verdict),
        sections.definitions(data),
    ]  # fmt: skip
    return ReportPage(data, verdict, (sections.evidence(data, verdict.network), *more), pictures, rest, front)


def write_page(
    data: RunData, path: str | Path, *, most: int = MOST, jet: bool = False, more: Sequence[Section] = ()
) -> Verdict:
    """Write the page of a run and return its verdict.

    Args:
        data: one model of a run at one checkpoint.
        path: of the HTML file.
        most: images in the gallery.
        jet: whether the page also offers the jet colour map.
        more: sections right after the verdict.
    """
    path = output_path(path)
    if most < 0:
        raise InputError(f"the gallery cannot hold {most} images; name 0 or more")
    verdict = judge(data)
    front = front_images(data, verdict, linked=True) if most else None
    besides = [image.record["id"] for image in front.images] if front else []
    text = render(data, verdict, gallery(data, most, jet, besides) if most else None, more, front)
    write_whole({path: text.encode("utf-8", errors="replace")})
    return verdict


def render(
    data: RunData,
    verdict: Verdict,
    pictures: Mapping[str, Any] | None,
    more: Sequence[Section] = (),
    front: FrontImages | None = None,
) -> str:
    """The page as HTML. pictures: data of the gallery. front: images at the top."""
    title, script = "Images", asset("page.js")
    if pictures and pictures["images"]:
        counts = {"shown": len(pictures["images"]), "total": len(data.images.ids)}
        planes = pictures["images"][0]["planes"]
        section = Section("pictures", title, {"headline": data.headline, "planes": planes, **counts})
    else:
        why = "no image was requested" if pictures is None else "the run has no image"
        section = Section("pictures", title, missing=why)
    content = {"this": read_report(data, verdict, section, more, front), "data": pictures or {}}
    return html_page("report", content, script)


def advice(verdict: Verdict) -> str:
    """Which maps to show, in one or two sentences."""
    follows, no, undecided = ([m.method for m in verdict.methods if m.follows == answer] for answer in WORDS)
    if not follows:
        return NO_METHOD
    verb = "they follow" if follows[1:] else "it follows"
    text = f"Show maps of {listed(follows, 'or')}: {verb} this network."
    left = [*no, *undecided]
    return f"{text} Do not show maps of {listed(left, 'or')}." if left else text


def next_steps(verdict: Verdict) -> Iterator[Step]:
    """Actions for the user, in this order: obstacles to a verdict, the maps, the network, the training."""
    for note in verdict.notes:
        yield Step(f"Fix this first, because it prevents a verdict: {note}.")
    if verdict.follow != "undecided":
        yield Step(advice(verdict))
    undecided: dict[str, list[str]] = {}
    for answer in verdict.methods:
        if answer.follows == "undecided":
            undecided.setdefault(answer.note, []).append(answer.method)
    for note, methods in undecided.items():
        why = "fix the points above" if note in ("", SEE_NOTES) else note
        yield Step(f"To decide about {listed(methods)}: {why}.")
    network = verdict.network
    if network.answer == "no":
        names = listed([answer.name for answer in network.classes if answer.answer == "no"])
        yield Step(
            f"Do not deploy the network before an expert has judged what it uses for {names}: see What the "
            "network uses. Remove this evidence from the training images, train again, and repeat "
            "the audit."
        )
    elif network.answer == "undecided" and network.note and verdict.follow != "no":
        yield Step(f"{network.note}.")
    here = {alarm["name"]: alarm for alarm in verdict.alarms if alarm["checkpoint"] == verdict.checkpoint}
    for name, alarm in here.items():
        yield Step(f"Check the training ({name} at {verdict.checkpoint}): {alarm['sentence']}")
    before = {alarm["checkpoint"] for alarm in verdict.alarms} - {verdict.checkpoint}
    if before and not here:
        yield Step(
            f"Keep this checkpoint: {counted(len(before), 'other checkpoint')} raised alarms, this one none."
        )
    if verdict.follow == "yes" and not verdict.notes:
        methods = [answer.method for answer in verdict.methods if answer.follows == "yes"]
        rule = "follows" if len(methods) == len(verdict.methods) else f'"follows {methods[0]}"'
        more = " --rule no-shortcut" * bool(network.is_tested)
        yield Step(
            "Repeat the audit when the network or the images change. In CI, this command fails if the maps "
            "no longer follow the network, or if it uses a shortcut:",
            f"heatproof gate RUN --rule {rule}{more}",
        )
    yield Step("To share the report, write it as a PDF of at most six pages:", "heatproof report RUN --pdf")
