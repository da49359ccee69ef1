"""The report says what the rows say: numbers, pictures, and names that are shown and never run."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from jinja2 import UndefinedError
from markupsafe import Markup, escape

from heatproof.cli.read import report_command
from heatproof.errors import InputError, StoreError
from heatproof.metrics.results import mean_interval
from heatproof.report.gallery import gallery, normalised, pack, pooled, resized, unpack
from heatproof.report.live import ImageQuery, as_csv
from heatproof.report.page import asset, render, write_page
from heatproof.report.pieces import TEMPLATES, Grid, LinePanel, Mark, fill
from heatproof.report.sections import ScoreColumn, classes, packed, references, scores
from heatproof.run.engine import run_study
from heatproof.store import Manifest, RunFolder
from heatproof.store.maps import StoredMaps
from heatproof.studies.cscore.results import score_grid
from heatproof.types import normalise, upsample
from heatproof.verdict.answers import UNDECIDED
from heatproof.verdict.data import RunData, measure, read_run
from heatproof.verdict.judge import judge
from heatproof.verdict.trajectory import Trajectory
from made_run import CLASSES, EVIL, METHODS, good, make_run
from tiny_study import make_study


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def data(run: RunFolder) -> RunData:
    return read_run(run)


class Page(HTMLParser):
    """Tags with their attributes, and the text a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(data: RunData, most: int = 12, jet: bool = False) -> str:
    return render(data, judge(data), gallery(data, most, jet))


def embedded(text: str) -> Any:
    match = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert match
    return json.loads(match[1])


def test_a_real_run_becomes_one_file_that_loads_nothing(tmp_path: Path) -> None:
    run_study(make_study(tmp_path / "study", methods=["gradcam", "layercam", "random"]), tmp_path / "out")
    result = CliRunner().invoke(report_command, [str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0 and "wrote" in result.output
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert not [tag for tag, a in page.tags if tag in ("link", "iframe", "base")]
    assert all((a["src"] or "").startswith("data:image/jpeg;base64,") for _, a in page.tags if "src" in a)
    assert [tag for tag, _ in page.tags].count("img") == 12, "six pictures, each beside its map"
    addresses = [a["href"] or "" for tag, a in page.tags if tag == "a"]
    assert all(address.startswith(("#", "https://")) for address in addresses)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    inside = {unquote(address[1:]) for address in addresses if address.startswith("#")}
    pictures = {f"picture={image['id']}" for image in embedded(text)["images"]}
    assert inside - set(ids) <= pictures and len(inside & pictures) == 6
    assert UNDECIDED in page.text
    assert json.loads((tmp_path / "out" / "verdict.json").read_text())["headline"] in page.text
    images = embedded(text)["images"]
    assert images and all(
        image["picture"].startswith("data:image/") and all(image["maps"]) for image in images
    )


def test_cells_are_the_means_of_the_rows(run: RunFolder, data: RunData) -> None:
    for metric, method in (("insertion", "gradcam"), ("deletion", "lime(samples=9)"), ("insertion", "edges")):
        rows = run.scores().sql(
            "select value from scores where checkpoint = 'epoch02' and metric = ? and method = ?",
            [metric, method],
        )
        values = [row["value"] for row in rows]
        cell = data.cells[metric, method]
        assert cell.value == pytest.approx(np.mean(values)) and cell.n == 60
        assert (cell.low, cell.high) == pytest.approx(mean_interval(values), abs=0.005)
    assert data.cells["cscore", "gradcam"].value == 0.6 and data.cells["cscore", "gradcam"].n == 60
    assert data.by_class["cscore", "gradcam", 1].n == 30
    assert data.paths["cscore", "gradcam"] == [0.5, 0.6] and data.classifier("auc") == [0.95, 0.95]
    assert data.methods == ["gradcam", "layercam", "lime(samples=9)", "random", "edges"]
    assert data.curves["gradcam"]["insertion"][3] == (30, pytest.approx(0.3))


def test_an_earlier_checkpoint_can_be_shown(run: RunFolder) -> None:
    early = read_run(run, checkpoint="epoch01")
    assert early.cells["cscore", "gradcam"].value == 0.5
    with pytest.raises(InputError, match="no checkpoint 'epoch1'; did you mean 'epoch01'"):
        read_run(run, checkpoint="epoch1")
    with pytest.raises(InputError, match="no model"):
        read_run(run, model="other")


def test_names_are_shown_and_never_become_markup(data: RunData) -> None:
    text = page_of(data)
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [
        tag for tag, a in page.tags if tag in ("img", "b", "iframe") or any(k.startswith("on") for k in a)
    ]
    assert CLASSES[0] in page.text and CLASSES[1] in page.text and "net <1>" in page.text
    assert "<study>.toml" in page.text
    images = embedded(text)["images"]
    assert {image["id"] for image in images} & set(EVIL)
    assert {image["label"] for image in images} == set(CLASSES)


def test_templates_escape_and_refuse_what_they_were_not_given() -> None:
    """What comes as Markup is the only way around escaping, and Python makes it."""
    pages = [name for name in TEMPLATES.list_templates(["html"]) if "/templates/" in name]
    assert len(pages) > 20
    for name in pages:
        text = files("heatproof").joinpath(name).read_text()
        assert not re.search(r"\|\s*safe\b|autoescape", text), name
    grid = Markup(Grid([EVIL[0]], [[EVIL[1], EVIL[2]]], '"' + EVIL[0]))
    assert not [tag for tag, _ in Page(str(grid)).tags if tag in ("script", "img")]
    with pytest.raises(UndefinedError):
        fill("pictures", {})


def test_embedded_json_cannot_end_its_script() -> None:
    for text in (*EVIL, "<!--", "]]>", "\u2028"):
        embedded = TEMPLATES.from_string("{{ text|tojson }}").render(text=[text])
        assert not re.search(r"[<>&\u2028]", embedded)
        assert json.loads(embedded) == [text]


def test_the_policy_allows_this_script_only(data: RunData) -> None:
    text = page_of(data)
    digest = base64.b64encode(hashlib.sha256(asset("page.js").encode()).digest()).decode()
    policy = next(a["content"] for tag, a in Page(text).tags if "http-equiv" in a)
    assert policy and f"script-src 'sha256-{digest}';" in policy and "default-src 'none'" in policy
    assert f"<script>{asset('page.js')}</script>" in text


def test_best_floors_and_counts_are_marked(tmp_path: Path) -> None:
    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        result = good(metric, method, random)
        return result - 0.5 if (metric, method) == ("insertion", "layercam") else result

    data = read_run(make_run(tmp_path / "run", values))
    text = str(scores(data).body)
    head = re.search(r"<th[^>]*>(?:(?!</th>).)*<code class=\"sub\">insertion</code>.*?</th>", text, re.S)
    assert head and "n = 60" in head[0] and head[0].count("sub floor") == 2
    table = next(t for t in re.findall(r"<table.*?</table>", text, re.S) if ">insertion<" in t)
    column = re.findall(r'<code class="sub">(.*?)</code>', table).index("insertion")
    cells = {
        method: re.findall(r"<td.*?</td>", row, re.S)[column]
        for method, row in zip(
            data.real, re.findall(r"<tr><th scope=\"row\">.*?</tr>", table, re.S), strict=True
        )
    }
    marked = [method for method, cell in cells.items() if "★" in cell]
    assert len(marked) == 1 and marked[0] != "layercam"
    cell_text = re.sub(r"<.*?>", "", cells["layercam"])
    assert "not above random, edges" in cell_text.replace("edges, random", "random, edges")
    lines = [re.findall(r"--f:([\d.]+)", cell) for cell in cells.values()]
    assert len(lines[0]) == 2 and lines.count(lines[0]) == len(lines), "one scale, so the floors stand still"


def test_no_table_has_more_columns_than_a_page_holds() -> None:
    column = ScoreColumn(measure("insertion"), {}, {}, frozenset())
    families = {"a": [column] * 2, "b": [column] * 9, "c": [column], "d": [column] * 4}
    tables = list(packed(families))
    widths = [sum(len(columns) for _, columns in table) for table in tables]
    assert max(widths) <= 6 and sum(widths) == 16
    assert [[(family, len(columns)) for family, columns in table] for table in tables] == [
        [("a", 2)], [("b", 5)], [("b", 4), ("c", 1)], [("d", 4)],
    ]  # fmt: skip


def test_every_chart_says_how_many_it_is_of(data: RunData) -> None:
    text = page_of(data)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert len(captions) >= 6 and all("n = " in caption for caption in captions)
    assert "gradcam, n = 3" in "".join(
        re.sub("<.*?>", "", caption) for caption in captions
    )  # the curves' own
    assert text.count("(not defined)") == 0 and re.search(r"</bdi>, n = 30</li>", text)


def test_a_score_of_no_image_is_not_drawn(tmp_path: Path) -> None:
    """The C-Score of an empty gold list is stored as 0; it is neither a dot at 0 nor a number in a table."""
    section = classes(read_run(make_run(tmp_path / "run", gold=0))).body
    assert section.count(f"{escape(CLASSES[0])}: 0.600") == len(METHODS)
    assert f"{escape(CLASSES[1])}: 0.000" not in section
    assert f"{escape(CLASSES[1])}</bdi> (not defined)" in section
    assert '–<span class="sub">n = 0</span>' in section
    run = Trajectory.from_run(RunFolder.open(tmp_path / "run"))
    table, _ = score_grid(run, run.checkpoints[-1])
    assert np.isnan(table[:, 2]).all() and (table[:, 1] == 0.6).all()


def test_an_alarm_about_no_score_has_no_dot() -> None:
    ends = [(0.0, "a"), (1.0, "b")]
    defined, undefined = (
        Markup(LinePanel("t", [], ends, marks=[Mark((0.0, y), "1", "says")])) for y in (0.5, float("nan"))
    )
    assert "<circle" in defined and "<circle" not in undefined and "▲1" in undefined


def test_every_picture_says_which_class_its_map_explains(data: RunData) -> None:
    text = page_of(data)
    for image in embedded(text)["images"]:
        assert image["explains"] == image["label"] != ""
        assert image["which"] == ("true label and prediction" if image["right"] else "true label")
    assert (
        "Every map explains the true label of its image; for 12 of 60 the network predicts another class."
        in text
    )
    wanted = ImageQuery("gradcam")
    rows = list(csv.DictReader(io.StringIO(as_csv(data, wanted))))
    assert [row["explained"] for row in rows] == [row["class"] for row in rows]


def test_an_alarm_is_reported_and_marked_on_its_chart(tmp_path: Path) -> None:
    data = read_run(make_run(tmp_path / "run", cscores=(0.6, 0.01)))
    assert {alarm.method for alarm in data.alarms} == {"gradcam", "layercam", "lime(samples=9)"}
    text = page_of(data)
    assert text.count('<g class="alarm">') == 3 and "▲1" in text and '<ol class="alarms">' in text
    block = text.partition('<section class="verdict')[2].partition("</section>")[0]
    assert block.count("attribution collapse") == 3 and all(
        a.sentence in Page(block).text for a in data.alarms
    )


def test_the_gallery_holds_the_best_the_worst_and_the_disputed(run: RunFolder, data: RunData) -> None:
    real = ["gradcam", "layercam", "lime(samples=9)"]
    merit = np.mean([data.images.scores["insertion", m] for m in real], axis=0)
    content = gallery(data, most=12)
    by: dict[str, list[dict[str, Any]]] = {}
    for key in content["groups"]:
        own = [image for image in content["images"] if key in image["groups"]]
        by[key] = sorted(own, key=lambda image: image["groups"][key])
    order = np.argsort(-merit)
    assert [im["id"] for im in by["best"]] == [data.images.ids[i] for i in order[:4]]
    assert [im["id"] for im in by["worst"]] == [data.images.ids[i] for i in order[::-1][:4]]
    assert len(content["images"]) <= 12 and len(by["disputed"]) == 4
    least = [im["agreement"] for im in by["disputed"]]
    assert least == sorted(least) and max(least) <= min(
        im["agreement"] for im in by["best"] if im not in by["disputed"]
    )
    first = content["images"][0]
    place = data.images.ids.index(first["id"])
    assert first["scores"]["insertion"][1] == pytest.approx(
        data.images.scores["insertion", "layercam"][place], abs=1e-6
    )


def test_a_packed_map_is_the_map() -> None:
    values = torch.rand(2, 5, 7) - 0.2
    packed = pack(StoredMaps("m", values.numpy(), (50, 70), np.arange(2), ("a", "b")), 1, "dog")
    assert np.abs(unpack(packed) - normalise(values)[1].numpy()).max() <= 0.5 / 63 + 1e-6
    large = pack(StoredMaps("m", torch.rand(1, 224, 224).numpy(), (224, 224), np.zeros(1), ("a",)), 0, "")
    assert (large["h"], large["w"]) == (56, 56)


@pytest.mark.parametrize(
    ("own", "size"), [((7, 7), (224, 160)), ((60, 9), (32, 32)), ((3, 4, 5), (16, 8, 4))]
)
def test_maps_are_resized_and_pooled_without_torch_as_with_it(
    own: tuple[int, ...], size: tuple[int, ...]
) -> None:
    values = torch.rand(3, *own, generator=torch.Generator().manual_seed(0)) - 0.1
    np.testing.assert_allclose(resized(values.numpy(), size), upsample(values, size), atol=1e-6)
    np.testing.assert_array_equal(normalised(values.numpy()), normalise(values))
    if len(own) == 2:
        mean = torch.nn.functional.adaptive_avg_pool2d(values[:, None], (5, 3))[:, 0]
        np.testing.assert_allclose(pooled(values.numpy(), (5, 3)), mean, atol=1e-6)
    constant = np.full((1, *own), np.float32(0.3))
    assert not normalised(resized(constant, size)).any()


def test_the_page_lists_every_version_that_made_a_part(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", images=4).path
    seal = next((folder / "seals").glob("*.json"))
    text = seal.read_text()
    version = re.search(r'"heatproof": ?"([^"]+)"', text)
    assert version is not None
    page = page_of(read_run(RunFolder.open(folder)))
    assert re.search(
        rf"<dt>Computed by</dt><dd>[^<]*heatproof {re.escape(version[1])}[^<]*: \d+ parts?</dd>", page
    )


def test_jet_only_on_request(data: RunData) -> None:
    assert list(embedded(page_of(data))["colours"]) == ["inferno", "viridis", "cividis"]
    assert "jet" in embedded(page_of(data, jet=True))["colours"]


def test_unknown_metrics_and_missing_parts_are_reported(tmp_path: Path) -> None:
    extra = [("<my> metric", m, 3.0 + i) for i, m in enumerate(METHODS)]
    data = read_run(make_run(tmp_path / "run", extra=extra, maps=False))
    text = page_of(data)
    page = Page(text)
    assert "<my> metric" in page.text and measure("<my> metric").higher_is_better is None
    row = next(r for r in re.findall(r"<tr>.*?</tr>", text) if "&lt;my&gt; metric" in r)
    assert "★" not in row
    (left_out,) = re.findall(r"Not in this report(.*)", page.text.replace("\n", " "))
    assert (
        "What the network uses was not tested: add the metric evidence" in left_out
        and "Images" not in left_out[:200]
    )
    assert "Images: no image was requested" in Page(render(data, judge(data), None)).text
    assert all(image["picture"] is None and image["maps"] == [None] * 5 for image in embedded(text)["images"])


def test_the_same_run_gives_the_same_page(run: RunFolder, data: RunData) -> None:
    first = page_of(data)  # several times: DuckDB hands unordered groups back as its threads finish
    assert all(page_of(read_run(run)) == first for _ in range(8))


def test_definitions_name_direction_bounds_and_paper(data: RunData) -> None:
    text = Page(page_of(data)).text
    assert "Lower is better. Between 0 and 1." in text and "Petsiuk et al. (2018)" in text
    assert references()["achanta2012slic"].text.startswith("Achanta et al. (2012). SLIC Superpixels")


def test_bad_requests_raise_a_clear_error(tmp_path: Path, data: RunData) -> None:
    with pytest.raises(StoreError, match="is not a run folder"):
        CliRunner().invoke(report_command, [str(tmp_path)], catch_exceptions=False)
    with pytest.raises(StoreError, match="does not exist; create it first"):
        write_page(data, tmp_path / "nowhere" / "page.html")
    empty = RunFolder.resume(tmp_path / "empty", Manifest.collect({}))
    with pytest.raises(StoreError, match="no finished unit yet"):
        read_run(empty)
