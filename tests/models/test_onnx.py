"""ONNX files: the maps of the exported network, layers that hooks can change, random weights, refusals."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import heatproof as hp
from conftest import small_cnn
from heatproof.cli import main
from heatproof.errors import HeatproofError, InputError, MissingExtraError, ModelError, UnknownNameError
from heatproof.models.capture import at_layers, capture
from heatproof.models.derived import untrained_copy
from heatproof.models.keras_graph import import_keras
from heatproof.models.running import frozen_eval
from heatproof.registry import explainers
from tiny_study import make_study

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

METHODS = [
    "eigencam", "scorecam(channels=8)", "reciprocam", "ablationcam", "occlusion(window=16, stride=16)",
    "rise(masks=32)",
]  # fmt: skip
Export = Callable[..., str]


def images(size: int = 32, count: int = 2) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Export a module; returns the spec of the file."""

    def write(net: nn.Module, example: Tensor, dynamic: bool = True, **options: Any) -> str:
        axes = {"x": {0: "b"}} if dynamic else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                net.eval(), (example[:1],), str(tmp_path / "net.onnx"), input_names=["x"], dynamic_axes=axes,
                dynamo=False, **options,
            )  # fmt: skip
        return f"onnx:{tmp_path / 'net.onnx'}"

    return write


def varied(net: nn.Module) -> nn.Module:
    """With norms and biases that are not at their initial constants, which exporters store once."""
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.ndim == 1:
            tensor.data += 0.1 * torch.rand_like(tensor)
    return net.eval()


def squeezenet() -> nn.Module:
    return pytest.importorskip("torchvision").models.squeezenet1_1(num_classes=7)


def resnet() -> nn.Module:
    models = pytest.importorskip("torchvision").models
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=7)


def densenet() -> nn.Module:
    return pytest.importorskip("torchvision").models.DenseNet(8, (2, 2), 16, num_classes=7)


def transformer() -> nn.Module:
    models = pytest.importorskip("torchvision").models
    net = models.VisionTransformer(64, 16, 2, 4, 32, 64, num_classes=7)
    nn.init.normal_(net.heads.head.weight)  # torchvision begins with 0
    return net


def mobilenet() -> nn.Module:
    return pytest.importorskip("torchvision").models.mobilenet_v3_small(num_classes=7)


@pytest.mark.parametrize(
    ("build", "opset"),
    [(squeezenet, 20), (resnet, 11), (densenet, 20), (transformer, 20), (transformer, 14), (mobilenet, 20)],
)
def test_the_default_layer_is_the_one_of_the_exported_network(build, opset: int, export: Export) -> None:
    net, given = varied(build()), images(64)
    traces = []
    for model in (hp.load_model(net), hp.load_model(export(net, given, opset_version=opset))):
        with frozen_eval(model.module):
            traces.append(capture(model, given, needs=frozenset({"activations"})))
    own, other = traces
    torch.testing.assert_close(other.activation, own.activation, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(other.logits, own.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("build", "dynamic"), [(squeezenet, True), (resnet, False), (transformer, True)])
def test_maps_are_those_of_the_exported_network(build, dynamic: bool, export: Export) -> None:
    net, given = varied(build()), images(64)
    model = hp.load_model(export(net, given, dynamic))
    assert model.module.batch == (0 if dynamic else 1) and model.preprocess.size == (64, 64)
    ours = hp.explain(hp.load_model(net), given, METHODS, [1, 4], seed=2)
    theirs = hp.explain(model, given, METHODS, [1, 4], seed=2)
    for method in METHODS:
        own, other = ours[method].values, theirs[method].values
        assert float((own - other).abs().max()) < 1e-4 * max(1.0, float(own.abs().max())), method
    assert theirs["eigencam"].values.std() > 0 and theirs["reciprocam"].values.std() > 0


def test_maps_of_a_segmentation_are_read_at_the_coarsest_grid(export: Export) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, 2, 1), nn.ReLU(), nn.Upsample(scale_factor=4),
        nn.Conv2d(6, 4, 1),
    )  # fmt: skip
    model = hp.load_model(export(net, images()))
    ours, theirs = (hp.explain(m, images(), "eigencam", [1, 2])["eigencam"] for m in (net, model))
    assert theirs.values.shape == (2, 8, 8)
    torch.testing.assert_close(theirs.values, ours.values, atol=1e-4, rtol=1e-4)


def test_maps_of_a_keras_network_with_channels_last(export: Export) -> None:
    try:
        keras = import_keras()
    except HeatproofError as error:
        pytest.skip(str(error))
    layers = keras.layers
    net = keras.Sequential([
        keras.Input((40, 40, 3)), layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False),
        layers.BatchNormalization(), layers.ReLU(),
        layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"), layers.GlobalAveragePooling2D(),
        layers.Dense(4, activation="softmax"),
    ])  # fmt: skip
    given = images(40)
    model = hp.load_model(export(net, given.permute(0, 2, 3, 1)))
    assert model.module.nhwc and model.preprocess.size == (40, 40)
    ours, theirs = (hp.explain(m, given, METHODS, [1, 2], seed=2) for m in (hp.load_model(net), model))
    for method in METHODS:
        torch.testing.assert_close(theirs[method].values, ours[method].values, atol=1e-4, rtol=1e-4)


def test_a_hook_changes_what_lies_behind_its_layer(export: Export) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(5, 3),
    )  # fmt: skip
    given, model = images(), hp.load_model(export(net, images()))
    layer = "/1/Relu_output_0"
    first = net[1](net[0](given)).detach()
    with at_layers(model.module, [layer], lambda _, output: torch.zeros_like(output)):
        changed = model.logits(given)
    torch.testing.assert_close(changed, net[2:](torch.zeros_like(first)).detach())
    seen: dict[str, Tensor] = {}
    with at_layers(
        model.module, [layer, model.layer or ""], lambda name, output: seen.update({name: output})
    ):
        torch.testing.assert_close(model.logits(given), net(given).detach())
    torch.testing.assert_close(seen[layer], first)
    with pytest.raises(UnknownNameError, match="unknown layer 'relu'; known: /0/Conv_output_0"):
        hp.explain(model, given, "eigencam", layer="relu")


def test_names_of_tensors_with_a_dot_are_accepted(export: Export) -> None:
    model = hp.load_model(export(varied(resnet()), images(64)))
    assert model.layer == "/layer4/layer4_0/relu_1/Relu_output_0"
    maps = [
        hp.explain(model, images(64), "eigencam", layer=name)["eigencam"].values
        for name in (model.layer, "/layer4/layer4.0/relu_1/Relu_output_0")
    ]
    assert torch.equal(*maps)


def test_copies_have_weights_of_their_own_which_follow_the_seed(export: Export) -> None:
    net = varied(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), small_head(4)))
    given, model = images(), hp.load_model(export(net, images(), do_constant_folding=False))
    before = model.logits(given)
    draws = [untrained_copy(model, given, seed).logits(given).clone() for seed in (0, 1, 0)]
    assert torch.equal(draws[0], draws[2]) and not torch.allclose(draws[0], draws[1])
    assert not torch.allclose(draws[0], before) and torch.equal(model.logits(given), before)
    for other in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
        assert torch.equal(other(given), before)
    with torch.no_grad():
        next(iter(model.module.parameters())).mul_(2)
    assert not torch.equal(model.logits(given), before)


def small_head(channels: int, classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def test_random_weights_have_the_distribution_of_torch(export: Export) -> None:
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), small_head(64))
    drawn = untrained_copy(hp.load_model(export(net, images())), images(), 0).module
    weights = {name.rpartition(".")[2] + str(w.ndim): w for name, w in drawn.named_parameters()}
    convolution = next(w for w in drawn.parameters() if w.ndim == 4)
    assert float(convolution.abs().max()) == pytest.approx(27**-0.5, rel=0.02)
    assert float(weights["weight2"].abs().max()) == pytest.approx(64**-0.5, rel=0.1)
    biases = sorted((w for w in drawn.parameters() if w.ndim == 1), key=len)
    assert 0 < float(biases[0].abs().max()) < 64**-0.5 and float(biases[1].abs().max()) == 0


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.Sigmoid(), nn.Identity()])
def test_logits_are_read_in_front_of_the_last_activation(last: nn.Module, export: Export) -> None:
    net = small_cnn().eval()
    model = hp.load_model(export(nn.Sequential(net, last), images()))
    torch.testing.assert_close(model.logits(images()), net(images()).detach(), atol=1e-5, rtol=1e-4)
    assert model.head_name == ("multilabel" if isinstance(last, nn.Sigmoid) else "softmax")


def test_a_float16_network_and_a_size_that_is_free(export: Export, tmp_path: Path) -> None:
    half = hp.load_model(export(small_cnn().half(), images().half()))
    assert half.dtype == torch.float16 and half.logits(images()).dtype == torch.float32
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), small_head(4)).eval()
    export(net, images())
    proto = onnx.load(tmp_path / "net.onnx")
    for side in proto.graph.input[0].type.tensor_type.shape.dim[2:]:
        side.dim_param = "side"
    onnx.save(proto, tmp_path / "net.onnx", save_as_external_data=True, location="data", size_threshold=0)
    free = hp.load_model(f"onnx:{tmp_path / 'net.onnx'}")
    assert free.preprocess.size == (224, 224)
    torch.testing.assert_close(free.logits(images(40)), net(images(40)).detach(), atol=1e-5, rtol=1e-4)
    (tmp_path / "data").unlink()
    with pytest.raises(
        ModelError, match=r"is not a complete ONNX file .*; export it again, and keep external"
    ):
        hp.load_model(f"onnx:{tmp_path / 'net.onnx'}")


@pytest.mark.parametrize("method", ["gradcam", "gradient", "lrp", "rollout", "captum:Saliency"])
def test_methods_that_need_gradients_are_refused(method: str, export: Export) -> None:
    model = hp.load_model(export(small_cnn(), images()))
    words = rf"runs in ONNX Runtime, without gradients that {method} could read; use ablationcam, .*scorecam"
    with pytest.raises(ModelError, match=words):
        hp.explain(model, images(), [method])
    refused = {entry.name for entry in explainers if entry.reads_gradients}
    assert refused.isdisjoint({"ablationcam", "eigencam", "reciprocam", "scorecam", "lime", "kernel-shap"})


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_cnn()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.net(x)
        return scores, 2 * scores


def test_what_cannot_be_read_is_refused_in_a_sentence(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(spec: str, **options: Any) -> str:
        with pytest.raises(HeatproofError) as caught:
            hp.load_model(spec, **options)
        return str(caught.value)

    spec = export(TwoTables(), images(), output_names=["a", "b"])
    assert "has the outputs a, b; name the one with class scores" in refusal(spec)
    assert hp.load_model(f"{spec}:b").logits(images()).shape == (2, 5)
    spec = export(small_cnn(), images())
    assert "num_classes: only for networks built by name" in refusal(spec, num_classes=3)
    assert "has its weights inside; leave the checkpoint out" in refusal(spec, checkpoint="a.pt")
    assert "no such file" in refusal("onnx:absent.onnx")
    with pytest.raises(InputError, match=r"has the fixed input size 3x32x32.*preprocessing makes 3x32x32"):
        hp.explain(hp.load_model(spec), images(48), "eigencam")
    proto, path = onnx.load(tmp_path / "net.onnx"), tmp_path / "changed.onnx"
    shape = proto.graph.input[0].type.tensor_type.shape

    def changed() -> str:
        onnx.save(proto, path)
        return refusal(f"onnx:{path}")

    shape.dim[0].dim_value = 4
    assert "takes 4 images at a time; export it for any number of them, or for 1" in changed()
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8
    assert r"takes x (UINT8 [4, 3, 32, 32]), not one batch of images of floats" in changed()
    proto = onnx.load(tmp_path / "net.onnx")
    proto.graph.node[0].op_type, proto.graph.node[0].domain = "Strange", "other"
    proto.opset_import.add(domain="other", version=1)
    assert "cannot run the graph" in changed() and "Strange" in changed()
    path.write_bytes(b"no protobuf")
    assert "is not a complete ONNX file" in refusal(f"onnx:{path}")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'heatproof\[onnx\]'"):
        hp.load_model(spec)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its exporter
def test_audit_evidence_and_gate_run_on_an_onnx_file(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_study(tmp_path, images=44)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), small_head(6, 2))
    net[2][2].weight.data *= 100  # so that painting over an image changes the answer
    export(net, images())
    monkeypatch.chdir(tmp_path)

    def heatproof(*words: str) -> str:
        result = CliRunner().invoke(main, [*words])
        assert result.exit_code == 0, result.output
        return result.output

    network = ["onnx:net.onnx", "pictures", "--device", "cpu", "--threads", "1"]
    heatproof("audit", *network, "--minutes", "0.1", "--out", "audited")
    rows = hp.open_run("audited").folder.scores().sql("select * from scores where method = 'reciprocam'")
    drawn = [row["value"] for row in rows if row["metric"].startswith("specificity_weights")]
    assert len(drawn) >= 4 and sum(value == value and value != 0 for value in drawn) >= len(drawn) / 2
    heatproof("gate", "audited", "--min-n", "1", "--rule", "accuracy >= 0")
    heatproof("evidence", *network, "--limit", "12", "--out", "used")
    assert "reciprocam" in (tmp_path / "used" / "study.toml").read_text()
