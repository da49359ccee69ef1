"""explain(): check the input, run the shared pass once, hand the trace to every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.errors import InputError, ModelError
from heatproof.explain.providers.function import Methods, named
from heatproof.explain.recorded import Recorded, recorded, replayed
from heatproof.explain.sampling import Estimate
from heatproof.explain.segments import cut_ahead
from heatproof.models.capture import capture
from heatproof.models.function import is_function
from heatproof.models.heads import Columns
from heatproof.models.model import Model, as_model, check_pixels
from heatproof.models.queue import Queue
from heatproof.models.running import frozen_eval
from heatproof.models.targets import bind_targets
from heatproof.models.wrapped import checkpoints_in_a_sentence, is_quantised
from heatproof.registry import Explainer, check_options, check_volumes, explainers, parse_call, split_calls
from heatproof.show import ByName
from heatproof.timeline import span
from heatproof.types import Images, Maps, Signed, Targets, Trace, size_of

READ = {"activations", "gradients"}  # of the trace's layer


@dataclass(frozen=True)
class MethodCall:
    """One method as the user wrote it, with its options."""

    text: str
    entry: Explainer
    options: dict[str, Any]

    def __call__(self, trace: Trace) -> Maps:
        with span("method", self.text):
            result = self.entry.function(trace, **self.options)
        beside: dict[str, Any] = {}
        if isinstance(result, Signed):
            beside = {"signed_values": result.signed.detach().float().contiguous()}
        elif isinstance(result, Estimate):
            beside = {"error": result.error.float(), "passes": result.passes}
        values = result.values if isinstance(result, Signed | Estimate) else result
        if values.ndim != trace.images.ndim - 1 or len(values) != len(trace.images):
            wanted = "b h w" if trace.images.ndim == 4 else "b d h w"
            raise InputError(f"{self.entry.name} returned shape {tuple(values.shape)}, not {wanted!r}")
        return Maps(
            method=self.text,
            values=values.detach().float().contiguous(),
            image_size=trace.image_size,
            explained=trace.model.head.labels(trace.targets),
            **beside,
        )

    def dead(self, layers: Mapping[str | None, Tensor], trace: Trace) -> Tensor | None:
        """ "b" bool: images in which every layer that the method reads is dead."""
        needs = set(self.entry.needs)
        names = trace.scales if "scales" in needs else (trace.layer,) if needs & READ else ()
        known = [layers[name] for name in names if name in layers]
        return known[0] if len(known) == 1 else torch.stack(known).all(0) if known else None


def dead_layers(trace: Trace) -> dict[str | None, Tensor]:
    """By layer "b" bool: images in which each of its channels says the same at every place."""
    return {n: (one == _first_place(one)).flatten(1).all(1) for n, one in trace.activations.items()}


def _first_place(activation: Tensor) -> Tensor:
    """ "b c 1 1", or "b c 1 1 1" of a volume."""
    return activation[(slice(None), slice(None), *[slice(1)] * (activation.ndim - 2))]


def read_methods(methods: Methods, again: bool = False) -> list[MethodCall]:
    """Names, or names with options such as "lime(samples=200)", checked before any work starts.

    again: for what runs methods again, which maps that are stored cannot be.
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
    """Whether a method's maps are read from files, so that nothing can run it again."""
    return explainers.get(parse_call(method)[0]).precomputed


def begin_ahead(methods: Methods, model: Model, images: Tensor, seed: int = 0) -> None:
    """Begin what threads can do for these methods before the network has time: cut the pictures."""
    for call in read_methods(methods):
        cut_ahead(model, images, call.entry.options | call.options, seed)


def with_sufficient_repeats(methods: Methods) -> dict[str, str]:
    """By method as it is written: itself, with no more repetitions than the ranks of its pixels need.

    For what compares a method with itself, many times over. How many are enough was measured: see
    docs/results/passes.md.

    >>> with_sufficient_repeats(["gradcam", "smoothgrad(samples=10)"])
    {'gradcam': 'gradcam', 'smoothgrad(samples=10)': 'smoothgrad(samples=10)'}
    """
    found = {}
    for call in read_methods(methods, again=True):
        asked = {**call.entry.options, **call.options}
        less = {
            k: n
            for k, n in call.entry.sufficient_repeats.items()
            if isinstance(asked[k], int) and asked[k] > n
        }
        options = ", ".join(f"{k}={v!r}" for k, v in (call.options | less).items())
        found[call.text] = f"{call.entry.name}({options})" if less else call.text
    return found


def explain(
    model: Model | nn.Module,
    images: Images,
    methods: Methods = "gradcam",
    targets: Targets | None = None,
    layer: str | Sequence[str] | None = None,
    seed: int = 0,
    *,
    ids: Sequence[str] | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], object] | None = None,
    allow_nan: bool = False,
) -> dict[str, Maps]:
    """Maps of every method, from one shared pass.

    Args:
        model: what load_model gives, or a module.
        images: model-ready, "b c H W"; or pictures or files, which go through the model's preprocessing.
        methods: names, with options where wanted, such as "lime(samples=200)"; functions (model, images,
            targets) -> maps, in a list or as {name: function}. See docs/bring-your-own.md.
        targets: the class to explain, one or one per image; the prediction where None. (class, mask) or
            (class, box) of a segmentation or detection; or a function of the output that gives one number
            per image. See docs/heads.md.
        layer: where CAMs look, by name (several for multi-scale methods); found by itself where None.
        seed: of methods that draw.
        ids: names of the images; their numbers where None.
        batch_size: images per pass; chosen by itself, and halved when memory runs out.
        progress: called with the number of passed inputs, for a progress bar.
        allow_nan: return maps also of images for which the network's output is NaN or infinite, instead of
            raising InputError.

    Returns:
        Maps by method, as it was written.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
    ...                           torch.nn.Flatten(), torch.nn.Linear(4, 2))
    >>> maps = explain(net, torch.rand(2, 3, 8, 8), ["gradcam", "layercam"])
    >>> maps["gradcam"].values.shape, maps["gradcam"].upsample().shape
    (torch.Size([2, 6, 6]), torch.Size([2, 8, 8]))
    """
    model, calls = as_model(model), read_methods(methods)
    on_gpu = isinstance(images, Tensor) and images.is_cuda
    shown = model.check_images(images, finite=not on_gpu)
    if seed < 0:
        raise InputError(f"seed must be 0 or more, got {seed}")
    if ids is not None and len(ids) != len(shown):
        raise InputError(f"ids has {len(ids)} entries but there are {len(shown)} images; they must match")
    names = tuple(ids) if ids is not None else tuple(map(str, range(len(shown))))
    model, targets = bind_targets(model, shown, targets)
    maps, logits = shared_pass(
        model,
        shown,
        calls,
        targets=targets,
        layer=layer,
        seed=seed,
        ids=names,
        batch_size=batch_size,
        progress=progress,
    )
    if on_gpu:  # asked at the end: until then the GPU need not be waited for
        check_pixels(shown)
    if not allow_nan and (lost := model.head.unanswered(logits)).any():
        images_lost = ", ".join(names[i] for i in lost.nonzero().flatten().tolist()[:8])
        raise InputError(
            f"the output of {model.name} is NaN or infinite for image {images_lost} ({int(lost.sum())} of "
            f"{len(shown)}), so it cannot be explained; leave it out, or set allow_nan=True for NaN maps"
        )
    return ByName(maps)


def check_insides(model: Model, calls: Sequence[MethodCall]) -> None:
    """Refuse methods that look inside a network which is only a function, or quantised."""
    closed, inside = is_function(model.module), [call.text for call in calls if not call.entry.forward_only]
    if model.facts.quantised is None:
        model.facts.quantised = is_quantised(model.module)
    if inside and (closed or model.facts.quantised):
        known = ", ".join(entry.name for entry in explainers if entry.forward_only)
        said = f"is a function, without layers or gradients that {inside[0]} could read; use {known}"
        if not closed:
            said = f"is quantised, and no gradient that {inside[0]} could read goes through it; "
            said += f"give the network it was made from, or use {known}"
        raise ModelError(f"{model.name} {said}")


def shared_pass(
    model: Model,
    images: Tensor,
    calls: Sequence[MethodCall],
    *,
    ids: tuple[str, ...],
    targets: Targets | None = None,
    layer: str | Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> tuple[dict[str, Maps], Tensor]:
    """What explain() gives, and the logits "b k" of the same pass; arguments are taken as checked."""
    needs = frozenset().union(*(call.entry.needs for call in calls))
    image_size = size_of(images)
    if images.ndim == 5:
        for call in calls:
            check_volumes(call.entry)
    check_insides(model, calls)
    model, targets = bind_targets(model, images, targets)
    queue = Queue(model, image_size, batch_size, progress)
    if len(images) <= queue.batch_size and (again := replayed(model, images, calls, targets, layer)):
        if progress:
            progress(len(images))
        made = _as_maps(calls, again, model, image_size)
        return {c.text: replace(one, ids=ids) for c, one in zip(calls, made, strict=True)}, again.logits
    chosen = _spread(targets, len(images))
    parts: list[tuple[list[Maps], Tensor]] = []

    def dead_of(trace: Trace) -> list[Tensor | None]:
        dead = dead_layers(trace)
        return [call.dead(dead, trace) for call in calls]

    def work(start: int, stop: int) -> tuple[list[Maps], Tensor]:
        batch = images[start:stop].to(model.device)
        with span("shared pass"):
            found = recorded(model, batch, calls, chosen(start, stop), layer, dead_of)
        if found is not None:
            return _as_maps(calls, found, model, image_size), found.logits
        with span("shared pass"):
            trace = capture(model, batch, chosen(start, stop), needs, layer, queue, seed)
        trace = replace(trace, ids=ids[start:stop])
        each = zip(calls, dead_of(trace), strict=True)
        return [replace(call(trace), dead=dead) for call, dead in each], trace.logits

    with frozen_eval(model.module), checkpoints_in_a_sentence(model, images[:1]):
        # A queue of its own: perturbing methods inside shrink theirs without shortening this one's batches.
        Queue(model, image_size, batch_size, progress).each(len(images), work, parts.append, "shared")
    lots = zip(*(maps for maps, _ in parts), strict=True)
    maps = {c.text: replace(Maps.concatenate(lot), ids=ids) for c, lot in zip(calls, lots, strict=True)}
    return maps, torch.cat([logits for _, logits in parts])


def _as_maps(
    calls: Sequence[MethodCall], found: Recorded, model: Model, image_size: tuple[int, ...]
) -> list[Maps]:
    each, explained = zip(calls, found.values, found.dead, strict=True), model.head.labels(found.targets)
    return [Maps(call.text, v, image_size, explained, dead=dead) for call, v, dead in each]


def _spread(targets: Any, count: int) -> Callable[[int, int], Any]:
    """Targets of a slice of the batch; a single class goes to all, a wrong count is reported whole."""
    if isinstance(targets, Columns):
        return lambda start, stop: Columns(targets.numbers[start:stop])
    if targets is None or isinstance(targets, int):
        return lambda start, stop: targets
    tensor = torch.as_tensor(targets)
    if tensor.ndim == 1 and len(tensor) == count:
        return lambda start, stop: tensor[start:stop]
    return lambda start, stop: targets
