"""The one shared pass: logits, activations and gradients for every method at once.

Parameters are frozen for the duration, so nothing before the first needed layer builds a graph. At that
layer the output is cut off and made a new leaf; everything behind it is recorded, and one backward pass
stops there: the gradient never reaches the stem. k gradient CAMs cost one forward and one partial backward.
On a GPU a pass that comes again is recorded as a CUDA graph (accel/), hooks, backward and all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
    """Run the pass over checked images. The caller holds `frozen_eval(model.module)`."""
    chosen = choose_layers(model, images, needs, layer)
    try:
        return _capture(model, images, targets, needs, chosen, queue, seed)
    except NotAPicture as problem:
        if layer is not None or model.layer is not None:
            raise not_a_picture(model, problem.name, problem.output, images) from None
    # The guess was wrong: look for the last picture by one pass, and remember it on the Model.
    model.scales = searched_scales(model, images)
    model.layer = model.scales[-1]
    chosen = choose_layers(model, images, needs, None)
    return _capture(model, images, targets, needs, chosen, queue, seed)


class Chosen(NamedTuple):
    """The main layer, every layer to capture, and those that multi-scale CAMs average."""

    main: str | None
    names: tuple[str, ...]
    scales: tuple[str, ...]


def choose_layers(
    model: Model, images: Tensor, needs: frozenset[str], layer: str | Sequence[str] | None
) -> Chosen:
    if not needs & {"activations", "gradients", "scales"}:
        return Chosen(None, (), ())
    if layer is not None:
        named = (layer,) if isinstance(layer, str) else tuple(layer)
        if not named:
            raise InputError("layer is an empty list; name at least one layer or leave it out")
        for name in named:
            find_module(model.module, name)
        if len(named) > 1 or "scales" not in needs:
            return Chosen(named[-1], named, named)
        scales = known_scales(model) or searched_scales(model, images, named[0])
        names = tuple(dict.fromkeys((*scales, *named)))
        return Chosen(named[0], names, names)
    main = default_layer(model, images)
    if main is None:
        model.scales = searched_scales(model, images)
        main = model.layer = model.scales[-1]
    if "scales" not in needs:
        return Chosen(main, (main,), ())
    if known_scales(model) is None:
        model.scales = searched_scales(model, images, main)
    scales = known_scales(model) or ()
    return Chosen(main, tuple(dict.fromkeys((*scales, main))), scales)


def _capture(
    model: Model,
    images: Tensor,
    targets: Any,
    needs: frozenset[str],
    layers: Chosen,
    queue: Queue | None,
    seed: int,
) -> Trace:
    one = pass_for(model, images, needs, layers)
    with torch.inference_mode(False):
        inputs = model.ready(images)
        if "blank" in needs:
            inputs = torch.cat([inputs, torch.zeros_like(inputs[:1])])
        if inputs.is_inference():
            inputs = inputs.clone(memory_format=memory_format(inputs))
        passed = _recorded(one, inputs, targets) or one(inputs, lambda of: model.check_targets(targets, of))
    return traced(one, passed, images, inputs, layers, needs, queue, seed)


def pass_for(model: Model, images: Tensor, needs: frozenset[str], layers: Chosen) -> SharedPass:
    """The pass that gives what the methods need."""
    of_layers, of_input = bool(needs & {"gradients", "scales"}), "input_gradient" in needs
    fused = None if of_input else Accelerator(model).fused(images)
    return SharedPass(model, layers.names, len(images), of_layers, of_input, fused)


def traced(
    one: SharedPass,
    passed: Passed,
    images: Tensor,
    inputs: Tensor,
    layers: Chosen,
    needs: frozenset[str],
    queue: Queue | None,
    seed: int,
) -> Trace:
    """What methods read of a pass."""
    model, count = one.model, one.rows
    layouts = {}
    for name, output in passed.outputs.items():
        if (layout := layout_of(output, inputs, model.module)) is None:
            raise NotAPicture(name, passed.whole[name])
        layouts[name] = layout
    model.facts.columns = passed.logits.shape[1]
    order = tuple(layouts)

    def pictures(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: layouts[n].picture(t.detach()[:count]) for n, t in tensors.items() if n in layouts}

    return Trace(
        model=model,
        images=images,
        targets=passed.chosen,
        logits=passed.logits[:count],
        layer=layers.main,
        layers=order,
        scales=tuple(name for name in order if name in layers.scales),
        activations=pictures(passed.outputs),
        gradients=pictures(passed.gradients),
        input_gradient=at_least_float(passed.gradients[INPUT][:count]) if one.of_input else None,
        blank_logits=passed.logits[count] if "blank" in needs else None,
        queue=queue or Queue(model, size_of(images)),
        seed=seed,
    )


class Passed(NamedTuple):
    """What one pass gave, as tensors of all its rows."""

    logits: Tensor
    chosen: Tensor  # "b" classes that were explained
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    whole: Mapping[str, Any]


class SharedPass(NamedTuple):
    """One forward, and where gradients are wanted one backward that stops at the layers."""

    model: Model
    names: tuple[str, ...]
    rows: int  # rows that are explained; a blank one may follow
    of_layers: bool
    of_input: bool
    fused: Callable[[], AbstractContextManager[None]] | None = None

    def __call__(self, inputs: Tensor, choose: Callable[[Tensor], Tensor]) -> Passed:
        model = self.model
        with torch.inference_mode(False), torch.set_grad_enabled(self.of_layers or self.of_input):
            if self.of_input:
                inputs = inputs.detach().clone(memory_format=memory_format(inputs)).requires_grad_()
            runs, fused = model.facts.layer_runs, self.fused() if self.fused else nullcontext()
            refused = refusal_in_a_sentence(model, inputs)
            with tap(model.module, self.names, self.of_layers, runs) as taken, fused, refused:
                logits = model.forward(inputs)
            for name in self.names:
                if name not in taken.outputs:
                    raise LayerError(f"layer {name!r} of {model.name} does not run; name one that does")
            chosen = choose(logits.detach()[: self.rows])
            wanted = (taken.outputs if self.of_layers else {}) | ({INPUT: inputs} if self.of_input else {})
            with model.computing():
                gradients = _gradients(model.scores(logits[: self.rows], chosen), wanted)
        return Passed(logits.detach(), chosen, taken.outputs, gradients, taken.whole)


def _recorded(one: SharedPass, inputs: Tensor, targets: Any) -> Passed | None:
    """The pass as a CUDA graph, where that can be; what it returns is overwritten by the next one."""

    def whole_pass(inputs: Tensor, chosen: Tensor | None = None) -> tuple[Any, ...]:
        return one(inputs, one.model.predicted if chosen is None else lambda _: chosen)[:4]

    results = Accelerator(one.model).recorded(
        ("shared", *one[1:]), whole_pass, inputs, targets, one.rows, lasting=True
    )
    if results is None:
        return None
    logits, chosen, outputs, gradients = results
    return Passed(logits.clone(), chosen.clone(), outputs, gradients, outputs)


class NotAPicture(Exception):
    """A layer whose output has no places."""

    def __init__(self, name: str, output: Any) -> None:
        self.name, self.output = name, output


def _gradients(scores: Tensor, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not wanted:
        return {}
    score = scores.sum()
    if not score.requires_grad:
        raise ModelError(
            "the model's output carries no gradient; does its forward run under torch.no_grad(), or "
            "checkpoint with use_reentrant=True? Switch that off"
        )
    # Images of a batch do not see each other in evaluation mode, so the sum's gradient is each image's own.
    with span("backward", inputs=len(scores) if INPUT in wanted else 0):
        found = torch.autograd.grad(score, list(wanted.values()), allow_unused=True)
    for name, gradient in zip(wanted, found, strict=True):
        if gradient is None:
            raise LayerError(f"layer {name!r} does not lead to the output; name one that does")
    return dict(zip(wanted, found, strict=True))


@contextmanager
def refusal_in_a_sentence(model: Model, images: Tensor) -> Iterator[None]:
    """A forward that gives up on images, for their size or for reasons of its own."""
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
    """Whether a forward that gave up did so for the images' size: one of the right size tells."""
    own = torch.zeros(1, model.preprocess.channels, *model.preprocess.size)
    fits = own.shape[1:] == images.shape[1:]
    with suppress(Exception), torch.no_grad():
        if not fits:
            model.forward(model.ready(own))
            return _wrong_size(model, images, error)
    about_size = re.search("size|shape|channel|height|width|resolution", first_line(error).lower())
    if about_size and not fits:
        return _wrong_size(model, images, error)
    return ModelError(
        f"the forward of {model.name} failed on images of shape {tuple(images.shape)}: "
        f"{type(error).__name__}: {first_line(error)}"
    )


def _takes(model: Model, side: int) -> bool:
    """Whether a blank square image of this size goes through the network."""
    if len(model.preprocess.size) != 2:
        return False
    try:
        model.logits(torch.zeros(1, model.preprocess.channels, side, side))
    except Exception:
        return False
    return True


def _wrong_size(model: Model, images: Tensor, error: Exception) -> InputError:
    own = (model.preprocess.channels, *model.preprocess.size)
    told = f"its own preprocessing makes {'x'.join(map(str, own))}"
    if own == tuple(images.shape[1:]):
        fits = ", ".join(f"{side}x{side}" for side in COMMON_SIZES if _takes(model, side))
        told = f"it takes {fits}: " if fits else "say what it takes: "
        told += "--size, preprocess.size in a study, or image_size = (height, width) on the network"
    return InputError(
        f"{model.name} cannot take images of shape {tuple(images.shape)} ({first_line(error)}); {told}"
    )
