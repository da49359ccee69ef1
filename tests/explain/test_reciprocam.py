"""ReciproCAM against a slow twin that cuts the network by hand; what it costs; transformers."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import heatproof as hp
from conftest import small_cnn
from heatproof.errors import InputError
from heatproof.explain.cams import bumps
from heatproof.models.model import as_model

BUMP = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1]], dtype=torch.float64) / 16


def slow_twin(features: Tensor, behind: nn.Module, target: int, gaussian: bool) -> Tensor:
    """ "h w", cell by cell, as the paper writes it; float64."""
    _, height, width = features.shape
    result = torch.zeros(height, width, dtype=torch.float64)
    for i in range(height):
        for j in range(width):
            mask = torch.zeros(height, width, dtype=torch.float64)
            for di in (-1, 0, 1) if gaussian else (0,):
                for dj in (-1, 0, 1) if gaussian else (0,):
                    if 0 <= i + di < height and 0 <= j + dj < width:
                        mask[i + di, j + dj] = BUMP[di + 1, dj + 1] if gaussian else 1
            with torch.no_grad():
                result[i, j] = behind((features * mask)[None]).softmax(1)[0, target]
    return result


@pytest.mark.parametrize("mask", ["gaussian", "cell"])
def test_reciprocam_is_its_slow_twin(mask: str) -> None:
    net = torchvision.models.resnet18(num_classes=5).eval().double()
    images = torch.randn(2, 3, 96, 64, dtype=torch.float64)
    method = f"reciprocam(mask='{mask}')"
    maps = hp.explain(net, images, method, targets=[1, 3], layer="layer4")[method]
    parts = list(net.children())
    before, behind = nn.Sequential(*parts[:-2]), nn.Sequential(parts[-2], nn.Flatten(), parts[-1])
    with torch.no_grad():
        features = before(images)
    assert maps.values.shape == (2, 3, 2)
    for i, target in enumerate((1, 3)):
        expected = slow_twin(features[i], behind, target, mask == "gaussian")
        torch.testing.assert_close(maps.values[i].double(), expected, rtol=0, atol=1e-6)
    assert (maps.values.flatten(1).std(1) > 0).all()


def test_only_the_tail_is_rerun() -> None:
    net, image = torchvision.models.resnet18(num_classes=4).eval(), torch.randn(1, 3, 96, 96)
    stem, cells = [], []
    original = net.conv1._conv_forward
    net.conv1._conv_forward = lambda *a: (stem.append(1), original(*a))[1]
    net.fc.register_forward_hook(lambda _m, inputs, _o: cells.append(len(inputs[0])))
    hp.explain(net, image, "reciprocam", layer="layer4", batch_size=4)
    assert len(stem) == 2  # the shared pass and the one that is recorded
    assert sum(cells) == 1 + 1 + 2 + 3 * 3  # both of those, the check with two copies, every cell once
    assert max(cells) == 4


def test_a_cell_alone_and_a_bump_at_the_border() -> None:
    assert torch.equal(bumps(2, 3, "cell").flatten(1), torch.eye(6))
    whole = bumps(4, 5).view(4, 5, 4, 5)
    assert torch.equal(whole[1, 2, 0:3, 1:4], BUMP.float()) and whole[1, 2].sum() == 1
    assert whole[0, 0].sum() == 9 / 16


def test_a_transformer_keeps_its_class_token() -> None:
    vit = timm.create_model(
        "vit_tiny_patch16_224", num_classes=4, img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3
    ).eval()
    image = torch.randn(1, 3, 32, 32)
    model = as_model(vit)
    maps = hp.explain(model, image, "reciprocam(mask='cell')", targets=2)["reciprocam(mask='cell')"]
    layer = vit.get_submodule(hp.models.default_layer(model))
    assert maps.values.shape == (1, 4, 4)

    def keep_one(cell: int) -> float:
        def cut(_m: nn.Module, _i: object, output: Tensor) -> Tensor:
            masked = torch.zeros_like(output)
            masked[:, 0], masked[:, 1 + cell] = output[:, 0], output[:, 1 + cell]
            return masked

        with layer.register_forward_hook(cut), torch.no_grad():
            return float(vit(image).softmax(1)[0, 2])

    expected = torch.tensor([keep_one(cell) for cell in range(16)])
    torch.testing.assert_close(maps.values.flatten(), expected, rtol=0, atol=1e-6)


def test_an_unknown_mask_is_refused() -> None:
    with pytest.raises(InputError, match="'gaussian' or 'cell'"):
        hp.explain(small_cnn(), torch.randn(1, 3, 16, 16), "reciprocam(mask='disc')")
