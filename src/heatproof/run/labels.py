"""The labels of pictures as classes of the network: the same, renumbered by their names, or put aside."""

from __future__ import annotations

from dataclasses import replace

from heatproof.errors import InputError
from heatproof.images import Source
from heatproof.models.model import Model
from heatproof.models.names import model_classes

Renamed = tuple[dict[int, int], tuple[str, ...]]  # the model's number of each label, and the model's names
ASIDE: Renamed = ({}, ())  # labels that are not the network's, where nothing asks for them


def match_labels_to_model(
    source: Source, model: Model, count: int, vouched: bool, unused: bool
) -> Renamed | None:
    """How labels become the classes of a model that has `count`; None where they are these already.

    vouched: somebody listed the model's classes. unused: nothing reads labels. A network that knows other
    classes is then neither right nor wrong about them, so no row may hold them.
    """
    if unused and source.is_multilabel:
        return None
    names, used = dict(enumerate(source.classes)), {c for s in source.samples for c in s.stated}
    try:
        _check(source, count, model.name)
        numbers = {} if vouched else model_classes(names, used, model.classes, count, model.name)
    except InputError:
        if unused:
            return ASIDE
        raise
    moved = any(k != number for k, number in numbers.items())
    return (numbers, model.classes) if model.classes is not None and moved else None


def renumbered(source: Source, numbers: dict[int, int], classes: tuple[str, ...]) -> Source:
    """The same pictures with the model's class numbers and names."""
    samples = (s if s.label is None else replace(s, label=numbers.get(s.label)) for s in source.samples)
    if source.is_multilabel:
        renamed = {source.classes[k]: classes[number] for k, number in numbers.items()}
        samples = (
            replace(
                s,
                findings=tuple(sorted(numbers[f] for f in s.stated)),
                box_findings=tuple(tuple(numbers[f] for f in of) for of in s.box_findings),
                masks={renamed.get(part, part): mask for part, mask in s.masks.items()},
            )
            for s in source.samples
        )
    return replace(source, samples=tuple(samples), classes=classes)


def _check(source: Source, count: int, name: str) -> None:
    outside = next(((s, c) for s in source.samples for c in s.stated if c >= count), None)
    if outside is not None:
        sample, label = outside
        raise InputError(
            f"{sample.id} has label {label} ({source.classes[label]}), but {name} has the "
            f"classes 0 to {count - 1}; order them with images.options.class_names or set model.num_classes"
        )
