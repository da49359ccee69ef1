"""What people would guess: the names of `import heatproof as hp`, a run in Python, pictures in a notebook."""

from __future__ import annotations

import base64
import doctest
import inspect
import io
import pydoc
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from test_architecture import PATH
from test_docs import fenced

import heatproof as hp
from conftest import small_cnn
from heatproof.errors import InputError, MissingExtraError, StoreError, UnknownNameError
from heatproof.images import Preprocess
from heatproof.store import RunFolder
from heatproof.store.ledger import known_record
from heatproof.verdict.answers import HEADLINES, MethodAnswer, NetworkAnswer, Verdict
from tiny_study import METHODS, make_study

ROOT = Path(__file__).parents[2]
EVIL = '<script>alert("x")</script>'


class Page(HTMLParser):
    """The tags, the texts and the pictures of a piece of HTML; a tag left open is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.sources: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.sources += [value or "" for name, value in attrs if name == "src"]
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def pictures(self) -> list[Image.Image]:
        prefix = "data:image/png;base64,"
        assert all(source.startswith(prefix) for source in self.sources)
        return [
            Image.open(io.BytesIO(base64.b64decode(source.removeprefix(prefix)))) for source in self.sources
        ]


def html_of(thing: object) -> Page:
    page = Page(thing._repr_html_())  # type: ignore[attr-defined]
    assert not {"script", "link", "iframe", "style"} & set(page.tags)
    return page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hp.Run:
    folder = tmp_path_factory.mktemp("surface")
    return hp.run(make_study(folder, images=8), folder / "run")


def small_maps(n: int = 2, method: str = "gradcam") -> hp.Maps:
    values = torch.rand(n, 4, 4, generator=torch.Generator().manual_seed(0))
    return hp.Maps(method, values, (32, 32), torch.arange(n), tuple(f"image{i}" for i in range(n)))


# --- names --------------------------------------------------------------------------------------------------


def test_importing_heatproof_imports_no_library() -> None:
    script = (
        "import sys, heatproof as hp\n"
        "heavy = {'torch', 'numpy', 'scipy', 'PIL', 'duckdb'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert dir(hp) == sorted(hp.__all__) and hp.errors.InputError"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_function_is_not_hidden_by_the_package_of_its_name() -> None:
    script = (
        "import heatproof.explain.api, heatproof.run.engine, heatproof.contrast.api, heatproof as hp\n"
        "from heatproof.explain import api\n"
        "from heatproof.run import engine\n"
        "from heatproof.api import run\n"
        "assert hp.explain is api.explain and hp.run is run and engine.run_study and callable(hp.contrast)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_help_shows_the_functions() -> None:
    assert list(inspect.signature(hp.explain).parameters)[:3] == ["model", "images", "methods"]
    assert "targets: the class to explain" in pydoc.render_doc(hp.explain)
    assert "out: the run's folder" in pydoc.render_doc(hp.run)
    assert all(getattr(hp, name).__doc__ for name in hp.__all__)
    with pytest.raises(AttributeError, match=r"attribute '?nothing"):
        hp.nothing  # noqa: B018


def public() -> Iterator[tuple[str, Callable[..., object]]]:
    """What people call: functions, classes, and the methods of those that are asked questions."""
    for room, names in ((hp, hp.__all__), (hp.metrics, hp.metrics.__all__)):
        for name in names:
            thing = getattr(room, name)
            if callable(thing):
                yield name, thing
    for kind in (hp.Maps, hp.Run, hp.monitor.Monitor):
        yield kind.__name__, kind
        for name, method in vars(kind).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                yield f"{kind.__name__}.{name}", method


def documented(function: Callable[..., object]) -> list[str]:
    """Names of the arguments in the Args section of a docstring."""
    section = (inspect.getdoc(function) or "").partition("Args:\n")[2]
    lines = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*): \S", section, re.M)
    return sorted(name for names in lines for name in names.split(", "))


@pytest.mark.parametrize(("name", "thing"), [pytest.param(*pair, id=pair[0]) for pair in public()])
def test_help_names_every_argument_and_no_type_is_any(name: str, thing: Callable[..., object]) -> None:
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
    assert documented(thing) == sorted(p.name for p in parameters)
    types = [*(p.annotation for p in parameters), inspect.signature(thing).return_annotation]
    if inspect.isclass(thing) and thing.__module__ == "heatproof.metrics.results":
        return  # what metrics return: the values of different metrics differ in type
    assert not [kind for kind in types if re.search(r"\bAny\b", str(kind))]
    assert all(p.annotation is not p.empty for p in parameters)


# These need a run folder, or train a network; docs/ has examples of them, which tests run.
NEED_A_RUN = {"Run", "audit", "compare", "contrast", "drift", "open_run", "run"}
PUBLIC = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (hp, hp.metrics, hp.images, hp.monitor)
    for name in package.__all__
    if callable(getattr(package, name))
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_docstrings_have_a_summary_line_and_name_every_argument(name: str) -> None:
    first, *rest = (inspect.getdoc(PUBLIC[name]) or "").split("\n")
    assert first and first[0] == first[0].upper() and first.endswith(".")
    assert not rest or not rest[0]
    if not (inspect.isclass(PUBLIC[name]) and issubclass(PUBLIC[name], Exception)):
        parameters = inspect.signature(PUBLIC[name]).parameters
        assert documented(PUBLIC[name]) == sorted(set(parameters) - {"self"})


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.rpartition(".")[2] not in NEED_A_RUN])
def test_public_docstrings_have_an_example_that_runs(name: str) -> None:
    function = PUBLIC[name]
    text, module = inspect.getdoc(function) or "", sys.modules[function.__module__]
    assert "\nExample:\n" in text
    example = doctest.DocTestParser().get_doctest(text, dict(vars(module)), name, None, None)
    assert example.examples
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0


def test_pictures_are_opened_by_file_or_as_an_example(tmp_path: Path) -> None:
    Image.new("RGB", (5, 4), "red").save(tmp_path / "red.png")
    assert hp.open_image(tmp_path / "red.png").size == (5, 4)
    assert hp.open_image("example:cat").size == (451, 300)
    with pytest.raises(UnknownNameError, match="did you mean 'cat'"):
        hp.open_image("example:cta")


# --- maps ---------------------------------------------------------------------------------------------------


def test_a_layer_may_be_a_module_of_the_network() -> None:
    network, images = small_cnn(), torch.rand(2, 3, 32, 32)
    name, layer = next((n, part) for n, part in network.named_modules() if isinstance(part, torch.nn.Conv2d))
    by_module = hp.explain(network, images, layer=layer)["gradcam"]
    assert torch.equal(by_module.values, hp.explain(network, images, layer=name)["gradcam"].values)
    assert torch.equal(by_module.values, hp.explain(network, images, layer=[layer])["gradcam"].values)
    with pytest.raises(InputError, match=r"layer is a ReLU that is no part of"):
        hp.explain(network, images, layer=torch.nn.ReLU())


def test_images_before_the_model_are_named_as_the_mistake() -> None:
    with pytest.raises(InputError, match=r"images are given before the model; write explain\(model, images"):
        hp.explain(torch.rand(2, 3, 32, 32), small_cnn())  # type: ignore[arg-type]


def test_maps_are_arrays_and_have_items() -> None:
    maps = small_maps(3)
    assert np.asarray(maps).shape == (3, 4, 4) and np.asarray(maps, dtype=float).dtype == float
    assert torch.equal(maps[0], maps.values[0]) and torch.equal(maps[1:], maps.values[1:])
    assert [tuple(values.shape) for values in maps] == [(4, 4)] * 3  # type: ignore[attr-defined]


def test_an_overlay_has_the_map_over_the_picture_the_model_saw() -> None:
    maps, preprocess = small_maps(), Preprocess(size=(32, 32), resize=40)
    picture = hp.open_image("example:cat")
    images = torch.stack([preprocess(picture)] * 2)
    from_pictures = maps.overlay([picture, picture], preprocess)
    from_tensor = maps.overlay(images, preprocess)
    assert [p.size for p in from_pictures] == [(32, 32)] * 2
    for a, b in zip(from_pictures, from_tensor, strict=True):
        assert np.abs(np.asarray(a, dtype=int) - np.asarray(b, dtype=int)).max() <= 2
    grey = np.asarray(maps.overlay(images, preprocess, alpha=0.0)[0])
    assert np.abs(grey - np.asarray(preprocess.crop(picture).convert("L"), dtype=int)[..., None]).max() <= 2
    stretched = np.asarray(maps.overlay(images, alpha=0.0)[0])
    assert stretched.min() < 40 and stretched.max() > 200


def test_an_overlay_of_something_else_is_refused_in_a_sentence() -> None:
    maps = small_maps()
    with pytest.raises(InputError, match="2 maps but 1 images"):
        maps.overlay(Image.new("RGB", (32, 32)))
    with pytest.raises(InputError, match=r"300 x 451 but the model saw 32 x 32; give .* preprocess"):
        maps.overlay([hp.open_image("example:cat")] * 2)
    with pytest.raises(InputError, match=r"hp\.open_image"):
        maps.overlay(["a.png", "b.png"])  # type: ignore[list-item]


def test_maps_are_saved_whole_and_given_as_an_array(tmp_path: Path) -> None:
    maps = small_maps()
    maps.save(tmp_path / "maps.npz")
    with np.load(tmp_path / "maps.npz") as stored:
        assert np.array_equal(stored["values"], maps.numpy()) and maps.numpy().shape == (2, 4, 4)
        assert stored["ids"].tolist() == ["image0", "image1"] and stored["explained"].tolist() == [0, 1]
        assert str(stored["method"]) == "gradcam" and stored["image_size"].tolist() == [32, 32]
    with pytest.raises(InputError, match=r"name maps\.npz"):
        maps.save(tmp_path / "maps.png")
    with pytest.raises(InputError, match="cannot write"):
        maps.save(tmp_path / "no" / "maps.npz")


def test_some_maps_are_taken_with_all_that_belongs_to_them() -> None:
    maps = replace(small_maps(4), signed_values=-small_maps(4).values)
    chosen = (([2, 0], [2, 0]), (slice(1, 3), [1, 2]), (maps.explained != 1, [0, 2, 3]), ([], []))
    for rows, expected in chosen:
        few = maps.take(rows)
        assert few.ids == tuple(f"image{i}" for i in expected) and few.explained.tolist() == expected
        assert torch.equal(few.values, maps.values[expected]) and torch.equal(few.signed, -few.values)
        assert (few.method, few.image_size) == (maps.method, maps.image_size)
    assert replace(maps, ids=(), signed_values=None).take((1, 2)).ids == ()


# --- a run --------------------------------------------------------------------------------------------------


def test_scores_are_every_row_as_a_table(run: hp.Run) -> None:
    pandas = pytest.importorskip("pandas")
    table, rows = run.scores(), run.folder.scores().sql("from scores order by all")
    assert isinstance(table, pandas.DataFrame) and len(table) == len(rows) > 100
    assert list(table.columns) == list(rows[0])
    for name in table.columns:
        column = [None if value is pandas.NA else value for value in table[name].tolist()]
        assert all(
            a == b or (a != a and b != b) for a, b in zip(column, (r[name] for r in rows), strict=True)
        )
    assert table.dropna(subset="label").label.dtype == "Int64"


def test_the_table_has_means_with_intervals_by_method_and_metric(
    run: hp.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    table, scores = run.table(), run.scores()
    assert {"gradcam", "layercam"} <= {*table.index}
    metric = next(name for name, part in table.columns if name.startswith("insertion"))
    last = scores.checkpoint.max()
    rows = scores[(scores.metric == metric) & (scores.method == "gradcam") & (scores.checkpoint == last)]
    mean, low, high, n = table.loc["gradcam", metric][["mean", "low", "high", "n"]]
    assert mean == pytest.approx(rows.value.mean()) and n == rows.value.count() and low <= mean <= high
    monkeypatch.setattr("heatproof.api.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install pandas"):
        run.table()


def test_without_pandas_scores_are_arrays(run: hp.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heatproof.api.find_spec", lambda name: None if name == "pandas" else find_spec(name))
    arrays = run.scores()
    assert isinstance(arrays, dict)
    assert len(arrays["value"]) == len(run.folder.scores().sql("from scores"))


def test_maps_are_those_of_the_last_checkpoint_or_the_one_named(run: hp.Run) -> None:
    store = run.folder.maps()
    for maps_of, checkpoint in (
        (run.maps("gradcam"), "epoch02"),
        (run.maps("gradcam", "epoch01"), "epoch01"),
    ):
        assert torch.equal(maps_of.values, store.read(checkpoint, "gradcam").values)
    assert run.maps("gradcam", ids=["cat/000.png"]).ids == ("cat/000.png",)
    with pytest.raises(UnknownNameError, match="did you mean 'gradcam'"):
        run.maps("grad-cam")
    with pytest.raises(UnknownNameError, match="epoch01"):
        run.maps("gradcam", "epoch09")


def test_a_run_tells_its_verdict_its_status_and_writes_its_report(run: hp.Run, tmp_path: Path) -> None:
    verdict = run.verdict()
    assert verdict.follow == "undecided" and str(verdict).startswith(f"{verdict.headline}.\n")
    assert known_record(run.path / "verdict.json") == verdict.as_json()
    assert run.status().complete and "complete" in repr(run)
    assert run.report() == run.path / "report.html"
    assert verdict.headline in (run.path / "report.html").read_text(encoding="utf-8")
    assert run.report(tmp_path / "audit.html", checkpoint="epoch01").stat().st_size > 10_000


def test_a_dict_runs_like_the_file_it_stands_for(
    run: hp.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study(tmp_path, images=8)
    monkeypatch.chdir(tmp_path)
    again = hp.run(tomllib.loads(study.read_text()))
    assert again.path == Path("runs/study")
    assert again.folder.scores().digest() == run.folder.scores().digest()
    with pytest.raises(InputError, match="unknown key methodz"):
        hp.run({"methodz": []})
    with pytest.raises(InputError, match="study: methods: unknown method 'gradcan'"):
        hp.run({**tomllib.loads(study.read_text()), "methods": ["gradcan"]}, out="runs/other")


def test_a_folder_without_a_run_or_maps_is_reported_so(tmp_path: Path, run: hp.Run) -> None:
    with pytest.raises(StoreError):
        hp.open_run(tmp_path)
    empty = RunFolder.resume(tmp_path / "empty", run.folder.manifest)
    with pytest.raises(StoreError, match="holds no maps yet"):
        hp.open_run(empty.path).maps("gradcam")
    assert "epoch" not in "".join(html_of(hp.open_run(empty.path)).texts)


# --- in a notebook ------------------------------------------------------------------------------------------


def test_maps_show_small_pictures_and_their_names() -> None:
    maps = hp.Maps(EVIL, torch.rand(12, 7, 7), (900, 600), torch.arange(12), (EVIL,) * 12)
    page = html_of(maps)
    assert [p.size for p in page.pictures] == [(107, 160)] * 8
    assert "and 4 more" in page.texts and EVIL in "".join(page.texts)
    assert len(maps._repr_html_()) < 400_000
    nameless = hp.Maps("gradcam", torch.zeros(1, 2, 2), (8, 8), torch.tensor([3]))
    assert "0: class 3" in html_of(nameless).texts


def test_a_picture_in_a_notebook_is_the_map() -> None:
    values = torch.zeros(1, 32, 32)
    values[0, :16] = 1
    (picture,) = html_of(hp.Maps("gradcam", values, (32, 32), torch.tensor([0]))).pictures
    pixels = np.asarray(picture, dtype=int)
    assert (pixels[:16] == pixels[0, 0]).all() and pixels[0, 0].sum() > 3 * pixels[31, 31].sum()


def test_overlays_show_themselves() -> None:
    strip = small_maps().overlay(torch.rand(2, 3, 32, 32))
    page = html_of(strip)
    assert len(page.pictures) == 2 and page.texts == ["image0", "image1"]
    assert np.array_equal(np.asarray(page.pictures[0]), np.asarray(strip[0]))


def test_c_scores_show_a_table() -> None:
    labels, probs = torch.arange(6) % 2, torch.eye(2)[torch.arange(6) % 2] * 0.8 + 0.1
    scores = hp.metrics.cscore_by_class(small_maps(6), labels, probs)
    texts = html_of(scores).texts
    assert {"class 0", "class 1", "all", f"{scores.overall.value:.3f}", "3", "6"} <= set(texts)
    assert f"{scores.classes[0].value:.3f}" in html_of(scores.classes[0]).texts


def test_verdicts_and_runs_show_what_they_say(run: hp.Run) -> None:
    answer = MethodAnswer(EVIL, "yes", note=EVIL)
    texts = html_of(Verdict("epoch01", (answer,), NetworkAnswer("undecided"))).texts
    headline = f"{HEADLINES['yes', 'undecided']}; what it uses was not tested"
    assert texts[:2] == [headline, f"{EVIL} follows the network."]
    assert texts[-3:] == [EVIL, "follows", EVIL]
    page = html_of(run)
    assert {*METHODS, "insertion(steps=4)", "mean (n) at epoch02"} <= set(page.texts)
    rows = run.folder.scores().sql(
        "select avg(value) as mean from scores where checkpoint = 'epoch02' and method = 'gradcam' "
        "and metric = 'insertion(steps=4)'"
    )
    assert f"{rows[0]['mean']:.3f} (8)" in page.texts
    assert [p.size for p in page.pictures] == [(32, 32)] * 8


# --- five lines ---------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """Five lines, the blocks behind them on the page, and what those print."""

    lines: list[str]
    behind: str
    output: str


def examples() -> list[Example]:
    blocks: list[Example] = []
    for block in fenced(ROOT / "docs/snippets.md"):
        if block.language == "python" and block.text.startswith("import "):
            blocks.append(Example(block.text.splitlines(), "", ""))
        elif block.language == "python":
            blocks[-1] = blocks[-1]._replace(behind=blocks[-1].behind + block.text)
        elif block.info == "text output":
            blocks[-1] = blocks[-1]._replace(output=blocks[-1].output + block.text)
    return blocks


def test_the_readme_has_the_five_lines_of_their_page() -> None:
    blocks = [block.text for block in fenced(ROOT / "README.md") if block.language == "python"]
    assert blocks == ["\n".join([*examples()[0].lines, ""])]


def test_five_lines_run_in_an_empty_folder(tmp_path: Path) -> None:
    """In a process where nothing else was imported, each in its own folder, and with its last line shown."""
    script = [
        "import os",
        "def run(code, folder):",
        "    os.mkdir(folder); os.chdir(folder); exec(code, {}); os.chdir('..')",
    ]
    for number, example in enumerate(examples()):
        lines = example.lines
        assert len(lines) == 5
        imported = set(re.findall(r"\w+", re.sub(r" as \w+", "", lines[0].removeprefix("import "))))
        assert imported <= {"os", "torch", "torchvision", "heatproof"}
        name, _, value = lines[-1].partition(" = ")
        named = re.fullmatch(r"[a-z]+", name)
        code = [*lines[:-1], f"value = {value if named else lines[-1]}", f"{name} = value" if named else ""]
        code += ["print(len(value._repr_html_()), type(value).__name__)", example.behind]
        script.append(f"run({chr(10).join(code)!r}, '{number}')\nprint('----')")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(script)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for example, printed in zip(examples(), done.stdout.split("----\n")[:-1], strict=True):
        assert printed.endswith(example.output), printed
        size, kind = printed.removesuffix(example.output).splitlines()[-1].split()
        assert int(size) > 100 and kind in ("Strip", "DataFrame", "Verdict")


def test_the_table_of_names_lists_each_once() -> None:
    table = (ROOT / "docs/snippets.md").read_text(encoding="utf-8").partition("| name | result |")[2]
    names = re.findall(r"`((?:hp|run|maps)\.\w+)[^`]*`", "\n".join(re.findall(r"^\| (.+?) \|", table, re.M)))
    names.remove("run.report")  # its cell has two forms, HTML and PDF
    assert len(names) > 10 and "hp.audit" in names and len(names) == len({*names})


# --- habits -------------------------------------------------------------------------------------------------


def test_the_package_says_that_it_is_typed() -> None:
    assert Path(hp.__file__).with_name("py.typed").exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "Typing :: Typed" in project["project"]["classifiers"]


def test_commands_and_files_for_contributors_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    named = re.findall(r"`((?:tests/|docs/|\w+/)?\w+(?:\.py|/))`", text)
    assert len(links) > 2 and len(named) > 8
    for name in [*links, *named]:
        assert (ROOT / name).exists() or (
            ROOT / "src/heatproof" / name.removeprefix("heatproof/")
        ).exists(), name
    rooms = text.split("to its left:")[1].split("`types.py`")[0].strip().split(", ")
    assert rooms == PATH
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"make (test|venv|demo|bench)", text)) <= set(targets)


def test_hooks_and_builds_call_what_is_there() -> None:
    yaml = pytest.importorskip("yaml")
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"].split()[:2] for hook in hooks[0]["hooks"]] == [
        ["ruff", "format"],
        ["ruff", "check"],
    ]
    build = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    assert [step["run"] for step in build["jobs"]["test"]["steps"] if "run" in step] == ["make test"]
    for template in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.md"):
        assert {"name", "about"} == set(yaml.safe_load(template.read_text().split("---")[1]))
