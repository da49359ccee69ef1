"""The thesis, further items: answers apart, centre bias, subtrees, variants of LIME, features, cues."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from skimage.segmentation import felzenszwalb
from test_study_localise import NETWORK, SQUARES, make_folder, paint, settings_for

import heatproof as hp
from heatproof.errors import InputError
from heatproof.metrics.interventions import ALIKE, similarities
from heatproof.studies.localise.images import GROUPS, class_groups, cue_rows, read_cues
from heatproof.studies.localise.panels import most_certain
from heatproof.studies.localise.protocol import localise_study
from heatproof.studies.localise.results import LocaliseResults, centre_rows, read_scores
from heatproof.studies.settings import LocaliseSettings

LIME = "lime(samples=60, segment_count=16)"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thesis")
    (folder / "net.py").write_text(NETWORK)
    more = [(f"{i:02d}.png", 0, 32, 32, 4, 4, 19, 19) for i in (9, 10)]
    make_folder(folder / "data", more)
    for i, colour in enumerate([0, 1, 1, 0]):
        paint(folder / "cues" / f"{i}.png", i, colour, (4, 4, 27, 27))
    lines = ["path,shape,texture", "0.png,red,green", "1.png,red,green", "2.png,0,green", "3.png,blue,1"]
    (folder / "cues" / "cues.csv").write_text("\n".join([*lines, "0.png,red,", "1.png,red,"]) + "\n")
    return folder


@pytest.fixture(scope="module")
def finished(place: Path) -> Any:
    outcome = localise_study(
        settings_for(
            place,
            place / "out",
            methods=("gradcam", LIME),
            panels=2,
            target="predicted",
            subset=3,
            segmentations=("slic", "felzenszwalb"),
            sample_counts=(20, 60),
            cues=place / "cues" / "cues.csv",
        )
    )
    return outcome


@pytest.fixture(scope="module")
def scored(finished: Any) -> LocaliseResults:
    return read_scores(finished.run.folder, 0.2)


@pytest.fixture(scope="module")
def model(place: Path) -> hp.Model:
    return hp.load_model(f"{place / 'net.py'}:colours")


def rows_of(finished: Any, name: str) -> list[dict[str, Any]]:
    table = finished.book.tables[name]
    heads = [column.name for column in table.columns]
    return [dict(zip(heads, row, strict=True)) for row in table.rows]


def test_the_predicted_class_is_explained_by_default(finished: Any, scored: LocaliseResults) -> None:
    assert next(f.default for f in LocaliseSettings.__dataclass_fields__.values() if f.name == "target") == (
        "predicted"
    )
    assert scored.explained == scored.predicted and scored.explained["02.png"] == 1
    assert "its printed means fit the true one: --target label" in finished.page.read_text()


def test_right_and_wrong_answers_have_means_of_their_own(finished: Any, scored: LocaliseResults) -> None:
    table = {(row["Prediction"], row["Method"]): row for row in rows_of(finished, "answers")}
    assert table["wrong", "gradcam"]["images"] == 1 and table["right", "gradcam"]["images"] == 8
    for answer in ("right", "wrong"):
        by_class: dict[int, dict[str, list[float]]] = {}
        for image, guess in scored.predicted.items():
            label = scored.labels[image]
            if (guess == label) == (answer == "right"):
                own = by_class.setdefault(label, {"inside": [], "probability": []})
                own["inside"].append(scored.value("gradcam", "inside", image))
                own["probability"].append(scored.chances[image, label])
        for key, column in (("inside", "Inside share"), ("probability", "Probability")):
            expected = np.mean([np.mean(of[key]) for of in by_class.values()])
            assert table[answer, "gradcam"][column].value == pytest.approx(expected)
    by_class_table = {row["Class"]: row for row in rows_of(finished, "faithfulness_by_class")}
    red = [scored.chances[i, 0] for i, label in scored.labels.items() if label == 0]
    assert by_class_table["red"]["Probability"] == pytest.approx(np.mean(red))


def test_centre_bias_of_maps_and_objects(finished: Any, scored: LocaliseResults) -> None:
    far = [[math.hypot(x - 15.5, y - 15.5) for x in range(32)] for y in range(32)]
    mean = sum(map(sum, far)) / 1024

    def bias(mass: Any) -> float:
        total = sum(mass[y][x] for y in range(32) for x in range(32))
        return 1 - sum(mass[y][x] * far[y][x] for y in range(32) for x in range(32)) / total / mean

    boxes = {f"{i:02d}.png": box for i, (_, _, box) in enumerate(SQUARES)}
    boxes |= {f"{i:02d}.png": (4, 4, 19, 19) for i in (9, 10)}
    objects, own = [], []
    for name, (x0, y0, x1, y1) in sorted(boxes.items()):
        inside = [[float(x0 <= x <= x1 and y0 <= y <= y1) for x in range(32)] for y in range(32)]
        objects.append(bias(inside))
        own.append(bias(finished.run.folder.maps().read("own", "gradcam", [name]).upsample()[0].tolist()))
    assert [r["Method"] for r in rows_of(finished, "centre")] == [
        "gradcam",
        LIME,
        "random",
        "edges",
        "centre",
    ]
    row = rows_of(finished, "centre")[0]
    assert row["of the objects"].value == pytest.approx(np.mean(objects), abs=1e-5)
    assert row["of the maps"].value == pytest.approx(np.mean(own), abs=1e-3)  # stored in half precision
    assert row["rank correlation"].value == pytest.approx(spearmanr(own, objects).statistic, abs=1e-6)


def test_the_twelve_subtrees(papers: dict[str, Any]) -> None:
    """Numbers of classes in WordNet 3.0; reptiles, instruments and fish also as ImageNet-9 counts them."""
    groups = class_groups("wordnet", [f"class {k}" for k in range(1000)])
    sizes = {name: len(of) for name, of in groups.items()}
    assert sizes == {
        "mammal": 218, "bird": 59, "fish": 16, "reptile": 36, "amphibian": 8, "vehicle": 67, "furniture": 22,
        "musical instrument": 26, "geological formation": 10, "tool": 14, "flower": 2, "fruit": 16,
    }  # fmt: skip
    assert len(set().union(*groups.values())) == sum(sizes.values())  # no class is in two
    members = {
        "mammal": 281, "bird": 130, "fish": 1, "vehicle": 510, "furniture": 736, "tool": 784, "fruit": 984,
        "musical instrument": 889, "geological formation": 979, "flower": 985,
    }  # fmt: skip
    assert all(k in groups[name] for name, k in members.items())
    # The thesis says that at least two classes of each subtree are among its 43.
    used = {name: sum(int(k) in of for k in papers["thesis"]["t2"]) for name, of in groups.items()}
    assert {name for name, n in used.items() if n < 2} == {"reptile", "amphibian", "flower"}
    assert set(GROUPS["imagenet"]) & set(GROUPS["wordnet"]) == {"fish"}


def test_variants_of_lime_and_their_stability(finished: Any, place: Path, model: hp.Model) -> None:
    rows = {row["LIME"]: row for row in rows_of(finished, "segments")}
    assert list(rows) == ["slic", "felzenszwalb", "20 samples", "60 samples"]
    swept = read_scores(finished.run.folder.open(place / "out" / "segments"), 0.2)
    pictures = [np.asarray(Image.open(place / "data" / "images" / name)) for name in swept.images]
    cuts = [felzenszwalb(picture, scale=100, sigma=0.5, min_size=50) for picture in pictures]
    assert rows["felzenszwalb"]["segments"] == np.mean([len(np.unique(cut)) for cut in cuts])
    inputs = torch.stack([model.preprocess(Image.fromarray(picture)) for picture in pictures])
    classes = [swept.explained[name] for name in swept.images]
    method = "lime(samples=20, segment_count=16)"
    first, second = (
        hp.explain(model, inputs, method, classes, seed=seed)[method].upsample() for seed in (0, 1)
    )
    expected = [spearmanr(a.flatten(), b.flatten()).statistic for a, b in zip(first, second, strict=True)]
    stable = rows["20 samples"]["Stability: rank correlation"]
    assert stable.value == pytest.approx(np.nanmean(expected), abs=1e-5)
    assert (place / "out" / "panels" / "segments-counts.png").exists()


def test_features_that_the_images_of_a_class_share(finished: Any, place: Path, model: hp.Model) -> None:
    """The windows by a search over all places, and groups by following pairs that look alike."""
    (row,) = rows_of(finished, "shared")
    names = ["00.png", "01.png", "09.png", "10.png"]
    patches = []
    for name in names:
        heat = finished.run.folder.maps().read("own", "gradcam", [name]).upsample()[0].numpy()
        places = [(y, x) for y in range(27) for x in range(27)]
        means = {(y, x): round(float(heat[y : y + 6, x : x + 6].mean()), 6) for y, x in places}
        top, left = max(places, key=lambda at: (means[at], -at[0], -at[1]))
        seen = model.preprocess(Image.open(place / "data" / "images" / name))[None]
        window = seen[:, :, top : top + 6, left : left + 6]
        patches.append(torch.nn.functional.interpolate(window, (24, 24), mode="bilinear", antialias=True))
    alike = similarities(torch.cat(patches)) > ALIKE
    groups = [{i} for i in range(4)]
    for i in range(4):
        for j in range(4):
            if alike[i, j]:
                joined = next(g for g in groups if i in g) | next(g for g in groups if j in g)
                groups = [g for g in groups if not g & joined] + [joined]
    largest = max(map(len, groups))
    assert row["Class"] == "red" and row["correct images"] == 4
    assert row["share a feature"] == largest >= 2 and row["share"] == largest / 4
    assert (place / "out" / "panels" / "shared-0.png").exists()


def test_shape_or_texture(finished: Any, place: Path, model: hp.Model) -> None:
    stylised, silhouettes = rows_of(finished, "cues")
    assert [stylised[k] for k in ("n", "shape", "texture", "another class")] == [4, 1, 2, 1]
    assert stylised["Shape bias"].value == pytest.approx(1 / 3) and stylised["Shape bias"].n == 3
    assert silhouettes["n"] == 2 and silhouettes["Shape accuracy"].value == 0.5
    assert silhouettes["Shape bias"] is None
    for row, message in (
        ("0.png,red,red", "wrong.csv, line 2: 'red' and 'red' share a class"),
        ("0.png,,red", "line 2: the column 'shape' is empty"),
        ("none.png,red,", "line 2: there is no file .*none.png"),
    ):
        (place / "cues" / "wrong.csv").write_text(f"path,shape,texture\n{row}\n")
        with pytest.raises(InputError, match=message):
            read_cues(place / "cues" / "wrong.csv", ("red", "green", "blue"), {})
    (place / "cues" / "grouped.csv").write_text("path,shape,texture\n1.png,warm,cold\n")
    images = read_cues(
        place / "cues" / "grouped.csv", ("red", "green", "blue"), {"warm": {0}, "cold": {1, 2}}
    )
    assert cue_rows(model, images)[0][2:5] == (0, 1, 0)


def test_a_correct_image_stands_beside_a_confused_one(place: Path, scored: LocaliseResults) -> None:
    sure = {name: scored.chances[name, 1] for name in ("03.png", "04.png")}
    assert most_certain(scored, 1) == max(sure, key=lambda name: (sure[name], name))
    assert most_certain(scored, 7) == ""
    with Image.open(place / "out" / "panels" / "confused-02.png") as drawn:
        assert drawn.width > 6 * 224


def test_centre_bias_is_averaged_where_both_are_defined() -> None:
    """A box outside the crop, or one that fills it, has no centre bias."""
    columns = {"a": 0.5, "b": 0.1, "c": math.nan, "d": 0.9}
    results = LocaliseResults("own", ("m",), (), 0.2, ("", ""), values={("m", "centre_bias"): columns})
    ((_, maps, objects, apart, _),) = centre_rows(results, {"a": 0.2, "b": math.nan, "c": 0.3})
    assert (maps.value, objects.value, apart.value) == pytest.approx((0.5, 0.2, 0.3))
    assert maps.n == objects.n == 1


def test_variants_of_lime_are_validated_before_the_run(tmp_path: Path) -> None:
    for changes, message in (
        ({"segmentations": ("slick",)}, "lime segments must be 'slic'.* got 'slick'"),
        ({"sample_counts": (20, 0)}, "lime samples must be .* got 0"),
        ({"segment_counts": (-3,)}, "lime segment_count must be .* got -3"),
    ):
        with pytest.raises(InputError, match=message):
            localise_study(settings_for(tmp_path, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_only_control_maps(place: Path) -> None:
    outcome = localise_study(settings_for(place, place / "controls", methods=("random",), panels=1))
    assert "random" in outcome.page.read_text()
