"""What a network's answer is: logits, one logit or probabilities. Found once, in its first pass.

    softmax           k logits                     probability: softmax
    one logit         one logit z, of class 1      probability: sigmoid
    probabilities     k numbers that sum to 1      read as log p, whose softmax is p again
    one probability   one number p, of class 1     read as log p / (1 - p), whose sigmoid is p again

The logits in front of a final softmax differ from log p by one number per image: probabilities, predictions
and everything made of them are the same. A gradient is then that of log p. Heads with k sigmoids (several
findings at once) and networks with several heads have no one class to explain, so they are refused.

Numbers alone cannot tell sigmoids from logits that happen to lie in [0, 1]; the function that made them can.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from heatproof.errors import ModelError

SOFTMAX, ONE_LOGIT = "softmax", "one logit"
PROBABILITIES, ONE_PROBABILITY = "probabilities", "one probability"
MEANING = {
    SOFTMAX: "logits, made probabilities by a softmax",
    ONE_LOGIT: "one logit, of class 1, made a probability by a sigmoid",
    PROBABILITIES: "probabilities, explained through their logarithms",
    ONE_PROBABILITY: "one probability, of class 1, explained through its logit",
}
SIGMOIDS = ("sigmoid", "sigmoid_", "special_expit")
LINEAR = ("linear", "conv2d", "matmul", "addmm", "mm", "bmm", "einsum")
ROUNDING = 1e-4


class LastStep(TorchFunctionMode):
    """Sees each torch function that runs and remembers which one filled which memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and (place := _memory(result)) is not None:
            name = getattr(func, "__name__", "")
            is_view = any(isinstance(a, Tensor) and _memory(a) == place for a in args)
            if name in SIGMOIDS or not is_view:
                self.made[place] = name
        return result

    def of(self, tensor: Tensor) -> str:
        """The name of the function whose result this is, or is a view of."""
        return self.made.get(_memory(tensor) or 0, "")


def _memory(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return None


def scores_of(output: Any, count: int) -> Tensor:
    """ "b k", one row for each of the images, in what a classifier returns: a tensor, tuple or record."""
    if isinstance(output, dict):
        output = output.get("logits", output)
    output = getattr(output, "logits", output)
    if isinstance(output, (tuple, list)) and output:
        rows = [t for t in output if isinstance(t, Tensor) and t.ndim == 2 and t.is_floating_point()]
        if others := [t for t in rows if t is not output[0]]:
            shapes = " and ".join(str(tuple(t.shape)) for t in (output[0], *others) if isinstance(t, Tensor))
            raise ModelError(
                f"the model returns several tables {shapes}, each with a row per image, and only one can be "
                "explained; wrap it to return the logits you mean"
            )
        output = output[0]
    if not isinstance(output, Tensor):
        raise ModelError(
            f"the model returned {type(output).__name__}, not logits; wrap it to return a tensor"
        )
    shape = tuple(output.shape)
    if output.ndim == 1:
        output = output[:, None]
    if output.ndim != 2:
        raise ModelError(f"the model returned shape {shape}; a classifier returns 'b k' logits")
    if len(output) != count:
        raise ModelError(
            f"the model returned shape {shape} for {count} image{'s' * (count != 1)}; "
            "wrap it to return one row of logits per image"
        )
    if output.shape[1] == 0:
        raise ModelError("the model returned no logits: it has 0 classes; build it with its num_classes")
    return cast(Tensor, output)


def find_head(module: nn.Module, scores: Tensor, step: str) -> str:
    """Which head made these scores "b k"; step: the last torch function that ran on them."""
    scores, classes = scores.detach(), scores.shape[1]
    squashed = bool(((scores >= 0) & (scores <= 1)).all())
    sigmoid = squashed and step in SIGMOIDS
    if classes == 1:
        return ONE_PROBABILITY if sigmoid else ONE_LOGIT
    # Hugging Face's configuration says so, or the last activation of a Keras graph, left out of the pass.
    told = getattr(getattr(module, "config", None), "problem_type", None) == "multi_label_classification"
    if sigmoid or told or getattr(module, "final_activation", "") in ("sigmoid", "log_sigmoid"):
        raise ModelError(
            f"the network ends in {classes} sigmoids, one per finding; multi-label heads are not scored yet: "
            "wrap it to return the one logit of the finding you ask about"
        )
    rounding = max(ROUNDING, 2 * torch.finfo(scores.dtype).eps)
    one = squashed and bool((scores.sum(1, dtype=torch.float64) - 1).abs().max() <= rounding)
    return PROBABILITIES if one and step not in LINEAR else SOFTMAX


def as_logits(scores: Tensor, head: str) -> Tensor:
    """Scores whose softmax (of one column: sigmoid) is the network's probability."""
    limits = torch.finfo(scores.dtype)
    if head == PROBABILITIES:
        return scores.clamp(min=limits.tiny).log()
    if head == ONE_PROBABILITY:
        return scores.clamp(limits.tiny, 1 - limits.eps / 2).logit()
    return scores
