"""The examples of heads run as they stand, on little pictures, and show what they say."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from heatproof.images.files import named_file

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> Any:
    return runpy.run_path(str(EXAMPLES / name))["main"](list(arguments))


def test_segmentation_and_detection_of_torchvision(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    maps = run(
        "segment_and_detect.py", str(named_file("example:cat")), "--size", "96", "--out", str(tmp_path)
    )
    assert len(maps) == 8 and all(torch.isfinite(values.values).all() for values in maps.values())
    assert (
        not maps["segmentation gradcam"].degenerate.any() and not maps["detection gradcam"].degenerate.any()
    )
    assert maps["segmentation-middle gradcam"].explained.tolist() == [0]
    assert len(list(tmp_path.glob("*.png"))) == 8


def test_a_regression_s_maps_lie_on_what_it_counts(tmp_path: Path) -> None:
    inside = run("regress.py", "--steps", "60", "--out", str(tmp_path))
    assert inside["gradient-x-input"] >= 0.9 and inside["edges"] <= 0.5


def test_similarity_to_prototypes_and_texts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    maps = run("encode.py", "--out", str(tmp_path))
    assert {name.split()[0] for name in maps} == {"prototype", "text"}
    assert all(torch.isfinite(values.values).all() for values in maps.values())
    assert maps["prototype gradcam"].explained.tolist() == [
        0,
        1,
    ]  # each picture's own mirror image is nearest


def test_a_clip_model_from_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLES / "encode.py"))
    seen = transformers.CLIPVisionConfig(image_size=64, patch_size=8, projection_dim=16, **example["TINY"])
    read = transformers.CLIPTextConfig(
        vocab_size=99, projection_dim=16, bos_token_id=1, eos_token_id=98, **example["TINY"]
    )
    config = transformers.CLIPConfig(
        vision_config=seen.to_dict(), text_config=read.to_dict(), projection_dim=16
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path / "clip")
    vision = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "clip")
    assert vision(torch.zeros(1, 3, 64, 64)).image_embeds.shape == (1, 16)
