"""Recorded passes: when, how they are padded, what they notice; on a GPU that they answer the same."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import heatproof as hp
from conftest import needs_cuda, small_cnn
from heatproof.explain import api
from heatproof.models.accel import (
    MOST,
    SEEN,
    Accelerator,
    Graphs,
    _refusing_to_wait,
    padded_size,
    recordable,
)
from heatproof.models.derived import copy_of
from heatproof.models.running import ModuleState

CAMS = ["gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam"]


class Rerun:
    """What a CUDA graph does, on a CPU: the same memory in, the same memory out, each time."""

    made = 0

    def __init__(self, function: Callable[..., Any], given: Sequence[Tensor], reads: object = ()) -> None:
        Rerun.made += 1
        self.function, self.room = function, [value.clone() for value in given]
        self.results = function(*self.room)

    def __call__(self, given: Sequence[Tensor]) -> Any:
        for room, value in zip(self.room, given, strict=True):
            room[: len(value)].copy_(value)
        for old, new in zip(tree_leaves(self.results), tree_leaves(self.function(*self.room)), strict=True):
            old.detach().copy_(new)
        return self.results


def test_a_pass_is_recorded_when_it_comes_again_and_smaller_batches_are_padded() -> None:
    graphs, calls = Graphs(Rerun), []

    def double(x: Tensor) -> Tensor:
        calls.append(len(x))
        return 2 * x

    images = torch.arange(8.0).view(4, 2)
    for count in (4, 3):
        few = images[:count] + count
        assert torch.equal(graphs.run("a", double, [few], 4), 2 * few) and not graphs.recordings
    assert torch.equal(graphs.run("a", double, [images], 4), 2 * images) and len(graphs.recordings) == 1
    few = graphs.run("a", double, [images[:3] + 1], 4)
    assert torch.equal(few, 2 * (images[:3] + 1)) and set(calls) == {4}, "not padded"
    assert graphs.run("a", double, [images[:3]]).shape == (3, 2) and calls[-1] == 3
    assert graphs.run("b", double, [images], 4).shape == (4, 2) and len(graphs.recordings) == 1


def test_the_size_of_a_pass_does_not_depend_on_recordings() -> None:
    """They are dropped if memory is short, and rows must keep their bits."""
    graphs, sizes = Graphs(Rerun), list[int]()

    def runs_out_of_memory(*_: object) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:  # as when the recording is ended
            raise RuntimeError("operation failed due to a previous error during capture")

    def waits_for_the_gpu(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    def negative(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return -x

    for record in (Rerun, runs_out_of_memory, waits_for_the_gpu):
        assert not graphs.reason
        graphs.record = record
        for turn in range(SEEN + 2):
            few = torch.randn(5, 2) + turn
            assert torch.equal(graphs.run(record, negative, [few], padded_size(5, 60)), -few)
    assert set(sizes) == {8} and "not permitted" in graphs.reason and not graphs.recordings


@needs_cuda
def test_a_padded_pass_on_a_gpu_has_the_same_bits_with_and_without_recordings() -> None:
    images = torch.randn(21, 3, 32, 32, device="cuda")
    methods = ["smoothgrad(samples=40)", "rise(masks=300)"]
    recorded, dropped = (hp.load_model(small_cnn().eval(), device="cuda", precision="fp32") for _ in range(2))
    dropped.module.load_state_dict(recorded.module.state_dict())
    for _ in range(SEEN + 2):
        expected, result = (hp.explain(model, images, methods) for model in (recorded, dropped))
        dropped.facts.acceleration.graphs = None
        for method in methods:
            assert torch.equal(result[method].values, expected[method].values), method
    assert recorded.facts.acceleration.graphs.recordings


def test_threads_of_two_networks_do_not_read_each_other_s_results() -> None:
    pool = torch.zeros(2)  # that all recordings share

    class Pooled:
        def __init__(self, function: Callable[..., Any], *of_a_recording: object) -> None:
            self.function = function

        def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
            pool.copy_(self.function(*inputs))
            time.sleep(0.001)  # another thread may run
            return pool

    def passes(number: float) -> set[float]:
        graphs, inputs = Graphs(Pooled), [torch.zeros(2)]
        return {x for _ in range(30) for x in graphs.run("a", lambda x: x + number, inputs).tolist()}

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(passes, (1.0, 2.0))) == [{1.0}, {2.0}]


def test_only_the_last_few_recordings_are_kept() -> None:
    graphs = Graphs(Rerun)
    for key in range(3 * MOST):
        for _ in range(SEEN + 1):
            graphs.run(key, lambda x: x + 1, [torch.ones(2)])
    assert len(graphs.recordings) == MOST
    model = hp.Model(small_cnn())
    model.facts.acceleration.graphs = graphs
    assert copy_of(model).facts.acceleration.graphs is None, "a copied network records its own passes"


def test_what_cannot_be_recorded_runs_as_before_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(*of_a_recording: object) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = hp.Model(small_cnn())
    graphs = model.facts.acceleration.graphs = Graphs(refuses)
    with caplog.at_level("INFO", logger="heatproof"):
        for i in range(SEEN + 3):
            assert graphs.run("a", lambda x: x + 1, [torch.full((2,), float(i))]).tolist() == [i + 1, i + 1]
    assert "not permitted when stream is capturing" in graphs.reason and "more" not in graphs.reason
    assert len(caplog.records) == 1
    assert Accelerator(model).describe() == [f"passes run kernel by kernel: {graphs.reason}"]


def test_what_a_recording_cannot_see_changes_its_key() -> None:
    net, graphs = small_cnn().eval(), Graphs(Rerun)
    first, recorded = ModuleState(net).mark, graphs.state(net)
    with torch.no_grad():
        net[0].weight.mul_(2)
    assert ModuleState(net).mark == first, "weights changed in place are seen by the recording itself"
    assert graphs.state(net) == recorded
    hook = net[0].register_forward_hook(lambda *_: None)
    assert graphs.state(net) is None, "somebody's Python runs in its pass"
    hook.remove()
    assert graphs.state(net) == recorded
    changes: list[Callable[[], object]] = [
        lambda: setattr(net[0], "stride", (2, 2)),
        lambda: setattr(net[1], "eps", 0.5),
        lambda: setattr(net[0], "weight", nn.Parameter(net[0].weight.clone())),
        lambda: net[1].running_mean.set_(torch.zeros(8)),  # type: ignore[call-overload]
        lambda: net.add_module("more", nn.Identity()),
        lambda: setattr(net[0], "note", ("a", ["list"])),
    ]
    for change in changes:
        before = graphs.state(net)
        change()
        assert ModuleState(net).mark != first and graphs.state(net) != before
        first = ModuleState(net).mark
    assert recordable(net)
    with net[2].register_forward_hook(lambda *_: None):
        assert not recordable(net)


def test_maps_from_a_recorded_shared_pass_are_those_of_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [*CAMS, "ms-gradcam++"]
    plain, recorded = (hp.Model(small_cnn().eval()) for _ in range(2))
    graphs = Graphs(Rerun)
    before = Rerun.made
    for turn in range(SEEN + 3):
        images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(turn))
        targets = None if turn % 2 else [turn % 5] * 4
        expected = hp.explain(plain, images, methods, targets)
        with monkeypatch.context() as patched:
            patched.setattr(Accelerator, "graphs", property(lambda _: graphs))
            result = hp.explain(recorded, images, methods, targets)
            result = hp.explain(recorded, images, methods, targets)
        for method, maps in expected.items():
            assert torch.equal(result[method].explained, maps.explained)
            torch.testing.assert_close(result[method].values, maps.values, atol=1e-6, rtol=1e-5)
    assert Rerun.made - before == 2, "with targets and without"


def test_a_repeated_request_is_answered_before_it_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = small_cnn().eval()
    plain, model = hp.Model(net), hp.Model(net)
    graphs = model.facts.acceleration.graphs = Graphs(Rerun)
    graphs_of = property(lambda own: own.state.graphs if own.model.was_seen else None)
    monkeypatch.setattr(Accelerator, "graphs", graphs_of)
    passes: list[int] = []

    def same(targets: int | None = None) -> None:
        images = torch.randn(3, 3, 32, 32)
        expected, result = (hp.explain(variant, images, CAMS, targets) for variant in (plain, model))
        for method, maps in expected.items():
            assert torch.equal(result[method].values, maps.values), method
            assert torch.equal(result[method].explained, maps.explained)
            assert torch.equal(result[method].dead, maps.dead) and result[method].ids == maps.ids  # type: ignore[arg-type]

    for _ in range(SEEN + 2):
        same()
    assert len(graphs.recordings) == 1
    shared = api.SharedPass
    monkeypatch.setattr(api, "SharedPass", lambda *given: passes.append(1) or shared(*given))
    same()
    assert not passes, "the recording was not guessed"
    same(targets=2)
    assert passes, "another question is none that came before"
    with torch.no_grad():
        net[0].weight.mul_(1.5)
    same()  # seen by the recording itself
    net[0].weight.data = net[0].weight.data * 0.5  # type: ignore[assignment]
    same()  # not seen by it: guessed in vain
    net[4].register_forward_hook(lambda part, given, made: made * 2)
    same()


def test_what_a_trace_read_is_freed_with_it() -> None:
    model = hp.Model(small_cnn().eval())
    gc.collect()
    gc.disable()
    try:
        hp.explain(model, torch.randn(2, 3, 32, 32), CAMS)
        reference = weakref.ref(model)
        del model
        assert reference() is None, "a circle keeps the network and what it computed"
    finally:
        gc.enable()


@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_recorded_passes_on_a_gpu_give_the_plain_ones_answers(precision: str) -> None:
    images = torch.randn(20, 3, 32, 32, device="cuda")
    recorded, plain = (
        hp.load_model(small_cnn().eval(), device="cuda", precision=precision, accelerate=accelerate)
        for accelerate in (True, False)
    )
    methods = [*CAMS, "smoothgrad(samples=40)", "rise(masks=300)"]
    tolerance = 0.05 if precision == "bf16" else 1e-3
    for turn in range(6):
        given = images.roll(turn, 0)
        result, expected = (hp.explain(m, given, methods, batch_size=8) for m in (recorded, plain))
        for method in methods:
            gap = (result[method].normalised() - expected[method].normalised()).abs().mean()
            assert gap < tolerance, (method, turn)
    graphs = recorded.facts.acceleration.graphs
    assert graphs is not None and graphs.recordings and not graphs.reason
    assert plain.facts.acceleration.graphs is None and plain.facts.acceleration.folding is None
    with torch.no_grad():
        for weight in (*recorded.module.parameters(), *plain.module.parameters()):
            weight.mul_(1.1)
    after, right = (hp.explain(m, images, "gradcam", batch_size=8)["gradcam"] for m in (recorded, plain))
    assert (after.normalised() - right.normalised()).abs().mean() < tolerance, "changed weights are seen"


class Asks(nn.Module):
    """Asks the GPU for a number in the middle of its pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_cnn()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (2.0 if float(x.sum()) > 0 else 1.0)


def test_the_mode_that_refuses_to_wait_gives_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch warns each time it is set."""
    if not torch.cuda.is_available():

        def set_mode(mode: int | str) -> None:
            text = "Synchronization debug mode is a prototype feature and does not yet detect all operations"
            warnings.warn(text, UserWarning, stacklevel=2)

        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with _refusing_to_wait(), pytest.warns(UserWarning, match="of the network's own"):
        warnings.warn("of the network's own", UserWarning, stacklevel=1)


@needs_cuda
def test_a_network_that_cannot_be_recorded_runs_on_a_gpu_all_the_same() -> None:
    model = hp.load_model(Asks().eval(), device="cuda", layer="net.8")
    images = torch.randn(4, 3, 32, 32, device="cuda")
    maps = [hp.explain(model, images, CAMS)["gradcam"].values for _ in range(6)]
    assert all(torch.allclose(map_, maps[0]) for map_ in maps) and model.facts.acceleration.graphs.reason


@needs_cuda
def test_memory_of_a_gpu_is_flat_and_released_with_the_model() -> None:
    def used() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def explained(turns: int, model: hp.Model) -> int:
        for _ in range(turns):
            hp.explain(model, images, [*CAMS, "rise(masks=600)"])
        return used()

    images = torch.randn(16, 3, 32, 32, device="cuda")
    explained(6, hp.load_model(small_cnn().eval(), device="cuda"))  # libraries set up their work space
    before = used()
    for _ in range(3):
        model = hp.load_model(small_cnn().eval(), device="cuda")
        first = explained(6, model)
        assert model.facts.acceleration.graphs.recordings and explained(20, model) <= first
        del model
        assert used() <= before


def test_a_runner_on_a_cpu_records_nothing() -> None:
    model = hp.Model(small_cnn().eval())
    model.logits(torch.zeros(1, 3, 32, 32))
    assert Accelerator(model).job(torch.zeros(1, 3, 32, 32), 10).graphs is None
