"""The documentation site: it builds without a warning, needs no host and no server, and its links lead on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
from test_docs import code, made_pages, named

import heatproof as hp
from heatproof.cli import main

yaml = pytest.importorskip("yaml", reason="pip install heatproof[docs]")
pytest.importorskip("material", reason="mkdocs-material is not installed: pip install heatproof[docs]")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHROMIUM = Path("/usr/bin/chromium")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
ONLY_NAMED = {"canonical", "prev", "next", "alternate"}  # relations of <link> that load nothing


class ResolvedStudy(HTMLParser):
    """What a page loads, where it leads, and the places on it that can be led to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag in LOADED and LOADED[tag] in given and given.get("rel") not in ONLY_NAMED:
            self.loads.append(given[LOADED[tag]])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


opened = cache(ResolvedStudy)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


def pages(site: Path) -> list[Path]:
    paths = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert len(paths) > 50
    return paths


# --- navigation ---------------------------------------------------------------------------------------------


class Settings(yaml.SafeLoader):  # type: ignore[name-defined]
    """Reads mkdocs.yml without making the Python objects that it names."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for inner in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from leaves(inner)


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Settings)
    listed = list(leaves(settings["nav"]))
    here = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"index.md"}
    made = {"index.md", "pages.md", "contributing.md", "changelog.md", "security-policy.md"}
    made |= {"api/index.md", "api/metrics.md", "api/commands.md"}
    made |= {f"notebooks/{path.stem}.md" for path in DOCS.glob("notebooks/*.ipynb")}
    assert sorted(listed) == sorted(here | made), "mkdocs.yml: add the page under nav"


def test_every_page_is_on_the_list_of_pages() -> None:
    listed = re.findall(r"\]\(([\w./-]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    listed += [f"metrics/{path.name}" for path in (DOCS / "metrics").glob("*.md")]  # by metrics/index.md
    listed += [f"tutorials/{path.name}" for path in (DOCS / "tutorials").glob("*.md")]  # by theirs
    here = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"index.md"}
    assert {path for path in here if not path.endswith("summary.md")} <= set(listed), "docs/index.md"


def test_every_tutorial_is_on_the_list_of_tutorials() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "tutorials/index.md").read_text(encoding="utf-8"))
    assert {path.name for path in (DOCS / "tutorials").glob("*.md")} - {"index.md"} <= set(listed)


# --- the built site -----------------------------------------------------------------------------------------


def from_hosts(page: Path) -> list[str]:
    return [source for source in opened(page).loads if re.match(r"(?!data:)[a-z]+:|//", source)]


def lost(page: Path) -> list[str]:
    """Links of a page to files, or to places on pages, that are not there."""
    links = []
    for link in [*opened(page).links, *opened(page).loads]:
        path, anchor = map(unquote, urldefrag(link))
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        placed = not anchor or target.suffix != ".html"
        if not (target.is_file() and (placed or anchor in opened(target).places)):
            links.append(link)
    return links


def test_nothing_comes_from_a_host(site: Path) -> None:
    assert not {page.name: links for page in pages(site) if (links := from_hosts(page))}
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(\s*[\"']?(https?:|//)", text), sheet


def test_every_link_leads_to_a_page_and_a_place_on_it(site: Path) -> None:
    assert not {page.name: links for page in pages(site) if (links := lost(page))}


def test_a_host_and_a_lost_link_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<link rel=stylesheet href=//fonts.example/a.css><script src=https://example.org/a.js></script>"
        "<h1 id=top>A</h1><a href=#top>B</a><a href=#bottom>C</a><a href=none.html>D</a><a href=.>E</a>"
    )
    assert from_hosts(page) == ["//fonts.example/a.css", "https://example.org/a.js"]
    assert lost(page) == ["#bottom", "none.html", ".", "//fonts.example/a.css"]


def test_the_reference_has_every_public_name_and_every_command(site: Path) -> None:
    pages_by_name = {
        name: (site / f"api/{name}.html").read_text(encoding="utf-8") for name in ("index", "metrics")
    }
    titles = re.sub(r"<[^>]+>", "", pages_by_name["index"])
    assert not [name for name in hp.__all__ if f"hp.{name}" not in titles and not is_room(name)]
    assert "hp.monitor.Monitor" in titles and "hp.Maps" in titles and "upsample" in titles
    assert not [name for name in hp.metrics.__all__ if f"hp.metrics.{name}" not in pages_by_name["metrics"]]
    assert "&gt;&gt;&gt;" in pages_by_name["metrics"] and "Examples:" in pages_by_name["metrics"]
    text = (site / "api/commands.html").read_text(encoding="utf-8")
    for name, _ in made_pages().commands(main):
        assert f"Usage: {name}" in text


def is_room(name: str) -> bool:
    return name in ("metrics", "monitor")


def test_llms_txt_tells_of_every_page(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# heatproof\n\n> Can this heatmap be trusted?")
    listed = re.findall(r"^- \[.+\]\((.+)\): \S", text, re.MULTILINE)
    assert {page.relative_to(site).with_suffix(".md").as_posix() for page in pages(site)} == set(listed)
    whole = (site / "llms-full.txt").read_text(encoding="utf-8")
    for place in listed:
        assert (site / place).read_text(encoding="utf-8").strip() in whole
    assert "## hp.load_model" in whole and "pretrained:" in whole


def test_pages_read_as_on_a_git_host(site: Path) -> None:
    """No fence, list or table that this Markdown does not know is left as it was typed."""
    for page in pages(site):
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.S)
        body = text[text.index("<article") : text.index("</article>")]
        assert "```" not in body and not re.search(r"<p>\|", body), page
        paragraphs = re.findall(r"<p>(.*?)</p>", body, re.S)
        assert not [
            paragraph for paragraph in paragraphs if re.search(r"\n\s*(?:[-*]|\d+\.) \S", paragraph)
        ], page


@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}: apt-get install chromium")
def test_a_page_opens_from_disk_and_finds_words(site: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page(color_scheme="dark")
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / "index.html").as_uri())
        assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
        page.locator("input[name=query]").press_sequentially("insertion")  # with keys, which it listens to
        page.locator(".md-search-result__link").first.wait_for(timeout=60_000)
        assert "insertion" in page.locator(".md-search-result").inner_text().lower()
        assert not [url for url in requests if not url.startswith(("file:", "data:", "blob:"))]
        browser.close()


# --- pages --------------------------------------------------------------------------------------------------


def test_every_picture_of_the_gallery_has_its_command() -> None:
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert re.search(r"!\[.+\]\(.+\)", part) and re.search(
            r"^    (heatproof|python) ", part, re.MULTILINE
        )
        assert part.rfind("\n    ") > part.rfind("!["), f"no command behind the last picture: {part[:40]}"
    for line in code(DOCS / "gallery.md"):
        if match := re.match(r"python (docs/\w+\.py)", line):
            assert (ROOT / match[1]).exists(), f"{named(DOCS / 'gallery.md')}: {line}"
