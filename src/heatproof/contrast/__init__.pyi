from .api import Contrast, contrast
from .pair import ContrastScore, Pair, contrast_scores, make_pair
from .tokens import Token

__all__ = ["Contrast", "ContrastScore", "Pair", "Token", "contrast", "contrast_scores", "make_pair"]
