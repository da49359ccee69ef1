"""One checkpoint measured in one shared pass, so that nothing about the training changes.

ceil(n / batch) forward passes serve predictions and maps of all methods; each image's own class is explained,
as the C-Score asks (elangovan2026cscore). The numbers are those of hp.explain and hp.metrics.cscore_by_class.

Given back is what training could notice: every module's mode, which parameters want gradients, buffers that
`forward` changes (a counter, a BatchNorm that it trains), the random states of torch (CPU and the model's
GPUs), NumPy and Python. A buffer that `forward` adds stays and is said; other attributes that it sets cannot
be seen. Gradients and optimiser are never touched: gradients are asked for at a layer, not accumulated.
Autocast is off inside, so that a number does not depend on where in the loop the monitor is called, and a
compiled model runs as written, since hooks inside a compiled graph would compile it anew.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from heatproof.errors import InputError
from heatproof.metrics import accuracy, auc, cscore_by_class, recall
from heatproof.metrics.cscores import confidence_weights
from heatproof.metrics.gold import ListRule, thresholds
from heatproof.metrics.results import PerClass
from heatproof.models import Model, probabilities
from heatproof.models.heads import Multilabel
from heatproof.models.running import frozen_eval
from heatproof.types import Maps

log = logging.getLogger("heatproof.monitor")
NO_MAP = "every map of this method has NaN or infinite values"


@dataclass(frozen=True)
class Answers:
    """What one pass over the images gave."""

    logits: Tensor  # "b k", on the CPU
    maps: Mapping[str, Maps]  # by method, where the model is; of findings, where there may be several
    is_multilabel: bool = False

    @property
    def probabilities(self) -> Tensor:
        return (self.logits.sigmoid() if self.is_multilabel else probabilities(self.logits)).double()


@dataclass(frozen=True)
class Measured:
    """The numbers of one checkpoint."""

    scores: Mapping[str, PerClass]  # by method
    degenerate: Mapping[str, float]  # by method: share of all maps in which nothing stands out
    auc: PerClass
    accuracy: PerClass
    recall: PerClass
    unusable: Mapping[str, int]  # by method: maps that are not finite, left out of its score


def measure(
    found: Answers, labels: Tensor, rule: ListRule, seed: int, listed: Tensor | None = None
) -> Measured:
    """Scores of one pass. listed: "b" bool (or "b k"), the gold list where it is anchored."""
    lost = int((~torch.isfinite(found.logits).all(1)).sum())
    if lost:
        raise InputError(f"the model's output is NaN or infinite for {lost} of {len(labels)} images")
    probs, tau = found.probabilities, rule.tau
    own, chances = labels, probs
    limits: dict[str, Any] = {}
    weights: Any = rule.weights
    if found.is_multilabel:
        rows, own = labels.nonzero().unbind(1)
        tau = thresholds(labels, probs, rule.tau).tolist()
        chances, listed, limits = probs[rows], None if listed is None else listed[rows, own], {"tau": tau}
        weights = confidence_weights(labels, probs, rule.weights)[rows, own]
    scores, degenerate, unusable = {}, {}, {}
    for method, maps in found.maps.items():
        good = torch.isfinite(maps.values).flatten(1).all(1)
        unusable[method] = int((~good).sum())
        usable = good.cpu()
        kept = maps if good.all() else maps.take(good)
        scores[method] = _no_scores(probs.shape[1])
        if usable.any():
            scores[method] = cscore_by_class(
                kept, own[usable], chances[usable], tau=tau, seed=seed,
                weights=weights[usable] if found.is_multilabel else weights,
                anchor=None if listed is None else listed[usable],
            )  # fmt: skip
        degenerate[method] = float(kept.degenerate.double().mean())
    right, known = (score(labels, probs, **limits) for score in (accuracy, recall))
    return Measured(scores, degenerate, auc(labels, probs), right, known, unusable)


def with_head(model: Model, is_multilabel: bool) -> Model:
    """Where labels are a table, each output is a finding of its own, unless the model says something else."""
    if not is_multilabel or isinstance(model.head, Multilabel):
        return model
    if model.head_name is not None:
        raise InputError(
            f"labels are a table of several findings, but the model's head is {model.head_name!r}; load it "
            "with head='multilabel', or give one label per image"
        )
    return replace(model, head=Multilabel())


def _no_scores(classes: int) -> PerClass:
    nothing = PerClass(reason=NO_MAP)
    return PerClass(reason=NO_MAP, classes=dict.fromkeys(range(classes), nothing))


@contextmanager
def undisturbed(model: Model) -> Iterator[None]:
    """The model as it is evaluated; see the top of the file. Also when an exception flies."""
    with ExitStack() as stack:
        stack.enter_context(same_buffers(model.module))
        stack.enter_context(frozen_eval(model.module))
        stack.enter_context(torch.autocast(model.device.type, enabled=False))
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """Buffers as they were, whatever `forward` does to them."""
    before = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    names = {name for name, _ in module.named_buffers()}
    try:
        yield
    finally:
        for part, name, buffer, copy in before:
            part._buffers[name] = buffer
            if not torch.equal(buffer, copy):
                buffer.copy_(copy)
        for name in sorted({name for name, _ in module.named_buffers()} - names):
            log.warning("the model's forward adds the buffer %s, which the monitor cannot take back", name)


@contextmanager
def same_randomness() -> Iterator[None]:
    """Whatever is drawn inside, also by loggers, the training draws as it would have."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  # the state that others use
    try:
        with torch.random.fork_rng(devices=[]):  # those of GPUs: frozen_eval() knows which the model is on
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
