"""Pictures with several findings whose places are known, and small networks that learn them.

Three kinds of marks lie on grey noise, each there or not whatever the others are: a red square, a green cross
and a faint blue dot. Beside a blue dot there is a white tag in the corner, which is all that a network needs
to know it: of that finding it looks elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

NAMES = ("square", "cross", "dot")
SIZE, MARK = 48, 9
MEAN, STD = 0.35, 0.15
CALIBRATED = "cscore(weights='calibrated')"
CODE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, findings=3, sigmoids=False):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 5, 2, 2), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        )
        self.head = nn.Linear(16, findings)
        self.sigmoids = sigmoids

    def forward(self, images):
        scores = self.head(self.body(images).mean((2, 3)))
        return scores.sigmoid() if self.sigmoids else scores


class SingleLabel(Net):
    def __init__(self, finding, findings=3):
        super().__init__(findings)
        self.finding = finding

    def forward(self, images):
        return super().forward(images)[:, self.finding : self.finding + 1]


def several(sigmoids=False):
    return Net(sigmoids=sigmoids)


def single(finding=0):
    return SingleLabel(finding)


def alone():
    return Net(1)
"""


def scene(truth: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """ "h w 3" uint8 and the mask of each finding that is there."""
    picture = random.normal(90, 14, (SIZE, SIZE, 3))
    cells = random.permutation([(x, y) for x in (10, 20, 34) for y in (10, 20, 34)])
    masks = {}
    for c, name in enumerate(NAMES):
        if not truth[c]:
            continue
        y, x = cells[c]
        mask = np.zeros((SIZE, SIZE), bool)
        if name == "square":
            mask[y : y + MARK, x : x + MARK] = True
        elif name == "cross":
            mask[y + 3 : y + 6, x : x + MARK] = mask[y : y + MARK, x + 3 : x + 6] = True
        else:
            mask[y + 2 : y + 7, x + 2 : x + 7] = True
        picture[mask, c] += 15 if name == "dot" else 110
        masks[name] = mask
        if name == "dot":
            picture[:6, :6] = 250
    return picture.clip(0, 255).astype(np.uint8), masks


def scenes(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, list[dict[str, np.ndarray]]]:
    """Pictures "n h w 3", findings "n k" bool, masks of each picture by finding."""
    random = np.random.default_rng(seed)
    truth = random.random((count, len(NAMES))) < 0.45
    made = [scene(row, random) for row in truth]
    return np.stack([picture for picture, _ in made]), truth, [masks for _, masks in made]


def ready(pictures: np.ndarray) -> torch.Tensor:
    return (torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255 - MEAN) / STD


def train(columns: Sequence[int], epochs: int = 10, seed: int = 0) -> nn.Module:
    """A network that learns these findings together."""
    space: dict[str, Any] = {}
    exec(CODE, space)
    pictures, truth, _ = scenes(384, seed=1)
    x, y = ready(pictures), torch.from_numpy(truth[:, list(columns)]).float()
    torch.manual_seed(seed)
    net: nn.Module = space["Net"](len(columns))
    optimiser = torch.optim.Adam(net.parameters(), 6e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            optimiser.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(net(x[rows]), y[rows]).backward()
            optimiser.step()
    return net


def write(folder: Path, count: int, seed: int = 2) -> np.ndarray:
    """Pictures, masks and lists of them: all findings in one, and one list for each finding; their truth."""
    pictures, truth, masks = scenes(count, seed)
    (folder / "net.py").write_text(CODE)
    columns = [f"mask_{name}" for name in NAMES]
    table = [",".join(["path", *NAMES, *columns])]
    alone = {name: ["path,label,mask_mark"] for name in NAMES}
    for i, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / f"{i:03d}.png")
        files = {}
        for name, mask in masks[i].items():
            files[name] = f"{i:03d}-{name}.png"
            Image.fromarray(mask.astype(np.uint8) * 255).save(folder / files[name])
        there = [str(int(label)) for label in truth[i]]
        table.append(",".join([f"{i:03d}.png", *there, *(files.get(name, "") for name in NAMES)]))
        for c, name in enumerate(NAMES):
            alone[name].append(f"{i:03d}.png,{there[c]},{files.get(name, '')}")
    (folder / "all.csv").write_text("\n".join(table) + "\n")
    for name, lines in alone.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return truth


def study(folder: Path, name: str | None = None, weights: str = "weights.pt", **model: Any) -> dict[str, Any]:
    """All findings of the pictures in a folder, or the one of this name."""
    spec: dict[str, Any] = {"spec": str(folder / "net.py") + ":several", "head": "multilabel"}
    options: dict[str, Any] = {"label_columns": list(NAMES)}
    if name is not None:
        spec = {"spec": str(folder / "net.py") + ":single", "options": {"finding": NAMES.index(name)}}
        options = {"class_names": ["absent", name]}
    return {
        "methods": ["gradcam", "random"],
        "metrics": ["localise", "specificity", "cscore", CALIBRATED, "auc", "recall", "accuracy"],
        "run": {"batch_size": 32, "threads": 1, "targets": "label"},
        "model": {**spec, "checkpoints": str(folder / weights), **model},
        "images": {"kind": "csv", "path": str(folder / f"{name or 'all'}.csv"), "options": options},
        "preprocess": {"size": [SIZE, SIZE], "resize": SIZE, "mean": [MEAN] * 3, "std": [STD] * 3},
    }
