"""Makes board.png of docs/runs.md: the board of a demo's three runs, on QR codes that heatproof draws.

    heatproof demo --out DEMO
    python docs/board_page.py DEMO

It needs playwright and chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from dashboard_page import CHROMIUM, DOCS
from PIL import Image

from heatproof.report.model_card import write_board, write_result
from heatproof.store import RunFolder
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import judge

PICTURE = DOCS / "board.png"


def main(demo: Path) -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        files = []
        for name in ("healthy", "harmful", "audit"):
            data = read_run(RunFolder.open(demo / name))
            files.append(write_result(data, judge(data), Path(folder, f"{name}.json")))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 520}, color_scheme="light")
        page.goto(write_board(files, Path(folder, "board.html")).as_uri())
        page.locator("thead button", has_text="Accuracy").click()
        page.screenshot(path=str(PICTURE))
        browser.close()
    Image.open(PICTURE).quantize(256).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
