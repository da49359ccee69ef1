"""The real kernels on a GPU: fused convolutions, CUDA graphs, recorded passes, against the plain network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_fused import Block, ChangesShortcut, InPlace, OtherSide, ReadTwice, Sigmoid, lived_in
from torch import Tensor, nn
from torch.nn import functional

import heatproof as hp
from conftest import needs_cuda, same, small_cnn, state_of
from heatproof.models.accel import SWITCH, WORTH_IT, Accelerator
from heatproof.models.model import all_logits
from heatproof.models.running import frozen_eval

pytestmark = needs_cuda
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 0.1}  # of the largest logit
CAMS = ["gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam"]
KERNELS = ("cudnn_convolution_relu", "cudnn_convolution_add_relu")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the cuDNN kernels that were called; they run."""
    called: list[str] = []

    def counting(name: str) -> None:
        kernel = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args: called.append(name) or kernel(*args))

    for name in KERNELS:
        counting(name)
    return called


def pair(net: nn.Module, precision: str | None = None) -> tuple[hp.Model, hp.Model]:
    """The same network, accelerated and plain."""
    fast, plain = (
        hp.load_model(net.eval(), device="cuda", precision=precision, accelerate=accelerate)
        for accelerate in (True, False)
    )
    return fast, plain


def images(count: int = 4, size: int = 64) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0)).cuda()


def close(result: Tensor, expected: Tensor, precision: str) -> None:
    assert (result - expected).abs().max() <= TOLERANCE[precision] * expected.abs().max()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(
    ("name", "steps"), [("resnet18", 17), ("squeezenet1_1", 26), ("mobilenet_v2", 18), ("densenet121", 59)]
)
def test_fused_kernels_return_the_logits_of_the_plain_network(
    name: str, steps: int, precision: str, kernels: list[str]
) -> None:
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    fast, plain = pair(lived_in(getattr(models, name)(weights=None, num_classes=5)), precision)
    given, before = images(), state_of(fast.module)
    expected = plain.logits(given)
    assert not kernels, "the plain network called a fused kernel"
    with frozen_eval(fast.module), torch.no_grad():
        fused = Accelerator(fast).faster_pass(given)
        assert fused is not None
        kernels.clear()
        with fused():
            logits = fast.forward(fast.ready(given))
    assert len(kernels) == steps
    assert (KERNELS[1] in kernels) == (name == "resnet18"), "shortcuts are added by the kernel"
    close(logits, expected, precision)
    assert same(before, state_of(fast.module))
    assert not any("forward" in part.__dict__ for part in fast.module.modules())


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [(Block, KERNELS[1]), (OtherSide, KERNELS[1]), (InPlace, KERNELS[1]), (ReadTwice, KERNELS[0]),
     (Sigmoid, ""), (ChangesShortcut, "")],
)  # fmt: skip
def test_blocks_written_by_hand(kind: type[Block], kernel: str, kernels: list[str]) -> None:
    fast, plain = pair(lived_in(kind()), "fp32")
    given = images(size=8)
    expected = plain.logits(given)
    with frozen_eval(fast.module), torch.no_grad():
        fused = Accelerator(fast).faster_pass(given)
        assert (fused is not None) == bool(kernel)
        kernels.clear()
        if fused is not None:
            with fused():
                close(fast.forward(fast.ready(given)), expected, "fp32")
    assert kernels == ([kernel] if kernel else [])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_long_job_is_fused_and_recorded_and_sees_changed_weights(
    precision: str, kernels: list[str]
) -> None:
    fast, plain = pair(lived_in(small_cnn()), precision)
    given = images(2 * WORTH_IT, 32)
    for turn in range(3):
        result, expected = (all_logits(model, given, 64) for model in (fast, plain))
        close(result, expected, precision)
        with torch.no_grad():  # in place, by a new tensor, and of a norm's statistics
            if turn == 0:
                fast.module[0].weight.mul_(1.5)
            else:
                fast.module[0].weight.data = fast.module[0].weight.data * 0.5
                fast.module[1].running_mean.add_(0.2)
    graphs = fast.facts.acceleration.graphs
    assert graphs is not None and graphs.recordings and not graphs.reason and kernels
    assert any("one kernel" in sentence for sentence in Accelerator(fast).describe())
    assert not Accelerator(plain).describe()


def test_gradients_of_a_long_job_are_those_of_the_plain_network() -> None:
    fast, plain = pair(lived_in(small_cnn()), "fp32")
    methods = ["smoothgrad(samples=300)", "ig(steps=300)"]
    result, expected = (hp.explain(model, images(2, 32), methods, 1) for model in (fast, plain))
    for method in methods:
        torch.testing.assert_close(result[method].values, expected[method].values, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1"])
def test_maps_of_recorded_passes_are_those_of_the_plain_network(name: str, precision: str) -> None:
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    net = lived_in(getattr(models, name)(weights=None, num_classes=5))
    fast, plain = pair(net, precision)
    for turn in range(5):  # plain, plain, recorded, replayed, replayed for another class
        given, targets = images().roll(turn, 0), None if turn < 4 else 2
        result, expected = (hp.explain(model, given, CAMS, targets) for model in (fast, plain))
        for method in CAMS:
            assert torch.equal(result[method].explained, expected[method].explained) or precision == "bf16"
            gap = (result[method].normalised() - expected[method].normalised()).abs().mean()
            assert gap < (0.05 if precision == "bf16" else 5e-3), (method, turn)
    graphs = fast.facts.acceleration.graphs
    assert graphs is not None and graphs.recordings and graphs.requests and not graphs.reason


class Hooked(nn.Module):
    """Rectifies by a function, behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(self.norm(self.conv(x))).mean((2, 3)))


def test_networks_with_hooks_run_plainly(kernels: list[str]) -> None:
    fast, plain = pair(lived_in(Hooked()), "fp32")
    seen: list[Any] = []
    with fast.module.norm.register_forward_hook(lambda _m, _i, output: seen.append(output)):
        for _ in range(4):
            all_logits(fast, images(WORTH_IT, 32), 64)
    assert seen and not kernels and fast.facts.acceleration.graphs is None
    close(all_logits(fast, images(WORTH_IT, 32)), all_logits(plain, images(WORTH_IT, 32)), "fp32")
    assert kernels


def test_the_environment_switches_acceleration_off(
    monkeypatch: pytest.MonkeyPatch, kernels: list[str]
) -> None:
    fast, _ = pair(lived_in(small_cnn()))
    monkeypatch.setenv(SWITCH, "0")
    for _ in range(4):
        all_logits(fast, images(WORTH_IT, 32), 64)
        hp.explain(fast, images(), CAMS)
    state = fast.facts.acceleration
    assert not kernels and state.graphs is None and state.folding is None
