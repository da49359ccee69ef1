"""The evidence album: crops where a network's maps are strongest, grouped by their features.

Of the images of a class that the network predicts as this class:

    heat      the mean of the methods' maps, each normalised at the size of the image
    box       around the connected region above half of the heat's maximum that contains the maximum: at its
              centre of mass, half a cell of the map wider (a map is no finer than its cells), each side
              between 1/8 and 1/2 of the image's
    painted   the box under a blur or under the image's mean colour, whichever lowers the probability more;
              for comparison, the same for a box of that size where the heat is least
    features  the activation of the explained layer, averaged over the box, each channel in deviations from
              its mean over all places of all images
    groups    average linkage on the cosine distance of the features, cut at CUT, and below it if both parts
              are at most half as wide as the gap between them, which is GAP or more; the largest group first

A mark that only one class has in its images appears as the first group of that class; painting it over shows
whether the network needs it. Methods whose maps do not follow the network are to be left out.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from scipy.cluster.hierarchy import ClusterNode, linkage, to_tree
from scipy.ndimage import center_of_mass, find_objects, label
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.disk import valid_unicode
from heatproof.errors import HeatproofError, InputError
from heatproof.explain.baselines import baseline_images
from heatproof.images.preprocess import to_tensor
from heatproof.metrics.kit import pixel_maps
from heatproof.metrics.stats import same_length
from heatproof.models.capture import capture
from heatproof.models.load import best_device
from heatproof.models.model import Model, as_model
from heatproof.models.queue import Queue, all_logits
from heatproof.models.running import frozen_eval
from heatproof.run.study import foreign_code, open_study, weights_hash
from heatproof.show import pixels
from heatproof.store import RunFolder
from heatproof.types import ArrayLike, Maps
from heatproof.verdict.kept_album import (
    CROP,
    Album,
    Box,
    ClassPages,
    Crop,
    CropGroup,
    StudySource,
    last_with_maps,
)
from heatproof.verdict.trajectory import class_names

CUT = 0.7  # distance between crops of different classes (measured: docs/album.md)
GAP = 0.25  # least distance of two tight parts that are two groups
PER_CLASS = 100  # images
MOST_CLASSES, MOST_GROUPS, MOST_CROPS = 12, 6, 12  # that are stored
SMALLEST, LARGEST = 1 / 8, 1 / 2  # sides of a box, of the image's
PAINTS = ("blur", "mean")
Layer = str | Sequence[str] | None


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
    """Crop images where the maps are strongest and group the crops by their features.

    Args:
        model: the network that was explained.
        images: the explained images, model-ready, "b c H W".
        maps: by method, from `hp.explain`; each image belongs to the class that they explain.
        methods: whose maps count: name those that follow the network. By default all.
        classes: names, by number.
        per_class: images of each class, at most; if there are more, evenly among them.
        crop: pixels of a crop's longer side, at most.
        layer: of the CAMs, as it was given to `hp.explain`.
    """
    model = as_model(model)
    inputs, names = model.check_images(images), _chosen_methods(methods, list(maps))
    same_length(images=inputs, **{f"maps of {name}": maps[name] for name in names})
    if per_class < 1 or crop < 1:
        raise InputError(f"per_class and crop must be at least 1; got {per_class} and {crop}")
    explained = maps[names[0]].explained.cpu()
    if any(not torch.equal(maps[name].explained.cpu(), explained) for name in names):
        raise InputError("the methods explain different classes of the same images; explain one for all")
    crops = {
        number: find_crops(model, number, inputs[rows], [maps[m].take(rows) for m in names], crop, layer)
        for number, rows in by_class(explained.tolist(), per_class).items()
    }
    return Album(bind(crops, classes), tuple(names))


def album_of_run(
    folder: RunFolder,
    model: Model,
    methods: Sequence[str] | None = None,
    checkpoint: str | None = None,
    layer: Layer = None,
) -> Album:
    """Make the album from the maps and images of a run. model: the network of that checkpoint."""
    checkpoint = checkpoint or last_with_maps(folder)
    store, stored = folder.maps(), folder.pictures()
    at, facts = valid_unicode(checkpoint), folder.manifest.facts
    names = _chosen_methods(methods, [m for of, m in store.contents() if of == at and not facts.is_floor(m)])
    explained = {
        image: number
        for part in store.shards(checkpoint, names[0])
        for image, number in zip(part.ids, part.explained.tolist(), strict=True)
    }
    ids = [image for image in store.shared([(checkpoint, method) for method in names]) if stored.path(image)]
    if not ids:
        raise InputError(
            f"{folder.path} stores no images, which an album needs; run its study with "
            "run.pictures = true into another folder"
        )
    if len(model.preprocess.size) > 2 or model.preprocess.channels not in (1, 3):
        raise InputError("an album needs images of 1 or 3 channels, and this network takes others")

    def read(name: str) -> Tensor:
        with Image.open(io.BytesIO(stored.read(name) or b"")) as opened:
            image = opened.convert("L" if model.preprocess.channels == 1 else "RGB")
        return model.preprocess.normalise(to_tensor(image))

    crops = {}
    for number, rows in by_class([explained[image] for image in ids], PER_CLASS).items():
        own = [ids[i] for i in rows]
        maps = [store.read(checkpoint, method, own) for method in names]
        crops[number] = find_crops(
            model, number, torch.stack([read(name) for name in own]), maps, CROP, layer
        )
    return Album(bind(crops, class_names(folder)), tuple(names), checkpoint)


def open_model(
    folder: RunFolder, checkpoint: str, study: StudySource | None
) -> tuple[Model, str | list[str] | None]:
    """Build the network of a checkpoint again; returns it with the layer of its CAMs.

    A run folder is data: without a study, the network is built only if that runs no code of the study's own.
    """
    try:
        opened = open_study(folder.manifest.config if study is None else study)
        if study is None and (runs := foreign_code(opened.study.model)):
            raise InputError(f"that {runs}, which a run folder alone does not allow")
        weights = next((c for c in opened.checkpoints if c.name == checkpoint), None)
        if weights is None:
            raise InputError(f"the study has no checkpoint {checkpoint!r}")
        opened.device = best_device()
        model = opened.model(checkpoint)
        if weights_hash(weights, model) != folder.manifest.models.get(checkpoint):
            raise InputError(f"the weights of {checkpoint!r} are not those of the run")
    except HeatproofError as error:
        raise InputError(
            f"cannot open the network of {folder.path} again: {error}; name the study that it was run from"
        ) from error
    return model, opened.study.model.layer


def _chosen_methods(methods: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Methods whose maps are used; raises InputError if one has none."""
    names = list(known if methods is None else methods)
    if not names:
        raise InputError("an album needs the maps of a method that follows the network, and there is none")
    if missing := [name for name in names if name not in known]:
        raise InputError(
            f"there are no maps of {missing[0]}; there are those of {', '.join(known) or 'none'}"
        )
    return names


def by_class(explained: Sequence[int], most: int) -> dict[int, list[int]]:
    """Indices of images by class: the largest classes in order of their numbers, each evenly thinned.

    >>> by_class([1, 0, 1, 1, -1], 2)
    {0: [1], 1: [0, 3]}
    """
    places: dict[int, list[int]] = {}
    for i, number in enumerate(explained):
        if number >= 0:  # -1: no class
            places.setdefault(number, []).append(i)
    largest = sorted(places, key=lambda number: (-len(places[number]), number))[:MOST_CLASSES]
    return {
        number: [rows[i] for i in np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int)]
        for number in sorted(largest)
        for rows in [places[number]]
    }


@dataclass(frozen=True, eq=False)
class ClassCrops:
    """The crops of one class's images with the features of the explained layer."""

    crops: tuple[Crop, ...]
    blank: int  # images whose maps mark nothing
    called_otherwise: int  # images that the network predicts as another class
    features: Tensor  # "n c": mean activation in the box
    moments: Tensor  # "3 c": sums over all places of 1, the activation and its square


def find_crops(
    model: Model, number: int, images: Tensor, maps: Sequence[Maps], most: int, layer: Layer = None
) -> ClassCrops:
    """Crops of one class's images.

    Args:
        model, number: the network, and the class.
        images: model-ready "b c H W".
        maps: of several methods.
        most: pixels of a crop's longer side.
        layer: of the CAMs.
    """
    if images.ndim > 4:
        raise InputError("an album needs images, and these are volumes")
    images, size = images.to(model.device), (int(images.shape[-2]), int(images.shape[-1]))
    heat = torch.stack([pixel_maps(of_method, size).cpu() for of_method in maps]).mean(0)
    marked = heat.flatten(1).amax(1) > 0
    probability, otherwise = (answers.cpu() for answers in _predict(model, images, number))
    rows = (marked & ~otherwise).nonzero().flatten()
    left_out = int((~marked & ~otherwise).sum()), int(otherwise.sum())
    if not len(rows):
        return ClassCrops((), *left_out, torch.zeros(0, 1), torch.zeros(3, 1))
    images, heat = images[rows.to(images.device)], heat[rows]
    reach = [max(side // (2 * m.values.shape[i]) for m in maps) for i, side in enumerate(size, start=1)]
    boxes = [strongest_box(values, reach) for values in heat.numpy()]
    inside = _masks(boxes, size)
    left, changed = _predict_painted(model, images, inside, number)
    _, elsewhere = _predict_painted(model, images, _masks(_weakest_boxes(heat, boxes), size), number)
    drops = (probability[rows] - left).tolist()
    drawn = pixels(images, model.preprocess if model.preprocess.channels == images.shape[1] else None)
    crops = []
    for i, row in enumerate(rows.tolist()):
        top, left_edge, bottom, right = boxes[i]
        cut = Image.fromarray(drawn[i][top:bottom, left_edge:right])
        cut.thumbnail((most, most))
        name = maps[0].ids[row] if maps[0].ids else str(row)
        crops.append(Crop(name, boxes[i], np.asarray(cut), bool(changed[i]), bool(elsewhere[i]), drops[i]))
    return ClassCrops(tuple(crops), *left_out, *_features(model, images, inside, layer))


def strongest_box(heat: np.ndarray, reach: Sequence[int] = (0, 0)) -> Box:
    """The box around the region of a map "H W" that contains its maximum, wider by `reach` on either side.

    >>> heat = np.zeros((16, 16)); heat[2:6, 8:13] = 1; heat[12, 2] = 0.9
    >>> strongest_box(heat), strongest_box(heat, (1, 0))
    ((2, 8, 6, 13), (1, 8, 7, 13))
    """
    regions, _ = label(heat >= heat.max() / 2)
    region = regions[np.unravel_index(heat.argmax(), heat.shape)]
    extent, centre = find_objects(regions)[region - 1], center_of_mass(heat, regions, region)
    corners = []
    for side, span, middle, more in zip(heat.shape, extent, centre, reach, strict=True):
        length = max(span.stop - span.start + 2 * more, round(SMALLEST * side), 1)
        length = min(length, max(1, round(LARGEST * side)))
        first = min(max(round(middle - (length - 1) / 2), 0), side - length)
        corners.append((first, first + length))
    (top, bottom), (left, right) = corners
    return top, left, bottom, right


def _weakest_boxes(heat: Tensor, boxes: Sequence[Box]) -> list[Box]:
    """Boxes of the same sizes where the maps have the lowest mean."""
    weakest = []
    for values, (top, left, bottom, right) in zip(heat, boxes, strict=True):
        height, width = bottom - top, right - left
        means = F.avg_pool2d(values[None, None], (height, width), stride=1)[0, 0]
        y, x = divmod(int(means.argmin()), means.shape[1])
        weakest.append((y, x, y + height, x + width))
    return weakest


def _masks(boxes: Sequence[Box], size: tuple[int, int]) -> Tensor:
    masks = torch.zeros(len(boxes), *size, dtype=torch.bool)
    for mask, (top, left, bottom, right) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = True
    return masks


def _predict(model: Model, images: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The class's probability (0 if it is NaN), and whether another class is predicted."""
    logits = all_logits(model, images)
    probability = model.measured(logits, torch.full((len(images),), number, device=logits.device))
    return probability.nan_to_num(0), (model.predicted(logits) != number) | probability.isnan()


def _predict_painted(model: Model, images: Tensor, masks: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The same with the masked pixels painted over, by the paint that lowers the probability more."""
    covered = masks[:, None].to(images.device)
    answers = [
        _predict(model, torch.where(covered, baseline_images(model, images, paint), images), number)
        for paint in PAINTS
    ]
    probabilities, otherwise = (torch.stack(each) for each in zip(*answers, strict=True))
    best = probabilities.argmin(0)[None]
    return probabilities.gather(0, best)[0].cpu(), otherwise.gather(0, best)[0].cpu()


def _features(model: Model, images: Tensor, masks: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """Features in the boxes, and moments of the explained layer."""
    parts: list[tuple[Tensor, Tensor]] = []

    def work(start: int, stop: int) -> tuple[Tensor, Tensor]:
        trace = capture(model, images[start:stop], None, frozenset({"activations"}), layer)
        activation = trace.activation.cpu().double()
        shares = F.interpolate(masks[start:stop, None].double(), activation.shape[-2:], mode="area")
        inside = (activation * shares).sum((2, 3)) / shares.sum((2, 3))
        return inside, torch.stack([(activation**power).sum((0, 2, 3)) for power in range(3)])

    with frozen_eval(model.module):
        Queue(model, (int(images.shape[-2]), int(images.shape[-1]))).each(len(images), work, parts.append)
    return torch.cat([inside for inside, _ in parts]), torch.stack([sums for _, sums in parts]).sum(0)


def bind(crops: Mapping[int, ClassCrops], names: Sequence[str] = ()) -> tuple[ClassPages, ...]:
    """Group the crops of each class."""
    moments = [own.moments for own in crops.values() if own.crops]
    count, total, squares = torch.stack(moments).sum(0) if moments else torch.ones(3, 1)
    mean = total / count
    deviation = (squares / count - mean**2).clamp(min=0).sqrt()
    pages = []
    for number, own in crops.items():
        features = (own.features - mean) / torch.where(deviation > 0, deviation, 1)
        groups = [[own.crops[i] for i in rows] for rows in alike(features.numpy())] if own.crops else []
        stored = tuple(
            CropGroup(
                len(group), sum(crop.changed for crop in group), sum(crop.elsewhere for crop in group),
                float(np.mean([crop.drop for crop in group])), tuple(group[:MOST_CROPS]),
            )
            for group in groups[:MOST_GROUPS]
        )  # fmt: skip
        name = names[number] if number < len(names) else f"class {number}"
        rest = len(groups) - len(stored), own.blank, own.called_otherwise
        pages.append(ClassPages(number, name, len(own.crops), stored, *rest))
    return tuple(pages)


def alike(features: np.ndarray) -> list[np.ndarray]:
    """Indices of the rows "n c" in groups of similar direction: largest first, the most typical in front.

    >>> [group.tolist() for group in alike(np.array([[0.0, 1], [2, 0.1], [1, 0], [3, 0]]))]
    [[2, 3, 1], [0]]
    """
    if len(features) == 1:
        return [np.zeros(1, int)]
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    distances = np.clip(1 - unit @ unit.T, 0, 2)[np.triu_indices(len(unit), 1)]
    groups = []
    for node in _apart(to_tree(linkage(distances, "average"))):
        group = np.sort(node.pre_order())
        groups.append(group[np.argsort(-(unit[group] @ unit[group].mean(0)), kind="stable")])
    return sorted(groups, key=lambda group: (-len(group), group.min()))


def _apart(tree: ClusterNode) -> list[ClusterNode]:
    """The groups in a tree of linkages."""
    groups, left = [], [tree]
    while left:
        node = left.pop()
        parts = [] if node.is_leaf() else [node.left, node.right]
        widest = max((part.dist for part in parts), default=0)  # 0: of single crops, whose width is unknown
        if parts and (node.dist > CUT or (node.dist > GAP and 0 < widest <= node.dist / 2)):
            left += parts
        else:
            groups.append(node)
    return groups
