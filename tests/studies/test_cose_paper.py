"""COSE, the last items of the paper: eq. 4, the authors' settings, families, significance, several labels."""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from scipy.stats import pearsonr, spearmanr, wilcoxon
from torch import nn

from heatproof.cli import main
from heatproof.explain.api import explain
from heatproof.images import Preprocess
from heatproof.images.transforms import TRANSFORMS
from heatproof.metrics.agreement import REASONS, Correlation
from heatproof.metrics.stability import alike, comparable
from heatproof.models import Model
from heatproof.models.heads import Multilabel
from heatproof.store import RunFolder
from heatproof.studies.cose.protocol import cose_study
from heatproof.studies.cose.results import maps_of, paired_families, significance
from heatproof.studies.settings import CoseSettings
from heatproof.types import Maps
from tiny_study import make_study


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("paper")
    make_study(folder, images=6)
    shutil.copy(folder / "epochs" / "epoch02.pt", folder / "epochs" / "epoch01b.pt")  # keeps all predictions
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    yield folder
    patch.undo()


@pytest.fixture(scope="module")
def done(place: Path) -> Any:
    return cose_study(
        CoseSettings(
            model="net.py:tiny",
            images="pictures",
            checkpoints=("epochs/*.pt",),
            draws=2,
            device="cpu",
            methods=("gradcam", "gradient"),
            unit_images=3,
            figures=False,
            out=place / "plain",
        )
    )


def test_consistency_leaves_checkpoints_out_and_the_pooled_number_does_not(done: Any) -> None:
    rows = done.folder.scores().sql("select method, metric, value from scores where metric like 'cose_%'")
    for method in ("gradcam", "gradient"):
        sums: dict[str, list[float]] = {"inputs": [], "models": [], "changed": []}
        for row in rows:
            if row["method"] == method and not math.isnan(row["value"]):
                kind = "models" if "(checkpoint," in row["metric"] else "inputs"
                sums["changed" if "changed" in row["metric"] else kind].append(row["value"])
        sensitivity = 1 - np.mean(sums["changed"])
        for scores, same in ((done.results.scores, sums["inputs"]),
                             (done.results.pooled, sums["inputs"] + sums["models"])):  # fmt: skip
            expected = 200 * np.mean(same) * sensitivity / (np.mean(same) + sensitivity)
            assert scores[method].consistency == pytest.approx(np.mean(same))
            assert scores[method].value == pytest.approx(expected) and scores[method].n_same == len(same)
        assert sums["models"], "the checkpoints of this study keep some predictions"
    table = done.book.tables["cose"]
    heads = [column.name for column in table.columns]
    assert heads.index("pooled COSE, %") == heads.index("COSE, %") + 1
    leader = max(done.results.scores, key=lambda m: done.results.scores[m].value)
    assert (
        f"{leader} has the highest COSE, {done.results.scores[leader].value:.2f} %" in done.page.read_text()
    )


def test_spearman_is_scipys() -> None:
    first, second = torch.rand(2, 3, 9, 11, generator=torch.Generator().manual_seed(0))
    second[0] = second[0].round(decimals=1)  # ties
    mask = torch.zeros(3, 9, 11, dtype=torch.bool)
    mask[:, 2:7, 1:8] = True
    for counted in (None, mask):
        value, why = alike(first, second, counted, "spearman")
        for i in range(3):
            chosen = mask[i] if counted is not None else torch.ones(9, 11, dtype=torch.bool)
            expected = spearmanr(first[i][chosen].numpy(), second[i][chosen].numpy()).statistic
            assert value[i].item() == pytest.approx(expected, abs=1e-6) and why[i] == 0
    value, why = alike(first[:1], torch.full((1, 9, 11), 0.5), None, "spearman")
    assert value.isnan().all() and "constant" in REASONS[why.item()]


def test_gradients_of_the_probability_and_not_of_cams(cnn: nn.Module) -> None:
    model = Model(cnn, preprocess=Preprocess(size=(32, 32), resize=32))
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    methods = ["gradcam", "gradient", "ig(steps=3, rule='trapezoid')"]
    maps = maps_of(model, images, methods, of_probability=True)
    assert list(maps) == methods
    plain = explain(model, images, methods)
    assert torch.equal(maps["gradcam"].values, plain["gradcam"].values)
    classes = plain["gradient"].explained
    assert torch.equal(maps["gradient"].explained, classes)

    def slope(inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone().requires_grad_()
        cnn.eval()(inputs).softmax(1).gather(1, classes[:, None]).sum().backward()
        assert inputs.grad is not None
        return inputs.grad

    assert torch.allclose(maps["gradient"].values, slope(images).abs().sum(1), atol=1e-7)
    path = slope(0 * images) / 4 + slope(images / 2) / 2 + slope(images) / 4
    assert torch.allclose(maps[methods[2]].values, (images * path).abs().sum(1), atol=1e-7)


def test_signs_are_compared_unchanged() -> None:
    values = torch.tensor([[[-1.0, 0.0], [1.0, 0.0]], [[-2.0, 0.0], [1.0, 0.5]], [[0.0, 1.0], [1.0, 1.0]]])
    maps = Maps("m", values, (2, 2), torch.zeros(3))
    assert torch.equal(comparable(maps)[0], values[0])
    assert torch.equal(comparable(maps)[1:], maps.upsample()[1:])


def test_lime_of_the_authors_is_the_mask_of_the_lime_package(cnn: nn.Module) -> None:
    """Its ten strongest segments with their signs, by the package's own function for masks."""
    lime_image = pytest.importorskip("lime.lime_image")
    from heatproof.explain.baselines import segments_of

    model = Model(cnn, preprocess=Preprocess(size=(32, 32), resize=32))
    rough = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    images = torch.nn.functional.interpolate(rough, 32)
    plain, signs = (
        f"lime(samples=80, segment_count=25, form='published', fill='zero'{more})"
        for more in ("", ", top=10")
    )
    maps = explain(model, images, [plain, signs])
    segments = segments_of(model, images, "slic", 25)[0].numpy()
    weights = [maps[plain].values[0].numpy()[segments == k][0] for k in range(segments.max() + 1)]
    package = lime_image.ImageExplanation(images[0].permute(1, 2, 0).numpy(), segments)
    package.local_exp[0] = sorted(enumerate(weights), key=lambda pair: -abs(pair[1]))
    _, mask = package.get_image_and_mask(0, positive_only=False, num_features=10, hide_rest=False)
    assert len(weights) > 10 and np.array_equal(maps[signs].values[0].numpy(), mask)
    assert set(np.unique(mask)) == {-1, 0, 1}


def test_fill_hides_segments_with_a_colour(cnn: nn.Module) -> None:
    """Slow twin: the weighted ridge regression of scikit-learn on images whose hidden segments are 0."""
    linear = pytest.importorskip("sklearn.linear_model")
    from heatproof.explain.baselines import segments_of
    from heatproof.explain.masking import proximity, sample_rows

    model = Model(cnn, preprocess=Preprocess(size=(32, 32), resize=32))
    images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    maps = explain(model, images, ["lime(samples=30, segment_count=9, form='published', fill='zero')"], [1])
    (heat,) = next(iter(maps.values())).values
    segments = segments_of(model, images, "slic", 9)[0]
    rows = sample_rows([int(segments.max())], 30, 0, "published")
    inputs = torch.stack([images[0] * row[segments] for row in rows[0]])
    with torch.no_grad():
        scores = cnn(inputs).softmax(1)[:, 1]
    fit = linear.Ridge(alpha=1.0).fit(rows[0].double(), scores.double(), proximity(rows)[0])
    expected = torch.from_numpy(fit.coef_)[segments]
    assert torch.allclose(heat.double(), expected, atol=1e-6)


def test_families_on_the_published_table(papers: dict[str, Any]) -> None:
    """The paper says higher for every data set and method; its table has one exception."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for dataset, model, row in papers["cose"]["rows"]:
        family = "CNN" if model in ("ConvNext", "ResNet50") else "transformer"
        for method, score in zip(papers["cose"]["methods"], row, strict=True):
            values.setdefault((dataset, family, method), []).append(score)
    test = paired_families(values)
    assert test is not None and len(test.rows) == 35
    apart = [
        np.mean(of) - np.mean(values[d, "CNN", m]) for (d, f, m), of in values.items() if f == "transformer"
    ]
    assert test.ahead == sum(gap > 0 for gap in apart) == 34 and test.median == pytest.approx(
        np.median(apart)
    )
    assert test.p == pytest.approx(wilcoxon(apart).pvalue) and test.p < 0.05
    assert paired_families({("a", "CNN", "m"): [1.0]}) is None
    same = paired_families({("a", "CNN", "m"): [1.0], ("a", "transformer", "m"): [1.0]})
    assert same is not None and same.p == 1 and same.ahead == 0


def test_significance_is_a_sentence() -> None:
    accuracy = np.array([0.2, 0.4, 0.5, 0.8, 0.9])
    series = {"up": accuracy**2, "down": 1 - accuracy, "flat": np.array([0.5, 0.1, 0.4, 0.2, 0.45])}
    measured = {m: pearsonr(v, accuracy) for m, v in series.items()}
    fits = {m: Correlation(float(of.statistic), float(of.pvalue), 5) for m, of in measured.items()}
    text = significance(fits | {"none": Correlation(math.nan, math.nan, 2, "few")})
    assert (
        text.startswith("At 0.05") and "up rise with accuracy" in text and "down fall with accuracy" in text
    )
    assert "flat are not significant" in text and "none have no correlation" in text


NETWORK = """
import torch
from torch import nn
from heatproof.images import Preprocess
from heatproof.models import Model

def labels():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    )
    return Model(net, preprocess=Preprocess((32, 32), 32, (0.0,) * 3, (1.0,) * 3))
"""


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Six images with up to three labels, and the weights of two epochs."""
    folder = tmp_path_factory.mktemp("labels")
    (folder / "net.py").write_text(NETWORK)
    space: dict[str, Any] = {}
    exec(NETWORK, space)
    net = space["labels"]().module
    rng, lines = np.random.default_rng(0), ["path,red,green,blue"]
    for i in range(6):
        pixels = rng.integers(0, 90, (32, 32, 3), dtype=np.uint8)
        there = [bool((i + 1) >> k & 1) for k in range(3)]
        for k in np.flatnonzero(there):
            pixels[8 * k : 8 * k + 10, 6 + i : 20, k] = 230
        Image.fromarray(pixels).save(folder / f"{i}.png")
        lines.append(",".join([f"{i}.png", *(str(int(t)) for t in there)]))
    (folder / "all.csv").write_text("\n".join(lines) + "\n")
    with torch.random.fork_rng(), torch.no_grad():
        for epoch, scale in enumerate((0.2, 4.0), 1):
            net[4].weight.mul_(scale)
            images = torch.stack([
                torch.from_numpy(np.asarray(Image.open(folder / f"{i}.png")).copy()).permute(2, 0, 1) / 255
                for i in range(6)
            ])  # fmt: skip
            net[4].bias.add_(-net(images).mean(0) + 0.002)  # each label is predicted on some of the images
            torch.save(net.state_dict(), folder / f"epoch{epoch}.pt")
        net[4].bias.sub_(100)  # predicts no label
        torch.save(net.state_dict(), folder / "none.pt")
        net[4].bias.add_(100)
    result = study_labels(folder, "out")
    assert result.exit_code == 0, (result.output, result.exception)
    return folder, net


def study_labels(folder: Path, out: str, images: tuple[str, ...] = (), *more: str) -> Any:
    listed = "--kind", "csv", "--images", f"{folder}/all.csv", "--label-columns", "red,green,blue"
    command = ["study", "cose", "--model", f"{folder}/net.py:labels", "--head", "multilabel", "--checkpoints",
               f"{folder}/epoch*.pt", "--methods", "gradcam,gradient", "--draws", "1", "--device", "cpu",
               "--examples", "1", "--out", f"{folder}/{out}"]  # fmt: skip
    return CliRunner().invoke(main, [*command, *(images or listed), *more])


def test_several_labels_equal_the_slow_way(several: Any) -> None:
    """Label by label and variant by variant, from the network itself."""
    folder, net = several
    run = RunFolder.open(folder / "out")
    rows = run.scores().sql(
        "select * from scores where method = 'gradient' and metric like 'cose_%' order by all"
    )
    model = Model(net, preprocess=Preprocess((32, 32), 32, (0.0,) * 3, (1.0,) * 3), head=Multilabel())
    names, seen = ("red", "green", "blue"), 0
    for i in range(6):
        pixels = torch.from_numpy(np.asarray(Image.open(folder / f"{i}.png")).copy()).permute(2, 0, 1)[None]
        with torch.no_grad():
            predicted = (net(pixels / 255) >= 0)[0].tolist()
        own = {row["image"] for row in rows if row["image"].startswith(f"{i}.png#")}
        assert own == {f"{i}.png#{name}" for name, is_ in zip(names, predicted, strict=True) if is_}
        for k in np.flatnonzero(predicted).tolist():
            before = comparable(explain(model, pixels / 255, ["gradient"], [k])["gradient"])
            for row in rows:
                if row["image"] != f"{i}.png#{names[k]}" or "(checkpoint" in row["metric"]:
                    continue
                kind, _, rest = row["metric"].rstrip(")").partition("(")
                name, size = rest.split(",")
                magnitude = torch.tensor([float(size)])
                changed = TRANSFORMS[name].apply(pixels, magnitude)
                with torch.no_grad():
                    stays = bool((net(changed / 255) >= 0)[0, k])
                after = comparable(explain(model, changed / 255, ["gradient"], [k])["gradient"])
                value, _ = alike(before, TRANSFORMS[name].inverse_maps(after, magnitude),
                                 TRANSFORMS[name].valid((32, 32), magnitude))  # fmt: skip
                assert kind == ("cose_same" if stays else "cose_changed") and row["explained"] == k
                if not math.isnan(row["value"]):
                    assert row["value"] == pytest.approx(value.item(), abs=2e-3)  # the magnitude is rounded
                    seen += 1
    assert seen > 40


def test_labels_have_a_table_and_images_an_accuracy(several: Any) -> None:
    folder, _ = several
    with (folder / "out" / "tables" / "labels.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["method"] for row in table] == ["gradcam", "gradient"] and {"red", "blue"} < set(table[0])
    rows = RunFolder.open(folder / "out").scores().sql("select * from scores where metric = 'correct'")
    assert len(rows) == 18 and {round(3 * row["value"], 6) for row in rows} <= {0, 1, 2, 3}
    page = (folder / "out" / "summary.md").read_text()
    assert "Each label that the final model predicts" in page and (folder / "out/panels/pair-1.png").exists()


def test_several_labels_without_names_and_beside_another_study(several: Any) -> None:
    """Images without labels: the numbers of the network's outputs are their names."""
    folder, _ = several
    pictures = folder / "pictures"
    pictures.mkdir()
    for path in folder.glob("*.png"):
        shutil.copy(path, pictures)
    result = study_labels(folder, "plain", ("--images", str(pictures)), "--transforms", "flip-x,contrast")
    assert result.exit_code == 0, (result.output, result.exception)
    with (folder / "plain" / "tables" / "labels.csv").open() as file:
        assert {"0", "1", "2"} < set(next(csv.DictReader(file)))
    result = study_labels(folder, "twin", (), "--transforms", "flip-x", "--beside", f"{folder}/out")
    assert result.exit_code == 0, (result.output, result.exception)
    assert (folder / "twin" / "panels" / "beside-1.png").exists()


def test_a_network_that_predicts_no_label_is_an_error(several: Any) -> None:
    folder, _ = several
    more = "--checkpoints", f"{folder}/none.pt", "--final", "none", "--transforms", "flip-x"
    result = study_labels(folder, "none", (), *more)
    assert result.exit_code == 2 and "none predicts no label on any of the images" in result.output


def test_signs_have_no_standard_error(cnn: nn.Module) -> None:
    (signs,) = explain(Model(cnn), torch.rand(1, 3, 32, 32), ["lime(samples=8, top=2)"]).values()
    assert signs.error is None and set(signs.values.unique().tolist()) <= {-1, 0, 1}


def test_networks_side_by_side(place: Path, done: Any) -> None:
    words = (
        "study cose -M net.py:tiny --images pictures --checkpoints epochs/epoch01.pt --draws 1 --device cpu"
    )
    fast = "--methods gradcam,gradient --examples 1 --transforms flip-x,brightness --beside plain --out both"
    result = CliRunner().invoke(main, [*words.split(), *fast.split()])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "## The same images, other networks" in (place / "both" / "summary.md").read_text()
    result = CliRunner().invoke(main, [*words.split(), *fast.split(), "--similarity", "spearman"])
    assert result.exit_code == 2 and "plain compares maps by local5, this study by spearman" in result.output
    drawn = np.asarray(Image.open(place / "both" / "panels" / "beside-1.png").convert("RGB")).astype(int)
    assert drawn.shape[1] > 3 * 224 and (drawn.max(2) - drawn.min(2) > 40).mean() > 0.05
