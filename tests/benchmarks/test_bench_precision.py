"""Precision: the same study in two of them, compared map by map and row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks import precision
from benchmarks.sections import BenchOptions
from heatproof.errors import InputError

KEYS = {"maps": "method", "rows": "metric"}


def test_a_study_is_compared_with_itself_in_another_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    torch.manual_seed(0)
    save_file(precision.resnet20().module.state_dict(), tmp_path / "data/cifar10/resnet20.safetensors")
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8), np.arange(2)
    np.savez(tmp_path / "data/cifar10/cifar10.npz", test_images=images, test_labels=labels)
    monkeypatch.setattr(precision, "QUICK_METRICS", ("method_agreement",))
    monkeypatch.chdir(tmp_path)

    tables = {
        part.table: part.measure() for part in precision.parts(BenchOptions(quick=True, data=Path("data")))
    }
    maps, rows = ({str(row[key]): row for row in tables[name]} for name, key in KEYS.items())
    assert set(maps) == {"gradcam", "gradient"} and {row["images"] for row in maps.values()} == {2}
    assert 0.5 < float(str(maps["gradient"]["spearman_median"])) < 1, "half the digits were there"
    assert (
        rows["method_agreement_spearman"]["rows"] == 1 and float(str(rows["probability"]["row_change"])) > 0
    )


def test_it_says_what_it_needs() -> None:
    with pytest.raises(InputError, match="--data"):
        next(precision.parts(BenchOptions()))
