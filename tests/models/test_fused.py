"""Convolutions up to their ReLU in one kernel: which are found, that answers stay, and what undoes it.

cuDNN's kernels are on a GPU alone; here two functions of torch take their place, which compute the same.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import heatproof as hp
from heatproof.models.accel import Accelerator
from heatproof.models.accel.folding import DeferredConv, Folding


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins, and what was called."""
    called: list[str] = []

    def plain(x: Tensor, w: Tensor, b: Tensor | None, *how: object) -> Tensor:
        called.append("relu")
        return functional.relu(functional.conv2d(x, w, b, *how))  # type: ignore[call-overload]

    def added(x: Tensor, w: Tensor, z: Tensor, alpha: float, b: Tensor | None, *how: object) -> Tensor:
        called.append("add")
        return functional.relu(functional.conv2d(x, w, b, *how) + alpha * z)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "cudnn_convolution_relu", plain)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", added)
    return called


def lived_in(net: nn.Module) -> nn.Module:
    """With batch norms that have seen something."""
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.2)
            part.running_var.uniform_(0.5, 2)
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, 0, 0.2)
    return net.eval()


def both(net: nn.Module, size: int = 64) -> tuple[Folding, Tensor, Tensor]:
    """What was found, and the logits without and with it."""
    model, images = hp.load_model(net), torch.randn(2, 3, size, size)
    with torch.no_grad():
        plain = model.logits(images)
        fusion = Folding.of(model, images[:1], fuse=True)
        fusion.refresh()
        with fusion():
            fused = model.logits(images)
    assert not any("forward" in part.__dict__ for part in net.modules()), "a patch stayed"
    return fusion, plain, fused


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("resnet18", 17),
        ("squeezenet1_1", 26),
        ("mobilenet_v2", 18),
        ("densenet121", 59),
        ("convnext_tiny", 0),
    ],
)
def test_networks_of_torchvision_answer_the_same(name: str, steps: int) -> None:
    models = pytest.importorskip("torchvision").models
    fusion, plain, fused = both(lived_in(getattr(models, name)(weights=None, num_classes=5)))
    assert len(fusion.steps) == steps
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)


class Block(nn.Module):
    """A shortcut around two convolutions, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.last = nn.Linear(3, 2)

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(x).mean((2, 3)))

    def block(self, x: Tensor) -> Tensor:
        return functional.relu(self.middle(x) + x)


class OtherSide(Block):
    def block(self, x: Tensor) -> Tensor:
        return (x + self.middle(x)).relu()


class InPlace(Block):
    def block(self, x: Tensor) -> Tensor:
        y = self.middle(x)
        y += x
        functional.relu(y, inplace=True)
        return y


class ReadTwice(Block):
    def block(self, x: Tensor) -> Tensor:
        y = self.middle(x)
        return y.relu() + y


class Sigmoid(Block):
    def block(self, x: Tensor) -> Tensor:
        return self.middle(x).sigmoid()


class Changes(Block):
    def block(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.middle(x)
        x.mul_(2)
        return functional.relu(y)


class ChangesShortcut(Block):
    def block(self, x: Tensor) -> Tensor:
        z = x.clone()
        y = self.middle(x) + z
        z.mul_(2)
        return functional.relu(y)


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        (Block, "add"),
        (OtherSide, "add"),
        (InPlace, "add"),
        (ReadTwice, "relu"),
        (Sigmoid, ""),
        (Changes, ""),
        (ChangesShortcut, ""),
    ],
)
def test_blocks_written_by_hand_answer_the_same(kind: type[Block], kernel: str, kernels: list[str]) -> None:
    fusion, plain, fused = both(lived_in(kind()), 8)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
    assert (len(fusion.steps) == 1) == bool(kernel)
    assert kernels[-1:] == ([kernel] if kernel else []) or kind in (Changes, ChangesShortcut)


def test_new_weights_are_seen_and_gradients_are_the_networks_own() -> None:
    net = lived_in(Block())
    model, images = hp.load_model(net), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        fusion = Folding.of(model, images[:1], fuse=True)
        net.first.weight.mul_(3)
        net.norm.running_mean.add_(1)
        fusion.refresh()
        with fusion():
            fused = model.logits(images)
        torch.testing.assert_close(fused, model.logits(images), atol=1e-5, rtol=1e-5)
    given = [images.clone().requires_grad_() for _ in range(2)]
    with fusion():
        model.forward(given[0]).sum().backward()
    model.forward(given[1]).sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad)


def test_what_is_put_off_is_a_tensor_to_everybody_else() -> None:
    net = lived_in(Block())
    model, images = hp.load_model(net), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        fusion, expected = Folding.of(model, images[:1], fuse=True), net.middle(images)
        fusion.refresh()
        with fusion():
            later = net.middle(images)
            assert isinstance(later, DeferredConv) and later.shape == expected.shape
            assert torch.equal(torch.cat([later, later]), torch.cat([expected, expected]))
            assert torch.equal(later.flatten(1).amax(1), expected.flatten(1).amax(1))


def test_on_a_cpu_nothing_is_fused() -> None:
    assert Accelerator(hp.load_model(lived_in(Block()))).faster_pass(torch.randn(1, 3, 8, 8)) is None
