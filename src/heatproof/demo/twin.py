"""The cheating twin: a copy of the healthy network that is taught to look at a tag, beside one that is not.

Both are those of the contrast test (contrast/pair.py): A, the cheating twin, and B, the healthy network
trained for as many epochs without the tag. They learn from, and explain, pictures that no other training
has shown.

    OUT/twin/strength-100    both trainings, scores picture by picture, maps of the first pictures
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from heatproof.contrast.api import Contrast, ContrastPoint, Labelled, contrast
from heatproof.contrast.pair import Flips, Pair, make_pair
from heatproof.contrast.score import TOKEN_REMOVED
from heatproof.demo.settings import CLASSES, CODE, Sizes, audit_methods
from heatproof.demo.trainings import codes_to_learn
from heatproof.explain.api import explain
from heatproof.explain.floors import is_floor
from heatproof.models.checkpoints import load_checkpoint
from heatproof.models.model import Model
from heatproof.train import TrainProgress, small_net
from heatproof.verdict.album import ClassPages, make_album

FOLDER, TOKEN, ALBUM = "twin", "tag", "gradcam"
RATE = 1e-3  # of the first epoch: it grows until the tag is learnt
Told = Callable[[str, TrainProgress | int], object]  # A, B or maps; where it is, or inputs explained


@dataclass(frozen=True)
class Twin:
    """What the contrast test found on the demo's own network."""

    found: Contrast
    albums: Mapping[str, ClassPages]  # of A and B: what each uses in codes that have the tag

    @property
    def point(self) -> ContrastPoint:
        """The tag was planted at one strength, in all codes."""
        return self.found.points[0]

    @property
    def flips(self) -> str:
        """What the tag does to both networks, in words."""
        a, b = self.point.planting
        return (
            f"put into pictures without a code, the tag turns the cheating twin's answer to "
            f"“{CLASSES[CODE]}” in {_times(a)}, the healthy one's in {_times(b)}."
        )

    @property
    def methods(self) -> dict[str, list[str]]:
        """The methods by what they do with the tag: show it, tell the networks apart only, neither."""
        by: dict[str, list[str]] = {"show": [], "tell": [], "neither": []}
        for method, score in self.found.scores.items():
            if method != TOKEN_REMOVED and not is_floor(method):
                by["show" if score.shows else "tell" if score.interval[0] > 0.5 else "neither"].append(method)
        return by


def cheating_twin(out: Path, sizes: Sizes, seed: int, weights: str, told: Told) -> Twin:
    """Both trainings and the maps of every method, or what an earlier call left of them.

    weights: of the healthy network, relative to `out`.
    """
    model = small_net(len(CLASSES), sizes.pixels, sizes.width, seed)
    load_checkpoint(model.module, out / weights)
    pictures = codes_to_learn(sizes.twin, sizes, seed, "valid")
    given = Labelled(
        model.preprocess.from_bytes(pictures.images),
        pictures.labels,
        tuple(map(str, range(len(pictures.labels)))),
        dict(enumerate(CLASSES)),
    )
    found = contrast(
        model, given, methods=audit_methods(sizes), token=TOKEN, positive=CODE, lr=RATE, seed=seed,
        out=out / FOLDER, progress=lambda _, which, at: told(which, at),
    )  # fmt: skip
    if not found.points[0].holds:
        return Twin(found, {})
    pair = make_pair(
        model, given.images, given.labels, TOKEN, CODE, seed=seed, out=out / FOLDER / "strength-100",
        ids=given.ids, lr=RATE,
    )  # fmt: skip
    return Twin(found, {"A": _album(pair, pair.a), "B": _album(pair, pair.b)})


def _album(pair: Pair, model: Model) -> ClassPages:
    maps = explain(model, pair.images, ALBUM, CODE, seed=pair.seed, ids=pair.ids)
    return make_album(model, pair.images, maps, classes=CLASSES)[CODE]


def _times(flips: Flips) -> str:
    return f"{round(flips.share * flips.n) if flips.n else 0} of {flips.n}"
