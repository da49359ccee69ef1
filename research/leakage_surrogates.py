"""Is the leakage penalty of CAMBench-QR gamed less with another surrogate than Grad-CAM?

    python -m research.leakage_surrogates FOLDER     trains in FOLDER, writes research/leakage_surrogates.csv

Small networks at 64 pixels, three seeds, lambda 0.25 and 1, alpha 0.25. A row is one method on one network's
100 test codes: mean BL, FMR, TMR, share of empty maps, accuracy, and the effect of the background on the
logit: mean of |z(x) - z(x with the background blurred)| beside the same for the code. The penalty is gamed
where leakage of the penalised map falls while the other maps' leakage or the background's effect does not.
"""

from __future__ import annotations

import csv
import shutil
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from heatproof.explain.api import explain
from heatproof.images.codes import QRSet
from heatproof.metrics import part_occlusion, structure
from heatproof.models.checkpoints import load_checkpoint
from heatproof.studies.qr import trainings
from heatproof.studies.qr.protocol import CODE, ready
from heatproof.studies.settings import QrSettings

SEEDS, LAMBDAS, SURROGATES = (0, 1, 2), (0.25, 1.0), ("gradcam", "hirescam", "layercam")
METHODS = ["gradcam", "hirescam", "layercam", "eigengradcam", "integrated-gradients(steps=16)", "random"]
BEFORE = ("base", "zs", "ft-struct")
HEADER = (
    "seed", "lambda", "surrogate", "method", "bl", "fmr", "tmr", "empty", "accuracy",
    "background_effect", "code_effect",
)  # fmt: skip


def main(folder: Path) -> None:
    """Train and measure every network; a folder that was begun is continued."""
    shared = QrSettings(device="cpu", depth_study=False, ablation=False)
    sets = trainings.draw(shared, 0, shared.train), trainings.draw(shared, 1, shared.test)
    codes = sets[1].take(sets[1].labels == CODE)
    with Path(__file__).with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(HEADER)
        for seed, lam, surrogate in product(SEEDS, LAMBDAS, SURROGATES):
            first, own = folder / f"{seed}", folder / f"{seed}-{lam:g}-{surrogate}"
            trained = trainings.train_all(shared, first, seed, sets, None)
            for name in BEFORE:  # every penalty starts from the same backbone
                if not (own / "training" / name).exists():
                    shutil.copytree(first / "training" / name, own / "training" / name)
            settings = replace(shared, lam=lam, surrogate=surrogate)
            if (lam, surrogate) == (LAMBDAS[0], SURROGATES[0]):
                accuracy = trained.histories["ft-struct"].epochs[-1].accuracy
                rows.writerows(
                    (seed, 0, "none", *row)
                    for row in measure(settings, first, seed, "ft-struct", accuracy, codes)
                )
            trained = trainings.train_all(settings, own, seed, sets, None)
            accuracy = trained.histories["ft-leakmin"].epochs[-1].accuracy
            rows.writerows(
                (seed, lam, surrogate, *row)
                for row in measure(settings, own, seed, "ft-leakmin", accuracy, codes)
            )
            file.flush()


def measure(
    settings: QrSettings, folder: Path, seed: int, name: str, accuracy: float, codes: QRSet
) -> list[tuple[object, ...]]:
    """A row for each method."""
    model = trainings.build(settings, folder, seed, len(trainings.CLASSES))
    load_checkpoint(model.module, folder / "weights" / f"{name}.safetensors")
    images, masks = (
        ready(model, codes.pictures),
        {part: torch.from_numpy(mask) for part, mask in codes.masks.items()},
    )
    drops = part_occlusion(
        {"background": ~masks["box"], "code": masks["box"]}, CODE, model=model, images=images
    )
    effects = [round(float(drops[f"drop_{part}"].abs().mean()), 4) for part in ("background", "code")]
    rows: list[tuple[object, ...]] = []
    for method, maps in explain(model, images, METHODS, CODE).items():
        scores = structure(maps, masks["finder"], masks["timing"], masks["box"])
        means = [round(float(scores[key].nanmean()), 4) for key in ("bl", "fmr", "tmr")]
        rows.append(
            (method, *means, round(float(scores["bl"].isnan().float().mean()), 4), accuracy, *effects)
        )
    return rows


if __name__ == "__main__":
    main(Path(sys.argv[1]))
