"""Maps read off a transformer's attention: rollout, which follows it, and LeGrad, which weighs it.

A is the attention of a block, "b heads n n": a row for each token that looks, a column for each that is
looked at. It is taken where the network computes it, also inside fused attention, in timm, torchvision and
Hugging Face alike. The tokens of a map are those of the image; a class token and registers are left out.

Rollout (abnar2020rollout) multiplies the mean attention of all blocks, each half residual, as if it were all
that moves information: the row of the class token in prod_l (A_l + I) / 2, or the mean row where there is
none. It knows nothing of the class. LeGrad (bousselham2024legrad) reads every block l by itself: the rest of
the network, from the last normalisation on, answers with s_l from the tokens behind that block, and the map
is the mean over blocks, heads and looking tokens of ReLU(d s_l / d A_l).

Deviations: rollout with a class token beside other prefix tokens reads the first. LeGrad's s_l is the logit
of the explained class; the paper also takes similarities to a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.errors import ModelError
from heatproof.explain.rules import OWN_PASS, Rules, attend
from heatproof.models.layers import Layout, first_tensor, layout_of
from heatproof.models.model import Model
from heatproof.models.running import at_least_float
from heatproof.models.tap import replace_first
from heatproof.registry import Card, explainer
from heatproof.types import Trace


@explainer(
    "rollout",
    cite="abnar2020rollout",
    aliases=("attention-rollout",),
    card=Card(target="none: the same map for every class", relu="none", sign="never negative"),
    cost="a forward pass of its own",
    architecture="transformer",
)
def rollout(trace: Trace) -> Tensor:
    """Attention multiplied through all blocks, from the image's tokens to the class token.

    The class token's row of prod_l (A_l + I) / 2, A_l the mean over heads; the mean row without such a token.
    """
    found: list[Tensor] = []

    @torch.no_grad()
    def work(start: int, stop: int) -> Tensor:
        inputs = trace.model.ready(trace.images[start:stop])
        with Watched("rollout", trace.model) as watched:
            trace.model.forward(inputs)
        flow = None
        for weights in watched.of(inputs):
            mean = at_least_float(weights).mean(1)
            step = (mean + torch.eye(mean.shape[-1], device=mean.device)) / 2
            flow = step if flow is None else step @ flow
        assert flow is not None
        layout = watched.layout(flow, inputs)
        row = flow[:, 0] if layout.prefix else flow.mean(1)
        picture: Tensor = layout.picture(row[..., None])[:, 0]
        return picture

    trace.queue.each(len(trace.images), work, found.append)
    return torch.cat(found)


@explainer(
    "legrad",
    cite="bousselham2024legrad",
    card=Card(relu="on the gradient of each block's attention", sign="never negative"),
    cost=OWN_PASS,
    architecture="transformer",
)
def legrad(trace: Trace) -> Tensor:
    """The gradient at the attention of every block, which the classifier reads block by block.

    mean over blocks l, heads and looking tokens of ReLU(d s_l / d A_l).
    """
    found: list[Tensor] = []
    blocks = blocks_of(trace.model.module)

    def work(start: int, stop: int) -> Tensor:
        inputs = trace.model.ready(trace.images[start:stop])
        watched = Watched("legrad", trace.model, leaves=True)
        with torch.inference_mode(False), torch.enable_grad():
            with watched, _read_one_by_one(blocks) as ran:
                output = (trace.model.call or trace.model.module)(inputs.detach().clone())
            maps = watched.of(inputs)
            if len(maps) != len(ran) or len({one.shape for one in ran}) > 1:
                raise ModelError(
                    f"legrad needs one attention in each block, and {trace.model.name} has {len(maps)} in "
                    f"{len(ran)}; use attnlrp instead"
                )
            head = trace.model.head
            logits = head.logits(at_least_float(head.table(output, len(maps) * len(inputs))))
            score = head.scores(logits, trace.targets[start:stop].repeat(len(maps))).sum()
            gradients = torch.autograd.grad(score, maps)
        mean = torch.stack([at_least_float(g).clamp(min=0).mean((1, 2)) for g in gradients]).mean(0)
        return watched.layout(gradients[0].mean(1), inputs).picture(mean[..., None])[:, 0]

    trace.queue.each(len(trace.images), work, found.append)
    return torch.cat(found)


class Watched(Rules):
    """Keeps the attention of every block, "b heads n n"; as leaves, where a gradient is asked of them."""

    def __init__(self, method: str, model: Model, leaves: bool = False) -> None:
        super().__init__({"scaled_dot_product_attention": self._fused, "softmax": self._softmax})
        self.method, self.model, self.leaves = method, model, leaves
        self.maps: list[Tensor] = []

    def of(self, inputs: Tensor) -> list[Tensor]:
        """What was kept, or why it is no attention between all tokens of these images."""
        if not self.maps:
            raise ModelError(
                f"{self.method} is for transformers, and {self.model.name} does not attend; "
                "use gradcam instead"
            )
        shapes = {tuple(one.shape[-2:]) for one in self.maps}
        if len(shapes) > 1 or any(len(one) != len(inputs) for one in self.maps):
            raise ModelError(
                f"{self.method} needs attention between all tokens, and {self.model.name} attends within "
                "windows or stages; use attnlrp instead"
            )
        return self.maps

    def layout(self, tokens: Tensor, inputs: Tensor) -> Layout:
        """How "b n ..." tokens lie on the image."""
        layout = layout_of(tokens, inputs, self.model.module)
        if layout is None:
            raise ModelError(
                f"{self.method} cannot tell how the {tokens.shape[1]} tokens of {self.model.name} lie on the "
                "image; use attnlrp instead"
            )
        return layout

    def _keep(self, weights: Tensor) -> Tensor:
        if weights.ndim != 4 or weights.shape[-1] != weights.shape[-2]:
            return weights
        self.maps.append(weights.detach().requires_grad_() if self.leaves else weights)
        return self.maps[-1]

    def _fused(self, _function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return attend(*args, **kwargs, seen=self._keep)

    def _softmax(self, function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self._keep(function(*args, **kwargs))


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The longest row of parts of one kind: a transformer's blocks."""
    rows: list[list[nn.Module]] = [[]]
    for part in module.modules():
        children = list(part.children())
        if isinstance(part, (nn.Sequential, nn.ModuleList)) and len({type(one) for one in children}) == 1:
            rows.append(children)
    return max(rows, key=lambda row: sum(weight.numel() for one in row for weight in one.parameters()))


@contextmanager
def _read_one_by_one(blocks: list[nn.Module]) -> Iterator[list[Tensor]]:
    """What each block returns, where no block sees the graph of another.

    What goes on behind the last one are the outputs of all blocks, one after the other, as one longer batch.
    The hooks are gone when the context ends.
    """
    outputs: list[Tensor] = []

    def alone(_block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(one.detach() if isinstance(one, Tensor) else one for one in args)

    def ended(block: nn.Module, _args: Any, output: Any) -> Any:
        tensor = first_tensor(output)
        if tensor is not None:
            outputs.append(tensor)
        alike = len({one.shape for one in outputs}) == 1  # or they are no blocks of a transformer
        return replace_first(output, torch.cat(outputs)) if block is blocks[-1] and alike else None

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(alone))
            hooks.enter_context(block.register_forward_hook(ended))
        yield outputs
