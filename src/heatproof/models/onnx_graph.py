"""ONNX files: a graph that ONNX Runtime computes, as a module whose steps are submodules.

Each step of the graph with a grid or weights is a submodule, named after the tensor that it returns. It
computes nothing: ONNX Runtime runs the whole graph, or the part of it between the tensors that are known and
those that are required, and passes tensors of steps with hooks through them. If a hook changes a tensor, or a
forward is replaced, the part behind is computed from it. Weights are parameters: when they change, the
sessions are created again. There are no gradients.

The default layer follows the rule of layers.py on the graph: from the output back over the head, the last
grid that is not the result of pooling. A last convolution that only makes class scores, as in SqueezeNet,
belongs to the head. In a transformer it is the normalisation in front of the last attention.

In a copy with random weights, convolutions and matrix products get the default distribution of torch and
norms are reset. Biases of convolutions become 0, since exporters fold batch norms into them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.errors import ModelError, need
from heatproof.models.checkpoints import first_line
from heatproof.models.state import is_watched

AFFINE = ("weight", "bias")
STEPS = {  # names of the weights behind the first input
    "Conv": AFFINE, "ConvTranspose": AFFINE, "Gemm": AFFINE, "MatMul": AFFINE[:1],
    "BatchNormalization": (*AFFINE, "running_mean", "running_var"), "LayerNormalization": AFFINE,
    "InstanceNormalization": AFFINE, "GroupNormalization": AFFINE, "PRelu": ("slope",),
}  # fmt: skip
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Concat")  # with constants such as position embeddings
POOLING = (
    "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax", "Pad",
    "Dropout", "Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Gather", "Slice",
)  # fmt: skip
SQUASHING = {"Softmax": "softmax", "Sigmoid": "sigmoid"}
FLOATS = {1: np.float32, 10: np.float16, 11: np.float64}  # of TensorProto.DataType
CHANNELS = (1, 3, 4)  # of images, by which the axis of channels is recognised
MOST_SESSIONS = 6


class Step(nn.Module):
    """A step of the graph, called with those of its inputs that are known and with its output."""

    def forward(self, *values: Tensor) -> Tensor:
        return values[-1]


class Product(Step):
    """A convolution or a matrix product; the weight is "outputs inputs ..."."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.convolves = kind.startswith("Conv")

    def reset_parameters(self) -> None:
        weight, bias = (getattr(self, name, None) for name in AFFINE)
        if weight is not None:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if bias is not None:
            limit = 0.0 if self.convolves or weight is None else 1 / math.sqrt(weight[0].numel())
            nn.init.uniform_(bias, -limit, limit)


class Norm(Step):
    """A normalisation."""

    def reset_parameters(self) -> None:
        for name, tensor in self.state_dict(keep_vars=True).items():
            nn.init.constant_(tensor, float(name in ("weight", "running_var")))


class OnnxGraph(nn.Module):
    """A classifier in ONNX; module(images) returns its logits, in front of a last softmax or sigmoid.

    Args:
        proto: the loaded file, which is changed.
        output: name of the output, required if there are several tables.
    """

    differentiable = False

    def __init__(self, proto: Any, output: str = "") -> None:
        super().__init__()
        onnx = need("onnx", "onnx")
        graph = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
        infos = (*graph.input, *graph.value_info, *graph.output)
        types = {info.name: info.type.tensor_type for info in infos}
        self.kinds: dict[str, int] = {name: kind.elem_type for name, kind in types.items()}
        self.shapes: dict[str, list[int | None]] = {
            name: [dim.dim_value or None for dim in kind.shape.dim]
            for name, kind in types.items() if kind.HasField("shape")
        }  # fmt: skip
        self.proto, constants = proto, {constant.name: constant for constant in proto.graph.initializer}
        self.input, self.nhwc = self._image_input([i.name for i in graph.input if i.name not in constants])
        self.output = self._scores([info.name for info in graph.output], output)
        self.producer = {name: i for i, node in enumerate(proto.graph.node) for name in node.output}
        self.final_activation = self._cut_activation()  # dense_heads.py reads it
        self.batch, *size = self.shapes[self.input]
        self.channels = size.pop(-1 if self.nhwc else 0)
        if all(size):
            self.image_size = tuple(size)  # load.sized reads it
        self.steps: dict[str, Step] = {}  # by tensor, in the order of the graph
        self.layer_names: dict[str, str] = {}
        self.weights: dict[str, tuple[Step, str, bool]] = {}  # by initialiser: where, and if it is transposed
        self._add_steps(constants)
        self.layer = self._default_layer()
        self._sessions: dict[Any, tuple[Any, list[str]]] = {}
        self._state: Any = None

    def _image_input(self, names: Sequence[str]) -> tuple[str, bool]:
        """Name of the input, and whether channels are its last axis."""
        shapes = {name: self.shapes.get(name, []) for name in names}
        if len(names) != 1 or len(shapes[names[0]]) != 4 or self.kinds[names[0]] not in FLOATS:
            given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ModelError(
                f"the ONNX graph takes {given}, not one batch of images of floats 'b c h w' or 'b h w c'; "
                "export it with such an input"
            )
        _, first, _, last = shapes[names[0]]
        return names[0], last in CHANNELS and first not in CHANNELS

    def _scores(self, names: Sequence[str], chosen: str) -> str:
        tables = [name for name in names if len(self.shapes.get(name, [])) == 2]
        candidates = [chosen] if chosen else tables if len(tables) == 1 else list(names)
        if len(candidates) > 1 or candidates[0] not in names:
            raise ModelError(
                f"the ONNX graph has the outputs {', '.join(names)}; name the one with class scores, as in "
                f"onnx:FILE.onnx:{names[0]}"
            )
        return candidates[0]

    def _cut_activation(self) -> str:
        """Name of the activation in front of which the graph now ends; "" if there is none."""
        name = self.output
        while (node := self._node(name)) is not None and node.op_type in ("Identity", *SQUASHING):
            name = node.input[0]
            if node.op_type in SQUASHING:
                self.output = name
                return SQUASHING[node.op_type]
        return ""

    def _node(self, tensor: str) -> Any:
        index = self.producer.get(tensor)
        return None if index is None else self.proto.graph.node[index]

    def _add_steps(self, constants: Mapping[str, Any]) -> None:
        """Make submodules, and parameters of the initialisers that are weights."""
        nodes, reached = self.proto.graph.node, {self.input}
        array = need("onnx.numpy_helper", "onnx").to_array
        first = next((i for i, node in enumerate(nodes) if node.op_type in PRODUCTS), len(nodes))

        def constant(name: str) -> Any:
            while name not in constants and (node := self._node(name)) and node.op_type == "Identity":
                name = node.input[0]  # exporters store equal weights once
            found = constants.get(name)
            is_weight = found is not None and found.data_type in FLOATS and math.prod(found.dims) > 1
            return found if is_weight else None

        for i, node in enumerate(nodes):
            tensor, kind = node.output[0], node.op_type
            if reached.isdisjoint(_reads(node)):
                continue
            reached.update(node.output)
            slots = dict(enumerate(STEPS.get(kind, ()), 1))
            if kind in ELEMENTWISE and i > first:
                slots = {slot: f"value{slot}" for slot in range(len(node.input))}
            own = [(slot, name) for slot, name in slots.items() if slot < len(node.input)]
            own = [(slot, name) for slot, name in own if constant(node.input[slot]) is not None]
            if not own and (len(self.shapes.get(tensor, [])) < 3 or self.kinds.get(tensor) not in FLOATS):
                continue
            step = Product(kind) if kind in PRODUCTS else Norm() if kind.endswith("tion") else Step()
            self.steps[tensor] = step
            key = re.sub(r"[.+]", "_", tensor)
            self.layer_names[tensor] = key = key + "_" * hasattr(self, key)
            self.add_module(key, step)
            for slot, name in own:
                value, owner = torch.from_numpy(array(constant(node.input[slot])).copy()), step
                source = self.steps.get(node.input[1 - slot]) if kind == "Add" else None
                if isinstance(source, Product) and "weight" in source._parameters and value.ndim == 1:
                    name, owner = "bias", source
                turned = kind == "MatMul" or (
                    kind == "Gemm" and name == "weight" and not _attribute(node, "transB")
                )
                weight = value.mT.contiguous() if turned and value.ndim > 1 else value
                with torch.inference_mode(False):
                    if name.startswith("running"):
                        owner.register_buffer(name, weight)
                    else:
                        owner.register_parameter(name, nn.Parameter(weight, requires_grad=False))
                node.input[slot] = unique = f"{tensor}:{name}"
                self.weights[unique] = owner, name, turned and value.ndim > 1
        used = {name for node in nodes for name in _reads(node)}
        rest = [constants[name] for name in constants if name in used]
        del self.proto.graph.initializer[:]
        self.proto.graph.initializer.extend(rest)

    def _default_layer(self) -> str | None:
        """Name of the layer that CAMs read; None if a pass must determine it, as for an output per pixel."""
        if len(self.shapes.get(self.output, [])) > 2:
            return None
        name, grids, passed_weights = self.output, list[tuple[str, bool]](), False
        while (node := self._node(name)) is not None:
            shape = self.shapes.get(name, [])
            is_grid = len(shape) > 2 and [1, 1] not in (shape[1:3], shape[2:4])
            if is_grid and node.op_type not in POOLING and name in self.steps:
                grids.append((name, passed_weights))
            passed_weights |= node.op_type in PRODUCTS and f"{name}:weight" in self.weights
            name = next((n for n in node.input if n in self.producer or n == self.input), "")
        best = next((name for name, behind in grids if behind), grids[0][0] if grids else None)
        if best is not None and len(self.shapes[best]) == 3:
            nodes = list(enumerate(self.proto.graph.node))
            attention = max((i for i, node in nodes if node.op_type == "Softmax"), default=0)
            norms = [node.output[0] for i, node in nodes[:attention] if node.op_type == "LayerNormalization"]
            best = next((name for name in reversed(norms) if name in self.steps), None)
        return None if best is None else self.layer_names[best]

    def get_submodule(self, target: str) -> nn.Module:
        """The submodule of that name; tensor names of the file are accepted unchanged."""
        return super().get_submodule(self.layer_names.get(target, target))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sessions": {}, "_state": None}

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        fixed = (self.channels, *getattr(self, "image_size", ()))
        if any(side not in (None, own) for side, own in zip(fixed, images.shape[1:], strict=False)):
            raise ValueError(f"the ONNX graph has a fixed input size of {'x'.join(map(str, fixed))}")
        values = {self.input: images.permute(0, 2, 3, 1) if self.nhwc else images}
        watched = {tensor: step for tensor, step in self.steps.items() if is_watched(step)}
        required = [tensor for tensor, step in watched.items() if "forward" not in vars(step)]
        computed: dict[str, Tensor] = {}
        for tensor, step in watched.items():
            if "forward" in vars(step):  # replaced: it needs no inputs
                values[tensor] = step()
                continue
            if tensor not in computed:
                computed = self._run(values, {*required} - {*values} | {self.output}, len(images))
            inputs = [values[name] for name in _reads(self._node(tensor)) if name in values]
            values[tensor] = step(*inputs, computed[tensor])
            if not torch.equal(values[tensor], computed[tensor]):
                computed = {}  # what lies behind is computed again, from the changed tensor
        if self.output in values:
            return values[self.output]
        return (computed or self._run(values, {self.output}, len(images)))[self.output]

    def _run(self, values: Mapping[str, Tensor], wanted: set[str], count: int) -> dict[str, Tensor]:
        """Compute tensors from known ones; a graph with a fixed batch size runs several times."""
        device = values[self.input].device
        tensors = (getattr(owner, name) for owner, name, _ in self.weights.values())
        versions = ((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)
        state = torch.get_num_threads(), device.type, *versions
        if state != self._state:
            self._sessions, self._state = {}, state
        if len(values) == 1 and self.layer:  # one session for logits and for CAMs
            default = next(tensor for tensor, key in self.layer_names.items() if key == self.layer)
            wanted = wanted | {default}
        key = frozenset(values), frozenset(wanted)
        if key not in self._sessions:
            if len(self._sessions) == MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[key] = self.session(values, sorted(wanted), device)
        session, feeds = self._sessions[key]
        kinds = {name: FLOATS[self.kinds[name]] for name in feeds}
        arrays = {n: np.ascontiguousarray(values[n].cpu().numpy(), kinds[n]) for n in feeds}
        size = self.batch or count
        parts = []
        for start in range(0, count, size):
            rows = np.arange(start, start + size).clip(max=count - 1)  # the last image fills the last batch
            each = {n: a if size == count else a[_spread(rows, len(a) // count)] for n, a in arrays.items()}
            try:
                parts.append(session.run(sorted(wanted), each))
            except Exception as error:
                kind = MemoryError if "alloc" in str(error) else RuntimeError
                shapes = ", ".join(str(array.shape) for array in each.values())
                raise kind(f"ONNX Runtime failed on inputs of shape {shapes}: {first_line(error)}") from error
        joined = [np.concatenate(every) if len(parts) > 1 else every[0] for every in zip(*parts, strict=True)]
        padded = len(parts) * size
        results = dict(zip(sorted(wanted), joined, strict=True))
        return {n: torch.from_numpy(a[: len(a) * count // padded]).to(device) for n, a in results.items()}

    def session(
        self, known: Iterable[str], wanted: Sequence[str], device: torch.device
    ) -> tuple[Any, list[str]]:
        """A session that computes the wanted tensors, and the names of the known ones that it reads."""
        onnx, runtime = need("onnx", "onnx"), need("onnxruntime", "onnx")
        used, feeds, left = set[int](), dict[str, None](), list(wanted)
        while left:
            name = left.pop()
            if name in known:
                feeds[name] = None
            elif (index := self.producer.get(name)) is not None and index not in used:
                used.add(index)
                left += _reads(self.proto.graph.node[index])
        part, arrays = onnx.ModelProto(), dict[str, np.ndarray]()
        part.CopyFrom(self.proto)
        graph, info = part.graph, onnx.helper.make_tensor_value_info
        for field in ("node", "input", "output", "value_info"):
            graph.ClearField(field)
        graph.node.extend(self.proto.graph.node[i] for i in sorted(used))
        graph.input.extend(info(name, self.kinds[name], None) for name in feeds)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
        for name in {name for node in graph.node for name in node.input} & {*self.weights}:
            owner, own_name, turned = self.weights[name]
            tensor = getattr(owner, own_name).detach().cpu()
            arrays[name] = np.ascontiguousarray((tensor.mT if turned else tensor).numpy())
            graph.initializer.append(_declared(name, arrays[name]))
        options = runtime.SessionOptions()
        values = [runtime.OrtValue.ortvalue_from_numpy(array) for array in arrays.values()]
        options.add_external_initializers(list(arrays), values)
        options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
        available = runtime.get_available_providers()
        cuda = ["CUDAExecutionProvider"] * (device.type == "cuda" and "CUDAExecutionProvider" in available)
        try:
            session = runtime.InferenceSession(
                part.SerializeToString(), options, providers=[*cuda, "CPUExecutionProvider"]
            )
        except Exception as error:
            raise ModelError(
                f"ONNX Runtime {runtime.__version__} cannot run the graph ({first_line(error)}); export it "
                "with operators and an opset that this version supports, or install a newer onnxruntime"
            ) from error
        return session, list(feeds)


def read_graph(name: str) -> OnnxGraph:
    """Read FILE.onnx, or FILE.onnx:OUTPUT, and check that ONNX Runtime can compute it."""
    onnx = need("onnx", "onnx")
    file, output = name, ""
    if match := re.fullmatch(r"(.+\.onnx):(.+)", name):
        file, output = match.groups()
    path = Path(file).expanduser()
    if not path.is_file():
        raise ModelError(f"no such file: {path}")
    try:
        proto = onnx.load(path)
    except Exception as error:
        raise ModelError(
            f"{path} is not a whole ONNX file ({first_line(error)}); export it again, and keep its file of "
            "external data beside it"
        ) from error
    graph = OnnxGraph(proto, output)
    graph.session({graph.input}, [graph.output], torch.device("cpu"))
    return graph


def _reads(node: Any) -> list[str]:
    """Tensors that a node reads, also in the branches of an If."""
    inner = (name for field in node.attribute for part in field.g.node for name in part.input)
    return [*node.input, *inner]


def _declared(name: str, array: np.ndarray) -> Any:
    """An initialiser without its values, which are passed to ONNX Runtime in memory."""
    onnx = need("onnx", "onnx")
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    declared = onnx.TensorProto(name=name, dims=array.shape, data_type=kind, data_location=1)
    declared.external_data.add(key="location", value="memory")
    return declared


def _attribute(node: Any, name: str) -> int:
    return next((field.i for field in node.attribute if field.name == name), 0)


def _spread(rows: np.ndarray, each: int) -> np.ndarray:
    """Rows of a tensor that has `each` rows per image."""
    return (rows[:, None] * each + np.arange(each)).ravel()
