"""The localisation study on coloured squares with boxes, and a network that knows nothing but colours."""

from __future__ import annotations

import csv
import json
import math
import signal
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import heatproof as hp
from heatproof.cli import main
from heatproof.cli.study import localise_command
from heatproof.errors import HeatproofError, InputError
from heatproof.explain import baselines as explain_baselines
from heatproof.metrics.localisation import budget_masks
from heatproof.report.tables import number
from heatproof.run import engine, worker
from heatproof.run.config import toml
from heatproof.store import RunFolder
from heatproof.studies.localise import results
from heatproof.studies.localise import results as rules
from heatproof.studies.localise.images import sift
from heatproof.studies.localise.panels import pick_cases, pick_confused
from heatproof.studies.localise.protocol import localise_study
from heatproof.studies.localise.results import LocaliseResults, macro_value, read_scores
from heatproof.studies.settings import BASELINES, LOCALISE_FLOORS, FlagThresholds, LocaliseSettings
from heatproof.types import Maps
from tiny_study import make_study

NETWORK = """
import torch
from torch import nn
from heatproof.images import Preprocess
from heatproof.models import Model

def colours():
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
    net = nn.Sequential(nn.Conv2d(3, 3, 3, 2, 1), nn.ReLU(), *head)
    with torch.no_grad():
        own = torch.eye(3) * 1.5 - 0.5
        net[0].weight.copy_(own[:, :, None, None].expand(3, 3, 3, 3) / 9)
        net[0].bias.fill_(-0.1)
        net[4].weight.copy_(torch.eye(3) * 40)
        net[4].bias.zero_()
    seen = Preprocess((32, 32), 32, (0.0,) * 3, (1.0,) * 3)
    return Model(net, preprocess=seen, classes=("red", "green", "blue"))
"""
SQUARES = [  # class, colour, box
    (0, 0, (4, 4, 19, 19)), (0, 0, (10, 8, 25, 27)), (0, 1, (6, 6, 21, 21)),  # a green one
    (1, 1, (8, 2, 23, 17)), (1, 1, (2, 12, 17, 27)), (2, 2, (12, 12, 29, 25)), (2, 2, (3, 5, 20, 20)),
]  # fmt: skip
TINY = "lime(samples=60, segment_count=16)"


def paint(path: Path, seed: int, colour: int, box: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(seed).integers(90, 130, (32, 32, 1), dtype=np.uint8).repeat(3, 2)
    x0, y0, x1, y1 = box
    pixels[y0 : y1 + 1, x0 : x1 + 1] = 40
    pixels[y0 : y1 + 1, x0 : x1 + 1, colour] = 220
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def make_folder(folder: Path, extra: list[tuple[Any, ...]] = ()) -> Path:  # type: ignore[assignment]
    """An ImageNet-style folder; `extra` adds rows (file, class_index, width, height, x0, y0, x1, y1)."""
    rows = []
    for i, (label, colour, box) in enumerate(SQUARES):
        paint(folder / "images" / f"{i:02d}.png", i, colour, box)
        rows.append((f"{i:02d}.png", label, 32, 32, *box))
    for i, row in enumerate(extra):
        paint(folder / "images" / row[0], 50 + i, 0, (4, 4, 19, 19))
    with (folder / "boxes.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("file", "class_index", "width", "height", "x0", "y0", "x1", "y1"))
        table.writerows([*rows, *extra])
    names = {str(k): [f"n{k}", name] for k, name in enumerate(("red", "green", "blue"))}
    (folder / "class_index.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("squares")
    (folder / "net.py").write_text(NETWORK)
    make_folder(folder / "data")
    return folder


def settings_for(place: Path, out: Path, **changes: Any) -> LocaliseSettings:
    usual: dict[str, Any] = {
        "methods": ("gradcam", TINY), "steps": 10, "panels": 3, "batch_size": 3, "device": "cpu",
        "threads": 1, "target": "label",
    }  # fmt: skip
    usual |= {"model": f"{place / 'net.py'}:colours", "images": place / "data", "out": out}
    return LocaliseSettings(**(usual | changes))


@pytest.fixture(scope="module")
def finished(place: Path) -> Any:
    settings = settings_for(place, place / "out")
    return settings, localise_study(settings)


@pytest.fixture(scope="module")
def scored(finished: Any) -> LocaliseResults:
    return read_scores(finished[1].run.folder, 0.2)


def test_tables_equal_a_slow_twin(finished: Any, scored: LocaliseResults) -> None:
    """Every cell again with loops over pixels, from the stored maps."""
    outcome = finished[1]
    table = outcome.book.tables["localisation"]
    for method in ("gradcam", TINY, "edges"):
        sums: dict[str, dict[int, list[float]]] = {}
        for i, (label, _, box) in enumerate(SQUARES):
            heat = outcome.run.folder.maps().read("own", method, [f"{i:02d}.png"]).upsample()[0].tolist()
            for name, value in slow_localise(heat, box).items():
                sums.setdefault(name, {}).setdefault(label, []).append(value)
        row = [cells[0] for cells in table.rows].index(method)
        for column, name in enumerate(("mask_iou", "box_iou", "inside", "pointing"), 3):
            by_class = [np.nanmean(values) for values in sums[name].values()]
            assert number(table.rows[row][column]) == pytest.approx(sum(by_class) / 3, abs=1e-6), (
                method,
                name,
            )
        blank = sum(math.isnan(value) for values in sums["inside"].values() for value in values)
        assert table.rows[row][1] == len(SQUARES) - blank and blank == (method == "gradcam")


def slow_localise(heat: list[list[float]], box: tuple[int, ...]) -> dict[str, float]:
    pixels = sorted((-heat[y][x], y, x) for y in range(32) for x in range(32))
    marked = {(y, x) for value, y, x in pixels[: int(0.2 * 32 * 32)] if value < 0}
    x0, y0, x1, y1 = box
    truth = {(y, x) for y in range(y0, y1 + 1) for x in range(x0, x1 + 1)}
    if not marked:  # blank: 02.png, which is green, explained as red
        return {"mask_iou": math.nan, "box_iou": math.nan, "inside": math.nan, "pointing": 0.0}
    ys, xs = [y for y, _ in marked], [x for _, x in marked]
    tight = {(y, x) for y in range(min(ys), max(ys) + 1) for x in range(min(xs), max(xs) + 1)}
    return {
        "mask_iou": len(marked & truth) / len(marked | truth),
        "box_iou": len(tight & truth) / len(tight | truth),
        "inside": len(marked & truth) / len(marked),
        "pointing": float((pixels[0][1], pixels[0][2]) in truth and pixels[0][0] < 0),
    }


def test_faithfulness_and_recall_equal_the_library(
    place: Path, finished: Any, scored: LocaliseResults
) -> None:
    model = hp.load_model(f"{place / 'net.py'}:colours")
    images = torch.stack(
        [model.preprocess(Image.open(place / "data/images" / f"{i:02d}.png")) for i in range(7)]
    )
    labels = torch.tensor([label for label, _, _ in SQUARES])
    ids = [f"{i:02d}.png" for i in range(7)]
    maps = finished[1].run.folder.maps().read("own", TINY, ids)
    walked = hp.metrics.insertion_deletion(maps, labels, model=model, images=images, steps=10)
    table = finished[1].book.tables["faithfulness"]
    row = [cells[0] for cells in table.rows].index(TINY)
    for column, areas in ((3, walked.insertion_auc), (4, walked.deletion_auc)):
        means = [areas[labels == c].mean().item() for c in range(3)]
        assert number(table.rows[row][column]) == pytest.approx(sum(means) / 3, abs=1e-5)
    assert scored.curve(TINY, "deletion", "03.png") == pytest.approx(walked.deletion[3].tolist(), abs=1e-5)
    recall = {c: sum(v) / len(v) for c, v in scored.recall().items()}
    assert recall == {0: pytest.approx(2 / 3), 1: 1.0, 2: 1.0}
    stored = (
        finished[1].run.folder.scores().sql("select value from scores where metric = 'recall' and label = 0")
    )
    assert stored[0]["value"] == pytest.approx(2 / 3)


def test_floors_stand_beside_the_methods_and_do_not_compete(finished: Any) -> None:
    table = finished[1].book.tables["localisation"]
    names = [row[0] for row in table.rows]
    assert names == ["gradcam", TINY, *LOCALISE_FLOORS, "Grad-CAM (thesis)", "LIME (thesis)"]
    assert {i for i, _ in table.marks()} <= {0, 1}


def test_baselines_are_the_library_s() -> None:
    assert BASELINES == explain_baselines.BASELINES


def test_the_page_says_what_was_left_and_what_was_found(finished: Any, scored: LocaliseResults) -> None:
    page = finished[1].page.read_text()
    assert "7 whose box covers 10% to 80% of the image" in page
    agree = sum(order.agrees for order in results.orders(scored))
    assert f"LIME on all five means. Here it is ahead on {agree} of 5" in page
    assert "faithfulness.png" in page and (finished[0].out / "figures" / "budgets.png").exists()
    assert (finished[0].out / "tables" / "classes.csv").read_text().count("\n") == 1 + 3 * 5


def test_the_order_of_two_methods_is_judged_image_by_image(scored: LocaliseResults) -> None:
    for order in results.orders(scored):
        ahead = []
        for label in range(3):
            ours, theirs = (scored.column(method, order.metric) for method in ("gradcam", TINY))
            apart = [ours[i] - theirs[i] for i, c in scored.labels.items() if c == label]
            apart = [value for value in apart if not math.isnan(value)]  # one Grad-CAM map is constant
            ahead.append((-1 if order.metric == "deletion" else 1) * sum(apart) / len(apart))
        assert order.difference.value == pytest.approx(sum(ahead) / 3, abs=1e-9)
        between = order.ours[0].value - order.ours[1].value
        assert abs(between) == pytest.approx(abs(order.difference.value), abs=1e-9)
        assert order.agrees == (sum(ahead) > 0)
        assert order.difference.interval is not None
        lower, upper = order.difference.interval
        assert order.certain == (lower > 0 or upper < 0)


def test_published_classes_give_all_published_means(papers: dict[str, Any]) -> None:
    """The thesis's 43 classes through the code that makes our class tables, and the constants we show."""
    thesis = papers["thesis"]
    columns = [
        {int(c): [v[2][k]] for c, v in thesis[key].items()}
        for key, count in (("t2", 6), ("t3", 5))
        for k in range(count)
    ]
    classes = {int(c): v[0] for c, v in thesis["t2"].items()}
    sizes = {int(c): v[1] for c, v in thesis["t2"].items()}
    rows = results.class_rows(classes, sizes, columns)
    means = [number(cell) for cell in rows[-1][3:]]
    assert means == pytest.approx([*thesis["t2_mean"], *thesis["t3_mean"]], abs=1e-12)
    box, mask, pointing = means[0:2], means[2:4], means[4:6]
    ours = [*box, *mask, *pointing, *means[7:11]]
    published = [value for name in results.THESIS for value in results.THESIS[name]]
    assert published == [round(value, 4) for value in ours] and round(means[6], 4) == results.THESIS_RECALL
    assert rows[-1][2] == 1122 and len(rows) == 44


def test_macro_interval_is_a_bootstrap_within_classes() -> None:
    groups = {0: [0.0, 1.0, 1.0, 0.0], 1: [0.5, math.nan], 2: [0.2, 0.4], 3: [math.nan]}
    value = macro_value(groups, seed=3, resamples=50)
    assert value.value == pytest.approx((0.5 + 0.5 + 0.3) / 3) and value.n == 7
    own = [[-0.5, 0.5, 0.5, -0.5], [0.0], [-0.1, 0.1]]
    scaled = [
        np.array(deviations) * math.sqrt(n / max(n - 1, 1)) for deviations in own for n in [len(deviations)]
    ]
    scaled[1] = np.concatenate([scaled[0], scaled[2]])  # a single image has no deviation of its own
    means = np.full(50, value.value)
    for i, (deviations, size) in enumerate(zip(scaled, (4, 1, 2), strict=True)):
        drawn = np.random.default_rng((3, i)).integers(0, len(deviations), (50, size))
        means += [np.mean([deviations[k] for k in row]) / 3 for row in drawn]
    assert value.interval == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))
    assert macro_value({0: [1.0], 1: [0.0]}).interval is None and math.isnan(macro_value({}).value)


def test_macro_interval_holds_its_value_where_classes_are_small() -> None:
    """Ten classes with one image each: drawn from all images, four of ten are missing in every resample."""
    groups = {c: [0.0, 0.1] * 20 for c in range(10)} | {c: [1.0] for c in range(10, 20)}
    value = macro_value(groups)
    assert value.value == pytest.approx(0.525) and value.interval is not None
    assert value.interval[0] < value.value < value.interval[1]


@pytest.mark.parametrize("sizes", [(40,) * 8 + (3, 1) * 4, (5,) * 16])
def test_macro_interval_covers_the_true_mean(sizes: tuple[int, ...]) -> None:
    """In about 95 % of 400 simulated data sets; the first has its high values in small classes."""
    random, truths, hits = np.random.default_rng(0), [0.2] * 8 + [0.8] * 8, 0
    for _ in range(400):
        pairs = enumerate(zip(sizes, truths, strict=True))
        groups = {c: random.beta(2 * p, 2 * (1 - p), n) for c, (n, p) in pairs}
        low, high = macro_value(groups, resamples=300).interval or (math.nan, math.nan)  # type: ignore[arg-type]
        hits += low <= 0.5 <= high
    assert 0.9 <= hits / 400 <= 0.98, hits / 400


def one_image(**values: float) -> LocaliseResults:
    """A run of one image and one method with these values; by default nothing is wrong with it."""
    usual = {"pointing": 1.0, "insertion": 0.8, "inside": 0.9, "reachable(budget=0.05)": 0.05 / 0.4,
             "reachable(budget=0.1)": 0.1 / 0.4, "guess": 0, "chance": 0.9}  # fmt: skip
    given = usual | values
    scored = LocaliseResults("own", ("gradcam", "random"), ("red", "green"), 0.2, ("insertion", "deletion"))
    scored.labels["a"], scored.predicted["a"] = 0, int(given.pop("guess"))
    scored.chances["a", scored.predicted["a"]] = given.pop("chance")
    for p in range(0, 101, 10):
        given.setdefault(f"deletion_at_{p}", 0.9 * (1 - p / 100))
    for name, value in given.items():
        scored.values["gradcam", name] = {"a": value}
        scored.values["random", name] = {"a": 0.0}
    return scored


@pytest.mark.parametrize(
    ("values", "overlap", "kinds"),
    [
        ({}, 0.6, set()),
        ({"insertion": 0.29}, 0.6, {rules.HIT}),
        ({"insertion": 0.29, "pointing": 0.0}, 0.6, set()),
        ({"insertion": 0.3}, 0.6, set()),
        ({"inside": 0.49}, 0.6, {rules.OFF}),
        ({"inside": 0.51}, 0.6, set()),
        ({"inside": 0.49, "insertion": 0.59}, 0.6, set()),
        # A box of 5 % leaves room for a quarter of the budget: half of that is enough.
        ({"inside": 0.2, "reachable(budget=0.05)": 1.0, "reachable(budget=0.1)": 0.5}, 0.6, set()),
        ({"inside": 0.1, "reachable(budget=0.05)": 1.0, "reachable(budget=0.1)": 0.5}, 0.6, {rules.OFF}),
        ({"guess": 1}, 0.6, {rules.WRONG}),
        ({"guess": 1, "chance": 0.45}, 0.6, set()),
        ({"deletion_at_30": 1.01}, 0.6, {rules.RISING}),
        ({"deletion_at_30": 0.99}, 0.6, set()),
        ({}, 0.2, {rules.DISAGREE}),
        ({}, 0.21, set()),
        ({}, math.nan, set()),
        ({"insertion": math.nan, "inside": math.nan, "deletion_at_0": math.nan}, 0.6, set()),
    ],
)  # fmt: skip
def test_flags_are_raised_where_the_rule_says(
    values: dict[str, float], overlap: float, kinds: set[str]
) -> None:
    flags = rules.raise_flags(one_image(**values), {"a": overlap}, FlagThresholds())
    assert {flag.kind for flag in flags} == kinds
    assert all(flag.image == "a" and flag.method in ("", "gradcam") for flag in flags)


def test_thresholds_are_settings() -> None:
    loose = FlagThresholds(low_insertion=0.1, confident=0.95, overlap=0.5)
    assert not rules.raise_flags(one_image(insertion=0.2, guess=1), {"a": 0.51}, loose)
    assert "below 0.1" in results.flag_rows([], one_image(), loose)[0][3]


def test_overlap_equals_sets_of_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = {
        name: Maps(name, torch.rand(2, 4, 4, generator=generator), (8, 8), torch.zeros(2).long(), ("a", "b"))
        for name in "xyz"
    }
    maps["z"].values[1] = 0  # constant: says nothing
    overlap = rules.overlap_of_methods(maps, 0.25)
    masks = {name: budget_masks(values, 0.25) for name, values in maps.items()}
    pairs = [(masks[a][0] & masks[b][0]).sum().item() / 16 for a, b in combinations("xyz", 2)]
    assert overlap["a"] == pytest.approx(sum(pairs) / 3)
    assert overlap["b"] == pytest.approx((masks["x"][1] & masks["y"][1]).sum().item() / 16)


def test_a_wrongly_labelled_square_is_flagged_and_shown(finished: Any, scored: LocaliseResults) -> None:
    """02.png is green but labelled red: the network is sure that it is green."""
    table = finished[0].out / "tables" / "flagged_images.csv"
    rows = list(csv.DictReader(table.read_text().splitlines()))
    wrong = [row for row in rows if row["Flag"] == rules.WRONG]
    assert [(row["image"], row["true class"], row["predicted"]) for row in wrong] == [
        ("02.png", "red", "green")
    ]
    assert [image for image, _ in pick_confused(scored, 5)] == ["02.png"]
    flags = [rules.Flag(row["Flag"], row["image"], row["method"], 1.0, "") for row in rows]
    picked = pick_cases(scored, flags, 4)
    assert len(picked) == 4 and "02.png" in dict(picked)


def test_panels_hold_every_view(finished: Any) -> None:
    names = sorted(path.name for path in finished[1].panels)
    assert "confused-02.png" in names and sum(name.startswith("case-") for name in names) == 3
    for path in finished[1].panels:
        picture = np.asarray(Image.open(path).convert("RGB")).astype(int)
        width = picture.shape[1] // 6  # a case, or a confused image beside a correct one
        for i in range(6):  # no view is blank
            tile = picture[40:-50, i * width + 20 : (i + 1) * width - 10]
            assert (tile.max(2) - tile.min(2) > 40).mean() > 0.002, (path.name, i)
    case = np.asarray(Image.open(finished[0].out / "panels" / "case-00.png").convert("RGB")).astype(int)
    red, green = ((np.abs(case - colour) < 12).all(2).sum() for colour in ((213, 40, 30), (0, 158, 60)))
    assert red > 100 and green > 100  # both curves


def test_a_killed_study_goes_on(
    place: Path, finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, left = worker.Worker.run, [1]
    computed: list[str] = []

    def killed(self: worker.Worker, tasks: Any, *more: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        computed.extend(unit.hash for unit in tasks)
        run(self, tasks, *more)

    monkeypatch.setattr(worker.Worker, "run", killed)
    settings = settings_for(place, tmp_path / "out", panels=0)
    with pytest.raises(KeyboardInterrupt):
        localise_study(settings)
    assert len(RunFolder.open(tmp_path / "out" / "run").done()) == 1
    left[0] = 99
    again = localise_study(settings)
    assert len(computed) == len(set(computed)) == 3  # batches of three, none twice
    assert again.run.folder.scores().digest() == finished[1].run.folder.scores().digest()
    both = [book.tables["localisation"].csv() for book in (again.book, finished[1].book)]
    assert both[0] == both[1]


def test_ctrl_c_ends_the_study_after_the_unit_in_hand(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = worker.Worker.run

    def pressed(self: worker.Worker, *given: Any) -> None:
        run(self, *given)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(worker.Worker, "run", pressed)
    command = f"study localise --model {place / 'net.py'}:colours --images {place / 'data'} --methods gradcam"
    result = CliRunner().invoke(main, [*command.split(), "--batch-size", "3", "--out", str(tmp_path / "out")])
    assert result.exit_code == 130, result.output
    assert f"to resume: heatproof {command}" in " ".join(result.output.split())
    assert len(RunFolder.open(tmp_path / "out" / "run").done()) == 1
    assert not (tmp_path / "out" / "summary.md").exists()


def test_the_report_is_rebuilt_without_a_model(
    finished: Any, scored: LocaliseResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hp.Model, "forward", lambda *_: pytest.fail("the model was asked"))
    flags = rules.find_flags(scored, RunFolder.open(finished[0].out / "run"), finished[0].thresholds)
    make = results.TABLES.page(**results.table_content(scored, {}, flags, finished[0].thresholds))
    written = {name: of.csv() for name, of in finished[1].book.tables.items() if name != "centre"}
    assert {name: make(name).csv() for name in written} == written  # objects' centres need their images
    assert set(results.report_figures(scored)) == set(finished[1].book.figures)


def test_bad_entries_are_set_aside_and_the_rest_goes_on(place: Path, tmp_path: Path) -> None:
    extra = [
        ("nobox.png", 0, 32, 32, "", "", "", ""),
        ("outside.png", 0, 32, 32, 4, 4, 60, 20),
        ("unknown.png", 7, 32, 32, 4, 4, 20, 20),
        ("back.png", 0, 32, 32, 20, 4, 4, 20),
        ("broken.png", 1, 32, 32, 4, 4, 20, 20),
        *((f"more{i}.png", 2, 32, 32, 4, 4, 19, 19) for i in range(3)),
    ]
    data = make_folder(tmp_path / "data", extra)
    paint(data / "images" / "unlisted.png", 9, 0, (4, 4, 9, 9))
    (data / "images" / "broken.png").write_bytes(b"no image")
    settings = replace(settings_for(place, tmp_path / "out", methods=("gradcam",), panels=0), images=data)
    outcome = localise_study(settings)
    reasons = dict(outcome.sifted.aside)
    assert reasons["nobox.png"] == reasons["unlisted.png"] == "it has no box"
    assert "reaches outside the 32x32 image; write x0, y0, x1, y1" in reasons["outside.png"]
    assert "its class '7' is not in the list of 3 classes" in reasons["unknown.png"]
    assert "boxes.csv, line 12: the box (20, 4, 4, 20) runs backwards" in reasons["back.png"]
    assert len(reasons) == 5 and [row["image"] for row in outcome.run.broken] == ["broken.png"]
    assert len(read_scores(outcome.run.folder, 0.2).images) == len(SQUARES) + 3
    page = outcome.page.read_text() if outcome.page else ""
    assert "Set aside (5)" in page and "Could not be read (1)" in page


def test_boxes_of_width_and_height_are_refused(place: Path, tmp_path: Path) -> None:
    data = make_folder(tmp_path / "data", [(f"w{i}.png", 0, 32, 32, 20, 20, 10, 10) for i in range(3)])
    with pytest.raises(
        InputError, match=r"3 of 10 images have boxes that run backwards.*x, y, width, height"
    ):
        localise_study(replace(settings_for(place, tmp_path / "out"), images=data))


def test_what_cannot_work_raises_a_clear_error(place: Path, tmp_path: Path) -> None:
    usual = settings_for(place, tmp_path / "out")
    (tmp_path / "weights.pt").write_bytes(b"not weights")
    bare = tmp_path / "bare" / "images"
    paint(bare / "a.png", 0, 0, (4, 4, 19, 19))
    for changes, words in (
        ({"images": bare.parent}, "neither boxes.csv nor XML box files"),
        ({"images": tmp_path / "nowhere"}, "there is no folder"),
        ({"checkpoint": tmp_path / "weights.pt"}, "weights.pt"),
        ({"methods": ("gradcan",)}, "did you mean 'gradcam'"),
        ({"budget": 20}, "write 0.2 for 20 %"),
        ({"kind": "folder"}, "kind cannot be 'folder'; known: imagenet, csv"),
        ({"box_share": (0.9, 0.95)}, "no image is left"),
    ):
        with pytest.raises(HeatproofError, match=words) as error:
            localise_study(replace(usual, **changes))
        assert "\n" not in str(error.value)


def test_a_run_says_that_a_box_was_cropped_away(tmp_path: Path) -> None:
    study = make_study(
        tmp_path, images=4, methods=["gradcam"], metrics=["pointing"], checkpoints="epochs/epoch01.pt"
    )
    boxes = ["0,0,1,35", ",,,", "4,4,30,30", "20,20,20,20"]  # of 40 columns the crop takes the middle
    names = sorted(f.relative_to(tmp_path) for f in (tmp_path / "pictures").rglob("*.png"))
    lines = [f"{name},{name.parent.name},{box}" for name, box in zip(names, boxes, strict=True)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,x0,y0,x1,y1", *lines]))
    study.write_text(study.read_text().replace('"folder"', '"csv"').replace('"pictures"', '"list.csv"'))
    rows = (
        engine.run_study(study, tmp_path / "out")
        .folder.scores()
        .sql("select image, value, reason from scores where metric = 'pointing' order by image")
    )
    gone = "the box (0, 0, 1, 35) was cropped or shrunk away: "
    gone += "it holds no pixel of the 32x32 crop that the model sees"
    assert [row["reason"] for row in rows] == [gone, "the image has no box and no mask pixel", "", ""]
    assert [math.isnan(row["value"]) for row in rows] == [True, True, False, False]


def test_xml_boxes_and_csv_manifests(tmp_path: Path) -> None:
    data = make_folder(tmp_path / "data")
    for i, (label, _, (x0, y0, x1, y1)) in enumerate(SQUARES):
        corners = f"<xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax>"
        (data / f"{i:02d}.xml").write_text(
            f"<annotation><object><name>n{label}</name><bndbox>{corners}</bndbox></object></annotation>"
        )
    (data / "boxes.csv").unlink()
    (data / "00.xml").write_text("<annotation><object>")
    by_xml = sift("imagenet", data, 3)
    assert [left_out.image for left_out in by_xml.aside] == ["00.png"] and len(by_xml.entries) == 6
    assert [(e.image, label, *e.boxes) for e, label in by_xml.entries] == [
        (f"{i:02d}.png", label, box) for i, (label, _, box) in enumerate(SQUARES) if i
    ]
    (data / "images" / "n0").mkdir()  # the folder names the class, a second object has another
    (data / "images" / "01.png").rename(data / "images" / "n0" / "01.png")
    second = (data / "02.xml").read_text().removeprefix("<annotation>").replace("<name>n", "<name>other")
    (data / "01.xml").write_text(
        (data / "01.xml").read_text().replace("<name>n1", "<name>n0").removesuffix("</annotation>") + second
    )
    reasons = dict(sift("imagenet", data, 3).aside)
    assert reasons["n0/01.png"].startswith("it has boxes of other classes too (other")
    lines = ["path,label,x0,y0,x1,y1"]
    lines += [f"images/{i:02d}.png,{('red', 'green', 'blue')[c]},{','.join(map(str, b))}"
              for i, (c, _, b) in enumerate(SQUARES)]  # fmt: skip
    lines.append("images/00.png2,mauve,4,4,19,19")
    (data / "list.csv").write_text("\n".join(lines))
    by_list = sift("csv", data / "list.csv", 3, ("red", "green", "blue"))
    assert "its class 'mauve' is not in the list of 3 classes" in by_list.aside[0].reason
    assert [label for _, label in by_list.entries] == [label for label, _, _ in SQUARES]


def test_the_predicted_class_may_be_explained(place: Path, tmp_path: Path) -> None:
    usual = settings_for(place, tmp_path / "out", methods=("gradcam",), target="predicted", panels=1)
    outcome = localise_study(replace(usual, preprocess="own"))
    scores = read_scores(outcome.run.folder, 0.2)
    assert scores.explained == scores.predicted and (tmp_path / "out/panels/confused-02.png").exists()


def test_command_from_an_empty_directory(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    (tmp_path / "study.toml").write_text(
        toml({"model": f"{place / 'net.py'}:colours", "images": str(place / "data"), "steps": 5, "panels": 1,
              "methods": ["gradcam", TINY], "device": "cpu", "threads": 1, "limit": 6, "out": "of-the-file"})
    )  # fmt: skip
    result = CliRunner().invoke(
        localise_command, [str(tmp_path / "study.toml"), "--out", "here", "--limit", "4"]
    )
    assert result.exit_code == 0, (result.output, result.exception)
    assert "Localisation" in result.output and "gradcam" in result.output
    assert (tmp_path / "empty/here/summary.md").exists() and not (tmp_path / "of-the-file").exists()
    scored = read_scores(RunFolder.open("here/run"), 0.2)
    assert len(scored.images) == 4 and set(LOCALISE_FLOORS) < set(scored.methods)
    lacking = CliRunner().invoke(localise_command, [])
    assert isinstance(lacking.exception, InputError) and "--model is missing" in str(lacking.exception)
    assert "Three control maps" in CliRunner().invoke(localise_command, ["--help"]).output


def test_the_example_is_understood() -> None:
    example = Path(__file__).parents[2] / "examples" / "localise.toml"
    given = localise_command.make_context("localise", [str(example), "--limit", "9"]).params
    assert given["methods"].startswith("gradcam,lime,gradcam++") and given["box_share"] == (0.1, 0.8)
    assert given["images"] == example.parent / "imagenet" and given["limit"] == 9


def test_a_csv_of_class_names_can_be_told_the_models_classes(tmp_path: Path) -> None:
    make_folder(tmp_path / "squares")
    (tmp_path / "net.py").write_text(NETWORK.replace(', classes=("red", "green", "blue")', ""))
    names = ("crimson", "lime", "navy")
    rows = [
        f"{tmp_path}/squares/images/{file.name},{names[label]},{','.join(map(str, box))}"
        for file, (label, _, box) in zip(
            sorted((tmp_path / "squares" / "images").iterdir()), SQUARES, strict=True
        )
    ]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,x0,y0,x1,y1", *rows]))
    command = [
        "--model", f"{tmp_path}/net.py:colours", "--kind", "csv", "--images", f"{tmp_path}/list.csv",
        "--methods", "gradcam", "--steps", "4", "--panels", "0", "--out", f"{tmp_path}/out",
    ]  # fmt: skip
    refused = CliRunner().invoke(localise_command, command)
    assert isinstance(refused.exception, InputError)
    assert "name the model's classes with --class-names" in str(refused.exception)
    two = CliRunner().invoke(localise_command, [*command, "--class-names", "crimson,lime"])
    assert "class_names lists 2 names, but net.py:colours has 3 classes" in str(two.exception)
    done = CliRunner().invoke(localise_command, [*command, "--class-names", ", ".join(names)])
    assert done.exit_code == 0, done.output
    labels = RunFolder.open(tmp_path / "out" / "run").scores().sql("select distinct label from scores")
    assert {row["label"] for row in labels} >= {0, 1, 2}
    assert RunFolder.open(tmp_path / "out" / "run").manifest.classes == list(names)
