"""Networks of MONAI by name, explained in two dimensions and in three."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import heatproof as hp
from heatproof.errors import ModelError, TargetError, UnknownNameError
from heatproof.models.model import bind_targets

SMALL: dict[str, Any] = {"init_features": 4, "growth_rate": 4, "block_config": (1, 1)}


@pytest.fixture(scope="module", autouse=True)
def monai() -> None:
    """Imported when a test of this file begins: it takes seconds, also where other files are tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        pytest.importorskip("monai.networks.nets", reason="install heatproof[monai]")


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


SMALL_VIT: dict[str, Any] = {
    "patch_size": (8, 8, 8),
    "hidden_size": 24,
    "mlp_dim": 32,
    "num_layers": 2,
    "num_heads": 2,
}


def test_a_transformer_is_read_at_its_own_size() -> None:
    pytest.importorskip("einops", reason="install heatproof[monai]")
    model = hp.load_model(
        "monai:ViT", num_classes=3, img_size=(16, 24, 16), post_activation=None, **SMALL_VIT
    )
    assert model.preprocess.size == (16, 24, 16) and model.preprocess.channels == 1
    maps = hp.explain(model, torch.rand(2, 1, *model.preprocess.size), ["gradcam", "gradient"], targets=2)
    assert maps["gradcam"].values.shape == (2, 2, 3, 2)  # its tokens
    assert maps["gradient"].values.shape == (2, 16, 24, 16)


def test_a_segmentation_of_volumes() -> None:
    """Class 1 in a region: only what reaches the region counts."""
    torch.manual_seed(0)
    model = hp.load_model("monai:UNet", channels=(4, 8), strides=(2,), num_res_units=0, norm=None)
    scan = torch.rand(2, 1, 24, 24, 24)
    region = torch.zeros(24, 24, 24, dtype=torch.bool)
    region[:6, :6, :6] = True
    maps = hp.explain(model, scan, ["gradcam", "gradient"], targets=(1, region))
    assert model.head_name == "segmentation" and maps["gradcam"].values.shape == (2, 12, 12, 12)
    heat = maps["gradient"].values
    assert heat[:, :6, :6, :6].sum() > 0 and heat[:, 16:, 16:, 16:].abs().sum() == 0
    seen = model.module(scan)
    bound, columns = bind_targets(model, scan, (1, region))
    torch.testing.assert_close(
        bound.logits(scan).gather(1, columns.numbers[:, None])[:, 0], seen[:, 1, :6, :6, :6].sum((1, 2, 3))
    )
    with pytest.raises(TargetError, match="a region is a mask 'D H W'"):
        hp.explain(model, scan, "gradient", targets=(1, region[0]))
