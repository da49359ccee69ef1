"""The sizes of the demo, and its studies as TOML.

The harm is one wrong setting of the second phase: the weights of the classes in the loss. A missed code costs
1/100 of a false alarm, as happens when weights meant for a rare class are given in the wrong order. Images,
labels, learning rate, seed and starting weights are those of the healthy training.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heatproof.disk import write_whole
from heatproof.errors import InputError
from heatproof.run.config import toml
from heatproof.verdict.follow import follow_metric

CLASSES = ("no code", "QR code")
CODE = 1
HEALTHY, HARMFUL = "healthy", "harmful"
HARM = (1.0, 0.01)  # weight of the classes in the harmful second phase
CAMS = ("gradcam", "gradcam++", "layercam", "hirescam", "eigencam", "ms-gradcam++")
LIGHT = (*CAMS, "gradient")
FLOORS = ("random", "edges", "centre")
CLASSIFIER = ("auc", "accuracy", "recall")
FOLLOWED_METHODS = (*LIGHT, "random", "edges")
FOLLOWED = ("cscore", *CLASSIFIER, "structure_score", "fmr", "bl", "inside")  # at every checkpoint
SETTINGS = "demo.toml"


@dataclass(frozen=True)
class Sizes:
    """Numbers of images, epochs and steps."""

    train: int = 300  # codes, and as many negatives
    test: int = 40  # likewise; 30 are the fewest that the verdict judges
    pixels: int = 64
    width: int = 8  # channels of the network's first stage
    first_epochs: int = 8
    second_epochs: int = 6
    keep: tuple[int, ...] = (2, 5, 8, 10, 12, 14)  # epochs whose weights are explained
    steps: int = 10  # of insertion and deletion
    lime: str = "lime(samples=60, segment_count=25)"
    depths: int = 3  # at which the network is randomised
    twin: int = 100  # codes that the cheating twin learns from and explains, and as many negatives
    cose_images: int = 40
    cose_draws: int = 1  # magnitudes per transform


FULL = Sizes()
QUICK = Sizes(
    train=160, test=36, pixels=48, first_epochs=7, second_epochs=4, keep=(3, 7, 9, 11), steps=4,
    lime="lime(samples=30, segment_count=16)", depths=1, twin=80,
    cose_images=6,
)  # fmt: skip


def audit_methods(sizes: Sizes) -> tuple[str, ...]:
    return (*LIGHT, sizes.lime, *FLOORS)


def audit_metrics(sizes: Sizes) -> tuple[str, ...]:
    """Consistency, structure, localisation under a budget, faithfulness, sanity, agreement."""
    steps = f"(steps={sizes.steps})"
    return (
        "cscore", *CLASSIFIER, "structure", "localise(budget=0.2)", f"insertion{steps}", f"deletion{steps}",
        f"randomisation(depths={sizes.depths})", follow_metric().name, "method_agreement",
    )  # fmt: skip


def study(
    name: str, checkpoints: list[str], methods: tuple[str, ...], metrics: tuple[str, ...], seed: int
) -> dict[str, Any]:
    """The config of a study over the test images, in the form of run/config.py."""
    network = f"small CNN, {name} training" if name in (HEALTHY, HARMFUL) else "small CNN"
    return {
        "methods": list(methods),
        "metrics": list(metrics),
        "run": {
            "seed": seed, "out": name, "targets": "label", "both_classes": name not in (HEALTHY, HARMFUL),
            "device": "cpu", "threads": 1,
        },
        "model": {"spec": "network.py:build", "checkpoints": checkpoints, "name": network},
        "images": {"kind": "csv", "path": "pictures/manifest.csv", "options": {"class_names": list(CLASSES)}},
    }  # fmt: skip


def settle(out: Path, sizes: Sizes, seed: int) -> None:
    """Write the settings; raises InputError for a folder with another demo, or anything else."""
    path, wanted = out / SETTINGS, {"seed": seed, **asdict(sizes)}
    if not path.is_file():
        if out.is_file() or (out.is_dir() and any(out.iterdir())):
            raise InputError(f"{out} holds other things; name a new folder with --out")
        write_whole({path: toml(wanted)})
        return
    try:
        stored = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}; remove the folder to start anew") from error
    for key, value in wanted.items():
        value = list(value) if isinstance(value, tuple) else value
        if stored.get(key) != value:
            raise InputError(
                f"{out} holds a demo with {key} = {stored.get(key)}, not {value}; "
                "name another folder with --out, or remove that one"
            )
