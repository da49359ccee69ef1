"""Several networks on one page: the paper's own answer from its tables, and two small networks end to end."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from test_study_cscore import pictures, settings

from heatproof.cli import main
from heatproof.errors import InputError
from heatproof.metrics.classifier import auc, auc_errors
from heatproof.report.tables import Table, number
from heatproof.studies.cscore.protocol import networks_study
from heatproof.studies.cscore.results import (
    CHOICE,
    RECOMMENDED,
    REFUSED,
    Network,
    network_content,
    networks_content,
    read_network,
    recommendation,
    standing,
)
from heatproof.studies.cscore.results import (
    TABLES as CSCORE_TABLES,
)
from heatproof.studies.settings import CscoreSettings
from heatproof.train.recipe import Epoch, History
from heatproof.verdict.trajectory import CheckpointState, Trajectory, auc_difference
from published_training import TABLES
from published_training import published as trajectory

pytestmark = pytest.mark.trains

DATA = Path(__file__).parents[1] / "data"
PRINTED = json.loads((DATA / "cscore_differences.json").read_text())
ENDS = ("E20", "E30")


def published(architecture: str) -> Network:
    place = TABLES["archs"].index(architecture)
    every = (
        Epoch(
            int(e), "transfer" if int(e) <= 20 else "fine-tuning", 0, row[place][1] / 100, row[place][0], 0, 0
        )
        for e, row in TABLES["acc"].items()
    )
    return Network(architecture, trajectory(architecture), ENDS, History(tuple(every)), "Kermany")


PUBLISHED = [published(name) for name in TABLES["archs"]]


def table_of(name: str, *networks: Network) -> Table:
    content = networks_content(networks) if name in ("methods", "auc") else network_content(*networks)
    table = CSCORE_TABLES.page(**content)(name)
    assert table is not None
    return table


def test_the_published_tables_give_the_papers_own_recommendation() -> None:
    """Section 5.1: DenseNet201; InceptionV3 where the technique is chosen with care; not ResNet50V2."""
    standings = {network.name: standing(network, PUBLISHED) for network in PUBLISHED}
    assert {name: s.answer for name, s in standings.items()} == {
        "DenseNet201": RECOMMENDED, "InceptionV3": CHOICE, "ResNet50V2": REFUSED,
    }  # fmt: skip
    assert (
        standings["InceptionV3"].why == "not with GradCAM"
        and standings["ResNet50V2"].why == "AUC fell to 0.103"
    )
    text = recommendation(PUBLISHED)
    assert text.startswith("Take **DenseNet201** and explain it with **ScoreCAM**")
    assert "Not recommended: ResNet50V2" in text and "InceptionV3 with EigenCAM" in text


def test_net_changes_are_those_of_the_table_notes() -> None:
    for network in PUBLISHED:
        notes = PRINTED["table_notes"][network.name]
        for method, change in network.changes.items():
            if method in notes:
                assert change == pytest.approx(notes[method], abs=1e-9)
        table = table_of("overall", network)
        assert [c.name for c in table.columns] == ["method", *(c.name for c in network.run), "change"]
        ours = PRINTED["recomputed_means"][network.name]["six"]
        assert table.rows[-1][0] == "average" and number(table.rows[-1][-1]) == pytest.approx(ours, abs=1e-4)


def test_the_class_gap_and_the_classes_are_printed_as_the_paper_has_them() -> None:
    dense = PUBLISHED[0].run
    (row,) = (row for row in table_of("gaps", PUBLISHED[0]).rows if row[0] == "GradCAM")
    at = 1 + [c.name for c in dense].index("E20")
    assert number(row[at]) == pytest.approx(PRINTED["class_gap"]["value"], abs=1e-9)
    assert math.isnan(number(row[at + 1])), "one class has no gold list at E25"
    table = table_of("classes", PUBLISHED[0])
    assert len(table.rows) == 12
    for row in table.rows:
        printed = TABLES["normal" if row[0] == "Normal" else "pneumonia"]["DenseNet201"][str(row[1])]
        cells = dict(zip((c.name for c in table.columns), row, strict=True))
        for value, checkpoint in zip(printed, dense, strict=True):
            assert number(cells[checkpoint.name]) == value, "0.000 of an empty list too"
        assert cells["why 0.000"] == ("E25: the gold list is empty" if row[0] == "Normal" else "")
        assert number(cells["change"]) == pytest.approx(printed[6] - printed[4])


def test_a_method_s_row_has_its_worst_class_and_its_alarms() -> None:
    table = table_of("methods", *PUBLISHED)
    heads = [c.name for c in table.columns]
    rows = {(row[0], row[1]): dict(zip(heads, row, strict=True)) for row in table.rows}
    assert len(rows) == 18
    inception = rows["InceptionV3", "GradCAM"]
    assert inception["which"] == "Pneumonia" and number(inception["worst class"]) == 0.008
    assert inception["alarms"] == "3 at E1, 2 at E30"
    assert number(inception["change"]) == pytest.approx(0.048, abs=1e-9)


def answers(seed: int, n: int = 120, skill: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 2
    shared = rng.normal(size=n) + skill * labels
    own = 0.2 * np.random.default_rng(seed).normal(size=n)
    return labels, 1 / (1 + np.exp(-(shared + own)))


def measured(name: str, seed: int, skill: float = 1.5, pictures: str = "same") -> Network:
    labels, p = answers(seed, skill=skill)
    state = CheckpointState.measured("e1", 1, labels, p, {})
    return Network(name, Trajectory((state,)), ("e1", "e1"), None, pictures)


def test_auc_of_networks_is_compared_image_by_image() -> None:
    first, second = measured("a", 1), measured("b", 2)
    difference = auc_difference(first.last, second.last)
    (labels, p), (_, q) = answers(1), answers(2)
    assert difference.value == pytest.approx(auc(labels, p).value - auc(labels, q).value)
    error = float(((auc_errors(labels, p) - auc_errors(labels, q)) ** 2).sum()) ** 0.5
    assert difference.paired and difference.error == pytest.approx(error)
    z = abs(difference.value) / error
    assert difference.p == pytest.approx(math.erfc(z / 2**0.5))
    apart = auc_difference(first.last, second.last, same_images=False)
    assert not apart.paired and apart.error > 2 * difference.error


def test_pictures_of_one_name_that_differ_are_not_paired() -> None:
    several = [measured("a", 1), measured("b", 2), measured("c", 3, pictures="other")]
    rows = table_of("auc", *several).rows
    assert [row[-1] for row in rows] == ["yes", "no", "no"]
    worse = measured("worse", 2, skill=0.9)
    assert standing(worse, [measured("a", 1), worse]).answer == REFUSED


def test_two_networks_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "shapes", 8)
    (tmp_path / "nets.py").write_text(
        "from heatproof.train import small_net\n"
        "def narrow(num_classes=2): return small_net(num_classes, size=32, width=4)\n"
        "def wide(num_classes=2): return small_net(num_classes, size=32, width=6, seed=1)\n"
    )
    monkeypatch.chdir(tmp_path)
    options = [
        "--images", "shapes", "-m", "gradcam", "--head-epochs", "1", "--full-epochs", "1", "--keep", "1,2",
        "--no-sweep", "--device", "cpu", "--train-batch", "8", "--first-phase", "all",
    ]  # fmt: skip
    both = CliRunner().invoke(
        main, ["study", "cscore", "nets.py:narrow", "nets.py:wide", *options, "--out", "both"]
    )
    assert both.exit_code == 0, both.output
    assert "nets.py:wide, epoch 2, fine-tuning" in both.output and "The networks" in both.output
    text = Path("both/summary.md").read_text()
    assert "2 networks, on the same 4 images" in text and "nets.py-narrow/summary.md" in text
    for name in ("networks", "methods", "auc", "epochs"):
        with Path(f"both/tables/{name}.csv").open() as file:
            assert list(csv.DictReader(file)), name
    for name in ("net-change", "ends", "trajectories"):
        assert Path(f"both/figures/{name}.png").stat().st_size > 2000, name
    beside = CliRunner().invoke(
        main, ["study", "cscore", "both/nets.py-narrow", "both/nets.py-wide", "--out", "again"]
    )
    assert beside.exit_code == 0, beside.output
    made = [Path(place) / "tables/methods.csv" for place in ("both", "again")]
    assert made[0].read_text() == made[1].read_text()
    twice = ["study", "cscore", "nets.py:narrow", "both/nets.py-narrow", *options, "--out", "twice"]
    again = CliRunner().invoke(main, twice)
    assert again.exit_code == 0, again.output
    link = "[nets.py:narrow (1)](nets.py-narrow/summary.md), nets.py:narrow (2)."
    assert link in Path("twice/summary.md").read_text()
    wrong = CliRunner().invoke(
        main, ["study", "cscore", "nets.py:narrow", "nets.py:wild", *options, "--out", "x"]
    )
    assert wrong.exit_code == 2 and "did you mean 'wide'" in wrong.output
    assert not list(Path("x").rglob("*.safetensors")), "the second is looked at before the first is trained"
    alone = CliRunner().invoke(main, ["study", "cscore", "both/nets.py-narrow", "--out", "none"])
    assert alone.exit_code == 2 and "a comparison needs two networks" in alone.output
    assert read_network(Path("both/nets.py-wide")).ends == ("epoch01", "epoch02")


def test_seeds_are_trainings_on_one_page_with_the_same_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hypothesis is tested over both; DoM of the first pair equals that of the stored maps."""
    pictures(tmp_path / "pictures", 10)
    monkeypatch.chdir(tmp_path)
    own = {"model": "net.py:build", "sweep": False, "keep": (1, 2, 3, 4)}
    given = settings(tmp_path, seeds=(3, 5), methods=("gradcam", "eigencam"), **own)
    outcome = networks_study(given)
    first, second = (
        read_network(tmp_path / "out" / f"net.py-build-seed{seed}") for seed in (3, 5)
    )  # fmt: skip
    assert first.images == second.images and first.last.auc == first.last.auc
    assert first.epochs[0].loss != second.epochs[0].loss, "another seed is another training"
    tables = outcome.book.tables
    assert [row[0] for row in tables["networks"].rows] == [f"{given.model}, seed {seed}" for seed in (3, 5)]
    assert "Trainings: 2." in tables["rises"].note and len(tables["rises"].rows) == 2
    rows = {row[2]: row for row in tables["distances"].rows}
    assert set(rows) == {"gradcam", "eigencam"}
    assert first.folder is not None and second.folder is not None
    one, other = (n.folder.maps().read("epoch04", "gradcam") for n in (first, second))
    assert one.ids == other.ids
    means = []
    labels = np.array(["disc" in name for name in one.ids])
    for maps in (one, other):
        whole = maps.upsample().clamp(min=0).double()
        low, high = whole.flatten(1).amin(1)[:, None, None], whole.flatten(1).amax(1)[:, None, None]
        scaled = ((whole - low) / (high - low).clamp(min=1e-12)).numpy()
        means.append([scaled[labels == of].mean(0) for of in (True, False)])
    slow = {k: abs(a - b).mean() for k, (a, b) in enumerate(zip(*means, strict=True)) if a.any() and b.any()}
    expected = np.average(list(slow.values()), weights=[(labels == (k == 0)).sum() for k in slow])
    assert number(rows["gradcam"][3]) == pytest.approx(expected, abs=1e-5)
    assert "gradient methods start low" in outcome.page.read_text()


def test_what_belongs_to_one_network_is_refused_for_several(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="belong to one network"):
        replace(settings(tmp_path), networks=("a", "b"), layer="fc")
    with pytest.raises(InputError, match="tau must be a number in"):
        CscoreSettings(tau="much")
    with pytest.raises(InputError, match="needs two networks"):
        networks_study(CscoreSettings(out=tmp_path))
