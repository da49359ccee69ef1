"""heatproof: can this heatmap be trusted?"""

from heatproof import metrics, monitor
from heatproof.explain import explain
from heatproof.models import Model, load_model
from heatproof.types import Batch, Maps, Score, Trace, Unit

__version__ = "0.1.0"
__all__ = ["Batch", "Maps", "Model", "Score", "Trace", "Unit", "explain", "load_model", "metrics", "monitor"]
