"""Train the small network that examples/chestxray.toml explains: chest X-rays, normal or pneumonia.

    python examples/train_chestxray.py FOLDER      FOLDER holds train/NORMAL and train/PNEUMONIA

A four-stage convolutional network, grey pictures of 112 x 112, class-weighted loss, on the CPU: a minute
or so, a third of it decoding. Weights after epochs 1 and 5 go to runs/chestxray/, where the study looks for
them.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.images import Preprocess, batches, open_source
from heatproof.models import Model

OUT = Path(__file__).parents[1] / "runs" / "chestxray"
PREPROCESS = Preprocess(size=(112, 112), resize=(112, 112), mean=(0.48,), std=(0.23,))
IMAGES, EPOCHS, KEPT, BATCH = 1000, 5, (1, 5), 32


def network() -> Model:
    """The untrained network, as the study builds it."""
    widths = (1, 16, 32, 64, 96)
    stages: list[nn.Module] = []
    for before, after in pairwise(widths):
        first = before == 1
        convolution = nn.Conv2d(
            before, after, 5 if first else 3, 2 if first else 1, 2 if first else 1, bias=False
        )
        halving = nn.Identity() if first else nn.MaxPool2d(2)
        stages.append(nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU(), halving))
    module = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 2))
    return Model(module, preprocess=PREPROCESS, classes=("NORMAL", "PNEUMONIA"))


def load(folder: Path) -> tuple[Tensor, Tensor]:
    source = open_source("folder", folder / "train", limit=IMAGES)
    parts = [loaded.batch for loaded in batches(source, PREPROCESS, 64)]
    return torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts if p.labels is not None])


def train(images: Tensor, labels: Tensor) -> None:
    torch.manual_seed(0)
    net = network().module.train()
    weight = len(labels) / (2 * torch.bincount(labels, minlength=2).float())
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS * (len(images) // BATCH))
    for epoch in range(1, EPOCHS + 1):
        start, total = time.perf_counter(), 0.0
        for chosen in torch.randperm(len(images))[: len(images) // BATCH * BATCH].split(BATCH):
            batch = images[chosen]
            if torch.rand(()) < 0.5:
                batch = batch.flip(-1)
            loss = F.cross_entropy(net(batch), labels[chosen], weight=weight)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += float(loss.detach())
        print(
            f"epoch {epoch}: loss {total / (len(images) // BATCH):.3f}, {time.perf_counter() - start:.0f} s"
        )
        if epoch in KEPT:
            torch.save(net.state_dict(), OUT / f"epoch{epoch:02d}.pt")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    OUT.mkdir(parents=True, exist_ok=True)
    train(*load(Path(sys.argv[1])))
