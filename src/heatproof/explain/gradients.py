"""Maps from the gradient of the class's logit with respect to the input.

All points that a method visits, of all images, go through one queue and are summed as they come back. The map
is the sum over channels of |attribution|; the plain sum over channels is the signed map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain import method
from heatproof.explain.baselines import STARTS, baseline_images, blur_matrices
from heatproof.explain.cams import safe_ratio, weighted_sum
from heatproof.models.capture import SharedPass
from heatproof.models.running import memory_format
from heatproof.types import Signed, Trace, per_map, spatial_dims

BLUR_STEP = 0.01  # of Blur IG's difference quotient, in pixels
CLOSE = 1e-9  # relative and absolute: when Guided IG takes a distance as reached


def over_channels(attributions: Tensor) -> Signed:
    """Turn "b c H W" into "b H W", without and with signs."""
    return Signed(attributions.abs().sum(1), attributions.sum(1))


def working_images(trace: Trace) -> Tensor:
    """Tensor "b c H W" in the precision of the gradients: float32, or float64 for a float64 model."""
    return trace.images.double() if trace.model.dtype == torch.float64 else trace.images.float()


def _start(trace: Trace, images: Tensor, baseline: str) -> Tensor:
    return baseline_images(trace.model, images, baseline, trace.seed, STARTS)


def _range(images: Tensor) -> Tensor:
    """Tensor "b 1 1 1": the highest value of each image minus the lowest."""
    low, high = images.flatten(1).aminmax(dim=1)
    return per_map(high - low, images)


def as_read(images: Tensor) -> Tensor:
    """The images in the memory format of a network's inputs and gradients."""
    return images.contiguous(memory_format=memory_format(images))


@torch.inference_mode(False)  # autograd refuses inference tensors
def sum_of_gradients(
    trace: Trace, points: int, visit: Callable[[range, Tensor, Tensor], tuple[Tensor, Tensor]], power: int = 1
) -> Tensor:
    """Tensor "b c H W": the sum over points of weight * gradient ** power, for each image.

    visit(touched, which, rows) builds "j c H W" inputs and weights that broadcast to them; input j is point
    touched[which[j]] of image rows[j].
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


@method("gradient")
def gradient(trace: Trace) -> Signed:
    """The gradient of the logit at the image itself.

    sum_c |d y / d x_c|. The paper takes the largest channel; the sum is COSE's convention.
    """
    assert trace.input_gradient is not None
    return over_channels(trace.input_gradient)


@method("gradient-x-input")
def gradient_x_input(trace: Trace) -> Signed:
    """The gradient of the logit times the image, both in normalised space.

    sum_c |x_c dy/dx_c|. A pixel of the mean colour, 0 after normalisation, gets nothing.
    """
    assert trace.input_gradient is not None
    return over_channels(trace.input_gradient * working_images(trace))


@method("smoothgrad")
def smoothgrad(trace: Trace, *, samples: int = 50, noise: float = 0.15, squared: bool = False) -> Signed:
    """The mean gradient at noisy copies of the image.

    1/n sum_s dy/dx (x + e_s), e_s normal with standard deviation `noise` times (max x - min x) of each image.
    squared=true averages squared gradients, as COSE's code does. Sample s draws its noise from (seed, s), the
    same for every image, so that neither batch size nor order matters.
    """
    images = as_read(working_images(trace))
    deviation = noise * _range(images)

    def visit(touched: range, which: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        drawn = as_read(normal_noise(trace, touched))
        return images[rows] + deviation[rows] * drawn[which], images.new_tensor(1 / samples)

    return over_channels(sum_of_gradients(trace, samples, visit, power=2 if squared else 1))


@method("integrated-gradients")
def integrated_gradients(
    trace: Trace, *, steps: int = 50, baseline: str = "zero", rule: str = "gauss-legendre"
) -> Signed:
    """The gradient averaged on the straight line from a baseline to the image, times their difference.

    (x - x0) * integral over a in [0, 1] of dy/dx (x0 + a (x - x0)).
    baseline: "zero" (in normalised space), "black" (0 before normalisation), "blur" (Gaussian, sigma 10) or
    "noise" (standard normal in normalised space, by the seed, the same for every image).
    rule: how the integral is summed: "gauss-legendre" as captum does, "left", "right", "middle", "trapezoid".
    """
    images = working_images(trace)
    start = _start(trace, images, baseline)
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
    if rule == "trapezoid":  # `steps` nodes, both ends among them
        ends = np.isin(np.arange(steps), (0, steps - 1))
        weights = np.where(ends, 0.5, 1.0)
        return np.linspace(0, 1, steps), weights / weights.sum()
    shift = {"left": 0.0, "middle": 0.5, "right": 1.0}[rule]
    return (np.arange(steps) + shift) / steps, np.full(steps, 1 / steps)


@method("smooth-gradcam++")
def smooth_gradcam_plus_plus(trace: Trace, *, samples: int = 25, noise: float = 0.15) -> Tensor:
    """Grad-CAM++ with the powers of the gradient averaged over noisy copies of the image.

    ReLU(sum_k w_k A_k), w_k = sum_ij D2 / (2 D2 + (sum_ab A_kab) D3) ReLU(D1), Dp the mean over copies of
    g_kij^p and A the activations of the image itself. Noise as for smoothgrad; the paper names no number of
    copies and no deviation.
    """
    images, model = working_images(trace), trace.model
    deviation, powers = noise * _range(images), torch.zeros(3, *trace.activation.shape).to(trace.activation)
    shared = SharedPass(model, images, frozenset({"activations", "gradients"}), trace.layer)
    for sample in range(samples):
        noisy = images + deviation * normal_noise(trace, [sample])
        gradients = shared.run(noisy, lambda _: trace.targets).gradient
        powers += torch.stack([gradients, gradients**2, gradients**3]) / samples
    first, second, third = powers
    dims = spatial_dims(first, 2)
    alpha = safe_ratio(second, 2 * second + trace.activation.sum(dims, keepdim=True) * third)
    return weighted_sum((alpha * first.relu()).sum(dims), trace.activation)


def normal_noise(trace: Trace, samples: Sequence[int]) -> Tensor:
    """Tensor "n c H W" of standard normal noise that depends only on the seed and the samples' numbers.

    A GPU draws with its own generator, so its numbers differ from those of a CPU: noise drawn on the host
    takes five times as long as the passes it feeds.
    """
    shape, device = trace.images.shape[1:], trace.images.device

    def draw(sample: int) -> Tensor:
        if device.type == "cpu":
            random = np.random.default_rng((trace.seed, sample))
            return torch.from_numpy(random.standard_normal(shape, dtype=np.float32))
        (state,) = np.random.SeedSequence((trace.seed, sample)).generate_state(1, np.uint64)
        generator = torch.Generator(device).manual_seed(int(state >> np.uint64(1)))
        return torch.randn(shape, generator=generator, device=device)

    return torch.stack([draw(sample) for sample in samples])


@method("gradient-shap")
def gradient_shap(trace: Trace, *, samples: int = 50, baseline: str = "noise", noise: float = 0.0) -> Signed:
    """The gradient at random points between the image and random baselines, times their difference.

    1/n sum_s (x_s - b_s) * dy/dx (b_s + a_s (x_s - b_s)), a_s uniform in [0, 1], x_s = x + noise.
    baseline: "noise" (standard normal in normalised space, another one for each sample), or one image for
    all: "zero" (in normalised space), "black", "blur".
    noise: standard deviation of what is added to the image, as a share of its range.

    Without a data set to draw from, baselines are noise images or one fixed image. The points on the line are
    spread evenly, with one drawn at random in each of n equal parts, which keeps the mean and lowers its
    error. Sample s draws from (seed, s) alone, the same for every image.
    """
    if noise < 0:
        raise InputError(f"gradient-shap noise must not be negative, got {noise}")
    images = working_images(trace)
    fixed = None if baseline == "noise" else _start(trace, images, baseline)
    deviation = noise * _range(images)
    drawn = np.random.default_rng((trace.seed, samples)).random(samples)
    places = per_map(images.new_tensor((np.arange(samples) + drawn) / samples), images)

    def visit(touched: range, which: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        end = images[rows]
        if noise > 0:
            end = end + deviation[rows] * normal_noise(trace, [2 * s + 1 for s in touched])[which]
        if fixed is None:
            start = normal_noise(trace, [2 * s for s in touched]).to(images)[which]
        else:
            start = fixed[rows]
        way = end - start
        return start + places[which + touched.start] * way, way / samples

    return over_channels(sum_of_gradients(trace, samples, visit))


@method("blur-ig")
def blur_ig(trace: Trace, *, steps: int = 100, sigma: float = 50.0) -> Signed:
    """The gradient summed while the image is sharpened from a blur of `sigma` pixels.

    -sum_i dy/dx (L(x, s_i)) * dL/ds (x, s_i) * sigma / steps, s_i = i sigma / steps, L the Gaussian blur with
    zeros beyond the border, dL/ds a difference quotient of step 0.01, as in the authors' package. Different
    from it: the quotient is taken of the blur matrices in float64, not of two blurred images, so float32
    images lose no digits. With D = (K' - K) / 0.01 for the two blurs K and K',
    (K' X K'^T - K X K^T) / 0.01 = D X K'^T + K X D^T.
    """
    if not 0 < sigma < math.inf:
        raise InputError(f"blur-ig sigma must be a positive number of pixels, got {sigma}")
    # Rows outermost and columns innermost: both products are then plain batched ones, with no copy.
    images = working_images(trace).permute(0, 2, 1, 3).contiguous()

    def matrices(size: int, touched: range) -> tuple[Tensor, Tensor]:
        """Tensor "k size size" twice: the blurs K and their change D."""
        sigmas = [i * sigma / steps for i in touched]
        blur, wider = blur_matrices(size, [*sigmas, *(s + BLUR_STEP for s in sigmas)], images.device).chunk(2)
        return blur.to(images.dtype), ((wider - blur) / BLUR_STEP).to(images.dtype)

    def along_rows(values: Tensor, matrices: Tensor) -> Tensor:
        return torch.bmm(values.flatten(1, 2), matrices.transpose(1, 2)).view_as(values)

    def along_columns(values: Tensor, matrices: Tensor) -> Tensor:
        return torch.bmm(matrices, values.flatten(2)).view_as(values)

    def visit(touched: range, which: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        (left, left_change), (right, right_change) = (matrices(n, touched) for n in trace.image_size)
        in_rows = along_rows(images[rows], right[which])
        change_in_rows = along_rows(images[rows], right_change[which])
        blurred = along_columns(in_rows, left[which])
        change = along_columns(in_rows + BLUR_STEP * change_in_rows, left_change[which])
        change = change + along_columns(change_in_rows, left[which])
        return blurred.permute(0, 2, 1, 3), change.permute(0, 2, 1, 3) * (-sigma / steps)

    return over_channels(sum_of_gradients(trace, steps, visit))


@method("guided-ig")
def guided_ig(
    trace: Trace, *, steps: int = 200, fraction: float = 0.25, max_dist: float = 0.02, baseline: str = "zero"
) -> Signed:
    """The gradient summed on a path that changes features with small gradients first.

    sum_t dy/dx (x_t) * (x_t+1 - x_t). Each step takes the gradient once and closes 1/steps of the L1 distance
    to the image by moving only the `fraction` of features with the smallest |gradient|, in rounds, as far as
    they may go: no feature leaves the straight line by more than `max_dist` of its way.
    baseline: as for integrated-gradients.

    Different from the authors' package: all images of the batch walk together, one forward and one backward
    pass per step, and a round that can move nothing ends the step. The features that move are chosen by rank,
    so the rounding of a float32 network, which depends on the batch size, can change the path and the map.
    """
    if not 0 <= fraction <= 1 or not 0 <= max_dist <= 1:
        raise InputError(f"guided-ig fraction and max_dist must be in [0, 1], got {fraction} and {max_dist}")
    images = working_images(trace)
    start = _start(trace, images, baseline).double().flatten(1)
    way = trace.images.double().flatten(1) - start
    done, attributions = torch.zeros_like(way), torch.zeros_like(way)

    def visit(_touched: range, _which: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return (start + way * done).view_as(images)[rows], images.new_ones(())

    for step in range(1, steps + 1):
        gradients = sum_of_gradients(trace, 1, visit).flatten(1)
        further = _advance(done, way.abs(), gradients.abs(), step / steps, fraction, max_dist)
        attributions += (further - done) * gradients
        done = further
    return over_channels((attributions * way).view_as(trace.images))


def _advance(
    done: Tensor, lengths: Tensor, slopes: Tensor, share: float, fraction: float, max_dist: float
) -> Tensor:
    """The fraction "b n" of its path that each feature has moved after a step.

    done: the same before it; lengths: |image - baseline|; slopes: |gradient|; share: of the L1 distance.
    """
    least, most = max(share - max_dist, 0.0), min(share + max_dist, 1.0)
    wanted = lengths.sum(1, keepdim=True) * (1 - share)
    done = done.clamp(min=least)
    slopes = slopes.masked_fill(lengths == 0, torch.inf)  # these cannot move
    walking, rank = torch.ones_like(wanted, dtype=torch.bool), int(fraction * (slopes.shape[1] - 1))
    while walking.any():
        remaining = torch.linalg.vecdot(lengths, 1 - done)[:, None]
        walking = walking & ~torch.isclose(remaining, wanted, rtol=CLOSE, atol=CLOSE)
        slopes = slopes.masked_fill_(done == most, torch.inf)
        smallest = slopes.topk(rank + 1, dim=1, largest=False, sorted=False).values.amax(1, keepdim=True)
        chosen = walking & (slopes <= smallest) & (slopes != torch.inf)
        room = (most - done) * chosen
        reach = torch.linalg.vecdot(lengths, room)[:, None]
        needed = torch.where(reach > 0, (remaining - wanted) / reach, 0.0)
        walking = walking & (needed > 1)
        done = torch.where(chosen & walking, most, done + room * needed)
    return done
