"""Hugging Face classifiers, built small from their configurations and saved to a folder; no network."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import heatproof as hp
from conftest import randomise
from heatproof.errors import CheckpointError, InputError, ModelError
from heatproof.models.capture import capture
from heatproof.models.running import frozen_eval
from heatproof.registry import explainers

transformers = pytest.importorskip("transformers")

STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 16,
}
# class in transformers, configuration, layer, grid of a 64x64 image
BLOCKS = "layers" if int(transformers.__version__.split(".")[0]) >= 5 else "encoder.layer"  # of ViT and DeiT
CLASSIFIERS: list[tuple[str, dict[str, Any], str, int]] = [
    ("ResNet", STAGES | {"layer_type": "basic"}, "resnet.encoder.stages.3", 2),
    ("RegNet", STAGES | {"groups_width": 8}, "regnet.encoder.stages.3", 2),
    ("ConvNext", {"hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4}, "convnext.encoder.stages.3", 2),
    (
        "EfficientNet",
        {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640},
        "efficientnet.encoder",
        2,
    ),
    ("MobileNetV1", {"depth_multiplier": 0.25}, "mobilenet_v1.layer.25", 2),
    ("MobileNetV2", {"depth_multiplier": 0.35}, "mobilenet_v2.conv_1x1", 2),
    ("ViT", VIT, f"vit.{BLOCKS}.2.layernorm_before", 4),
    ("Dinov2", VIT, "dinov2.encoder.layer.2.norm1", 4),
    (
        "Dinov2WithRegisters",
        VIT | {"num_register_tokens": 4},
        "dinov2_with_registers.encoder.layer.2.norm1",
        4,
    ),
    ("DeiT", VIT, f"deit.{BLOCKS}.2.layernorm_before", 4),
    (
        "Swin",
        {"embed_dim": 12, "depths": [1, 1, 1], "num_heads": [2, 2, 2], "image_size": 64, "window_size": 4},
        "swin.layernorm",
        4,
    ),
]


def build(name: str, options: dict[str, Any], classes: int = 4, head: str = "ForImageClassification") -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**options, num_labels=classes)
    return getattr(transformers, name + head)(config).eval()


def save(module: Any, folder: Path) -> str:
    transformers.utils.logging.disable_progress_bar()
    module.save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    return f"hf:{folder}"


@pytest.mark.parametrize(("name", "options", "layer", "grid"), CLASSIFIERS, ids=[c[0] for c in CLASSIFIERS])
def test_a_saved_classifier(
    name: str, options: dict[str, Any], layer: str, grid: int, tmp_path: Path
) -> None:
    original = randomise(build(name, options))
    model = hp.load_model(save(original, tmp_path))
    images = torch.randn(2, 3, 64, 64)
    assert torch.allclose(model.logits(images), original(images).logits, atol=1e-6)
    with frozen_eval(model.module):
        trace = capture(model, images)
    assert trace.layer == layer and trace.activation.shape[2:] == (grid, grid)
    assert trace.gradient.flatten(1).any(1).all()
    assert explainers.get("gradcam").function(trace).shape == (2, grid, grid)


def test_a_distilled_deit_has_two_extra_tokens() -> None:
    original = build("DeiT", VIT, head="ForImageClassificationWithTeacher")
    model = hp.load_model(original)
    images = torch.randn(1, 3, 64, 64)
    seen: list[torch.Tensor] = []
    layer = original.get_submodule(f"deit.{BLOCKS}.2.layernorm_before")
    handle = layer.register_forward_hook(lambda _m, _i, output: seen.append(output))
    with frozen_eval(original):
        trace = capture(model, images)
    handle.remove()
    assert seen[-1].shape[1] == 2 + 16
    assert torch.equal(trace.activation.flatten(2).transpose(1, 2), seen[-1][:, 2:])


def test_register_tokens_are_left_out() -> None:
    original = build("Dinov2WithRegisters", VIT | {"num_register_tokens": 4})
    seen: list[torch.Tensor] = []
    layer = original.dinov2_with_registers.encoder.layer[2].norm1
    handle = layer.register_forward_hook(lambda _m, _i, output: seen.append(output))
    with frozen_eval(original):
        trace = capture(hp.load_model(original), torch.randn(1, 3, 64, 64))
    handle.remove()
    assert torch.equal(trace.activation.flatten(2).transpose(1, 2), seen[-1][:, 1 + 4 :])


def picture(width: int = 300, height: int = 260) -> Image.Image:
    ramp = np.linspace(0, 255, width)[None, :, None] * np.linspace(0.2, 1, height)[:, None, None]
    return Image.fromarray((ramp * np.array([1.0, 0.7, 0.4])).astype(np.uint8))


PROCESSORS = [
    ("ViTImageProcessor", {"size": {"height": 64, "width": 48}}),
    ("ConvNextImageProcessor", {"size": {"shortest_edge": 64}, "crop_pct": 0.8}),
    ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}),
    (
        "MobileNetV2ImageProcessor",
        {
            "size": {"shortest_edge": 80},
            "crop_size": {"height": 64, "width": 64},
            "image_mean": [0.1, 0.2, 0.3],
        },
    ),
    ("EfficientNetImageProcessor", {"size": {"height": 64, "width": 64}, "rescale_offset": True}),
    ("ViTImageProcessor", {"size": {"height": 64, "width": 64}, "do_normalize": False}),
]


@pytest.mark.parametrize(("name", "options"), PROCESSORS)
def test_preprocessing_is_the_image_processors(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    spec = save(build("ResNet", STAGES | {"layer_type": "basic"}), tmp_path)
    processor = getattr(transformers, name)(**options)
    processor.save_pretrained(tmp_path)
    expected = processor(picture(), return_tensors="pt")["pixel_values"][0]
    tensor = hp.load_model(spec).preprocess(picture())
    scale = expected.max() - expected.min()
    assert tensor.shape == expected.shape and (tensor - expected).abs().max() < 0.03 * scale


def test_without_a_processor_the_size_is_the_configurations(tmp_path: Path) -> None:
    assert hp.load_model(save(build("ViT", VIT), tmp_path)).preprocess.size == (64, 64)


def test_class_names_come_from_the_configuration(tmp_path: Path) -> None:
    module = build("ViT", VIT, classes=2)
    assert hp.load_model(save(module, tmp_path / "unnamed")).classes is None
    module.config.id2label = {0: "healthy", 1: "ill"}
    assert hp.load_model(save(module, tmp_path / "named")).classes == ("healthy", "ill")


def test_a_checkpoint_brings_its_classes(tmp_path: Path) -> None:
    spec = save(build("ViT", VIT, classes=4), tmp_path)
    trained = build("ViT", VIT, classes=6)
    torch.save({"state_dict": trained.state_dict()}, tmp_path / "six.pt")
    model = hp.load_model(spec, tmp_path / "six.pt")
    images = torch.randn(1, 3, 64, 64)
    assert torch.allclose(model.logits(images), trained(images).logits, atol=1e-6)
    with pytest.raises(CheckpointError, match="has 6 classes"):
        hp.load_model(spec, tmp_path / "six.pt", num_classes=5)


def test_a_backbone_without_a_head_is_not_a_classifier(tmp_path: Path) -> None:
    spec = save(build("ViT", VIT, head="Model"), tmp_path)
    with pytest.raises(ModelError, match=r"has no weights for classifier.*num_classes="):
        hp.load_model(spec)
    assert hp.load_model(spec, num_classes=3).logits(torch.randn(1, 3, 64, 64)).shape == (1, 3)


def test_a_new_number_of_classes_keeps_the_backbone(tmp_path: Path) -> None:
    original = build("ViT", VIT)
    model = hp.load_model(save(original, tmp_path), num_classes=9)
    assert model.module.classifier.out_features == 9
    name = f"vit.{BLOCKS}.0.{'mlp.fc1' if BLOCKS == 'layers' else 'intermediate.dense'}.weight"
    assert torch.equal(model.module.get_parameter(name), original.get_parameter(name))


def test_what_is_no_classifier_raises_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    transformers.BertConfig().save_pretrained(tmp_path / "text")
    for spec in (f"hf:{tmp_path}/empty", f"hf:{tmp_path}/text"):
        with pytest.raises(ModelError, match="could not be loaded") as caught:
            hp.load_model(spec)
        assert "\n" not in str(caught.value)


def test_a_failing_download_raises_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(ModelError, match=r"hf:some/model could not be loaded \(no network\)"):
        hp.load_model("hf:some/model")


def test_options_are_fields_of_the_config(tmp_path: Path) -> None:
    spec = save(build("ViT", VIT), tmp_path)
    assert hp.load_model(spec, hidden_dropout_prob=0.25).module.config.hidden_dropout_prob == 0.25
    for name in ("weights_only", "attn_implementation", "quantization_config", "auto_map"):
        with pytest.raises(InputError, match=f"the option '{name}'; allowed: .*hidden_dropout_prob"):
            hp.load_model(spec, **{name: False})  # type: ignore[arg-type]
