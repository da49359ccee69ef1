"""Maps from a transformer's attention: rollout, Chefer's relevance and LeGrad.

A is the attention of a block, "b heads n n": a row for each query token, a column for each key token. It is
taken where the network computes it, also inside fused attention, in timm, torchvision and Hugging Face alike.
The tokens of a map are those of the image; a class token and registers are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.errors import ModelError
from heatproof.explain import method
from heatproof.explain.baselines import in_batches
from heatproof.explain.rules import Rules, attend
from heatproof.models.capture import replace_first
from heatproof.models.layers import Layout, first_tensor, layout_of
from heatproof.models.model import Model
from heatproof.models.running import at_least_float
from heatproof.types import Trace


@method("rollout")
def rollout(trace: Trace) -> Tensor:
    """Attention multiplied through all blocks, from the image's tokens to the class token.

    The class token's row of prod_l (A_l + I) / 2, A_l the mean over heads; the mean row without such a token.
    With several prefix tokens, the first is read.
    """

    @torch.no_grad()
    def work(start: int, stop: int) -> Tensor:
        inputs = trace.model.ready(trace.images[start:stop])
        recorder = AttentionRecorder("rollout", trace.model)
        with recorder:
            trace.model.forward(inputs)
        means = (at_least_float(weights).mean(1) for weights in recorder.of(inputs))
        return recorder.flow((mean / 2 for mean in means), 0.5, inputs)

    return in_batches(trace, len(trace.images), work)


@method("chefer")
def chefer(trace: Trace) -> Tensor:
    """Attention times its gradient, multiplied through all blocks to the class token.

    The class token's row of prod_l (I + mean over heads of ReLU(A_l * d y / d A_l)), the rule for
    self-attention of the authors' generic method (equations 5 and 6); the mean row without such a token.
    """

    def work(start: int, stop: int) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            inputs = trace.model.ready(trace.images[start:stop]).detach().clone().requires_grad_()
            recorder = AttentionRecorder("chefer", trace.model)
            with recorder:
                logits = trace.model.forward(inputs)
            maps = recorder.of(inputs)
            score = trace.model.scores(logits, trace.targets[start:stop]).sum()
            gradients = torch.autograd.grad(score, maps)
        products = (
            (at_least_float(a) * at_least_float(g)).detach() for a, g in zip(maps, gradients, strict=True)
        )
        steps = (product.clamp(min=0).mean(1) for product in products)
        return recorder.flow(steps, 1.0, inputs)

    return in_batches(trace, len(trace.images), work)


@method("legrad")
def legrad(trace: Trace) -> Tensor:
    """The gradient at the attention of every block, with the classifier applied to each block's output.

    mean over blocks l, heads and query tokens of ReLU(d s_l / d A_l), s_l the logit of the explained class
    when the rest of the network, from the last normalisation on, reads the tokens behind block l.
    """
    blocks = blocks_of(trace.model.module)

    def work(start: int, stop: int) -> Tensor:
        inputs = trace.model.ready(trace.images[start:stop])
        recorder = AttentionRecorder("legrad", trace.model, leaves=True)
        with torch.inference_mode(False), torch.enable_grad():
            with recorder, _separate_blocks(blocks) as ran:
                output = (trace.model.call or trace.model.module)(inputs.detach().clone())
            maps = recorder.of(inputs)
            if len(maps) != len(ran) or len({output.shape for output in ran}) > 1:
                raise ModelError(
                    f"legrad needs one attention in each block, and {trace.model.name} has {len(maps)} in "
                    f"{len(ran)}; use attnlrp instead"
                )
            head = trace.model.head
            logits = head.logits(at_least_float(head.table(output, len(maps) * len(inputs))))
            score = head.scores(logits, trace.targets[start:stop].repeat(len(maps))).sum()
            gradients = torch.autograd.grad(score, maps)
        mean = torch.stack([at_least_float(g).clamp(min=0).mean((1, 2)) for g in gradients]).mean(0)
        return recorder.layout(gradients[0].mean(1), inputs).picture(mean[..., None])[:, 0]

    return in_batches(trace, len(trace.images), work)


class AttentionRecorder(Rules):
    """Records the attention of every block, "b heads n n"; as leaves, to take gradients at them."""

    def __init__(self, method: str, model: Model, leaves: bool = False) -> None:
        super().__init__({"scaled_dot_product_attention": self._fused, "softmax": self._softmax})
        self.method, self.model, self.leaves = method, model, leaves
        self.maps: list[Tensor] = []

    def of(self, inputs: Tensor) -> list[Tensor]:
        """The recorded attention; raises ModelError unless it is between all tokens of these images."""
        if not self.maps:
            raise ModelError(
                f"{self.method} is for transformers, and {self.model.name} does not attend; "
                "use gradcam instead"
            )
        shapes = {tuple(weights.shape[-2:]) for weights in self.maps}
        if len(shapes) > 1 or any(len(weights) != len(inputs) for weights in self.maps):
            raise ModelError(
                f"{self.method} needs attention between all tokens, and {self.model.name} attends within "
                "windows or stages; use attnlrp instead"
            )
        return self.maps

    def layout(self, tokens: Tensor, inputs: Tensor) -> Layout:
        """Layout of "b n ..." tokens on the image."""
        layout = layout_of(tokens, inputs, self.model.module)
        if layout is None:
            raise ModelError(
                f"{self.method} cannot map the {tokens.shape[1]} tokens of {self.model.name} to "
                "positions of the image; use attnlrp instead"
            )
        return layout

    def flow(self, steps: Iterable[Tensor], residual: float, inputs: Tensor) -> Tensor:
        """Maps "b h w": the class token's row (else the mean row) of prod_l (step_l + residual I)."""
        whole = (step + residual * torch.eye(step.shape[-1]).to(step) for step in steps)
        product = reduce(lambda below, above: above @ below, whole)
        layout = self.layout(product, inputs)
        row = product[:, 0] if layout.prefix else product.mean(1)
        return layout.picture(row[..., None])[:, 0]

    def _record(self, weights: Tensor) -> Tensor:
        if weights.ndim != 4 or weights.shape[-1] != weights.shape[-2]:
            return weights
        self.maps.append(weights.detach().requires_grad_() if self.leaves else weights)
        return self.maps[-1]

    def _fused(self, _function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return attend(*args, **kwargs, seen=self._record)

    def _softmax(self, function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self._record(function(*args, **kwargs))


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """A transformer's blocks: the list of modules of one type that has the most weights."""
    lists: list[list[nn.Module]] = [[]]
    for part in module.modules():
        children = list(part.children())
        if isinstance(part, (nn.Sequential, nn.ModuleList)) and len({type(child) for child in children}) == 1:
            lists.append(children)
    return max(lists, key=lambda blocks: sum(w.numel() for block in blocks for w in block.parameters()))


@contextmanager
def _separate_blocks(blocks: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the output of each block, detached from the graph of the others.

    The outputs of all blocks, as one longer batch, replace that of the last one. The hooks are removed when
    the context ends.
    """
    outputs: list[Tensor] = []

    def detach(_block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value.detach() if isinstance(value, Tensor) else value for value in args)

    def ended(block: nn.Module, _args: Any, output: Any) -> Any:
        tensor = first_tensor(output)
        if tensor is not None:
            outputs.append(tensor)
        alike = len({o.shape for o in outputs}) == 1  # or they are no blocks of a transformer
        return replace_first(output, torch.cat(outputs)) if block is blocks[-1] and alike else None

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(detach))
            hooks.enter_context(block.register_forward_hook(ended))
        yield outputs
