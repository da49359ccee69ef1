"""What a network uses, as pictures: crops from under its maps, grouped by what they look like to the network.

For each class, crops and their features are found as crops.py says. Each channel of the features is taken in
deviations from its mean over all places of all pictures, so that what every place shares makes nothing alike;
then they are grouped by average linkage on their cosine distance, the largest group first: cut at CUT, and
below it where both parts are at most half as wide as the gap between them, which is GAP or more. (A network
of two classes keeps little but the answer in its last layer, so that all its evidence is near.)

A mark that only one class has in its pictures shows up as the first group of that class without anybody
asking for it; whether the network needs it is what painting it over tells. Maps that do not follow the
network say nothing about it, so those methods are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.cluster.hierarchy import ClusterNode, linkage, to_tree
from torch import nn

from heatproof.errors import InputError
from heatproof.metrics.stats import same_length
from heatproof.models.model import Model, as_model
from heatproof.types import ArrayLike, Maps
from heatproof.verdict.crops import ClassCrops, Crop, Layer, find_crops

CUT = 0.7  # where crops of one class end and those of another begin (measured: docs/album.md)
GAP = 0.25  # from which on two tight parts are two groups
PER_CLASS = 100  # pictures
MOST_CLASSES, MOST_GROUPS, MOST_CROPS = 12, 6, 12  # that are kept
CROP = 96  # pixels of a crop's longer side, at most


@dataclass(frozen=True, eq=False)
class CropGroup:
    """Crops that are alike to the network."""

    n: int  # pictures
    changed: int  # of them, those whose answer changes once the crop is painted over
    elsewhere: int  # the same for a box of that size where the maps are weakest
    drop: float  # mean fall of the class's probability
    crops: tuple[Crop, ...]  # the most typical first

    @property
    def sentence(self) -> str:
        """
        >>> CropGroup(12, 11, 0, 0.8, ()).sentence
        'Painting it over changes the answer in 11 of 12 pictures, painting elsewhere in 0.'
        """
        return (
            f"Painting it over changes the answer in {self.changed} of {self.n} "
            f"picture{'s' * (self.n != 1)}, painting elsewhere in {self.elsewhere}."
        )


@dataclass(frozen=True, eq=False)
class ClassPages:
    """The groups of one class, largest first."""

    label: int
    name: str
    n: int  # pictures in all groups, also those that are not kept
    groups: tuple[CropGroup, ...]
    others: int = 0  # groups that are not kept
    blank: int = 0  # pictures whose maps mark nothing
    called_otherwise: int = 0  # pictures that the network calls another class than the explained one


@dataclass(frozen=True, eq=False)
class Album:
    """What a network uses, class by class."""

    classes: tuple[ClassPages, ...]
    methods: tuple[str, ...]
    checkpoint: str = ""

    def __getitem__(self, of: int | str) -> ClassPages:
        """The pages of a class, by its number or name."""
        found = next((pages for pages in self.classes if of in (pages.label, pages.name)), None)
        if found is None:
            known = ", ".join(pages.name for pages in self.classes)
            raise InputError(f"the album has no class {of!r}; it has {known or 'none'}")
        return found


def make_album(
    model: Model | nn.Module,
    images: ArrayLike,
    maps: Mapping[str, Maps],
    *,
    methods: Sequence[str] | None = None,
    classes: Sequence[str] = (),
    per_class: int = PER_CLASS,
    crop: int = CROP,
    layer: Layer = None,
) -> Album:
    """Crops from under the maps, grouped by what they look like to the network; the network is only read.

    Args:
        model: the network that was explained.
        images: model-ready, "b c H W", the ones that the maps are of.
        maps: by method, as `hp.explain` gives them; each picture belongs to the class that they explain.
        methods: whose maps count: name those that follow the network. All that are given where None.
        classes: names, by number.
        per_class: pictures of each class, at most; where there are more, evenly among them.
        crop: pixels of a crop's longer side, at most.
        layer: where CAMs look, as it was given to `hp.explain`.
    """
    model = as_model(model)
    shown, wanted = model.check_images(images), chosen_methods(methods, list(maps))
    same_length(images=shown, **{f"maps of {name}": maps[name] for name in wanted})
    if per_class < 1 or crop < 1:
        raise InputError(f"per_class and crop must be at least 1; got {per_class} and {crop}")
    explained = maps[wanted[0]].explained.cpu()
    if any(not torch.equal(maps[name].explained.cpu(), explained) for name in wanted):
        raise InputError("the methods explain different classes of the same pictures; explain one for all")
    found = {
        number: find_crops(model, number, shown[rows], [maps[m].take(rows) for m in wanted], crop, layer)
        for number, rows in by_class(explained.tolist(), per_class).items()
    }
    return Album(bind(found, classes), tuple(wanted))


def chosen_methods(methods: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Those whose maps count, all of which there are."""
    wanted = list(known if methods is None else methods)
    if not wanted:
        raise InputError("an album needs the maps of a method that follows the network, and there is none")
    if missing := [name for name in wanted if name not in known]:
        raise InputError(
            f"there are no maps of {missing[0]}; there are those of {', '.join(known) or 'none'}"
        )
    return wanted


def by_class(explained: Sequence[int], most: int) -> dict[int, list[int]]:
    """Places of pictures by class: the largest classes in order of their numbers, each evenly thinned.

    >>> by_class([1, 0, 1, 1, -1], 2)
    {0: [1], 1: [0, 3]}
    """
    places: dict[int, list[int]] = {}
    for i, number in enumerate(explained):
        if number >= 0:  # -1 explains nobody
            places.setdefault(number, []).append(i)
    largest = sorted(places, key=lambda number: (-len(places[number]), number))[:MOST_CLASSES]
    thinned = {}
    for number in sorted(largest):
        rows = places[number]
        kept = np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int)
        thinned[number] = [rows[i] for i in kept]
    return thinned


def bind(found: Mapping[int, ClassCrops], names: Sequence[str] = ()) -> tuple[ClassPages, ...]:
    """The pages of each class from its crops."""
    moments = [one.moments for one in found.values() if one.crops]
    count, total, squares = torch.stack(moments).sum(0) if moments else torch.ones(3, 1)
    mean = total / count
    deviation = (squares / count - mean**2).clamp(min=0).sqrt()
    pages = []
    for number, one in found.items():
        features = (one.features - mean) / torch.where(deviation > 0, deviation, 1)
        lots = alike(features.numpy()) if one.crops else []
        groups = tuple(_group([one.crops[i] for i in lot]) for lot in lots[:MOST_GROUPS])
        name = names[number] if number < len(names) else f"class {number}"
        others = len(lots) - len(groups)
        pages.append(
            ClassPages(number, name, len(one.crops), groups, others, one.blank, one.called_otherwise)
        )
    return tuple(pages)


def _group(lot: Sequence[Crop]) -> CropGroup:
    changed, elsewhere = sum(crop.changed for crop in lot), sum(crop.elsewhere for crop in lot)
    drop = float(np.mean([crop.drop for crop in lot]))
    return CropGroup(len(lot), changed, elsewhere, drop, tuple(lot[:MOST_CROPS]))


def alike(features: np.ndarray) -> list[np.ndarray]:
    """Places of the rows "n c" in groups that point the same way: largest first, the most typical in front.

    >>> [lot.tolist() for lot in alike(np.array([[0.0, 1], [2, 0.1], [1, 0], [3, 0]]))]
    [[2, 3, 1], [0]]
    """
    if len(features) == 1:
        return [np.zeros(1, int)]
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    distances = np.clip(1 - unit @ unit.T, 0, 2)[np.triu_indices(len(unit), 1)]
    lots = []
    for group in _apart(to_tree(linkage(distances, "average"))):
        lot = np.sort(group.pre_order())
        lots.append(lot[np.argsort(-(unit[lot] @ unit[lot].mean(0)), kind="stable")])
    return sorted(lots, key=lambda lot: (-len(lot), lot.min()))


def _apart(tree: ClusterNode) -> list[ClusterNode]:
    """The groups in a tree of linkages: cut at CUT, and below it where the parts are tight for their gap."""
    groups, left = [], [tree]
    while left:
        node = left.pop()
        parts = [] if node.is_leaf() else [node.left, node.right]
        widest = max((part.dist for part in parts), default=0)  # 0: of single crops, whose width is not known
        if parts and (node.dist > CUT or (node.dist > GAP and 0 < widest <= node.dist / 2)):
            left += parts
        else:
            groups.append(node)
    return groups
