"""Names of networks (of a library, or a file), of precisions, and of classes. This module needs no torch."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from heatproof.errors import InputError, MissingExtraError, need

LITE = ("lite0", "efficientnet-lite0", "efficientnet_lite0")
PRECISIONS = ("fp32", "tf32", "bf16")  # see running.py
KERAS_FILES = (".keras", ".h5", ".hdf5")
ABSENT = (MissingExtraError, AttributeError, KeyError)  # a package, or its names in this version of it
WORDNET_ID = re.compile(r"n\d{8}")


@cache
def imagenet_classes() -> tuple[str, ...] | None:
    """The 1,000 ImageNet names from torchvision or timm; None if neither is installed."""
    with suppress(*ABSENT):
        models = need("torchvision.models", "torchvision")
        return tuple(models.get_model_weights("resnet18").DEFAULT.meta["categories"])
    with suppress(*ABSENT):
        info = need("timm.data", "timm").ImageNetInfo("imagenet-1k")
        # The first of several synonyms: "tench, Tinca tinca" is a tench.
        return tuple(info.index_to_description(i).split(",")[0] for i in range(info.num_classes()))
    return None


def _plain(name: str) -> str:
    """A class name in lower case with spaces, for comparison.

    >>> _plain("Great_White-shark"), _plain("jack-o'-lantern")
    ('great white shark', 'jack o lantern')
    """
    return " ".join(re.findall(r"\w+", name.casefold().replace("_", " ")))


def _meanings(name: str) -> set[str]:
    """A name and its synonyms: "tench, Tinca tinca" is both."""
    return {_plain(part) for part in (name, *name.split(","))}


def model_classes(
    pictures: Mapping[int, str], used: set[int], classes: Sequence[str] | None, count: int, name: str
) -> dict[int, int]:
    """The model's class number for each class of a dataset, whose names must be among the model's.

    pictures: names of the dataset's classes by number, of which those in `used` have images. classes: the
    model's names, if known; it has `count` classes.
    """
    named = {k: text for k, text in pictures.items() if _plain(text) not in (str(k), f"class {k}")}
    same = {k: k for k in used}
    if not named or (classes is None and len(pictures) == count):
        return same
    if classes is not None and len(classes) == count:
        known = [k for k in named if k < count and _meanings(named[k]) & _meanings(classes[k])]
        if len(known) * 2 >= len(named):  # some may be spelt in another way
            return same
        numbers = {meaning: k for k in reversed(range(count)) for meaning in _meanings(classes[k])}
        if count == 1000 and all(WORDNET_ID.fullmatch(named.get(k, "")) for k in used):
            # Sorted ids are ImageNet's order, if all are present.
            whole = {text: k for k, text in pictures.items()} if len(pictures) == count else {}
            numbers = whole or imagenet_wordnet_ids()
        matches = {k: numbers.get(_plain(pictures[k]), -1) for k in used}
        if min(matches.values()) >= 0 and len(set(matches.values())) == len(matches):
            return matches
    raise InputError(
        f"the images' {len(pictures)} classes ({_some(named.values())}) are not the {count} of {name}"
        f"{f' ({_some(classes)})' if classes else ''}; set model.num_classes and weights for them, list the "
        "model's classes in its order as class_names, or explain predictions: run.targets = 'predicted' "
        "without metrics that need labels"
    )


def _some(names: Iterable[str]) -> str:
    first = list(itertools.islice(names, 4))
    return ", ".join(first[:3]) + ", ..." * (len(first) > 3)


@cache
def imagenet_wordnet_ids() -> dict[str, int]:
    """ImageNet's 1,000 classes by WordNet id, from timm; empty if it is not installed."""
    with suppress(*ABSENT):
        info = need("timm.data", "timm").ImageNetInfo("imagenet-1k")
        return {info.index_to_label_name(k): k for k in range(info.num_classes())}
    return {}


def read_lines(path: str | Path) -> tuple[str, ...]:
    """Lines of a text file that are not empty: names of classes, or prompts."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}; name a text file with one entry per line") from error
    return tuple(line.strip() for line in lines if line.strip())


def placed_spec(spec: str, folder: Path) -> str:
    """The spec with the absolute path of the file or folder it names, which is relative to `folder`.

    >>> placed_spec("net.py:make", Path("/studies")), placed_spec("lite0", Path("/studies"))
    ('/studies/net.py:make', 'lite0')
    """
    library, _, name = spec.partition(":")
    path, _, factory = spec.rpartition(":")
    if path.endswith(".py"):
        return f"{_placed(path, folder)}:{factory}"
    if library == "onnx" or (library == "hf" and _placed(name, folder).exists()):
        return f"{library}:{_placed(name, folder)}"
    return str(_placed(spec, folder)) if spec.endswith(KERAS_FILES) else spec


def _placed(path: str, folder: Path) -> Path:
    return Path(os.path.abspath(folder / Path(path).expanduser()))
