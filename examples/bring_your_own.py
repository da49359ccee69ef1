"""Explainers, maps and predictions from elsewhere, side by side with our own on a photograph.

    python examples/bring_your_own.py [--out own]

A network with random weights is explained by captum, by a function of ours and by Grad-CAM; maps are saved
and scored from their file, as `heatproof score` does; then the same network is asked through ONNX Runtime,
which knows neither layers nor gradients. Needs captum, onnx and onnxruntime.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import heatproof as hp
from heatproof.images import Preprocess

SIDE = 64
READY = Preprocess(size=(SIDE, SIDE), resize=SIDE)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 5),
    ).eval()  # fmt: skip


def loudest(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    """How far each pixel is from the mean colour: a method that never looks at the network."""
    return (images - images.mean((2, 3), keepdim=True)).abs().sum(1)


def served(network: nn.Module) -> onnxruntime.InferenceSession:
    """The network in ONNX Runtime."""
    file, axes = io.BytesIO(), {"x": {0: "b"}, "y": {0: "b"}}
    torch.onnx.export(
        network, (torch.zeros(1, 3, SIDE, SIDE),), file, input_names=["x"], output_names=["y"],
        dynamic_axes=axes, dynamo=False,
    )  # fmt: skip
    return onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("own"))
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    model = hp.load_model(make(), preprocess=READY)
    images = model.check_images(hp.open_image("example:cat"))
    methods = {"loudest": loudest}
    maps = hp.explain(model, images, ["gradcam", "captum:IntegratedGradients(n_steps=20)"])
    maps |= hp.explain(model, images, methods)
    maps["gradcam"].save(out / "maps.npz")
    stored = f"files:{out / 'maps.npz'}"
    maps |= hp.explain(model, images, stored)
    areas = {}
    for method, curves in hp.metrics.insertion_deletion(maps, model=model, images=images, steps=20).items():
        areas[method] = float(curves.insertion_auc)
        print(f"{method:40} insertion {areas[method]:.4f}")
    print("read from a file, the same number:", areas[stored] == areas["gradcam"])

    session = served(model.module)
    wrapped = hp.load_model(lambda pictures: session.run(None, {"x": pictures})[0], preprocess=READY)
    own, other = (
        hp.explain(m, images, "rise(masks=200)")["rise(masks=200)"].numpy() for m in (model, wrapped)
    )
    print(f"RISE through ONNX Runtime differs by {np.abs(own - other).max():.1e} at most")
    try:
        hp.explain(wrapped, images, "gradcam")
    except hp.errors.ModelError as error:
        print(error)
    return areas | {"rise": float(np.abs(own - other).max())}


if __name__ == "__main__":
    main()
