"""The other libraries' contenders in `heatproof bench` are called the way those libraries want it."""

from __future__ import annotations

import pytest
import torch

from conftest import small_cnn
from heatproof.bench import explain as section
from heatproof.models.model import Model


@pytest.mark.parametrize("name", ["ig", "lime"])
def test_reference_contenders_run(name: str) -> None:
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    contenders = section._reference_perturbations(Model(small_cnn().eval()), image, batch=4, samples=8)
    assert contenders[name]() is not None
