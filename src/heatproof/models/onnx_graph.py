"""ONNX files: a graph that ONNX Runtime computes, as a module whose steps are submodules. No gradients.

Each step with a grid or weights is a submodule, named after its tensor. It computes nothing: ONNX Runtime
runs the graph, and tensors of steps with hooks are passed through them. If a hook changes a tensor, or a
forward is replaced, the part of the graph behind it is computed from it. Weights are parameters: if they
change, sessions are created again. Random biases of convolutions are 0: exporters fold batch norms into them.

The default layer follows the rule of layers.py: from the output back over the head, the last grid that is not
the result of pooling. A last convolution that only makes class scores, as in SqueezeNet, belongs to the head.
In a transformer it is the normalisation in front of the last attention.
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

from heatproof.errors import ModelError, first_line, need
from heatproof.models.running import is_watched

AFFINE = ("weight", "bias")
PRODUCTS = {"Conv": AFFINE, "ConvTranspose": AFFINE, "Gemm": AFFINE, "MatMul": AFFINE[:1]}
NORMS = {
    "BatchNormalization": (*AFFINE, "running_mean", "running_var"), "LayerNormalization": AFFINE,
    "InstanceNormalization": AFFINE, "GroupNormalization": AFFINE,
}  # fmt: skip
ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Concat", "PRelu")  # with weights such as position embeddings
POOLING = (
    "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax", "Pad",
    "Dropout", "Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Gather", "Slice",
)  # fmt: skip
SQUASHING = {"Softmax": "softmax", "Sigmoid": "sigmoid"}
FLOATS = {1: np.float32, 10: np.float16, 11: np.float64}  # of TensorProto.DataType
CHANNELS = (1, 3, 4)  # of images, by which their axis is recognised
MOST_SESSIONS = 6


class Step(nn.Module):
    """A step of the graph, called with those of its inputs that are known and with its output."""

    def forward(self, *values: Tensor) -> Tensor:
        return values[-1]


class Product(Step):
    """A convolution or a matrix product; `outputs` is the axis of them in its weight."""

    weight: Tensor

    def __init__(self, kind: str, outputs: int) -> None:
        super().__init__()
        self.convolves, self.outputs = kind.startswith("Conv"), outputs

    def reset_parameters(self) -> None:
        limit = math.sqrt(self.weight.shape[self.outputs] / self.weight.numel())
        for name, tensor in self.named_parameters():
            within = 0.0 if self.convolves and name == "bias" else limit
            nn.init.uniform_(tensor, -within, within)


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
        graph = need("onnx", "onnx").shape_inference.infer_shapes(proto, data_prop=True).graph
        infos = (*graph.input, *graph.value_info, *graph.output)
        types = {info.name: info.type.tensor_type for info in infos}
        self.kinds: dict[str, int] = {name: kind.elem_type for name, kind in types.items()}
        self.shapes: dict[str, list[int]] = {  # 0 is any length
            name: [side.dim_value for side in kind.shape.dim] for name, kind in types.items()
        }
        self.proto, constants = proto, {constant.name: constant for constant in proto.graph.initializer}
        self.producer = {name: i for i, node in enumerate(proto.graph.node) for name in node.output}
        self.input, self.nhwc = self._image_input([i.name for i in graph.input if i.name not in constants])
        self.output, self.final_activation = self._scores([info.name for info in graph.output], output)
        self.batch, *size = self.shapes[self.input]
        self.channels = size.pop(-1 if self.nhwc else 0)
        self.image_size = tuple(size) if all(size) else None  # load.sized reads it
        self.steps: dict[str, Step] = {}  # by tensor, in the order of the graph
        self.layer_names: dict[str, str] = {}  # by tensor
        self.weights: dict[str, tuple[Step, str]] = {}  # by initialiser
        self._add_steps(constants)
        self.default = self._default_layer()
        self.layer = self.layer_names.get(self.default)  # None if a pass must determine it
        self._sessions: dict[Any, tuple[Any, list[str]]] = {}
        self._state: Any = None

    def _image_input(self, names: Sequence[str]) -> tuple[str, bool]:
        """Name of the input, and whether channels are its last axis."""
        shapes = {name: self.shapes[name] for name in names}
        if len(names) != 1 or len(shapes[names[0]]) != 4 or self.kinds[names[0]] not in FLOATS:
            kind = need("onnx", "onnx").TensorProto.DataType.Name
            given = ", ".join(f"{name} ({kind(self.kinds[name])} {shape})" for name, shape in shapes.items())
            raise ModelError(
                f"the ONNX graph takes {given}, not one batch of images of floats 'b c h w' or 'b h w c'; "
                "export it with such an input"
            )
        batch, first, _, last = shapes[names[0]]
        if batch > 1:
            raise ModelError(
                f"the ONNX graph takes {batch} images at a time; export it for any number of them, or for 1"
            )
        return names[0], last in CHANNELS and first not in CHANNELS

    def _scores(self, names: Sequence[str], chosen: str) -> tuple[str, str]:
        """The tensor with class scores, and the name of the activation behind it; "" if there is none."""
        tables = [name for name in names if len(self.shapes[name]) == 2]
        candidates = [chosen] if chosen else tables if len(tables) == 1 else list(names)
        if len(candidates) > 1 or candidates[0] not in names:
            raise ModelError(
                f"the ONNX graph has the outputs {', '.join(names)}; name the one with class scores, as in "
                f"onnx:FILE.onnx:{names[0]}"
            )
        tensor = candidates[0]
        while (node := self._node(tensor)) and node.op_type in ("Identity", *SQUASHING):
            tensor = node.input[0]
            if node.op_type in SQUASHING:
                return tensor, SQUASHING[node.op_type]
        return candidates[0], ""

    def _node(self, tensor: str) -> Any:
        index = self.producer.get(tensor)
        return None if index is None else self.proto.graph.node[index]

    def _add_steps(self, constants: dict[str, Any]) -> None:
        """Make submodules, and parameters of the initialisers that are weights."""
        nodes, reached = self.proto.graph.node, {self.input}
        array = need("onnx.numpy_helper", "onnx").to_array
        first = next((i for i, node in enumerate(nodes) if node.op_type in PRODUCTS), len(nodes))

        def weight(name: str) -> Any:
            while (node := self._node(name)) and node.op_type == "Identity":
                name = node.input[0]  # exporters store equal weights once
            tensor = constants.get(name)
            is_weight = tensor is not None and tensor.data_type in FLOATS and math.prod(tensor.dims) > 1
            return tensor if is_weight else None

        for i, node in enumerate(nodes):
            tensor, kind = node.output[0], node.op_type
            if reached.isdisjoint(_reads(node)):
                continue
            reached.update(node.output)
            slots = dict(enumerate((PRODUCTS | NORMS).get(kind, ()), 1))
            if kind in ELEMENTWISE and i > first:
                slots = {slot: f"value{slot}" for slot in range(len(node.input))}
            own = {slot: weight(node.input[slot]) for slot in slots if slot < len(node.input)}
            own = {slot: value for slot, value in own.items() if value is not None}
            if not own and (len(self.shapes.get(tensor, [])) < 3 or self.kinds[tensor] not in FLOATS):
                continue
            step = Norm() if kind in NORMS else Step()
            if kind in PRODUCTS and 1 in own:
                is_first = kind.startswith("Conv") or any(a.name == "transB" and a.i for a in node.attribute)
                step = Product(kind, 0 if is_first else -1)
            key = re.sub(r"[.+]", "_", tensor)
            self.steps[tensor], self.layer_names[tensor] = step, key + "_" * hasattr(self, key)
            self.add_module(self.layer_names[tensor], step)
            for slot, value in own.items():
                name, copied = slots[slot], torch.from_numpy(array(value).copy())
                if name.startswith("running"):
                    step.register_buffer(name, copied)
                else:
                    step.register_parameter(name, nn.Parameter(copied, requires_grad=False))
                node.input[slot] = f"{tensor}:{name}"
                self.weights[node.input[slot]] = step, name
        used = {name for node in nodes for name in _reads(node)}
        rest = [constant for name, constant in constants.items() if name in used]
        del self.proto.graph.initializer[:]
        self.proto.graph.initializer.extend(rest)

    def _default_layer(self) -> str:
        """Tensor that CAMs read; "" if a pass must determine it."""
        if len(self.shapes.get(self.output, [])) > 2:  # per pixel: the last of the coarsest grid
            products = [i for i, step in enumerate(self.steps.values()) if isinstance(step, Product)]
            names = list(self.steps)[: max(products, default=0)]
            sizes = {name: math.prod(self.shapes.get(name, [])[2:]) for name in names}
            coarsest = min((size for size in sizes.values() if size > 1), default=0)
            return next((name for name in reversed(names) if sizes[name] == coarsest), "")
        name, grids, is_behind_weights = self.output, list[tuple[bool, str]](), False
        while (node := self._node(name)) is not None:
            shape = self.shapes.get(name, [])
            is_grid = len(shape) > 2 and [1, 1] not in (shape[1:3], shape[2:4])
            if is_grid and node.op_type not in POOLING and name in self.steps:
                grids.append((is_behind_weights, name))
            is_behind_weights |= node.op_type in PRODUCTS and f"{name}:weight" in self.weights
            name = next((n for n in node.input if n in self.producer or n == self.input), "")
        best = next((name for behind, name in grids if behind), grids[0][1] if grids else "")
        if len(self.shapes.get(best, [])) != 3:
            return best
        nodes = self.proto.graph.node
        attention = max((i for i, node in enumerate(nodes) if node.op_type == "Softmax"), default=0)
        weighted = {name.rpartition(":")[0] for name in self.weights}

        def normalises(node: Any) -> bool:  # before opset 17 the last steps of a norm are a scale and a shift
            scaled = any(n in weighted and self._node(n).op_type == "Mul" for n in node.input)
            shifted = node.op_type == "Add" and node.output[0] in weighted
            return node.op_type == "LayerNormalization" or (scaled and shifted)

        norms = [node.output[0] for node in nodes[:attention] if normalises(node)]
        return norms[-1] if norms else ""

    def get_submodule(self, target: str) -> nn.Module:
        """The submodule of that name; names of tensors are accepted as they are in the file."""
        return super().get_submodule(self.layer_names.get(target, target))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sessions": {}, "_state": None}

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        fixed, shape = (self.channels, *(self.image_size or ())), tuple(images.shape[1:])
        if any(side not in (0, own) for side, own in zip(fixed, shape, strict=False)):
            raise ValueError(f"the ONNX graph has the fixed input size {'x'.join(map(str, fixed))}")
        values = {self.input: images.permute(0, 2, 3, 1) if self.nhwc else images}
        watched = {tensor: step for tensor, step in self.steps.items() if is_watched(step)}
        required = {tensor for tensor, step in watched.items() if "forward" not in vars(step)}
        computed: dict[str, Tensor] = {}
        for tensor, step in watched.items():
            if tensor not in required:  # its forward is replaced, and needs no inputs
                values[tensor] = step()
                continue
            if tensor not in computed:
                computed = self._run(values, required - {*values} | {self.output}, len(images))
            inputs = [values[name] for name in _reads(self._node(tensor)) if name in values]
            values[tensor] = step(*inputs, computed[tensor])
            if not torch.equal(values[tensor], computed[tensor]):
                computed = {}  # what lies behind is computed again, from the changed tensor
        if self.output not in values:
            values |= computed or self._run(values, {self.output}, len(images))
        return values[self.output]

    def _run(self, values: Mapping[str, Tensor], wanted: set[str], count: int) -> dict[str, Tensor]:
        """Compute tensors from known ones, image by image if the graph takes one."""
        device = values[self.input].device
        tensors = (getattr(step, name) for step, name in self.weights.values())
        versions = ((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)
        state = torch.get_num_threads(), device.type, *versions
        if state != self._state:
            self._sessions, self._state = {}, state
        if len(values) == 1 and self.default:  # one session for logits and CAMs
            wanted = {*wanted, self.default}
        names = sorted(wanted)
        key = frozenset(values), *names
        if key not in self._sessions:
            for old in list(self._sessions)[: 1 - MOST_SESSIONS]:
                del self._sessions[old]
            self._sessions[key] = self.session(values, names, device)
        session, feeds = self._sessions[key]
        arrays = {n: values[n].cpu().numpy().astype(FLOATS[self.kinds[n]], copy=False) for n in feeds}
        parts = count if self.batch else 1
        pieces = {n: np.split(array, parts) for n, array in arrays.items()}
        try:
            runs = [session.run(names, {n: pieces[n][i] for n in feeds}) for i in range(parts)]
        except Exception as error:
            kind = MemoryError if "alloc" in str(error) else RuntimeError
            shapes = ", ".join(str(array.shape) for array in arrays.values())
            raise kind(f"ONNX Runtime failed on inputs of shape {shapes}: {first_line(error)}") from error
        joined = (np.concatenate(own) if parts > 1 else own[0] for own in zip(*runs, strict=True))
        return {n: torch.from_numpy(array).to(device) for n, array in zip(names, joined, strict=True)}

    def session(
        self, known: Iterable[str], wanted: Sequence[str], device: torch.device
    ) -> tuple[Any, list[str]]:
        """A session that computes the wanted tensors, and the names of the known ones that it reads."""
        onnx, runtime = need("onnx", "onnx"), need("onnxruntime", "onnx")
        nodes, feeds, left = set[int](), dict[str, None](), list(wanted)
        while left:
            name = left.pop()
            if name in known:
                feeds[name] = None
            elif (index := self.producer.get(name)) is not None and index not in nodes:
                nodes.add(index)
                left += _reads(self.proto.graph.node[index])
        part, options = onnx.ModelProto(), runtime.SessionOptions()
        part.CopyFrom(self.proto)
        for field in ("node", "input", "output", "value_info"):
            part.graph.ClearField(field)
        part.graph.node.extend(self.proto.graph.node[i] for i in sorted(nodes))
        info = onnx.helper.make_tensor_value_info
        part.graph.input.extend(info(name, self.kinds[name], None) for name in feeds)
        part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
        for name in {name for node in part.graph.node for name in node.input} & {*self.weights}:
            array = getattr(*self.weights[name]).detach().cpu().numpy()
            part.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
        # Waiting threads would take the CPU from torch's.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        wished = ["CUDAExecutionProvider"] * (device.type == "cuda") + ["CPUExecutionProvider"]
        providers = [name for name in wished if name in runtime.get_available_providers()]
        try:
            session = runtime.InferenceSession(part.SerializeToString(), options, providers=providers)
        except Exception as error:
            raise ModelError(
                f"ONNX Runtime {runtime.__version__} cannot run the graph ({first_line(error)}); export it "
                "with operators and an opset that this version supports, or install a newer onnxruntime"
            ) from error
        return session, list(feeds)


def read_graph(name: str) -> OnnxGraph:
    """Read FILE.onnx, or FILE.onnx:OUTPUT, and check that ONNX Runtime can compute it."""
    onnx = need("onnx", "onnx")
    match = re.fullmatch(r"(.+\.onnx):(.+)", name)
    file, output = match.groups() if match else (name, "")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ModelError(f"no such file: {path}")
    try:
        proto = onnx.load(path)
    except Exception as error:
        raise ModelError(
            f"{path} is not a complete ONNX file ({first_line(error)}); export it again, and keep external "
            "data beside it"
        ) from error
    graph = OnnxGraph(proto, output)
    graph.session({graph.input}, [graph.output], torch.device("cpu"))
    return graph


def _reads(node: Any) -> list[str]:
    """Tensors that a node reads, also in the branches of an If."""
    inner = (name for field in node.attribute for part in field.g.node for name in part.input)
    return [*node.input, *inner]
