"""The shared pass: logits, activations and gradients for all methods from one forward and one backward.

Parameters are frozen, so nothing before the first needed layer builds a graph. At that layer the output is
detached and made a new leaf; everything behind it is recorded, and one backward pass stops there. k gradient
CAMs cost one forward and one partial backward. On a GPU a pass that repeats is recorded as a CUDA graph
(accel/), with hooks and backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heatproof.errors import HeatproofError, InputError, LayerError, ModelError
from heatproof.models.accel import Accelerator
from heatproof.models.checkpoints import first_line
from heatproof.models.layers import (
    default_layer,
    find_module,
    known_scales,
    layout_of,
    not_a_picture,
    searched_scales,
)
from heatproof.models.model import Model
from heatproof.models.queue import Queue
from heatproof.models.running import at_least_float, is_out_of_memory, memory_format
from heatproof.models.tap import tap
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
    try:
        return SharedPass(model, images, needs, layer).run(images, targets, queue, seed)
    except NotAPicture as problem:
        if layer is not None or model.layer is not None:
            raise not_a_picture(model, problem.name, problem.output, images) from None
    # The guess by name was wrong: one pass finds the last layer with a grid, which the Model remembers.
    model.scales = searched_scales(model, images)
    model.layer = model.scales[-1]
    return SharedPass(model, images, needs, None).run(images, targets, queue, seed)


class Passed(NamedTuple):
    """Results of one pass, for all its rows."""

    logits: Tensor
    chosen: Tensor  # "b" classes that were explained
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    whole: Mapping[str, Any]


class SharedPass:
    """One forward, and if gradients are needed one backward that stops at the layers."""

    def __init__(
        self, model: Model, images: Tensor, needs: frozenset[str], layer: str | Sequence[str] | None
    ) -> None:
        self.model, self.needs = model, needs
        self.rows = len(images)  # rows that are explained; a blank one may follow
        self.main, self.names, self.scales = choose_layers(model, images, needs, layer)
        self.of_layers, self.of_input = bool(needs & {"gradients", "scales"}), "input_gradient" in needs
        self.fused = None if self.of_input else Accelerator(model).fused(images)

    def run(self, images: Tensor, targets: Any, queue: Queue | None, seed: int) -> Trace:
        with torch.inference_mode(False):
            inputs = self.model.ready(images)
            if "blank" in self.needs:
                inputs = torch.cat([inputs, torch.zeros_like(inputs[:1])])
            if inputs.is_inference():
                inputs = inputs.clone(memory_format=memory_format(inputs))
            passed = self._recorded(inputs, targets)
            if passed is None:
                passed = self(inputs, lambda logits: self.model.check_targets(targets, logits))
        return self.trace(passed, images, inputs, queue, seed)

    def __call__(self, inputs: Tensor, choose: Callable[[Tensor], Tensor]) -> Passed:
        """Run the pass. choose: returns the columns to explain from the logits."""
        model = self.model
        # The caller may be in inference mode, whose tensors cannot require gradients.
        with torch.inference_mode(False), torch.set_grad_enabled(self.of_layers or self.of_input):
            if self.of_input:
                inputs = inputs.detach().clone(memory_format=memory_format(inputs)).requires_grad_()
            tapped = tap(model.module, self.names, self.of_layers, model.facts.layer_runs)
            fused = self.fused() if self.fused else nullcontext()
            with tapped as taken, fused, refusal_in_a_sentence(model, inputs):
                logits = model.forward(inputs)
            for name in self.names:
                if name not in taken.outputs:
                    raise LayerError(f"layer {name!r} of {model.name} does not run; name one that does")
            chosen = choose(logits.detach()[: self.rows])
            leaves = (taken.outputs if self.of_layers else {}) | ({INPUT: inputs} if self.of_input else {})
            with model.computing():
                gradients = _gradients(model.scores(logits[: self.rows], chosen), leaves)
        return Passed(logits.detach(), chosen, taken.outputs, gradients, taken.whole)

    def _recorded(self, inputs: Tensor, targets: Any) -> Passed | None:
        """The pass as a CUDA graph, if passes are recorded; the next pass overwrites its results."""

        def whole_pass(inputs: Tensor, chosen: Tensor | None = None) -> tuple[Any, ...]:
            return self(inputs, self.model.predicted if chosen is None else lambda _: chosen)[:4]

        request = "shared", self.names, self.rows, self.of_layers, self.of_input, self.fused
        accelerator = Accelerator(self.model)
        results = accelerator.recorded(request, whole_pass, inputs, targets, self.rows, lasting=True)
        if results is None:
            return None
        # Logits and targets outlive the pass in Maps and rows; outputs are read before the next replay.
        logits, chosen, outputs, gradients = results
        return Passed(logits.clone(), chosen.clone(), outputs, gradients, outputs)

    def trace(
        self, passed: Passed, images: Tensor, inputs: Tensor, queue: Queue | None = None, seed: int = 0
    ) -> Trace:
        """The Trace that methods read, from the results of a pass."""
        model, count, layouts = self.model, self.rows, {}
        for name, output in passed.outputs.items():
            if (layout := layout_of(output, inputs, model.module)) is None:
                raise NotAPicture(name, passed.whole[name])
            layouts[name] = layout
        model.facts.columns = passed.logits.shape[1]

        def pictures(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {n: layouts[n].picture(t.detach()[:count]) for n, t in tensors.items() if n in layouts}

        return Trace(
            model=model,
            images=images,
            targets=passed.chosen,
            logits=passed.logits[:count],
            layer=self.main,
            layers=tuple(layouts),
            scales=tuple(name for name in layouts if name in self.scales),
            activations=pictures(passed.outputs),
            gradients=pictures(passed.gradients),
            input_gradient=at_least_float(passed.gradients[INPUT][:count]) if self.of_input else None,
            blank_logits=passed.logits[count] if "blank" in self.needs else None,
            queue=queue or Queue(model, size_of(images)),
            seed=seed,
        )


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
    main = default_layer(model, images)
    if main is None:
        model.scales = searched_scales(model, images)
        main = model.layer = model.scales[-1]
    if "scales" not in needs:
        return main, (main,), ()
    if known_scales(model) is None:
        model.scales = searched_scales(model, images, main)
    scales = known_scales(model) or ()
    return main, tuple(dict.fromkeys((*scales, main))), scales


class NotAPicture(Exception):
    """A layer whose output has no spatial grid."""

    def __init__(self, name: str, output: Any) -> None:
        self.name, self.output = name, output


def _gradients(scores: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not leaves:
        return {}
    score = scores.sum()
    if not score.requires_grad:
        raise ModelError(
            "the model's output carries no gradient; does its forward run under torch.no_grad(), or "
            "checkpoint with use_reentrant=True? Switch that off"
        )
    # In evaluation mode images of a batch are independent, so the gradient of the sum is each image's own.
    with span("backward", inputs=len(scores) if INPUT in leaves else 0):
        gradients = torch.autograd.grad(score, list(leaves.values()), allow_unused=True)
    by_name = dict(zip(leaves, gradients, strict=True))
    for name, gradient in by_name.items():
        if gradient is None:
            raise LayerError(f"layer {name!r} does not lead to the output; name one that does")
    return by_name


@contextmanager
def refusal_in_a_sentence(model: Model, images: Tensor) -> Iterator[None]:
    """Raise InputError or ModelError if a forward fails, because of the images' size or for other reasons."""
    try:
        yield
    except HeatproofError:
        raise
    except (ValueError, AssertionError) as error:
        raise _failed(model, images, error) from error
    except RuntimeError as error:
        known = "size" in str(error) or "shape" in str(error) or "channels" in str(error)
        if known and not is_out_of_memory(error):
            raise _wrong_size(model, images, error) from error
        raise


def _failed(model: Model, images: Tensor, error: Exception) -> HeatproofError:
    """The error of a failed forward; a blank image of the model's own size shows if size is the cause."""
    own = torch.zeros(1, model.preprocess.channels, *model.preprocess.size)
    if own.shape[1:] != images.shape[1:]:
        with suppress(Exception), torch.no_grad():
            model.forward(model.ready(own))
            return _wrong_size(model, images, error)
        if re.search("size|shape|channel|height|width|resolution", first_line(error).lower()):
            return _wrong_size(model, images, error)
    return ModelError(
        f"the forward of {model.name} failed on images of shape {tuple(images.shape)}: "
        f"{type(error).__name__}: {first_line(error)}"
    )


def _takes(model: Model, side: int) -> bool:
    """Whether a blank square image of this size passes through the network."""
    if len(model.preprocess.size) != 2:
        return False
    with suppress(Exception):
        model.logits(torch.zeros(1, model.preprocess.channels, side, side))
        return True
    return False


def _wrong_size(model: Model, images: Tensor, error: Exception) -> InputError:
    own = (model.preprocess.channels, *model.preprocess.size)
    advice = f"its own preprocessing makes {'x'.join(map(str, own))}"
    if own == tuple(images.shape[1:]):
        fits = ", ".join(f"{side}x{side}" for side in COMMON_SIZES if _takes(model, side))
        advice = f"it takes {fits}: " if fits else "say what it takes: "
        advice += "--size, preprocess.size in a study, or image_size = (height, width) on the network"
    return InputError(
        f"{model.name} cannot take images of shape {tuple(images.shape)} ({first_line(error)}); {advice}"
    )
