"""Training data and the training loop: `fit` trains by a recipe, `fit_epochs` by any course of epochs.

Data are 8-bit images of the network's size with labels and optional masks of parts, all in memory, normalised
batch by batch, on the device, by the model's own Preprocess: a quarter of the memory of floats, and no
decoding after the first epoch.

Each epoch draws its random numbers (order of the images, flips, dropout) from the seed and its own number,
so a training that was killed and started again ends with the same weights, bit for bit on a CPU. The network
is trained in place; its modes and requires_grad flags, and the caller's random state, are restored.

    epoch05.safetensors   weights and buffers after epoch 5, for load_model(..., checkpoint=...)
    history.json          one row per epoch
    recipe.json           settings
    state.pt              weights, optimiser and history after the last epoch, for weights_only=True

Logged to explain collapses, which the C-Score paper could not (elangovan2026cscore, section 6): the learning
rate of each epoch, the deviation of the loss over its batches and, on request, mean, maximum and deviation of
the norm of each layer's gradients, sqrt(sum over its parameters of |dL/dw|^2) at a step, before clipping.

Volumes are "n c d h w", also in 8 bits: a window of the preprocessing keeps 256 levels of a scan.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from heatproof.disk import Content, write_whole
from heatproof.errors import CheckpointError, InputError, ModelError, StoreError, first_line
from heatproof.images.loader import Failure, batches
from heatproof.images.preprocess import Preprocess
from heatproof.images.source import Source
from heatproof.images.transforms import vary
from heatproof.metrics.classifier import accuracy, auc
from heatproof.metrics.kit import as_tensor, same_length
from heatproof.models.capture import tap
from heatproof.models.checkpoints import write_weights
from heatproof.models.model import Model, Queue
from heatproof.models.running import frozen_eval, restore_flags
from heatproof.show import eight_bit
from heatproof.train.networks import Parts, seeded, trained_parts
from heatproof.train.recipe import BALANCED, Epoch, GradientNorm, History, Phase, Recipe, TrainedBatch
from heatproof.types import per_map

Place = str | PathLike[str] | None  # a training's folder; None: nothing is written
RESIDENT_SHARE = 0.5  # of a GPU's free memory that images may take during a training
STATE, HISTORY, RECIPE = "state.pt", "history.json", "recipe.json"


@dataclass(frozen=True, eq=False)
class Data:
    """Images "n c h w" (volumes "n c d h w") uint8, their classes "n", and masks by part, "n h w" bool."""

    images: Tensor
    labels: Tensor
    masks: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        images, labels = as_tensor(self.images), as_tensor(self.labels)
        if images.ndim not in (4, 5) or images.dtype != torch.uint8:
            got = f"got {images.dtype} of shape {tuple(images.shape)}"
            raise InputError(f"training images are 'n c h w' in 8 bits (torch.uint8); {got}")
        if 0 in images.shape:
            raise InputError(f"there is nothing to train on: images have shape {tuple(images.shape)}")
        same_length(labels=labels, images=images)
        if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
            got = f"got {labels.dtype} of shape {tuple(labels.shape)}"
            raise InputError(f"labels are one class number per image; {got}")
        if int(labels.min()) < 0:
            raise InputError(f"an image has the label {int(labels.min())}; class numbers start at 0")
        wanted = (len(images), *images.shape[2:])
        masks = {part: as_tensor(mask) for part, mask in (self.masks or {}).items()}
        for part, mask in masks.items():
            if tuple(mask.shape) != wanted:
                raise InputError(f"the masks of {part!r} must be {wanted}; got shape {tuple(mask.shape)}")
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels.long())
        object.__setattr__(self, "masks", {part: mask != 0 for part, mask in masks.items()})

    def __len__(self) -> int:
        return len(self.images)

    def take(self, which: Any) -> Data:
        """A subset, with its labels and masks."""
        masks = {part: mask[which] for part, mask in self.masks.items()}
        return Data(self.images[which], self.labels[which], masks)

    def near(self, device: torch.device) -> Data:
        """The data on the device if it fits there; else unchanged, to be moved batch by batch."""
        if device.type == "cuda":
            needed = self.images.numel() + sum(mask.numel() for mask in self.masks.values())
            if self.images.device != device and needed > RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
                return self
        masks = {part: mask.to(device) for part, mask in self.masks.items()}
        return Data(self.images.to(device), self.labels.to(device), masks)

    def digest(self) -> str:
        """A short hash of the content, by which a resumed training checks that its data is the same."""
        content = hashlib.sha256()
        for name, tensor in {"images": self.images, "labels": self.labels, **self.masks}.items():
            content.update(f"{name}{tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().numpy().data)
        return content.hexdigest()[:16]


def read_data(
    source: Source, preprocess: Preprocess, indices: Sequence[int] | None = None, batch_size: int = 64
) -> tuple[Data, list[Failure]]:
    """Read and preprocess a source's images and masks; also returns the images that failed."""
    if not source.labelled:
        raise InputError("these images have no labels, and a classifier cannot be trained without")
    images, labels, failures = [], [], []
    masks: dict[str, list[Tensor]] = {part: [] for part in source.parts}
    for batch, failed in batches(source, preprocess, batch_size, indices):
        # The loader normalises; undone, the 8 bits come back exactly.
        images.append(eight_bit(preprocess.restore(batch.images)))
        assert batch.labels is not None
        labels.append(batch.labels)
        for part, read in masks.items():
            assert batch.truth is not None
            read.append(batch.truth.masks[part])
        failures += failed
    if not sum(map(len, images)):
        why = f"{failures[0].id}: {failures[0].reason}" if failures else "no image was chosen"
        raise InputError(f"there is nothing to train on: {why}")
    parts = {part: torch.cat(read) for part, read in masks.items()}
    return Data(torch.cat(images), torch.cat(labels), parts), failures


def stratified_split(labels: Any, fraction: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices of the training and of the held-out images, each class divided in the same proportion.

    Of a class with n images round(n * fraction) are held out, at least 1 and never all. Both lists ascend.

    >>> train, held_out = stratified_split([0] * 10 + [1] * 5, 0.2)
    >>> len(train), len(held_out)
    (12, 3)
    """
    classes = as_tensor(labels)
    if not 0 < fraction < 1:
        raise InputError(f"the held-out fraction must lie between 0 and 1; got {fraction}")
    if classes.ndim != 1 or len(classes) == 0:
        raise InputError(f"labels are one class number per image; got shape {tuple(classes.shape)}")
    generator = torch.Generator().manual_seed(seed)
    held_out = []
    for label in classes.unique().tolist():
        members = (classes == label).nonzero().flatten().cpu()
        if len(members) < 2:
            raise InputError(f"class {label} has a single image; at least 2 are needed to hold one out")
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        held_out.append(members[torch.randperm(len(members), generator=generator)[:count]])
    chosen = torch.zeros(len(classes), dtype=torch.bool)
    chosen[torch.cat(held_out)] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()


class TrainProgress(NamedTuple):
    """State of a training after a batch, and with the epoch's result after validation."""

    epoch: int  # from 1 on
    epochs: int
    batch: int
    batches: int
    result: Epoch | None = None


ProgressCallback = Callable[[TrainProgress], object]


class TrainInputs(NamedTuple):
    """A batch on the model's device."""

    images: Tensor  # "b c h w", model-ready
    labels: Tensor  # "b"
    masks: dict[str, Tensor]  # by part, each "b h w"


class EpochPlan(NamedTuple):
    """Settings of one epoch. batches: called inside the epoch's random state; each item loads one batch."""

    phase: Phase
    name: str  # in the history
    rate: float
    seed: int
    parts: Parts
    batches: Callable[[], Sequence[Callable[[], TrainInputs]]]
    restart: bool = False  # begin with a new optimiser
    weights: Tensor | None = None  # "k", of the classes
    layers: tuple[str, ...] = ()  # whose outputs the penalty needs
    amp: bool = False


class Course(Protocol):
    """A training plan for the loop; `fingerprint` must be equal for a training to be resumed."""

    @property
    def epochs(self) -> int: ...  # at most

    @property
    def fingerprint(self) -> dict[str, str]: ...  # by names in error messages

    def next_epoch(self, history: History) -> EpochPlan | None: ...  # None: the training is complete

    def validate(self) -> tuple[float, float]: ...  # accuracy and AUC of the network as it is


def fit(
    model: Model, train: Data, valid: Data, recipe: Recipe, out: Place = None, seed: int = 0,
    keep: Sequence[int] = (), progress: ProgressCallback | None = None, gradients: bool = False,
) -> History:  # fmt: skip
    """Train a network in place by a recipe, and return the results of every epoch.

    Args:
        out: folder for the weights of the epochs in `keep`, and for what a resumed training needs. If it
            holds the same training, that one is continued, or its result loaded if it is complete.
        gradients: log the norm of each layer's gradients.
    """
    course = RecipeCourse(model, train, valid, recipe, seed)
    if wrong := [epoch for epoch in keep if not 1 <= epoch <= recipe.epochs]:
        raise InputError(f"there is no epoch {wrong[0]} to keep; the recipe has epochs 1 to {recipe.epochs}")
    return fit_epochs(model, course, out, progress, keep, gradients, description=recipe.described())


def fit_epochs(
    model: Model, course: Course, out: Place = None, progress: ProgressCallback | None = None,
    keep: Sequence[int] = (), gradients: bool = False, description: str = "", keep_optimiser: bool = True,
) -> History:  # fmt: skip
    """Train a network in place, epoch by epoch, as a course plans it; arguments as for `fit`.

    description: written to recipe.json. keep_optimiser: store the optimiser's state of a complete training.
    """
    history, write = History(), None
    state: dict[str, Any] = {"state": {}}
    if out is not None:
        write = partial(save_state, Path(out), course.fingerprint, model.module)
        if saved := load_state(Path(out), course.fingerprint):
            history, state, weights = saved
            write_weights(model.module, weights, str(out))
    optimiser: torch.optim.Optimizer | None = None
    report = progress or (lambda state: None)
    with (
        restore_flags(model.module),
        closing(GradientLog(model.module)) if gradients else nullcontext() as log,
    ):
        while plan := course.next_epoch(history):
            start, epoch = time.perf_counter(), len(history) + 1
            parameters = plan.parts.apply(model.module)
            if optimiser is None or plan.restart:
                optimiser = make_optimiser(plan.phase, parameters)
                if not plan.restart and state["state"]:
                    optimiser.load_state_dict(state)
            for group in optimiser.param_groups:
                group["lr"] = plan.rate
            at = partial(TrainProgress, epoch, course.epochs)
            with seeded(plan.seed):
                losses = _epoch(model, plan, optimiser, at, report)
            numbers, sizes = (np.array(part, np.float64) for part in zip(*losses, strict=True))
            loss, steps = float(np.average(numbers, weights=sizes)), len(losses)
            if not math.isfinite(loss):
                where = f"in epoch {epoch} ({plan.name})"
                raise ModelError(f"the loss is not finite {where}; lower its lr or set clip")
            spread = math.sqrt(np.average((numbers - loss) ** 2, weights=sizes))
            scores = course.validate()
            seconds = round(time.perf_counter() - start, 3)
            norms = {} if log is None else log.take()
            result = Epoch(epoch, plan.name, loss, *scores, plan.rate, seconds, norms, spread)
            history = History((*history.epochs, result))
            if write:
                state = optimiser.state_dict()
                write(state, history, epoch in keep, description)
            report(at(steps, steps, result))
    if write and not keep_optimiser and state["state"]:
        write({**state, "state": {}}, history)
    return history


def _epoch(
    model: Model, plan: EpochPlan, optimiser: torch.optim.Optimizer, at: Callable[[int, int], TrainProgress],
    report: ProgressCallback,
) -> list[tuple[float, int]]:  # fmt: skip
    """Train on every batch once; return the mean loss and the number of images of each."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    losses, loads = [], plan.batches()
    for number, load in enumerate(loads, start=1):
        inputs = load()
        # A penalty differentiates gradients, which fused attention cannot.
        plain_attention = sdpa_kernel(SDPBackend.MATH) if plan.layers else nullcontext()
        with tap(model.module, plan.layers) as taken, _autocast(model, plan.amp), plain_attention:
            logits = model.forward(inputs.images)
        loss = cross_entropy(plan.phase, logits, inputs.labels, plan.weights)
        if plan.phase.penalty is not None:
            loss = loss + plan.phase.penalty(TrainedBatch(model, *inputs, logits, taken))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if plan.phase.clip is not None:
            nn.utils.clip_grad_norm_(parameters, plan.phase.clip)
        optimiser.step()
        losses.append((loss.detach(), len(inputs.labels)))
        report(at(number, len(loads)))
    optimiser.zero_grad(set_to_none=True)
    return [(float(loss), count) for loss, count in losses]


def make_optimiser(phase: Phase, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": phase.lr, "weight_decay": phase.weight_decay}
    if phase.optimiser == "sgd":
        return torch.optim.SGD(parameters, momentum=phase.momentum, **options)
    return (torch.optim.Adam if phase.optimiser == "adam" else torch.optim.AdamW)(parameters, **options)


def class_weights(phase: Phase, labels: Tensor, classes: int) -> Tensor | None:
    """Weights "k" of the classes. Balanced: n / (k n_c), so that every class weighs the same in total."""
    if phase.class_weights is None:
        return None
    if phase.class_weights == BALANCED:
        return len(labels) / (classes * torch.bincount(labels, minlength=classes).clamp(min=1).float())
    weights = torch.tensor([float(weight) for weight in phase.class_weights], device=labels.device)
    if len(weights) != classes or not (weights >= 0).all() or not weights.sum() > 0:
        raise InputError(f"class weights are {classes} numbers from 0 on, not all 0; got {weights.tolist()}")
    return weights


def cross_entropy(phase: Phase, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Mean over the batch, weighted if there are weights."""
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
    return nn.functional.cross_entropy(logits, labels, weights, label_smoothing=phase.label_smoothing)


class RecipeCourse:
    """A training by a recipe on images in memory; invalid settings raise before the first epoch."""

    def __init__(self, model: Model, train: Data, valid: Data, recipe: Recipe, seed: int) -> None:
        wanted = (model.preprocess.channels, *train.images.shape[2:])
        for name, data in (("training", train), ("validation", valid)):
            if tuple(data.images.shape[1:]) != wanted:
                actual, takes = ("x".join(map(str, shape)) for shape in (data.images.shape[1:], wanted))
                raise InputError(f"{name} images are {actual}; {model.name} is trained on {takes}")
            if len(data.labels.unique()) < 2:
                only = int(data.labels[0])
                raise InputError(
                    f"all {len(data)} {name} images are of class {only}; at least two are needed"
                )
        if recipe.transforms and train.images.ndim > 4:
            raise InputError("COSE's transforms are of images, and these are volumes; leave transforms out")
        image = model.preprocess.from_bytes(train.images[:1])
        classes = max(2, model.logits(image).shape[1])
        model.head.need_one_class("training")
        for name, data in (("training", train), ("validation", valid)):
            if (highest := int(data.labels.max())) >= classes:
                known = f"{model.name} has classes 0 to {classes - 1}; give it a new head"
                raise InputError(f"a {name} image has the label {highest}, but {known}")
        self.model, self.recipe, self.epochs, self.seed = model, recipe, recipe.epochs, seed
        self.plans = []
        for phase in recipe.phases:
            weights = class_weights(phase, train.labels, classes)
            layers = () if phase.penalty is None else phase.penalty.prepare(model, image, train)
            parts = trained_parts(model, image, phase.trainable)
            weights = None if weights is None else weights.to(model.device)
            plan = phase.name, phase.lr, 0, parts, self._batches, False, weights, layers, recipe.amp
            self.plans.append(EpochPlan(phase, *plan))
        self.fingerprint = {
            "a recipe": recipe.described(), "a seed": str(seed), "pictures": train.digest(),
            "starting weights": digest(model.module), "preprocessing": repr(model.preprocess),
        }  # fmt: skip
        self.train, self.valid = train.near(model.device), valid.near(model.device)

    def next_epoch(self, history: History) -> EpochPlan | None:
        epoch = len(history) + 1
        if epoch > self.epochs:
            return None
        number, own = self.recipe.at(epoch)
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()[:7])
        plan = self.plans[number]
        return plan._replace(rate=plan.phase.rate(own), seed=seed, restart=own == 0)

    def validate(self) -> tuple[float, float]:
        return validate(self.model, self.valid, self.recipe.amp)

    def _batches(self) -> list[Callable[[], TrainInputs]]:
        count = len(self.train)
        sizes = _sizes(count, self.recipe.batch_size)
        # On the CPU, whatever the device: the order does not depend on it.
        order = torch.randperm(count).split(sizes)
        mirrored = (torch.rand(count) < 0.5).split(sizes)
        return [partial(self._load, *both) for both in zip(order, mirrored, strict=True)]

    def _load(self, chosen: Tensor, mirrored: Tensor) -> TrainInputs:
        data, device = self.train, self.model.device
        chosen = chosen.to(data.images.device)
        images, labels = (t[chosen].to(device, non_blocking=True) for t in (data.images, data.labels))
        masks = {part: mask[chosen].to(device, non_blocking=True) for part, mask in data.masks.items()}
        if self.recipe.flip:
            flip = mirrored.to(device)
            images = torch.where(per_map(flip, images), images.flip(-1), images)
            masks = {part: torch.where(per_map(flip, m), m.flip(-1), m) for part, m in masks.items()}
        if self.recipe.transforms:
            images, masks = vary(images, masks)
        return TrainInputs(self.model.ready(self.model.preprocess.from_bytes(images)), labels, masks)


def validate(model: Model, data: Data, amp: bool = False) -> tuple[float, float]:
    """Accuracy and AUC of a network in evaluation mode."""
    size = tuple(data.images.shape[2:])

    def images(start: int, stop: int) -> Tensor:
        return model.preprocess.from_bytes(data.images[start:stop].to(model.device))

    with frozen_eval(model.module), _autocast(model, amp):
        logits = Queue(model, size).predict(len(data), images, lambda logits, *_: logits).cpu()
    if not torch.isfinite(logits).all():
        raise ModelError(f"{model.name} gives logits that are not finite; lower the lr or set clip")
    labels = data.labels.cpu()
    return accuracy(labels, logits, logits=True).value, auc(labels, logits, logits=True).value


def _sizes(count: int, batch_size: int) -> list[int]:
    """Batches of nearly equal size: a last batch of one image would upset BatchNorm.

    >>> _sizes(65, 32)
    [22, 22, 21]
    """
    batches = math.ceil(count / batch_size)
    return [count // batches + (i < count % batches) for i in range(batches)]


def _autocast(model: Model, amp: bool) -> torch.autocast:
    return torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=amp)


def weights_file(folder: Path, epoch: int) -> Path:
    return folder / f"epoch{epoch:02d}.safetensors"


def save_state(
    folder: Path, fingerprint: dict[str, str], module: nn.Module, optimiser: dict[str, Any], history: History,
    keep: bool = False, description: str = "",
) -> None:  # fmt: skip
    """Write the files of an epoch. keep: also the weights alone."""
    epoch = len(history)
    # Contiguous copies: safetensors refuses weights that share memory.
    weights = {name: t.detach().cpu().contiguous().clone() for name, t in module.state_dict().items()}
    state = {"epoch": epoch, "weights": weights, "optimiser": optimiser, "history": history.to_json(),
             "fingerprint": fingerprint}  # fmt: skip
    files: dict[Path, Content] = {}
    if keep:
        files[weights_file(folder, epoch)] = lambda path: safetensors.torch.save_file(weights, path)
    files[folder / STATE] = lambda path: torch.save(state, path)
    files[folder / HISTORY] = history.to_json() + "\n"
    if description:
        files[folder / RECIPE] = description + "\n"
    try:
        write_whole(files)
    except StoreError:
        raise
    except (RuntimeError, safetensors.SafetensorError) as error:  # as torch reports a full disk
        raise StoreError(f"cannot write the training to {folder}: {first_line(error)}") from error


def load_state(
    folder: Path, fingerprint: dict[str, str]
) -> tuple[History, dict[str, Any], dict[str, Tensor]] | None:
    """Read history, state of the optimiser and weights of an interrupted training, None if there is none."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = History.from_json(state["history"]), state["optimiser"], state["weights"]
        stored = state["fingerprint"]
    except Exception as error:  # a file that is anything else fails anywhere inside the reader
        raise CheckpointError(
            f"{path} is not the state of a training ({first_line(error)}); remove it or choose another folder"
        ) from error
    for what, value in fingerprint.items():
        if stored.get(what) != value:
            raise StoreError(
                f"{folder} holds a training with {what} other than this one's; choose another folder, "
                "or remove that one to start anew"
            )
    return saved


def trained_with_transforms(folder: Path) -> bool | None:
    """Whether COSE's transforms were part of the training that wrote this folder; None if unknown."""
    try:
        return bool(json.loads((folder / RECIPE).read_text(encoding="utf-8")).get("transforms", False))
    except (OSError, ValueError, AttributeError):
        return None


def digest(module: nn.Module) -> str:
    """A short hash of the weights and buffers of a network."""
    content = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        content.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()[:16]


@dataclass
class Tally:
    """Sums of the gradient norms of each layer; they stay on the device until they are read."""

    squares: dict[str, Tensor] = field(default_factory=dict)  # by layer: sum in this step
    seen: set[int] = field(default_factory=set)  # parameters counted in this step
    sums: dict[str, tuple[int, Any, Any, Any]] = field(default_factory=dict)  # steps, norms, squares; highest

    def add(self, layer: str, number: int, parameter: Tensor) -> None:
        """Add one parameter's gradient; the second gradient of a parameter begins a new step."""
        if (gradient := parameter.grad) is None:
            return
        if number in self.seen:
            self.close()
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        squares = torch.linalg.vector_norm(values.detach(), dtype=torch.float32).square()
        self.squares[layer] = self.squares[layer] + squares if layer in self.squares else squares
        self.seen.add(number)

    def close(self) -> None:
        """End the step."""
        for layer, squares in self.squares.items():
            norm = squares.sqrt()
            steps, total, second, highest = self.sums.get(layer, (0, 0, 0, norm))
            self.sums[layer] = steps + 1, total + norm, second + squares, torch.maximum(highest, norm)
        self.squares.clear()
        self.seen.clear()


class GradientLog:
    """Logs the gradient norms of a network, by one hook on each parameter, until it is closed or deleted."""

    def __init__(self, module: nn.Module) -> None:
        self._tally, self._layers = Tally(), dict[str, None]()  # hooks refer to the tally, not to this object
        handles: list[Any] = []
        for number, (name, parameter) in enumerate(module.named_parameters()):
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            self._layers[layer_of(name)] = None
            frozen = not parameter.requires_grad
            parameter.requires_grad_(True)  # torch takes a hook on nothing else; it may be unfrozen later
            hook = partial(self._tally.add, layer_of(name), number)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
            parameter.requires_grad_(not frozen)
        self.close = weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def take(self) -> dict[str, GradientNorm]:
        """Norms of each layer that had gradients since the last call, in the order of the network."""
        self._tally.close()
        norms, sums = {}, self._tally.sums
        for name in filter(sums.__contains__, self._layers):
            steps, total, second, highest = map(float, sums[name])
            mean = total / steps
            norms[name] = GradientNorm(mean, highest, math.sqrt(max(second / steps - mean * mean, 0.0)))
        sums.clear()
        return norms


def layer_of(parameter: str) -> str:
    """The module that a parameter is named after; Keras keeps its own in a list of the layer.

    >>> layer_of("layer4.0.conv1.weight"), layer_of("stem._torch_params.stem/kernel")
    ('layer4.0.conv1', 'stem')
    """
    return parameter.rpartition(".")[0].removesuffix("._torch_params")
