"""Look at layers while a network runs: their outputs as new leaves, or whatever goes on in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from heatproof.models.default_layers import Rectified
from heatproof.models.layers import find_module, first_tensor


@dataclass
class Taken:
    """What the hooks saw: each layer's output as the leaf the gradient is asked for."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)


@contextmanager
def tap(
    module: nn.Module, names: Sequence[str], gradients: bool = True, runs: Mapping[str, int] | None = None
) -> Iterator[Taken]:
    """Take the outputs of the named layers while the context is open.

    runs: how often a layer runs in a pass, where that is known: only its last run counts, and nothing need be
    recorded from the first one on.
    """
    taken = Taken()
    ahead = dict(runs or {})

    def take(name: str, output: Any) -> Any:
        if ahead.get(name, 1) > 1:
            ahead[name] -= 1
            return None
        tensor = first_tensor(output)
        taken.whole[name] = output
        if tensor is None:
            return None
        leaf = tensor.detach().requires_grad_() if gradients and not tensor.requires_grad else tensor
        taken.outputs.pop(name, None)  # a module that runs twice counts where it ran last
        taken.outputs[name] = leaf
        # The rest of the network gets a copy: an in-place ReLU behind the layer must not change what we keep.
        return replace_first(output, leaf.clone())

    with at_layers(module, names, take):
        yield taken


@contextmanager
def at_layers(module: nn.Module, names: Sequence[str], told: Callable[[str, Any], Any]) -> Iterator[None]:
    """Tell of what each named layer returns; an answer, unless it is None, goes on in its place.

    The hooks are gone when the context ends, however it ends.
    """
    rectified: dict[str, Tensor] = {}  # by layer: what the function behind it is about to take

    def wait_for_function(name: str, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            rectified[name] = tensor

    def behind(_function: str, before: Tensor, after: Tensor) -> Tensor | None:
        name = next((name for name, tensor in rectified.items() if tensor is before), None)
        return None if name is None else told(name, after)

    functions = [name for name in names if "+" in name]
    with ExitStack() as open_things:
        for name in (*(n for n in names if n not in functions), *functions):
            hook = wait_for_function if name in functions else told
            handle = find_module(module, name).register_forward_hook(
                lambda _m, _i, output, name=name, hook=hook: hook(name, output)
            )
            open_things.callback(handle.remove)
        if functions:
            open_things.enter_context(Rectified(behind))
        yield


def replace_first(output: Any, tensor: Tensor) -> Any:
    """The same kind of output with its first tensor exchanged."""
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
