"""Keras 3 models: their own layer names, channels last, and logits in place of a softmax head."""

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import heatproof as hp
from heatproof.errors import CheckpointError, InputError, MissingExtraError, ModelError, UnknownNameError
from heatproof.models.capture import capture
from heatproof.models.keras_graph import import_keras
from heatproof.models.layers import picture_layers
from heatproof.models.model import Model
from heatproof.models.running import frozen_eval

try:
    keras = import_keras()  # before any other import: it chooses the backend
except MissingExtraError as missing:
    pytest.skip(str(missing), allow_module_level=True)
layers = keras.layers


def images(size: int = 32, count: int = 2) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(5))


def body(inputs: Any) -> Any:
    """A small residual network."""
    x = layers.Conv2D(8, 3, strides=2, padding="same", name="stem")(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.ReLU(name="relu")(x)
    x = layers.Add(name="add")([x, layers.Conv2D(8, 3, padding="same", name="branch")(x)])
    return layers.Conv2D(12, 3, strides=2, padding="same", activation="relu", name="last")(x)


def pooled(x: Any) -> Any:
    return layers.GlobalAveragePooling2D(name="pool")(x)


def flat(classes: int = 3, activation: str | None = "softmax") -> Any:
    inputs = keras.Input((32, 32, 3))
    return keras.Model(
        inputs, layers.Dense(classes, activation=activation, name="head")(pooled(body(inputs)))
    )


def nested() -> Any:
    inner, outer = keras.Input((32, 32, 3)), keras.Input((32, 32, 3))
    base = keras.Model(inner, body(inner), name="base")
    head = layers.Dense(1, activation="sigmoid", name="head")
    return keras.Model(outer, head(pooled(base(outer, training=False))))


def sequential() -> Any:
    parts = [
        keras.Input((32, 32, 3)),
        layers.Conv2D(8, 3, activation="relu", name="first"),
        layers.MaxPooling2D(name="max"),
        layers.GlobalAveragePooling2D(name="pool"),
        layers.Dense(4, name="head"),
        layers.Softmax(name="soft"),
    ]
    return keras.Sequential(parts)


def with_operations() -> Any:
    inputs = keras.Input((32, 32, 3))
    x = keras.ops.relu(layers.Conv2D(8, 3, name="first")(inputs))
    return keras.Model(inputs, keras.ops.softmax(layers.Dense(3, name="head")(pooled(x))))


def with_activation_layer() -> Any:
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(3, 1, name="scores")(layers.GlobalAveragePooling2D(keepdims=True)(body(inputs)))
    x = layers.Activation("softmax")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Identity()(x))


def whole_model_inside() -> Any:
    return keras.Sequential([keras.Input((32, 32, 3)), flat()])


EVERY = [flat, nested, sequential, with_operations, with_activation_layer, whole_model_inside]


@pytest.mark.parametrize("make", EVERY)
def test_logits_are_what_the_head_squashes(make: Any) -> None:
    keras_model, pixels = make(), images()
    probabilities = keras_model(pixels.permute(0, 2, 3, 1)).detach()
    logits = hp.load_model(keras_model).logits(pixels)
    squashed = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)
    assert torch.allclose(squashed, probabilities, atol=1e-6)
    assert not torch.allclose(logits, probabilities, atol=1e-3)
    assert torch.equal(keras_model(pixels.permute(0, 2, 3, 1)).detach(), probabilities), (
        "the user's model changed"
    )


def test_a_linear_head_stays_as_it_is() -> None:
    keras_model = flat(activation=None)
    expected = keras_model(images().permute(0, 2, 3, 1)).detach()
    assert torch.equal(hp.load_model(keras_model).logits(images()), expected)


def test_several_sigmoids_are_findings_and_one_is_a_logit() -> None:
    heads = ((nested(), "one logit"), (sequential(), "softmax"), (flat(activation="sigmoid"), "multilabel"))
    for keras_model, head in heads:
        model = hp.load_model(keras_model)
        model.logits(images())
        assert model.head_name == head


def test_the_head_is_restored_when_a_layer_fails() -> None:
    keras_model = flat()
    head = keras_model.get_layer("head")
    handle = head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hp.load_model(keras_model).logits(images())
    handle.remove()
    assert head.activation is keras.activations.softmax


@pytest.mark.parametrize("make", EVERY)
def test_every_cam_works(make: Any) -> None:
    model = hp.load_model(make())
    methods = ["gradcam", "layercam", "eigencam", "ablationcam", "scorecam"]
    for method, maps in hp.explain(model, images(), methods).items():
        height, width = maps.values.shape[1:]
        assert len(maps) == 2 and height == width > 1, method


def test_layers_keep_their_keras_names() -> None:
    names = [name for name, _, _ in picture_layers(hp.load_model(flat()), images())]
    assert names == ["stem", "norm", "relu", "branch", "add", "last"]
    inside = [name for name, _, _ in picture_layers(hp.load_model(nested()), images())]
    assert inside == ["base.stem", "base.norm", "base.relu", "base.branch", "base.add", "base.last", "base"]
    with pytest.raises(UnknownNameError, match="'branch'"):
        hp.explain(hp.load_model(flat()), images(), layer="brunch")


APPLICATIONS = [
    ("DenseNet201", 64, "conv5_block32_concat", (2, 2)),
    ("InceptionV3", 107, "mixed10", (2, 2)),
    ("ResNet50V2", 64, "conv5_block3_out", (2, 2)),
]


@pytest.mark.parametrize(("name", "size", "layer", "grid"), APPLICATIONS, ids=[a[0] for a in APPLICATIONS])
def test_gradients_equal_those_of_two_keras_submodels(
    name: str, size: int, layer: str, grid: tuple[int, int]
) -> None:
    """Without the wrapper: Keras cuts the network in two at the layer, autograd runs the second half."""
    keras.utils.set_random_seed(1)
    original = getattr(keras.applications, name)(weights=None, classes=4, input_shape=(size, size, 3))
    head = original.layers[-1]
    front = keras.Model(original.input, original.get_layer(layer).output)
    back = keras.Model(original.get_layer(layer).output, head.input)
    pixels, target = images(size), 2
    activation = front(pixels.permute(0, 2, 3, 1)).detach().requires_grad_()
    logits = back(activation) @ head.kernel.value + head.bias.value
    (gradient,) = torch.autograd.grad(logits[:, target].sum(), activation)

    model = hp.load_model(original)
    with frozen_eval(model.module):
        trace = capture(model, pixels, target, layer=layer)
    assert trace.layer == layer and trace.activation.shape[2:] == grid
    assert torch.allclose(trace.logits, logits.detach(), atol=1e-5, rtol=1e-4)
    assert torch.allclose(trace.activation, activation.detach().permute(0, 3, 1, 2), atol=1e-5, rtol=1e-4)
    assert torch.allclose(trace.gradient, gradient.permute(0, 3, 1, 2), atol=1e-7, rtol=1e-4)

    by_hand = (gradient.mean((1, 2), keepdim=True) * activation.detach()).sum(3).clamp(min=0)
    result = hp.explain(model, pixels, "gradcam", targets=target, layer=layer)["gradcam"].values
    assert torch.allclose(result, by_hand, atol=1e-6, rtol=1e-3)


def test_weights_are_the_users_own_and_nothing_is_listed_twice() -> None:
    keras_model = nested()
    module = hp.load_model(keras_model).module
    assert {id(p) for p in module.parameters()} == {id(v.value) for v in keras_model.variables}
    assert len(list(module.parameters())) == len(keras_model.variables)


def test_the_model_is_untouched_by_an_explanation() -> None:
    keras_model = flat()
    keras_model.get_layer("stem").trainable = False
    before = [v.value.detach().clone() for v in keras_model.variables]
    flags = [v.value.requires_grad for v in keras_model.variables]
    hp.explain(hp.load_model(keras_model), images(), ["gradcam", "ablationcam"])
    assert all(torch.equal(v.value, old) for v, old in zip(keras_model.variables, before, strict=True))
    assert [v.value.requires_grad for v in keras_model.variables] == flags
    assert not any(layer._forward_hooks for layer in keras_model.layers)


def test_training_mode_reaches_the_layers() -> None:
    keras_model = flat()
    module = hp.load_model(keras_model).module
    mean = keras_model.get_layer("norm").moving_mean
    before = mean.value.detach().clone()
    module(images())
    assert not module.training and torch.equal(mean.value, before)
    module.train()
    module(images())
    assert not torch.equal(mean.value, before)


def test_an_inner_model_that_was_told_not_to_train_does_not() -> None:
    keras_model = nested()
    module = hp.load_model(keras_model).module.train()
    mean = keras_model.get_layer("base").get_layer("norm").moving_mean
    before = mean.value.detach().clone()
    module(images())
    assert torch.equal(mean.value, before)


@pytest.mark.parametrize("make", [flat, nested, sequential])
def test_a_copy_shares_nothing(make: Any) -> None:
    module = hp.load_model(make()).module
    copied = copy.deepcopy(module)
    assert torch.equal(copied(images()), module(images()))
    with torch.no_grad():
        for weight in copied.parameters():
            weight.add_(1)
    assert not torch.equal(copied(images()), module(images()))
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in module.parameters()}


@pytest.mark.parametrize("name", ["DenseNet121", "ResNet50", "MobileNetV2", "EfficientNetB0", "VGG16"])
def test_preprocessing_is_the_applications(name: str) -> None:
    """Torch, caffe (BGR), tf and built-in scaling: what enters the graph is what Keras would feed it."""
    shape = (32, 32, 3)
    original = getattr(keras.applications, name)(
        weights=None, include_top=False, pooling="avg", input_shape=shape
    )
    model = hp.load_model(keras.Model(original.input, layers.Dense(2)(original.output), name="renamed"))
    own = sys.modules[type_of(name)].preprocess_input
    pixels = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3)).astype(np.float32)
    expected = torch.from_numpy(np.array(own(pixels.copy()), np.float32))
    ready = model.preprocess.normalise(torch.from_numpy(pixels / 255).permute(0, 3, 1, 2))
    seen: list[Tensor] = []
    first = next(iter(model.module.children()))
    handle = first.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    model.logits(ready)
    handle.remove()
    assert torch.allclose(seen[0], expected, atol=2e-3 * float(expected.abs().max()))


def type_of(application: str) -> str:
    return str(getattr(keras.applications, application).__module__)


def test_a_model_that_scales_by_itself_takes_pixels() -> None:
    parts = [keras.Input((32, 32, 3)), layers.Rescaling(1 / 255), layers.Conv2D(4, 3), layers.Flatten()]
    model = hp.load_model(keras.Sequential([*parts, layers.Dense(2)]))
    assert torch.allclose(model.preprocess.normalise(torch.ones(3, 1, 1)), torch.full((3, 1, 1), 255.0))
    assert model.preprocess.size == (32, 32)


def test_an_application_by_name() -> None:
    model = hp.load_model("keras:MobileNetV2", num_classes=1, input_shape=(32, 32, 3), alpha=0.35)
    assert model.logits(images()).shape == (2, 1) and model.preprocess.mean == (0.5, 0.5, 0.5)
    assert model.classes is None and model.name == "keras:MobileNetV2"
    with pytest.raises(UnknownNameError, match="did you mean 'DenseNet201'"):
        hp.load_model("keras:DenseNet200")
    with pytest.raises(InputError, match="do not take the option 'depth'; allowed: input_shape, alpha"):
        hp.load_model("keras:MobileNetV2", depth=3)


def test_pretrained_networks_get_a_new_head_for_other_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    options_used: dict[str, Any] = {}
    real = keras.applications.MobileNetV2

    def without_download(**options: Any) -> Any:
        options_used.update(options)
        return real(**options | {"weights": None})

    monkeypatch.setattr(keras.applications, "MobileNetV2", without_download)
    model = hp.load_model(
        "keras:MobileNetV2", pretrained=True, num_classes=3, input_shape=(32, 32, 3), alpha=0.35
    )
    assert options_used["weights"] == "imagenet" and options_used["include_top"] is False
    assert model.logits(images()).shape == (2, 3)


def quietly_save(keras_model: Any, path: Path, method: str = "save") -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # inside Keras, about NumPy
        getattr(keras_model, method)(path)
    return path


def test_a_model_file_and_its_weights(tmp_path: Path) -> None:
    keras_model = nested()
    expected = hp.load_model(keras_model).logits(images())
    whole = quietly_save(keras_model, tmp_path / "net.keras")
    weights = quietly_save(keras_model, tmp_path / "net.weights.h5", "save_weights")
    assert torch.allclose(hp.load_model(whole).logits(images()), expected, atol=1e-6)
    for checkpoint in (weights, whole):
        assert torch.allclose(hp.load_model(nested(), checkpoint).logits(images()), expected, atol=1e-6)
    torch.save(hp.load_model(keras_model).module.state_dict(), tmp_path / "net.pt")
    assert torch.allclose(hp.load_model(keras_model, tmp_path / "net.pt").logits(images()), expected)
    with pytest.raises(InputError, match="is built already"):
        hp.load_model(whole, num_classes=3)


def test_files_that_do_not_fit_raise_a_clear_error(tmp_path: Path) -> None:
    weights = quietly_save(sequential(), tmp_path / "other.weights.h5", "save_weights")
    (tmp_path / "text.keras").write_text("not a model")
    (tmp_path / "text.weights.h5").write_text("not weights")
    for checkpoint in (weights, tmp_path / "text.weights.h5", tmp_path / "none.weights.h5"):
        with pytest.raises(CheckpointError) as caught:
            hp.load_model(nested(), checkpoint)
        assert checkpoint.name in str(caught.value) and "\n" not in str(caught.value)
    for path in (tmp_path / "text.keras", tmp_path / "none.keras"):
        with pytest.raises(ModelError, match=path.name):
            hp.load_model(path)


def test_code_inside_a_file_needs_the_flag(tmp_path: Path) -> None:
    double = layers.Lambda(lambda x: x * 2, output_shape=(32, 32, 3))
    parts = [keras.Input((32, 32, 3)), double, layers.Conv2D(2, 3), layers.GlobalAveragePooling2D()]
    path = quietly_save(keras.Sequential(parts), tmp_path / "code.keras")
    with pytest.raises(ModelError, match="allow_pickle = true, on the command line --allow-pickle"):
        hp.load_model(path)
    assert hp.load_model(path, allow_pickle=True).logits(images()).shape == (2, 2)


def test_models_that_cannot_be_read_raise_a_clear_error() -> None:
    class Subclassed(keras.Model):  # type: ignore[name-defined]
        def call(self, inputs: Any) -> Any:
            return inputs

    two = keras.Input((4,)), keras.Input((4,))
    for keras_model, words in (
        (Subclassed(), "has no layer graph"),
        (keras.Sequential([layers.Dense(2)]), "is not built yet"),
        (keras.Model(two, layers.Add()(list(two))), "has 2 inputs"),
    ):
        with pytest.raises(ModelError, match=words):
            hp.load_model(keras_model)


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keras_model = flat()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ModelError, match="set KERAS_BACKEND=torch before keras is imported"):
        hp.load_model(keras_model)
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    with pytest.raises(ModelError, match="tensorflow backend"):
        hp.load_model("keras:MobileNetV2")


def test_channels_first_models_are_not_turned() -> None:
    inputs = keras.Input((3, 32, 32))
    x = layers.Conv2D(4, 3, data_format="channels_first")(inputs)
    x = layers.GlobalAveragePooling2D(data_format="channels_first")(x)
    model: Model = hp.load_model(keras.Model(inputs, layers.Dense(2)(x)))
    assert not model.module.channels_last and model.preprocess.size == (32, 32)
    assert model.logits(images()).shape == (2, 2)
