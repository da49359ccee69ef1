"""Precision: what it changes, what it leaves alone, and that a run keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import heatproof as hp
from conftest import needs_cuda, small_cnn
from heatproof.errors import InputError, StoreError
from heatproof.models.running import computing, usual_precision
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from tiny_study import fingerprint, make_study

CPU = torch.device("cpu")


def test_an_unknown_precision_raises_a_clear_error() -> None:
    with pytest.raises(InputError, match="precision cannot be 'bf61'; did you mean 'bf16'"):
        hp.load_model(small_cnn(), precision="bf61")


def test_bf16_rounds_the_passes_and_maps_stay_float32() -> None:
    net, images = small_cnn().eval(), torch.randn(6, 3, 32, 32)
    exact, rough = (hp.load_model(net, precision=name) for name in ("fp32", "bf16"))
    plain = hp.load_model(net)
    assert torch.equal(exact.logits(images), plain.logits(images))
    gap = (rough.logits(images) - exact.logits(images)).abs().max()
    assert 1e-5 < gap < 0.05 and rough.logits(images).dtype == torch.float32
    assert next(net.parameters()).dtype == torch.float32
    for method in ("gradcam", "layercam", "gradient", "rise(masks=300)"):
        a, b = (hp.explain(m, images, method, targets=1)[method] for m in (exact, rough))
        assert b.values.dtype == torch.float32
        assert 0 < (a.normalised() - b.normalised()).abs().mean() < 0.02, method


def test_fp32_is_exact_also_where_the_caller_computes_in_bf16() -> None:
    net, images = small_cnn().eval(), torch.randn(2, 3, 32, 32)
    exact, as_set = hp.load_model(net, precision="fp32"), hp.load_model(net)
    expected = exact.logits(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(exact.logits(images), expected)
        assert not torch.equal(as_set.logits(images), expected)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", None])
def test_torchs_settings_come_back(precision: str | None) -> None:
    def settings() -> tuple[bool, ...]:
        return (
            torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(),
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.deterministic,
        )  # fmt: skip

    before = settings()
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        with pytest.raises(ZeroDivisionError), computing(precision, torch.device(device)):
            assert torch.is_autocast_enabled(device) == (precision == "bf16")
            raise ZeroDivisionError
        assert settings() == before
    assert usual_precision("cpu") == "fp32"


def test_a_run_keeps_its_precision_and_its_batch(tmp_path: Path) -> None:
    study = make_study(tmp_path, run='precision = "bf16"')
    run_study(study, tmp_path / "out")
    settings = RunFolder.open(tmp_path / "out").manifest.config["run"]
    assert settings["precision"] == "bf16" and settings["inputs_per_pass"] >= 1
    with pytest.raises(StoreError, match="precision"):
        run_study(make_study(tmp_path, run='precision = "fp32"'), tmp_path / "out")
    with pytest.raises(InputError, match=r"run.precision cannot be 'half'"):
        run_study(make_study(tmp_path, run='precision = "half"'), tmp_path / "other")
    usual = make_study(tmp_path)
    run_study(usual, tmp_path / "usual")
    assert RunFolder.open(tmp_path / "usual").manifest.config["run"]["precision"] == "fp32"
    # How many inputs a pass takes may change: no row depends on it but for its last bits.
    result = run_study(make_study(tmp_path, run="inputs_per_pass = 3"), tmp_path / "usual")
    assert result.done == result.units and result.computed == 0


@needs_cuda
def test_on_a_gpu_a_study_has_the_same_bits_each_time(tmp_path: Path) -> None:
    methods = ["gradcam", "gradient", "integrated-gradients(steps=8)", "lime(samples=32)"]
    metrics = ["insertion(steps=4)", "randomisation(depths=2)", "fragility(draws=1)"]
    study = make_study(tmp_path, methods=methods, metrics=metrics, run='precision = "fp32"')
    study.write_text(study.read_text().replace('device = "cpu"', 'device = "cuda"'))
    for name in ("first", "again"):
        run_study(study, tmp_path / name)
    assert fingerprint(tmp_path / "first") == fingerprint(tmp_path / "again")
