"""Runs side by side: what surely changed, by picture where these are the same, and whose maps moved."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import heatproof as hp
import made_run
from heatproof.cli import main
from heatproof.errors import InputError, StoreError
from heatproof.metrics.results import mean_interval
from heatproof.report.compare import Difference, compare_runs
from heatproof.report.pieces import nice_ticks
from heatproof.store.ledger import write_record
from made_run import good, make_run

METHODS = ("gradcam", "layercam", "random")
CHROMIUM = Path("/usr/bin/chromium")


def heatproof(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def later(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
    """Grad-CAM's insertion falls, its deletion falls too, which is better; others stay, but for noise."""
    result = good(metric, method, random) + np.random.default_rng(7).normal(0, 0.01, 100)
    return result - 0.2 if method == "gradcam" else result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a and b: the same pictures, one map of Grad-CAM turned around in b."""
    folder = tmp_path_factory.mktemp("beside")
    make_run(folder / "a", images=40, methods=METHODS)
    drawn = made_run.drawn

    def turned(images: int, seed: int) -> torch.Tensor:
        maps = drawn(images, seed)
        if seed == 0:
            maps[17] = 1 - maps[17]
        return maps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made_run, "drawn", turned)
        make_run(folder / "b", later, images=40, methods=METHODS, cscores=(0.5, 0.9), wrong=0.5)
    return folder


def by_name(differences: tuple[Difference, ...], metric: str, method: str) -> Difference:
    return next(d for d in differences if d.of.name == metric and d.methods[0] == method)


def test_better_and_worse_follow_the_direction_of_each_number(runs: Path) -> None:
    result = hp.compare(runs / "a", hp.open_run(runs / "b"))
    fell = by_name(result.differences, "insertion", "gradcam")
    assert fell.answer == "worse" and fell.paired and fell.n == (40, 40)
    assert by_name(result.differences, "deletion", "gradcam").answer == "better"
    assert by_name(result.differences, "cscore", "gradcam").answer == "better"
    assert by_name(result.differences, "classified rightly", "").answer == "worse"
    assert result.headline.startswith(
        f"{len(result.by_answer('better'))} of {len(result.differences)} numbers became better"
    )


def test_the_change_is_that_of_the_pairs_with_the_bootstrap_of_every_mean(runs: Path) -> None:
    sides = [hp.open_run(runs / name) for name in "ab"]
    columns = []
    for side in sides:
        where = "metric = 'insertion' and method = 'gradcam' and checkpoint = 'epoch02'"
        query = f"select value from scores where {where}"
        columns.append(
            np.array([row["value"] for row in side.folder.scores().sql(f"{query} order by image")])
        )
    result = by_name(hp.compare(*sides).differences, "insertion", "gradcam")
    step = columns[1] - columns[0]
    assert result.change == pytest.approx(step.mean())
    assert (result.low, result.high) == pytest.approx(mean_interval(step))


def test_pictures_are_the_same_where_their_content_is(runs: Path, tmp_path: Path) -> None:
    for name, mark in (("a", "x"), ("b", "y")):
        ids = (
            hp.open_run(runs / name)
            .folder.scores()
            .sql("select distinct image from scores where image <> ''")
        )
        record = {"images": [[row["image"], mark] for row in ids]}
        write_record(runs / name / "images.json", record)
    try:
        result = compare_runs([runs / "a", runs / "b"])
    finally:
        for name in "ab":
            (runs / name / "images.json").unlink()
    difference = by_name(result.differences, "insertion", "gradcam")
    assert (
        result.same == {1: 0}
        and not difference.paired
        and difference.n == (40, 40)
        and difference.answer == "worse"
    )
    pairs = by_name(compare_runs([runs / "a", runs / "b"]).differences, "insertion", "layercam")
    sample = by_name(result.differences, "insertion", "layercam")
    assert sample.high - sample.low > pairs.high - pairs.low  # pairs know more
    assert not result.moved


def test_the_picture_whose_map_was_turned_moved_most(runs: Path) -> None:
    result = compare_runs([runs / "a", runs / "b"])
    assert [image.image for image in result.moved] == ["017.png"]
    assert result.moved[0].methods[0][:2] == ("gradcam", "gradcam") and result.moved[0].methods[0][2] < -0.9


def test_sides_are_checkpoints_and_methods_too(runs: Path) -> None:
    a = runs / "a"
    result = compare_runs([f"{a}@epoch01", f"{a}@epoch02"])
    assert [side.name for side in result.sides] == ["epoch01", "epoch02"]
    assert by_name(result.differences, "cscore", "gradcam").change == pytest.approx(0.1)
    result = compare_runs([f"{a}@gradcam", f"{a}@layercam"])
    assert {d.methods for d in result.differences if d.methods[0]} == {("gradcam", "layercam")}
    assert result.moved and result.moved[0].methods[0][:2] == ("gradcam", "layercam")
    assert result.sides[0].headline == "Undecided whether its maps follow the network"
    floor = compare_runs([f"{a}@gradcam", f"{a}@random"]).sides[1]
    assert floor.headline == "A control, which does not use the network"
    with pytest.raises(InputError, match="no checkpoint or method 'gradcm'; did you mean 'gradcam'"):
        compare_runs([a, f"{a}@gradcm"])
    with pytest.raises(InputError, match="at least two runs"):
        compare_runs([a])
    with pytest.raises(StoreError, match="nothing"):
        compare_runs([a, runs / "nothing"])


def test_the_page_is_one_file_that_loads_nothing(runs: Path, tmp_path: Path) -> None:
    page = compare_runs([runs / "a", runs / "b"]).report(tmp_path / "page.html").read_text()
    assert "017.png" in page and "insertion: evidence shown first" in page
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)", page)
    assert "<script>window" not in page and page.count("data:image/png") == 1
    again = compare_runs([f"{runs / 'a'}@layercam", f"{runs / 'a'}@gradcam"])
    assert "window.hacked=1&lt;/script&gt;" in again.report(tmp_path / "evil.html").read_text()


def test_on_the_command_line(runs: Path, tmp_path: Path) -> None:
    result = heatproof("compare", str(runs / "a"), str(runs / "b"), "--out", str(tmp_path / "c.html"))
    assert result.exit_code == 0 and (tmp_path / "c.html").exists(), result.output
    assert "worse" in result.output and "largest change of maps: 017.png" in result.output
    result = heatproof("compare", str(runs / "a"), str(runs / "b"), "--json")
    content = json.loads(result.output)
    assert [side["name"] for side in content["sides"]] == ["a", "b"]
    assert {d["answer"] for d in content["differences"]} == {"better", "worse", "unclear"}
    assert content["moved"][0]["image"] == "017.png" and math.isfinite(content["differences"][0]["change"])
    alone = heatproof("compare", str(runs / "a"))
    assert alone.exit_code == 2 and "name at least two runs" in alone.output


def test_anyone_can_read_the_page_on_any_screen(runs: Path, tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python"
    )
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium")
    page = compare_runs([runs / "a", runs / "b"]).report(tmp_path / "page.html")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        for width, scheme in ((1280, "light"), (390, "dark")):
            size = {"width": width, "height": 900}
            tab = browser.new_page(viewport=size, color_scheme=scheme, bypass_csp=True)
            requests: list[str] = []
            tab.on("request", lambda request, requests=requests: requests.append(request.url[:60]))
            tab.goto(page.as_uri())
            assert [url for url in requests if not url.startswith("data:")] == [page.as_uri()[:60]]
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            result = axe.Axe().run(tab)
            assert not result.response["violations"], result.generate_report()
        browser.close()


@pytest.mark.parametrize("span", [0.0008, 0.011, 0.29, 0.81, 0.999, 9.5])
def test_an_axis_has_a_few_ticks_whatever_changed(span: float) -> None:
    ticks = nice_ticks(-span, 0.0, 4)
    assert 1 < len(ticks) <= 5 and ticks[-1] == 0.0
