"""What a network uses: interventions that move, remove or exchange the evidence of correctly answered images.

A donor is a correctly answered image x of class c with a map of c; its recipients R are correctly answered
images of other classes (8, drawn by the seed). O is the annotated object, where there is one.

    transplant   P: the K x K window with the largest mean of the map, of those of which less than 35 % lies
                 in O, and that hold no pixel of a part of O smaller than the window. turned(P) = share of R
                 whose answer becomes c when the pixels of P off O are pasted at their own position. Control:
                 a random window of the same image under the same rule.
    recurring    the same without the rule about O; patches with turned >= 1/2 that look alike (normalised
                 correlation of the central part of one inside the other above 0.7) form a group.
    removal      O replaced by the image's mean colour: share of donors that keep c, and the share of
                 images of other classes that get c in the same way.
    exchange     pointing game and inside share of the donor's own map, less the mean over the maps of other
                 images laid over the same O: centre bias and borders cancel.
    properties   whole-image properties (properties.py) transferred from donors of c to images of other
                 classes. Control: the same transfer from a donor of the recipient's own class.

A patch that turns none of the first half of its recipients is not pasted into the others, and there are no
controls for a class in which nothing turns. Images that are near-duplicates of an earlier one are no donors.
Cite: none; the tests are this project's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import label as label_parts
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.errors import InputError
from heatproof.explain.api import explain, is_stored
from heatproof.explain.baselines import baseline_images, gaussian_blur, is_floor
from heatproof.images.duplicates import SIDE, near_duplicates
from heatproof.metrics.evidence_record import (
    HALF,
    LARGEST,
    PARTNERS,
    EvidenceItem,
    EvidenceRecord,
    Example,
    ExchangeTest,
    Numbers,
    PatchTest,
    PropertyTest,
    RemovalTest,
)
from heatproof.metrics.kit import ImagePool, Passes, align, as_tensor, pixel_maps, refuse_volumes
from heatproof.metrics.localisation import object_regions
from heatproof.metrics.properties import FILE_TRANSFERS, region_mask, transfers
from heatproof.metrics.sanity import Layers
from heatproof.models.heads import Multilabel
from heatproof.models.model import Model, Queue, all_logits, as_model
from heatproof.models.running import frozen_eval
from heatproof.registry import metric
from heatproof.show import pixels
from heatproof.types import ArrayLike, Batch, Images, Maps, size_of

SIDES = (1 / 5,)  # of the image's shorter side
OFF_OBJECT = 0.35  # share of a window in O, from which on it lies on the object
RECIPIENTS = 8
DONORS = 40  # of each class, at most
ALIKE = 0.7  # correlation of patches that look alike
PATCH, CENTRAL = 24, 0.6  # pixels at which patches are compared; side of the central part
FLAT, FLAT_COLOUR = 0.02, 0.2  # deviation of a patch without contrast, and distance of equal colours
SURE = 1e-6  # of a probability: log-odds stay between -13.8 and 13.8
TOP = 5
BUDGET = 0.2  # of the exchange test's inside share
FIRST_PAIRS, MORE_PAIRS, PROMISING = 16, 64, 0.2  # of a property, over all classes; excess that gets more
MOST_ITEMS, MOST_CROPS, MOST_EXAMPLES = 3, 8, 3  # of a class; of an item
FILLS = ("blur", "mean")
METHODS = ("gradcam",)  # whose maps choose the windows
IN_A_RUN = 400  # images of a checkpoint, at most
Files = Sequence[Image.Image | None] | None


class Pair(NamedTuple):
    """Images of a transfer: a donor of the class, a recipient, a control donor of the recipient's class."""

    label: int
    donor: int
    recipient: int
    control: int


def _in_a_run(function: Callable[..., Any], pool: ImagePool, options: dict[str, Any]) -> EvidenceRecord:
    """Run the interventions on all images of a checkpoint, by the maps of its first method."""
    batches = pool.annotated(IN_A_RUN)
    labels = [batch.labels if batch.findings is None else batch.findings for batch in batches]
    if not batches or any(own is None for own in labels):
        raise InputError("evidence needs labels, and the images have none")
    own = [name for name in pool.methods if not is_floor(name) and not is_stored(name)]
    record: EvidenceRecord = function(
        torch.cat([own for own in labels if own is not None]), model=pool.model,
        images=torch.cat([batch.images for batch in batches]), methods=own[:1] or METHODS,
        regions=torch.cat([_regions_of(batch) for batch in batches]), layer=pool.layer, classes=pool.classes,
        ids=[name for batch in batches for name in batch.ids], **pool.passes, **options,
    )  # fmt: skip
    return record


def _regions_of(batch: Batch) -> Tensor:
    """Masks "b H W" of the annotated objects; "b k H W" where each label has its own."""
    if not batch.by_finding:
        return object_regions(batch.truth, batch.images)
    assert batch.findings is not None
    own = torch.zeros(*batch.findings.shape, *size_of(batch.images), dtype=torch.bool)
    for finding, truth in batch.by_finding.items():
        own[:, finding] = object_regions(truth, batch.images)
    return own


@metric(
    "evidence", needs=("model", "images", "labels"), level="checkpoint", family="Evidence", floors=(),
    question="network", votes=True, higher_is_better=False, bounds=(-1.0, 1.0), cite="", call=_in_a_run,
    title="patches off the object that turn other images",
    parts={"recurring": "recurring patches that turn other images",
           "property": "largest effect of a whole-image property",
           "removal": "answers kept without the object, above those of other images",
           "exchange": "position of the maps above that of other images' maps", "n": "donors"},
)  # fmt: skip
def evidence(
    labels: ArrayLike, *, model: Model | nn.Module, images: Images, maps: Mapping[str, Maps] | None = None,
    methods: Sequence[str] = METHODS, regions: ArrayLike | None = None, ids: Sequence[str] = (),
    classes: Sequence[str] = (), files: Files = None, layer: Layers = None,
    sides: Sequence[float] = SIDES, donors: int = DONORS, recipients: int = RECIPIENTS, seed: int = 0,
    **passes: Unpack[Passes],
) -> EvidenceRecord:  # fmt: skip
    """Run all interventions on one network.

    Args:
        labels: "b" classes, or "b k" of 0 and 1 for multi-label images.
        model, images: the network, and its images, model-ready "b c H W".
        maps: by method, of each image's own class, from `hp.explain`; default: `methods` are computed.
        methods: whose maps choose the windows: name those that follow the network.
        regions: "b H W", the annotated objects, or "b k H W", those of each label; an image without a pixel
            has no annotation.
        ids, classes: names of the images, and of the classes by number.
        files: the image files as they were before preprocessing, for their size and compression.
        layer: of CAMs, as for hp.explain.
        sides: of the windows, as shares of the image's shorter side.
        donors, recipients: the largest number of donors of each class, and of recipients of each donor.
        seed: of recipients, control windows and pairs.
        passes: batch_size and progress, as for hp.explain.

    Returns:
        Numbers of every donor, and what was found, with images.

    Example:
        >>> network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> images = torch.eye(3).repeat(2, 1).view(6, 3, 1, 1) + torch.rand(6, 3, 16, 16)
        >>> record = evidence([0, 1, 2] * 2, model=network, images=images, methods=["gradient"])
        >>> record.answered, len(record.label)
        (6, 6)
    """
    tests = Interventions(as_model(model), images, labels, maps, methods, regions, layer, donors, recipients,
                          seed, **passes)  # fmt: skip
    names = tuple(ids) or tuple(map(str, range(len(tests.images))))
    record = tests.record(sides, names, tuple(classes), files)
    items = [*tests.patch_items(record), *tests.property_items(record, files)]
    return replace(record, items=tuple(items), inputs=tests.inputs)


def answers(model: Model, logits: Tensor) -> Tensor:
    """Bool tensor "b k": the predicted class, or the predicted labels."""
    if isinstance(model.head, Multilabel):
        return model.head.positive(logits)
    return F.one_hot(model.predicted(logits), model.head.targets(logits.shape[1])).bool()


class Interventions:
    """Donors, their recipients and maps, and the tests on them."""

    def __init__(
        self, model: Model, images: Images, labels: ArrayLike, maps: Mapping[str, Maps] | None = None,
        methods: Sequence[str] = METHODS, regions: ArrayLike | None = None, layer: Layers = None,
        donors: int = DONORS, recipients: int = RECIPIENTS, seed: int = 0, **passes: Unpack[Passes],
    ) -> None:  # fmt: skip
        """Choose donors and recipients and compute the donors' maps; arguments as for `evidence`."""
        self.model, self.seed, self.passes = model, seed, passes
        self.images = model.check_images(images).to(model.device)  # "b c H W"
        refuse_volumes("evidence", size_of(self.images))
        self.logits = all_logits(model, self.images, **passes)  # "b k"; the first pass determines the head
        if not (model.head.one_class or isinstance(model.head, Multilabel)):
            raise model.head.refused("classes of whole images, which evidence needs")
        truth = self._truth(as_tensor(labels).cpu())
        says = answers(model, self.logits).cpu()
        # An image is a donor of a class that it has and gets, and a recipient of classes that it has not
        # and does not get; with one class per image, recipients must be answered correctly too.
        self.is_right, self.is_other = truth & says, ~truth & ~says  # "b k" bool
        if np.ndim(labels) == 1:
            self.is_other &= self.is_right.any(1, keepdim=True)
        self.image, self.label, self.recipients = self._donors(donors, recipients)  # "e", "e", "e r"
        rows, targets = torch.from_numpy(self.image), torch.from_numpy(self.label)
        if maps is None:
            given = self.images[rows.to(self.images.device)]
            maps = explain(model, given, list(methods), targets, layer=layer, seed=seed, **passes)
        else:
            maps = {name: own.take(rows) for name, own in maps.items()}
            if any(not torch.equal(own.explained.cpu(), targets) for own in maps.values()):
                raise InputError("the maps explain other classes than the labels; explain the labels")
        self.methods, size = list(maps), self.size
        heats = [pixel_maps(own, size).to(self.images.device) for own in maps.values()]
        self.heat = torch.stack(heats).mean(0)  # "e H W": mean of the normalised maps
        self.regions: Tensor | None = None  # "b H W" bool: all annotated objects
        self.own_regions: Tensor | None = None  # "e H W" bool: those of the donor's label
        objects = None if regions is None else as_tensor(regions)
        if objects is not None and bool(objects.any()):
            together = objects.any(1) if objects.ndim == 4 else objects
            self.regions = align(together, size, self.images, "regions").expand(len(self.images), *size)
            self.own_regions = self.regions[rows.to(self.regions.device)]
            if objects.ndim == 4:
                self.own_regions = align(objects[rows, targets], size, self.heat, "regions")
        self.transfers = transfers(size, self.regions is not None)  # of whole-image properties, by name
        self.inputs = len(self.images) + len(self.image)  # that went through the network so far

    def _truth(self, labels: Tensor) -> Tensor:
        """Bool tensor "b k" of the labels, checked."""
        if len(labels) != len(self.images):
            raise InputError(
                f"there are {len(labels)} labels for {len(self.images)} images; give one for each"
            )
        if labels.ndim > 1:
            return labels.bool()
        width, low, high = self.model.head.targets(self.logits.shape[1]), int(labels.min()), int(labels.max())
        if low < 0 or high >= width:
            raise InputError(
                f"labels reach from {low} to {high}, but the network has the "
                f"classes 0 to {width - 1}; order the labels as its outputs"
            )
        return F.one_hot(labels.long(), width).bool()

    def _donors(self, donors: int, recipients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Image and class "e" of each donor, and its recipients "e r", at most so many of each."""
        thumbnails = F.interpolate(self.images.float().cpu(), (SIDE, SIDE), mode="area")
        drawn = pixels(thumbnails, self.model.preprocess if self.is_restored else None)
        is_first = torch.from_numpy(near_duplicates(drawn) == np.arange(len(drawn)))
        rng = np.random.default_rng(self.seed)
        chosen: list[tuple[int, int, np.ndarray]] = []
        for c in self.is_right.any(0).nonzero().flatten().tolist():
            own = (self.is_right[:, c] & is_first).nonzero().flatten().numpy()
            others = (self.is_other[:, c] & is_first).nonzero().flatten().numpy()
            if len(others):
                own = own if len(own) <= donors else np.sort(rng.permutation(own)[:donors])
                chosen += [
                    (i, c, np.resize(rng.permutation(others), recipients)[:recipients]) for i in own.tolist()
                ]
        if not chosen:
            count = int(self.is_right.any(1).sum())
            raise InputError(
                f"no image can be tested: {count} of {len(self.images)} images are answered "
                "correctly, and correct images of at least two classes are needed; give more labelled images"
            )
        image, label, rows = map(list, zip(*chosen, strict=True))
        return np.array(image), np.array(label), np.stack(rows)

    @property
    def size(self) -> tuple[int, int]:
        return int(self.images.shape[-2]), int(self.images.shape[-1])

    @cached_property
    def odds(self) -> Tensor:
        """Tensor "b k" on the host: log-odds of every class of the unchanged images."""
        return self.model.probabilities(self.logits).clamp(SURE, 1 - SURE).logit().cpu()

    @cached_property
    def annotated(self) -> Tensor:
        """Bool tensor "b": images with a region."""
        if self.regions is None:
            return torch.zeros(len(self.images), dtype=torch.bool)
        return self.regions.flatten(1).any(1).cpu()

    @cached_property
    def is_marked(self) -> np.ndarray:
        """Bool array "e": donors with a region of their label."""
        assert self.own_regions is not None
        return np.asarray(self.own_regions.flatten(1).any(1).cpu().numpy())

    @cached_property
    def part_weights(self) -> Tensor:
        """Tensor "e H W" on the host: 1 / area of the connected part of O that a pixel lies in, 0 off O.

        Its sum over a window is the share of a part that the window contains. A window with pixels of a part
        smaller than itself is never off the object, although the part fills little of it.
        """
        assert self.own_regions is not None
        weights = np.zeros(self.own_regions.shape, np.float32)
        for own, region in zip(weights, self.own_regions.cpu().numpy(), strict=True):
            parts, count = label_parts(region, np.ones((3, 3)))
            if count:
                own[region] = 1 / np.bincount(parts[region])[parts[region]]
        return torch.from_numpy(weights)

    def record(
        self, sides: Sequence[float], ids: tuple[str, ...], classes: tuple[str, ...], files: Files
    ) -> EvidenceRecord:
        """All tests, without images; arguments as for `evidence`."""
        off, anywhere = self.transplants(sides)
        return EvidenceRecord(
            ids, classes, tuple(self.methods), tuple(self.image.tolist()), tuple(self.label.tolist()),
            self.regions is not None, off, anywhere, self.removal(), self.exchange(), self.properties(files),
            self.object_shares(), tuple(test.side**2 / math.prod(self.size) for test in off),
            inputs=self.inputs, answered=int(self.is_right.any(1).sum()),
        )  # fmt: skip

    def transplants(self, sides: Sequence[float]) -> tuple[tuple[PatchTest, ...], tuple[PatchTest, ...]]:
        """By side: windows off the object, and windows anywhere; without regions these are the same."""
        off = tuple(self.transplant(side, off_object=True) for side in sides)
        if self.regions is None:
            return off, off
        return off, tuple(self.transplant(side, off_object=False) for side in sides)

    def outcomes(self, count: int, make: Callable[[Tensor], Tensor], label: np.ndarray) -> np.ndarray:
        """Array "count 3": whether class label[j] is answered, is among the first five, and its log-odds."""
        if not count:
            return np.zeros((0, 3))
        targets, model = torch.from_numpy(np.asarray(label)).to(self.images.device), self.model

        def read(logits: Tensor, start: int, stop: int) -> Tensor:
            own, table = targets[start:stop, None], model.probabilities(logits)
            above = (table > table.gather(1, own)).sum(1)
            chance = table.gather(1, own)[:, 0].clamp(SURE, 1 - SURE).logit()
            return torch.stack([answers(model, logits).gather(1, own)[:, 0], above < TOP, chance], 1).float()

        queue = Queue(model, self.size, **self.passes)
        with frozen_eval(model.module):
            jobs = torch.arange(count, device=self.images.device)
            result = queue.predict(count, lambda start, stop: make(jobs[start:stop]), read)
        self.inputs += count
        return np.asarray(result.double().cpu().numpy())

    def transplant(self, side: float, off_object: bool) -> PatchTest:
        """Transplants of windows of one size."""
        k = max(1, round(side * min(self.size)))
        means = pooled(F.avg_pool2d, self.heat, k).cpu()
        shares = torch.full_like(means, math.nan)
        if self.own_regions is not None:
            covered = pooled(F.avg_pool2d, self.own_regions.float(), k).cpu()
            contained = k * k * pooled(F.avg_pool2d, self.part_weights, k)
            shares = torch.maximum(covered, contained.clamp(max=1))
            holds_small_part = pooled(F.max_pool2d, self.part_weights, k) > 1 / k**2
            shares[~torch.from_numpy(self.is_marked)] = math.nan
        allowed = torch.ones_like(means, dtype=torch.bool)
        if off_object and self.regions is not None:
            # False for NaN: an image without a region has no window.
            allowed = (shares < OFF_OBJECT) & ~holds_small_part
        means = means.masked_fill(~allowed, -1)
        best = means.flatten(1).argmax(1).numpy()
        has = (means.flatten(1).amax(1) > 0).numpy()
        rng = np.random.default_rng((self.seed, k, off_object))
        wide = means.shape[-1]
        random = [int(rng.choice(np.flatnonzero(own))) if known else 0
                  for own, known in zip(allowed.flatten(1).numpy(), has, strict=True)]  # fmt: skip
        tops, controls = (np.stack(np.divmod(np.array(at), wide), 1) for at in (best, random))
        own, own_soft = self._pasted(k, tops, has, off_object, feather=True)
        # Patches on the object need controls only where they are listed.
        turning = np.nan_to_num(own[0]) >= HALF
        compared = np.isin(self.label, self.label[turning]) if off_object else turning
        control, _ = self._pasted(k, controls, has & compared, off_object)
        over = shares.flatten(1).numpy()[np.arange(len(best)), best]
        corners = [(int(y), int(x)) if known else (-1, -1) for (y, x), known in zip(tops, has, strict=True)]
        partners, groups = self._alike(k, corners, own[0])
        shares_of = [numbers(column) for column in (*own, *control)]
        turned, top5, gain, control_turned, control_top5, control_gain = shares_of
        return PatchTest(
            k, tuple(corners), turned, top5, gain, control_turned, control_top5, control_gain,
            numbers(own_soft), numbers(np.where(has, over, np.nan)), partners, groups,
        )  # fmt: skip

    def _pasted(
        self, k: int, corners: np.ndarray, has: np.ndarray, off: bool, feather: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Array "3 e": share turned, share among the first five, mean gain; and turned if feathered."""
        n, count = len(corners), self.recipients.shape[1]
        table = np.full((n, count, 3), np.nan)
        half = (count + 1) // 2
        first = [(e, r) for e in np.flatnonzero(has).tolist() for r in range(half)]
        self._paste_into(table, first, k, corners, off)
        promising = np.flatnonzero(np.nan_to_num(table[:, :half, 0]).any(1)).tolist()
        self._paste_into(table, [(e, r) for e in promising for r in range(half, count)], k, corners, off)
        table[..., 2] -= self.odds.numpy()[self.recipients, self.label[:, None]]
        # A patch that turns none of the first half counts as turning none of the others.
        turned, top5 = (
            np.nansum(table[..., i], 1) / np.where(i == 0, count, np.isfinite(table[..., i]).sum(1).clip(1))
            for i in (0, 1)
        )
        gain = np.nansum(table[..., 2], 1) / np.isfinite(table[..., 2]).sum(1).clip(1)
        shares = np.where(has, np.stack([turned, top5, gain]), np.nan)
        soft = np.full(n, np.nan)
        strong = np.flatnonzero(np.nan_to_num(shares[0]) >= HALF).tolist() if feather else []
        if strong:
            again = np.full((n, count, 3), np.nan)
            jobs = [(e, r) for e in strong for r in range(half)]
            self._paste_into(again, jobs, k, corners, off, soft=True)
            soft[strong] = again[strong, :half, 0].mean(1)
        return shares, soft

    def _paste_into(
        self, table: np.ndarray, jobs: list[tuple[int, int]], k: int, corners: np.ndarray, off: bool,
        soft: bool = False,
    ) -> None:  # fmt: skip
        """Fill table[e, r] with the outcomes of pasting donor e's window into its recipient r."""
        if not jobs:
            return
        e, r = np.array(jobs).T
        make = self._paste(e, self.recipients[e, r], k, corners[e], off, soft)
        table[e, r] = self.outcomes(len(jobs), make, self.label[e])

    def _paste(
        self, donors: np.ndarray, recipients: np.ndarray, k: int, corners: np.ndarray, off: bool,
        soft: bool = False,
    ) -> Callable[[Tensor], Tensor]:  # fmt: skip
        """Function that builds inputs: recipients with the donors' windows at their own positions.

        off: without the pixels of the donor's object, whose border a window may contain.
        """
        at = self.images.device
        source, target, corner, image = (
            torch.from_numpy(np.asarray(x)).to(at) for x in (donors, recipients, corners, self.image)
        )
        rows, columns = (torch.arange(n, device=at) for n in self.size)

        def make(jobs: Tensor) -> Tensor:
            top, left = corner[jobs, 0, None], corner[jobs, 1, None]
            tall, broad = (rows >= top) & (rows < top + k), (columns >= left) & (columns < left + k)
            inside = (tall[:, :, None] & broad[:, None, :])[:, None]
            given, changed = self.images[image[source[jobs]]], self.images[target[jobs]]
            if off and self.own_regions is not None:
                inside = inside & ~self.own_regions[source[jobs]][:, None]
            if not soft:
                return torch.where(inside, given, changed)
            return torch.lerp(changed, given, inside * gaussian_blur(inside.to(changed.dtype), k / 8))

        return make

    def _alike(
        self, k: int, corners: Sequence[tuple[int, int]], turned: np.ndarray
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By donor: near-identical patches of its class among those that turn half; number of its group."""
        n = len(corners)
        partners, groups, number = np.zeros(n, int), np.full(n, -1), 0
        for c in np.unique(self.label):
            own = np.flatnonzero((self.label == c) & (np.nan_to_num(turned) >= HALF))
            if not len(own):
                continue
            alike = (
                similarities(torch.cat([self._patch(e, k, corners[e]) for e in own.tolist()])).numpy() > ALIKE
            )
            np.fill_diagonal(alike, True)
            partners[own] = alike.sum(1) - 1
            _, parts = connected_components(alike)
            groups[own] = number + parts
            number += int(parts.max()) + 1
        return tuple(partners.tolist()), tuple(groups.tolist())

    def _patch(self, donor: int, k: int, corner: tuple[int, int]) -> Tensor:
        """The donor's window at the size at which patches are compared, "1 c PATCH PATCH"."""
        top, left = corner
        window = self.images[int(self.image[donor])][None, :, top : top + k, left : left + k].float().cpu()
        return F.interpolate(window, (PATCH, PATCH), mode="bilinear", antialias=True, align_corners=False)

    def removal(self) -> RemovalTest | None:
        """Answers after regions are replaced by the mean colour: a donor's own, all of other images."""
        if self.regions is None or self.own_regions is None:
            return None
        donors = np.flatnonzero(self.is_marked)
        kept = np.full(len(self.image), np.nan)
        kept[donors] = self._without(self.own_regions[donors], self.image[donors])[
            np.arange(len(donors)), self.label[donors]
        ]
        labels = np.unique(self.label)
        other = self.is_other.numpy()[:, labels] & self.annotated.numpy()[:, None]
        rows = np.flatnonzero(other.any(1))
        says = np.zeros_like(other)
        says[rows] = self._without(self.regions[rows], rows)[:, labels]
        counts = zip(labels.tolist(), other.sum(0).tolist(), (other & says).sum(0).tolist(), strict=True)
        return RemovalTest(numbers(kept), {c: (n, k) for c, n, k in counts})

    def _without(self, regions: Tensor, rows: np.ndarray) -> np.ndarray:
        """Bool array "n k": answers to images whose region is removed."""
        images = self.images[torch.from_numpy(rows).to(self.images.device)]
        images = torch.where(regions[:, None], baseline_images(self.model, images, "mean"), images)
        self.inputs += len(images)
        return np.asarray(answers(self.model, all_logits(self.model, images, **self.passes)).cpu().numpy())

    def object_shares(self) -> Numbers:
        """By donor: share of the image that its region covers."""
        if self.own_regions is None:
            return ()
        shares = self.own_regions.flatten(1).float().mean(1).cpu().numpy()
        return numbers(np.where(shares > 0, shares, np.nan))

    def exchange(self) -> ExchangeTest | None:
        """Position scores of each donor's map, less those of other images' maps on the same region."""
        if self.own_regions is None:
            return None
        heat = self.heat.flatten(1).cpu()
        regions = self.own_regions.flatten(1).cpu().float()
        best = heat.topk(max(1, int(BUDGET * heat.shape[1])), dim=1).indices
        marked = torch.zeros_like(heat).scatter_(1, best, 1.0) * (heat > 0)
        inside = (regions @ marked.T) / marked.sum(1).clamp(min=1)  # "e e": region of i, map of j
        pointing = regions[:, heat.argmax(1)]
        other = torch.from_numpy(self.image[:, None] != self.image[None, :]) & (heat.amax(1) > 0)[None]
        defined = self.is_marked & ((heat.amax(1) > 0) & other.any(1)).numpy()
        columns = []
        for table in (pointing, inside):
            usual = (table * other).sum(1) / other.sum(1).clamp(min=1)
            columns.append(np.where(defined, (table.diagonal() - usual).numpy(), np.nan))
        return ExchangeTest(*map(numbers, columns))

    @cached_property
    def colours(self) -> Tensor:
        """The images in [0, 1] if the preprocessing is known, else as they are."""
        return self.model.preprocess.restore(self.images) if self.is_restored else self.images

    @property
    def is_restored(self) -> bool:
        return self.model.preprocess.channels == self.images.shape[1]

    @cached_property
    def weights(self) -> Tensor:
        """Tensor "b H W": 1 off the object, from which properties are estimated."""
        if self.regions is None:
            return torch.ones(len(self.images), *self.size, device=self.images.device)
        return (~self.regions).float()

    def properties(self, files: Files) -> tuple[PropertyTest, ...]:
        """Transfers of whole-image properties; promising ones get more pairs."""
        pairs, tests = self._pairs(), []
        for name in (*self.transfers, *(FILE_TRANSFERS if files else ())):
            usable = [pair for pair in pairs if self._has_property(name, pair, files)]
            first = usable[: max(FIRST_PAIRS, 2 * len({pair.label for pair in usable}))]
            turned = self._transferred(name, first, files)
            excess, classes = turned[:, 0] - turned[:, 1], np.array([pair.label for pair in first])
            promising = {c for c in {*classes.tolist()} if excess[classes == c].mean() >= PROMISING}
            more = [pair for pair in usable[len(first) :] if pair.label in promising][:MORE_PAIRS]
            turned = np.concatenate([turned, self._transferred(name, more, files)]).astype(bool)
            columns = zip(*[*first, *more], strict=True) if first else [()] * 4
            label, donor, recipient, _ = map(tuple, columns)
            tests.append(PropertyTest(name, label, donor, recipient, *map(tuple, turned.T.tolist())))
        return tuple(tests)

    def _pairs(self) -> list[Pair]:
        """Pairs of donors and recipients with a control donor, classes in turn."""
        rng, right = np.random.default_rng((self.seed, 1)), self.is_right.numpy()
        by_class: dict[int, list[Pair]] = {}
        for c in np.unique(self.label).tolist():
            pairs = []
            for e in np.flatnonzero(self.label == c).tolist():
                for recipient in sorted(set(self.recipients[e].tolist())):
                    # Of the recipient's own class; with several labels, any image without this label.
                    alike = right[:, right[recipient]].any(1) if right[recipient].any() else True
                    own = np.flatnonzero(alike & self.is_other[:, c].numpy())
                    own = own[own != recipient]
                    if len(own):
                        pairs.append(Pair(c, int(self.image[e]), recipient, int(rng.choice(own))))
            by_class[c] = [pairs[i] for i in rng.permutation(len(pairs))]
        return [pair for row in zip_longest(*by_class.values()) for pair in row if pair is not None]

    def _has_property(self, name: str, pair: Pair, files: Files) -> bool:
        """Whether both donors have the region off their object, or a file."""
        if name in FILE_TRANSFERS:
            return files is not None and all(files[i] is not None for i in pair[1:])
        mask = region_mask(name, self.size)
        if self.regions is None or (mask is None and name != "background"):
            return True
        if mask is None:
            return bool(self.annotated[list(pair[1:])].all())
        inside = self.regions[[pair.donor, pair.control]][:, mask.to(self.regions.device)].float().mean(1)
        return bool((inside < OFF_OBJECT).all())

    def _transferred(self, name: str, pairs: Sequence[Pair], files: Files) -> np.ndarray:
        """Array "p 2": whether the answer becomes the class, by the donor and by the control donor."""
        if not pairs:
            return np.zeros((0, 2))
        label, donor, recipient, control = np.array(pairs).T
        turned = np.zeros((len(pairs), 2))

        def run(column: int, sources: np.ndarray, rows: np.ndarray) -> None:
            made = self._transfer(name, sources[rows], recipient[rows], files)
            turned[rows, column] = self.outcomes(len(rows), made, label[rows])[:, 0]

        run(0, donor, np.arange(len(pairs)))
        run(1, control, np.flatnonzero(np.isin(label, label[turned[:, 0] > 0])))
        return turned

    def _transfer(
        self, name: str, source: np.ndarray, target: np.ndarray, files: Files
    ) -> Callable[[Tensor], Tensor]:
        """Function that builds inputs: targets with the property of the sources."""
        preprocess, at = self.model.preprocess, self.images.device

        def make(jobs: Tensor) -> Tensor:
            to, other = (which[jobs.cpu().numpy()] for which in (target, source))
            if name in FILE_TRANSFERS:
                assert files
                both = zip(to, other, strict=True)
                return torch.stack(
                    [preprocess(FILE_TRANSFERS[name](files[i], files[j])) for i, j in both]
                ).to(at)
            to, other = (torch.from_numpy(which).to(at) for which in (to, other))
            changed = self.transfers[name](
                self.colours[to], self.colours[other], self.weights[to], self.weights[other]
            )
            return preprocess.normalise(changed.clamp(0, 1)) if self.is_restored else changed

        return make

    def patch_items(self, record: EvidenceRecord) -> list[EvidenceItem]:
        """Groups of patches that turn half of their recipients, the largest of each class first."""
        items: list[EvidenceItem] = []
        tests = [(record.anywhere[-1], True)]
        if self.regions is not None:  # windows on the object are only listed from the search without a rule
            tests = [(record.off_object[-1], True), (record.anywhere[-1], False)]
        for c in np.unique(self.label).tolist():
            for test, every in tests:
                listed = (self.label == c) & (
                    every | (np.nan_to_num(np.array(test.on_object, float)) >= OFF_OBJECT)
                )
                groups = np.where(listed, np.array(test.group), -1)
                numbers, counts = np.unique(groups[groups >= 0], return_counts=True)
                recurring = numbers[counts > PARTNERS][np.argsort(-counts[counts > PARTNERS], kind="stable")]
                items += [self._patch_item(record, test, np.flatnonzero(groups == g), True)
                          for g in recurring[:MOST_ITEMS]]  # fmt: skip
                others = np.flatnonzero((groups >= 0) & ~np.isin(groups, recurring))
                if len(others) > 1:
                    items.append(self._patch_item(record, test, others, False))
        return items

    def _patch_item(
        self, record: EvidenceRecord, test: PatchTest, donors: np.ndarray, recurring: bool
    ) -> EvidenceItem:
        c, count = int(self.label[donors[0]]), self.recipients.shape[1]
        off = test is record.off_object[-1]
        turned, control = (np.array(column, float)[donors] for column in (test.turned, test.control_turned))
        corners = np.array(test.corners)[donors]
        over = np.array(test.on_object, float)[donors]
        order = np.argsort(-turned, kind="stable")
        chosen = donors[order][:MOST_EXAMPLES]
        own = self._examples(record, chosen, test.side, corners[order][:MOST_EXAMPLES], off, wanted=c)
        beside = self._examples(
            record, chosen[:1], test.side, self._controls(test, chosen[:1]), off, wanted=None
        )
        changed = self._changed_without(test.side, donors, corners)
        elsewhere = self._changed_without(test.side, donors, self._controls(test, donors))
        drawn = self._drawn(
            self.images[torch.from_numpy(self.image[donors[order][:MOST_CROPS]]).to(self.images.device)]
        )
        cuts = zip(drawn, corners[order][:MOST_CROPS].tolist(), strict=True)
        crops = tuple(image[top : top + test.side, left : left + test.side] for image, (top, left) in cuts)
        return EvidenceItem(
            "patch", "", c, len(donors), int((self.label == c).sum()), len(donors) * count,
            round(float(turned.sum() * count)), len(donors) * count, round(float(np.nansum(control) * count)),
            recurring, None if np.isnan(over).all() else float(np.nanmean(over)), len(donors),
            int(changed.sum()), int(elsewhere.sum()), crops, own, beside[0] if beside else None,
        )  # fmt: skip

    def _controls(self, test: PatchTest, donors: np.ndarray) -> np.ndarray:
        """Windows of the donors far from their own: mirrored at the centre of the image."""
        return np.asarray(np.array(self.size) - test.side - np.array(test.corners)[donors])

    def _changed_without(self, k: int, donors: np.ndarray, corners: np.ndarray) -> np.ndarray:
        """Bool "d": whether removing the window, by blur or mean colour, changes the donor's answer."""
        images = self.images[torch.from_numpy(self.image[donors]).to(self.images.device)]
        where = torch.zeros(len(donors), *self.size, dtype=torch.bool, device=images.device)
        for mask, (top, left) in zip(where, corners.tolist(), strict=True):
            mask[top : top + k, left : left + k] = True
        inputs = torch.cat(
            [torch.where(where[:, None], baseline_images(self.model, images, fill), images) for fill in FILLS]
        )
        says = self.outcomes(len(inputs), lambda jobs: inputs[jobs], np.tile(self.label[donors], len(FILLS)))
        return np.asarray((says[:, 0] == 0).reshape(len(FILLS), -1).any(0))

    def _drawn(self, images: Tensor) -> np.ndarray:
        """Images "b h w 3" uint8, at most LARGEST pixels wide."""
        scale = min(1.0, LARGEST / max(self.size))
        if scale < 1:
            images = F.interpolate(images.float(), scale_factor=scale, mode="bilinear", antialias=True)
        return pixels(images, self.model.preprocess if self.is_restored else None)

    def _examples(
        self, record: EvidenceRecord, donors: np.ndarray, k: int, corners: np.ndarray, off: bool,
        wanted: int | None,
    ) -> tuple[Example, ...]:  # fmt: skip
        """For each donor, a recipient before and after; if possible one whose answer becomes `wanted`."""
        examples = []
        for e, corner in zip(donors.tolist(), corners, strict=True):
            to = self.recipients[e]
            make = self._paste(np.repeat(e, len(to)), to, k, np.tile(corner, (len(to), 1)), off)
            examples.append(self._example(record, int(self.image[e]), to, make, wanted))
        return tuple(examples)

    def _example(
        self,
        record: EvidenceRecord,
        donor: int,
        to: np.ndarray,
        make: Callable[[Tensor], Tensor],
        wanted: int | None,
    ) -> Example:
        after = make(torch.arange(len(to), device=self.images.device))
        logits = all_logits(self.model, after, **self.passes)
        self.inputs += len(to)
        says = self.model.predicted(logits).cpu().numpy()
        at = int(np.argmax(says == wanted)) if wanted is not None else 0
        before = self.images[int(to[at])][None]
        drawn = self._drawn(torch.cat([before, after[at][None].to(before)]))
        names = [
            record.class_name(int(c))
            for c in (self.model.predicted(self.logits[int(to[at])][None])[0], says[at])
        ]
        return Example(record.ids[donor], record.ids[int(to[at])], drawn[0], drawn[1], *names)

    def property_items(self, record: EvidenceRecord, files: Files) -> list[EvidenceItem]:
        """Properties that turn more recipients than their controls do, by class, the strongest first."""
        items = []
        for test in record.properties:
            label, donor, recipient, turned, control = map(np.array, (
                test.label, test.donor, test.recipient, test.turned, test.control,
            ))  # fmt: skip
            for c in np.unique(label).tolist():
                own = label == c
                n, hits = int(own.sum()), np.flatnonzero(own & turned & ~control)[:MOST_EXAMPLES]
                if n < FIRST_PAIRS // 2 or turned[own].mean() - control[own].mean() < PROMISING:
                    continue
                examples = []
                for i, j in zip(donor[hits].tolist(), recipient[hits].tolist(), strict=True):
                    make = self._transfer(test.name, np.array([i]), np.array([j]), files)
                    examples.append(self._example(record, i, np.array([j]), make, c))
                crops = tuple(self._drawn(self.images[np.unique(donor[hits]).tolist()])) if len(hits) else ()
                items.append(EvidenceItem(
                    "property", test.name, c, len(set(donor[own].tolist())), int((self.label == c).sum()), n,
                    int(turned[own].sum()), n, int(control[own].sum()), crops=crops, examples=tuple(examples),
                ))  # fmt: skip
        return sorted(items, key=lambda item: (item.label, item.control_turned - item.turned))


def pooled(pool: Callable[..., Tensor], values: Tensor, k: int) -> Tensor:
    """Mean or maximum of all k x k windows of "e H W", first over rows, then over columns."""
    return pool(pool(values[:, None], (k, 1), stride=1), (1, k), stride=1)[:, 0]


def numbers(column: np.ndarray) -> Numbers:
    """A column of a record: NaN becomes None, which JSON can hold."""
    return tuple(None if math.isnan(value) else value for value in column.tolist())


def similarities(patches: Tensor) -> Tensor:
    """Table "n n": best shifted normalised correlation of the central part of one patch inside the other.

    patches: "n c PATCH PATCH". A central part without contrast is like a patch that has its colour.

    >>> patch = torch.rand(1, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    >>> similarities(torch.cat([patch, patch.roll(2, 3)])).round(decimals=3)[0, 1]
    tensor(1.)
    """
    edge = round((1 - CENTRAL) / 2 * PATCH)
    parts = patches[..., edge : PATCH - edge, edge : PATCH - edge].double()
    whole, count = patches.double(), parts[0].numel()
    centred = parts - parts.mean((1, 2, 3), keepdim=True)
    norms = centred.flatten(1).norm(dim=1)
    ones = torch.ones(1, *parts.shape[1:], dtype=torch.float64)
    sums, squares = F.conv2d(whole, ones), F.conv2d(whole**2, ones)
    spread = (squares - sums**2 / count).clamp(min=0).sqrt()
    correlation = F.conv2d(whole, centred) / (spread * norms[None, :, None, None]).clamp(min=SURE)
    flat = (norms < FLAT * math.sqrt(count))[None, :] & (spread.flatten(1).amin(1) < FLAT * math.sqrt(count))[
        :, None
    ]
    colour = torch.cdist(whole.mean((2, 3)), parts.mean((2, 3)), p=math.inf)
    best = torch.where(flat, (colour < FLAT_COLOUR).double(), correlation.flatten(2).amax(2))
    return torch.maximum(best, best.T).float()
