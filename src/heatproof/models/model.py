"""Model: a network with its preprocessing, class names and head; and the queue for many perturbed inputs.

A job of the queue is one (image, variant) pair. Jobs of all images are numbered through and run in full
batches; the variants of a batch are built on the device when their turn comes, so memory does not grow with
their number. The Model's accelerator (accel/) chooses the batch size and how passes run.

A target that is a class number needs nothing. A function becomes the head of the network. For segmentation
and detection one pass over the unchanged images finds the region of the class, or the box, and a copy of the
Model stores it (`bind_targets`), so that perturbed images are scored by the same region or box.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from PIL import Image
from torch import Tensor, nn

from heatproof.errors import InputError, ModelError, TargetError
from heatproof.images.kinds import open_seen
from heatproof.images.preprocess import Preprocess
from heatproof.models import running
from heatproof.models.accel import KEEPING, AccelerationState, Accelerator, in_parts
from heatproof.models.dense_heads import Dense, as_place, check_inputs, named_head, read_first
from heatproof.models.heads import Columns, Function, Head, LastStep, Undetermined, vectors_of
from heatproof.models.running import ModuleState, at_least_float, frozen_eval, interrupts
from heatproof.timeline import span
from heatproof.types import ArrayLike, Images, Picture, size_of

PICTURE = (str, PathLike, Image.Image)
CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
COPIED_PER_PIXEL = 200  # measured with 16 networks of torchvision
Result = TypeVar("Result")


@dataclass
class ModelFacts:
    """Facts about a network that passes have determined, so that none is determined twice."""

    determined: dict[str, Any] = field(default_factory=dict)  # head, layer and scales of a Model, by passes
    writes_input: bool | None = None  # whether its forward changes its input; None before the first pass
    columns: int | None = None  # number of columns of its logits
    scales: tuple[str, ...] | None = None  # layers of multi-scale CAMs by their names; () where none fit
    activated_layer: str | None = None  # the default layer behind its activation
    coarsest_layer: str | None = None  # of a segmentation network; "" if there is none
    layer_runs: dict[str, int] = field(default_factory=dict)  # how often the default layer runs in a pass
    part_runs: dict[str, int] | None = None  # how often each module runs in a pass
    quantised: bool | None = None
    copied_weights: int | None = None  # weights that a channels-last pass copies on a CPU
    versions: list[Any] | None = None  # of the weights of a plain module, for which the rest is valid
    keeps_twin: bool = False  # whether the weights do not change, so that the random twin can be cached
    twin: Any = None  # a RandomTwin
    fits: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)  # inputs that fit in memory
    acceleration: AccelerationState = field(default_factory=AccelerationState)


@dataclass(eq=False)
class Model:
    """A network with its preprocessing, class names, head and layers. The module is not changed.

    Args:
        module: the network.
        name: its name in rows.
        preprocess: the preprocessing of images.
        classes: their names.
        layer, scales: the layers of CAMs and multi-scale CAMs; determined automatically by default.
        call: how images enter the module, by default module(images).
        precision: "fp32", "tf32" or "bf16" (see running.py); by default as the network and torch are set.
        inputs_per_pass: for methods and metrics that need many, at the size that `preprocess` makes; 8 of
            224 pixels on a CPU and 256 on a GPU by default. On a GPU, a quarter for gradients at the input.
        accelerate: whether passes may run faster than module by module (see accel/).
        head: what its output is: a head such as Multilabel(thresholds=...), or the name of one (heads.py).
            By default the first pass determines it where that is safe; until then it is `Undetermined`.

    Example:
        >>> import torch, heatproof as hp
        >>> model = hp.Model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2)))
        >>> model.logits(torch.rand(5, 3, 4, 4)).shape
        torch.Size([5, 2])
    """

    module: nn.Module
    name: str = ""
    preprocess: Preprocess = field(default_factory=Preprocess)
    classes: tuple[str, ...] | None = None
    layer: str | None = None
    scales: tuple[str, ...] | None = None
    call: Callable[[Tensor], object] | None = None
    precision: str | None = None
    inputs_per_pass: int | None = None
    accelerate: bool = True
    head: Head = field(default_factory=Undetermined)
    facts: ModelFacts = field(default_factory=ModelFacts, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise InputError(f"a model must be an nn.Module, got {type(self.module).__name__}")
        running.check_precision(self.precision)
        if self.inputs_per_pass is not None and self.inputs_per_pass < 1:
            raise InputError(f"inputs_per_pass must be at least 1, got {self.inputs_per_pass}")
        self.module = running.unwrapped(self.module)
        self.name = self.name or type(self.module).__name__
        given: object = self.head
        if isinstance(given, str):
            self.head = named_head(given)
        elif given is None or self.head.by_itself:  # determined by the first pass of the network this copies
            self.head = Undetermined()
        running.refuse_wrapped(self.module, self.name)

    @property
    def device(self) -> torch.device:
        return self._any_tensor().device

    @property
    def dtype(self) -> torch.dtype:
        tensor = self._any_tensor()
        return tensor.dtype if tensor.is_floating_point() else torch.float32

    def _any_tensor(self) -> Tensor:
        # Several times as fast as module.parameters(), and called often.
        for kind in ("_parameters", "_buffers"):
            for part in self.module.modules():
                tensor: Tensor | None
                for tensor in getattr(part, kind).values():
                    if tensor is not None:
                        return tensor
        return torch.empty(0, dtype=torch.float32, device="cpu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits "b k", float32, in the module's current mode; differentiable if gradients are enabled."""
        interrupts.check()
        if self.was_seen:
            # A network that writes to its input gets a copy.
            output = self.output(images.clone() if self.facts.writes_input else images)
            return self.head.logits(at_least_float(self.head.table(output, len(images))))
        if self.call is None:
            check_inputs(self.module)
        # The first pass also determines the head, and whether the network modifies its input in place: the
        # version counter of a clone shows a write, and the caller's images stay intact.
        with LastStep() as last:
            given = images.clone()
            before = None if given.is_inference() else given._version
            output = self.output(given)
        head, table = read_first(self.head, self.module, output, len(images), last)
        # NaN or infinite outputs do not identify the head: the next pass determines it again.
        if torch.isfinite(table).all():
            if isinstance(self.head, Undetermined):
                self.determine(head=head)
            self.head, self.facts.writes_input = head, before is None or given._version != before
        return head.logits(at_least_float(table))

    def determine(self, **fields: Any) -> None:
        """Set fields that a pass determined, also of later Models of the same plain module."""
        vars(self).update(fields)
        self.facts.determined |= fields

    @property
    def was_seen(self) -> bool:
        """Whether a first pass has determined what the output is."""
        return self.facts.writes_input is not None

    def output(self, images: Tensor) -> Any:
        """The network's own output for images that are `ready`."""
        with self.computing(), span("forward", inputs=len(images)):
            return (self.call or self.module)(images)

    def computing(self) -> AbstractContextManager[None]:
        """A context with the model's precision, for a backward pass; `forward` opens its own."""
        return running.computing(self.precision, self.device)

    @property
    def head_name(self) -> str | None:
        """Name of the head, None before the first pass where it is not given."""
        return None if isinstance(self.head, Undetermined) else self.head.name

    @property
    def head_meaning(self) -> str:
        """The head in words, to report what was assumed."""
        return self.head.meaning if self.was_seen else "not known before its first pass"

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Tensor "b": the explained scalar of each image."""
        return self.head.scores(logits, targets)

    def measured(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Tensor "b": the target's probability, or its value where the head has no probability."""
        return self.head.measured(logits, targets)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Tensor "b k"; raises InputError if the head has no probabilities."""
        return self.head.probabilities(logits)

    def predicted(self, logits: Tensor) -> Tensor:
        """Tensor "b": the target that is explained by default."""
        return self.head.predicted(logits)

    def same(self, before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
        """Bools "b": whether two tables of logits are the same prediction; targets: what is explained."""
        return self.head.same(before, after, targets)

    @torch.no_grad()
    def embeddings(self, images: Tensor) -> Tensor:
        """Tensor "b d": the vectors of an encoder, references of embedding heads (see heads.py)."""
        with frozen_eval(self.module):
            return at_least_float(vectors_of(self.output(self.ready(images)), len(images)))

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Logits "b k" in evaluation mode; modes and flags of the module are restored."""
        with frozen_eval(self.module):
            return self._logits(images)

    def _logits(self, images: Tensor) -> Tensor:
        def work(start: int, stop: int) -> Tensor:
            return self.forward(self.ready(images[start:stop]))

        parts = [logits for logits, _ in in_parts(self.device, self.name, len(images), work)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def input_gradient(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient "b c h w" of each target's logit and the "b k" logits; one forward, one backward."""
        # Callers may be in inference mode or no_grad; tensors made there could not carry a gradient.
        with torch.inference_mode(False), torch.enable_grad():
            inputs = self.ready(images).detach().clone().requires_grad_()
            logits = self.forward(inputs)
            with self.computing(), span("backward"):
                (gradient,) = torch.autograd.grad(self.scores(logits, targets).sum(), inputs)
        return at_least_float(gradient), logits.detach()

    @torch.no_grad()
    def check_repeatable(self, images: Tensor) -> None:
        """Raise InputError if two passes differ by 0.1 % of the largest output, 5 % in half precision."""
        # Around both passes: each exit restores the random state, which would hide the difference.
        with frozen_eval(self.module):
            first, second = (self._logits(images) for _ in range(2))
        half = self.precision == "bf16" or self.dtype in (torch.float16, torch.bfloat16)
        tolerance = (5e-2 if half else 1e-3) * float(first.nan_to_num(0, 0, 0).abs().max())
        same_shape = first.shape == second.shape
        gap = float((first - second).nan_to_num(0, 0, 0).abs().max()) if same_shape else math.inf
        if gap > tolerance:
            raise InputError(
                f"{self.name} is random: its outputs for the same image differ by {gap:.3g} from one pass to "
                "the next; switch off the dropout or noise that its forward applies in evaluation mode too"
            )

    def ready(self, images: Tensor) -> Tensor:
        """Images on the model's device, in its type, in the memory format that is fastest."""
        form = torch.contiguous_format if self.prefers_planes(images) else running.memory_format(images)
        return images.to(self.device, self.dtype).contiguous(memory_format=form)

    def prefers_planes(self, images: Tensor) -> bool:
        """Whether a pass of one image on a CPU is faster in contiguous than in channels-last format.

        Channels-last convolutions copy their weights at every call, which may take longer than they save.
        Only without a precision: the rows of a run keep their last bits.
        """
        if len(images) != 1 or images.ndim != 4 or self.precision is not None or self.device.type != "cpu":
            return False
        if self.facts.copied_weights is None:
            self.facts.copied_weights = _copied_weights(self.module)
        return self.facts.copied_weights > COPIED_PER_PIXEL * images[0, 0].numel()

    def check_images(self, images: Images, finite: bool = True) -> Tensor:
        """Check images, and preprocess files and Pillow images; finite: pixels too, which waits for a GPU."""
        if self.device.type == "meta":
            raise ModelError(
                f"{self.name} is on the meta device, without weights; load them and move it first"
            )
        if isinstance(images, PICTURE):
            images = [images]
        if isinstance(images, (list, tuple)) and images and isinstance(images[0], PICTURE):
            images = self.see(images)
        elif not isinstance(images, Tensor):
            images = torch.as_tensor(images)
        if images.ndim not in (4, 5):
            hint = "; add a batch axis with images[None]" if images.ndim == 3 else ""
            raise InputError(
                f"images must be 'b c h w' or 'b c d h w'; got shape {tuple(images.shape)}{hint}"
            )
        if 0 in images.shape:
            raise InputError(f"the batch is empty: images have shape {tuple(images.shape)}")
        if not images.is_floating_point():
            raise InputError(f"images must be normalised floats, got {images.dtype}; use model.preprocess")
        if finite:
            check_pixels(images)
        checked: Tensor = images.detach()
        return checked

    def see(self, pictures: Sequence[Picture]) -> Tensor:
        """Preprocess image files or Pillow images."""
        volume = len(self.preprocess.size) > 2
        opened = [p if isinstance(p, Image.Image) else open_seen(Path(p), volume=volume) for p in pictures]
        if any(isinstance(image, Image.Image) for image in opened):
            self.check_channels()
        return torch.stack([self.preprocess(image) for image in opened])

    def check_channels(self) -> None:
        if self.preprocess.channels not in (1, 3):
            raise InputError(
                f"{self.name} takes {self.preprocess.channels} channels, images have 1 or 3; "
                "give hp.explain tensors, or wrap the network to make its channels from an image's"
            )

    def check_targets(self, targets: ArrayLike | Columns | None, logits: Tensor) -> Tensor:
        """Columns "b" to explain; by default the prediction."""
        count, classes = len(logits), self.head.targets(logits.shape[1])
        if targets is None:
            return self.predicted(logits)
        if isinstance(targets, Columns):
            if int(targets.numbers.max()) >= logits.shape[1]:
                least = int(self.head.labels(targets.numbers.max()))
                raise TargetError(f"target {least} is out of range; the network has fewer classes")
            return targets.numbers.to(logits.device)
        chosen = torch.as_tensor(targets)  # checked on its own device, without synchronising with a GPU
        if chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise TargetError(f"targets must be class numbers, got {chosen.dtype}")
        chosen = chosen if chosen.ndim else chosen.expand(count)
        if chosen.shape != (count,):
            raise TargetError(f"{count} images need one target or {count}; got shape {tuple(chosen.shape)}")
        if len(wrong := chosen[(chosen < 0) | (chosen >= classes)]):
            raise TargetError(
                f"target {int(wrong[0])} is out of range; the model has classes 0 to {classes - 1}"
            )
        return chosen.to(logits.device, torch.long, non_blocking=True)


def check_pixels(images: Tensor) -> None:
    """Raise InputError if pixels are not finite."""
    # A single sum detects any bad pixel; the image is searched only if there is one.
    if not torch.isfinite(images.sum(dtype=running.max_precision(images))):
        bad = (~torch.isfinite(images).flatten(1).all(1)).nonzero().flatten().tolist()
        if bad:
            raise InputError(f"images contain NaN or infinite pixels (image {', '.join(map(str, bad[:8]))})")


class _Analysed(NamedTuple):
    """A Model of a plain module, without the module, and the state that it is valid for."""

    model: Model
    state: ModuleState


_analysed: WeakKeyDictionary[nn.Module, _Analysed] = WeakKeyDictionary()
_analysing = threading.RLock()


def as_model(model: Model | nn.Module) -> Model:
    """Wrap a module in a Model with load_model; a Model is returned unchanged.

    What passes determine about a module is cached until it changes (ModuleState) or is freed. If only its
    weights change, its layers stay known and its head is determined again.
    """
    if isinstance(model, Model):
        return model
    from heatproof.models.load import load_model  # here, since load.py imports this file

    if not isinstance(model, nn.Module):
        return load_model(model)
    with _analysing:
        known = _analysed.get(model)
        versions = known.state.versions(model) if known else None
        if known is None or versions is None:
            loaded = load_model(model)
            try:
                state = ModuleState(model, known.state if known else None)
            except RuntimeError:  # tensors without an address, such as sparse ones
                return loaded
            if loaded.module not in set(model.modules()):  # made by load_model, as for a Keras model
                return loaded
            versions = state.versions(model)
            if known is None or state.mark != known.state.mark:
                del vars(loaded)["module"]  # a reference to it would keep it from being freed
                loaded.facts.versions = versions
                known = _Analysed(loaded, state)
            _analysed[model] = known = known._replace(state=state)
        facts = known.model.facts
        if versions != facts.versions:
            template = copy.copy(known.model)
            template.facts = replace(
                facts, versions=versions, writes_input=None, columns=None,
                acceleration=replace(facts.acceleration, graphs=None),
                determined={name: facts.determined[name] for name in facts.determined if name != "head"},
            )  # fmt: skip
            _analysed[model] = known = _Analysed(template, known.state)
    return _completed(known.model, model)


def recorded_model(module: nn.Module) -> Model | None:
    """The last Model of a plain module if passes of it are recorded, without checks for changes."""
    known = _analysed.get(module)
    graphs = known and known.model.facts.acceleration.graphs
    return _completed(known.model, module) if known and graphs else None


def _completed(model: Model, module: nn.Module) -> Model:
    completed = copy.copy(model)
    vars(completed).update(completed.facts.determined, module=running.unwrapped(module))
    return completed


def _copied_weights(module: nn.Module) -> int:
    """Number of weights in kernels larger than 1x1; 0 with several poolings, as in VGG: large layers."""
    parts = list(module.modules())
    if sum(isinstance(part, nn.MaxPool2d) for part in parts) > 1:
        return 0
    weights = (part.weight for part in parts if isinstance(part, nn.Conv2d))
    return sum(weight.numel() for weight in weights if weight[0, 0].numel() > 1)


def first_convolution(module: nn.Module) -> nn.Conv2d | nn.Conv3d | None:
    return next((part for part in module.modules() if isinstance(part, CONVOLUTIONS)), None)


class Queue:
    """Run numbered jobs through a model in batches that fit in memory.

    batch_size: of every pass; default: the Model's own, smaller for passes that keep activations.
    """

    def __init__(
        self,
        model: Model,
        image_size: tuple[int, ...],
        batch_size: int | None = None,
        progress: Callable[[int], Any] | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {batch_size}")
        self.model = model
        # Batch sizes at which memory ran out, shared by all queues of the model, so that none fails again.
        self.fits = model.facts.fits
        self.image_size, self.progress = image_size, progress
        self.batch_size = batch_size or Accelerator(model).batch_size(image_size)
        self.keeping = KEEPING if batch_size is None and model.device.type == "cuda" else 1

    def each(
        self, count: int, work: Callable[[int, int], Result], done: Callable[[Result], Any], kind: str = ""
    ) -> None:
        """Call done(work(start, stop)) for all jobs; smaller batches are made when memory runs out.

        kind: of pass, for the size that fits in memory; "gradients" keeps the activations of all layers.
        """

        def shrunk(size: int) -> None:
            self.fits[kind, self.image_size] = size

        network = self.model
        parts = in_parts(
            network.device, network.name, count, work, lambda left: self._next(left, kind), shrunk
        )
        for result, inputs in parts:
            done(result)
            if self.progress:
                self.progress(inputs)

    def joined(self, count: int, work: Callable[[int, int], Tensor], kind: str = "") -> Tensor:
        """The results of work(start, stop) for all jobs, concatenated."""
        results: list[Tensor] = []
        self.each(count, work, results.append, kind)
        return torch.cat(results)

    def _most(self, kind: str) -> int:
        size = max(1, self.batch_size // self.keeping) if kind == "gradients" else self.batch_size
        return min(size, self.fits.get((kind, self.image_size), size))

    def _next(self, left: int, kind: str) -> int:
        """Size of the next batch. The last two share the remaining inputs: small batches are slow."""
        full = self._most(kind)
        splits = full < left < 2 * full and self.model.device.type != "cuda"
        return (left + 1) // 2 if splits else min(left, full)

    def predict(
        self, count: int, make: Callable[[int, int], Tensor], read: Callable[[Tensor, int, int], Tensor]
    ) -> Tensor:
        """Forward passes, inside `frozen_eval(...)`. make(start, stop) builds images, read reads logits."""
        job: Accelerator | None = None

        # no_grad, not inference_mode: networks that cache tensors in evaluation mode could not train with
        # a cached inference tensor afterwards, and the speed is the same.
        @torch.no_grad()
        def work(start: int, stop: int) -> Tensor:
            nonlocal job
            images = self.model.ready(make(start, stop))
            job = job or Accelerator(self.model).job(images, count)
            return read(job.logits(images, self._most("forward")), start, stop)

        return self.joined(count, work, "forward")

    def input_gradients(
        self,
        count: int,
        make: Callable[[int, int], tuple[Tensor, Tensor]],
        done: Callable[[Tensor, Tensor, int, int], Any],
    ) -> None:
        """Gradients of the target's logit with respect to the input, inside `frozen_eval(...)`.

        make(start, stop) returns images and targets; done(gradients, logits, start, stop) gets the results.
        """
        job: Accelerator | None = None

        def work(start: int, stop: int) -> tuple[Tensor, Tensor, int, int]:
            nonlocal job
            images, targets = make(start, stop)
            images = self.model.ready(images)
            job = job or Accelerator(self.model).job(images, count)
            return *job.input_gradients(images, targets, self._most("gradients")), start, stop

        self.each(count, work, lambda result: done(*result), "gradients")


def all_logits(
    model: Model, images: Tensor, batch_size: int | None = None, progress: Callable[[int], Any] | None = None
) -> Tensor:
    """Logits "b k" in evaluation mode, in batches; modes and flags of the module are restored."""
    queue = Queue(model, size_of(images), batch_size, progress)
    with frozen_eval(model.module):
        return queue.predict(len(images), lambda start, stop: images[start:stop], lambda logits, *_: logits)


def bind_targets(model: Model, images: Tensor, targets: Any) -> tuple[Model, Any]:
    """The Model whose columns are the targets, and the targets in a form that its check_targets accepts.

    images: checked, "b c H W", not perturbed; in the order of the targets. A Model that is already bound to
    as many images is returned unchanged.
    """
    if isinstance(targets, Columns):
        return model, targets
    if callable(targets) and not isinstance(targets, Tensor):
        return with_head(model, Function(function=targets)), None
    classes, where = as_place(targets)
    if isinstance(model.head, Undetermined) and (where is not None or _needs_a_pass(model.module)):
        model.logits(images[:1])
    head = model.head
    if not isinstance(head, Dense):
        if where is not None:
            raise TargetError(
                f"(class, region) is for segmentation and detection; {model.name} has the head {head.name!r}"
            )
        return model, targets
    if where is not None or head.bound != len(images):
        model = unbind_targets(model)
        seen: list[Any] = []

        @torch.no_grad()
        def work(start: int, stop: int) -> list[Any]:
            inputs = model.ready(images[start:stop])
            if not model.was_seen:
                model.forward(inputs[:1])
            assert isinstance(model.head, Dense)
            return model.head.look(model.output(inputs.clone()), stop - start)

        with frozen_eval(model.module):
            Queue(model, size_of(images)).each(len(images), work, seen.extend, "forward")
        assert isinstance(model.head, Dense)
        head = model.head.bind(seen, targets)
        model = with_head(model, head)
    return model, head.columns(classes, model.device)


def unbind_targets(model: Model) -> Model:
    """The Model before it was bound to images."""
    head = model.head
    return with_head(model, head.free()) if isinstance(head, Dense) and head.bound else model


def with_head(model: Model, head: Head) -> Model:
    """The same network with another head."""
    other, known = replace(model, head=head), model.facts
    acceleration = replace(known.acceleration, graphs=None)
    other.facts = replace(known, acceleration=acceleration, columns=None, twin=None, keeps_twin=False)
    return other


def _needs_a_pass(module: nn.Module) -> bool:
    """Whether a pass must determine the head first: it may be dense, or a regression by its configuration."""
    parts = list(module.modules())
    regresses = getattr(getattr(module, "config", None), "problem_type", None) == "regression"
    if regresses or any("anchor" in type(part).__name__.lower() for part in parts):
        return True
    if not any(isinstance(part, CONVOLUTIONS) for part in parts):
        return False
    owners = [part for part in parts if next(part.parameters(recurse=False), None) is not None]
    return isinstance(owners[-1], CONVOLUTIONS) or not any(isinstance(part, nn.Linear) for part in parts)
