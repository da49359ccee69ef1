"""The shared pass: logits, activations and gradients for all methods from one forward and one backward.

Parameters are frozen, so nothing before the first needed layer builds a graph. At that layer the output is
detached and made a new leaf; everything behind it is recorded, and one backward pass stops there. k gradient
CAMs cost one forward and one partial backward. On a GPU a pass that repeats is recorded as a CUDA graph
(accel/), with hooks and backward. `Tail` reruns only the part behind a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from heatproof.errors import HeatproofError, InputError, LayerError, ModelError, first_line
from heatproof.models import layers
from heatproof.models.accel import Accelerator
from heatproof.models.layers import find_module, first_tensor, known_scales, layout_of, searched_scales
from heatproof.models.model import Model, Queue
from heatproof.models.running import (
    at_least_float,
    forwards_replaced,
    is_out_of_memory,
    memory_format,
    watched,
)
from heatproof.timeline import span
from heatproof.types import Trace, size_of

INPUT = "input"  # among the gradients
COMMON_SIZES = (28, 32, 48, 64, 96, 112, 128, 160, 192, 224, 240, 256, 288, 299, 320, 384, 448, 512)


def capture(
    model: Model,
    images: Tensor,
    targets: Any = None,
    needs: frozenset[str] = frozenset({"activations", "gradients"}),
    layer: str | Sequence[str] | None = None,
    queue: Queue | None = None,
    seed: int = 0,
) -> Trace:
    """Run the shared pass over checked images. Call inside `frozen_eval(model.module)`."""

    def choose(logits: Tensor) -> Tensor:
        return model.check_targets(targets, logits)

    try:
        return SharedPass(model, images, needs, layer).run(images, choose, queue, seed)
    except NotAPicture as problem:
        if layer is not None or model.layer is not None:
            some = ", ".join([name for name, _, _ in layers.picture_layers(model, images)][-5:]) or "none"
            shape, size = tuple(problem.output.shape), "x".join(map(str, size_of(images)))
            raise LayerError(
                f"layer {problem.name!r} of {model.name} returns shape {shape}, in which no grid of a {size} "
                f"image can be found; layers that would do: {some}"
            ) from None
    # The guess by name was wrong: one pass finds the last layer with a grid, which the Model remembers.
    scales = searched_scales(model, images)
    model.determine(scales=scales, layer=scales[-1])
    return SharedPass(model, images, needs, None).run(images, choose, queue, seed)


class SharedPass:
    """One forward, and if gradients are needed one backward that stops at the layers."""

    def __init__(
        self, model: Model, images: Tensor, needs: frozenset[str], layer: str | Sequence[str] | None
    ) -> None:
        self.model, self.needs = model, needs
        self.main, self.names, self.scales = choose_layers(model, images, needs, layer)
        self.of_layers, self.of_input = bool(needs & {"gradients", "scales"}), "input_gradient" in needs
        self.faster = None if self.of_input else Accelerator(model).faster_pass(images)

    def run(
        self, images: Tensor, choose: Callable[[Tensor], Tensor], queue: Queue | None = None, seed: int = 0
    ) -> Trace:
        """Run the pass, and return the Trace that methods read.

        choose: returns the columns to explain from the logits.
        """
        model, count = self.model, len(images)
        # The caller may be in inference mode, whose tensors cannot require gradients.
        with torch.inference_mode(False), torch.set_grad_enabled(self.of_layers or self.of_input):
            inputs = model.ready(images)
            if "blank" in self.needs:
                inputs = torch.cat([inputs, torch.zeros_like(inputs[:1])])
            if inputs.is_inference() or self.of_input:
                inputs = inputs.detach().clone(memory_format=memory_format(inputs))
            if self.of_input:
                inputs.requires_grad_()
            tapped = tap(model.module, self.names, self.of_layers, model.facts.layer_runs)
            faster = self.faster() if self.faster else nullcontext()
            with tapped as outputs, faster, refusal_in_a_sentence(model, inputs):
                logits = model.forward(inputs)
            for name in self.names:
                if name not in outputs:
                    raise LayerError(f"layer {name!r} of {model.name} does not run; name one that does")
            chosen = choose(logits.detach()[:count])
            leaves = (outputs if self.of_layers else {}) | ({INPUT: inputs} if self.of_input else {})
            gradients = self._gradients(logits[:count], chosen, leaves)
        layouts = {}
        for name, output in outputs.items():
            if (layout := layout_of(output, inputs, model.module)) is None:
                raise NotAPicture(name, output)
            layouts[name] = layout
        model.facts.columns = logits.shape[1]

        def pictures(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {n: layouts[n].picture(t.detach()[:count]) for n, t in tensors.items() if n in layouts}

        return Trace(
            model=model,
            images=images,
            targets=chosen,
            logits=logits.detach()[:count],
            layer=self.main,
            scales=tuple(name for name in layouts if name in self.scales),
            activations=pictures(outputs),
            gradients=pictures(gradients),
            input_gradient=at_least_float(gradients[INPUT][:count]) if self.of_input else None,
            blank_logits=logits.detach()[count] if "blank" in self.needs else None,
            queue=queue or Queue(model, size_of(images)),
            seed=seed,
        )

    def _gradients(self, logits: Tensor, chosen: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not leaves:
            return {}
        with self.model.computing():
            # In evaluation mode images of a batch are independent: the gradient of the sum is each one's.
            score = self.model.scores(logits, chosen).sum()
            if not score.requires_grad:
                raise ModelError(
                    "the model's output carries no gradient; does its forward run under torch.no_grad(), "
                    "or checkpoint with use_reentrant=True? Switch that off"
                )
            with span("backward", inputs=len(logits) if self.of_input else 0):
                computed = torch.autograd.grad(score, list(leaves.values()), allow_unused=True)
        gradients = dict(zip(leaves, computed, strict=True))
        if unread := [name for name, gradient in gradients.items() if gradient is None]:
            raise LayerError(f"layer {unread[0]!r} does not lead to the output; name one that does")
        return gradients


def choose_layers(
    model: Model, images: Tensor, needs: frozenset[str], layer: str | Sequence[str] | None
) -> tuple[str | None, tuple[str, ...], tuple[str, ...]]:
    """The main layer, every layer to capture, and those that multi-scale CAMs average."""
    if not needs & {"activations", "gradients", "scales"}:
        return None, (), ()
    if layer is not None:
        named = (layer,) if isinstance(layer, str) else tuple(layer)
        if not named:
            raise InputError("layer is an empty list; name at least one layer or leave it out")
        for name in named:
            find_module(model.module, name)
        if len(named) > 1 or "scales" not in needs:
            return named[-1], named, named
        scales = known_scales(model) or searched_scales(model, images, named[0])
        names = tuple(dict.fromkeys((*scales, *named)))
        return named[0], names, names
    main = layers.default_layer(model, images)
    if main is None:
        scales = searched_scales(model, images)
        main = scales[-1]
        model.determine(scales=scales, layer=main)
    if "scales" not in needs:
        return main, (main,), ()
    if known_scales(model) is None:
        model.determine(scales=searched_scales(model, images, main))
    scales = known_scales(model) or ()
    return main, tuple(dict.fromkeys((*scales, main))), scales


class NotAPicture(Exception):
    """A layer whose output has no spatial grid."""

    def __init__(self, name: str, output: Tensor) -> None:
        self.name, self.output = name, output


@contextmanager
def refusal_in_a_sentence(model: Model, images: Tensor) -> Iterator[None]:
    """Raise InputError or ModelError if a forward fails, because of the images' size or for other reasons."""
    own = (model.preprocess.channels, *model.preprocess.size)
    try:
        yield
    except HeatproofError:
        raise
    except RuntimeError as error:
        if is_out_of_memory(error) or not re.search("size|shape|channels", str(error)):
            raise
        raise _wrong_size(model, images, own, error) from error
    except (ValueError, AssertionError) as error:
        hints = re.search("size|shape|channel|height|width|resolution", first_line(error).lower())
        if own != tuple(images.shape[1:]) and (_takes(model, own) or hints):
            raise _wrong_size(model, images, own, error) from error
        raise ModelError(
            f"the forward of {model.name} failed on images of shape {tuple(images.shape)}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _takes(model: Model, shape: tuple[int, ...]) -> bool:
    """Whether a blank image of this shape passes through the network."""
    with suppress(Exception):
        model.logits(torch.zeros(1, *shape))
        return True
    return False


def _wrong_size(model: Model, images: Tensor, own: tuple[int, ...], error: Exception) -> InputError:
    advice = f"its own preprocessing makes {'x'.join(map(str, own))}"
    if own == tuple(images.shape[1:]):
        sides = COMMON_SIZES if len(own) == 3 else ()
        fits = ", ".join(f"{side}x{side}" for side in sides if _takes(model, (own[0], side, side)))
        advice = f"it takes {fits}: " if fits else "set its input size: "
        advice += "--size, preprocess.size in a study, or image_size = (height, width) on the network"
    return InputError(
        f"{model.name} cannot take images of shape {tuple(images.shape)} ({first_line(error)}); {advice}"
    )


@contextmanager
def tap(
    module: nn.Module, names: Sequence[str], gradients: bool = True, runs: Mapping[str, int] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Capture the outputs of the named layers, as leaf tensors for gradients, while the context is open."""
    taken: dict[str, Tensor] = {}
    runs_left = dict(runs or {})  # only the last run of a layer counts; autograd records nothing before it

    def take(name: str, output: Any) -> Any:
        if runs_left.get(name, 1) > 1:
            runs_left[name] -= 1
            return None
        tensor = first_tensor(output)
        if tensor is None:
            return None
        # A new leaf cuts the graph here: the backward pass ends at the layer and never reaches the stem.
        leaf = tensor.detach().requires_grad_() if gradients and not tensor.requires_grad else tensor
        taken.pop(name, None)  # a module that runs twice counts where it ran last
        taken[name] = leaf
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
            hooks.enter_context(layers.rectifiers_watched(behind))
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
        self.recorded: dict[nn.Module, list[Any]] = {}  # of modules that finish before the layer's last run
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

        with watched(model.module, ended):
            self.logits = model.forward(self.inputs)
        parts = set(self.layer.modules())
        self.recorded = {m: outputs for m, outputs in self.recorded.items() if m not in parts}
        *self.earlier, self.output = runs  # what the layer returned in runs before its last one, and there
        tensor = first_tensor(self.output)
        assert tensor is not None
        if function := layer.partition("+")[2]:  # the network applies it again, without effect
            tensor = layers.BY_NAME[function](tensor)
        layout = layout_of(tensor, self.inputs, model.module)
        assert layout is not None
        self.activation: Tensor = tensor  # "1 ...", in the layer's own layout
        self.layout: layers.Layout = layout
        self.short = True
        # Forwards that do more than call modules may not work with the shortcut: then the whole network runs.
        try:
            again = self(torch.cat([tensor, tensor]))
            self.short = torch.allclose(again, self.logits.expand_as(again), rtol=1e-3, atol=1e-4)
        except (RuntimeError, ValueError, TypeError, IndexError):
            self.short = False

    @torch.no_grad()
    def __call__(self, activations: Tensor) -> Tensor:
        """Turn "n ..." changed activations, in the layer's own layout, into "n k" logits."""
        changed = replace_first(self.output, activations)
        count = len(activations)
        # The input is expanded too: code outside of the recorded modules may read it or its batch size.
        with self._replayed(changed, count):
            return self.model.forward(self.inputs.expand(count, *self.inputs.shape[1:]))

    @contextmanager
    def _replayed(self, changed: Any, count: int) -> Iterator[None]:
        """Let the recorded modules, and the layer, return without running."""
        # An instance that has a forward of its own already (patched by other code) is left alone.
        if not self.short or "forward" in self.layer.__dict__:
            left = [None] * len(self.earlier)  # runs of the layer that stay as they are
            with self.layer.register_forward_hook(lambda *_: left.pop() if left else changed):
                yield
            return
        forwards = {
            module: _replay(module.forward, outputs, count) for module, outputs in self.recorded.items()
        }
        forwards[self.layer] = _replay(lambda *_, **__: changed, self.earlier, count)
        with forwards_replaced(forwards):
            yield


def _replay(original: Callable[..., Any], outputs: list[Any], count: int) -> Callable[..., Any]:
    waiting = list(outputs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not waiting:  # a module that also runs behind the layer, such as a shared ReLU
            return original(*args, **kwargs)
        return tree_map_only(Tensor, lambda t: t.expand(count, *t.shape[1:]), waiting.pop(0))

    return forward
