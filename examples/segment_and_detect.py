"""What a segmentation and a detection network look at: torchvision's, on photographs.

    python examples/segment_and_detect.py [PICTURE ...] [--pretrained] [--size 224] [--out heads]

Without --pretrained the weights are random, so that nothing is downloaded and the maps mean nothing: this
shows how to ask. Two questions to each network: what makes it see the class where it sees it, and what makes
it see that class in the middle of the picture (a mask of your own), or in a box of your own.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import heatproof as hp
from heatproof.images.files import named_file
from heatproof.images.preprocess import Preprocess

METHODS = ["gradcam", "gradient"]
PHOTOGRAPHS = ("example:cat", "example:coffee")


def main(arguments: list[str] | None = None) -> dict[str, hp.Maps]:
    parser = argparse.ArgumentParser()
    parser.add_argument("pictures", nargs="*", type=Path)
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--out", type=Path, default=Path("heads"))
    given = parser.parse_args(arguments)
    pictures = given.pictures or [named_file(name) for name in PHOTOGRAPHS]
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    results = {}

    # Segmentation: "b k h w" logits, found by itself. No target: the class that most of the picture shows.
    model = load("lraspp_mobilenet_v3_large", given.size, given.pretrained)
    images = model.see(pictures)
    results |= show("segmentation", model, images, None, given.out)
    middle = torch.zeros(given.size, given.size, dtype=torch.bool)
    middle[given.size // 4 : -given.size // 4, given.size // 4 : -given.size // 4] = True
    results |= show("segmentation-middle", model, images, (0, middle), given.out)

    # Detection: boxes with scores. No target: the best box of each picture, found again by its overlap.
    # Of random weights nothing is sure; a hundred proposals are enough to show how it goes.
    lenient = {} if given.pretrained else {"box_score_thresh": 0.0, "rpn_post_nms_top_n_test": 100}
    model = load("fasterrcnn_mobilenet_v3_large_320_fpn", given.size, given.pretrained, **lenient)
    images = model.see(pictures)
    maps = show("detection", model, images, None, given.out)
    results |= maps
    label = int(maps["detection gradcam"].explained[0])
    box = (0.0, 0.0, given.size / 2, given.size / 2)
    results |= show("detection-box", model, images, (label, box), given.out)
    return results


def load(name: str, size: int, pretrained: bool, **options: Any) -> hp.Model:
    model = hp.load_model(f"torchvision:{name}", pretrained=pretrained, **options)
    own = model.preprocess
    return hp.load_model(model, preprocess=Preprocess((size, size), size, own.mean, own.std))


def show(question: str, model: hp.Model, images: torch.Tensor, targets: Any, out: Path) -> dict[str, hp.Maps]:
    """Explain, score, and write each map over its picture."""
    method_maps = hp.explain(model, images, METHODS, targets)
    scores = hp.metrics.insertion_deletion(method_maps, targets, model=model, images=images, steps=2)
    print(f"{question}: the network's output is {model.head_meaning}")
    for method, maps in method_maps.items():
        label = [model.classes[c] if model.classes else str(c) for c in maps.explained.tolist()]
        area = scores[method].insertion_auc.nanmean()
        print(f"  {method:10} explains {', '.join(label)}; insertion {area:.3f}")
        for i, picture in enumerate(maps.overlay(images, model.preprocess)):
            picture.save(out / f"{question}.{i}.{method.partition('(')[0]}.png")
    return {f"{question} {method}": maps for method, maps in method_maps.items()}


if __name__ == "__main__":
    main()
