"""Load weights from a file into a module: safely, and completely or not at all.

Files are read as safetensors or with torch.load(weights_only=True), so reading never runs code; pickled
objects need allow_pickle. Outer dictionaries of training scripts ("state_dict", "model", ...) and any prefix
in front of the model's own names ("module.", "_orig_mod.", "model.net.") are removed. Every name and shape is
checked before the first weight is written.
"""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from heatproof.errors import CheckpointError, first_line

# Where training scripts put the weights; averaged copies only if there is nothing else.
PLAIN = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "weights")
AVERAGED = ("state_dict_ema", "ema_state_dict", "model_ema", "ema_model", "ema")
ALLOW_PICKLE = "if you trust its code, set allow_pickle = true, on the command line --allow-pickle"
COUNTERS = "num_batches_tracked"  # absent from old files, and not used where BatchNorm has a momentum


class ClassCountError(CheckpointError):
    """The weights fit except for the number of classes, which is `classes` in the file."""

    def __init__(self, message: str, classes: int) -> None:
        super().__init__(message)
        self.classes = classes


def load_checkpoint(module: nn.Module, path: str | Path, allow_pickle: bool = False, **options: Any) -> None:
    """Write a file's weights into the module; options: those of write_weights."""
    write_weights(module, read_checkpoint(path, allow_pickle), str(path), **options)


def write_weights(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    *,
    name: str = "",
    new_head: bool = False,
    prefix: str | None = None,
) -> None:
    """Write weights into the module, all of them, or raise and change nothing.

    Args:
        source: where the weights came from, for messages.
        new_head: let weights whose number of classes differs keep the module's own values.
        prefix: of the names of the weights to take, where there are several networks.
    """
    wanted = module.state_dict()
    given = fit_names(weights, wanted, prefix, source)
    missing = [k for k in wanted if k not in given and not k.endswith(COUNTERS)]
    unexpected = [k for k in given if k not in wanted]
    reshaped = [k for k in given if k in wanted and given[k].shape != _shape(wanted[k])]
    # Only a head of another size is a mistake that can be repaired by building the network again.
    # It is one if all that differs is the first axis, everywhere in the same way.
    heads = {(*_shape(wanted[k])[:1], *given[k].shape[:1]) for k in reshaped}
    same_features = all(_shape(wanted[k])[1:] == given[k].shape[1:] for k in reshaped)
    head = heads.pop() if len(heads) == 1 and same_features and not missing and not unexpected else ()
    name = name or type(module).__name__
    if len(head) == 2 and new_head:
        given = {k: v for k, v in given.items() if k not in reshaped}
    elif len(head) == 2:
        ours, classes = head
        raise ClassCountError(
            f"{source} has {classes} classes but {name} was made with {ours}; make it with {classes}", classes
        )
    elif missing or unexpected or reshaped:
        shapes = [f"{k} is {_times(given[k].shape)}, not {_times(_shape(wanted[k]))}" for k in reshaped]
        kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
        parts = ", ".join(f"{len(names)} {kind}{_few(names)}" for kind, names in kinds.items() if names)
        raise CheckpointError(f"{source} does not fit {name}: {parts}; build the model the file was made for")
    # load_state_dict would cast quantised integers to floats silently and the network would be wrong.
    real = {k for k, v in wanted.items() if isinstance(v, Tensor) and v.is_floating_point()}
    integers = [k for k, v in given.items() if k in real and not v.is_floating_point()]
    if integers:
        raise CheckpointError(
            f"{source} holds integers ({given[integers[0]].dtype}) for {integers[0]}, a quantised weight "
            f"without its scale; save the weights of {name} before it is quantised"
        )
    try:
        module.load_state_dict(given, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{source} does not load into {name}: {first_line(error)}") from error


def read_checkpoint(path: str | Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """Weights in a file by name, on the CPU, without outer dictionaries."""
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; name the weight file inside it")
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is a pipe or a device, not a file; name a weight file")
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except FileNotFoundError:
        raise CheckpointError(f"no such checkpoint: {path}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not start:
        raise CheckpointError(f"{path} is empty; was its download or copy interrupted?")
    if path.suffix == ".safetensors" or start[8:] == b"{":  # a length, then a header in JSON
        try:
            return safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not a complete safetensors file: {first_line(error)}"
            ) from error
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # about the age of the file's format; nothing a user can act on
            content = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:  # a file that is anything else fails anywhere inside the reader
        pickled = (
            re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        )
        if pickled:
            cause = f"holds pickled Python objects ({pickled[1]}), not only weights; "
            cause += f"save model.state_dict() instead, or {ALLOW_PICKLE}"
        elif "TorchScript" in str(error):
            cause = "is a TorchScript archive; save the model's state_dict() instead"
        elif allow_pickle and isinstance(error, (ImportError, AttributeError)):
            cause = f"holds objects of a class that cannot be imported here: {first_line(error)}"
        else:
            cause = "is not a checkpoint, or a broken one; save weights with "
            cause += "torch.save(model.state_dict(), ...) or as safetensors"
        raise CheckpointError(f"{path} {cause}") from (None if pickled else error)
    weights = _weights_in(content)
    if weights is None:
        names = _few(content) if isinstance(content, Mapping) else ""
        raise CheckpointError(
            f"{path} holds no weights but a {type(content).__name__}{names}; save model.state_dict() instead"
        )
    return weights


def _weights_in(content: Any) -> dict[str, Tensor] | None:
    """The innermost dictionary of tensors in the content of a file."""
    if isinstance(content, nn.Module):
        return dict(content.state_dict())
    if not isinstance(content, Mapping):
        return None
    for wrapper in PLAIN + AVERAGED:
        if weights := _weights_in(content.get(wrapper)):
            return weights
    return {k: v for k, v in content.items() if isinstance(k, str) and isinstance(v, Tensor)} or None


def fit_names(
    weights: Mapping[str, Tensor], wanted: Iterable[str], prefix: str | None = None, source: str = "the file"
) -> dict[str, Tensor]:
    """Remove the prefix under which most of the wanted names are found, and drop names without it.

    Raises CheckpointError if several prefixes fit equally well and none is given.

    >>> list(fit_names({"module.fc.bias": torch.zeros(1), "loss.weight": torch.zeros(1)}, ["fc.bias"]))
    ['fc.bias']
    """
    weights = {name.replace("_orig_mod.", ""): tensor for name, tensor in weights.items()}
    wanted = set(wanted)
    prefixes: Counter[str] = Counter({"": 0})  # first, so that it wins a draw
    for name in weights:
        parts = name.split(".")
        for i in range(len(parts)):
            if ".".join(parts[i:]) in wanted:
                prefixes["".join(part + "." for part in parts[:i])] += 1
    most = max(prefixes.values())
    best = [p for p, count in prefixes.items() if count == most]
    plain = [p for p in best if not {*AVERAGED} & {*p.split(".")}]
    if prefix is None and len(plain or best) > 1 and "" not in best:
        raise CheckpointError(
            f"{source} holds several networks, {' and '.join(plain or best)}; choose one, such as "
            f"prefix = '{(plain or best)[0]}' (of load_model, and of [model] in a study)"
        )
    prefix = (plain or best)[0] if prefix is None else prefix
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _few(names: Iterable[Any], most: int = 3) -> str:
    names = list(map(str, names))
    return f" ({', '.join(names[:most])}{', ...' if len(names) > most else ''})"


def _shape(value: Any) -> torch.Size:
    return value.shape if isinstance(value, Tensor) else torch.Size()


def _times(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"
