"""Maps from the gradient of the class's logit with respect to the input.

Gradients say what a small change of a pixel does to the logit. A bare gradient is noisy, so SmoothGrad
averages it around the image and Integrated Gradients along a line from a baseline to the image. Where a
method visits many points, all points of all images go through one queue and are summed as they come back.

Convention, here and in Blur IG and Guided IG: the map is the sum over channels of |attribution|; the plain
sum over channels is kept beside it as the signed map.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.baselines import STARTS, baseline_images
from heatproof.models.running import memory_format
from heatproof.registry import Card, explainer
from heatproof.types import Signed, Trace, per_map

GRADIENT_CARD = Card(
    relu="none",
    sign="absolute values summed over channels; the plain sum is kept as the signed map",
    resize="none: already at the image's size",
)
RULES = ("gauss-legendre", "left", "right", "middle", "trapezoid")


def over_channels(attributions: Tensor) -> Signed:
    """ "b c H W" -> "b H W", without and with signs."""
    return Signed(attributions.abs().sum(1), attributions.sum(1))


def working_images(trace: Trace) -> Tensor:
    """ "b c H W" in the precision gradients come back in: float32, or the float64 of such a model."""
    return trace.images.double() if trace.model.dtype == torch.float64 else trace.images.float()


def as_read(images: Tensor) -> Tensor:
    """In the memory format of a network's inputs and gradients: what is made of both needs no other."""
    return images.contiguous(memory_format=memory_format(images))


def check_counts(method: str, **options: int) -> None:
    for name, value in options.items():
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{method} {name} must be a whole number of at least 1, got {value!r}")


@torch.inference_mode(False)  # what is built here meets autograd, which refuses inference tensors
def sum_of_gradients(
    trace: Trace, points: int, visit: Callable[[range, Tensor, Tensor], tuple[Tensor, Tensor]], power: int = 1
) -> Tensor:
    """ "b c H W": sum over points of weight * gradient ** power, each image's points of its own.

    visit(touched, which, rows) builds a batch: "j c H W" inputs and weights that broadcast to them. Input j
    is point touched[which[j]] of image rows[j]. Points vary slowest: a batch shares what a point needs.
    """
    count = len(trace.images)
    total = weights = torch.zeros_like(as_read(working_images(trace)))

    def make(start: int, stop: int) -> tuple[Tensor, Tensor]:
        nonlocal weights
        touched = range(start // count, (stop - 1) // count + 1)
        jobs = torch.arange(start, stop, device=trace.images.device)
        inputs, weights = visit(touched, jobs // count - touched.start, jobs % count)
        return inputs, trace.targets[jobs % count]

    def done(gradients: Tensor, _logits: Tensor, start: int, stop: int) -> None:
        strength = (gradients if power == 1 else gradients**power) * weights
        # Point by point, not by index_add_: a GPU would add them in another order each time.
        for first in range(start - start % count, stop, count):
            own = slice(max(first, start), min(first + count, stop))
            total[own.start - first : own.stop - first] += strength[own.start - start : own.stop - start]

    trace.queue.input_gradients(count * points, make, done)
    return total.contiguous()


@explainer(
    "gradient", needs=("input_gradient",), cite="simonyan2014gradient", card=GRADIENT_CARD, volumes=True
)
def gradient(trace: Trace) -> Signed:
    """The gradient of the logit at the image itself.

    sum_c |d y / d x_c|. The paper takes the largest channel; the sum is COSE's convention.
    """
    assert trace.input_gradient is not None
    return over_channels(trace.input_gradient)


@explainer(
    "gradient-x-input",
    needs=("input_gradient",),
    cite="shrikumar2017deeplift",
    aliases=("input-x-gradient", "gradxinput"),
    card=GRADIENT_CARD,
    volumes=True,
)
def gradient_x_input(trace: Trace) -> Signed:
    """The gradient of the logit times the image, both in normalised space.

    sum_c |x_c dy/dx_c|. A pixel of the mean colour, 0 after normalisation, gets nothing.
    """
    assert trace.input_gradient is not None
    return over_channels(trace.input_gradient * working_images(trace))


@explainer(
    "smoothgrad",
    cite="smilkov2017smoothgrad",
    card=GRADIENT_CARD,
    sufficient_repeats={"samples": 25},
    volumes=True,
)
def smoothgrad(trace: Trace, *, samples: int = 50, noise: float = 0.15, squared: bool = False) -> Signed:
    """The mean gradient at noisy copies of the image.

    1/n sum_s dy/dx (x + e_s), e_s normal with standard deviation `noise` times (max x - min x) of each image.
    squared=true averages squared gradients, as COSE's code does. Sample s draws its noise from (seed, s), the
    same for every image, so that neither batch size nor order matters.
    """
    check_counts("smoothgrad", samples=samples)
    images = as_read(working_images(trace))
    low, high = images.flatten(1).aminmax(dim=1)
    deviation = per_map(noise * (high - low), images)

    def visit(touched: range, which: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        drawn = as_read(torch.stack([normal_noise(trace, s) for s in touched]))
        return images[rows] + deviation[rows] * drawn[which], images.new_tensor(1 / samples)

    return over_channels(sum_of_gradients(trace, samples, visit, power=2 if squared else 1))


@explainer(
    "integrated-gradients",
    cite="sundararajan2017ig",
    aliases=("ig",),
    card=GRADIENT_CARD,
    sufficient_repeats={"steps": 13},
    volumes=True,
)
def integrated_gradients(
    trace: Trace, *, steps: int = 50, baseline: str = "zero", rule: str = "gauss-legendre"
) -> Signed:
    """The gradient averaged on the straight line from a baseline to the image, times the way.

    (x - x0) * integral over a in [0, 1] of dy/dx (x0 + a (x - x0)).
    baseline: "zero" (in normalised space), "black" (0 before normalisation), "blur" (Gaussian, sigma 10) or
    "noise" (standard normal in normalised space, by the seed, the same for every image).
    rule: how the integral is summed: "gauss-legendre" as captum does, "left", "right", "middle", "trapezoid".
    """
    check_counts("integrated-gradients", steps=steps)
    images = working_images(trace)
    start = baseline_images(trace.model, images, baseline, trace.seed, STARTS)
    nodes, weights = (per_map(images.new_tensor(v), images) for v in quadrature(rule, steps))
    start, way = as_read(start), as_read(images - start)

    def visit(touched: range, which: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        points = which + touched.start
        return start[rows] + nodes[points] * way[rows], weights[points]

    return over_channels(way * sum_of_gradients(trace, steps, visit))


def quadrature(rule: str, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes in [0, 1] and their weights."""
    if rule == "gauss-legendre":
        nodes, weights = np.polynomial.legendre.leggauss(steps)
        return (nodes + 1) / 2, weights / 2
    if rule not in RULES:
        raise InputError(f"rule must be one of {', '.join(RULES)}; got {rule!r}")
    if rule == "trapezoid":  # `steps` nodes, both ends among them
        ends = np.isin(np.arange(steps), (0, steps - 1))
        weights = np.where(ends, 0.5, 1.0)
        return np.linspace(0, 1, steps), weights / weights.sum()
    shift = {"left": 0.0, "middle": 0.5, "right": 1.0}[rule]
    return (np.arange(steps) + shift) / steps, np.full(steps, 1 / steps)


def normal_noise(trace: Trace, sample: int) -> Tensor:
    """ "c H W" of standard normal noise that depends on the seed and the sample's number alone.

    A GPU draws with its own generator, which repeats there but is not the CPU's: noise made on the host took
    five times as long as the passes it feeds.
    """
    shape, device = trace.images.shape[1:], trace.images.device
    if device.type == "cpu":
        random = np.random.default_rng((trace.seed, sample))
        return torch.from_numpy(random.standard_normal(shape, dtype=np.float32))
    (state,) = np.random.SeedSequence((trace.seed, sample)).generate_state(1, np.uint64)
    generator = torch.Generator(device).manual_seed(int(state >> np.uint64(1)))
    return torch.randn(shape, generator=generator, device=device)
