"""Structure scores: golden vectors, a slow twin, properties, undefined cases and bad input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from scipy.ndimage import distance_transform_edt

from heatproof.errors import InputError
from heatproof.metrics.kit import PIXELS_AT_ONCE
from heatproof.metrics.on_parts import (
    _measure,
    _transform,
    distance_to,
    structure,
    structure_parts,
    structure_score,
)
from heatproof.run.engine import run_study
from heatproof.types import Maps

NAMES = {"FMR": "fmr", "TMR": "tmr", "BL": "bl", "AF": "auc_f", "AT": "auc_t", "AB": "auc_bg", "DtS": "dts"}


def code(margin: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Finder, timing and box of a version-1 code, one pixel a module."""
    n = 21 + 2 * margin
    finder, timing, box = (torch.zeros((n, n), dtype=torch.bool) for _ in range(3))
    inner = slice(margin, margin + 21)
    finder[inner, inner][:7, :7] = finder[inner, inner][:7, 14:] = finder[inner, inner][14:, :7] = True
    timing[inner, inner][6, 7:14] = timing[inner, inner][7:14, 6] = True
    box[inner, inner] = True
    return finder, timing, box


def ramp(n: int) -> torch.Tensor:
    return torch.arange(float(n * n)).reshape(1, n, n)


def test_masks_have_the_published_sizes() -> None:
    finder, timing, _ = code()
    assert int(finder.sum()) == 147 and int(timing.sum()) == 2 * (21 - 14)


@pytest.mark.parametrize("row", ["finder_mask", "timing_mask", "ramp_arange441", "padded4_ramp_arange841"])
def test_golden_vectors(papers: dict[str, Any], row: str) -> None:
    masks = code(4 if row.startswith("padded4") else 0)
    maps = {"finder_mask": masks[0][None].float(), "timing_mask": masks[1][None].float()}
    maps |= {"ramp_arange441": ramp(21), "padded4_ramp_arange841": ramp(29)}
    scores = structure(maps[row], *masks)
    for golden, name in NAMES.items():
        expected = papers["synthetic"]["qr_v1_21x21_modules_K31"][row][golden]
        assert scores[name].item() == pytest.approx(expected, abs=1e-6), name


def test_constant_map_follows_the_formulas_inside_and_is_undefined_outside(papers: dict[str, Any]) -> None:
    finder, timing, box = code()
    areas, distance = [finder[None], timing[None], ~box[None]], distance_to((finder | timing)[None])
    raw = _measure(torch.zeros(1, 21, 21), areas, distance)[0].tolist()
    order = ("FMR", "TMR", "BL", "AF", "AT", "AB", "DtS")
    golden = papers["synthetic"]["qr_v1_21x21_modules_K31"]["constant"]
    assert raw[1:] == pytest.approx([golden[name] for name in order], abs=1e-6)
    scores = structure(torch.full((1, 21, 21), 3.0), finder, timing, box)
    assert all(torch.isnan(value).all() for value in scores.values())
    assert all("constant" in scores.reasons(name)[0] for name in scores)


def test_mass_score_gives_all_18_published_values(papers: dict[str, Any]) -> None:
    table, figure = papers["cambench"]["table2"], papers["cambench"]["structure_score_fig5"]
    scores = {}
    for regime, methods in table.items():
        for method, (bl, fmr, tmr, dts, _) in methods.items():
            scores[f"{regime}|{method}"] = structure_score(fmr, tmr, bl, dts)
    assert len(scores) == 18
    assert scores == pytest.approx(figure, abs=5e-4)


def twin(c: np.ndarray, finder: np.ndarray, timing: np.ndarray, box: np.ndarray) -> dict[str, float]:
    """Equations 3 to 10 one after the other, in float64."""
    epsilon = 1e-6
    c = np.maximum(c.astype(np.float64), 0)
    c = (c - c.min()) / (c.max() - c.min() + epsilon)
    total = c.sum() + epsilon
    scores = {"fmr": (c * finder).sum() / total, "tmr": (c * timing).sum() / total}
    scores["bl"] = (c * ~box).sum() / total
    for name, mask in (("auc_f", finder), ("auc_t", timing), ("auc_bg", ~box)):
        shares = []
        for level in np.linspace(0, 0.99, 31):
            above = c >= np.quantile(c, level)
            shares.append((above & mask).sum() / (above.sum() + epsilon))
        scores[name] = float(np.mean(shares))
    distance = distance_transform_edt(~(finder | timing))
    scores["dts"] = (c * distance).sum() / (total * np.hypot(*c.shape))
    scores["score"] = scores["auc_f"] + scores["auc_t"] - 3 * scores["auc_bg"] - scores["dts"]
    return scores


def some_masks(rng: np.random.Generator, n: int, size: tuple[int, int]) -> list[np.ndarray]:
    return [rng.random((n, *size)) < share for share in (0.2, 0.1, 0.7)]


@pytest.mark.parametrize("kind", ["noise", "few levels", "signed", "sparse"])
def test_equals_the_slow_twin(kind: str) -> None:
    rng = np.random.default_rng(3)
    size = (19, 26)
    maps = rng.random((6, *size)).astype(np.float32)
    if kind == "few levels":
        maps = (np.floor(maps * 4) / 4).astype(np.float32)
    elif kind == "signed":
        maps = 8 * maps - 4
    elif kind == "sparse":
        maps *= rng.random((6, *size)) < 0.05
    masks: list[Any] = some_masks(rng, 6, size)
    scores = structure(maps, *masks)
    for i in range(6):
        expected = twin(maps[i], *(mask[i] for mask in masks))
        assert {name: scores[name][i].item() for name in expected} == pytest.approx(expected, abs=2e-6)


MAPS = arrays(np.int64, (3, 8, 9), elements=st.integers(0, 1000)).filter(lambda a: np.ptp(a, (1, 2)).all())
SETTINGS = settings(max_examples=30, deadline=None)


def test_score_names_and_variants() -> None:
    masks = code(4)
    auc, mass = structure(ramp(29), *masks), structure(ramp(29), *masks, variant="mass")
    assert list(auc) == ["fmr", "tmr", "bl", "auc_f", "auc_t", "auc_bg", "dts", "score"]
    assert auc["score"] == auc["auc_f"] + auc["auc_t"] - 3 * auc["auc_bg"] - auc["dts"]
    assert mass["score"] == mass["fmr"] + mass["tmr"] - 3 * mass["bl"] - mass["dts"]


@SETTINGS
@given(MAPS, st.floats(1e-3, 1e3), st.permutations(range(3)))
def test_bounds_order_batch_and_scale(values: np.ndarray, factor: float, order: list[int]) -> None:
    maps = values.astype(np.float32)
    masks: list[Any] = some_masks(np.random.default_rng(0), 3, (8, 9))
    scores = structure(maps, *masks)
    assert all(((s >= 0) & (s <= 1)).all() for name, s in scores.items() if name != "score")
    shuffled = structure(maps[order], *(mask[order] for mask in masks))
    single = [structure(maps[i : i + 1], *(mask[i : i + 1] for mask in masks)) for i in range(3)]
    scaled = structure(maps * np.float32(factor), *masks)
    for name, score in scores.items():
        assert torch.equal(shuffled[name], score[order])
        assert torch.allclose(torch.cat([s[name] for s in single]), score, atol=1e-6)
        assert torch.allclose(scaled[name], score, atol=1e-5)


def test_native_maps_are_read_at_image_size() -> None:
    maps = Maps("m", torch.rand(2, 7, 7), (42, 42), torch.zeros(2))
    masks: list[Any] = [mask.repeat_interleave(2, 0).repeat_interleave(2, 1) for mask in code()]
    direct = structure(maps.upsample(), *masks)
    for name, score in structure(maps, *masks).items():
        assert torch.allclose(score, direct[name], atol=1e-6)


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_masks_of_another_size_are_aligned(factor: int) -> None:
    values = torch.rand(2, 42, 42, generator=torch.Generator().manual_seed(0))
    exact: list[Any] = [mask.repeat_interleave(2, 0).repeat_interleave(2, 1) for mask in code()]
    other: list[Any] = [
        mask.repeat_interleave(factor, 0).repeat_interleave(factor, 1).float() for mask in code()
    ]
    expected = structure(values, *exact)
    assert all(torch.equal(score, expected[name]) for name, score in structure(values, *other).items())


def test_any_named_parts() -> None:
    values = torch.rand(3, 29, 29)
    finder, timing, box = code(4)
    code_scores = structure(values, finder, timing, box)
    parts = structure_parts(values, {"a": finder, "b": timing}, region=box)
    renamed = ("mass_a", "mass_b", "leakage", "coverage_a", "coverage_b", "coverage_outside", "distance")
    assert tuple(parts) == renamed
    for name, part in zip(NAMES.values(), renamed, strict=True):
        assert torch.equal(parts[part], code_scores[name])
    lungs = structure_parts(values, {"lung": finder})
    assert torch.allclose(lungs["mass_lung"] + lungs["leakage"], torch.ones(3), atol=1e-5)


def test_without_structure_only_the_distance_is_undefined() -> None:
    values = torch.rand(2, 12, 12)
    values[1] = 0
    empty, box = torch.zeros(12, 12), torch.ones(12, 12)
    scores = structure(values, empty, empty, box)
    assert scores["fmr"][0] == 0 and torch.isnan(scores["dts"]).all() and torch.isnan(scores["score"]).all()
    no_part, constant = scores.reasons("dts")
    assert "no pixel belongs to a part" in no_part and "constant" in constant
    assert scores.reasons("fmr")[0] == ""


def test_distance_is_scipys_and_cached() -> None:
    masks = torch.rand(4, 15, 22, generator=torch.Generator().manual_seed(1)) < 0.05
    expected = np.stack([distance_transform_edt(~mask) for mask in masks.numpy()])
    assert np.allclose(distance_to(masks).numpy(), expected, atol=1e-6)
    before = _transform.cache_info().hits
    distance_to(masks)
    assert _transform.cache_info().hits == before + 4
    assert torch.isinf(distance_to(torch.zeros(1, 3, 3, dtype=torch.bool))).all()


def test_many_maps_are_cut_into_pieces_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    values, masks = torch.rand(5, 21, 21), code()
    whole = structure(values, *masks)
    monkeypatch.setitem(PIXELS_AT_ONCE, "cpu", 2 * 441)
    assert all(torch.equal(score, whole[name]) for name, score in structure(values, *masks).items())


def test_empty_batch_gives_empty_scores() -> None:
    assert all(s.shape == (0,) for s in structure(torch.zeros(0, 21, 21), *code()).values())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"variant": "mas"}, "did you mean 'mass'"),
        ({"finder": torch.zeros(3, 21, 21)}, "finder must be one mask"),
        ({"timing": torch.zeros(21)}, "timing must be one mask"),
        ({"box": torch.full((21, 21), torch.nan)}, "box contains NaN"),
        ({"maps": torch.full((2, 21, 21), torch.inf)}, "NaN or infinite"),
        ({"maps": torch.zeros(21, 21)}, "maps must be 'b h w'"),
    ],
)
def test_bad_input_raises_a_clear_error(change: dict[str, Any], sentence: str) -> None:
    finder, timing, box = code()
    given_ = {"maps": torch.rand(2, 21, 21), "finder": finder, "timing": timing, "box": box} | change
    with pytest.raises(InputError, match=sentence) as error:
        structure(**given_)
    assert "\n" not in str(error.value)


def test_no_parts_is_refused() -> None:
    with pytest.raises(InputError, match="parts is empty"):
        structure_parts(torch.rand(1, 4, 4), {})


def test_epsilon_is_added_to_the_range_of_the_raw_map() -> None:
    """Equations 3 to 5 in float64, for maps whose range is near epsilon."""
    finder, timing, box = (np.asarray(mask, dtype=np.float64) for mask in code())
    values = np.random.default_rng(0).random((21, 21))
    for scale in (1.0, 1e-5, 1e-7, 1e-9):
        raw = values * scale
        tilde = (raw - raw.min()) / (raw.max() - raw.min() + 1e-6)
        total = tilde.sum() + 1e-6
        scores = structure(torch.tensor(raw[None]).float(), *code())
        for name, mask in (("fmr", finder), ("tmr", timing), ("bl", 1 - box)):
            assert float(scores[name]) == pytest.approx((tilde * mask).sum() / total, rel=1e-4)
    vanishing = structure(torch.tensor(values[None] * 1e-16).float(), *code())
    assert vanishing["fmr"].isnan().all() and "constant" in vanishing.reasons("fmr")[0]


def test_an_image_without_a_part_has_no_mass_on_it() -> None:
    masks = torch.zeros(2, 6, 6)
    masks[0, :3] = 1
    scores = structure_parts(torch.rand(2, 6, 6), {"lung": masks, "heart": torch.eye(6)})
    assert scores["mass_lung"].isnan().tolist() == scores["coverage_lung"].isnan().tolist() == [False, True]
    assert scores.reasons("mass_lung") == ["", "the image has no lung"]
    assert not scores["mass_heart"].isnan().any()


def test_parts_of_documents_from_a_csv_in_a_run(tmp_path: Path) -> None:
    """Masks per part, with the page as the region; one page has no stamp."""
    lines = ["path,label,mask_page,mask_title,mask_stamp"]
    for i in range(3):
        pixels, masks = np.full((32, 32, 3), 90, np.uint8), np.zeros((3, 32, 32), np.uint8)
        masks[0, 4:28, 6:26], masks[1, 6:9, 8:24], masks[2, 18:25, 15:23] = 255, 255, 255
        pixels[masks[0] > 0] = 240
        pixels[masks[1] > 0] = np.random.default_rng(i).integers(0, 255, (int((masks[1] > 0).sum()), 3))
        names = [f"{i}-{part}.png" for part in ("page", "title", "stamp")]
        for name, mask in zip(names, masks, strict=True):
            Image.fromarray(mask).save(tmp_path / name)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,letter,{names[0]},{names[1]},{names[2] if i else ''}")
    (tmp_path / "parts.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "net.py").write_text(
        "from heatproof.train import small_net\ndef make(): return small_net(2, size=32, width=4)\n"
    )
    study = """
methods = ["gradcam++", "edges"]
metrics = ["structure_parts(region='page')"]
run = {device = "cpu", targets = "predicted"}
model = {spec = "net.py:make"}
images = {kind = "csv", path = "parts.csv"}
preprocess = {size = [32, 32], resize = 32}
"""
    (tmp_path / "study.toml").write_text(study)
    folder = run_study(tmp_path / "study.toml", tmp_path / "run").folder
    rows = folder.scores().sql("from scores where metric like 'structure_parts%'")
    by_key = {(row["image"], row["method"], row["metric"]): row for row in rows}
    name = "structure_parts_{}(region='page')"
    missing = by_key["0.png", "edges", name.format("mass_stamp")]
    assert math.isnan(missing["value"]) and missing["reason"] == "the image has no stamp"
    (checkpoint,) = {row["checkpoint"] for row in rows}
    truth = {
        part: np.asarray(Image.open(tmp_path / f"1-{part}.png")) > 0 for part in ("title", "stamp", "page")
    }
    for method in ("gradcam++", "edges"):
        maps = folder.maps().read(checkpoint, method, ["1.png"])
        region = truth["page"]
        expected = structure_parts(maps, {part: truth[part] for part in ("title", "stamp")}, region)
        for part, value in expected.items():
            assert by_key["1.png", method, name.format(part)]["value"] == pytest.approx(
                float(value), abs=1e-6
            )
    (tmp_path / "study.toml").write_text(study.replace("'page'", "'pag'"))
    with pytest.raises(InputError, match="there is no mask 'pag'; did you mean 'page'"):
        run_study(tmp_path / "study.toml", tmp_path / "other")
