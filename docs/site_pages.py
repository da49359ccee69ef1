"""What `make docs` adds to the pages of docs/: those beside it, the reference, llms.txt, links of a site.

mkdocs calls the functions on_...; see mkdocs.yml. The pages are written for a Git host and stay as they are.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page
from site_notebooks import as_page

import heatproof as hp
from heatproof.cli import main

ROOT = Path(__file__).parents[1]
PLACES = {  # files of the repository that the site has elsewhere
    "README.md": "index.md",
    "docs/index.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "LICENSE": "LICENSE",
    "src/heatproof/references.bib": "references.bib",
}
ORIGINS = {place: origin for origin, place in PLACES.items()}
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```[^\n`]*\n.*?^```$)", re.MULTILINE | re.DOTALL)
WIDTH = 100  # columns of the help on the page of commands

_plain: dict[str, str] = {}  # a page's text for programs that read, by its place


# --- pages --------------------------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages beside docs/ and notebooks get a place; README is where one starts."""
    for origin, place in PLACES.items():
        if (old := files.get_file_from_path(place)) is not None:
            files.remove(old)
        files.append(File.generated(config, place, content=(ROOT / origin).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        place = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, place, content=as_page(notebook)))
    for place, text in reference().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    place = page.file.src_uri
    text = for_site(markdown, place)
    _plain.setdefault(place, re.sub(r"data:image/\w+;base64,[\w+/=]+", "", text))
    return text


def for_site(markdown: str, place: str) -> str:
    """Links as they are from the page's place, fences with no more than their language."""
    pieces = FENCE.split(markdown)
    for i, piece in enumerate(pieces):
        pieces[i] = (
            re.sub(r"^(```\w+)[^\n]*", r"\1", piece)
            if i % 2
            else LINK.sub(lambda match: _moved(match, place), piece)
        )
    return "".join(pieces)


def _moved(link: re.Match[str], place: str) -> str:
    if not link[1]:
        return link[0]
    origin = ORIGINS.get(place, f"docs/{place}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link[1]))
    moved = PLACES.get(target, target.removeprefix("docs/"))
    if moved.endswith(".ipynb") and posixpath.splitext(moved)[0] != posixpath.splitext(place)[0]:
        moved = moved.replace(".ipynb", ".md")  # but a notebook's own page leads to its file
    return f"]({posixpath.relpath(moved, posixpath.dirname(place) or '.')}{link[2] or ''})"


# --- reference ----------------------------------------------------------------------------------------------


def reference() -> dict[str, str]:
    """Pages of every public name and of every command."""
    names = [name for name in hp.__all__ if name not in ("metrics", "monitor")]
    main_names = [(f"hp.{name}", getattr(hp, name)) for name in names]
    main_names.append(("hp.monitor.Monitor", hp.monitor.Monitor))
    scores = [(f"hp.metrics.{name}", getattr(hp.metrics, name)) for name in hp.metrics.__all__]
    pages_of_api = {
        "api/index.md": ("Python", "What `import heatproof as hp` offers.", main_names),
        "api/metrics.md": ("Metrics", "Every score is a function: maps in, numbers out.", scores),
    }
    pages = {}
    for place, (title, sentence, named) in pages_of_api.items():
        head = f"# {title}\n\n{sentence}\n\n"
        pages[place] = head + "".join(f"{_directive(name, thing)}\n" for name, thing in named)
        _plain[place] = head + "\n".join(_told(name, thing) for name, thing in named)
    help_texts = "\n".join(f"## {name}\n\n```text\n{text}\n```\n" for name, text in helps(main, "heatproof"))
    pages["api/commands.md"] = f"# Commands\n\nWhat `heatproof COMMAND --help` says.\n\n{help_texts}"
    return pages


def _function(thing: Any) -> Callable[..., Any]:
    """hp.explain is a room and a function; a reader wants the function."""
    function: Callable[..., Any] = getattr(thing, "_function", thing)
    return function


def _directive(name: str, thing: Any) -> str:
    function = _function(thing)
    return f"::: {function.__module__}.{function.__qualname__}\n    options:\n      heading: {name}\n"


def _told(name: str, thing: Any) -> str:
    function = _function(thing)
    call = f"{name}{inspect.signature(function)}"
    return f"## {name}\n\n```python\n{call}\n```\n\n{inspect.getdoc(function)}\n"


def helps(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[tuple[str, str]]:
    """Every command's help, that of a group before those of its commands."""
    context = click.Context(
        command, parent, name.rpartition(" ")[2], terminal_width=WIDTH, **command.context_settings
    )
    yield name, command.get_help(context)
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            inner = command.get_command(context, each)
            assert inner is not None
            yield from helps(inner, f"{name} {each}", context)


# --- for programs that read ---------------------------------------------------------------------------------


def on_nav(nav: Navigation, **_: Any) -> Navigation:
    on_nav.nav = nav  # type: ignore[attr-defined]  # which mkdocs does not hand to on_post_build
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Each page's text beside it, llms.txt with a line about each, llms-full.txt with all of them."""
    site, nav = Path(config.site_dir), on_nav.nav  # type: ignore[attr-defined]
    lines, whole = [f"# {config.site_name}", "", f"> {config.site_description}"], []
    for section in nav.items:
        lines += ["", f"## {section.title}", ""]
        for page in _pages_of(section):
            text = _plain[page.file.src_uri]
            (site / page.file.src_uri).write_text(text, encoding="utf-8")
            lines.append(f"- [{page.title}]({page.file.src_uri}): {first_sentence(text)}")
            whole.append(f"<!-- {page.file.src_uri} -->\n\n{text.strip()}\n")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n".join(whole), encoding="utf-8")


def _pages_of(item: Any) -> Iterator[Page]:
    if isinstance(item, Section):
        for child in item.children:
            yield from _pages_of(child)
    elif isinstance(item, Page):
        yield item


def first_sentence(text: str) -> str:
    """Of the first paragraph that is prose.

    >>> first_sentence("# A title\\n\\n**Is it so?** It\\nis. And more.\\n")
    'Is it so?'
    """
    for paragraph in FENCE.sub("", text.replace("**The question.** ", "")).split("\n\n"):
        if re.match(r"[A-Za-z*`\[]", words := paragraph.strip("\n")):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*|(?<!\w)\*|\*(?!\w)", r"\1", " ".join(words.split()))
            return re.split(r"(?<=[.?!])\s", plain)[0]
    return ""
