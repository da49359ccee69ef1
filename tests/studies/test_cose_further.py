"""COSE, the rest of the paper: other similarities, its preset, leads, groups, pictures, training recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy.stats import pearsonr

from heatproof.cli.study import cose_command
from heatproof.errors import InputError
from heatproof.images.transforms import STEPS, TRANSFORMS, vary
from heatproof.metrics.agreement import REASONS, ssim
from heatproof.metrics.stability import alike
from heatproof.models import Model
from heatproof.store import RunFolder
from heatproof.studies.cose.protocol import as_the_authors, cose_study
from heatproof.studies.cose.results import TABLES, pick, table_content
from heatproof.studies.settings import CoseSettings
from heatproof.train import Data, Phase, Recipe, fit
from tiny_study import make_study


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cose")
    make_study(folder, images=6)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    yield folder
    patch.undo()


def settings(**changes: Any) -> CoseSettings:
    usual: dict[str, Any] = {
        "model": "net.py:tiny", "images": "pictures", "checkpoints": ("epochs/*.pt",), "draws": 2,
        "methods": ("gradcam", "gradient"), "unit_images": 3, "device": "cpu", "figures": False,
    }  # fmt: skip
    return CoseSettings(**(usual | changes))


@pytest.fixture(scope="module")
def results(place: Path) -> Any:
    return cose_study(settings(out=place / "plain")).results


def test_pearson_is_scipys_and_eq2_the_papers() -> None:
    first, second = torch.rand(2, 3, 9, 11, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 9, 11, dtype=torch.bool)
    mask[:, 2:7, 1:8] = True
    for counted in (None, mask):
        value, why = alike(first, second, counted, "pearson")
        for i in range(3):
            chosen = mask[i] if counted is not None else torch.ones(9, 11, dtype=torch.bool)
            expected = pearsonr(first[i][chosen].numpy(), second[i][chosen].numpy()).statistic
            assert value[i].item() == pytest.approx(expected, abs=1e-6) and why[i] == 0
    value, _ = alike(first, second, None, "eq2")
    assert torch.equal(value, ssim(first, second, mode="eq2"))
    flat = torch.full((1, 9, 11), 0.5)
    value, why = alike(first[:1], flat, None, "pearson")
    assert value.isnan().all() and "constant" in REASONS[why.item()]
    value, why = alike(first[:1], second[:1], torch.zeros(1, 9, 11, dtype=torch.bool), "pearson")
    assert value.isnan().all() and "mask" in REASONS[why.item()]
    with pytest.raises(InputError, match="unknown mode 'pearsn'"):
        alike(first, second, None, "pearsn")


def test_a_study_by_another_similarity(place: Path, results: Any) -> None:
    other = cose_study(settings(similarity="pearson", out=place / "pearson"))
    assert other.results.similarity == "pearson" and results.similarity == "local5"
    assert other.results.scores["gradcam"].consistency != results.scores["gradcam"].consistency
    assert "compared by Pearson's r" in other.page.read_text()
    with pytest.raises(Exception, match="similarity"):  # one folder, one similarity
        cose_study(settings(similarity="eq2", out=place / "pearson"))


def test_the_authors_settings() -> None:
    methods = ("gradcam", "lime(samples=9)", "smoothgrad", "ig(baseline='black')")
    settings_of_authors = as_the_authors(settings(methods=methods))
    lime = "lime(segments='quickshift', form='published', samples=9, fill='zero', top=10)"
    path = "ig(steps=25, baseline='black', rule='trapezoid')"
    assert settings_of_authors.methods == ("gradcam", lime, "smoothgrad(squared=True)", path)
    assert settings_of_authors.require_correct


def test_the_preset_from_the_command_line(place: Path) -> None:
    result = CliRunner().invoke(
        cose_command,
        ["--model", "net.py:tiny", "--images", "pictures", "--checkpoints", "epochs/epoch02.pt", "--paper",
         "--methods", "smoothgrad(samples=2)", "--draws", "1", "--device", "cpu", "--no-figures", "--out",
         "preset", "--pretraining", "dino"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert RunFolder.open(place / "preset").manifest.config["methods"] == [
        "smoothgrad(squared=True, samples=2)"
    ]
    assert "| dino |" in (place / "preset" / "summary.md").read_text()


def test_a_lead_is_the_difference_of_the_scores(results: Any) -> None:
    gap, (low, high) = results.ahead("gradcam", "gradient")
    assert gap == pytest.approx(results.scores["gradcam"].value - results.scores["gradient"].value)
    assert low <= gap <= high
    back, other = results.ahead("gradient", "gradcam")
    assert back == pytest.approx(-gap) and other == pytest.approx((-high, -low))
    assert results.ahead("gradcam", "gradcam") == (0, (0, 0))


def test_several_studies_in_one_table(results: Any, papers: dict[str, Any]) -> None:
    better = replace(results, model="other", pretraining="dino", family="transformer")
    make = TABLES.page(**table_content([results, better]))
    table, groups = make("table1"), make("groups")
    assert table and groups
    heads = [column.name for column in table.columns]
    rows = {row[0]: row for row in table.rows}
    assert rows["gradcam"][heads.index("overall")] == pytest.approx(results.scores["gradcam"].value)
    won = [rows[m][heads.index("best in")] for m in ("gradcam", "gradient")]
    assert sorted(won) == [0, 1]  # type: ignore[type-var]
    assert [c.name.split(",")[0] for c in groups.columns[1:]] == ["CNN", "transformer", "dino"]
    assert TABLES.page(**table_content([results]))("groups") is None
    assert sum(TABLES.content["table1"]["wins"]) == pytest.approx(1)


def test_the_page_says_what_the_paper_asks_of_a_network(place: Path, results: Any) -> None:
    page = (place / "plain" / "summary.md").read_text()
    assert "trained with the transforms" in page and "| unknown |" in page
    assert ("is surely ahead" in page) or ("not surely ahead" in page)


def test_pictures_before_and_after(place: Path, results: Any) -> None:
    for _, changes in pick(results.of("gradcam"), 3):
        assert {change.same for change in changes} in ({True, False}, {True}, {False})
    kinds = [len(changes) for _, changes in pick(results.of("gradcam"), 6)]
    assert kinds == sorted(kinds, reverse=True)
    drawn = cose_study(settings(figures=True, examples=1, out=place / "plain"))
    assert (place / "plain" / "panels" / "pair-1.png").exists()
    assert "## Before and after" in drawn.page.read_text()


def test_training_under_the_transforms(tmp_path: Path) -> None:
    """Every transform comes up with all kinds of magnitudes; masks move with their pictures."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pictures = torch.randint(0, 256, (400, 3, 24, 24), dtype=torch.uint8)
        marked = pictures[:, 0] > 127
        changed, moved = vary(pictures, {"part": marked})
        again = (torch.manual_seed(0), vary(pictures, {"part": marked}))[1]
    same = (changed == pictures).flatten(1).all(1)
    assert 5 < same.sum() < 100  # one in fourteen is left as it is
    flips = [(changed == pictures.flip(dim)).flatten(1).all(1).sum() for dim in (2, 3)]
    assert all(5 < count < 70 for count in flips)
    mirrored = (changed == pictures.flip(3)).flatten(1).all(1)
    assert torch.equal(moved["part"][mirrored], marked[mirrored].flip(2))
    assert moved["part"].dtype == torch.bool and again[0].shape == changed.shape
    assert len(TRANSFORMS) == 13 and STEPS == 30


def test_a_training_writes_down_that_it_had_them(place: Path, tmp_path: Path) -> None:
    plain, varied = Recipe((Phase(1, 1e-3),), 4), Recipe((Phase(1, 1e-3),), 4, transforms=True)
    assert "transforms" not in plain.described() and "transforms" in varied.described()
    images = torch.randint(
        0, 256, (8, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    data = Data(images, torch.arange(8) % 2)

    def trained(recipe: Recipe, out: Path | None) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = torch.nn.Sequential(
                torch.nn.Conv2d(3, 2, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
                torch.nn.Linear(2, 2),
            )  # fmt: skip
        model = Model(net)
        fit(model, data, data, recipe, out, keep=(1,) if out else ())
        return net[0].weight.detach()

    assert not torch.equal(trained(plain, None), trained(varied, tmp_path / "t"))
    assert torch.equal(trained(varied, None), trained(varied, None))
    assert json.loads((tmp_path / "t" / "recipe.json").read_text())["transforms"] is True
    (place / "epochs" / "recipe.json").write_text(varied.described())
    result = cose_study(settings(out=place / "told"))
    assert result.results.trained_with == "yes"
    (place / "epochs" / "recipe.json").unlink()
    assert np.isfinite(result.results.scores["gradcam"].value)
