"""The contrast test: one picture, two networks that use different things in it; which maps notice?"""

from heatproof.contrast.pair import Pair, make_pair
from heatproof.contrast.score import TOKEN_REMOVED, ContrastScore, contrast_scores
from heatproof.contrast.tokens import Token
from heatproof.contrast.truth import Planting

__all__ = ["TOKEN_REMOVED", "ContrastScore", "Pair", "Planting", "Token", "contrast_scores", "make_pair"]
