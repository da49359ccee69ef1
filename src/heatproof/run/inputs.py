"""What a network is given and how it answers, checked before the work starts.

preprocessing   contradicted by the native size of the images or by what the network declares: a warning
classes         in another order than the labels suggest: a warning (metrics/classifier.py)
accuracy        far from the expected one: an error. Far: outside the 99 % interval of the measured
                accuracy (Clopper-Pearson, up to 256 images) by more than 0.05
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import nn

from heatproof.errors import InputError
from heatproof.images import batches
from heatproof.images.files import Size, picture_size
from heatproof.images.preprocess import Preprocess
from heatproof.images.source import draw
from heatproof.metrics.classifier import ClassOrder, class_order
from heatproof.models.heads import Multilabel
from heatproof.models.libraries import sized
from heatproof.models.model import CONVOLUTIONS, Model, input_channels

if TYPE_CHECKING:
    from heatproof.run.study import ResolvedStudy

MOST, AT_ONCE = 256, 32  # images of the first pass
CONFIDENCE, MARGIN = 0.99, 0.05
HEADERS = 32  # files whose native size is read
NAMES = 20  # classes that are listed
POSITIONS = ("pos_embed", "pos_embedding", "position_embeddings", "positional_embedding")
PREFIX_TOKENS = (0, 1, 2, 4, 5)  # class, distillation and register tokens before those of the patches
REMEDY = "name what it was trained with: --size, --resize, --mean and --std, or [preprocess] in a study"


class Answers(NamedTuple):
    """Labels and answers of some images."""

    truth: np.ndarray  # "n k" bool
    probabilities: np.ndarray  # "n k"
    single: bool  # whether each image has one label

    @property
    def right(self) -> int:
        return int((self.truth.argmax(1) == self.probabilities.argmax(1)).sum())

    @property
    def order(self) -> ClassOrder | None:
        """Another order of the classes that explains the labels much better."""
        k = self.probabilities.shape[1]
        return class_order(
            self.truth, np.eye(k)[self.probabilities.argmax(1)] if self.single else self.probabilities
        )


def first_answers(opened: ResolvedStudy, most: int = MOST) -> Answers | None:
    """Answers of the last checkpoint for images in the proportions of their classes; None without labels."""
    source, model = opened.source, opened.model(opened.checkpoints[-1].name)
    if not opened.predicts_classes or not any(sample.stated for sample in source.samples):
        return None
    labels = [next(iter(sample.stated), None) for sample in source.samples]
    places = draw(labels, min(most, len(source)), opened.study.run.seed)
    truth, answers = [], []
    for loaded in batches(source, model.preprocess, AT_ONCE, places, opened.study.run.workers):
        batch = loaded.batch
        if not batch.ids:
            continue
        found = model.probabilities(model.logits(batch.images)).cpu().numpy()
        answers.append(found)
        if batch.findings is not None:
            known = np.zeros(found.shape, dtype=bool)
            known[:, : batch.findings.shape[1]] = batch.findings.cpu().numpy()
        elif batch.labels is not None and int(batch.labels.min()) >= 0:
            known = np.eye(found.shape[1], dtype=bool)[batch.labels.cpu().numpy()]
        else:
            return None
        truth.append(known)
    if not answers or not np.isfinite(np.concatenate(answers)).all():
        return None
    single = not isinstance(model.head, Multilabel)
    return Answers(np.concatenate(truth), np.concatenate(answers), single)


def check_accuracy(opened: ResolvedStudy, expected: float | None) -> None:
    """Raise InputError if the accuracy of the last checkpoint is far from the expected one."""
    if expected is None:
        return
    answers = first_answers(opened)
    if answers is None or not answers.single:
        raise InputError(
            "expect_accuracy needs images with one label each, out of the network's classes; leave it out"
        )
    from scipy.stats import binomtest

    right, n = answers.right, len(answers.truth)
    low, high = binomtest(right, n).proportion_ci(CONFIDENCE)
    if low - MARGIN <= expected <= high + MARGIN:
        return
    model = opened.model(opened.checkpoints[-1].name)
    order = answers.order
    reason = f"; {order.sentence(opened.source.classes, answers.truth.shape[1])}" if order else ""
    raise InputError(
        f"the network is right on {right} of {n} images ({right / n:.0%}, 99 % interval {low:.0%} to "
        f"{high:.0%}), but the expected accuracy is {expected:.0%}: check size and normalisation "
        f"({model.preprocess.description}) and the order of the classes "
        f"({listed_classes(opened.source.classes)}){reason}"
    )


def order_warning(opened: ResolvedStudy, answers: Answers | None) -> list[str]:
    """One sentence if another order of the classes explains the labels much better."""
    order = answers.order if answers else None
    return [order.sentence(opened.source.classes, answers.truth.shape[1])] if answers and order else []


def listed_classes(names: Collection[str]) -> str:
    """
    >>> listed_classes(["cat", "dog"])
    'cat, dog'
    """
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(list(names)[:NAMES]) + more


def input_warnings(model: Model, files: Iterable[object], given: Collection[str], own: bool) -> Iterator[str]:
    """What contradicts the preprocessing, one sentence each.

    files: image files; others are ignored. given: parts of the preprocessing that the user set. own: whether
    the weights come with their preprocessing, as a library's pretrained ones do.
    """
    seen = model.preprocess
    if len(seen.size) != 2:
        return
    channels = input_channels(model.module)
    if channels is not None and channels != seen.channels:
        yield f"the first layer of {model.name} takes {channels} channels, but mean has {seen.channels}"
    if "size" not in given:
        shape = "x".join(map(str, seen.size))
        for source, size in _declared_sizes(model.module):
            if size != seen.size:
                declared = "x".join(map(str, size))
                yield f"{model.name} gets {shape} px, but {source} {declared} px: {REMEDY}"
        native, usual = native_size(files), sized(Preprocess(), model.module)
        is_default = not own and (seen.size, seen.resize) == (usual.size, usual.resize)
        if is_default and native and native[::-1] != seen.size and min(native) != seen.resize:
            yield (
                f"all images are {native[1]}x{native[0]} px, but the network gets {shape} px, the default: "
                f"if it was trained at another size, {REMEDY}"
            )
    config = _pretrained_config(model.module)
    for name in ("mean", "std"):
        declared_values = config.get(name)
        if name in given or own or not declared_values or len(declared_values) != seen.channels:
            continue
        if not np.allclose(declared_values, getattr(seen, name), atol=1e-3):
            values = ", ".join(f"{value:g}" for value in declared_values)
            yield f"pretrained_cfg of {model.name} has {name} {values}, but images get another one: {REMEDY}"


def native_size(files: Iterable[object]) -> Size | None:
    """Width and height of the first image files if all have the same, from their headers."""
    sizes: set[Size] = set()
    paths = [file for file in files if isinstance(file, Path)][:HEADERS]
    for path in paths:
        with suppress(InputError):  # DICOM files and broken ones
            sizes.add(picture_size(path))
    return sizes.pop() if len(sizes) == 1 and len(paths) > 1 else None


def _pretrained_config(module: nn.Module) -> dict[str, tuple[float, ...]]:
    """timm's pretrained_cfg."""
    config = getattr(module, "pretrained_cfg", None)
    return config if isinstance(config, dict) else {}


def _declared_sizes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Height and width that the network was made for, by what says so."""
    patches = next((part for part in module.modules() if isinstance(part, CONVOLUTIONS)), None)
    for name, weight in module.named_parameters():
        if not name.removesuffix(".weight").endswith(POSITIONS) or patches is None:
            continue
        if patches.kernel_size != patches.stride or weight.ndim < 2:
            continue
        tokens = weight.shape[-2]
        sides = (math.isqrt(tokens - more) for more in PREFIX_TOKENS if _is_square(tokens - more))
        if (side := next(sides, 0)) > 1:
            yield f"its {tokens} position embeddings fit", tuple(side * step for step in patches.stride)
        break
    declared = _pretrained_config(module).get("input_size", ())
    if len(declared) == 3 and sized(Preprocess(), module).size == Preprocess.size:  # no size of its own
        yield "its pretrained_cfg names", (int(declared[1]), int(declared[2]))


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number
