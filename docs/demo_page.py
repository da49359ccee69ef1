"""Makes what docs/demo.md shows: what the demo prints, its methods, the seeds, and pictures of its report.

    heatproof demo --seed 0 --out SEED0            the same for other seeds
    python docs/demo_page.py SEED0 SEED1 ...       rewrites the marked parts of demo.md, and the pictures
    python docs/demo_page.py SEED0                 all but the table of seeds
    python docs/demo_page.py picture SEED0         only report-picture.png

The pictures are of the first folder's report, in a browser and on paper. They need playwright, chromium and
poppler's pdftoppm.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from heatproof.cli._console import console
from heatproof.cli.demo import show
from heatproof.demo import FULL, Audit, run
from heatproof.demo.networks import CODE
from heatproof.metrics.evidence_record import HALF
from heatproof.report.tables import Column, Table
from heatproof.run.config import read_toml
from heatproof.verdict.answers import WORDS
from heatproof.verdict.trajectory import Trajectory

DOCS = Path(__file__).parent
PAGE, TOP, TWIN = DOCS / "demo.md", DOCS / "report.png", DOCS / "report-twin.png"
GALLERY, SCORES = DOCS / "report-gallery.png", DOCS / "report-scores.png"
PICTURE = DOCS / "report-picture.png"
PHONE, DARK, PAPER = DOCS / "report-phone.png", DOCS / "report-dark.png", DOCS / "report-paper.png"
CHROMIUM = "/usr/bin/chromium"
WIDTH, HEIGHT = 1280, 1510
SHOWN_PAGES = (0, 2, 3, 4)  # of the PDF


def seed_table(audits: dict[int, Audit]) -> str:
    """What differs between seeds, a row per training."""
    rows = []
    for seed, audit in audits.items():
        for kind, data in audit.twins.items():
            last = Trajectory.from_run(data.folder).checkpoints[-1]
            state = last.classes[CODE]
            first = f"{len(data.alarms)}, from {data.alarms[0].checkpoint}" if data.alarms else "none"
            names = ", ".join(sorted({alarm.name for alarm in data.alarms})) or "–"
            sure = f"{state.gold} of {state.total}"
            alike = last.methods["gradcam"].overall.value
            rows.append((str(seed), kind, last.auc, f"{last.accuracy:.1%}", sure, first, names, alike))
    columns = (
        "seed", "training", "AUC", "accuracy", "codes it is sure of", "alarms", "which", "C-Score of gradcam",
    )  # fmt: skip
    title = "Both trainings at their last checkpoint"
    return Table("seeds", title, tuple(map(Column, columns)), tuple(rows), marked=False).markdown()


def story_table(audits: dict[int, Audit]) -> str:
    """What the verdict says of the healthy network, and what shows of the cheating one, a row per seed."""
    rows = []
    for seed, audit in audits.items():
        answers = [answer.follows for answer in audit.verdict.methods]
        twin, by = audit.twin, audit.twin.methods
        uses = [
            sum(i.donors for i in record.items if (i.kind, i.label) == ("patch", CODE) and i.on_object < HALF)
            for record in twin.records.values()
        ]
        flips = [f"{round(f.share * f.n)} of {f.n}" for f in twin.point.planting]
        counts = [f"{len(by[kind])} of {len(answers)}" for kind in ("show", "tell", "neither")]
        follows = f"{answers.count('yes')} of {len(answers)}"
        rows.append((str(seed), audit.verdict.headline, follows, *flips, *counts, *map(str, uses)))
    columns = (
        "seed", "verdict on the healthy network", "methods that follow", "tag turns A", "tag turns B",
        "methods that show the tag", "that tell in numbers only", "that do neither",
        "codes of A with a patch off the code that turns others", "codes of B",
    )  # fmt: skip
    title = "The verdict and the cheating twin"
    return Table("stories", title, tuple(map(Column, columns)), tuple(rows), marked=False).markdown()


def method_table(audit: Audit) -> str:
    """What the verdict, without the truth, and the contrast test, with it, say of each method."""
    rows = []
    for answer in audit.verdict.methods:
        votes = [f"{test.value:+.2f}" for test in answer.tests if test.votes]
        score = audit.twin.contrast.scores[answer.method]
        low, high = score.interval
        auc = f"{score.auc:.2f} ({low:.2f} to {high:.2f})"
        rows.append((answer.method, WORDS[answer.follows], *votes, auc, f"{score.seen:.0%}"))
    columns = (
        "method", "verdict", "above untrained", "above the rotated map", "AUC of A against B", "tag is seen",
    )  # fmt: skip
    title = "The verdict on the healthy network, and which methods tell the cheating twin from it"
    return Table("methods", title, tuple(map(Column, columns)), tuple(rows), marked=False).markdown()


def printed(audit: Audit) -> str:
    """What the command says at its end, with the folder's path left out."""
    with console.capture() as captured:
        show(audit, 0.0)
    text = captured.get().strip().rpartition("\n\n")[0]
    return f"```text\n{text}\n```"


def put(page: str, mark: str, content: str) -> str:
    """The part between <!-- mark --> and <!-- end --> is replaced."""
    pattern = rf"(<!-- {mark} -->\n).*?(<!-- end -->)"
    assert re.search(pattern, page, re.DOTALL), f"the page has no part {mark!r}"
    fresh = f"\n{content.strip()}\n\n"
    return re.sub(pattern, lambda match: f"{match[1]}{fresh}{match[2]}", page, flags=re.DOTALL)


def photograph(report: Path, width: int = WIDTH, height: int = HEIGHT) -> None:
    """The top of a report, its cheating twin, gallery and scores; on a phone and in the dark."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        views = {TOP: (width, height, "light"), PHONE: (390, 844, "light"), DARK: (width, height, "dark")}
        for top, (wide, high, scheme) in views.items():
            page = browser.new_page(viewport={"width": wide, "height": high}, color_scheme=scheme)
            page.goto(report.resolve().as_uri())
            page.wait_for_selector("#gallery .card canvas")
            save(page.screenshot(), top)
            if top == TOP:
                for section, path in (("twin", TWIN), ("pictures", GALLERY), ("scores", SCORES)):
                    page.evaluate(
                        f"document.getElementById('{section}').scrollIntoView({{behavior: 'instant'}})"
                    )
                    page.wait_for_timeout(500)
                    save(page.screenshot(), path)
        browser.close()


def photograph_picture(report: Path, width: int = WIDTH) -> None:
    """The first wrong answer of a report, opened: its maps, down to the table of scores."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": HEIGHT})
        page.goto(f"{report.resolve().as_uri()}#show=all&answer=wrong")
        page.locator("#gallery .frame").first.click()
        page.wait_for_timeout(800)
        long = page.locator("dialog").evaluate("dialog => dialog.scrollHeight")
        page.set_viewport_size({"width": width, "height": int(long / 0.9) + 80})  # it leaves a margin
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(800)
        dialog, scores = (page.locator(what).first.bounding_box() for what in ("dialog", "dialog .wide"))
        assert dialog and scores
        save(page.screenshot(clip={**dialog, "height": scores["y"] - dialog["y"]}), PICTURE)
        browser.close()


def photograph_paper(audit: Audit) -> None:
    """Some pages of the PDF, side by side."""
    from heatproof.report.print_pdf import write_pdf

    with tempfile.TemporaryDirectory() as folder:
        write_pdf(audit.audit, audit.verdict, Path(folder, "paper.pdf"))
        subprocess.run(["pdftoppm", "-r", "45", "-png", "paper.pdf", "page"], cwd=folder, check=True)
        pages = [Image.open(path) for path in sorted(Path(folder).glob("page-*.png"))]
        selected = [pages[k] for k in SHOWN_PAGES]
        sheet = Image.new(
            "RGB",
            (sum(page_image.width + 12 for page_image in selected) + 12, selected[0].height + 24),
            "#bbb",
        )
        for k, page_image in enumerate(selected):
            sheet.paste(page_image, (12 + k * (page_image.width + 12), 12))
        small(sheet, PAPER)


def save(content: bytes, path: Path) -> None:
    small(Image.open(io.BytesIO(content)), path)


def small(picture: Image.Image, path: Path) -> None:
    """In the 256 colours that suit it, which take a third of the bytes."""
    whole = picture.convert("RGB")
    whole.quantize(palette=whole.quantize(256), dither=Image.Dither.FLOYDSTEINBERG).save(path, optimize=True)


def main(folders: list[str]) -> None:
    if folders[0] == "picture":
        return photograph_picture(Path(folders[1], "report.html"))
    seeds = {read_toml(Path(folder, "demo.toml"))["seed"]: Path(folder) for folder in folders}
    audits = {seed: run(folder, FULL, seed) for seed, folder in seeds.items()}
    first, text = next(iter(audits.values())), PAGE.read_text(encoding="utf-8")
    parts = {"printed": printed(first), "methods": method_table(first)}
    if len(audits) > 1:
        parts |= {"seeds": seed_table(audits), "stories": story_table(audits)}
    for mark, content in parts.items():
        text = put(text, mark, content)
    PAGE.write_text(text, encoding="utf-8")
    photograph(first.report)
    photograph_picture(first.report)
    photograph_paper(first)


if __name__ == "__main__":
    main(sys.argv[1:])
