"""What a network's answer is, head by head; see docs/heads.md."""

from heatproof.models.heads.base import Columns, Head
from heatproof.models.heads.classes import Multilabel, Undetermined, class_scores, predicted, probabilities
from heatproof.models.heads.dense import Detection, Segmentation
from heatproof.models.heads.find import HEADS, LastStep, check_inputs, chosen_head, named_head, read_first
from heatproof.models.heads.values import Embedding, Function, Regression

__all__ = [
    "HEADS",
    "Columns",
    "Detection",
    "Embedding",
    "Function",
    "Head",
    "LastStep",
    "Multilabel",
    "Regression",
    "Segmentation",
    "Undetermined",
    "check_inputs",
    "chosen_head",
    "class_scores",
    "named_head",
    "predicted",
    "probabilities",
    "read_first",
]
