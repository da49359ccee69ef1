"""Folded batch norms: the same answers over families, the weights of today, a module left as it was."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import Tensor, nn

import heatproof as hp
from conftest import same, small_cnn, state_of
from heatproof.models.accel import WORTH_IT, AccelerationState, Accelerator
from heatproof.models.accel.folding import Folding, foldable
from heatproof.models.model import Queue, all_logits
from heatproof.models.running import frozen_eval


def trained(module: nn.Module, seed: int = 0) -> nn.Module:
    """Batch norms with statistics and weights of their own, as after training."""
    random = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            n = part.num_features
            part.running_mean = 0.3 * torch.randn(n, generator=random)
            part.running_var = 0.3 + torch.rand(n, generator=random)
            part.weight.data = 0.5 + torch.rand(n, generator=random)
            part.bias.data = 0.2 * torch.randn(n, generator=random)
    return module.eval()


def some(count: int = 3, size: int = 64) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def folded_and_plain(model: hp.Model, images: Tensor) -> tuple[Tensor, Tensor, Folding]:
    with frozen_eval(model.module), torch.no_grad():
        inputs = model.ready(images)
        folding = Accelerator(model).folding(inputs[:1])
        assert folding is not None
        folding.refresh()
        with folding():
            folded = model.forward(inputs)
        return folded, model.forward(inputs), folding


@pytest.mark.parametrize(
    ("name", "pairs", "norms"),
    [("resnet18", 20, 20), ("mobilenet_v2", 52, 52), ("densenet121", 59, 121), ("efficientnet_b0", 49, 49)],
)
def test_families_answer_the_same_folded(name: str, pairs: int, norms: int) -> None:
    model = hp.Model(trained(getattr(torchvision.models, name)(num_classes=10)))
    before = state_of(model.module)
    folded, plain, folding = folded_and_plain(model, some())
    assert not torch.equal(folded, plain), "nothing was folded"
    assert (folded - plain).abs().max() <= 1e-5 * plain.abs().max()
    assert len(folding.steps) == pairs
    assert sum(isinstance(part, nn.BatchNorm2d) for part in model.module.modules()) == norms
    assert same(before, state_of(model.module))
    assert not any("forward" in part.__dict__ for part in model.module.modules())
    # What it costs: as much memory again as the folded convolutions' weights.
    assert all(step.weight.shape == step.conv.weight.shape for step in folding.steps)


@pytest.mark.parametrize("name", ["squeezenet1_1", "convnext_tiny"])
def test_families_without_batch_norms_are_left_alone(name: str) -> None:
    model = hp.Model(getattr(torchvision.models, name)(num_classes=10).eval())
    with frozen_eval(model.module):
        assert Accelerator(model).folding(some(1)) is None


class Odd(nn.Module):
    """A convolution that two read, one that runs twice, one whose norm another function comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.read_twice, self.norm1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.run_twice, self.norm2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.changed, self.norm3 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.plain, self.norm4 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        between = self.read_twice(x)
        x = self.norm1(between) + between
        x = self.norm2(self.run_twice(self.run_twice(x)))
        x = self.norm3(self.changed(x).mul_(2))
        x = self.norm4(self.plain(x))
        return self.head(x.mean((2, 3)))


def test_only_layers_without_other_readers_are_folded() -> None:
    model = hp.Model(trained(Odd()))
    pairs, logits = foldable(model, model.ready(some(1)))
    assert [conv for conv, _ in pairs] == [model.module.plain] and logits.shape == (1, 3)
    folded, plain, _ = folded_and_plain(model, some())
    torch.testing.assert_close(folded, plain)


@pytest.mark.parametrize("how", ["data", "in place", "loaded", "statistics", "replaced"])
def test_changed_weights_are_seen(how: str) -> None:
    model = hp.Model(trained(small_cnn()))
    images = some(WORTH_IT, 32)
    net = model.module

    def logits() -> Tensor:
        with frozen_eval(net):
            return Queue(model, (32, 32)).predict(len(images), lambda i, j: images[i:j], lambda y, *_: y)

    first = logits()
    assert model.facts.acceleration.folding[1].steps
    with torch.no_grad():
        if how == "data":
            net[0].weight.data.mul_(3)  # which no version counter sees
        elif how == "in place":
            net[1].bias.add_(1)
        elif how == "loaded":
            net.load_state_dict(trained(small_cnn(seed=3), seed=4).state_dict())
        elif how == "statistics":
            net[1].running_mean.add_(0.5)
        else:
            net[0] = nn.Conv2d(3, 8, 3, padding=1)
        expected = net(images)
    second = logits()
    assert not torch.allclose(second, first, atol=1e-3)
    torch.testing.assert_close(second, expected, atol=1e-5, rtol=1e-5)


def test_short_jobs_hooks_and_training_are_not_folded() -> None:
    model = hp.Model(trained(small_cnn()))
    image = model.ready(some(1, 32))

    def job(count: int) -> None:
        with frozen_eval(model.module):
            Queue(model, (32, 32)).predict(
                count, lambda i, j: image.expand(j - i, -1, -1, -1), lambda y, *_: y
            )

    job(WORTH_IT - 1)
    assert model.facts.acceleration.folding is None
    seen: list[float] = []
    with model.module[1].register_forward_hook(lambda _m, _i, output: seen.append(float(output.mean()))):
        job(WORTH_IT)
    with torch.no_grad():
        expected = float(model.module[:2](image).mean())
    assert len(seen) > 2, "who looks at the norm sees the norm's own output"
    assert seen == pytest.approx([expected] * len(seen), rel=1e-4)
    model.facts.acceleration.folding = None
    folding = Accelerator(model).folding(image)
    assert folding is not None
    model.module.train()
    assert Accelerator(model).folding(image) is None
    model.module.eval()
    assert Accelerator(model).folding(image) is folding


def test_gradients_of_the_input_are_the_same_folded() -> None:
    model = hp.Model(trained(small_cnn()))
    images, targets = some(WORTH_IT, 32), torch.arange(WORTH_IT) % 5
    gradients: list[Tensor] = []
    with frozen_eval(model.module):
        Queue(model, (32, 32)).input_gradients(
            WORTH_IT, lambda i, j: (images[i:j], targets[i:j]), lambda g, *_: gradients.append(g)
        )
    inputs = images.clone().requires_grad_()
    model.module(inputs).gather(1, targets[:, None]).sum().backward()
    assert inputs.grad is not None and model.facts.acceleration.folding[1].steps
    torch.testing.assert_close(torch.cat(gradients), inputs.grad, atol=1e-5, rtol=1e-4)


def test_the_module_is_whole_again_when_a_pass_fails() -> None:
    model = hp.Model(trained(small_cnn()))
    with frozen_eval(model.module):
        folding = Accelerator(model).folding(some(1, 32))
        assert folding is not None
        with pytest.raises(RuntimeError), folding():
            model.forward(torch.zeros(1, 5, 32, 32))
    assert not any("forward" in part.__dict__ for part in model.module.modules())


def test_a_copy_folds_its_own_weights() -> None:
    from heatproof.models.derived import copy_of

    model = hp.Model(trained(small_cnn()))
    folded_and_plain(model, some(1, 32))
    copied = copy_of(model)
    copied.module[0].weight.data.mul_(2)
    folded, plain, _ = folded_and_plain(copied, some(2, 32))
    torch.testing.assert_close(folded, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_one_switch_turns_acceleration_off(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hp.load_model(trained(small_cnn()), accelerate=how != "argument")
    if how == "environment":
        monkeypatch.setenv("HEATPROOF_ACCELERATE", "0")
    images = some(WORTH_IT, 32)
    plain = all_logits(model, images)
    assert model.facts.acceleration == AccelerationState(), "something was determined"
    monkeypatch.delenv("HEATPROOF_ACCELERATE", raising=False)
    accelerated = hp.load_model(model.module)
    torch.testing.assert_close(all_logits(accelerated, images), plain, atol=1e-5, rtol=1e-5)
    assert accelerated.facts.acceleration.folding is not None
