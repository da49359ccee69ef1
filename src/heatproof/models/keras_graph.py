"""A Keras 3 model as an ordinary torch module.

On its torch backend every Keras layer is an nn.Module that runs forward hooks, but a Keras model hides its
layers from named_modules(). KerasClassifier walks the model's graph itself, with one child per layer under
the layer's Keras name, so that hooks, tails and layer searches work as on any other network. A final softmax
or sigmoid is left out while the graph runs. Layers and weights are the user's own, not copies.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import Tensor, nn

from heatproof.errors import CheckpointError, ModelError, first_line, need
from heatproof.models.checkpoints import ALLOW_PICKLE

COUNTS = "object_name_uids"  # where Keras counts the names it has given
SQUASHING = {"softmax", "log_softmax", "sigmoid", "log_sigmoid"}
TRANSPARENT = {"Dropout", "Flatten", "Identity", "Reshape"}  # may stand behind the squashing
# A graph that starts with one of these scales its pixels itself.
SCALING = {"Rescaling", "Normalization", "TrueDivide", "Divide", "Multiply", "Subtract", "GetItem", "Stack"}


def import_keras() -> ModuleType:
    """Keras on the torch backend, which must be chosen before the first import."""
    keras = sys.modules.get("keras")
    backend = keras.backend.backend() if keras else os.environ.setdefault("KERAS_BACKEND", "torch")
    if backend != "torch":
        raise ModelError(
            f"Keras is set to its {backend} backend, heatproof needs torch; "
            "set KERAS_BACKEND=torch before keras is imported"
        )
    return need("keras", "keras")


def is_keras(thing: Any) -> bool:
    """Whether this is a Keras model, without importing Keras."""
    return any(c.__name__ == "Model" and c.__module__.startswith("keras.") for c in type(thing).__mro__)


@contextmanager
def fresh_names() -> Iterator[None]:
    """Name layers as in a new session, so that weights fit whenever a network is built."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    before = state.get_global_attribute(COUNTS)
    state.set_global_attribute(COUNTS, defaultdict(int))
    try:
        yield
    finally:
        state.set_global_attribute(COUNTS, before)


def build_application(name: str, num_classes: int | None, pretrained: bool, options: dict[str, Any]) -> Any:
    """A network of keras.applications by its name there; a new head where the classes are not ImageNet's."""
    keras = import_keras()
    known = applications()
    options = {"classifier_activation": None, "weights": "imagenet" if pretrained else None} | options
    with fresh_names():
        if num_classes in (None, 1000) or options["weights"] is None:
            return known[name](classes=num_classes or 1000, **options)
        del options["classifier_activation"]
        base = known[name](include_top=False, pooling="avg", **options)
        scores = keras.layers.Dense(num_classes, name="predictions")(base.output)
        return keras.Model(base.input, scores, name=base.name)


def read_model(path: str, allow_pickle: bool) -> Any:
    """A whole model from a .keras or .h5 file."""
    keras = import_keras()
    if not Path(path).is_file():
        raise ModelError(f"no such model file: {path}")
    scope = importlib.import_module("keras.src.saving.serialization_lib").SafeModeScope(not allow_pickle)
    try:
        with scope:  # which older versions of Keras do not open for HDF5 files
            return keras.saving.load_model(path, compile=False, safe_mode=not allow_pickle)
    except Exception as error:  # zip, HDF5, JSON and registry errors, each of its own kind
        if "safe_mode" in str(error):
            raise ModelError(f"{path} holds pickled Python code; {ALLOW_PICKLE}") from None
        raise ModelError(f"{path} does not load as a Keras model: {first_line(error)}") from error


def applications() -> dict[str, Callable[..., Any]]:
    """The networks of keras.applications by name."""
    names = vars(import_keras().applications).items()
    return {name: f for name, f in names if callable(f) and not name.startswith("_")}


def preprocess_input(model: Any) -> Callable[..., Any] | None:
    """The function that scales "... h w c" pixels in [0, 255] for this model; None if unknown."""
    graph = _graph_of(model)
    first = next((op for op in graph.operations if type(op).__name__ != "InputLayer"), None)
    if type(first).__name__ in SCALING:
        return lambda pixels, data_format=None: pixels
    by_layer = tomllib.loads(Path(__file__).with_name("families.toml").read_text())["keras_by_layer"]
    # One of keras.applications is recognised by its name, by that of a model inside it, or by a layer.
    inner = [op for op in graph.operations if is_keras(op)]
    for part in (model, *inner):
        names = {layer.name for layer in part.layers}
        known = next((known for layer, known in by_layer.items() if layer in names), "")
        if function := _application(part.name) or _application(known):
            return getattr(sys.modules[function.__module__], "preprocess_input", None)
    return None


def _application(name: str) -> Callable[..., Any] | None:
    """The application whose name this one starts with: "mobilenetv2_1.00_224" is a MobileNetV2."""
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    near = [(len(known), f) for known, f in applications().items() if squeezed.startswith(known.lower())]
    return max(near, key=lambda item: item[0])[1] if near else None


class KerasGraph(nn.Module):
    """A Functional or Sequential model, run layer by layer."""

    def __init__(self, model: Any, logits: bool) -> None:
        super().__init__()
        self.training = False  # Keras models are in inference mode unless called with training=True
        graph = _graph_of(model)
        self._graph = (graph,)  # in a tuple: as a child, its weights would be listed twice
        self._squashing = _squashing_operation(graph) if logits else ""
        self.final_activation = ""  # which is left out
        self._child_names: dict[str, str] = {}  # names are unique in a graph, but not all may name a child
        for operation in graph.operations:
            if type(operation).__name__ == "InputLayer":
                continue
            part = operation if isinstance(operation, nn.Module) else Operation(operation)
            if is_keras(operation):
                part = KerasGraph(operation, logits=operation.name == self._squashing)
            name = operation.name.replace(".", "_")
            name = f"{name}_" if hasattr(self, name) else name
            self.add_module(name, part)
            self._child_names[operation.name] = name
            if operation.name == self._squashing:
                self.final_activation = str(getattr(part, "final_activation", _activation(operation)))

    def forward(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        trains = self.training if training is None else training

        def in_graph(operation: Any) -> Callable[..., Any]:
            part: Any = self._modules[self._child_names[operation.name]]
            adapts = trains and part.training  # a part that is frozen does not adapt
            if operation.name == self._squashing and not isinstance(part, KerasGraph):
                part = partial(_without_squashing, operation)
            takes_it = isinstance(part, KerasGraph) or getattr(operation, "_call_has_training_arg", False)
            return partial(part, training=True) if adapts and takes_it else part

        outputs = self._graph[0]._run_through_graph(inputs, operation_fn=in_graph)
        return outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs


class KerasClassifier(KerasGraph):
    """The whole model: images "b c H W" in, logits out."""

    def __init__(self, model: Any, bgr: bool = False) -> None:
        super().__init__(model, logits=True)
        self._model = (model,)
        self.bgr, self.channels_last = bgr, _channels_last(self._graph[0])
        shape = self._graph[0].inputs[0].shape
        size = shape[1:3] if self.channels_last else shape[2:4]
        self.pixel_size = None if None in size else (int(size[0]), int(size[1]))  # if they are fixed
        self.pixel_channels: int | None = shape[3 if self.channels_last else 1]
        self.class_count = int(self._graph[0].outputs[0].shape[-1])

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasClassifier:
        """Keras copies models whole; copied one by one, the children would not be the graph's layers."""
        copied = self.untrained()
        for ours, theirs in zip(copied.parameters(), self.parameters(), strict=True):
            ours.data = theirs.data.clone()
            ours.requires_grad_(theirs.requires_grad)
        return copied

    def forward(self, images: Tensor, training: bool | None = None, mask: Any = None) -> Tensor:
        if self.bgr:
            images = images.flip(1)
        if self.channels_last:
            images = images.permute(0, 2, 3, 1)
        with import_keras().device(str(images.device)):  # otherwise Keras moves tensors to its default device
            return cast(Tensor, super().forward(images, training, mask))

    def load_keras_weights(self, path: str | Path) -> None:
        """Weights from a .weights.h5 or .keras file."""
        if not Path(path).is_file():
            raise CheckpointError(f"no such checkpoint: {path}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # Keras only warns of layers that stay random
                self._model[0].load_weights(path)
        except Exception as error:
            raise CheckpointError(
                f"{path} does not fit {self._model[0].name} ({first_line(error)}); "
                "give the num_classes it was made with, or load the whole model from its .keras file"
            ) from error

    @property
    def statistics(self) -> frozenset[str]:
        """Parameters that no gradient trains: means and variances, and what the user froze."""
        fixed = {id(variable.value) for variable in self._model[0].non_trainable_variables}
        return frozenset(name for name, parameter in self.named_parameters() if id(parameter) in fixed)

    def untrained(self) -> KerasClassifier:
        """The same network with weights drawn anew, as Keras draws them."""
        return KerasClassifier(import_keras().models.clone_model(self._model[0]), self.bgr)


class Operation(nn.Module):
    """A node of the graph that is not a layer, such as keras.ops.relu."""

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.operation(*args, **kwargs)


def _graph_of(model: Any) -> Any:
    """The Functional graph inside a model that takes one image and gives one row of scores."""
    graph = getattr(model, "_functional", None) or model
    if not hasattr(graph, "_run_through_graph"):
        unbuilt = "is not built yet; call its build(input_shape)"
        state = unbuilt if hasattr(model, "add") else "has no layer graph"
        raise ModelError(
            f"the Keras model {model.name} {state}; Functional and built Sequential models can be read"
        )
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise ModelError(
            f"the Keras model {model.name} has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs; "
            "make a model of one image and one output from it"
        )
    return graph


def _channels_last(graph: Any) -> bool:
    for operation in graph.operations:
        if is_keras(operation):
            return _channels_last(_graph_of(operation))
        if hasattr(operation, "data_format"):
            return bool(operation.data_format == "channels_last")
    return bool(import_keras().config.image_data_format() == "channels_last")


def _squashing_operation(graph: Any) -> str:
    """Name of the function that makes probabilities at the end of a graph or of its inner model."""
    tensor = graph.outputs[0]
    while True:
        operation, node_index, _ = tensor._keras_history
        if is_keras(operation) or _activation(operation) in SQUASHING:
            return str(operation.name)
        if type(operation).__name__ not in TRANSPARENT:
            return ""
        tensor = operation._inbound_nodes[node_index].input_tensors[0]


def _activation(operation: Any) -> str:
    activation = getattr(operation, "activation", None)
    kind = getattr(activation, "__name__", type(operation).__name__)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()


def _without_squashing(operation: Any, inputs: Tensor, **kwargs: Any) -> Any:
    """Run the last layer without its activation; a layer that is only an activation returns its input."""
    if not hasattr(operation, "activation"):
        return inputs
    activation = operation.activation
    operation.activation = import_keras().activations.linear
    try:
        return operation(inputs, **kwargs)
    finally:
        operation.activation = activation
