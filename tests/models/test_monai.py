"""Networks of MONAI by name, explained in two dimensions and in three."""

from __future__ import annotations

import warnings

import pytest
import torch

import heatproof as hp
from heatproof.errors import ModelError, UnknownNameError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports
    pytest.importorskip("monai.networks.nets", reason="install heatproof[monai]")

SMALL = {"init_features": 4, "growth_rate": 4, "block_config": (1, 1)}


@pytest.mark.parametrize("dims", [2, 3])
def test_a_densenet_by_name(dims: int) -> None:
    model = hp.load_model("monai:DenseNet", num_classes=3, spatial_dims=dims, in_channels=2, **SMALL)
    size = (32,) * dims
    assert len(model.preprocess.size) == dims and model.preprocess.channels == 2
    images = torch.rand(2, 2, *size)
    maps = hp.explain(model, images, ["gradcam", "gradient", "ms-gradcam++"])
    assert model.logits(images).shape == (2, 3)
    assert maps["gradcam"].values.ndim == dims + 1 and maps["gradcam"].upsample().shape == (2, *size)


def test_a_function_that_makes_one() -> None:
    model = hp.load_model("monai:resnet10", num_classes=4)
    assert model.preprocess.size == (96, 96, 96)
    assert model.logits(torch.rand(1, 1, 32, 32, 32)).shape == (1, 4)


def test_names_and_options_that_do_not_fit() -> None:
    with pytest.raises(UnknownNameError, match="unknown MONAI network 'DensNet'"):
        hp.load_model("monai:DensNet")
    with pytest.raises(ModelError, match="monai:UNet cannot be built: TypeError"):
        hp.load_model("monai:UNet")
