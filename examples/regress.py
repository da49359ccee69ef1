"""What makes a network say a larger number: a regression head, on pictures made here.

    python examples/regress.py [--steps 200] [--out heads]

A small network learns how much of a picture is red. Its maps should lie on the red discs, not on the blue
ones; "minus the value" (target 1) asks what makes the number smaller.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import heatproof as hp
from heatproof.images.preprocess import Preprocess

SIDE = 32
PLAIN = Preprocess((SIDE, SIDE), SIDE, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
METHODS = ["gradcam", "gradient-x-input", "occlusion(window=8, stride=4)", "edges"]


def discs(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures "b 3 H W" from -1 to 1, the share of each that is red "b", and where it is "b H W"."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    images = 0.1 * torch.randn(count, 3, SIDE, SIDE, generator=draw)
    red = torch.zeros(count, SIDE, SIDE, dtype=torch.bool)
    for image, where in zip(images, red, strict=True):
        for channel in (2, 0):  # a blue disc, then a red one over it
            y, x, radius = (
                torch.rand(3, generator=draw) * torch.tensor([16, 16, 5]) + torch.tensor([8, 8, 3])
            ).tolist()
            disc = (rows - y) ** 2 + (columns - x) ** 2 <= radius**2
            image[:, disc] = -0.5
            image[channel, disc] = 1.0
            where[disc] = channel == 0
    return images, red.float().mean((1, 2)), red


def trained(steps: int) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1),
    )  # fmt: skip
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    for step in range(steps):
        images, share, _ = discs(32, step)
        loss = nn.functional.mse_loss(net(images)[:, 0], 10 * share)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net.eval()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("heads"))
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    model = hp.load_model(trained(given.steps), head="regression", tolerance=0.2, preprocess=PLAIN)
    images, share, red = discs(16, 10_000)
    predicted = model.logits(images)[:, 0]
    error, most = float((predicted - 10 * share).abs().mean()), float(10 * share.max())
    print(f"error {error:.2f}, of values from 0 to {most:.1f}")
    print(f"the network's output: {model.head_meaning}")
    maps = hp.explain(model, images, METHODS)
    curves = hp.metrics.insertion_deletion(maps, model=model, images=images, steps=20)
    inside = {}
    for method, method_maps in maps.items():
        scores = hp.metrics.localise(method_maps, masks=red)
        inside[method] = float(scores["pointing"].nanmean())
        area = float(curves[method].insertion_auc.nanmean())
        print(f"  {method:30} points at the red disc: {inside[method]:.2f}   insertion: {area:.2f}")
        method_maps.overlay(images, PLAIN)[0].save(given.out / f"regression.{method.partition('(')[0]}.png")
    lower = hp.explain(model, images, "gradient-x-input", 1)["gradient-x-input"]  # minus the value
    assert torch.allclose(lower.signed, -maps["gradient-x-input"].signed, atol=1e-5)
    return inside


if __name__ == "__main__":
    main()
