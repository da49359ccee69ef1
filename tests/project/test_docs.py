"""The pages say what is so: their code runs, their commands and links exist, and nothing is left out.

In README.md and docs/**/*.md:
    ```python                 runs, in order, all blocks of a page in one namespace and one folder
    ```python no-run: REASON  does not, for the reason given
    ```text output            directly behind a python block: exactly what that block prints
    ```toml                   can be read; its metrics, and the study it holds, are accepted
    heatproof ...             in any code: the command and its options exist, and so can its rules be read
"""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import click
import pytest
import torch
from claims import FLOORS
from click.testing import CliRunner
from PIL import Image
from skimage import data

import heatproof as hp
from heatproof.cli import main
from heatproof.images import SOURCES
from heatproof.images.symbols import SYMBOLS
from heatproof.registry import explainers, metrics
from heatproof.run.config import read_metrics, study_from
from heatproof.run.engine import run_study
from heatproof.verdict.gate import read_rule
from tiny_study import make_study

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CHANGELOG.md"]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


class Block(NamedTuple):
    """A fenced block: what stands behind its fence, its text, its first and its last line."""

    info: str
    text: str
    first: int
    last: int

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]


def fenced(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for block in re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        first = text.count("\n", 0, block.start()) + 1
        blocks.append(Block(block[1].strip(), block[2], first, first + block[0].count("\n")))
    return blocks


def without_fences(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def code(page: Path) -> Iterator[str]:
    """Everything on a page that is set as code: fenced, indented, and inside a sentence."""
    yield from (block.text for block in fenced(page))
    rest = without_fences(page)
    yield from re.findall(r"^    (.*)$", rest, re.MULTILINE)
    yield from re.findall(r"`([^`]+)`", rest)


# --- code that runs -----------------------------------------------------------------------------------------

# test_surface.py runs these, each example in a process of its own
IN_SURFACE = {ROOT / "README.md", DOCS / "snippets.md"}
with_python = [
    page
    for page in PAGES
    if page not in IN_SURFACE and any(block.language == "python" for block in fenced(page))
]


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run, as somebody who reads the pages would have."""
    folder = tmp_path_factory.mktemp("study")
    run_study(make_study(folder, images=8), folder / "first")
    return folder / "first"


@pytest.fixture
def workshop(tmp_path: Path, first_run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """A folder with cat.png and runs/first, and a namespace; what a page registers is forgotten."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(first_run, "runs/first")
    Image.fromarray(data.chelsea()).save("cat.png")
    explainers.names(), metrics.names()
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    tables = [explainers._entries, explainers._keys, metrics._entries, metrics._keys, SYMBOLS, SOURCES]
    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(patch.dict(table))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        yield page.__dict__


def trains(page: Path) -> bool:
    """Whether the page prints something about a network that it trains."""
    blocks = fenced(page)
    code = "".join(block.text for block in blocks if block.language == "python")
    printed = any(block.info == "text output" for block in blocks)
    return printed and re.search(r"small_net\(|\.step\(\)", code) is not None


# Fewer images, on pages that print no number which is compared.
SHORTER = {
    "docs/tutorials/first-audit.md": {
        "range(80)": "range(40)",
        '"gradient"], out="audit")': '"gradient"], out="audit", minutes=0.1)',
    },
    "docs/tutorials/compare-methods.md": {
        '"motorcycle": data.stereo_motorcycle()[0], "rocket": data.rocket(), "astronaut"': '"astronaut"',
        '"tripod": data.camera(), "cat"': '"cat"',
    },
}


def run_page(page: Path, namespace: dict[str, object], seed: int = 0) -> None:
    """Run the code of a page and compare what it prints; another seed replaces the line `seed = 0`."""
    blocks = fenced(page)
    python = "".join(block.text for block in blocks if block.language == "python")
    shorter = SHORTER.get(named(page), {})
    assert all(python.count(text) == 1 for text in shorter)
    for block, following in zip(blocks, [*blocks[1:], Block("", "", -1, -1)], strict=True):
        if block.language != "python" or block.info.startswith("python no-run"):
            continue
        printed = io.StringIO()
        lines = "\n" * block.first + block.text  # so that a traceback names the line of the page
        lines = lines.replace("\nseed = 0\n", f"\nseed = {seed}\n")
        for old, new in shorter.items():
            lines = lines.replace(old, new)
        with redirect_stdout(printed):
            exec(compile(lines, named(page), "exec", dont_inherit=True), namespace)
        if following.info == "text output":
            assert printed.getvalue() == following.text, f"{named(page)}, line {following.first}"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.trains if trains(page) else (), id=named(page))
        for page in with_python
    ],
)
def test_the_code_on_a_page_runs_and_prints_what_the_page_shows(
    page: Path, workshop: dict[str, object]
) -> None:
    run_page(page, workshop)


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(1, 10))
def test_the_shortcut_is_reported_for_other_trainings(seed: int, workshop: dict[str, object]) -> None:
    page = DOCS / "tutorials" / "shortcut.md"
    assert page.read_text(encoding="utf-8").count("\nseed = 0\n") == 1
    run_page(page, workshop, seed)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_blocks_are_marked_as_this_file_says(page: Path) -> None:
    blocks = fenced(page)
    assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(blocks), "a fence is left open"
    for before, block in zip([Block("", "", -9, -9), *blocks], blocks, strict=False):
        if "no-run" in block.info:
            assert re.fullmatch(r"python no-run: \w.{9,}", block.info), f"line {block.first}: give the reason"
        if block.info == "text output":
            behind = before.language == "python" and block.first - before.last <= 2
            assert behind, f"line {block.first}: no python block directly before"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_toml_on_a_page_is_accepted(page: Path) -> None:
    for block in fenced(page):
        if block.language != "toml":
            continue
        content = tomllib.loads(block.text)
        read_metrics(content.get("metrics", []))
        if "model" in content:
            study_from({"methods": ["gradcam"], **content})


# --- commands -----------------------------------------------------------------------------------------------


def command_lines(page: Path) -> Iterator[list[str]]:
    """What follows `heatproof` wherever code begins with it; words behind two spaces or a # are a remark."""
    for text in code(page):
        for line in text.replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:\$ )?heatproof (.+)", line.strip()):
                yield shlex.split(re.split(r"\s{2,}| #| \||;", match[1])[0])


def parse(words: list[str]) -> None:
    """Read a command line without running anything; click's error where a name does not exist."""
    command: click.Command = main
    context = click.Context(command, info_name="heatproof")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        inner = command.get_command(context, words[0])
        if inner is None:
            raise click.UsageError(f"there is no command {words[0]!r}")
        command, words = inner, words[1:]
        context = click.Context(command, parent=context)
    command.make_parser(context).parse_args(list(words))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_on_a_page_exist_with_their_options(page: Path) -> None:
    for words in command_lines(page):
        if words[0].isupper() or words[0] == "...":  # heatproof COMMAND --help
            continue
        try:
            parse(words)
        except click.UsageError as error:
            pytest.fail(f"heatproof {' '.join(words)}: {error.format_message()}")
        for option, rule in pairwise(words):
            if option == "--rule" and rule not in ("...", "RULE"):
                read_rule(rule)


def test_the_first_example_works_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = re.search(
        r"^    \$ heatproof (explain .+)\n((?:    .*\n|\n)+)", (DOCS / "snippets.md").read_text(), re.M
    )
    assert block
    quick = [*shlex.split(block[1]), "--methods", "gradcam"]
    result = CliRunner().invoke(main, quick)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in block[2].splitlines() if line.strip()]
    printed = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert [line for line in lines if line not in printed] == []


def test_the_readme_lists_every_command_once() -> None:
    text = (ROOT / "README.md").read_text().partition("\n## Commands\n")[2].partition("\n## ")[0]
    rows = [
        set(re.findall(r"`heatproof ([a-z]+)", row.split("|")[1])) for row in re.findall(r"^\|.*", text, re.M)
    ]
    assert sorted(name for row in rows for name in row) == sorted(main.list_commands(click.Context(main)))


@pytest.mark.parametrize(
    "line", ["nothing", "list nothing", "gate RUN --rul x=1 --nothing", "explain --lay x --no"]
)
def test_commands_and_options_that_do_not_exist_are_noticed(line: str) -> None:
    with pytest.raises(click.UsageError):
        parse(line.split())


# --- nothing is left out ------------------------------------------------------------------------------------


def mentioned(name: str, text: str) -> bool:
    return re.search(rf"(?<![\w+-]){re.escape(name)}(?![\w+-])", text) is not None


def test_every_public_name_is_documented() -> None:
    pages = "\n".join(text for page in PAGES for text in code(page))
    names = [*hp.__all__, *hp.metrics.__all__, *explainers.names(), *metrics.names()]
    names += [name for name, _ in made_pages().commands(main)]
    assert not [name for name in names if not mentioned(name, pages)]


def test_every_metric_has_its_page() -> None:
    made = made_pages()
    for entry in metrics:
        page = DOCS / "metrics" / made.page_of(entry)
        assert mentioned(entry.name, "\n".join(code(page))), f"{page.name} does not mention {entry.name}"


# --- links, tables, pictures --------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_fences(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in LINKED if page.exists()], ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_fences(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{named(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{named(page)} links to {link}"


def made_pages() -> ModuleType:
    return script("pictures")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_made_from_the_registry_are_up_to_date() -> None:
    for path, content in made_pages().tables().items():
        assert path.read_text(encoding="utf-8") == content, (
            f"{named(path)}: run python docs/pictures.py tables"
        )


def test_tables_of_results_are_those_that_the_script_makes() -> None:
    made = script("results_pages")
    for page in made.PAGES:
        text = (ROOT / page.name).read_text(encoding="utf-8")
        assert made.rewritten(text, page.tables) == text, f"{page.name}: run python docs/results_pages.py"


def test_the_comparison_counts_what_there_is() -> None:
    text = (DOCS / "compare.md").read_text(encoding="utf-8")
    real = [entry.name for entry in explainers if entry.name not in FLOORS]
    cams = sum("cam" in name for name in real)
    families = {path.stem for path in (DOCS / "metrics").glob("*.md")} - {"index", "classifier", "evidence"}
    assert f"| CAM methods | {cams} |" in text
    assert f"| other attribution methods | {len(real) - cams}: " in text
    assert f"| metrics of maps | {len(families)} families |" in text


def test_what_pip_is_asked_to_install_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    commands = [
        command for page in PAGES for text in code(page) for command in re.findall(r"pip install .*", text)
    ]
    extras = {
        name for line in commands for group in re.findall(r"\[([\w,]+)\]", line) for name in group.split(",")
    }
    assert extras and extras <= set(project["optional-dependencies"])
    table = re.findall(r"^\| `(\w+)` \|", (DOCS / "install.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(table) == sorted(project["optional-dependencies"])


def test_every_picture_is_made_by_the_script_and_shown_on_a_page() -> None:
    made = made_pages()
    stored = set(DOCS.rglob("pictures/*.png"))
    links = {page: re.findall(r"\]\((pictures/\w+\.png)\)", page.read_text()) for page in PAGES}
    linked = {page.parent / link for page, targets in links.items() for link in targets}
    assert stored == {made.place_of(name) for name in made.PICTURES} == linked


# --- a plug-in, as docs/extend.md tells it ------------------------------------------------------------------


def test_the_plug_in_of_the_page_is_found_through_its_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = fenced(DOCS / "extend.md")
    project = next(tomllib.loads(b.text) for b in blocks if b.language == "toml" and "[project]" in b.text)[
        "project"
    ]
    first, last = (next(b for b in blocks if f"# {name}.py" in b.text) for name in ("mycams", "mymetrics"))
    (tmp_path / "mycams.py").write_text(first.text)
    (tmp_path / "mymetrics.py").write_text(last.text)
    # What pip leaves behind when it installs the package.
    info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = [
        f"[{group}]\n" + "\n".join(f"{name} = {module}" for name, module in members.items())
        for group, members in project["entry-points"].items()
    ]
    info.joinpath("entry_points.txt").write_text("\n\n".join(groups))
    monkeypatch.syspath_prepend(tmp_path)
    with ExitStack() as stack:
        for registry, name in ((explainers, "mycam"), (metrics, "peak_share")):
            stack.enter_context(patch.dict(registry._entries))
            stack.enter_context(patch.dict(registry._keys))
            assert name not in registry.names()
            monkeypatch.setattr(registry, "_loaded", False)
            assert name in registry.names()


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    assert f"\nversion: {hp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'version = "{hp.__version__}"' in (ROOT / "recipe/meta.yaml").read_text()
    assert f"\n## {hp.__version__} - 20" in (ROOT / "CHANGELOG.md").read_text()
