"""The contrast test: one picture, two networks that use different things in it; which maps notice?"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heatproof.contrast.api import Contrast as Contrast
    from heatproof.contrast.api import contrast as contrast
    from heatproof.contrast.pair import Pair as Pair
    from heatproof.contrast.pair import make_pair as make_pair
    from heatproof.contrast.score import ContrastScore as ContrastScore
    from heatproof.contrast.score import contrast_scores as contrast_scores
    from heatproof.contrast.tokens import Token as Token

HOMES = {
    "Contrast": "api", "ContrastScore": "score", "Pair": "pair", "Token": "tokens",
    "contrast_scores": "score", "make_pair": "pair",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'heatproof.contrast' has no attribute {name!r}")
    return getattr(import_module(f"heatproof.contrast.{HOMES[name]}"), name)
