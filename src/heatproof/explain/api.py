"""explain(): validates its input, runs one shared pass, and calls every method with its trace."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from heatproof.errors import HeatproofError, InputError, ModelError
from heatproof.explain.baselines import cut_ahead
from heatproof.explain.masking import Estimate
from heatproof.explain.providers import Methods, named
from heatproof.models.accel import Accelerator
from heatproof.models.capture import NotAPicture, SharedPass, capture
from heatproof.models.heads import Columns
from heatproof.models.model import Model, Queue, as_model, bind_targets, check_pixels, recorded_model
from heatproof.models.running import (
    checkpoints_in_a_sentence,
    frozen_eval,
    has_gradients,
    is_function,
    is_quantised,
)
from heatproof.registry import (
    Explainer,
    call_text,
    check_options,
    check_volumes,
    explainers,
    parse_call,
    split_calls,
)
from heatproof.show import ByName
from heatproof.timeline import span
from heatproof.types import Images, Maps, Signed, Targets, Trace, extremes, size_of, spatial_dims

AT_LAYER = {"activations", "gradients"}
Layers = str | nn.Module | Sequence[str | nn.Module] | None


@dataclass(frozen=True)
class MethodCall:
    """One method as the user wrote it, with its options."""

    text: str
    entry: Explainer
    options: dict[str, Any]

    def __call__(self, trace: Trace) -> Maps:
        with span("method", self.text):
            result = self.entry.function(trace, **self.options)
        values, further = result, dict[str, Any]()
        if isinstance(result, Signed):
            values, further = result.values, {"signed_values": result.signed.detach().float().contiguous()}
        elif isinstance(result, Estimate):
            values, further = result.values, {"error": result.error.float(), "passes": result.passes}
        if values.ndim != trace.images.ndim - 1 or len(values) != len(trace.images):
            wanted = "b h w" if trace.images.ndim == 4 else "b d h w"
            raise InputError(f"{self.entry.name} returned shape {tuple(values.shape)}, not {wanted!r}")
        values, explained = values.detach().float().contiguous(), trace.model.head.labels(trace.targets)
        return Maps(self.text, values, trace.image_size, explained, **further)


def dead_layers(calls: Sequence[MethodCall], trace: Trace) -> list[Tensor | None]:
    """By method "b" bool: images in which every channel of the layers it reads is constant over places."""
    dead = {}
    for name, layer in trace.activations.items():
        lowest, highest = extremes(layer, spatial_dims(layer, 2))
        dead[name] = (lowest == highest).flatten(1).all(1)
    results: list[Tensor | None] = []
    for needs in (set(call.entry.needs) for call in calls):
        names = trace.scales if "scales" in needs else [trace.layer] if needs & AT_LAYER else []
        known = [dead[name] for name in names if name in dead]
        results.append(torch.stack(known).all(0) if known else None)
    return results


def read_methods(methods: Methods, again: bool = False) -> list[MethodCall]:
    """Parse and check methods: names, with options such as "lime(samples=200)", or functions.

    again: whether they will be run again, which raises InputError for maps that are read from files.
    """
    texts = split_calls(methods) if isinstance(methods, str) else named(methods)
    if not texts:
        raise InputError(f"no method is named; known: {', '.join(explainers.names())}")
    calls = []
    for text in dict.fromkeys(texts):
        name, options = parse_call(text)
        entry = explainers.get(name)
        check_options(entry, options)
        if again and entry.precomputed:
            raise InputError(f"{text} is read from files, so it cannot be run again; name a method that can")
        calls.append(MethodCall(text, entry, options))
    return calls


def is_stored(method: str) -> bool:
    """Whether a method's maps are read from files, so that it cannot be run again."""
    return explainers.get(parse_call(method)[0]).precomputed


def begin_ahead(methods: Methods, model: Model, images: Tensor, seed: int = 0) -> None:
    """Start to segment the images in threads, for methods that read superpixels."""
    for call in read_methods(methods):
        cut_ahead(model, images, call.entry.options | call.options, seed)


def with_sufficient_repeats(methods: Methods) -> dict[str, str]:
    """By method as written: the same call with no more repeats than the ranks of its pixels require.

    For comparisons of a method with itself. The numbers are measured: see docs/results/passes.md.

    >>> with_sufficient_repeats(["gradcam", "smoothgrad(samples=10)"])
    {'gradcam': 'gradcam', 'smoothgrad(samples=10)': 'smoothgrad(samples=10)'}
    """
    texts = {}
    for call in read_methods(methods, again=True):
        given, limits = {**call.entry.options, **call.options}, call.entry.sufficient_repeats
        fewer = {k: n for k, n in limits.items() if isinstance(given[k], int) and given[k] > n}
        texts[call.text] = call_text(call.entry.name, call.options | fewer) if fewer else call.text
    return texts


def explain(
    model: Model | nn.Module,
    images: Images,
    methods: Methods = "gradcam",
    targets: Targets | None = None,
    layer: Layers = None,
    seed: int = 0,
    *,
    ids: Sequence[str] | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], object] | None = None,
    allow_nan: bool = False,
) -> dict[str, Maps]:
    """Compute the maps of every method from one shared pass.

    Args:
        model: from load_model, or a module.
        images: model-ready, "b c H W"; or Pillow images or files, which go through the model's preprocessing.
        methods: names, with optional options, such as "lime(samples=200)"; functions (model, images,
            targets) -> maps, in a list or as {name: function}. See docs/bring-your-own.md.
        targets: the class to explain, one or one per image; default: the prediction. (class, mask) or
            (class, box) of a segmentation or detection; or a function of the output that returns one number
            per image. See docs/heads.md.
        layer: the layer that CAMs read, by name or as a module of the model (several for multi-scale
            methods); chosen automatically by default.
        seed: of methods that draw random numbers.
        ids: names of the images; default: their numbers.
        batch_size: images per pass; chosen automatically, and halved when memory runs out.
        progress: called with the number of passed inputs, for a progress bar.
        allow_nan: return maps also of images for which the network's output is NaN or infinite, instead of
            raising InputError.

    Returns:
        Maps by method as written.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        ... )
        >>> maps = explain(net, torch.rand(2, 3, 8, 8), ["gradcam", "layercam"])
        >>> maps["gradcam"].values.shape, maps["gradcam"].upsample().shape
        (torch.Size([2, 6, 6]), torch.Size([2, 8, 8]))
    """
    if isinstance(images, Model | nn.Module):
        raise InputError("the images are given before the model; write explain(model, images, ...)")
    calls, on_gpu = read_methods(methods), isinstance(images, Tensor) and images.is_cuda
    if seed < 0:
        raise InputError(f"seed must be 0 or more, got {seed}")

    def computed(model: Model, compute: Callable[..., tuple[dict[str, Maps], Tensor] | None]) -> Any:
        inputs = model.check_images(images, finite=not on_gpu)
        if ids is not None and len(ids) != len(inputs):
            raise InputError(
                f"ids has {len(ids)} entries but there are {len(inputs)} images; they must match"
            )
        names = tuple(ids) if ids is not None else tuple(map(str, range(len(inputs))))
        model, columns = bind_targets(model, inputs, targets)
        result = compute(
            model, inputs, calls, ids=names, targets=columns, layer=_layer_names(model, layer), seed=seed,
            batch_size=batch_size, progress=progress,
        )  # fmt: skip
        if result is None:
            return None
        if on_gpu:  # checked after the pass, so that the CPU does not wait for the GPU before it
            check_pixels(inputs)
        if not allow_nan and (lost := model.head.unanswered(result[1])).any():
            images_lost = ", ".join(names[i] for i in lost.nonzero().flatten().tolist()[:8])
            raise InputError(
                f"the output of {model.name} is NaN or infinite for image {images_lost} ({int(lost.sum())} "
                f"of {len(inputs)}), so it cannot be explained; leave it out, or set allow_nan=True for NaN "
                "maps"
            )
        return ByName(result[0])

    # A recorded pass of a plain module is replayed, and the module is checked while the GPU computes.
    if isinstance(model, nn.Module) and (known := recorded_model(model)) is not None:
        with suppress(HeatproofError):  # raised again below, if the module is unchanged
            if (maps := computed(known, replayed)) is not None:
                return cast(ByName, maps)
    return cast(ByName, computed(as_model(model), shared_pass))


def _layer_names(model: Model, layer: Layers) -> str | Sequence[str] | None:
    """Names of layers that are given by name or as modules of the model."""
    if layer is None or isinstance(layer, str):
        return layer
    if not isinstance(layer, nn.Module):
        return tuple(str(_layer_names(model, part)) for part in layer)
    for name, part in model.module.named_modules():
        if part is layer:
            return str(name)
    raise InputError(
        f"layer is a {type(layer).__name__} that is no part of {model.name}; give one of its own"
    )


def check_insides(model: Model, calls: Sequence[MethodCall]) -> None:
    """Raise ModelError for methods that read layers or gradients which the network does not have."""
    if model.facts.quantised is None:
        model.facts.quantised = is_quantised(model.module)
    if is_function(model.module):
        reason = "is a function, without layers or gradients that {} could read; use"
    elif not has_gradients(model.module):
        reason = "runs in ONNX Runtime, without gradients that {} could read; use"
    elif model.facts.quantised:
        reason = "is quantised, and no gradient that {} could read goes through it; give the network it was "
        reason += "made from, or use"
    else:
        return
    is_closed = is_function(model.module) or model.facts.quantised

    def can_run(entry: Explainer) -> bool:
        reads_layers = "activations" in entry.needs and not entry.reads_gradients
        return entry.forward_only or (reads_layers and not is_closed)

    if (inside := next((call.text for call in calls if not can_run(call.entry)), None)) is not None:
        known = ", ".join(entry.name for entry in explainers if can_run(entry))
        raise ModelError(f"{model.name} {reason.format(inside)} {known}")


class Recorded(NamedTuple):
    """Outputs of a shared pass and of its methods."""

    logits: Tensor
    targets: Tensor
    values: list[Tensor]  # by method
    dead: list[Tensor | None]  # by method

    def maps(self, model: Model, calls: Sequence[MethodCall], image_size: tuple[int, ...]) -> list[Maps]:
        explained = model.head.labels(self.targets)
        each = zip(calls, self.values, self.dead, strict=True)
        return [Maps(call.text, values, image_size, explained, dead=dead) for call, values, dead in each]


def _request(model: Model, images: Tensor, calls: Sequence[MethodCall], targets: Any, layer: Any) -> Hashable:
    """The key of a recording, without the state of the network."""
    texts = tuple(call.text for call in calls), layer if isinstance(layer, str | None) else tuple(layer)
    form = images.shape, images.dtype, images.stride(), targets is None
    return texts, form, model.device, model.precision, model.layer, model.scales


def recorded(
    model: Model, images: Tensor, calls: Sequence[MethodCall], targets: Any, layer: Any
) -> Recorded | None:
    """The shared pass with methods that read nothing else, inside `frozen_eval`, as a CUDA graph.

    It is recorded the third time: seven CAMs are about a hundred small kernels, which take Python longer to
    launch than the GPU to run. Returns None before the first pass, and if nothing is recorded.
    """
    accelerator = Accelerator(model)
    if not accelerator.records:
        return None
    shared = SharedPass(model, images, frozenset().union(*(call.entry.needs for call in calls)), layer)

    def whole(images: Tensor, chosen: Tensor | None = None) -> Recorded:
        trace = shared.run(images, model.predicted if chosen is None else lambda _: chosen)
        with torch.no_grad():
            maps = [call.entry.function(trace, **call.options) for call in calls]
            values = [values.detach().float().contiguous() for values in maps]
            return Recorded(trace.logits, trace.targets, values, dead_layers(calls, trace))

    request = _request(model, images, calls, targets, layer)
    try:
        recording: Recorded | None = accelerator.recorded(request, whole, images, targets)
        return recording
    except NotAPicture:  # the layer was a guess, or is named wrongly: capture() handles both
        return None


def replayed(
    model: Model, images: Tensor, calls: Sequence[MethodCall], *, ids: tuple[str, ...], targets: Any,
    layer: Any, batch_size: int | None, progress: Callable[[int], object] | None, seed: int = 0,
) -> tuple[dict[str, Maps], Tensor] | None:  # fmt: skip
    """What `shared_pass` returns, from its recording; None if there is none or the network changed."""
    size = size_of(images)
    most = batch_size or Accelerator(model).batch_size(size)
    if len(images) > most or not all(call.entry.trace_only for call in calls):
        return None
    request = _request(model, images, calls, targets, layer)
    recording: Recorded | None = Accelerator(model).replayed(request, images, targets)
    if recording is None:
        return None
    if progress:
        progress(len(images))
    maps = recording.maps(model, calls, size)
    return {of.method: replace(of, ids=ids) for of in maps}, recording.logits


def shared_pass(
    model: Model, images: Tensor, calls: Sequence[MethodCall], *, ids: tuple[str, ...],
    targets: Any = None, layer: str | Sequence[str] | None = None, seed: int = 0,
    batch_size: int | None = None, progress: Callable[[int], object] | None = None,
) -> tuple[dict[str, Maps], Tensor]:  # fmt: skip
    """The maps by method, and the logits "b k" of the same pass; arguments are taken as checked."""
    needs = frozenset().union(*(call.entry.needs for call in calls))
    image_size = size_of(images)
    if images.ndim == 5:
        for call in calls:
            check_volumes(call.entry)
    check_insides(model, calls)
    model, targets = bind_targets(model, images, targets)
    known = replayed(
        model, images, calls, ids=ids, targets=targets, layer=layer, batch_size=batch_size, progress=progress
    )
    if known is not None:
        return known
    queue = Queue(model, image_size, batch_size, progress)
    records = all(call.entry.trace_only for call in calls)
    if not isinstance(targets, int | Columns | None):
        targets = torch.as_tensor(targets)
    parts: list[tuple[list[Maps], Tensor]] = []

    def chosen(start: int, stop: int) -> Any:
        if isinstance(targets, Columns):
            return Columns(targets.numbers[start:stop])
        # A wrong number of targets is passed on whole, to be reported.
        each = isinstance(targets, Tensor) and targets.ndim == 1 and len(targets) == len(images)
        return targets[start:stop] if each else targets

    def work(start: int, stop: int) -> tuple[list[Maps], Tensor]:
        batch = images[start:stop].to(model.device)
        with span("shared pass"):
            recording = recorded(model, batch, calls, chosen(start, stop), layer) if records else None
        if recording is not None:
            return recording.maps(model, calls, image_size), recording.logits
        with span("shared pass"):
            trace = capture(model, batch, chosen(start, stop), needs, layer, queue, seed)
        trace = replace(trace, ids=ids[start:stop])
        each = zip(calls, dead_layers(calls, trace), strict=True)
        return [replace(call(trace), dead=dead) for call, dead in each], trace.logits

    with frozen_eval(model.module), checkpoints_in_a_sentence(model, images[:1]):
        # A queue of its own: perturbing methods inside shrink theirs without shortening this one's batches.
        kind = "gradients" if "input_gradient" in needs else "shared"
        Queue(model, image_size, batch_size, progress).each(len(images), work, parts.append, kind)
    joined = [Maps.concatenate(batches) for batches in zip(*(maps for maps, _ in parts), strict=True)]
    logits = torch.cat([logits for _, logits in parts])
    return {maps.method: replace(maps, ids=ids) for maps in joined}, logits
