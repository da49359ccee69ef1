"""Plain modules: analysed once, results never outdated, freed with the module, used by several threads."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from conftest import needs_cuda, same, small_cnn, state_of
from heatproof.models import model as models
from heatproof.models.model import as_model
from heatproof.models.running import FunctionsWatched, ModuleState

METHODS = ["gradcam", "layercam", "gradient"]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


class Net(nn.Module):
    """A network with attributes that its pass reads, and a rectified convolution of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.act = nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, 4)
        self.scale, self.shifts, self.ends = 1.0, [0.0, 0.0], "logits"
        self.register_buffer("gain", torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x))) * self.scale
        x = self.act(self.second(x)) * self.gain + sum(self.shifts)
        x = self.last(self.drop(x.mean((2, 3))))
        return x.softmax(1) if self.ends == "probabilities" else x


def expected(net: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Maps of a Model that nothing is known about."""
    models._analysed.pop(net, None)
    fresh = hp.load_model(net, accelerate=False)
    return {method: maps.values for method, maps in hp.explain(fresh, images, METHODS).items()}


def mutations(net: Net, draw: random.Random) -> dict[str, Callable[[], object]]:
    def step() -> None:
        net.requires_grad_(True)
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        given = next(net.parameters())
        net(torch.randn(4, 3, 16, 16, dtype=given.dtype, device=given.device)).square().sum().backward()
        optimiser.step()
        optimiser.zero_grad()

    def replace() -> None:
        old = net.first.weight
        net.first = nn.Conv2d(3, 6, 3, padding=1).to(old.device, old.dtype)

    def edit() -> None:
        with torch.no_grad():
            net.second.weight.mul_(-1)

    def hook() -> None:
        net.second.register_forward_hook(lambda _m, _i, output: output * 1.5)

    def unhook() -> None:
        net.second._forward_hooks.clear()

    def pointer() -> None:
        net.last.weight.data = net.last.weight.data * -0.5

    def act() -> None:
        net.act = draw.choice([nn.ReLU, nn.GELU, nn.Identity])()

    def layer() -> None:
        other = nn.Conv2d(3, 6, 5, padding=2, stride=draw.choice([1, 2])).to(net.first.weight)
        net._modules["first"] = other

    def patch() -> None:
        own = type(net.second).forward
        net.second.__dict__["forward"] = lambda x: own(net.second, x) + 0.1

    return {
        "optimiser step": step, "layer replaced": replace, "edit in place": edit, "hook": hook,
        "hooks removed": unhook, "tensor replaced": pointer, "activation": act, "other layer": layer,
        "forward patched": patch, "forward restored": lambda: net.second.__dict__.pop("forward", None),
        "edit through data": lambda: net.second.weight.data.add_(0.2),
        "train or eval": lambda: net.train(draw.random() < 0.5),
        "requires_grad": lambda: net.requires_grad_(draw.random() < 0.5),
        "dtype": lambda: net.to(draw.choice([torch.float32, torch.float64])),
        "float attribute": lambda: setattr(net, "scale", draw.choice([0.5, 1.0, -1.0])),
        "list in place": lambda: net.shifts.__setitem__(0, draw.choice([-0.1, 0.1])),
        "head": lambda: setattr(net, "ends", draw.choice(["logits", "probabilities"])),
        "buffer": lambda: net.gain.mul_(-1.0),
        "buffer replaced": lambda: setattr(net, "gain", net.gain.flip(0)),
        "parameter": lambda: setattr(net.last, "bias", nn.Parameter(torch.randn_like(net.last.bias))),
        "stride": lambda: setattr(net.second, "stride", draw.choice([(1, 1), (2, 2)])),
        "nothing": lambda: None,
    }  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_no_mutation_gives_an_outdated_result(seed: int, device: str) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    net, images = Net().to(device), torch.randn(3, 3, 16, 16, device=device)
    known = mutations(net, draw)
    order = [name for _ in range(3) for name in draw.sample(list(known), len(known))]
    for turn, name in enumerate(order):
        known[name]()
        repeats = 4 if device == "cuda" and turn % 5 == 0 else 1  # the third time a pass is recorded
        before = state_of(net)
        results = [hp.explain(net, images, METHODS) for _ in range(repeats)]
        assert same(before, state_of(net)), name
        entry = models._analysed.get(net)
        right = expected(net, images)
        if entry is not None:
            models._analysed[net] = entry  # what is known stays for the next mutation
        for result in results:
            for method, values in right.items():
                rtol, atol = (2e-2, 2e-3) if device == "cuda" else (1e-4, 1e-5)
                torch.testing.assert_close(
                    result[method].values, values, rtol=rtol, atol=atol, msg=f"{turn}: {name}, {method}"
                )


def test_an_unchanged_module_is_analysed_once() -> None:
    net, images = Net().eval(), torch.randn(2, 3, 16, 16)
    hp.explain(net, images)
    first = as_model(net)
    assert first.was_seen and first.head_name == "softmax" and first.module is net
    hp.explain(net, images)
    hp.metrics.insertion(torch.rand(2, 16, 16), 0, model=net, images=images, steps=3)
    assert as_model(net).facts is first.facts
    with torch.no_grad():
        net.last.weight.mul_(2)
    changed = as_model(net)
    assert changed.facts is not first.facts and not changed.was_seen
    assert changed.facts.activated_layer == first.facts.activated_layer, "layers do not depend on weights"
    net.act = nn.GELU()  # type: ignore[assignment]
    assert as_model(net).facts.activated_layer is None
    assert as_model(hp.load_model(net)).facts is not as_model(net).facts


def test_attributes_set_to_equal_values_change_nothing() -> None:
    net = Net().eval()
    state = ModuleState(net)
    net.scale = float("1.0")  # another object
    assert state.versions(net) is None and ModuleState(net, state).mark == state.mark
    net.scale = 2.0
    assert ModuleState(net, state).mark != state.mark


class Listing(Net):
    """A network with attributes of several kinds that its pass may read."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.branches, self.by_name = -1, [self.first, self.second], {"a": self.first}


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "dim", -2),  # hash(-1) == hash(-2)
        lambda net: net.shifts.__setitem__(0, 0.5),
        lambda net: net.branches.pop(),
        lambda net: net.by_name.update(a=net.second),
    ],
)
def test_changed_attributes_change_the_state_and_its_mark(change: Callable[[nn.Module], object]) -> None:
    net = Listing().eval()
    state = ModuleState(net)
    known = as_model(net).facts
    assert state.versions(net) is not None and as_model(net).facts is known
    change(net)
    assert state.versions(net) is None and ModuleState(net, state).mark != state.mark
    assert as_model(net).facts is not known


def test_a_layer_at_the_address_of_a_freed_one_is_another() -> None:
    net = Net().eval()
    state = ModuleState(net)
    for _ in range(20):
        net.first = None  # type: ignore[assignment]
        net.first = nn.Conv2d(3, 6, 3, padding=1)
        assert state.versions(net) is None
        state, before = ModuleState(net, state), state
        assert state.mark != before.mark


class Registers(Net):
    """A network that lies on a cycle: its layer has a hook that is a method of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.act.register_forward_hook(self.look)
        self.own = lambda x: self.forward(x)

    def look(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output


@pytest.mark.parametrize("kind", [Net, Listing, Registers, small_cnn])
def test_what_is_known_is_freed_with_the_module(kind: Callable[[], nn.Module]) -> None:
    net, images = kind().eval(), torch.randn(2, 3, 32, 32)
    hp.explain(net, images, ["gradcam", "rise(masks=300)"])
    facts, gone = weakref.ref(as_model(net).facts), weakref.ref(net)
    assert facts() is not None
    del net
    gc.collect()
    assert gone() is None and facts() is None


def test_memory_is_flat_over_many_new_modules() -> None:
    images = torch.randn(1, 3, 8, 8)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    def explain(turns: int) -> int:
        for _ in range(turns):
            net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            hp.explain(net, images)
        return tensors()

    before = explain(20)
    entries = len(models._analysed)
    assert explain(380) <= before and len(models._analysed) <= entries


def test_threads_may_explain_one_module_at_once() -> None:
    net = Net().train()
    batches = [torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(24)]
    alone = [hp.explain(net, images, METHODS) for images in batches]
    before = state_of(net)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda images: hp.explain(net, images, METHODS), batches))
    assert same(before, state_of(net))
    for one, other in zip(alone, together, strict=True):
        for method in METHODS:
            torch.testing.assert_close(other[method].values, one[method].values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_a_pass_of_one_image_in_planes_pools_in_channels_last_format(count: int) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ).eval()  # fmt: skip
    images, seen, hooked = torch.randn(count, 3, 8, 8), list[tuple[str, bool]](), list[torch.Size]()

    def look(
        function: Callable[..., object], args: tuple[Tensor, ...], _kwargs: object, _result: object
    ) -> None:
        if (name := getattr(function, "__name__", "")) in ("max_pool2d", "conv2d"):
            seen.append((name, args[0].is_contiguous(memory_format=torch.channels_last)))

    with net[2].register_forward_hook(lambda _m, _i, output: hooked.append(output.shape)):
        hp.explain(net, images)  # determines what the network is
        hooked.clear()
        with FunctionsWatched(look):
            fast = hp.explain(net, images)["gradcam"].values
    plain = hp.explain(hp.load_model(net, accelerate=False), images)["gradcam"].values
    in_planes = count == 1
    assert seen == [("conv2d", not in_planes), ("max_pool2d", True), ("conv2d", not in_planes)]
    assert len(hooked) == 1 and "forward" not in net[2].__dict__
    assert torch.equal(fast, plain)
