"""Any image classifier as one kind of object, and the one pass every method shares."""

from typing import TYPE_CHECKING

from heatproof.lazy import names_are_late

if TYPE_CHECKING:
    from heatproof.models.activated import default_layer
    from heatproof.models.load import load_model
    from heatproof.models.model import Model, as_model, class_scores, predicted, probabilities

__all__ = ["Model", "as_model", "class_scores", "default_layer", "load_model", "predicted", "probabilities"]

names_are_late(__name__)
