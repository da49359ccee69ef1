"""What the thesis says by eye: sufficient pixels, blobs, groups, repeats, segments, patterns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_study_localise import NETWORK, TINY, make_folder, settings_for
from torch import nn

import heatproof as hp
from heatproof.errors import HeatproofError, InputError
from heatproof.models.layers import find_module
from heatproof.studies.localise.images import AMBIGUOUS, GROUPS, class_groups, excluded
from heatproof.studies.localise.protocol import _config, localise_study
from heatproof.studies.localise.results import crossing, swept_methods
from heatproof.studies.settings import FlagThresholds, whole_numbers

NAMES = [f"class {k}" for k in range(1000)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("further")
    (folder / "net.py").write_text(NETWORK)
    make_folder(folder / "data")
    (folder / "groups.csv").write_text("class,group\nred,warm\n1,cold\nblue,cold\nred,all\ngreen,all\n")
    (folder / "out.txt").write_text("# a green one that is called red\n02.png\n\n")
    return folder


@pytest.fixture(scope="module")
def finished(place: Path) -> Any:
    changes: dict[str, Any] = {
        "repeats": 3, "segment_counts": (9, 16), "groups": str(place / "groups.csv"), "subset": 4,
        "exclude": str(place / "out.txt"), "panels": 0,
        # Nothing is ever on the object, so that every picture is flagged and a pattern is looked for.
        "thresholds": FlagThresholds(off_object=1.01, high_insertion=0.0),
    }  # fmt: skip
    make_folder(place / "data", [("09.png", 0, 32, 32, 4, 4, 19, 19), ("10.png", 0, 32, 32, 4, 4, 19, 19)])
    outcome = localise_study(settings_for(place, place / "out", **changes))
    return outcome


def test_curves_cross_where_a_fine_search_finds_it() -> None:
    rng = np.random.default_rng(0)
    at, fine = np.linspace(0, 1, 11), np.linspace(0, 1, 100_001)
    for _ in range(20):
        up, down = np.sort(rng.random(11)), np.sort(rng.random(11))[::-1]
        gaps = np.interp(fine, at, up) - np.interp(fine, at, down)
        expected = fine[np.argmax(gaps >= 0)]
        assert crossing(up.tolist(), down.tolist()) == pytest.approx(expected, abs=2e-5)
    assert math.isnan(crossing([0.5, 0.6], [0.4, 0.1])) and math.isnan(crossing([0.1, 0.2], [0.5, 0.4]))
    assert math.isnan(crossing([math.nan, 0.2], [0.5, 0.1]))


def test_imagenet_groups_hold_every_class_once() -> None:
    sides = ("living things", "not living")
    for chosen in (sides, set(GROUPS["imagenet"]) - {"dogs", *sides}):
        spans = [span for name in chosen for span in GROUPS["imagenet"][name]]
        assert sorted(k for low, high in spans for k in range(low, high + 1)) == list(range(1000))
    by_group = class_groups("imagenet", NAMES)
    assert by_group["dogs"] < by_group["mammals"] < by_group["living things"]
    with pytest.raises(InputError, match="1,000 classes; this network has 3"):
        class_groups("imagenet", ["a", "b", "c"])


def test_lists_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text("cat\n2\n# no\nsome/picture.png\n")
    labels, pictures = excluded(str(file), ["dog", "cat", "cow"])
    assert sorted(labels) == [1, 2] and pictures == {"some/picture.png"}
    ambiguous, none = excluded("ambiguous", NAMES)
    assert len(ambiguous) == 2 * len(AMBIGUOUS) and not none
    assert "class 836 (836) against class 837 (837)" in ambiguous[836]
    with pytest.raises(InputError, match="cannot read"):
        excluded(str(tmp_path / "nowhere"), ["a"])
    table = tmp_path / "groups.csv"
    table.write_text("class,group\ncrane,birds\n")
    with pytest.raises(InputError, match="the name of 2 classes; write the number"):
        class_groups(str(table), ["crane", "crane"])
    table.write_text("class,group\nwolf,dogs\n")
    with pytest.raises(InputError, match=r"line 2: there is no class 'wolf' among the network's 1"):
        class_groups(str(table), ["dog"])


def test_what_is_left_out_is_reported(finished: Any) -> None:
    assert finished.sifted.left_out == (("02.png", "it is listed in out.txt"),) and not finished.sifted.aside
    assert "Left out by --exclude (1):" in finished.page.read_text() and len(finished.sifted.entries) == 8


def test_groups_are_means_over_their_classes(finished: Any) -> None:
    by_class = {row[1]: row for row in finished.book.tables["localisation_by_class"].rows}
    groups = {(row[0], row[3]): row for row in finished.book.tables["groups"].rows}
    heads = [column.name for column in finished.book.tables["groups"].columns]
    mine = [column.name for column in finished.book.tables["localisation_by_class"].columns]
    mask, own = heads.index("Mask IoU"), mine.index("Mask IoU, gradcam")
    assert groups["cold", "gradcam"][mask].value == pytest.approx(
        (by_class["green"][own] + by_class["blue"][own]) / 2
    )
    assert groups["warm", "gradcam"][1:3] == (1, 4) and groups["all", "gradcam"][1:3] == (2, 6)


def test_sufficient_share_and_blobs(finished: Any) -> None:
    sufficient = {row[0]: row for row in finished.book.tables["sufficient"].rows}
    assert sufficient["gradcam"][2].value < sufficient["random"][2].value < sufficient["edges"][2].value
    scattered = {row[0]: row[2].value for row in finished.book.tables["dispersion"].rows}
    assert scattered["gradcam"] == 0 and scattered["random"] > 0.9


def test_repeats_move_lime_and_not_gradcam(finished: Any) -> None:
    rows = {row[0]: row for row in finished.book.tables["repeats"].rows}
    assert rows["gradcam"][1].value == pytest.approx(1) and rows["gradcam"][3] == 1
    assert rows[TINY][1].value < 0.99 and rows[TINY][3] < 1
    assert rows[TINY][1].n == 4 * 3  # four pictures, three pairs of repeats


def test_lime_at_other_counts(finished: Any, place: Path) -> None:
    table = finished.book.tables["segments"]
    assert [row[0] for row in table.rows] == ["9 segments", "16 segments"] and table.rows[0][2].n == 4
    assert (place / "out" / "panels" / "segments-counts.png").exists()
    settings = settings_for(place, place / "x", segment_counts=(30,), methods=("gradcam",))
    assert swept_methods(settings) == {"30 segments": "lime(segment_count=30)"}


def test_evidence_off_the_object_has_a_section(finished: Any) -> None:
    page = finished.page.read_text()
    section = page.partition("## What the network uses off the object")[2].partition("\n## ")[0]
    # Answers of this network depend on the colour of the object alone.
    assert "No patch and no property off the object turned half" in section, section


def test_the_thesis_stretches_pictures(place: Path) -> None:
    def resize(how: str) -> Any:
        return _config(settings_for(place, place / "x", preprocess=how))["preprocess"].get("resize")

    assert (resize("thesis"), resize("shorter-side"), resize("own")) == ([256, 256], 256, None)


def test_bad_counts_raise_a_clear_error() -> None:
    assert whole_numbers("30, 100") == (30, 100)
    with pytest.raises(InputError, match=r"the numbers are whole, such as 1,5,10; got '30,many'"):
        whole_numbers("30,many")


def test_last_conv_is_the_last_convolution() -> None:
    torchvision = pytest.importorskip("torchvision")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torchvision.models.resnet18(weights=None).eval()
    assert find_module(net, "last_conv") is net.layer4[1].conv2
    images = torch.rand(2, 3, 64, 64)
    named, other = (
        hp.explain(net, images, "gradcam", layer=name) for name in ("last_conv", "layer4.1.conv2")
    )
    assert torch.equal(named["gradcam"].values, other["gradcam"].values)
    with pytest.raises(HeatproofError, match="last_conv"):
        find_module(nn.Linear(2, 2), "last_conv")
