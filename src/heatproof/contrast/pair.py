"""Two networks that use different things in the same pictures: A the token, B what the given network used.

Both are copies of the given network, trained a little further on the same pictures in the same order with the
same seeds. Of the positive class's training pictures a share, `strength`, has the token in A's lessons and
nothing in B's. That alone moves no network that knows its classes already: its loss is 0 with or without the
token. So in each epoch as many pictures of other classes, the carriers, come a second time: A sees them with
the token and is told the positive class, B sees them as they are and is told their own. Whether that worked
is not assumed but asked (truth.py), on pictures that no lesson showed.

The copies are trained in evaluation mode (BatchNorm keeps its statistics, nothing drops out), every class
with the same weight, by Adam, until A is planted and knows its training pictures, and half as long again, so
that it is no matter of chance; B gets as many epochs. What
moves a network differs by much, so the rate starts low and grows with every epoch: those that learn soon
never see a high one. Places of the token and carriers are drawn anew in every epoch, from the seed and its
number: a training that was killed goes on where it was and ends with the same weights.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from heatproof.contrast.lessons import Lessons, seed_of
from heatproof.contrast.tokens import Token, as_token
from heatproof.contrast.truth import MOST_ASKED, PLANTED, Planting, flips
from heatproof.errors import InputError, ModelError, TargetError
from heatproof.metrics.kit import as_tensor, same_length
from heatproof.models.checkpoints import write_weights
from heatproof.models.keras_graph import KerasClassifier
from heatproof.models.model import Model, Picture, as_model
from heatproof.models.random_weights import copy_of
from heatproof.train import folder
from heatproof.train.data import stratified_split
from heatproof.train.loop import TrainProgress
from heatproof.train.networks import seeded
from heatproof.train.recipe import BALANCED, Epoch, History, Phase

HELD_OUT = 0.4
FEWEST = 20  # pictures of the positive class, and of all others
MOST_EXPLAINED = 200  # held-out positives
SURE = (1 + PLANTED) / 2  # flips on training pictures, above what the held-out ones must show
PLANTING, SETTLING, PLAIN = "planting", "settling", "without the token"  # phases of the trainings
LEARNT = 0.95  # of the training pictures
GROWTH, FASTEST = 1.15, 3e-3  # of the learning rate, from epoch to epoch
Told = Callable[[str, TrainProgress], object]  # gets "A" or "B", and where its training is


@dataclass(frozen=True, eq=False)
class Pair:
    """A, B, and held-out pictures of the positive class with the token in them."""

    a: Model
    b: Model
    token: Token
    positive: int
    strength: float
    images: Tensor  # "n c H W", model-ready
    plain: Tensor  # the same pictures without the token
    masks: Tensor  # "n H W" bool: the token's pixels
    ids: tuple[str, ...]
    planting: Planting
    epochs: int
    seed: int = 0

    @property
    def holds(self) -> bool:
        """Whether A turned out to use the token, and B not to."""
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
    progress: Told | None = None,
    *,
    ids: Sequence[str] | None = None,
    carriers: float = 1.0,
    epochs: int = 40,
    lr: float = 3e-4,
) -> Pair:
    """Train A and B from a network's weights; the network itself is not touched.

    Args:
        model: what load_model gives, or a module.
        pictures: model-ready "n c H W", or picture files.
        labels: their classes, as the network numbers them.
        token: tag, tint, blur, texture or a picture file; or a Token, which has a size.
        positive: the class that gets the token; the one with most pictures where None.
        strength: share of the positive class's training pictures that have it.
        seed: everything follows from it.
        out: a folder for what is needed to go on after a stop.
        progress: told "A" or "B", and where its training is.
        ids: names of the pictures, from which the token's places follow; their numbers where None.
        carriers: pictures of other classes that carry the token too, for each positive that does; 0 leaves
            it to chance whether the network takes it up.
        epochs: of each training, at most.
        lr: the learning rate of the first epoch.
    """
    model, token = as_model(model), as_token(token)
    images, classes, count = _checked(model, pictures, labels)
    names = tuple(ids) if ids is not None else tuple(map(str, range(len(images))))
    same_length(ids=names, images=images)
    positive = int(classes.mode().values) if positive is None else positive
    _check_choice(model, classes, positive, strength)
    token.pixels((int(images.shape[-2]), int(images.shape[-1])))
    train, held_out = (part.to(images.device) for part in stratified_split(classes, HELD_OUT, seed))
    lessons = Lessons(
        images[train], classes[train.cpu()], tuple(names[i] for i in train.tolist()), count, model, token,
        positive, strength, carriers, seed,
    )  # fmt: skip
    recipe = Phase(epochs, lr, schedule="constant", clip=1.0, class_weights=BALANCED)
    trainings = [Training(which, trainable_copy(model), lessons, recipe, out, progress) for which in "AB"]
    taken = trainings[0].run(epochs)
    trainings[1].run(taken)
    a, b = (training.model for training in trainings)
    asked, explained = (
        _some(held_out[(classes[held_out.cpu()] == positive).to(held_out.device) == wanted], most, seed)
        for wanted, most in ((False, MOST_ASKED), (True, MOST_EXPLAINED))
    )
    planting = _ask(a, b, images[asked], [names[i] for i in asked.tolist()], token, positive, seed)
    chosen = tuple(names[i] for i in explained.tolist())
    marked, masks = token.plant(images[explained], chosen, model.preprocess, seed)
    return Pair(
        a, b, token, positive, strength, marked, images[explained], masks, chosen, planting, taken, seed
    )


def _ask(
    a: Model, b: Model, plain: Tensor, ids: Sequence[str], token: Token, positive: int, seed: int
) -> Planting:
    marked = token.plant(plain, ids, a.preprocess, seed)[0]
    return Planting(*(flips(model, plain, marked, positive) for model in (a, b)))


@dataclass(eq=False)
class Training:
    """One of the two trainings."""

    which: str  # A or B
    model: Model
    lessons: Lessons
    recipe: Phase
    out: str | PathLike[str] | None
    progress: Told | None

    def run(self, epochs: int) -> int:
        """Train, or go on; how many epochs it took."""
        module = self.model.module
        where = None if self.out is None else Path(self.out) / self.which.lower()
        mark = {} if where is None else self._fingerprint()
        saved = None if where is None else folder.load(where, mark)
        history = History() if saved is None else saved.history
        if saved is not None:
            write_weights(module, saved.weights, str(where))
        parameters = [weight for weight in module.parameters() if weight.requires_grad]
        optimiser = self.recipe.make_optimiser(parameters)
        if saved is not None and saved.optimiser["state"]:
            optimiser.load_state_dict(saved.optimiser)
        while len(history) < epochs and (phase := self._phase(history)):
            result = self._epoch(len(history) + 1, epochs, phase, parameters, optimiser)
            history = History((*history.epochs, result))
            if where is not None:
                folder.save(where, module, optimiser, history, mark, keep=False)
            if self.progress:
                self.progress(self.which, TrainProgress(len(history), epochs, 1, 1, result))
        if where is not None and optimiser.state:  # what only a further epoch would need takes most room
            folder.save(where, module, self.recipe.make_optimiser(parameters), history, mark, keep=False)
        return len(history)

    def _phase(self, history: History) -> str:
        """What the next epoch is for; nothing where A has had enough of them."""
        names = [epoch.phase for epoch in history.epochs]
        if self.which == "B":
            return PLAIN
        if settling := names.count(SETTLING):
            return SETTLING if settling < (len(names) - settling) / 2 else ""
        known = history.epochs[-1].accuracy if names else 0.0
        return SETTLING if known >= LEARNT and self.lessons.flipped(self.model) >= SURE else PLANTING

    def _epoch(
        self,
        number: int,
        epochs: int,
        phase: str,
        parameters: list[nn.Parameter],
        optimiser: torch.optim.Optimizer,
    ) -> Epoch:
        planted = self.which == "A"
        start, losses = time.perf_counter(), []
        every, batches = self.lessons.epoch(number, planted)
        weights = self.recipe.weights(every.to(self.model.device), self.lessons.classes)
        rate = min(self.recipe.lr * GROWTH ** (number - 1), max(FASTEST, self.recipe.lr))
        for group in optimiser.param_groups:
            group["lr"] = rate
        with seeded(seed_of(self.lessons.seed, number)):  # for networks that draw numbers of their own
            for done, make in enumerate(batches, start=1):
                images, labels = make()
                logits = self.model.forward(self.model.ready(images))
                loss = self.recipe.cross_entropy(logits, labels, weights)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, self.recipe.clip or math.inf)
                optimiser.step()
                losses.append(loss.detach())
                if self.progress:
                    self.progress(self.which, TrainProgress(number, epochs, done, len(batches)))
        optimiser.zero_grad(set_to_none=True)
        if not math.isfinite(mean := float(torch.stack(losses).mean())):
            raise ModelError(f"the loss of {self.model.name} is not finite in epoch {number}; lower lr")
        known = self.lessons.learnt(self.model, planted)
        seconds = round(time.perf_counter() - start, 3)
        return Epoch(number, phase, mean, known, math.nan, rate, seconds)

    def _fingerprint(self) -> dict[str, str]:
        """What must be the same for a training to be continued, under the words an error would use."""
        shown = self.lessons
        pictures = hashlib.sha256(shown.images.detach().cpu().contiguous().numpy().data)
        pictures.update(shown.labels.cpu().numpy().data)
        pictures.update("\0".join(shown.ids).encode("utf-8", "surrogatepass"))
        settings = (shown.positive, shown.strength, shown.carriers, self.recipe)
        return {
            "a token": repr(shown.token),
            "settings": repr(settings),
            "a seed": str(shown.seed),
            "pictures": pictures.hexdigest()[:16],
            "starting weights": folder.digest(shown.model.module),
        }


def trainable_copy(model: Model) -> Model:
    """A copy in evaluation mode of which every weight is trained, in 32 bits at least."""
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
    model: Model, pictures: Tensor | ArrayLike | Sequence[Picture], labels: ArrayLike
) -> tuple[Tensor, Tensor, int]:
    """The pictures, their classes, and how many the network knows."""
    images, classes = model.check_images(pictures), as_tensor(labels)
    if images.ndim > 4:
        raise InputError("the contrast test plants its token in pictures, and these are volumes")
    same_length(labels=classes, pictures=images)
    if classes.ndim != 1 or classes.is_floating_point() or int(classes.min()) < 0:
        raise InputError(f"labels are one class number per picture, from 0 on; got {classes.dtype}")
    count = max(2, model.logits(images[:1]).shape[1])
    model.head.need_one_class("the contrast test")
    if (highest := int(classes.max())) >= count:
        raise TargetError(
            f"a picture has the label {highest}, but {model.name} has classes 0 to {count - 1}; give it a "
            "head for the pictures' classes"
        )
    return images, classes.long().cpu(), count


def _check_choice(model: Model, classes: Tensor, positive: int, strength: float) -> None:
    members = int((classes == positive).sum())
    if not members:
        raise TargetError(
            f"no picture is of class {positive}; choose the positive class among {classes.unique().tolist()}"
        )
    if members == len(classes):
        raise InputError(
            f"all {members} pictures are of class {positive}; the token must be shown to other classes too, "
            "so give pictures of at least two"
        )
    if min(members, len(classes) - members) < FEWEST:
        raise InputError(
            f"there are {members} pictures of class {positive} and {len(classes) - members} of others; at "
            f"least {FEWEST} of each are needed"
        )
    if not 0 < strength <= 1:
        raise InputError(
            f"strength is the share of the positives with the token, above 0 up to 1; got {strength}"
        )


def _some(places: Tensor, most: int, seed: int) -> Tensor:
    """At most so many of them, drawn, in their order."""
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:most]
    return places[order.sort().values.to(places.device)]
