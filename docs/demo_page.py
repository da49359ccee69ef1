"""Makes what docs/demo.md shows: what the demo prints, its methods, the seeds, and pictures of its report.

    heatproof demo --seed 0 --out SEED0            the same for seeds 1 and 2
    python docs/demo_page.py SEED0 SEED1 SEED2     rewrites the marked parts of demo.md, and the pictures
    python docs/demo_page.py SEED0                 all but the table of seeds

The pictures are of the first folder's report. They need playwright and chromium.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from heatproof.cli._console import console
from heatproof.cli.demo import show
from heatproof.demo import FULL, run
from heatproof.demo.audit import Audit
from heatproof.demo.settings import CODE
from heatproof.report.tables import Column, Table
from heatproof.verdict.answers import WORDS
from heatproof.verdict.trajectory import Trajectory

DOCS = Path(__file__).parent
PAGE, TOP, TWIN = DOCS / "demo.md", DOCS / "report.png", DOCS / "report-twin.png"
GALLERY = DOCS / "report-gallery.png"
CHROMIUM = "/usr/bin/chromium"
WIDTH, HEIGHT = 1440, 1000


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
        answers = [one.follows for one in audit.verdict.methods]
        twin, by = audit.twin, audit.twin.methods
        first = twin.albums["A"].groups[0]
        flips = [f"{round(f.share * f.n)} of {f.n}" for f in twin.point.planting]
        told = [f"{len(by[kind])} of {len(answers)}" for kind in ("show", "tell", "neither")]
        album = f"{first.changed} of {first.n}"
        follows = f"{answers.count('yes')} of {len(answers)}"
        rows.append((str(seed), audit.verdict.headline, follows, *flips, *told, album))
    columns = (
        "seed", "verdict on the healthy network", "methods that follow", "tag turns A", "tag turns B",
        "methods that show the tag", "that tell in numbers only", "that do neither",
        "painting over the first group of A's album changes",
    )  # fmt: skip
    title = "The verdict and the cheating twin"
    return Table("stories", title, tuple(map(Column, columns)), tuple(rows), marked=False).markdown()


def method_table(audit: Audit) -> str:
    """What the verdict, without the truth, and the contrast test, with it, say of each method."""
    rows = []
    for one in audit.verdict.methods:
        votes = [f"{test.value:+.2f}" for test in one.tests if test.votes]
        score = audit.twin.found.scores[one.method]
        low, high = score.interval
        auc = f"{score.auc:.2f} ({low:.2f} to {high:.2f})"
        rows.append((one.method, WORDS[one.follows], *votes, auc, f"{score.seen:.0%}"))
    columns = (
        "method", "verdict", "above untrained", "above itself turned", "AUC of A against B", "tag is seen",
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
    return re.sub(pattern, lambda found: f"{found[1]}{fresh}{found[2]}", page, flags=re.DOTALL)


def photograph(report: Path, width: int = WIDTH, height: int = HEIGHT) -> None:
    """The top of a report, of its cheating twin and of its gallery, as a browser shows them."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        page.wait_for_selector("#gallery .card canvas")
        page.screenshot(path=str(TOP))
        for section, path in (("twin", TWIN), ("pictures", GALLERY)):
            page.evaluate(f"document.getElementById('{section}').scrollIntoView({{behavior: 'instant'}})")
            page.wait_for_timeout(300)
            page.screenshot(path=str(path))
        browser.close()


def main(folders: list[str]) -> None:
    audits = {seed: run(Path(folder), FULL, seed) for seed, folder in enumerate(folders)}
    text = PAGE.read_text(encoding="utf-8")
    parts = {"printed": printed(audits[0]), "methods": method_table(audits[0])}
    if len(audits) > 1:
        parts |= {"seeds": seed_table(audits), "stories": story_table(audits)}
    for mark, content in parts.items():
        text = put(text, mark, content)
    PAGE.write_text(text, encoding="utf-8")
    photograph(audits[0].report)


if __name__ == "__main__":
    main(sys.argv[1:])
