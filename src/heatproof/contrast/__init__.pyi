from .api import Contrast, contrast
from .pair import Pair, make_pair
from .score import ContrastScore, contrast_scores
from .tokens import Token

__all__ = ["Contrast", "ContrastScore", "Pair", "Token", "contrast", "contrast_scores", "make_pair"]
