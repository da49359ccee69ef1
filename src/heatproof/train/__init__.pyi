from .data import Data, read_data, stratified_split
from .leakmin import LeakMin
from .loop import TrainProgress, fit, validate
from .networks import SmallNet, new_head, small_net
from .parts import DEPTHS, trained_parts
from .protocols import (
    CHECKPOINTS,
    GRID,
    REGIMES,
    ablation_grid,
    regime,
    regime_recipe,
    two_phase,
    two_phase_recipe,
)
from .recipe import Epoch, History, Phase, Recipe

__all__ = [
    "CHECKPOINTS", "DEPTHS", "GRID", "REGIMES", "Data", "Epoch", "History", "LeakMin", "Phase", "Recipe",
    "SmallNet", "TrainProgress", "ablation_grid", "fit", "new_head", "read_data", "regime", "regime_recipe",
    "small_net", "stratified_split", "trained_parts", "two_phase", "two_phase_recipe", "validate",
]  # fmt: skip
