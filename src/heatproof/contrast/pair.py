"""Two networks that use different evidence in the same images: A the token, B what the given network used.

Both are copies of the given network, trained a little further on the same images in the same order with the
same seeds. A share, `strength`, of the positive class's training images has the token in A's training and not
in B's. In each epoch as many images of other classes, the carriers, come a second time: for A with the token
and the positive label, for B unchanged and with their own label (docs/contrast.md says why).

The copies are trained in evaluation mode (BatchNorm keeps its statistics, no dropout), every class with the
same weight, by Adam, until A is planted and fits its training images, and half as long again; B gets as
many epochs. The learning rate grows with every epoch: networks that learn soon are finished before it is
high. Places of the token and carriers are drawn anew in every epoch, from the seed and its number.

Carriers contradict what the given network learnt, so the first steps are large, and at too high a rate its
ReLUs die: the logits no longer depend on the image, and no later epoch revives them. A copy has collapsed if
its loss has not been below that of a constant answer, log(classes), for COLLAPSED epochs and its logits vary
over the images by less than FLAT of the given network's. Then both trainings start again from the given
weights at a third of all learning rates, at most RESTARTS times, in OUT/restart-1, restart-2.

    flips  = of the held-out images of other classes that a network does not call positive as they are, the
             share that it calls positive with the token; A is planted from 90 % on, B is clean up to 10 %
    inside = share of a budget of pixels as large as the token that lies on the token,
             which is widened by half a cell of the map on every side: a map cannot be finer than its cells
    AUC    = P(inside under A > inside under B) + P(equal) / 2     over all pairs of images
    seen   = share of images in which it is visible under A: inside >= 1/2

Both networks must leave at least half of the images to test, since a network that calls everything positive
uses nothing. Otherwise planting failed, and no method is judged. A constant map marks nothing: inside 0.
Intervals are 95 %, by bootstrap over images, each with its scores under both networks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.contrast.tokens import Token, as_token
from heatproof.errors import InputError, ModelError, TargetError
from heatproof.explain.api import explain
from heatproof.metrics.kit import as_tensor, same_length
from heatproof.metrics.localisation import localise
from heatproof.metrics.results import Interval, percentile_interval, resample, wins
from heatproof.models.derived import copy_of
from heatproof.models.keras_graph import KerasClassifier
from heatproof.models.model import Model, Picture, all_logits, as_model
from heatproof.train import stratified_split
from heatproof.train.loop import EpochPlan, TrainInputs, TrainProgress, class_weights, digest, fit_epochs
from heatproof.train.networks import Parts
from heatproof.train.recipe import BALANCED, History, Phase
from heatproof.types import Maps

HELD_OUT = 0.4
FEWEST = 20  # images of the positive class, and of all others
MOST_EXPLAINED, MOST_TESTED = 200, 200  # held-out images: positives, others
PLANTED, CLEAN, TESTABLE = 0.9, 0.1, 0.5
SURE = (1 + PLANTED) / 2  # flips on training images, above what the held-out ones must reach
PLANTING, SETTLING, PLAIN = "planting", "settling", "without the token"  # phases of the trainings
LEARNT = 0.95  # of the training images
GROWTH, FASTEST = 1.15, 3e-3  # of the learning rate, from epoch to epoch
CONSTANT, COLLAPSED, FLAT = 0.95, 5, 0.01  # share of a constant answer's loss, epochs, share of the spread
RESTARTS, SLOWER = 2, 3.0
STEPS, BATCHES = 24, (4, 32)  # steps per epoch, and the least and most images in each
TOKEN_REMOVED = "token removed"
SEEN = 0.5
SHOWN = 4  # images whose maps are stored
ProgressCallback = Callable[[str, TrainProgress], object]  # called with "A" or "B" and the training's state


class Flips(NamedTuple):
    """Share of n images (NaN if there is none), which are those of `shown` not called positive."""

    share: float
    n: int
    shown: int

    @property
    def usable(self) -> bool:
        return self.n >= max(1, TESTABLE * self.shown)

    def __str__(self) -> str:
        return f"{self.share:.0%} ({self.n} of {self.shown} images)" if self.n else "none (0 images)"


class Planting(NamedTuple):
    """Flips of both networks."""

    a: Flips
    b: Flips

    @property
    def holds(self) -> bool:
        clear = self.a.share >= PLANTED and self.b.share <= CLEAN
        return clear and self.a.usable and self.b.usable

    @property
    def sentence(self) -> str:
        result = f"the token turns {self.a} of A's answers and {self.b} of B's"
        if self.holds:
            return f"planted: {result}"
        return (
            f"planting failed: {result}; needed are at least {PLANTED:.0%} and at most {CLEAN:.0%}, each of "
            f"{TESTABLE:.0%} of the images or more, so no method is judged"
        )


@torch.no_grad()
def flips(model: Model, plain: Tensor, marked: Tensor, positive: int) -> Flips:
    """How often the token changes the prediction to the positive class, on the same images."""
    if not len(plain):
        return Flips(math.nan, 0, 0)
    before, after = (model.predicted(all_logits(model, images)) == positive for images in (plain, marked))
    n = int((~before).sum())
    return Flips(int((after & ~before).sum()) / n if n else math.nan, n, len(plain))


@dataclass(frozen=True, eq=False)
class Pair:
    """A, B, and held-out images of the positive class with the token in them."""

    a: Model
    b: Model
    token: Token
    positive: int
    strength: float
    images: Tensor  # "n c H W", model-ready
    plain: Tensor  # the same images without the token
    masks: Tensor  # "n H W" bool: the token's pixels
    ids: tuple[str, ...]
    planting: Planting
    epochs: int
    seed: int = 0
    restarts: int = 0  # trainings before these, which collapsed

    @property
    def holds(self) -> bool:
        """Whether A uses the token and B does not."""
        return self.planting.holds


def make_pair(
    model: Model | nn.Module,
    pictures: Tensor | ArrayLike | Sequence[Picture],
    labels: ArrayLike,
    token: Token | str | Path = "tag",
    positive: int | None = None,
    strength: float = 1.0,
    seed: int = 0,
    out: str | PathLike[str] | None = None,
    progress: ProgressCallback | None = None,
    *,
    ids: Sequence[str] | None = None,
    carriers: float = 1.0,
    epochs: int = 40,
    lr: float = 3e-4,
) -> Pair:
    """Train A and B from a network's weights; the network itself is not changed.

    Args:
        model: a Model, or a module.
        pictures: model-ready "n c H W", or image files.
        labels: their classes, as the network numbers them.
        token: tag, tint, blur, texture or an image file; or a Token, which has a size.
        positive: the class that gets the token; by default the most frequent.
        strength: share of the positive class's training images that have it.
        seed: of everything random.
        out: a folder, in which a stopped training can be resumed.
        progress: called with "A" or "B" and the state of its training.
        ids: names of the images, from which the token's places follow; by default their numbers.
        carriers: images of other classes that carry the token too, for each positive that does; with 0 the
            network may not learn it.
        epochs: of each training, at most.
        lr: the learning rate of the first epoch; lower after a collapse.
    """
    model, token = as_model(model), as_token(token)
    images, classes, count, positive = _checked(model, pictures, labels, positive, strength)
    names = tuple(map(str, range(len(images))) if ids is None else ids)
    same_length(ids=names, images=images)
    token.pixels((int(images.shape[-2]), int(images.shape[-1])))
    train, held_out = (part.to(images.device) for part in stratified_split(classes, HELD_OUT, seed))
    for restarts in range(RESTARTS + 1):
        rate, fastest = (limit / SLOWER**restarts for limit in (lr, max(FASTEST, lr)))
        phase = Phase(epochs, rate, schedule="constant", clip=1.0, class_weights=BALANCED)
        place = None if out is None else Path(out, f"restart-{restarts}" if restarts else "")
        a, b, taken = trainable_copy(model), trainable_copy(model), epochs
        for which, network in (("A", a), ("B", b)):
            course = PlantingCourse(
                images[train], classes[train.cpu()], tuple(names[i] for i in train.tolist()), count, model,
                token, positive, strength, carriers, seed, phase, fastest, network, planted=which == "A",
                epochs=taken,
            )  # fmt: skip
            folder = None if place is None else place / which.lower()
            report = None if progress is None else partial(progress, which)
            history = fit_epochs(network, course, folder, report, keep_optimiser=False)
            taken = len(history)
            if restarts < RESTARTS and course.has_collapsed(history):
                break
        else:
            break
    is_positive = (classes[held_out.cpu()] == positive).to(held_out.device)
    tested = _sample(held_out[~is_positive], MOST_TESTED, seed)
    plain = images[tested]
    marked = token.plant(plain, [names[i] for i in tested.tolist()], model.preprocess, seed)[0]
    planting = Planting(*(flips(network, plain, marked, positive) for network in (a, b)))
    explained = _sample(held_out[is_positive], MOST_EXPLAINED, seed)
    plain, chosen = images[explained], tuple(names[i] for i in explained.tolist())
    marked, masks = token.plant(plain, chosen, model.preprocess, seed)
    return Pair(
        a, b, token, positive, strength, marked, plain, masks, chosen, planting, taken, seed, restarts
    )


@dataclass(eq=False)
class PlantingCourse:
    """The training of A or B, for the training loop."""

    images: Tensor
    labels: Tensor
    ids: tuple[str, ...]
    classes: int  # of the network
    original: Model  # the given network
    token: Token
    positive: int
    strength: float
    carriers: float
    seed: int
    phase: Phase
    fastest: float  # the highest learning rate
    model: Model  # the copy that is trained
    planted: bool  # whether this is A
    epochs: int  # at most

    @cached_property
    def bearers(self) -> Tensor:
        """Indices of the positives that have the token in A's training, the same in every epoch."""
        members = (self.labels == self.positive).nonzero().flatten()
        drawn = members[torch.randperm(len(members), generator=self._generator(0))]
        return drawn[: max(1, round(self.strength * len(drawn)))]

    @cached_property
    def others(self) -> Tensor:
        return (self.labels != self.positive).nonzero().flatten()

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed_of(self.seed, epoch))

    def _marked(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
        ids = [self.ids[i] for i in indices.tolist()]
        return self.token.plant(images, ids, self.original.preprocess, seed_of(self.seed, epoch))[0]

    def next_epoch(self, history: History) -> EpochPlan | None:
        number = len(history) + 1
        if number > self.epochs or self.has_collapsed(history) or not (name := self._phase(history)):
            return None
        labels, loads = self._epoch(number)
        return EpochPlan(
            self.phase, name, min(self.phase.lr * GROWTH ** (number - 1), self.fastest),
            seed_of(self.seed, number),  # for networks that draw numbers of their own
            Parts(frozenset(name for name, _ in self.model.module.named_parameters()), frozenset()),
            lambda: loads,
            weights=class_weights(self.phase, labels.to(self.model.device), self.classes),
        )  # fmt: skip

    def _epoch(self, epoch: int) -> tuple[Tensor, list[Callable[[], TrainInputs]]]:
        """All labels of an epoch, and functions that load its batches."""
        generator = self._generator(epoch)
        count = min(len(self.others), round(self.carriers * len(self.bearers)))
        carriers = self.others[torch.randperm(len(self.others), generator=generator)[:count]]
        indices = torch.cat([torch.arange(len(self.images)), carriers])
        has_token = torch.zeros(len(indices), dtype=torch.bool)
        if self.planted:
            has_token[self.bearers] = has_token[len(self.images) :] = True
        labels = torch.where(has_token, self.positive, self.labels[indices])

        def load(chosen: Tensor) -> TrainInputs:
            places, bears, device = indices[chosen], has_token[chosen], self.model.device
            images = self.images[places.to(self.images.device)].to(device)
            if bears.any():
                images[bears.to(device)] = self._marked(images[bears.to(device)], places[bears], epoch)
            return TrainInputs(self.model.ready(images), labels[chosen].to(device), {})

        size = min(max(len(indices) // STEPS, BATCHES[0]), BATCHES[1])
        order = torch.randperm(len(indices), generator=generator).split(size)
        return labels, [partial(load, chosen) for chosen in order]

    def _phase(self, history: History) -> str:
        """Name of the next epoch's phase; "" after the last."""
        if not self.planted:
            return PLAIN
        names = [epoch.phase for epoch in history.epochs]
        if settling := names.count(SETTLING):
            return SETTLING if settling < (len(names) - settling) / 2 else ""
        if not names or history.epochs[-1].accuracy < LEARNT:
            return PLANTING
        # Flips on training images of other classes decide when to stop, and are never reported.
        drawn = self.others[:: max(1, len(self.others) // MOST_TESTED)]
        images = self.images[drawn.to(self.images.device)]
        share = flips(self.model, images, self._marked(images, drawn, -1), self.positive).share
        return SETTLING if share >= SURE else PLANTING

    def has_collapsed(self, history: History) -> bool:
        """Whether the network, as it is after these epochs, answers without regard to the image."""
        least = CONSTANT * math.log(len(self.labels.unique()))
        last = history.epochs[-COLLAPSED:]
        if len(last) < COLLAPSED or min(epoch.loss for epoch in last) < least:
            return False
        now, given = (
            torch.cat([all_logits(model, load().images) for load in self._epoch(0)[1]]).float().std(0).max()
            for model in (self.model, self.original)
        )
        return bool(now < FLAT * given)

    def validate(self) -> tuple[float, float]:
        """Accuracy on the training images as epoch 0 has them; no AUC."""
        right = n = 0
        for load in self._epoch(0)[1]:
            images, labels, _ = load()
            right += int((self.model.predicted(all_logits(self.model, images)) == labels).sum())
            n += len(labels)
        return right / n, math.nan

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        content = hashlib.sha256(self.images.detach().cpu().contiguous().numpy().data)
        content.update(self.labels.cpu().numpy().data)
        content.update("\0".join(self.ids).encode("utf-8", "surrogatepass"))
        return {
            "a token": repr(self.token),
            "settings": repr((self.positive, self.strength, self.carriers, self.phase)),
            "a seed": str(self.seed),
            "pictures": content.hexdigest()[:16],
            "starting weights": digest(self.original.module),
        }


def seed_of(seed: int, epoch: int) -> int:
    """Seed of an epoch, counted from 1; 0 and -1 are for what is the same in all epochs."""
    return int.from_bytes(hashlib.sha256(f"contrast {seed} {epoch}".encode()).digest()[:7])


def trainable_copy(model: Model) -> Model:
    """A copy in evaluation mode with all weights trainable, in 32 bits at least."""
    if isinstance(model.module, KerasClassifier):
        raise ModelError(
            f"{model.name} is a Keras network, which is not trained here; take the same network from timm"
        )
    parts, weights = model.module.modules(), list(model.module.parameters())
    if any("quantized" in type(part).__module__ for part in parts) or any(
        not weight.is_floating_point() for weight in weights
    ):
        raise ModelError(
            f"{model.name} is quantised and cannot be trained; give the network it was made from"
        )
    if not weights:
        raise ModelError(f"{model.name} has no weights to train; give a network that has some")
    copied = copy_of(model)
    if model.dtype in (torch.float16, torch.bfloat16):
        copied.module.float()
    copied.module.eval().requires_grad_(True)
    return copied


def _checked(
    model: Model, pictures: Tensor | ArrayLike | Sequence[Picture], labels: ArrayLike, positive: int | None,
    strength: float,
) -> tuple[Tensor, Tensor, int, int]:  # fmt: skip
    """The images, their classes, the number of classes of the network, and the positive class."""
    images, classes = model.check_images(pictures), as_tensor(labels)
    if images.ndim > 4:
        raise InputError("the contrast test plants its token in images, and these are volumes")
    same_length(labels=classes, pictures=images)
    if classes.ndim != 1 or classes.is_floating_point() or int(classes.min()) < 0:
        raise InputError(f"labels are one class number per image, from 0 on; got {classes.dtype}")
    count, classes = max(2, model.logits(images[:1]).shape[1]), classes.long().cpu()
    model.head.need_one_class("the contrast test")
    if (highest := int(classes.max())) >= count:
        raise TargetError(
            f"an image has the label {highest}, but {model.name} has classes 0 to {count - 1}; give it a "
            "head for the images' classes"
        )
    positive = int(classes.mode().values) if positive is None else positive
    members = int((classes == positive).sum())
    others = len(classes) - members
    if not members:
        raise TargetError(
            f"no image is of class {positive}; choose the positive class among {classes.unique().tolist()}"
        )
    if min(members, others) < FEWEST:
        raise InputError(
            f"there are {members} images of class {positive} and {others} of others; at least {FEWEST} of "
            "each are needed"
        )
    if not 0 < strength <= 1:
        raise InputError(
            f"strength is the share of the positives with the token, above 0 up to 1; got {strength}"
        )
    return images, classes, count, positive


def _sample(places: Tensor, most: int, seed: int) -> Tensor:
    """At most this many of them, drawn at random, in their order."""
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:most]
    return places[order.sort().values.to(places.device)]


@dataclass(frozen=True, eq=False)
class ContrastScore:
    """One method under both networks."""

    method: str
    a: np.ndarray  # "n": inside under A, image by image
    b: np.ndarray
    blank: tuple[int, int] = (0, 0)  # constant maps under A and B
    maps: tuple[np.ndarray, ...] = field(default=(), repr=False)  # of the first images, under A and B
    seed: int = 0

    @cached_property
    def _area(self) -> tuple[float, Interval]:
        return contrast_auc(self.a, self.b, self.seed)

    @property
    def auc(self) -> float:
        return self._area[0]

    @property
    def interval(self) -> Interval:
        return self._area[1]

    @property
    def seen(self) -> float:
        """Share of images in which a person would see the token; NaN for the control: it has no map."""
        return float("nan") if self.method == TOKEN_REMOVED else float((self.a >= SEEN).mean())

    @property
    def shows(self) -> bool:
        """Whether a person would see the token in half of the maps under A, and not just as often under B."""
        return self.seen >= SEEN and self.interval[0] > 0.5

    @property
    def n(self) -> int:
        return len(self.a)


def contrast_scores(
    pair: Pair,
    methods: str | Sequence[str],
    *,
    layer: str | Sequence[str] | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> dict[str, ContrastScore]:
    """Scores by method on the pair's images; the control last."""
    if not pair.holds:
        raise InputError(pair.planting.sentence)
    explained = [
        explain(
            model, pair.images, methods, pair.positive, layer, pair.seed,
            ids=pair.ids, batch_size=batch_size, progress=progress,
        )
        for model in (pair.a, pair.b)
    ]  # fmt: skip
    scores = {}
    for method in explained[0]:
        both = [maps[method] for maps in explained]
        a, b = (inside_token(maps, pair.masks).cpu().double().numpy() for maps in both)
        blank = int(both[0].degenerate.sum()), int(both[1].degenerate.sum())
        examples = tuple(maps.values[:SHOWN].cpu().numpy() for maps in both)
        scores[method] = ContrastScore(method, a, b, blank, examples, pair.seed)
    a, b = (_drop(model, pair) for model in (pair.a, pair.b))
    return scores | {TOKEN_REMOVED: ContrastScore(TOKEN_REMOVED, a, b, seed=pair.seed)}


def inside_token(maps: Maps, masks: Tensor) -> Tensor:
    """Share "b" of a budget as large as the token that a map places on the widened token."""
    masks = masks.to(maps.values.device)
    rows, columns = (
        side // (2 * cells) for side, cells in zip(maps.image_size, maps.values.shape[1:], strict=True)
    )
    near = F.max_pool2d(
        masks[:, None].float(), (2 * rows + 1, 2 * columns + 1), stride=1, padding=(rows, columns)
    )[:, 0]
    budget = int(masks[0].sum()) / masks[0].numel()
    return localise(maps, masks=near > 0, budget=budget)["inside"].masked_fill(maps.degenerate, 0)


def contrast_auc(
    a: np.ndarray, b: np.ndarray, seed: int = 0, resamples: int = 1000
) -> tuple[float, Interval]:
    """Probability that a score under A exceeds one under B, ties half, with its interval over images.

    >>> contrast_auc(np.array([0.2, 0.9]), np.array([0.1, 0.5]))[0]
    0.75
    """
    table = wins(a, b)
    counts = np.stack([np.bincount(places, minlength=len(a)) for places in resample(len(a), resamples, seed)])
    return float(table.mean()), percentile_interval(((counts @ table) * counts).sum(1) / len(a) ** 2)


@torch.no_grad()
def _drop(model: Model, pair: Pair) -> np.ndarray:
    with_token, without = (
        model.scores(logits, torch.full((len(logits),), pair.positive, device=logits.device))
        for logits in (all_logits(model, pair.images), all_logits(model, pair.plain))
    )
    return np.asarray((with_token - without).double().cpu())
