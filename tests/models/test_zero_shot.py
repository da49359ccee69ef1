"""Image-text models, built small from their configurations and saved to a folder: classes are prompts."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import heatproof as hp
from conftest import randomise
from heatproof.cli import main
from heatproof.errors import InputError, ModelError
from heatproof.images.kinds import guess_source
from heatproof.models import default_layer
from heatproof.models.derived import untrained_copy
from heatproof.models.names import read_lines
from heatproof.studies.audit.settings import AuditSettings, study_tables

transformers = pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "zero_shot.py"
PROMPTS = ["red: a photo of a red disc", "blue: a photo of a blue square", "a green cross"]
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = {"vocab_size": 14, "max_position_embeddings": 12, "pad_token_id": 0, "bos_token_id": 1} | TINY
SEEN = {"image_size": 32, "patch_size": 8, "projection_dim": 16} | TINY
CNN = {"image_size": 32, "width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 64}
# configuration of texts and of images, and the layer that CAMs read
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "CLIP": (WORDS | {"projection_dim": 16, "eos_token_id": 3}, SEEN, 16, "encoder.layers.1.layer_norm1"),
    "Siglip": (WORDS | {"eos_token_id": 3}, SEEN, 0, "encoder.layers.1.layer_norm1"),
    "Align": (WORDS | {"initializer_range": 0.5}, CNN, 160, "encoder"),
}


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, example: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Spec and original of each model, with random weights."""
    transformers.utils.logging.disable_progress_bar()
    models = {}
    for name, (text, vision, size, _) in MODELS.items():
        torch.manual_seed(0)
        options = {"projection_dim": size} if size else {}
        config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **options)
        network, folder = getattr(transformers, f"{name}Model")(config), tmp_path_factory.mktemp(name)
        randomise(network)
        network.save_pretrained(folder)
        example["tokenizer"]().save_pretrained(folder)
        models[name] = f"hf:{folder}", network
    transformers.utils.logging.enable_progress_bar()
    return models


def own_logits(network: Any, tokenizer: Any, images: Tensor) -> Tensor:
    """Logits of images and texts as the model itself computes them."""
    texts = [prompt.partition(": ")[2] or prompt for prompt in PROMPTS]
    if isinstance(network, transformers.SiglipModel):  # trained with padded texts, without a mask
        ids = tokenizer(texts, padding="max_length", max_length=12, return_tensors="pt")["input_ids"]
        return network(input_ids=ids, pixel_values=images).logits_per_image
    encoded = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    return network(pixel_values=images, **encoded).logits_per_image


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_model_s_own(name: str, saved: Any, example: dict[str, Any]) -> None:
    spec, network = saved[name]
    model, images = hp.load_model(spec, prompts=PROMPTS), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = own_logits(network, example["tokenizer"](), images)
    assert torch.allclose(model.logits(images), expected, rtol=1e-4, atol=1e-4)
    assert model.classes == ("red", "blue", "a green cross") and model.preprocess.size == (32, 32)
    assert model.head_name == "softmax" and default_layer(model, images) == f"vision_model.{MODELS[name][3]}"
    maps = hp.explain(model, images, ["gradcam", "gradient", "rise(masks=8)"], 1)
    assert all(torch.isfinite(m.values).all() for m in maps.values())
    assert maps["gradient"].values.flatten(1).any(1).all()


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_and_plain_passes(name: str, saved: Any) -> None:
    model, images = hp.load_model(saved[name][0], prompts=PROMPTS), torch.randn(2, 3, 32, 32)
    plain = hp.load_model(saved[name][0], prompts=PROMPTS, accelerate=False)
    assert torch.allclose(model.logits(images), plain.logits(images), rtol=1e-4, atol=1e-4)
    before, weight = model.logits(images), model.module.get_parameter("head.weight").clone()
    random = untrained_copy(model, images, seed=1)
    assert not torch.allclose(random.logits(images), before) and torch.equal(
        model.module.get_parameter("head.weight"), weight
    )


def test_several_prompts_of_a_class_are_averaged(saved: Any) -> None:
    spec = saved["CLIP"][0]
    alone = hp.load_model(spec, prompts=["a red disc", "a red square", "a blue disc"])
    rows = alone.module.get_parameter("head.weight")
    named = hp.load_model(spec, prompts=["red: a red disc", "blue: a blue disc", "red: a red square"])
    mean = torch.nn.functional.normalize(rows[:2].mean(0), dim=0) * rows[0].norm()
    assert named.classes == ("red", "blue")
    assert torch.allclose(
        named.module.get_parameter("head.weight"), torch.stack([mean, rows[2]]), rtol=1e-4, atol=1e-5
    )
    by_class = hp.load_model(spec, prompts={"red": "a red disc", "blue": "a blue disc"})
    weight = by_class.module.get_parameter("head.weight")
    assert torch.allclose(weight, rows[[0, 2]], rtol=1e-4, atol=1e-5)


def test_siglip_s_own_sigmoids(saved: Any, example: dict[str, Any]) -> None:
    spec, network = saved["Siglip"]
    model, images = hp.load_model(spec, prompts=PROMPTS, head="multilabel"), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = own_logits(network, example["tokenizer"](), images).sigmoid()
    assert torch.allclose(model.probabilities(model.logits(images)), expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": ["a red disc"]}, "two or more classes"),
        ({"prompts": ["red: a red disc", "red: a red square"]}, "two or more classes"),
        ({"prompts": "a red disc"}, "prompts is a list of texts"),
        ({"prompts": ["red:", "a blue disc"]}, "lacks its text"),
        ({"prompts": ["a " * 20, "a blue disc"]}, "22 tokens, the model takes 12; shorten it"),
        ({"prompts": PROMPTS, "num_classes": 3}, "leave out checkpoint and num_classes"),
        ({"prompts": PROMPTS, "checkpoint": "best.pt"}, "leave out checkpoint and num_classes"),
    ],
)
def test_wrong_prompts(options: dict[str, Any], message: str, saved: Any) -> None:
    with pytest.raises(InputError, match=message):
        hp.load_model(saved["CLIP"][0], **options)


def test_wrong_models(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompts are for image-text models from hf:FOLDER"):
        hp.load_model("torchvision:resnet18", prompts=PROMPTS)
    with pytest.raises(ModelError, match=r"prompts= if it is an image-text model"):
        hp.load_model(saved["CLIP"][0])
    with pytest.raises(ModelError, match=r"does not distinguish 'a cat' from 'a dog'"):
        hp.load_model(saved["CLIP"][0], prompts=["a dog", "a cat"])  # words that the tokenizer lacks
    transformers.ViTForImageClassification(transformers.ViTConfig(**SEEN)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"could not be loaded .* of an image-text model with prompts"):
        hp.load_model(f"hf:{tmp_path}", prompts=PROMPTS)


@pytest.mark.trains
def test_the_example_and_the_commands(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    maps = example["main"](["--steps", "80", "--out", "."])
    heat = {name: maps[name]["occlusion"].upsample()[0].clamp(min=0) for name in ("red", "blue")}
    shares = [float(heat["red"][:, :16].sum() / heat["red"].sum())]  # the red square is on the left
    shares += [float(heat["blue"][:, 16:].sum() / heat["blue"].sum())]
    assert sum(shares) / 2 > 0.6 and Path("panel.png").exists()

    Path("prompts.txt").write_text("green: a photo of a green disc\n\nblue: a photo of a blue disc\n")
    red = "red: a photo of a red disc"
    arguments = ["hf:clip", "two.png", "--prompt", red, "--prompts", "prompts.txt", "--target", "blue"]
    result = CliRunner().invoke(main, ["explain", *arguments, "--out", "maps"], catch_exceptions=False)
    assert result.exit_code == 0 and "softmax" in result.output
    assert Path("maps/two.gradcam.png").exists()

    # The study that an audit writes has the prompts inside; folders are matched to their classes.
    others = read_lines("prompts.txt")
    settings = AuditSettings(model="hf:clip", images=Path("images"), prompt=(red,), prompts=others)
    tables = study_tables(settings, guess_source(settings.images), tmp_path, {})
    assert tables["model"]["prompts"] == [red, *others]
    run = hp.run(tables | {"methods": ["gradcam"], "metrics": ["accuracy"]}, "run")
    (accuracy,) = run.scores().query("metric == 'accuracy'").value
    assert accuracy > 0.9
    command = ["audit", "hf:clip", "images", "--prompt", red, "--no-open"]
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code and "two or more classes" in str(refused.output) + str(refused.exception)
