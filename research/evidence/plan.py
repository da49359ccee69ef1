"""The plan: which pairs of networks are trained, fixed before anything is measured.

Eight rounds with each kind of cue once, so that the pairs measured first cover everything. Five further
rounds have tiny networks only, for machines without an accelerator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from research.evidence.cues import KINDS, Cue
from research.evidence.networks import NETWORKS

CHOOSE, PUBLISH = "chooses effect sizes", "published"  # halves of the plan


@dataclass(frozen=True)
class Member:
    """A pair of networks: A learns the cue with the class, B learns that the cue says nothing."""

    kind: str  # of cue
    network: str
    source: str
    box: int  # per cent of the image
    strength: int  # per cent of the images of a class that have its cue
    scheme: str
    classes: int
    seed: int

    @property
    def name(self) -> str:
        return (
            f"{self.seed:02d}-{self.kind}-{self.network}-{self.source}-{self.box}-{self.strength}"
            f"-{self.scheme}-{self.classes}"
        )

    @property
    def cue(self) -> Cue:
        return Cue(self.kind, self.scheme, self.strength / 100, self.classes, self.seed, self.box / 100)


_ROWS = """
anywhere   squeezenet photographs   30 100 single 2
inside     resnet20   cifar         60 100 each   2
corner     small-64   shapes        30 100 each   4
word       lite0      photographs   60  80 single 2
frame      resnet18   xrays         60 100 single 2
tint       small-96   qr            30 100 each   2
texture    vit-ti     xrays         60  80 single 2
sharpness  resnet18   shapes-photos 10 100 each   3

anywhere   vit-ti     shapes        60 100 each   2
inside     small-96   shapes        30 100 single 3
corner     resnet50   photographs   60 100 single 2
word       resnet18   qr            30 100 each   3
frame      squeezenet cifar         10  80 each   4
tint       lite0      xrays         30 100 single 2
texture    resnet20   cifar         10 100 each   3
sharpness  small-64   shapes        60  80 single 2

anywhere   small-64   shapes        10  80 single 4
inside     lite0      photographs   30 100 each   2
corner     resnet56   cifar         30  80 single 2
word       small-96   xrays         60 100 single 2
frame      resnet50   scenes        60 100 single 2
tint       vit-ti     qr            60 100 each   3
texture    squeezenet qr-photos     30 100 single 4
sharpness  lite0      cifar         10 100 single 2

anywhere   resnet50   shapes-photos 10 100 single 4
inside     resnet18   qr-photos     30  80 single 2
corner     squeezenet scenes        60 100 each   2
word       resnet20   cifar         60 100 single 4
frame      small-64   qr            60 100 each   4
tint       resnet18   shapes-photos 10  80 single 3
texture    lite0      photographs   10 100 each   2
sharpness  resnet56   cifar         30 100 each   2

anywhere   resnet20   cifar         30  80 each   3
inside     squeezenet xrays         60  80 single 2
corner     vit-ti     xrays         30 100 single 2
word       resnet50   photographs   10 100 each   2
frame      lite0      photographs   10 100 single 2
tint       squeezenet scenes        30 100 single 2
texture    small-96   shapes        30 100 each   4
sharpness  small-96   qr            30 100 single 2

anywhere   lite0      xrays         60 100 each   2
inside     vit-ti     qr            60 100 single 3
corner     resnet18   qr-photos     10 100 single 3
word       small-64   shapes        30  80 each   3
frame      resnet56   cifar         30 100 each   3
tint       resnet20   cifar         60 100 single 2
texture    resnet50   photographs   60 100 single 2
sharpness  squeezenet photographs   60 100 single 2

anywhere   small-96   qr-photos     60 100 single 3
inside     resnet50   scenes        60 100 each   2
corner     lite0      cifar         10  80 each   4
word       squeezenet scenes        30 100 single 2
frame      vit-ti     shapes        60 100 single 2
tint       resnet56   cifar         10 100 each   4
texture    resnet18   xrays         30  80 each   2
sharpness  resnet20   cifar         60 100 single 3

anywhere   resnet18   shapes        30 100 single 3
inside     small-64   xrays         60 100 each   2
corner     small-96   shapes-photos 10 100 single 2
word       vit-ti     xrays         60 100 each   2
frame      resnet20   cifar         30 100 single 2
tint       resnet50   photographs   30  80 each   2
texture    small-64   qr            30 100 single 3
sharpness  lite0      scenes        60  80 each   2

anywhere   tiny-48    shapes-photos 30 100 each   3
inside     tiny-32    qr            60  80 single 2
corner     tiny-48    xrays         60 100 single 2
word       tiny-32    shapes        10 100 single 4
frame      tiny-32    shapes-photos 30  80 single 2
tint       tiny-48    shapes        60  80 single 3
texture    tiny-32    xrays         30 100 each   2
sharpness  tiny-48    qr-photos     60 100 each   2

anywhere   tiny-32    xrays         30  80 single 2
inside     tiny-48    shapes        60 100 each   4
corner     tiny-32    qr            30 100 each   2
word       tiny-48    qr-photos     30 100 single 2
frame      tiny-48    xrays         30 100 single 2
tint       tiny-32    shapes-photos 30 100 single 2
texture    tiny-48    shapes-photos 10  80 single 2
sharpness  tiny-32    shapes        10 100 each   3

anywhere   tiny-48    qr            60 100 single 2
inside     tiny-32    shapes-photos 30 100 single 3
corner     tiny-48    shapes        10  80 single 3
word       tiny-32    xrays         30  80 each   2
frame      tiny-32    shapes        60 100 single 4
tint       tiny-48    xrays         60 100 each   2
texture    tiny-32    qr            60 100 single 3
sharpness  tiny-48    xrays         60 100 single 2

anywhere   tiny-32    shapes        30 100 single 2
inside     tiny-48    qr-photos     60 100 single 2
corner     tiny-32    xrays         30 100 each   2
word       tiny-48    shapes        60 100 single 2
frame      tiny-48    qr-photos     30 100 single 2
tint       tiny-32    qr-photos     60  80 each   2
texture    tiny-48    shapes        60 100 single 3
sharpness  tiny-32    shapes-photos 30 100 single 2

anywhere   tiny-48    xrays         60 100 each   2
inside     tiny-32    xrays         60 100 single 2
corner     tiny-48    qr-photos     60 100 single 3
word       tiny-32    shapes-photos 30  80 each   3
frame      tiny-32    qr            10 100 each   2
tint       tiny-48    shapes        10 100 single 2
texture    tiny-32    shapes        30  80 single 4
sharpness  tiny-48    qr            30 100 each   2
"""
PLAN: tuple[Member, ...] = tuple(
    Member(kind, network, source, int(box), int(strength), scheme, int(classes), seed)
    for seed, (kind, network, source, box, strength, scheme, classes) in enumerate(
        row.split() for row in _ROWS.strip().splitlines() if row
    )
)


def select(networks: Sequence[str] = (), without: Sequence[str] = ()) -> list[Member]:
    """The members of some kinds of networks, in the order of the plan."""
    chosen = networks or list(NETWORKS)
    return [m for m in PLAN if m.network in chosen and m.network not in without]


def halves(members: Sequence[Member] = PLAN) -> dict[str, str]:
    """The half of each member by its name: of each kind of cue, every other one in the order of its hash."""
    result: dict[str, str] = {}
    for number, kind in enumerate(KINDS):
        names = sorted((m.name for m in members if m.kind == kind), key=_hash)
        result |= {name: (CHOOSE, PUBLISH)[(i + number) % 2] for i, name in enumerate(names)}
    return result


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
