"""Volumes: a network whose third axis is constant is explained as its twin for pictures is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from conftest import needs_cuda
from heatproof.errors import HeatproofError, InputError
from heatproof.registry import explainers

DEPTH, SIDE = 4, 16
WITH_VOLUMES = [entry.name for entry in explainers if entry.volumes]
# Along a constant third axis these say the same in each slice. The others draw in three dimensions (noise,
# superpixels) or know where the middle of a volume is.
CONSTANT = {
    "ablationcam": "", "cam": "",
    "deeplift": "", "edges": "", "eigencam": "", "eigengradcam": "", "fullgrad": "",
    "gradcam": "", "gradcam++": "", "gradient": "", "gradient-x-input": "", "guided-backprop": "",
    "hirescam": "", "integrated-gradients": "(steps=4)", "layercam": "", "lrp": "", "ms-gradcam++": "",
    "occlusion": "(window=4, stride=2)", "scorecam": "",
    "smooth-gradcam++": "(samples=2, noise=0)", "smoothgrad": "(samples=2, noise=0)", "xgradcam": "",
}  # fmt: skip
DIFFERENT = {"centre", "gradient-shap", "guided-ig", "kernel-shap", "lime", "random"}
QUICK = {"kernel-shap": "(samples=20)", "lime": "(samples=20)", "guided-ig": "(steps=3)"}


def twins() -> tuple[nn.Module, nn.Module]:
    """A network for pictures, and the same with kernels 1 x k x k for volumes."""

    def layers(three: bool) -> nn.Module:
        conv: Any
        conv, norm = (nn.Conv3d, nn.BatchNorm3d) if three else (nn.Conv2d, nn.BatchNorm2d)
        pool = nn.MaxPool3d((1, 2, 2)) if three else nn.MaxPool2d(2)
        flat = nn.AdaptiveAvgPool3d(1) if three else nn.AdaptiveAvgPool2d(1)

        def sides(n: int) -> tuple[int, ...]:
            return (1, n, n) if three else (n, n)

        padding = (0, 1, 1) if three else (1, 1)
        return nn.Sequential(
            conv(2, 6, sides(3), padding=padding), norm(6), nn.ReLU(), pool,
            conv(6, 8, sides(3), padding=padding), nn.ReLU(), flat, nn.Flatten(), nn.Linear(8, 3),
        )  # fmt: skip

    torch.manual_seed(3)
    pictures, volumes = layers(False), layers(True)
    with torch.no_grad():
        pictures[1].running_mean += torch.rand(6)
    state = {
        name: value[:, :, None] if value.ndim == 4 else value for name, value in pictures.state_dict().items()
    }
    volumes.load_state_dict(state)
    return pictures.eval(), volumes.eval()


def repeated(images: Tensor) -> Tensor:
    return images[:, :, None].repeat(1, 1, DEPTH, 1, 1)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(2, 2, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def test_every_method_that_takes_volumes_is_named_here() -> None:
    assert set(WITH_VOLUMES) == CONSTANT.keys() | DIFFERENT


@pytest.mark.parametrize("method", CONSTANT)
def test_a_constant_third_axis_changes_nothing(method: str, images: Tensor) -> None:
    pictures, volumes = twins()
    call = method + CONSTANT[method]
    flat = hp.explain(pictures, images, call, targets=1)[call]
    deep = hp.explain(volumes, repeated(images), call, targets=1)[call]
    assert deep.image_size == (DEPTH, SIDE, SIDE)
    assert flat.values.std() > 0
    torch.testing.assert_close(deep.upsample(), repeated(flat.upsample()[:, None])[:, 0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", WITH_VOLUMES)
def test_maps_of_volumes_are_finite_and_know_their_size(method: str) -> None:
    _, volumes = twins()
    inputs = torch.rand(2, 2, 5, SIDE, 12, generator=torch.Generator().manual_seed(2))
    call = method + QUICK.get(method, "")
    maps = hp.explain(volumes, inputs, call)[call]
    assert maps.values.ndim == 4 and maps.values.isfinite().all()
    assert maps.upsample().shape == (2, 5, SIDE, 12)
    alone = hp.explain(volumes, inputs[1:], call, targets=maps.explained[1:])[call]
    torch.testing.assert_close(alone.values, maps.values[1:], rtol=1e-3, atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("method", sorted({*WITH_VOLUMES} - {"smoothgrad", "gradient-shap"}))
def test_on_a_gpu_volumes_have_the_maps_of_a_cpu(method: str) -> None:
    _, volumes = twins()
    inputs = torch.rand(2, 2, 5, SIDE, 12, generator=torch.Generator().manual_seed(2))
    call = method + QUICK.get(method, "")
    expected = hp.explain(volumes, inputs, call)[call].normalised()
    model = hp.load_model(volumes, device="cuda", precision="fp32")
    for _ in range(4):
        result = hp.explain(model, inputs, call)[call].normalised()
        torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("method", [entry.name for entry in explainers if not entry.volumes])
def test_the_others_refuse_volumes_with_a_clear_error(method: str) -> None:
    _, volumes = twins()
    with pytest.raises(InputError, match=f"^{method} is not built for volumes; leave it out or use one of"):
        hp.explain(volumes, torch.rand(1, 2, DEPTH, SIDE, SIDE), method)


def test_a_network_for_pictures_says_what_it_takes() -> None:
    pictures, _ = twins()
    with pytest.raises(HeatproofError, match="cannot take images of shape"):
        hp.explain(pictures, torch.rand(1, 2, DEPTH, SIDE, SIDE), "gradcam")
