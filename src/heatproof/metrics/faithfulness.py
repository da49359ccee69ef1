"""Does the map order the pixels by what they mean to the model?

Deletion replaces the pixels of an image by those of a baseline, the map's largest first; insertion starts at
the baseline and brings the image's pixels back in the same order. With p the target's probability,

    x_k = baseline where rank < floor(k H W / n), image elsewhere         (deletion; insertion is the reverse)
    AUC = trapezoid of p(x_0), ..., p(x_n) over [0, 1],  n = 100 steps, 101 points

A faithful map loses the class early (low deletion) and finds it early (high insertion).

Cite: petsiuk2018rise; keak2026budget for the settings.

Conventions and deviations: both curves start from one baseline, by default the image under a Gaussian blur of
sigma 10 (the RISE paper deletes towards grey and inserts over a blur). Negatives are clipped and ties go in
row-major order, as in localise. Give the true labels as `targets` for the thesis's numbers; without them the
class is the one predicted on the whole image. A constant map orders nothing: its curves and areas are NaN,
with a reason, and cost no pass.

The adaptive forms are not in the papers. adaptive=True visits a third of the points, where the curves bend
(see curves.py), and draws straight lines between them. adaptive="decided" ends a map's walk earlier, where
its areas are known to 0.005, or to 0.01 and it is plain on which side of the floors beside it they lie. It is
what a run does unless told otherwise, with the floors beside the maps whether asked for or not.
`insertion_error` and `deletion_error` say how far an area may be off.

Cost: an image's two end points serve both curves of every method, so m methods and b images take
2 b + 2 m b (n - 1) inputs, in one queue of full batches. A variant is a comparison of ranks, made on the
device when its batch is up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Required, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from heatproof.errors import InputError
from heatproof.explain.api import explain
from heatproof.explain.baselines import baseline_images, mixed
from heatproof.metrics.curves import (
    Faithfulness,
    Plan,
    adaptive_plan,
    area,
    area_errors,
    can_adapt,
    change_steps,
    decided,
    next_points,
    straight_lines,
)
from heatproof.metrics.kit import Cause, Passes, PerImage, raw_maps, same_length
from heatproof.metrics.scene import BatchContext
from heatproof.models.model import Model, as_model
from heatproof.models.queue import Queue
from heatproof.models.running import at_least_float, frozen_eval, memory_format
from heatproof.models.targets import bind_targets
from heatproof.registry import metric, metrics
from heatproof.types import ArrayLike, Images, Maps, constant, per_map, size_of

INSERTION, DELETION = 0, 1
STEPS = 100
DECIDED = "decided"
SAME = 1e-6  # of a value: by less it has not moved
Name = TypeVar("Name", bound=Hashable)  # of a method


class Walk(Passes, total=False):
    """What insertion_deletion takes by name."""

    model: Required[Model | nn.Module]
    images: Required[Images]
    steps: int
    baseline: str
    adaptive: bool | str
    seed: int


@overload
def insertion_deletion(
    maps: Maps | ArrayLike, targets: ArrayLike | None = None, **named: Unpack[Walk]
) -> Faithfulness: ...


@overload
def insertion_deletion(
    maps: Mapping[Name, Maps | ArrayLike], targets: ArrayLike | None = None, **named: Unpack[Walk]
) -> dict[Name, Faithfulness]: ...


def insertion_deletion(
    maps: Maps | ArrayLike | Mapping[Name, Maps | ArrayLike],
    targets: ArrayLike | None = None,
    *,
    model: Model | nn.Module,
    images: Images,
    steps: int = STEPS,
    baseline: str | Tensor = "blur",
    adaptive: bool | str = False,
    seed: int = 0,
    **passes: Unpack[Passes],
) -> Faithfulness | dict[Name, Faithfulness]:
    """Insertion and deletion curves of maps, and the areas under them.

    Args:
        maps: one method's Maps or "b h w" (any size; brought to the image's), or a dict of them by method,
            which gives a dict: all methods go through one queue and share each image's end points.
        targets: the class whose probability counts, one or one per image: the true label, or where None the
            class predicted on the whole image.
        model, images: the network, and what was explained, as for hp.explain.
        steps: points of a curve, without its start.
        baseline: what deleted pixels become: "blur" (Gaussian, sigma 10), "black" (before normalisation),
            "mean" (the image's own, per channel) or "noise" (standard normal, by the seed, the same for every
            image); or model-ready pictures of your own, "b c H W".
        adaptive: visit a third of the points, where the curves bend; "decided": fewer, where the areas are
            known well enough to be compared with those of the floors (random, edges) among the maps.
        seed: of noise.
        passes: batch_size and progress, as for hp.explain.
    """
    model = as_model(model)
    pictures = model.check_images(images).to(model.device)
    model, targets = bind_targets(model, pictures, targets)
    if not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps must be a whole number of at least 1, got {steps!r}")
    if not isinstance(adaptive, bool) and adaptive != DECIDED:
        raise InputError(f"adaptive must be true, false or {DECIDED!r}, got {adaptive!r}")
    if isinstance(maps, Mapping) and not maps:
        raise InputError("maps is an empty dict; give the maps of at least one method")
    methods: Mapping[Any, Maps | ArrayLike] = maps if isinstance(maps, Mapping) else {"": maps}
    walk = _Curves(model, pictures, methods, steps, baseline, seed)
    with frozen_eval(model.module):
        walk.run(Queue(model, walk.size, **passes), targets, adaptive)
    found = walk.results(baseline if isinstance(baseline, str) else "given", adaptive)
    return found if isinstance(maps, Mapping) else found[""]


class _Curves:
    """Every curve of every map, and the inputs that lead to their points.

    A point is one number: its place in `curves`, "2 m n+1" laid flat (insertion and deletion, maps of all
    methods one after the other, steps). A list of such numbers is a list of jobs.
    """

    def __init__(
        self,
        model: Model,
        images: Tensor,
        methods: Mapping[str, Maps | ArrayLike],
        steps: int,
        baseline: str | Tensor,
        seed: int,
    ) -> None:
        self.model, self.steps, self.count = model, steps, len(images)
        self.size = size_of(images)
        # On a GPU in the memory format the model reads, so that variants come out in it.
        layout = memory_format(images) if images.is_cuda else torch.contiguous_format
        self.images, self.baselines = (
            at_least_float(pictures).contiguous(memory_format=layout)
            for pictures in (images, _baselines(model, images, baseline, seed))
        )
        self.methods = tuple(methods)
        values = [raw_maps(one).detach().to(images.device) for one in methods.values()]
        for name, one in zip(methods, values, strict=True):
            same_length(**{"images": images, f"maps{f' of {name}' if name else ''}": one})
        self.flat = torch.cat([constant(one) for one in values])
        self.changes = torch.cat([change_steps(one, self.size, steps) for one in values])
        shape = (2, len(self.changes), steps + 1)
        self.curves = torch.full(shape, torch.nan, dtype=self.images.dtype, device=images.device)
        self.targets = torch.zeros(self.count, dtype=torch.long, device=images.device)
        # Curves are of probabilities; of a head without, shares of the way up from the painted-over picture.
        self.low, self.rise = self.curves.new_zeros(len(self.flat)), self.curves.new_ones(len(self.flat))
        self.stays = torch.zeros_like(self.flat)

    def run(self, queue: Queue, targets: ArrayLike | None, adaptive: bool | str) -> None:
        numbers = torch.arange(self.curves.numel(), device=self.curves.device).view(self.curves.shape)
        ends = numbers[DELETION, : self.count, [0, self.steps]].T
        inner = torch.arange(1, self.steps, device=self.curves.device)
        plan = adaptive_plan(self.steps) if adaptive else Plan(1, ())
        grid = inner[inner % plan.stride == 0]
        points = numbers[:, ~self.flat][..., grid]
        if self.model.head.chance:
            self._visit(queue, torch.cat([ends.flatten(), points.flatten()]), targets, first=True)
        else:
            self._visit(queue, ends.flatten(), targets, first=True)
            self._scale()
            self._visit(queue, points.flatten())
        start, end = self.curves[DELETION, : self.count, [0, self.steps]].T.repeat(1, len(self.methods))
        self.curves[DELETION, :, 0] = self.curves[INSERTION, :, -1] = start.masked_fill(self.flat, torch.nan)
        self.curves[DELETION, :, -1] = self.curves[INSERTION, :, 0] = end.masked_fill(self.flat, torch.nan)
        for more in plan.rounds:
            points = next_points(self.curves, more)
            if adaptive == DECIDED:
                points &= ~self._decided()[:, None]
            self._visit(queue, numbers[points])

    def _scale(self) -> None:
        """From values to shares, once the values of the pictures and of the baselines are known."""
        ends = self.curves[DELETION, : self.count, [0, self.steps]].T
        own, low = ends.repeat(1, len(self.methods))
        self.stays = ~(own - low > SAME * low.abs().clamp(min=1))
        self.low, self.rise = low, torch.where(self.stays, torch.nan, own - low)
        self.curves[DELETION, : self.count, 0], self.curves[DELETION, : self.count, self.steps] = 1.0, 0.0
        self.curves[DELETION, : self.count].masked_fill_(self.stays[: self.count, None], torch.nan)

    def _decided(self) -> Tensor:
        """ "m" bool: maps whose areas need no further point; compared with the floors of the same image."""
        areas, errors = (f(self.curves) for f in (lambda c: area(straight_lines(c)), area_errors))
        floors = [name in metrics.get("insertion").floors for name in self.methods]
        shape, where = (2, -1, self.count), torch.tensor(floors, device=areas.device)
        return decided(areas.view(shape), errors.view(shape), where).flatten()

    def _visit(
        self, queue: Queue, jobs: Tensor, targets: ArrayLike | None = None, first: bool = False
    ) -> None:
        """Fill the points `jobs`. The first visit starts with the whole images, which settle the targets."""

        def make(start: int, stop: int) -> Tensor:
            curve, step = _divmod(jobs[start:stop], self.steps + 1)
            kind, which = _divmod(curve, len(self.changes))
            changed = self.changes[which] <= per_map(step, self.changes)
            shown = changed == per_map(kind == INSERTION, changed)
            return mixed(shown, self.images, self.baselines, which % self.count)

        def read(logits: Tensor, start: int, stop: int) -> Tensor:
            if first and start == 0:
                alike = logits.new_empty(self.count, logits.shape[1])
                self.targets = self.model.check_targets(targets, alike).clone()
            if first and targets is None and start < self.count:
                self.targets[start:stop] = self.model.predicted(logits[: self.count - start])
            chosen = self.targets[jobs[start:stop] // (self.steps + 1) % self.count]
            return self.model.measured(logits, chosen)

        if len(jobs):
            found = queue.predict(len(jobs), make, read).to(self.curves.dtype)
            if not self.model.head.chance:
                maps = jobs // (self.steps + 1) % len(self.changes)
                found = (found - self.low[maps]) / self.rise[maps]
            self.curves.view(-1)[jobs] = found

    def results(self, baseline: str, adaptive: bool | str) -> dict[Any, Faithfulness]:
        inner = (~self.curves[..., 1:-1].isnan()).sum((0, 2)).view(-1, self.count)
        errors = area_errors(self.curves).unflatten(1, (-1, self.count))
        insertion, deletion = straight_lines(self.curves).unflatten(1, (-1, self.count))
        flat = self.flat.view(-1, self.count)
        return {
            name: Faithfulness(
                insertion[i],
                deletion[i],
                insertion_auc=area(insertion[i]),
                deletion_auc=area(deletion[i]),
                targets=self.model.head.labels(self.targets),
                baseline=baseline,
                adaptive=adaptive,
                passes=int(inner[i].sum()) + 2 * self.count,
                flat=flat[i],
                insertion_error=errors[INSERTION, i],
                deletion_error=errors[DELETION, i],
                points=inner[i] + 4,
                causes=(Cause(not_above(self.model.head.name), self.stays.view(-1, self.count)[i].cpu()),),
            )
            for i, name in enumerate(self.methods)
        }


def _baselines(model: Model, images: Tensor, baseline: str | Tensor, seed: int) -> Tensor:
    if isinstance(baseline, str):
        return baseline_images(model, images, baseline, seed)
    same_length(images=images, baseline=baseline)
    return baseline.to(images)


def not_above(head: str) -> str:
    """Why a head without probabilities has no curves for a picture."""
    return (
        f"the head is {head!r}, and its value for the picture is not above that for the painted-over one, "
        "so there is nothing to lose"
    )


def _divmod(numbers: Tensor, by: int) -> tuple[Tensor, Tensor]:
    return numbers // by, numbers % by


def _in_a_run(
    function: Callable[..., Any], scene: BatchContext, options: dict[str, Any]
) -> dict[str, PerImage]:
    """Adaptive unless the study says otherwise, or asks for so few steps that there is nothing to save."""
    options = {"adaptive": can_adapt(options.get("steps", STEPS)) and DECIDED, **options}
    maps = dict(scene.maps)
    if options["adaptive"] == DECIDED:
        maps |= _absent_floors(scene)
    images = {"model": scene.model, "images": scene.batch.images, **scene.passes}
    found = function(maps, scene.classes, **images, **options)
    return {method: found[method].scores for method in scene.maps}


def _absent_floors(scene: BatchContext) -> dict[str, Maps]:
    """What walks are decided against, where nobody asked for it: a method added later walks as the others."""
    names = [floor for floor in metrics.get("insertion").floors if floor not in scene.maps]
    if not names:
        return {}
    images, options = scene.batch.images, {"layer": scene.layer, "allow_nan": True, **scene.passes}
    made = explain(scene.model, images, names, scene.classes, **options)
    return {name: scene.then(one) if scene.then else one for name, one in made.items()}


for _name, _better, _done in (("insertion", True, "shown"), ("deletion", False, "removed")):
    metric(
        _name, needs=("model", "images", "maps", "labels"), higher_is_better=_better, bounds=(0.0, 1.0),
        cite="petsiuk2018rise", aliases=(f"{_name}_auc",),
        about=f"Mean probability of the class while the map's strongest pixels are {_done} first.",
        title=f"{_name}: evidence {_done} first", family="Faithfulness", bundle="insertion_deletion",
        call=_in_a_run, question="map", headline=True, volumes=True,
    )(insertion_deletion)  # fmt: skip
