"""Detection of changes of a network, which decides whether an analysis or a recording of it is still valid.

A state consists of the modules, their attributes and hooks, and of where parameters and buffers lie; not of
their modes, since passes run in evaluation mode (`frozen_eval`).
It keeps no reference that would keep the network alive. Values of weights are no part of it: `versions`
counts the changes that torch sees. Two kinds of changes are not detected: other code that changes an object
in place which an attribute refers to (except lists, dicts and sets, whose members are compared), and values
written through `tensor.data`, which torch does not count. Passes use both; only what was determined before
stays.
"""

from __future__ import annotations

import copy
import weakref
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
INNER = itemgetter("_parameters", "_buffers", "_modules", *HOOKS)
STANDARD = list(nn.Module().__dict__)  # attributes of every module, the first of its __dict__
CONTAINERS = (list, tuple, dict, set)
PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
VERSION = attrgetter("_version")


class ModuleState:
    """The state of a network at one time.

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
        self._parts = [weakref.ref(part, self._freed.append) for part in parts]
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
                self._references.append(weakref.ref(value, self._freed.append))
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
