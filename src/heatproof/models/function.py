"""A network that is only a function: images in, scores out, whoever computes them.

    hp.load_model(lambda images: session.run(None, {"x": images})[0], preprocess=...)     ONNX Runtime
    hp.load_model("client.py:predict")                    a server, TensorFlow, JAX: any function in a file

The function gets a float32 array "b c H W", model-ready, and returns "b k": logits or probabilities, as an
array, a list or a tensor. One that cannot take an array is given a tensor. There is nothing inside to look
at: what needs layers, gradients or weights is refused in one sentence; all else is as with any network.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.errors import ModelError, UnknownNameError
from heatproof.models.checkpoints import first_line


class FunctionModule(nn.Module):
    """The function as a module without parts; gradients end at it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.tensors: bool | None = None  # whether it is given tensors; known after its first call

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return _as_tensor(self._call(images.detach())).to(images.device)

    def _call(self, images: Tensor) -> Any:
        if self.tensors is None:
            try:
                found = self.function(_array(images))
                self.tensors = False
                return found
            except (TypeError, AttributeError) as error:
                try:
                    found = self.function(images.clone())
                except Exception:
                    raise error from None  # it takes neither: what went wrong with the array is said
                self.tensors = True
                return found
        return self.function(images.clone() if self.tensors else _array(images))


def is_function(module: nn.Module) -> bool:
    """Whether there is nothing inside to look at."""
    return isinstance(module, FunctionModule)


def _array(images: Tensor) -> np.ndarray:
    """A copy that the function may write to, in the order that other libraries expect."""
    return np.array(images.float().cpu().contiguous().numpy())


def _as_tensor(found: Any) -> Tensor:
    """ "b k" scores in what a function returns; a list with one table in it is that table."""
    if isinstance(found, (list, tuple)) and len(found) == 1 and getattr(found[0], "ndim", 0) == 2:
        found = found[0]
    if isinstance(found, Tensor):
        return found.detach()
    try:
        return torch.from_numpy(np.array(found, dtype=np.float32))
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"the function returned {type(found).__name__}, not a table of scores with a row per image"
        ) from error


def takes_images(function: Callable[..., Any], options: Collection[str]) -> bool:
    """Whether a function predicts and does not make a network: it must be given one thing, no option."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    must = [p.name for p in parameters if p.kind in named and p.default is p.empty]
    return not inspect.isclass(function) and len(must) == 1 and must[0] not in options


@contextmanager
def function_in(path: Path, name: str) -> Iterator[Callable[..., Any]]:
    """A function of a Python file, whose neighbours it can import while the context is open."""
    if not path.is_file():
        raise ModelError(f"no such file: {path}")
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        namespace = _run_file(path)
        found = getattr(namespace, name, None)
        if not callable(found):
            known = [n for n, v in vars(namespace).items() if callable(v) and not n.startswith("_")]
            raise UnknownNameError(f"function in {path.name}", name, known)
        yield found
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
