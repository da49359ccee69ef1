"""Rerun only the part of a network behind a layer, for any nn.Module.

A first pass records what every module that finishes before the layer returned. In a tail pass those modules
hand back their recorded output at once and the layer hands back the changed activations, so only what lies
behind is computed. Nothing is traced or compiled: modules are short-circuited by an instance attribute that
is removed again. Where a network does not stand this (the check pass differs), the whole network is rerun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from heatproof.models.default_layers import BY_NAME
from heatproof.models.layers import Layout, find_module, first_tensor, layout_of
from heatproof.models.model import Model
from heatproof.models.running import watched
from heatproof.models.tap import replace_first


class Tail:
    """Logits of one image for changed activations of one layer. The caller holds `frozen_eval(...)`."""

    @torch.no_grad()
    def __init__(self, model: Model, image: Tensor, layer: str) -> None:
        self.model, self.layer = model, find_module(model.module, layer)
        self.inputs = model.ready(image[None])
        self.recorded: dict[nn.Module, list[Any]] = {}
        self.earlier: list[Any] = []  # what the layer returned in runs before its last one
        self.output: Any = None
        self.logits = self._record()
        tensor = first_tensor(self.output)
        assert tensor is not None
        if function := layer.partition("+")[2]:  # which the network will apply again, without a change
            tensor = BY_NAME[function](tensor)
        layout = layout_of(tensor, self.inputs, model.module)
        assert layout is not None
        self.activation: Tensor = tensor  # "1 ...", in the layer's own layout
        self.layout: Layout = layout
        self.short = True
        self.short = self._short_works()

    @torch.no_grad()
    def __call__(self, activations: Tensor) -> Tensor:
        """ "n ..." changed activations, in the layer's own layout -> "n k" logits."""
        changed = replace_first(self.output, activations)
        count = len(activations)
        with self._answers(changed, count):
            return self.model.forward(self.inputs.expand(count, *self.inputs.shape[1:]))

    def _record(self) -> Tensor:
        """One pass that keeps the outputs of modules that finish before the layer's last run does."""
        finished: dict[nn.Module, list[Any]] = {}
        runs: list[Any] = []  # of the layer; most run once, a shared activation may run often

        def keep(_name: str, module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            if module is self.layer:
                runs.append(tree_map_only(Tensor, torch.clone, output))
                self.recorded = {m: list(outputs) for m, outputs in finished.items()}
                return
            for part in module.modules():  # its parts will not be called when it answers at once
                if part is not module:
                    finished.pop(part, None)
            # A copy: in-place operations behind the module would change the recording.
            finished.setdefault(module, []).append(tree_map_only(Tensor, torch.clone, output))

        with watched(self.model.module, keep):
            logits = self.model.forward(self.inputs)
        inside = set(self.layer.modules())
        self.recorded = {m: outputs for m, outputs in self.recorded.items() if m not in inside}
        *self.earlier, self.output = runs
        return logits

    def _short_works(self) -> bool:
        """Does the tail give the whole network's answer for two copies of the unchanged activations?"""
        try:
            again = self(torch.cat([self.activation, self.activation]))
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        return bool(torch.allclose(again, self.logits.expand_as(again), rtol=1e-3, atol=1e-4))

    @contextmanager
    def _answers(self, changed: Any, count: int) -> Iterator[None]:
        """Let the recorded modules, and the layer, answer without running."""
        patched: list[nn.Module] = []
        # An instance that has a forward of its own already (someone else's patch) is left alone.
        short = self.short and "forward" not in self.layer.__dict__
        if not short:
            left = [None] * len(self.earlier)  # runs of the layer that stay as they are
            with self.layer.register_forward_hook(lambda *_: left.pop() if left else changed):
                yield
            return
        try:
            self.layer.__dict__["forward"] = _replay(lambda *_, **__: changed, self.earlier, count)
            patched.append(self.layer)
            for module, outputs in self.recorded.items():
                if "forward" not in module.__dict__:
                    module.__dict__["forward"] = _replay(module.forward, outputs, count)
                    patched.append(module)
            yield
        finally:
            for module in patched:
                del module.__dict__["forward"]


def _replay(original: Callable[..., Any], outputs: list[Any], count: int) -> Callable[..., Any]:
    waiting = list(outputs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not waiting:  # a module that also runs behind the layer, such as a shared ReLU
            return original(*args, **kwargs)
        return tree_map_only(Tensor, lambda t: t.expand(count, *t.shape[1:]), waiting.pop(0))

    return forward
