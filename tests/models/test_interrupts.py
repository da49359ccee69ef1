"""Ctrl-C at any line inside explain: the model, torch and the signal's handler are as before."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from conftest import small_cnn
from heatproof.models.model import as_model
from heatproof.models.running import frozen_eval

METHODS = ["gradcam", "gradient", "ablationcam", "rise(masks=2)"]  # hooks, flags, patched forwards, a queue
WATCHED = (
    "models/model.py", "models/capture.py", "models/running.py",
    "contextlib.py", "torch/random.py", "grad_mode.py",
)  # fmt: skip
PLACES = 200


def state(net: nn.Module) -> tuple[Any, ...]:
    return (
        [part.training for part in net.modules()],
        [weight.requires_grad for weight in net.parameters()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in m.__dict__) for m in net.modules()],
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
        torch.get_rng_state().tolist(),
        signal.getsignal(signal.SIGINT),
    )


class Lines:
    """Counts the lines that run where a model is changed, and presses Ctrl-C at one of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at, self.count = stop_at, 0

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.stop_at:
                signal.raise_signal(signal.SIGINT)
        return self


def traced(lines: Lines, work: Callable[[], object]) -> None:
    sys.settrace(lines)
    try:
        work()
    finally:
        sys.settrace(None)


@pytest.fixture
def net() -> nn.Module:
    net = small_cnn(3).train()
    net[0].weight.requires_grad_(False)
    return net


def test_ctrl_c_at_any_line_leaves_everything_as_it_was(net: nn.Module) -> None:
    images = torch.randn(1, 3, 16, 16)
    work = lambda: hp.explain(net, images, METHODS, batch_size=64)  # noqa: E731
    work()  # imports and caches
    whole = Lines()
    traced(whole, work)
    before = state(net)
    places = random.Random(0).sample(range(1, whole.count), min(PLACES, whole.count - 1))
    for place in places:
        with pytest.raises(KeyboardInterrupt):
            traced(Lines(place), work)
        assert state(net) == before, f"line event {place} of {whole.count}"


def test_ctrl_c_is_answered_before_the_next_pass(net: nn.Module) -> None:
    passes = 0

    def press(*_: object) -> None:
        nonlocal passes
        passes += 1
        signal.raise_signal(signal.SIGINT)

    net.register_forward_hook(press)
    with pytest.raises(KeyboardInterrupt):
        hp.explain(net, torch.randn(8, 3, 16, 16), "gradient", batch_size=1)
    assert passes == 1


def test_a_second_ctrl_c_does_not_wait(net: nn.Module) -> None:
    with pytest.raises(KeyboardInterrupt), frozen_eval(net):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one waited")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_was_there_is_called_at_once(net: nn.Module) -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: signals.append(number))
    try:
        with frozen_eval(net), frozen_eval(net):
            signal.raise_signal(signal.SIGINT)
            assert signals == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing_back(net: nn.Module) -> None:
    outputs: list[Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(as_model(net).logits(torch.randn(2, 3, 16, 16))))
    with frozen_eval(small_cnn()):
        thread.start()
        thread.join()
    assert outputs[0].shape == (2, 3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
