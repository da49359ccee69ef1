"""What networks come wrapped in: compiled, parallel, sharded, quantised, exported, checkpointed.

torch.compile, .compile()      run as they were written while they are explained: hooks must see each layer
DataParallel, DDP              taken off: the network inside is what is explained
half, bfloat16                 as they are; maps are float32
torch.utils.checkpoint         as it is with use_reentrant=False; else no gradient comes out, which is said
quantised (torch.ao)           no gradients: methods that need answers alone
FSDP, weights over processes   refused: one process alone would wait for the others for ever
TorchScript, torch.export      refused: their layers cannot be hooked, nor their functions be given rules
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from heatproof.errors import ModelError

if TYPE_CHECKING:
    from heatproof.models.model import Model

QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")


def unwrapped(module: nn.Module) -> nn.Module:
    """The network inside what torch.compile or data parallelism wrapped around it: hooks do not reach it."""
    while True:
        compiled = dict(module.named_children()).get("_orig_mod")  # TorchScript has another kind of dict
        if compiled is not None:
            module = compiled
        elif isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        else:
            return module


def refuse_wrapped(module: nn.Module, name: str) -> None:
    """One sentence for a network that must be given in another form."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ModelError(
            f"{name} is TorchScript, whose layers cannot be hooked nor set to evaluation mode from "
            "outside; give the nn.Module it was made from"
        )
    if is_exported(module):
        raise ModelError(
            f"{name} comes from torch.export, which leaves neither layers nor functions that a method could "
            "follow; give the nn.Module it was made from"
        )
    if is_sharded(module):
        raise ModelError(
            f"{name} is sharded (FSDP): its weights lie in pieces, and one process cannot run it alone; "
            "gather a full state dict, load it into the plain network, and give that"
        )


def is_exported(module: nn.Module) -> bool:
    """Whether it is a graph of bare operators, as torch.export makes it."""
    if not isinstance(module, torch.fx.GraphModule):
        return False
    return any(isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes)


def is_sharded(module: nn.Module) -> bool:
    """Whether it is wrapped by FullyShardedDataParallel, or its weights lie in several processes."""
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        return True
    meshes = (getattr(weight, "device_mesh", None) for weight in module.parameters())
    return any(mesh is not None and mesh.size() > 1 for mesh in meshes)


def is_quantised(module: nn.Module) -> bool:
    """Whether a part of it computes in whole numbers, through which no gradient goes."""
    return any(type(part).__module__.startswith(QUANTISED) for part in module.modules())


def eagerly(parts: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Compiled parts run as they were written, while the context is open."""
    compiled = any("_orig_mod" in part._modules or part.__dict__.get("_compiled_call_impl") for part in parts)
    if compiled and hasattr(torch.compiler, "set_stance"):  # which torch 2.5 has not
        as_written: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return as_written
    return nullcontext()


@contextmanager
def checkpoints_in_a_sentence(model: Model, images: Tensor) -> Iterator[None]:
    """Name the cause if no gradient comes out: a random network, or one that checkpoints."""
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
