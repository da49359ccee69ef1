"""Read or replace the outputs of layers while a network runs, and rerun only the part behind a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from heatproof.models.layers import BY_NAME, Layout, Rectified, find_module, first_tensor, layout_of
from heatproof.models.model import Model
from heatproof.models.running import watched


@dataclass
class Taken:
    """Outputs of each layer: as leaf tensors for gradients, and whole as the layer returned them."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)


@contextmanager
def tap(
    module: nn.Module, names: Sequence[str], gradients: bool = True, runs: Mapping[str, int] | None = None
) -> Iterator[Taken]:
    """Capture the outputs of the named layers while the context is open.

    runs: how often a layer runs in a pass, if known: only its last run counts, and autograd records nothing
    before it.
    """
    taken = Taken()
    runs_left = dict(runs or {})

    def take(name: str, output: Any) -> Any:
        if runs_left.get(name, 1) > 1:
            runs_left[name] -= 1
            return None
        tensor = first_tensor(output)
        taken.whole[name] = output
        if tensor is None:
            return None
        # A new leaf cuts the graph here: the backward pass ends at the layer and never reaches the stem.
        leaf = tensor.detach().requires_grad_() if gradients and not tensor.requires_grad else tensor
        taken.outputs.pop(name, None)  # a module that runs twice counts where it ran last
        taken.outputs[name] = leaf
        # The rest of the network gets a copy: an in-place ReLU behind the layer must not change the leaf.
        return replace_first(output, leaf.clone())

    with at_layers(module, names, take):
        yield taken


@contextmanager
def at_layers(module: nn.Module, names: Sequence[str], call: Callable[[str, Any], Any]) -> Iterator[None]:
    """Call a function with each named layer's name and output, by hooks that are removed afterwards.

    A result that is not None replaces the output.
    """
    rectified: dict[str, Tensor] = {}  # by layer: the input of the rectifying function behind it

    def wait_for_function(name: str, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            rectified[name] = tensor

    def behind(_function: str, before: Tensor, after: Tensor) -> Tensor | None:
        name = next((name for name, tensor in rectified.items() if tensor is before), None)
        return None if name is None else call(name, after)

    functions = [name for name in names if "+" in name]
    with ExitStack() as hooks:
        for name in (*(n for n in names if n not in functions), *functions):
            react = wait_for_function if name in functions else call
            hooks.enter_context(
                find_module(module, name).register_forward_hook(
                    lambda _m, _i, output, name=name, react=react: react(name, output)
                )
            )
        if functions:
            hooks.enter_context(Rectified(behind))
        yield


def replace_first(output: Any, tensor: Tensor) -> Any:
    """The same kind of output with its first tensor replaced."""
    if isinstance(output, Tensor):
        return tensor
    if isinstance(output, dict):
        key = next(k for k, v in output.items() if isinstance(v, Tensor))
        changed = type(output)(output)
        changed[key] = tensor
        return changed
    items = list(output)
    position = next(i for i, item in enumerate(items) if isinstance(item, Tensor))
    items[position] = tensor
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


class Tail:
    """Logits of one image for changed activations of one layer. Use inside `frozen_eval(...)`.

    A first pass records the output of every module that finishes before the layer. In a tail pass those
    modules return their recorded output and the layer returns the changed activations, so only what lies
    behind is computed. Forwards are replaced by instance attributes that are removed again. If a check pass
    differs from the whole network, the whole network is rerun instead.
    """

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
        if function := layer.partition("+")[2]:  # the network applies it again, without effect
            tensor = BY_NAME[function](tensor)
        layout = layout_of(tensor, self.inputs, model.module)
        assert layout is not None
        self.activation: Tensor = tensor  # "1 ...", in the layer's own layout
        self.layout: Layout = layout
        self.short = True
        # Forwards that do more than call modules may not work with the shortcut: then the whole network runs.
        self.short = self._short_works()

    @torch.no_grad()
    def __call__(self, activations: Tensor) -> Tensor:
        """Turn "n ..." changed activations, in the layer's own layout, into "n k" logits."""
        changed = replace_first(self.output, activations)
        count = len(activations)
        # The input is expanded too: code outside of the recorded modules may read it or its batch size.
        with self._replayed(changed, count):
            return self.model.forward(self.inputs.expand(count, *self.inputs.shape[1:]))

    def _record(self) -> Tensor:
        """Record the outputs of modules that finish before the layer's last run does, in one pass."""
        finished: dict[nn.Module, list[Any]] = {}
        runs: list[Any] = []  # of the layer; most run once, a shared activation may run often

        def ended(_name: str, module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            # A copy: in-place operations behind the module would change the recording.
            output = tree_map_only(Tensor, torch.clone, output)
            if module is self.layer:
                runs.append(output)
                self.recorded = {m: list(outputs) for m, outputs in finished.items()}
                return
            for part in module.modules():  # when it returns its recorded output, its children do not run
                if part is not module:
                    finished.pop(part, None)
            finished.setdefault(module, []).append(output)

        with watched(self.model.module, ended):
            logits = self.model.forward(self.inputs)
        parts = set(self.layer.modules())
        self.recorded = {m: outputs for m, outputs in self.recorded.items() if m not in parts}
        *self.earlier, self.output = runs
        return logits

    def _short_works(self) -> bool:
        """Whether the tail gives the whole network's logits for two copies of the unchanged activations."""
        try:
            again = self(torch.cat([self.activation, self.activation]))
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        return bool(torch.allclose(again, self.logits.expand_as(again), rtol=1e-3, atol=1e-4))

    @contextmanager
    def _replayed(self, changed: Any, count: int) -> Iterator[None]:
        """Let the recorded modules, and the layer, return without running."""
        patched: list[nn.Module] = []
        # An instance that has a forward of its own already (patched by other code) is left alone.
        if not self.short or "forward" in self.layer.__dict__:
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
