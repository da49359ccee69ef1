"""Forms in which networks come: wrapped modules, and functions that only compute scores.

torch.compile, .compile()      run as they were written while they are explained: hooks must see each layer
DataParallel, DDP              taken off: the network inside is explained
half, bfloat16                 as they are; maps are float32
torch.utils.checkpoint         as it is with use_reentrant=False; otherwise no gradient comes out: an error
quantised (torch.ao)           no gradients: only methods that need outputs alone
FSDP, weights over processes   refused: one process alone would wait for the others forever
TorchScript, torch.export      refused: their layers cannot be hooked, nor can their functions be given rules

A function gets a float32 array "b c H W", model-ready, and returns "b k": logits or probabilities, as an
array, a list or a tensor. A function that cannot take an array is given a tensor. It has no layers, gradients
or weights; methods that need them are refused.

    hp.load_model(lambda images: session.run(None, {"x": images})[0], preprocess=...)     ONNX Runtime
    hp.load_model("client.py:predict")                    a server, TensorFlow, JAX: any function in a file
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.errors import ModelError, UnknownNameError
from heatproof.models.checkpoints import first_line

if TYPE_CHECKING:
    from heatproof.models.model import Model

QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")


def unwrapped(module: nn.Module) -> nn.Module:
    """The network inside a torch.compile or data-parallel wrapper, which hooks would not reach."""
    while True:
        compiled = dict(module.named_children()).get("_orig_mod")  # TorchScript has another kind of dict
        if compiled is not None:
            module = compiled
        elif isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        else:
            return module


def refuse_wrapped(module: nn.Module, name: str) -> None:
    """Raise ModelError for a network in a form that cannot be explained."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ModelError(
            f"{name} is TorchScript, whose layers cannot be hooked nor set to evaluation mode from "
            "outside; give the nn.Module it was made from"
        )
    nodes = module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ()
    if any(isinstance(node.target, torch._ops.OpOverload) for node in nodes):  # a graph of bare operators
        raise ModelError(
            f"{name} comes from torch.export, which leaves neither layers nor functions that a method could "
            "follow; give the nn.Module it was made from"
        )
    sharded = any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules())
    meshes = (getattr(weight, "device_mesh", None) for weight in module.parameters())
    if sharded or any(mesh is not None and mesh.size() > 1 for mesh in meshes):
        raise ModelError(
            f"{name} is sharded (FSDP): its weights lie in pieces, and one process cannot run it alone; "
            "gather a full state dict, load it into the plain network, and give that"
        )


def is_quantised(module: nn.Module) -> bool:
    """Whether a module computes in integers, which have no gradient."""
    return any(type(part).__module__.startswith(QUANTISED) for part in module.modules())


def eagerly(parts: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """A context in which compiled modules run uncompiled, so that hooks are called."""
    compiled = any("_orig_mod" in part._modules or part.__dict__.get("_compiled_call_impl") for part in parts)
    if compiled and hasattr(torch.compiler, "set_stance"):  # not in torch 2.5
        as_written: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return as_written
    return nullcontext()


@contextmanager
def checkpoints_in_a_sentence(model: Model, images: Tensor) -> Iterator[None]:
    """Raise an error with the cause if there is no gradient: a random network, or reentrant checkpointing."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant" in str(error) or type(error).__name__ == "CheckpointError":
            model.check_repeatable(images)
            if isinstance(error, ModelError):
                raise
            raise ModelError(
                f"{model.name} recomputes its activations (torch.utils.checkpoint) in a way that this method "
                "cannot follow; switch checkpointing off, or set use_reentrant=False"
            ) from error
        raise


class FunctionModule(nn.Module):
    """A function as a module without submodules and gradients."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.takes_tensors: bool | None = None  # known after its first call

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return _as_tensor(self._call(images.detach())).to(images.device)

    def _call(self, images: Tensor) -> Any:
        if self.takes_tensors:
            return self.function(images.clone())
        # A copy that the function may write to, in the order that other libraries expect.
        array = np.array(images.float().cpu().contiguous().numpy())
        if self.takes_tensors is not None:
            return self.function(array)
        try:
            output, self.takes_tensors = self.function(array), False
        except (TypeError, AttributeError) as error:
            try:
                output, self.takes_tensors = self.function(images.clone()), True
            except Exception:
                raise error from None  # it takes neither: the error about the array is raised
        return output


def is_function(module: nn.Module) -> bool:
    """Whether the network has no layers, only a function."""
    return isinstance(module, FunctionModule)


def _as_tensor(output: Any) -> Tensor:
    """Scores "b k" from what a function returns; a list of one table is that table."""
    if isinstance(output, (list, tuple)) and len(output) == 1 and getattr(output[0], "ndim", 0) == 2:
        output = output[0]
    if isinstance(output, Tensor):
        return output.detach()
    try:
        return torch.from_numpy(np.array(output, dtype=np.float32))
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"the function returned {type(output).__name__}, not a table of scores with a row per image"
        ) from error


def takes_images(function: Callable[..., Any], options: Collection[str]) -> bool:
    """Whether a function predicts rather than builds a network: one required argument, no options."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p.name for p in parameters if p.kind in named and p.default is p.empty]
    return not inspect.isclass(function) and len(required) == 1 and required[0] not in options


@contextmanager
def function_in(path: Path, name: str) -> Iterator[Callable[..., Any]]:
    """A function of a Python file, which can import files beside it while the context is open."""
    if not path.is_file():
        raise ModelError(f"no such file: {path}")
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        namespace = _run_file(path)
        function = getattr(namespace, name, None)
        if not callable(function):
            known = [n for n, v in vars(namespace).items() if callable(v) and not n.startswith("_")]
            raise UnknownNameError(f"function in {path.name}", name, known)
        yield function
    finally:
        sys.path.remove(folder)


def _run_file(path: Path) -> ModuleType:
    name = f"heatproof_file_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and pickles look their module up there
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ModelError(f"{path} does not run: {type(error).__name__}: {first_line(error)}") from error
    return module
