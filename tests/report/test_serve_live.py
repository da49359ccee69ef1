"""The live page in a real browser: names that attack it, readers who do not see it, a run that goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_serve_browser import Visit, open_browser, pytestmark, served  # noqa: F401  # where there is no browser

from heatproof.report.serve import Server
from heatproof.store import Manifest, RunFolder
from made_run import CLASSES, EVIL, make_run
from tiny_study import make_study, start

browser = pytest.fixture(scope="module")(open_browser)

# --- names from outside, accessibility, small screens -------------------------------------------------------


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = make_run(tmp_path_factory.mktemp("evil") / '<b>"run"</b>', cscores=(0.6, 0.01), images=12)
    yield from served(run.path, token=True)


def test_names_from_outside_are_shown_and_never_run(browser: Any, evil: Server) -> None:
    stranger = browser.new_page()
    reply = stranger.goto(evil.address.partition("?")[0])
    assert reply.status == 401 and "needs its token" in stranger.content()
    stranger.close()
    visit = Visit(browser, evil).ready()
    page = visit.page
    assert "token" not in page.url, "the token must not stay in the address"
    visit.choose("Sort by", "name")
    assert set(EVIL) <= set(visit.ids()) and page.evaluate("window.hacked") is None
    classes = page.get_by_role("combobox", name="True class").locator("option").all_text_contents()
    assert classes == ["all", *CLASSES]
    for name in EVIL:
        page.get_by_role("button", name=f"Compare maps of {name}").click()
        assert page.locator("dialog h3").inner_text() == name
        page.keyboard.press("Escape")
    page.get_by_label("Name contains").fill(EVIL[0])
    page.wait_for_function("() => document.querySelectorAll('.card').length === 2")
    assert (
        set(visit.ids()) == {EVIL[0], EVIL[2]}
        and page.evaluate("window.hacked") is None
        and visit.messages == []
    )
    visit.context.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 390)])
def test_axe_finds_nothing_serious(browser: Any, evil: Server, scheme: str, width: int) -> None:
    reason = "axe is not installed: pip install axe-playwright-python"
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=reason)
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
    )
    page = context.new_page()
    page.goto(evil.address)
    page.wait_for_selector("#scores")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    with page.expect_response(lambda reply: "/images?" in reply.url):
        page.get_by_role("combobox", name="Compare with").select_option(index=1)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    for dialog in (False, True):
        if dialog:
            page.locator(".card button").first.click()
            page.wait_for_selector("dialog tbody tr")
        result = axe.Axe().run(page).response["violations"]
        serious = [(v["id"], v["nodes"][0]["html"]) for v in result if v["impact"] in ("serious", "critical")]
        assert serious == []
    context.close()


# --- a run that goes on -------------------------------------------------------------------------------------


def test_an_empty_run_waits(browser: Any, tmp_path: Path) -> None:
    run = RunFolder.resume(tmp_path / "run", Manifest.collect({"methods": ["gradcam"]}))
    for server in served(run.path):
        visit = Visit(browser, server)
        visit.page.get_by_role("heading", name="Waiting for the first unit").wait_for()
        assert visit.messages == []
        visit.context.close()


def test_rows_appear_while_a_run_is_going(browser: Any, tmp_path: Path) -> None:
    """A real `heatproof run`, which waits after its second unit until the page has seen it."""
    study = make_study(
        tmp_path, images=16, methods=["gradcam"], metrics=["accuracy"], checkpoints="epochs/epoch01.pt"
    )
    waits = f"""
import pathlib, time
from heatproof.store import RunFolder
write, seen = RunFolder.write_unit, pathlib.Path({str(tmp_path / "seen")!r})
def wait(self, *given, **named):
    write(self, *given, **named)
    while len(self.done()) >= 2 and not seen.exists():
        time.sleep(0.05)
RunFolder.write_unit = wait
"""
    process = start(study, tmp_path / "out", script=waits)
    try:
        while not (tmp_path / "out" / "run.json").exists():
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
        for server in served(tmp_path / "out"):
            visit = Visit(browser, server)
            page = visit.page
            page.set_default_timeout(40_000)
            page.wait_for_function("() => document.body.textContent.includes('8 of 8 images')")
            page.wait_for_function("() => document.querySelector('.about')?.textContent.includes('8 images')")
            page.locator("#rest-here summary").first.click()
            page.evaluate("() => { window.here = document.querySelector('.card') }")
            (tmp_path / "seen").touch()
            page.wait_for_function(
                "() => document.querySelector('.status').textContent.startsWith('16 of 16')"
            )
            page.wait_for_function("() => document.querySelector('.about').textContent.includes('16 images')")
            page.wait_for_function("() => document.querySelector('#live').textContent.includes('5 units')")
            assert page.evaluate("window.here.isConnected"), "what was there stays, nothing is loaded again"
            assert page.locator("#rest-here details[open]").count() == 1, "what is open stays open"
            assert process.wait(60) == 0 and visit.messages == []
            visit.context.close()
    finally:
        process.kill()
        process.communicate()
