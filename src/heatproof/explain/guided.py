"""Guided backpropagation: on the way back a ReLU lets through only what is positive, in both directions.

At every ReLU the gradient is kept where the forward value and the gradient itself are positive:
g_in = [x > 0] [g_out > 0] g_out. Citation key: springenberg2015guided.

Deviations: none in the rule. ReLU6 is a ReLU whose own gradient is 0 where it is cut off. The map is sharp
and looks convincing, but barely depends on what the network learned (adebayo2018sanity).
"""

from __future__ import annotations

from typing import Any

from heatproof.errors import ModelError
from heatproof.explain.gradients import GRADIENT_CARD, over_channels
from heatproof.explain.rules import OWN_PASS, RECTIFIERS, own_gradient, rectifies
from heatproof.registry import explainer
from heatproof.types import Signed, Trace


@explainer(
    "guided-backprop",
    cite="springenberg2015guided",
    aliases=("guided-backpropagation", "gbp"),
    card=GRADIENT_CARD,
    cost=OWN_PASS,
    architecture="cnn",
    volumes=True,
)
def guided_backprop(trace: Trace) -> Signed:
    """The gradient, of which every ReLU lets only the positive part through.

    sum_c |g_c| with g_in = [x > 0] [g_out > 0] g_out at every ReLU, whether module, function or in place.
    """
    gated = False

    def gate(function: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal gated
        output = function(*args, **kwargs)
        if output.requires_grad and rectifies(function, *args, **kwargs):
            gated = True
            output.register_hook(lambda gradient: gradient.clamp(min=0))
        return output

    gradients = own_gradient(trace, dict.fromkeys(RECTIFIERS, gate))
    if not gated:
        raise ModelError(
            f"guided-backprop changes what ReLUs pass back, and {trace.model.name} has none; "
            "use smoothgrad instead"
        )
    return over_channels(gradients)
