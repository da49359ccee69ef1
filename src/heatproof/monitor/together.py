"""One decision in all processes of a distributed training, so that none of them waits for one that stopped.

Every process calls the same functions in the same order. In a training of one process they just call `work`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from heatproof.errors import HeatproofError

T = TypeVar("T")


class AlarmRaised(HeatproofError):
    """An alarm that the user wanted training to stop for."""


def leads() -> bool:
    """Whether this is the first process, or the only one."""
    return _alone() or torch.distributed.get_rank() == 0


def from_first(work: Callable[[], T]) -> T:
    """What `work` gives in the first process, in all of them; an error there is one everywhere."""
    if _alone():
        return work()
    found, own = _tried(work) if leads() else (None, None)
    box: list[Any] = [found, _words(own)]
    torch.distributed.broadcast_object_list(box, src=0)  # which leaves the first process's as they are
    _raise(own, box[1:])
    return cast(T, box[0])


def everywhere(work: Callable[[], Any]) -> None:
    """Do it in every process; an error in one of them is one in all."""
    if _alone():
        work()
        return
    own = _tried(work)[1]
    said: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(said, _words(own))
    _raise(own, said)


def _alone() -> bool:
    group = torch.distributed
    return not (group.is_available() and group.is_initialized() and group.get_world_size() > 1)


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # raised again by _raise, once the others know
        return None, error


def _words(error: Exception | None) -> tuple[bool, str] | None:
    """Whether training is to stop in order, and the sentence; the error itself need not survive the way."""
    return None if error is None else (isinstance(error, AlarmRaised), str(error) or type(error).__name__)


def _raise(own: Exception | None, said: list[tuple[bool, str] | None]) -> None:
    if own is not None:
        raise own
    for stops, sentence in filter(None, said):
        raise AlarmRaised(sentence) if stops else HeatproofError(f"in another process: {sentence}")
