"""Run a network without changing it: frozen, at a precision, interruptible, hooked; and detect changes.

Precisions:

    fp32   every product in float32, also where torch would let a GPU's convolutions use TF32
    tf32   products of a GPU rounded to 10 bits of mantissa, sums in float32; a CPU computes as in fp32
    bf16   convolutions and matrix products in bfloat16 (torch.autocast), sums in float32
    None   as the network and torch are set

If a precision is named, as in every run, a GPU uses the convolutions that return the same bits each time. A
network whose weights are bfloat16 or float64 keeps them. Maps are float32 in any case.

Compiled modules run as they were written, since hooks must see each layer; data-parallel wrappers are taken
off. A quantised network (torch.ao) has no gradients. A function gets a float32 array "b c H W", model-ready,
or a tensor if it cannot take an array, and returns "b k": logits or probabilities, as an array, a list or a
tensor; it has no layers, gradients or weights, and methods that need them are refused.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import random
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from operator import attrgetter, itemgetter
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from heatproof.errors import InputError, ModelError, UnknownNameError, did_you_mean, first_line
from heatproof.models.names import PRECISIONS

if TYPE_CHECKING:
    from heatproof.models.model import Model

QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
INNER = itemgetter("_parameters", "_buffers", "_modules", *HOOKS)
STANDARD = list(nn.Module().__dict__)  # attributes of every module, the first of its __dict__
CONTAINERS = (list, tuple, dict, set)
PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
VERSION = attrgetter("_version")


def check_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise InputError(f"precision cannot be {precision!r}; {did_you_mean(str(precision), PRECISIONS)}")


def usual_precision(device: str | torch.device) -> str:
    """The precision that torch uses on a device by default."""
    rounds = torch.device(device).type == "cuda" and torch.backends.cudnn.allow_tf32
    return "tf32" if rounds else "fp32"


@contextmanager
def computing(precision: str | None, device: torch.device) -> Iterator[None]:
    """Compute at a precision while the context is open; torch's settings are restored."""
    if precision is None:
        yield
        return
    # PyTorch requires cache_enabled=False for passes that are recorded as CUDA graphs.
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        if device.type != "cuda":
            yield
            return
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        before = products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
        try:
            products.allow_tf32 = convolutions.allow_tf32 = precision != "fp32"
            # A run promises the same bits on the same GPU; cuDNN's fastest kernels add in varying order.
            convolutions.deterministic = True
            yield
        finally:
            products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before


def max_precision(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def at_least_float(tensor: Tensor) -> Tensor:
    """float32, or float64 where the model computes in it."""
    return tensor.to(max_precision(tensor))


def memory_format(images: Tensor) -> torch.memory_format:
    """The memory format in which convolutions are fastest; volumes stay contiguous."""
    return torch.channels_last if images.ndim == 4 else torch.contiguous_format


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, also if another error followed, as at the end of a CUDA graph's recording."""
    text = str(error).lower()
    known = ("can't allocate memory", "status_alloc_failed", "cuda error: out of memory")
    is_short = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(part in text for part in known)
    return is_short or (error.__context__ is not None and is_out_of_memory(error.__context__))


@contextmanager
def frozen_eval(module: nn.Module) -> Iterator[None]:
    """Evaluation mode with frozen parameters; every flag and the random state are restored at the end.

    Ctrl-C is deferred until then: an exception between a change and its `finally` would leave the change.
    """
    with interrupts, exclusive(module):
        parts, weights = _parts_and_weights(module)
        cuda = sorted({w.device.index for w in weights if w.device.type == "cuda"})
        # Networks with random layers draw numbers in their forward; fork_rng keeps training reproducible.
        with torch.random.fork_rng(devices=cuda), _restored(parts, weights), eagerly(parts):
            for part in parts:
                # Not module.eval(): users override it, and some overrides do more than set the flag. Written
                # to __dict__: nn.Module's __setattr__ takes longer than a small network's pass on a GPU.
                part.__dict__["training"] = False
            # Frozen parameters keep autograd from building a graph before the first tapped layer.
            for weight in weights:
                if weight.requires_grad:
                    weight.requires_grad_(False)
            yield


_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locking = threading.Lock()


def exclusive(module: nn.Module) -> threading.RLock:
    """The lock of a network: one thread at a time hooks and freezes it."""
    with _locking:
        return _locks.setdefault(module, threading.RLock())


def restore_flags(module: nn.Module) -> AbstractContextManager[None]:
    """Restore modes and requires_grad flags when the context ends."""
    return _restored(*_parts_and_weights(module))


@contextmanager
def _restored(parts: Sequence[nn.Module], weights: Sequence[nn.Parameter]) -> Iterator[None]:
    modes = [part.training for part in parts]
    flags = [weight.requires_grad for weight in weights]
    try:
        yield
    finally:
        for part, training in zip(parts, modes, strict=True):
            part.__dict__["training"] = training
        for weight, flag in zip(weights, flags, strict=True):
            if weight.requires_grad != flag:
                weight.requires_grad_(flag)


def _parts_and_weights(module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """All modules and parameters, each once; several times faster than module.parameters()."""
    parts = list(module.modules())
    owned = (weight for part in parts for weight in part._parameters.values() if weight is not None)
    return parts, list({id(weight): weight for weight in owned}.values())


@contextmanager
def watched(
    module: nn.Module, ended: Callable[..., None] | None = None, started: Callable[..., None] | None = None
) -> Iterator[None]:
    """Call started(name, module, args, kwargs) and ended(..., output) for each module; "" is the network."""
    with ExitStack() as hooks:
        for name, part in module.named_modules():
            if started is not None:
                hooks.enter_context(part.register_forward_pre_hook(partial(started, name), with_kwargs=True))
            if ended is not None:
                hooks.enter_context(part.register_forward_hook(partial(ended, name), with_kwargs=True))
        yield


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules run these forwards, as instance attributes; those that have such an attribute keep it."""
    own = {module: forward for module, forward in forwards.items() if "forward" not in module.__dict__}
    try:
        for module, forward in own.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module in own:
            module.__dict__.pop("forward", None)


class FunctionsWatched(TorchFunctionMode):
    """Call call(function, args, kwargs, result) for torch functions; what it returns replaces the result."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        changed = self.call(func, args, kwargs or {}, result)
        return result if changed is None else changed


class _Interrupts:
    """Defers Ctrl-C while the scope is open; scopes nest, and the outermost one counts.

    Only the main thread receives signals; other threads defer nothing. The handler that was installed (of a
    run, of an event loop) is called at once, only what it raises is deferred. A second Ctrl-C is not.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.pending: BaseException | None = None
        self.handler: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self.depth == 0:
            self.pending, self.handler = None, signal.getsignal(signal.SIGINT)
            if callable(self.handler):
                signal.signal(signal.SIGINT, self._defer)
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.depth -= 1
        if self.depth == 0:
            if signal.getsignal(signal.SIGINT) == self._defer:
                signal.signal(signal.SIGINT, self.handler)
            self.check()

    def _defer(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except BaseException as error:
            if self.pending is not None:
                raise
            self.pending = error

    def check(self) -> None:
        """Raise a deferred interrupt; called where no change is half done."""
        if self.pending is not None and threading.current_thread() is threading.main_thread():
            error, self.pending = self.pending, None
            raise error


interrupts = _Interrupts()


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

    differentiable = False

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


def has_gradients(module: nn.Module) -> bool:
    """Whether torch can differentiate the network: no function, and no ONNX graph."""
    return bool(getattr(module, "differentiable", True))


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
    folder, own_name = str(path.resolve().parent), f"heatproof_file_{path.stem}"
    specification = importlib.util.spec_from_file_location(own_name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, folder)
    try:
        sys.modules[own_name] = module  # dataclasses and pickles look their module up there
        try:
            specification.loader.exec_module(module)
        except Exception as error:
            del sys.modules[own_name]
            raise ModelError(f"{path} does not run: {type(error).__name__}: {first_line(error)}") from error
        function = getattr(module, name, None)
        if not callable(function):
            known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise UnknownNameError(f"function in {path.name}", name, known)
        yield function
    finally:
        sys.path.remove(folder)


@contextmanager
def same_randomness() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch (CPU; frozen_eval() restores those of GPUs)."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  # the state that others use
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


class ModuleState:
    """The state of a network, by which an analysis or a recording of it is known to be valid still.

    It consists of the modules, their attributes and hooks, and of where parameters and buffers lie; not of
    their modes, since passes run in evaluation mode, nor of the values of weights: `versions` counts the
    changes that torch sees. It keeps no reference that would keep the network alive. Not detected: changes
    inside an object that an attribute refers to (except lists, dicts and sets, whose members are compared),
    and values written through `tensor.data`. Passes use both; only what was determined before stays.

    Args:
        module: the network.
        before: its state that is outdated.

    Attributes:
        mark: hash of the state; equal if attributes were only set to equal plain values since `before`.
        watched: whether user code runs in a pass: a hook or a patched forward.
    """

    def __init__(self, module: nn.Module, before: ModuleState | None = None) -> None:
        parts = list(module.modules())
        self._freed: list[Any] = []  # references whose objects were freed; their ids may be used again
        self._parts = [ref(part, self._freed.append) for part in parts]
        first = (list(islice(part.__dict__, len(STANDARD))) for part in parts)
        self._skips = [len(STANDARD) if names == STANDARD else 0 for names in first]
        values = self._values(parts)
        self._ids, self._references, self._copies = list(map(id, values)), list[Any](), list[Any]()
        for value in {id(value): value for value in values}.values():
            if isinstance(value, PLAIN):
                self._references.append(value)
            elif _is_plain(value):
                self._copies.append((value, copy.copy(value)))
            elif type(value).__weakrefoffset__:
                self._references.append(ref(value, self._freed.append))
        # A reference to other containers could keep the network alive.
        containers = (i for i, value in enumerate(values) if type(value) in CONTAINERS)
        self._members = {i: _members(values[i]) for i in containers if not _is_plain(values[i])}
        self._tensors = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
        self._addresses = [values[i].data_ptr() for i in self._tensors]
        self.watched = any(map(is_watched, parts))
        self._epoch: int = before._epoch + bool(before._freed) if before else 0
        # Of the text, since hash(-1) == hash(-2).
        self.mark = hash(repr([self._epoch, *map(_by_value, values)]))

    def versions(self, module: nn.Module) -> list[Any] | None:
        """How often torch saw each tensor change; None if the network is not in this state anymore."""
        parts = [reference() for reference in self._parts]
        if self._freed or parts[0] is not module:
            return None
        values = self._values(parts)
        if list(map(id, values)) != self._ids or any(value != own for value, own in self._copies):
            return None
        if any(_members(values[i]) != own for i, own in self._members.items()):
            return None
        tensors = [values[i] for i in self._tensors]
        if list(map(Tensor.data_ptr, tensors)) != self._addresses:
            return None
        try:
            return list(map(VERSION, tensors))
        except RuntimeError:  # tensors of inference mode have no counter
            return [object()]

    def _values(self, parts: list[Any]) -> list[Any]:
        values = [
            *torch_module._global_forward_hooks.values(),
            *torch_module._global_forward_pre_hooks.values(),
        ]
        for part, skip in zip(parts, self._skips, strict=True):
            own = part.__dict__
            values += islice(own.values(), skip, None)
            for inner in INNER(own):
                if inner:
                    values += inner.values()
        return values


def is_watched(part: nn.Module) -> bool:
    """Whether user code runs in the module's pass: a hook or a patched forward."""
    own = part.__dict__
    return any(map(own.__getitem__, HOOKS)) or "forward" in own


def _by_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if type(value) in CONTAINERS:
        return _members(value)
    return value if type(value) in PLAIN else id(value)


def _members(value: Any) -> list[Any]:
    """Members of a container, ids of those that are not plain; of a dict, its keys too."""
    if type(value) not in CONTAINERS:
        return []
    members = (*value, *value.values()) if isinstance(value, dict) else value
    return [member if isinstance(member, PLAIN) else id(member) for member in members]


def _is_plain(value: Any) -> bool:
    members = value.values() if isinstance(value, dict) else value
    return type(value) in CONTAINERS and all(isinstance(member, PLAIN) for member in members)
