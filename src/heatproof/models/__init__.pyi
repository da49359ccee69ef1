from .heads import class_scores, predicted, probabilities
from .layers import default_layer
from .load import load_model
from .model import Model, as_model

__all__ = ["Model", "as_model", "class_scores", "default_layer", "load_model", "predicted", "probabilities"]
