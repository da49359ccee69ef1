"""The live page in a real browser: ten thousand images without a pause, every control at work."""

from __future__ import annotations

import csv
import json
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from large_run import CLASSES, EARLY, FIRST, make_large
from PIL import Image

from heatproof.report.serve import Server
from heatproof.store import RunFolder
from heatproof.verdict.data import read_run

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}: apt-get install chromium"
)
IMAGES = 10_000


def open_browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


browser = pytest.fixture(scope="module")(open_browser)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_large(tmp_path_factory.mktemp("large") / "run", IMAGES)


def served(run: Path, **settings: Any) -> Iterator[Server]:
    with Server(run, **settings) as server:
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def server(large: RunFolder) -> Iterator[Server]:
    yield from served(large.path)


class Visit:
    """The live page with what it said and asked for."""

    def __init__(self, browser: Any, server: Server, width: int = 1440, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.messages.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(server.address)

    def ready(self) -> Visit:
        self.page.wait_for_selector("#scores")
        self.page.locator(".card").first.scroll_into_view_if_needed()
        self.page.wait_for_selector(".card canvas")
        return self

    def choose(self, label: str, value: str) -> None:
        """Choose, and wait for the answer."""
        with self.page.expect_response(lambda reply: "/images?" in reply.url):
            self.page.get_by_role("combobox", name=label).select_option(value)
        self.page.wait_for_timeout(60)

    def ids(self) -> list[str]:
        return self.page.locator(".card .id").all_text_contents()

    def status(self) -> str:
        return self.page.locator(".status").inner_text()

    def download(self, button: Any) -> Path:
        with self.page.expect_download() as caught:
            button.click()
        return Path(caught.value.path())


@pytest.fixture
def visit(browser: Any, server: Server) -> Iterator[Visit]:
    visit = Visit(browser, server).ready()
    yield visit
    assert visit.messages == [], "the page must have nothing to say on the console"
    outside = [url for url in visit.requests if not url.startswith((server.address, "data:", "blob:"))]
    assert outside == [], "the page must ask nobody else"
    visit.context.close()


# --- ten thousand images ------------------------------------------------------------------------------------

# Milliseconds from a control's change until the cards on the page are those of the answer and laid out.
TIMED = """([label, value]) => new Promise((done) => {
  const name = [...document.querySelectorAll('#browse label')].find((l) => l.textContent === label);
  const field = document.getElementById(name.htmlFor), status = document.querySelector('.status');
  const began = performance.now();
  new MutationObserver((_, watch) => {
    watch.disconnect();
    document.querySelector('.cards').getBoundingClientRect();
    done(performance.now() - began);
  }).observe(status, { childList: true, characterData: true, subtree: true });
  field.value = value;
  field.dispatchEvent(new Event('change'));
})"""


def test_ten_thousand_images_without_a_pause(browser: Any, server: Server) -> None:
    visit = Visit(browser, server)
    paint = "performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)"
    visit.page.wait_for_function(f"() => {paint}.length > 0")
    first = visit.page.evaluate(paint)[0]
    visit.ready()
    assert visit.status().startswith("10,000 of 10,000 images, 1 to 60 shown")
    pictures = {url for url in visit.requests if "/picture/" in url}
    assert visit.page.locator(".card").count() == 60 and 0 < len(pictures) < 60, (
        "only what is in view is fetched"
    )
    visit.page.locator(".pager").scroll_into_view_if_needed()
    visit.page.wait_for_function("() => document.querySelectorAll('.card canvas').length > 20")
    assert {url for url in visit.requests if "/picture/" in url} > pictures
    steps = [
        ("Answer", "wrong"), ("True class", "1"), ("Answer", ""), ("True class", ""), ("Order", "up"),
        ("Sort by", "deletion"), ("Answer", "right"),
    ]  # fmt: skip
    taken = []
    for step in steps:
        visit.page.wait_for_timeout(300)  # as somebody who looks at what is shown
        taken.append(visit.page.evaluate(TIMED, list(step)))
    print(f"first paint {first:.0f} ms; filters {[round(t) for t in taken]} ms")
    assert first < 2000
    assert statistics.median(taken) < 200, taken
    assert visit.messages == []
    visit.context.close()


# A red map left of a slider at a quarter, a blue one right of it, half opaque: the colours on both sides.
MIXED = """async () => {
      const make = (level, side) => {
        const c = document.createElement('canvas'), x = c.getContext('2d');
        c.width = c.height = 8;
        c.className = side;
        x.fillStyle = level;
        x.fillRect(0, 0, 8, 8);
        return c;
      };
      const box = document.createElement('div'); box.className = 'frame two';
      box.append(make('rgb(200,0,0)', 'left'), make('rgb(0,0,200)', 'right'));
      const bitmap = await createImageBitmap(await heatproof.toPNG(box, 0.5, 0.25));
      const c = document.createElement('canvas'); c.width = bitmap.width; c.height = bitmap.height;
      const x = c.getContext('2d', { willReadFrequently: true }); x.drawImage(bitmap, 0, 0);
      return [100, 200].map((at) => [...x.getImageData(at, 300, 1, 1).data]);
    }"""

# --- controls -----------------------------------------------------------------------------------------------


def test_filters_show_what_they_say(visit: Visit) -> None:
    page = visit.page
    visit.choose("Answer", "wrong")
    assert visit.status().startswith("1,000 of 10,000") and page.locator(".card .right").count() == 0
    assert page.locator(".card .wrong").count() == 60
    visit.choose("True class", "1")
    assert visit.status().startswith("No image matches these filters"), "wrong images have an even number"
    visit.choose("Answer", "right")
    assert visit.status().startswith("5,000 of 10,000")
    for text in page.locator(".card .answer").all_text_contents():
        assert f"true {CLASSES[1]}" in text or f"explains {CLASSES[1]} (true label and prediction)" in text
    assert "(all:" in page.locator(".means").inner_text()
    page.get_by_label("Name contains").fill("0123")
    page.wait_for_function("() => document.querySelectorAll('.card').length < 60")
    assert visit.ids() and all("0123" in name for name in visit.ids())


def test_sorting_is_over_all_images(visit: Visit, large: RunFolder) -> None:
    images = read_run(large).images
    visit.choose("Method", "layercam")
    for metric, order in (("insertion", "up"), ("deletion", "down"), ("confidence", "up")):
        column = images.confidence if metric == "confidence" else images.scores[metric, "layercam"]
        visit.choose("Sort by", metric)
        visit.choose("Order", order)
        expected = np.argsort(np.array(column) * (1 if order == "up" else -1), kind="stable")[:60]
        assert visit.ids() == [images.ids[i] for i in expected]


def test_pages_turn(visit: Visit) -> None:
    page = visit.page
    visit.choose("Sort by", "name")
    assert visit.ids()[0] == "shelf/00000.png" and page.get_by_role("button", name="Previous").is_disabled()
    for button, text, first in (
        ("Next", "Page 2 of 167", "shelf/00060.png"), ("Last", "Page 167 of 167", "shelf/09960.png"),
        ("Previous", "Page 166 of 167", "shelf/09900.png"), ("First", "Page 1 of 167", "shelf/00000.png"),
    ):  # fmt: skip
        page.get_by_role("button", name=button, exact=True).click()
        page.get_by_text(text).wait_for()
        assert visit.ids()[0] == first


def clipped(visit: Visit, where: str) -> list[str]:
    script = "(maps) => maps.map((map) => getComputedStyle(map).clipPath)"
    return visit.page.locator(f"{where} .frame.two").first.locator("canvas").evaluate_all(script)


def test_two_methods_beside_each_other_by_keyboard(visit: Visit) -> None:
    page = visit.page
    visit.choose(
        "Compare with", json.dumps({"method": "random", "checkpoint": "epoch02"}, separators=(",", ":"))
    )
    page.wait_for_selector(".cards .frame.two canvas.right")
    slider = page.get_by_label("Slider", exact=True)
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert clipped(visit, ".cards") == ["inset(0px 45% 0px 0px)", "inset(0px 0px 0px 55%)"]
    page.keyboard.press("Home")
    assert clipped(visit, ".cards")[1] == "inset(0px 0px 0px 0%)"
    drawings = (
        page.locator(".cards .frame.two")
        .first.locator("canvas")
        .evaluate_all("m => m.map(c => c.toDataURL())")
    )
    assert drawings[0] != drawings[1] and page.locator(".card .pair").count() == 60


def test_two_checkpoints_beside_each_other(visit: Visit, large: RunFolder) -> None:
    early = read_run(large, checkpoint=FIRST)
    visit.choose("Sort by", "name")
    visit.choose("Order", "up")
    visit.choose(
        "Compare with", json.dumps({"method": "gradcam", "checkpoint": FIRST}, separators=(",", ":"))
    )
    visit.page.wait_for_selector(".cards .frame.two canvas.right")
    value = early.images.scores[read_run(large).headline.name, "gradcam"][0]
    assert visit.page.locator(".card .pair").first.locator("span").nth(2).inner_text() == f"{value:.3f}"
    visit.choose("Checkpoint", FIRST)
    assert visit.status().startswith(f"{EARLY} of {EARLY}")
    visit.page.wait_for_function(f"() => document.querySelector('.about').textContent.includes('{FIRST}')")


def test_one_image_in_a_dialog(visit: Visit) -> None:
    page, name = visit.page, visit.ids()[0]
    button = page.get_by_role("button", name=f"Compare maps of {name}")
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("dialog[open]")
    dialog.locator("canvas.right").wait_for()
    assert dialog.locator("h3").inner_text() == name and dialog.locator("tbody tr").count() == 3
    assert dialog.get_by_label("Slider between left and right").evaluate("e => e === document.activeElement")
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    assert clipped(visit, "dialog") == ["inset(0px 60% 0px 0px)", "inset(0px 0px 0px 40%)"]
    box = dialog.locator(".frame").bounding_box()
    page.mouse.click(box["x"] + 0.75 * box["width"], box["y"] + 20)
    assert abs(int(dialog.locator("input[type=range]").input_value()) - 75) <= 1
    left, right, difference = dialog.locator("tbody tr").first.locator("td").all_text_contents()
    number = [float(text.replace("−", "-")) for text in (left, right, difference)]
    assert number[1] - number[0] == pytest.approx(number[2], abs=0.0011)
    before = dialog.locator("canvas.right").evaluate("c => c.toDataURL()")
    dialog.get_by_role("group", name="Right").get_by_label("Method").select_option("random")
    other = (
        "before => [...document.querySelectorAll('dialog canvas.right')].some(c => c.toDataURL() !== before)"
    )
    page.wait_for_function(other, arg=before)
    with Image.open(visit.download(dialog.get_by_role("button", name="Save PNG"))) as picture:
        assert picture.format == "PNG" and picture.size == (672, 672)
    dialog.get_by_role("button", name="Next image").click()
    assert dialog.locator("h3").inner_text() == visit.ids()[1]
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert button.evaluate("b => document.activeElement === b")


def test_what_is_shown_can_be_saved(visit: Visit) -> None:
    page = visit.page
    assert np.abs(np.array(page.evaluate(MIXED)) - [[200, 0, 0, 128], [0, 0, 200, 128]]).max() <= 1
    visit.choose("Answer", "wrong")
    visit.choose("Sort by", "insertion")
    table = visit.download(page.get_by_role("link", name="Save CSV")).read_text(encoding="utf-8-sig")
    rows = list(csv.DictReader(table.splitlines()))
    assert len(rows) == 1000 and [row["image"] for row in rows][:60] == visit.ids()
    assert {row["right"] for row in rows} == {"false"}
    chart = visit.download(page.get_by_role("button", name="Save the chart as SVG").first)
    text = chart.read_text()
    assert text.startswith("<svg") and 'xmlns="http://www.w3.org/2000/svg"' in text and "var(--" not in text
    page.goto("about:blank")
    page.set_content(text)
    strokes = page.locator("polyline").evaluate_all("lines => lines.map(l => getComputedStyle(l).stroke)")
    assert strokes and "none" not in strokes, "a chart keeps its colours without the page"


def test_colours_and_opacity(visit: Visit) -> None:
    page, canvas = visit.page, visit.page.locator(".card canvas").first
    before = canvas.evaluate("c => c.toDataURL()")
    page.get_by_role("combobox", name="Colours").select_option("viridis")
    assert canvas.evaluate("c => c.toDataURL()") != before
    page.get_by_label("Heatmap opacity").focus()
    page.keyboard.press("End")
    assert canvas.evaluate("c => getComputedStyle(c).opacity") == "1"
