"""The report in a real browser: it loads without a word, its controls work, and anyone can use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heatproof.report.page import write_page
from heatproof.types import normalise, upsample
from heatproof.verdict.data import read_run
from made_run import CLASSES, EVIL, make_run

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}: apt-get install chromium"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_page(
        read_run(make_run(folder / "run", cscores=(0.6, 0.01))), folder / "report.html", most=60, jet=True
    )
    return folder / "report.html"


class Visit:
    """A page with what it said and asked for."""

    def __init__(self, browser: Any, report: Path, width: int = 1440, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(8_000)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.messages.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(report.as_uri())
        self.page.wait_for_selector("#gallery .card canvas")

    def ids(self) -> list[str]:
        return self.page.locator("#gallery .card .id").all_text_contents()

    def drawing(self) -> str:
        return self.page.locator("#gallery .card canvas").first.evaluate("c => c.toDataURL()")

    def choose(self, label: str, value: str) -> None:
        self.page.get_by_role("combobox", name=label).select_option(value)
        self.page.wait_for_timeout(50)


@pytest.fixture
def visit(browser: Any, report: Path) -> Iterator[Visit]:
    visit = Visit(browser, report)
    yield visit
    assert visit.messages == [], "the page must have nothing to say on the console"
    visit.page.close()


def test_it_loads_alone_and_runs_nothing_foreign(visit: Visit, report: Path) -> None:
    page = visit.page
    page.get_by_role("radio", name="All").check()
    ids = visit.ids()
    assert set(EVIL) <= set(ids)
    assert [url for url in visit.requests if not url.startswith("data:")] == [report.as_uri()]
    assert page.evaluate("window.hacked") is None
    assert page.locator("#gallery img").count() > 0
    loaded = page.evaluate("[...document.querySelectorAll('#gallery img')].every(i => i.naturalWidth > 0)")
    assert loaded and page.locator("script").count() == 2
    classes = page.get_by_role("combobox", name="True class").locator("option").all_text_contents()
    assert classes == ["all", *sorted(CLASSES)]


def test_groups_filters_and_sorting(visit: Visit) -> None:
    page = visit.page
    best = visit.ids()
    page.get_by_role("radio", name="Worst").check()
    worst = visit.ids()
    page.get_by_role("radio", name="Most disputed").check()
    assert (
        best and worst and not set(best) & set(worst) and page.get_by_text("agreement of methods").count() > 0
    )
    page.get_by_role("radio", name="All").check()
    every = visit.ids()
    assert len(every) > len(best)
    visit.choose("Answer", "wrong")
    wrong = visit.ids()
    assert (
        wrong
        and page.locator(".card .wrong").count() == len(wrong)
        and page.locator(".card .right").count() == 0
    )
    visit.choose("Answer", "right")
    assert sorted(wrong + visit.ids()) == sorted(every)
    visit.choose("Answer", "all")
    visit.choose("True class", CLASSES[0])
    assert 0 < len(visit.ids()) < len(every)
    assert f"{len(visit.ids())} of {len(every)} images shown" in page.locator(".status").inner_text()
    visit.choose("True class", "")
    for metric, sign in (("insertion", -1), ("deletion", 1)):
        visit.choose("Sort by", metric)
        numbers = page.locator("#gallery .card .score:nth-of-type(4) span:last-child").all_text_contents()
        values = [sign * float(n.replace("−", "-")) for n in numbers]
        assert len(values) == len(every) and values == sorted(values)


def test_method_colour_and_opacity_change_the_picture(visit: Visit) -> None:
    page = visit.page
    before = visit.drawing()
    visit.choose("Method", "1")
    layercam = visit.drawing()
    assert layercam != before and "maps of layercam" in page.locator(".status").inner_text()
    visit.choose("Colours", "viridis")
    assert visit.drawing() != layercam
    visit.choose("Colours", "jet")
    slider = page.get_by_label("Heatmap opacity")
    slider.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert page.locator("output").inner_text() == "80 %"
    opacity = page.locator("#gallery canvas").nth(1).evaluate("c => getComputedStyle(c).opacity")
    assert float(opacity) == pytest.approx(0.8)


def test_the_canvas_shows_the_map_as_the_metrics_see_it(visit: Visit) -> None:
    levels = torch.randint(0, 256, (1, 4, 6), generator=torch.Generator().manual_seed(0))
    map_ = {"h": 4, "w": 6, "data": levels.flatten().tolist()}
    drawn = visit.page.evaluate(f"[...heatproof.enlarge({json.dumps(map_)}, 112)]")
    expected = normalise(upsample(levels.float(), (112, 112))).flatten().numpy()
    assert np.abs(np.array(drawn) - expected).max() < 1e-4
    colours = visit.page.evaluate("[...heatproof.ramp(['000000', 'ffffff'])]")
    assert colours == [level for level in range(256) for _ in range(3)]


def test_methods_can_be_compared_by_keyboard(visit: Visit) -> None:
    page = visit.page
    button = page.locator(".card button").first
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("dialog[open]")
    dialog.locator("canvas").nth(4).wait_for()
    assert dialog.locator("canvas").count() == 5 and dialog.locator("tbody tr").count() == 3
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert button.evaluate("b => document.activeElement === b")


def test_what_is_shown_stands_in_the_address(visit: Visit, browser: Any, report: Path) -> None:
    page = visit.page
    page.get_by_role("radio", name="Worst").check()
    visit.choose("Method", "1")
    visit.choose("Answer", "wrong")
    assert page.url.endswith("#show=worst&method=layercam&answer=wrong")
    ids = visit.ids()
    page.locator("#gallery .frame").first.click()
    dialog = page.locator("dialog[open]")
    assert dialog.locator("h3").inner_text() == ids[0] and "picture=" in page.url
    again = Visit(browser, report)
    again.page.goto(page.url)
    again.page.wait_for_selector("dialog[open]")
    assert again.ids() == ids and again.page.locator("dialog h3").inner_text() == ids[0]
    again.page.close()
    page.go_back()
    page.wait_for_selector("dialog", state="detached")
    assert visit.ids() == ids and page.url.endswith("answer=wrong")
    page.get_by_role("radio", name="Best").check()
    visit.choose("Method", "0")
    visit.choose("Answer", "all")
    assert "#" not in page.url
    page.evaluate("location.hash = 'show=nonsense&method=none&picture=nowhere'")
    page.wait_for_timeout(100)
    assert page.locator("dialog").count() == 0 and page.get_by_role("radio", name="Best").is_checked()


def test_a_picture_opens_with_its_methods_curves_and_scores(visit: Visit) -> None:
    page = visit.page
    page.locator(".front .pair").first.click()
    dialog = page.locator("dialog[open]")
    dialog.locator("canvas").nth(4).wait_for()
    assert dialog.locator("canvas").count() == 5 and dialog.locator(".plain img").count() == 1
    assert dialog.locator("tbody tr").count() == 3 and "explains" in dialog.inner_text()
    page.keyboard.press("Escape")
    page.get_by_role("radio", name="All").check()
    first = EVIL[0]  # the curves of the first three images were kept
    page.locator("#gallery .card").nth(visit.ids().index(first)).locator(".frame").click()
    curves = page.locator("dialog[open] svg.curve")
    assert curves.count() == 5 and "n = 1" in (curves.first.get_attribute("aria-label") or "")
    points = curves.first.locator("polyline").first.get_attribute("points") or ""
    assert points.split()[0] == "21,57" and len(points.split()) == 11


def test_a_wrong_answer_shows_maps_of_both_classes(visit: Visit) -> None:
    page = visit.page
    page.evaluate(
        """() => {
        const set = JSON.parse(document.getElementById("data").textContent);
        const image = set.images.find((other) => other.right === false);
        image.instead = image.maps.map((map, i) => (set.methods[i].floor ? null : { ...map }));
        set.images = [image];
        const root = document.createElement("div");
        root.id = "both";
        document.body.append(root);
        heatproof.gallery(root, set);
    }"""
    )
    page.locator("#both").get_by_role("radio", name="All").check()
    page.locator("#both .frame").first.click()
    dialog = page.locator("dialog[open]")
    dialog.locator("canvas").nth(7).wait_for()
    headings = dialog.locator("h4").all_text_contents()
    assert [text.rpartition(" (")[2] for text in headings] == ["true label)", "prediction)"]
    assert dialog.locator("canvas").count() == 5 + 3 and dialog.locator("table").count() == 1
    assert "both_classes" not in dialog.inner_text()


def test_the_score_tables_fit_and_their_heads_stay(browser: Any, report: Path) -> None:
    visit = Visit(browser, report, width=1280)
    page = visit.page
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    script = """t => { const r = t.getBoundingClientRect();
        return [r.left, r.right, t.scrollWidth - t.clientWidth]; }"""
    for table in page.locator("#scores .wide").all():
        left, right, hidden = table.evaluate(script)
        assert left >= 0 and right <= 1280 and hidden <= 0
    row = page.locator("#scores tbody tr").last
    row.evaluate(
        "r => window.scrollTo({top: r.getBoundingClientRect().top + scrollY - 20, behavior: 'instant'})"
    )
    assert page.locator("#scores thead").last.evaluate("h => h.getBoundingClientRect().top") >= -200
    page.close()


OVERFLOWING = """() => {
    document.querySelectorAll('details').forEach(d => { d.open = true });
    const box = e => e.getBoundingClientRect(), outside = [];
    for (const e of document.querySelectorAll('details > *, section > *'))
        if (box(e).right > box(e.parentElement).right + 1) outside.push(e.outerHTML.slice(0, 80));
    for (const e of document.querySelectorAll('svg.chart text'))
        if (box(e).left < box(e.closest('svg')).left - 1) outside.push(e.textContent);
    return outside; }"""


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_sticks_out_of_its_part_of_the_page(browser: Any, tmp_path: Path, width: int) -> None:
    methods = ("integrated-gradients", "gradcam", "guided-backprop", "smoothgrad(samples=8)", "random")
    write_page(read_run(make_run(tmp_path / "run", images=31, methods=methods)), tmp_path / "report.html")
    visit = Visit(browser, tmp_path / "report.html", width=width)
    assert visit.page.locator("svg.chart text.label").count() > 0
    assert visit.page.evaluate(OVERFLOWING) == []
    visit.page.close()


def test_every_stop_of_the_tab_key_is_visible(visit: Visit) -> None:
    page, seen = visit.page, set()
    for _ in range(60):
        page.keyboard.press("Tab")
        script = """() => { const e = document.activeElement, s = getComputedStyle(e);
            const n = e.nextElementSibling && getComputedStyle(e.nextElementSibling);
            return [e.tagName, s.outlineStyle !== 'none' || (n && n.outlineStyle !== 'none')]; }"""
        tag, outlined = page.evaluate(script)
        seen.add(tag)
        assert outlined, tag
    assert {"A", "SUMMARY", "DIV", "INPUT", "SELECT", "BUTTON"} <= seen


def test_a_definition_is_one_click_away(visit: Visit) -> None:
    page = visit.page
    link = page.locator(".scores thead a").filter(has_text="insertion").first
    target = page.locator(f"[id='{(link.get_attribute('href') or '')[1:]}']")
    assert not target.is_visible()
    link.click()
    assert target.is_visible() and "insertion" in target.inner_text()
    page.locator(".facts a").first.click()
    assert page.url.endswith("#trajectories") and page.locator(".alarm").first.is_visible()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 390)])
def test_axe_finds_nothing_serious(browser: Any, report: Path, scheme: str, width: int) -> None:
    reason = "axe is not installed: pip install axe-playwright-python"
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=reason)
    visit = Visit(browser, report, width, scheme)
    visit.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    for dialog in (False, True):
        if dialog:
            visit.page.locator(".card button").first.click()
        result = axe.Axe().run(visit.page).response["violations"]
        serious = [(v["id"], v["nodes"][0]["html"]) for v in result if v["impact"] in ("serious", "critical")]
        assert serious == []
    visit.page.close()


def test_it_fits_a_phone_and_prints(browser: Any, report: Path) -> None:
    visit = Visit(browser, report, width=390)
    page = visit.page
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    page.emulate_media(media="print")
    assert not page.locator(".controls").is_visible() and page.locator(".verdict h1").is_visible()
    assert visit.messages == []
    page.close()
