"""What a network's answer is, head by head; see docs/heads.md."""

from heatproof.models.heads.base import Columns, Head
from heatproof.models.heads.classes import Multilabel, class_scores, multilabel, predicted, probabilities
from heatproof.models.heads.find import HEADS, LastStep, chosen_head, named_head, read_first

__all__ = [
    "HEADS",
    "Columns",
    "Head",
    "LastStep",
    "Multilabel",
    "chosen_head",
    "class_scores",
    "multilabel",
    "named_head",
    "predicted",
    "probabilities",
    "read_first",
]
