"""Makes what docs/dashboard.md shows: the live page over a run of the demo, which draws its own QR codes.

    heatproof demo --out DEMO
    python docs/dashboard_page.py DEMO          writes dashboard.png and the others of that name

It needs playwright and chromium.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from PIL import Image

from heatproof.report.serve import Server

DOCS = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"
WIDTH, HEIGHT = 1440, 1000
WHOLE, ONE = DOCS / "dashboard.png", DOCS / "dashboard-compare.png"
PHONE, DARK = DOCS / "dashboard-phone.png", DOCS / "dashboard-dark.png"
CHOSEN = {"True class": "1", "Sort by": "inside", "Order": "up"}  # codes whose maps miss them


def photograph(run: Path) -> None:
    """The pictures of a run beside those of its first checkpoint, one in the dialog, a phone, the dark."""
    from playwright.sync_api import sync_playwright

    with Server(run) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(server.address)
        page.wait_for_selector("#scores")
        for label, value in CHOSEN.items():
            page.get_by_role("combobox", name=label).select_option(value)
        times = page.locator("optgroup[label='Another checkpoint'] option").first.get_attribute("value")
        page.get_by_role("combobox", name="Compare with").select_option(times)
        page.evaluate("() => document.getElementById('pictures').scrollIntoView({ behavior: 'instant' })")
        page.wait_for_selector(".frame.two canvas.right")
        page.wait_for_timeout(1500)  # pictures come one by one
        page.screenshot(path=str(WHOLE))
        page.locator(".card button").first.click()
        page.wait_for_selector("dialog canvas.right")
        page.wait_for_timeout(500)
        page.locator("dialog").screenshot(path=str(ONE))
        for path, width, scheme in ((PHONE, 390, "light"), (DARK, WIDTH, "dark")):
            other = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
            other.goto(server.address)
            other.wait_for_selector("#scores")
            other.evaluate(
                "() => document.getElementById('pictures').scrollIntoView({ behavior: 'instant' })"
            )
            other.wait_for_timeout(1500)
            other.screenshot(path=str(path))
        browser.close()
        server.shutdown()
    for path in (WHOLE, ONE, PHONE, DARK):  # 256 colours are enough here, and small
        with Image.open(path) as picture:
            small = picture.convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
        small.save(path, optimize=True)


if __name__ == "__main__":
    photograph(Path(sys.argv[1]) / "healthy")
