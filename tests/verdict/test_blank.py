"""What a blank map means, from the activations: no evidence for the explained class, or a dead layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import heatproof as hp
from heatproof.run.config import toml
from heatproof.run.plan import DEAD_LAYER, NO_EVIDENCE

NETWORK = """
import torch
from torch import nn
from heatproof.images import Preprocess
from heatproof.models import Model

def bright():
    net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    with torch.no_grad():
        net[0].weight.fill_(1.0), net[0].bias.fill_(-0.3)        # dead where the picture is dark
        net[4].weight.copy_(torch.tensor([[-1.0] * 2, [1.0] * 2]))
        net[4].bias.copy_(torch.tensor([0.4, -0.4]))
    return Model(net, "bright", Preprocess((8, 8), 8, (0.0,) * 3, (1.0,) * 3))
"""
METHODS = ["gradcam", "layercam", "eigencam", "gradient"]


def test_a_layer_is_dead_where_it_says_the_same_everywhere() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.zero_()
    images = torch.stack([torch.zeros(1, 4, 4), torch.full((1, 4, 4), 0.7), torch.rand(1, 4, 4)])
    maps = hp.explain(net, images, ["gradcam", "ms-gradcam++", "random", "gradient"])
    for name in ("gradcam", "ms-gradcam++"):
        dead = maps[name].dead
        assert dead is not None and dead.tolist() == [True, True, False]
        assert maps[name].take([2, 0]).dead.tolist() == [False, True]
    assert maps["random"].dead is None and maps["gradient"].dead is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hp.Run:
    """Of each class eight bright pictures, and four that are black."""
    folder = tmp_path_factory.mktemp("bright")
    (folder / "net.py").write_text(NETWORK)
    for label in ("no", "yes"):
        (folder / "pictures" / label).mkdir(parents=True)
        for i in range(12):
            drawn = np.random.default_rng(i).integers(90, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(drawn if i < 8 else 0 * drawn).save(folder / f"pictures/{label}/{i:02d}.png")
    study = {
        "methods": METHODS,
        "metrics": [],
        "run": {"targets": "label", "batch_size": 5, "threads": 1, "workers": 1, "device": "cpu"},
        "model": {"spec": "net.py:bright"},
        "images": {"kind": "folder", "path": "pictures"},
    }
    (folder / "study.toml").write_text(toml(study))
    return hp.run(folder / "study.toml", folder / "out")


def test_rows_of_blank_maps_say_which(run: hp.Run) -> None:
    rows = run.folder.scores().sql("from scores where metric = 'degenerate'")
    values = {(r["method"], r["label"], r["image"][-6:-4]): (r["value"], r["reason"]) for r in rows}
    for method in ("gradcam", "layercam"):
        for i in range(12):
            dark = i >= 8
            assert values[method, 1, f"{i:02d}"] == (float(dark), DEAD_LAYER if dark else "")
            assert values[method, 0, f"{i:02d}"] == (1.0, DEAD_LAYER if dark else NO_EVIDENCE)
    assert {values["eigencam", c, f"{i:02d}"] for c in (0, 1) for i in range(8)} == {(0.0, "")}
    assert {values["eigencam", c, f"{i:02d}"] for c in (0, 1) for i in range(8, 12)} == {(1.0, DEAD_LAYER)}
    assert {reason for (method, *_), (_, reason) in values.items() if method == "gradient"} == {""}


def test_the_verdict_says_which(run: hp.Run) -> None:
    notes = {answer.method: answer.note.partition("; ")[2] for answer in run.verdict().methods}
    both = "33% without positive evidence for the explained class, 33% because the layer is constant"
    assert notes["gradcam"] == notes["layercam"] == f"67% of its maps are blank: {both}"
    assert notes["eigencam"] == "33% of its maps are blank: 33% because the layer is constant"
    assert notes["gradient"] == "100% of its maps are blank" or "blank" not in notes["gradient"]
