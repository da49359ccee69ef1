"""What the adapters share: the network as other packages call it, and a call that leaves it as it was."""

from __future__ import annotations

import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.errors import HeatproofError, LayerError, ModelError
from heatproof.explain.gradients import over_channels
from heatproof.explain.providers import OF_PIXELS, Offer
from heatproof.models.checkpoints import first_line
from heatproof.models.layers import find_module, picture_layers
from heatproof.models.model import Model
from heatproof.models.running import is_out_of_memory, watched
from heatproof.registry import REQUIRED
from heatproof.types import Signed, Trace

PARTS = (  # of a module: what a package may put there, and leave behind when it fails
    "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
PLAIN = (type(None), bool, int, float, str, tuple)


class LogitsModule(nn.Module):
    """The network as a module that returns "b k" logits, with a column for each class that can be named."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = model.module
        self.asked = model

    def forward(self, images: Tensor) -> Tensor:
        logits = self.asked.forward(images)
        two = self.asked.head.targets(logits.shape[1]) > logits.shape[1]  # one logit speaks for two classes
        return torch.cat([-logits, logits], 1) if two else logits

    def train(self, mode: bool = True) -> LogitsModule:
        """It is in evaluation mode already; a user's own train() need not hear of it."""
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The gradients of the user's weights are the user's."""


class _Before:
    """What a module holds beside its weights, before a package puts something there."""

    def __init__(self, part: nn.Module) -> None:
        self.part, self.names = part, set(part.__dict__)
        self.held = {name: dict(getattr(part, name)) for name in PARTS}

    def give_back(self) -> None:
        for name in self.part.__dict__.keys() - self.names:
            del self.part.__dict__[name]
        for name, before in self.held.items():
            now = getattr(self.part, name)
            if dict(now) != before:
                now.clear()
                now.update(before)


@contextmanager
def calling(method: str, trace: Trace) -> Iterator[tuple[LogitsModule, Tensor]]:
    """The network and the images for a package: gradients on, its draws seeded, its warnings unheard.

    Whatever it leaves behind on the network is taken away, and what goes wrong in it is one sentence.
    """
    model, answers = trace.model, LogitsModule(trace.model)
    kept = [_Before(part) for part in model.module.modules()]
    numbers, python = np.random.get_state(), random.getstate()  # noqa: NPY002 (their generators)
    try:
        with (
            torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(),
            redirect_stderr(StringIO()),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            torch.manual_seed(trace.seed)  # the caller's generator comes back with `frozen_eval`
            np.random.seed(trace.seed)  # noqa: NPY002
            random.seed(trace.seed)
            images = trace.images.detach().to(model.device, model.dtype).clone()
            yield answers, images.requires_grad_()
    except HeatproofError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{method} failed on {model.name}: {type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        np.random.set_state(numbers)  # noqa: NPY002
        random.setstate(python)
        for part in kept:
            part.give_back()


def layer_of(method: str, trace: Trace) -> nn.Module:
    """The module that a package is told to look at."""
    assert trace.layer is not None
    name, function, _ = trace.layer.partition("+")
    if function:
        raise LayerError(
            f"{method} looks at modules, and {trace.model.name} is explained behind a function, at "
            f"{trace.layer!r}; name a module, such as layer={name!r}"
        )
    if (runs := _runs(trace)).get(name, 1) > 1:
        grid, pictures = tuple(trace.activation.shape[2:]), picture_layers(trace.model, trace.images)
        alike = [one for one, layout, _ in pictures if runs[one] == 1 and layout.grid == grid]
        raise LayerError(
            f"{method} looks at a module that runs once, and {name!r} runs {runs[name]} times in "
            f"{trace.model.name}; name another" + f", such as layer={alike[-1]!r}" * bool(alike)
        )
    return find_module(trace.model.module, name)


def _runs(trace: Trace) -> dict[str, int]:
    """How often each part of the network runs in a pass: found by one, and remembered."""
    model = trace.model
    if model.facts.part_runs is None:
        counts: Counter[str] = Counter()
        with torch.no_grad(), watched(model.module, lambda name, *_: counts.update([name])):
            model.forward(model.ready(trace.images[:1]))
        model.facts.part_runs = dict(counts)
    return model.facts.part_runs


def pixels(offer: Offer, attributions: Tensor) -> Tensor | Signed:
    """ "b c h w" -> "b h w", as the method's card says."""
    values = attributions.detach()
    return over_channels(values) if offer.card == OF_PIXELS else values.sum(1)


def options_of(*functions: Callable[..., Any], without: tuple[str, ...]) -> dict[str, Any]:
    """What may be written in brackets: arguments with a plain default, and those that must be given."""
    found: dict[str, Any] = {}
    for function in functions:
        for one in list(inspect.signature(function).parameters.values()):
            given = one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and one.name not in without
            if given and (one.default is REQUIRED or isinstance(one.default, PLAIN)):
                found.setdefault(one.name, one.default)
    return found


def taken(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that a function takes."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}
