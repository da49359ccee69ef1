"""The report says what the rows say: numbers, verdicts, and names that are shown and never run."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from jinja2 import UndefinedError
from markupsafe import Markup, escape

from heatproof.cli.report import report_command
from heatproof.errors import InputError, StoreError
from heatproof.metrics.stats import mean_interval
from heatproof.report.browse import Wanted, as_csv
from heatproof.report.charts import LinePanel, Mark
from heatproof.report.definitions import references
from heatproof.report.figures.cscore import score_table
from heatproof.report.gallery import gallery, pack
from heatproof.report.page import asset, embed, render, write_page
from heatproof.report.pieces import TEMPLATES, Grid, fill
from heatproof.report.sections import classes
from heatproof.report.verdict import FAILURE, RULES, THIN, WARNING, judge
from heatproof.run.engine import run_study
from heatproof.store import Manifest, RunFolder
from heatproof.types import Maps, Score, Unit, normalise
from heatproof.verdict.data import RunData, read_run
from heatproof.verdict.measures import measure
from heatproof.verdict.trajectory import Trajectory
from tiny_study import make_study

EVIL = (
    "<script>window.hacked=1</script>.png",
    '"><img src=x onerror="window.hacked=1">.png',
    "</script><script>window.hacked=1</script>.png",
    "emoji 🔥 'quoted' & more.png",
    "שלום עולם \u202eevil.png",
    "javascript:window.hacked=1",
)
CLASSES = ('cat <b>"bold"</b> 🐈', "كلب & dog's")
METHODS = ("gradcam", "layercam", "lime(samples=9)", "random", "edges")
CHECKPOINTS = ("epoch01", "epoch02")
Values = Callable[[str, str, np.random.Generator], np.ndarray]


def good(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
    """Scores by which every method beats its floors."""
    base = 0.3 if method in ("random", "edges") else 0.7
    return (base if metric == "insertion" else 1 - base) + random.normal(0, 0.05, 100)


def make_run(
    folder: Path,
    values: Values = good,
    images: int = 60,
    methods: Sequence[str] = METHODS,
    cscores: Sequence[float] = (0.5, 0.6),
    extra: Sequence[tuple[str, str, float]] = (),
    metrics: Sequence[str] = ("insertion", "deletion"),
    maps: bool = True,
    wrong: float = 0.2,
    confidence: float = 0.9,
    agreement: Callable[[str, str], float] = lambda a, b: 0.4,
    gold: int | None = None,
) -> RunFolder:
    """A run folder with two classes, two checkpoints, and names that try to break out of the page."""
    manifest = Manifest.collect(
        {"methods": list(methods), "images": {"kind": "folder"}}, models=dict.fromkeys(CHECKPOINTS, "abc"),
        classes=CLASSES, command=["heatproof", "run", "<study>.toml"],
    )  # fmt: skip
    run = RunFolder.create(folder, manifest)
    ids = [EVIL[i] if i < len(EVIL) else f"{i:03d}.png" for i in range(images)]
    for k, checkpoint in enumerate(CHECKPOINTS):
        random = np.random.default_rng(k)

        def row(
            image: str, label: int | None, method: str, metric: str, value: float, at: str = checkpoint
        ) -> Score:
            why = "not defined" if np.isnan(value) else ""
            return Score("net <1>", at, image, label, label, method, metric, float(value), why)

        rows = []
        for i, image in enumerate(ids):
            guess = 1 - i % 2 if i % 10 < 10 * wrong else i % 2
            rows += [row(image, i % 2, "", "predicted", guess)]
            rows += [row(image, i % 2, "", "probability", confidence)]
        for method in methods:
            for metric in metrics:
                rows += [
                    row(image, i % 2, method, metric, v)
                    for i, (image, v) in enumerate(zip(ids, values(metric, method, random), strict=False))
                ]
            rows += [row(image, i % 2, method, "degenerate", 0.0) for i, image in enumerate(ids)]
            for label, value in ((None, cscores[k]), (0, cscores[k]), (1, cscores[k])):
                n = images if label is None else images // 2
                n = gold if label == 1 and gold is not None else n
                value = value if n else 0.0
                rows += [row("", label, method, "cscore", value), row("", label, method, "cscore_n", n)]
                rows += [row("", label, method, "cscore_degenerate", 0)]
                rows += [row("", label, method, f"cscore_{end}", value) for end in ("low", "high")]
            for percent in range(0, 101, 10):
                rows += [row(i, None, method, f"insertion_at_{percent}", percent / 100) for i in ids[:3]]
        rows += [row("", None, "", "auc", 0.95), row("", None, "", "accuracy", 0.8)]
        rows += [row("", None, method, metric, value) for metric, method, value in extra]
        for a, b in ((a, b) for j, b in enumerate(methods) for a in methods[:j]):
            rows.append(row("", None, f"{a} ~ {b}", "method_agreement_spearman", agreement(a, b)))
        stored = {
            method: Maps(method, drawn(images, m), (24, 24), torch.arange(images) % 2, tuple(ids))
            for m, method in enumerate(methods)
        }
        pictures = {
            image: random.integers(0, 256, (24, 24, 3), dtype=np.uint8) for image in ids[: images - 1]
        }
        unit = Unit(checkpoint, (0, images), tuple(methods), tuple(metrics))
        run.write_unit(unit, rows, stored if maps else None, pictures if maps else None)
    return run


def drawn(images: int, seed: int) -> torch.Tensor:
    return torch.rand(images, 4, 6, generator=torch.Generator().manual_seed(seed))


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
    found = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def test_a_real_run_becomes_one_file_that_loads_nothing(tmp_path: Path) -> None:
    run_study(make_study(tmp_path / "study", methods=["gradcam", "layercam", "random"]), tmp_path / "out")
    result = CliRunner().invoke(report_command, [str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0 and "wrote" in result.output
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert not [tag for tag, a in page.tags if tag in ("link", "iframe", "base") or "src" in a]
    addresses = [a["href"] or "" for tag, a in page.tags if tag == "a"]
    assert all(address.startswith(("#", "https://")) for address in addresses)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {address[1:] for address in addresses if address.startswith("#")} <= set(ids)
    assert "Not enough data" in page.text  # 18 images are too few for the floors
    shown = embedded(text)["images"]
    assert shown and all(image["picture"].startswith("data:image/") and all(image["maps"]) for image in shown)


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
        assert not re.search(r"[<>&\u2028]", embed([text]))
        assert json.loads(embed([text])) == [text]


def test_the_policy_allows_this_script_only(data: RunData) -> None:
    text = page_of(data)
    digest = base64.b64encode(hashlib.sha256(asset("page.js").encode()).digest()).decode()
    policy = next(a["content"] for tag, a in Page(text).tags if "http-equiv" in a)
    assert policy and f"script-src 'sha256-{digest}';" in policy and "default-src 'none'" in policy
    assert f"<script>{asset('page.js')}</script>" in text


def test_best_floors_and_counts_are_marked(tmp_path: Path) -> None:
    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        found = good(metric, method, random)
        return found - 0.5 if (metric, method) == ("insertion", "layercam") else found

    text = page_of(read_run(make_run(tmp_path / "run", values)))
    row = next(r for r in re.findall(r"<tr>.*?</tr>", text) if '<code class="sub">insertion</code>' in r)
    cells = re.findall(r"<td.*?</td>", row)
    assert cells[0] == '<td class="count">60</td>'
    marked = [i for i, cell in enumerate(cells) if "★" in cell]
    assert len(marked) == 1 and marked[0] in (1, 3)  # never a floor, whatever it scores
    assert "not above random, edges" in re.sub(r"<.*?>", "", cells[2]).replace(
        "edges, random", "random, edges"
    )
    assert [bool("floor" in cell) for cell in cells[1:]] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("shift", "images", "level"),
    [(0.0, 60, "clear"), (0.4, 60, "stop"), (0.4, 20, "thin")],
)
def test_the_verdict_follows_the_floors(tmp_path: Path, shift: float, images: int, level: str) -> None:
    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        sign = 1 if metric == "insertion" else -1
        return good(metric, method, random) - sign * shift * (method not in ("random", "edges"))

    data = read_run(make_run(tmp_path / "run", values, images=images))
    verdict = judge(data)
    floors = [fact for fact in verdict.every if fact.rule == "floors"]
    if level == "thin":
        assert {fact.kind for fact in floors} == {THIN} and "20 images, 30 are needed" in floors[0].sentence
        assert verdict.level != "stop"
        return
    assert verdict.level == level and len(verdict.facts) == 3
    if level == "stop":
        assert verdict.facts[0].kind == FAILURE and "No method beats its floors" in verdict.facts[0].sentence
        assert set(verdict.facts[0].methods) == {"gradcam", "layercam", "lime(samples=9)"}
    else:
        assert "no proof" in verdict.sentence


def missing(folder: Path, **options: Any) -> str:
    """What a run without failures lacks for a favourable verdict."""
    verdict = judge(read_run(make_run(folder, **options)))
    assert verdict.level == "thin" and verdict.missing and "; ".join(verdict.missing) in verdict.sentence
    assert verdict.title == "Not enough data to judge" and not [f for f in verdict.every if f.kind == FAILURE]
    return "; ".join(verdict.missing)


def test_green_needs_a_network_that_is_better_than_chance(tmp_path: Path) -> None:
    """Every map may beat its floors and explain a network that is always wrong, or guesses."""
    never = missing(tmp_path / "never", wrong=1.0)
    assert never == (
        "a network that is better than chance (it is right about 0.0%, 95 % interval 0.0% to 0.0%, n = 60; "
        "the largest class has 50.0%)"
    )
    assert "better than chance" in missing(tmp_path / "guesses", wrong=0.4)
    assert judge(read_run(make_run(tmp_path / "good", wrong=0.2))).level == "clear"


def test_green_needs_answers_that_are_numbers(tmp_path: Path) -> None:
    nan = missing(tmp_path / "nan", confidence=float("nan"))
    assert nan == "answers that are numbers (those to 60 of 60 images are not)"


def test_green_needs_floors_and_a_test_of_faithfulness_of_every_method(tmp_path: Path) -> None:
    def only_gradcam(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        found = good(metric, method, random)
        return found if method != "layercam" else np.where(np.arange(100) < 29, found, np.nan)

    real = METHODS[:3]
    everyone = "gradcam, layercam and lime(samples=9)"
    kinds = "(insertion or deletion beside the floors random and edges, or randomisation)"
    assert missing(tmp_path / "nothing", metrics=()) == (
        f"a comparison of {everyone} with the floors on 30 images; "
        f"a test of faithfulness of {everyone} on 30 images {kinds}"
    )
    assert "with the floors" in missing(tmp_path / "no floors", methods=real)
    assert missing(tmp_path / "few", values=only_gradcam) == (
        "a comparison of layercam with the floors on 30 images; "
        f"a test of faithfulness of layercam on 30 images {kinds}"
    )

    def changed(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        return np.full(100, 0.1) if "randomisation" in metric else good("insertion", method, random)

    place = make_run(tmp_path / "place", changed, metrics=("mask_iou",))
    assert judge(read_run(place)).missing == [f"a test of faithfulness of {everyone} on 30 images {kinds}"]
    both = make_run(tmp_path / "both", changed, metrics=("mask_iou", "randomisation_ssim"))
    assert judge(read_run(both)).level == "clear"


def test_a_network_without_numbers_or_skill_is_never_green(tmp_path: Path) -> None:
    """Real runs: untrained weights with one kind of test, and weights that are NaN."""
    study = make_study(tmp_path / "study", 40, ["gradcam", "random", "edges"], ["cscore", "accuracy", "auc"])
    weights = torch.load(tmp_path / "study/epochs/epoch02.pt", weights_only=True)
    torch.save({k: v * float("nan") for k, v in weights.items()}, tmp_path / "study/epochs/epoch02.pt")
    run_study(study, tmp_path / "out")
    folder = RunFolder.open(tmp_path / "out")
    for checkpoint, lacks in (("epoch01", "better than chance"), ("epoch02", "answers that are numbers")):
        verdict = judge(read_run(folder, checkpoint=checkpoint))
        assert verdict.level == "thin" and lacks in verdict.sentence, verdict.sentence


def test_a_difference_of_nothing_beats_nobody(tmp_path: Path) -> None:
    """What is shown as 0.000 (0.000 to 0.000) is no better, however surely it is above zero."""

    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        return np.full(100, 0.25) + (0.0 if method in ("random", "edges") else 1e-5)

    verdict = judge(read_run(make_run(tmp_path / "run", values, metrics=("insertion",))))
    (fact,) = [fact for fact in verdict.every if fact.rule == "floors"]
    assert fact.kind == FAILURE and "No method beats its floors" in fact.sentence
    assert "is no better than" in fact.sentence and "difference +0.000" in fact.sentence
    assert verdict.level == "stop"


def test_a_method_that_agrees_with_nobody_is_named(tmp_path: Path) -> None:
    def agreement(a: str, b: str) -> float:
        return -0.04 if "lime(samples=9)" in (a, b) else 0.8

    methods = (
        "gradcam",
        "layercam",
        "gradcam++",
        "xgradcam",
        "hirescam",
        "lime(samples=9)",
        "random",
        "edges",
    )
    data = read_run(make_run(tmp_path / "run", methods=methods, agreement=agreement))
    (fact,) = [fact for fact in judge(data).every if fact.rule == "disagreement"]
    assert (fact.kind, fact.methods) == (WARNING, ("lime(samples=9)",))
    assert fact.sentence == (
        "lime(samples=9) stands apart from the other methods: mean rank correlation −0.04 of lime(samples=9) "
        "with the others, where all 15 pairs of methods have 0.52."
    )


def test_a_score_of_no_image_is_not_drawn(tmp_path: Path) -> None:
    """The C-Score of an empty gold list is stored as 0; it is neither a dot at 0 nor a number in a table."""
    section = classes(read_run(make_run(tmp_path / "run", gold=0))).body
    assert section.count(f"{escape(CLASSES[0])}: 0.600") == len(METHODS)
    assert f"{escape(CLASSES[1])}: 0.000" not in section
    assert f"{escape(CLASSES[1])}</bdi> (not defined)" in section
    assert '–<span class="sub">n = 0</span>' in section
    run = Trajectory.from_run(RunFolder.open(tmp_path / "run"))
    table, _ = score_table(run, run.checkpoints[-1])
    assert np.isnan(table[:, 2]).all() and (table[:, 1] == 0.6).all()


def test_an_alarm_about_no_score_has_no_dot() -> None:
    ends = [(0.0, "a"), (1.0, "b")]
    shown, undefined = (
        Markup(LinePanel("t", [], ends, marks=[Mark((0.0, y), "1", "says")])) for y in (0.5, float("nan"))
    )
    assert "<circle" in shown and "<circle" not in undefined and "▲1" in undefined


def test_every_picture_says_which_class_its_map_explains(data: RunData) -> None:
    text = page_of(data)
    for image in embedded(text)["images"]:
        assert image["explains"] == image["label"] != ""
        assert image["which"] == ("true label and prediction" if image["right"] else "true label")
    assert (
        "Every map explains the true label of its picture; for 12 of 60 the network says another class."
        in text
    )
    wanted = Wanted("gradcam")
    rows = list(csv.DictReader(io.StringIO(as_csv(data, wanted))))
    assert [row["explained"] for row in rows] == [row["class"] for row in rows]


def test_a_difference_that_may_be_chance_is_a_warning(tmp_path: Path) -> None:
    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        if metric == "insertion" and method == "gradcam":
            wave = np.resize([0.5, -0.5], 100)
            return 0.33 + wave + np.random.default_rng(9).normal(0, 0.01, 100)
        return good(metric, method, random)

    verdict = judge(read_run(make_run(tmp_path / "run", values)))
    found = [
        (fact.kind, fact.rule, fact.methods) for fact in verdict.every if fact.kind in (FAILURE, WARNING)
    ]
    assert found == [(WARNING, "floors", ("gradcam",))] and verdict.level == "care"
    assert "not surely better than" in verdict.facts[0].sentence


def test_an_alarm_is_a_failure_marked_on_its_chart(tmp_path: Path) -> None:
    data = read_run(make_run(tmp_path / "run", cscores=(0.6, 0.01)))
    assert {alarm.method for alarm in data.alarms} == {"gradcam", "layercam", "lime(samples=9)"}
    verdict = judge(data)
    assert verdict.level == "stop" and verdict.facts[0].rule == "alarms"
    text = page_of(data)
    assert text.count('<g class="alarm">') == 3 and "▲1" in text and '<ol class="alarms">' in text
    assert judge(read_run(RunFolder.open(tmp_path / "run"), checkpoint="epoch01")).level == "care"


def test_blank_maps_randomisation_and_rules_are_judged(tmp_path: Path) -> None:
    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        if metric == "randomisation_ssim":
            return np.full(100, 0.9 if method == "layercam" else 0.1)
        return good(metric, method, random)

    metrics = ("insertion", "randomisation_ssim")
    verdict = judge(read_run(make_run(tmp_path / "run", values, metrics=metrics)))
    failures = [fact for fact in verdict.every if fact.kind == FAILURE]
    assert [(fact.rule, fact.methods) for fact in failures] == [("randomisation", ("layercam",))]
    assert (
        verdict.level == "care" and "No failure was found in gradcam and lime(samples=9)" in verdict.sentence
    )
    assert {fact.rule for fact in verdict.every} == set(RULES)


def test_the_gallery_holds_the_best_the_worst_and_the_disputed(run: RunFolder, data: RunData) -> None:
    real = ["gradcam", "layercam", "lime(samples=9)"]
    merit = np.mean([data.images.scores["insertion", m] for m in real], axis=0)
    found = gallery(data, most=12)
    by: dict[str, list[dict[str, Any]]] = {}
    for key in found["groups"]:
        own = [image for image in found["images"] if key in image["groups"]]
        by[key] = sorted(own, key=lambda image: image["groups"][key])
    order = np.argsort(-merit)
    assert [im["id"] for im in by["best"]] == [data.images.ids[i] for i in order[:4]]
    assert [im["id"] for im in by["worst"]] == [data.images.ids[i] for i in order[::-1][:4]]
    assert len(found["images"]) <= 12 and len(by["disputed"]) == 4
    least = [im["agreement"] for im in by["disputed"]]
    assert least == sorted(least) and max(least) <= min(
        im["agreement"] for im in by["best"] if im not in by["disputed"]
    )
    one = found["images"][0]
    place = data.images.ids.index(one["id"])
    assert one["scores"]["insertion"][1] == pytest.approx(
        data.images.scores["insertion", "layercam"][place], abs=1e-6
    )


def test_a_packed_map_is_the_map() -> None:
    values = torch.rand(2, 5, 7) - 0.2
    packed = pack(Maps("m", values, (50, 70), torch.tensor([0, 1])), 1, "dog")
    read = np.frombuffer(base64.b64decode(packed["data"]), np.uint8).reshape(packed["h"], packed["w"]) / 255
    assert np.abs(read - normalise(values)[1].numpy()).max() <= 0.5 / 255 + 1e-6
    large = pack(Maps("m", torch.rand(1, 224, 224), (224, 224), torch.tensor([0])), 0, "")
    assert (large["h"], large["w"]) == (56, 56)


def test_the_page_lists_every_version_that_made_a_part(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", images=4).path
    seal = next((folder / "seals").glob("*.json"))
    text = seal.read_text()
    version = re.search(r'"heatproof": ?"([^"]+)"', text)
    assert version is not None
    one = page_of(read_run(RunFolder.open(folder)))
    assert re.search(
        rf"<dt>Parts made by</dt><dd>[^<]*heatproof {re.escape(version[1])}[^<]*: \d+ parts?</dd>", one
    )


def test_jet_only_on_request(data: RunData) -> None:
    assert list(embedded(page_of(data))["colours"]) == ["inferno", "viridis", "cividis"]
    assert "jet" in embedded(page_of(data, jet=True))["colours"]


def test_unknown_metrics_and_missing_parts_are_said(tmp_path: Path) -> None:
    extra = [("<my> metric", m, 3.0 + i) for i, m in enumerate(METHODS)]
    data = read_run(make_run(tmp_path / "run", extra=extra, maps=False))
    text = page_of(data)
    page = Page(text)
    assert "<my> metric" in page.text and measure("<my> metric").higher_is_better is None
    row = next(r for r in re.findall(r"<tr>.*?</tr>", text) if "&lt;my&gt; metric" in r)
    assert "★" not in row
    assert "Not in this report" not in page.text
    assert "Pictures: no picture was asked for" in Page(render(data, judge(data), None)).text
    assert all(image["picture"] is None and image["maps"] == [None] * 5 for image in embedded(text)["images"])


def test_the_same_run_gives_the_same_page(run: RunFolder, data: RunData) -> None:
    assert page_of(data) == page_of(read_run(run))


def test_definitions_name_direction_bounds_and_paper(data: RunData) -> None:
    text = Page(page_of(data)).text
    assert "Lower is better. Between 0 and 1." in text and "Petsiuk et al. (2018)" in text
    assert references()["achanta2012slic"].text.startswith("Achanta et al. (2012). SLIC Superpixels")


def test_bad_requests_are_one_sentence(tmp_path: Path, data: RunData) -> None:
    with pytest.raises(StoreError, match="is not a run folder"):
        CliRunner().invoke(report_command, [str(tmp_path)], catch_exceptions=False)
    with pytest.raises(StoreError, match="does not exist; create it first"):
        write_page(data, tmp_path / "nowhere" / "page.html")
    empty = RunFolder.create(tmp_path / "empty", Manifest.collect({}))
    with pytest.raises(StoreError, match="no finished unit yet"):
        read_run(empty)
