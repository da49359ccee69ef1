from .loop import Data, TrainProgress, fit, read_data, stratified_split, validate
from .networks import DEPTHS, SmallNet, new_head, small_net, trained_parts
from .protocols import (
    GRID,
    REGIMES,
    LeakMin,
    ablation_grid,
    regime_recipe,
    two_phase,
    two_phase_recipe,
)
from .recipe import CHECKPOINTS, Epoch, History, Phase, Recipe

__all__ = [
    "CHECKPOINTS", "DEPTHS", "GRID", "REGIMES", "Data", "Epoch", "History", "LeakMin", "Phase", "Recipe",
    "SmallNet", "TrainProgress", "ablation_grid", "fit", "new_head", "read_data", "regime_recipe",
    "small_net", "stratified_split", "trained_parts", "two_phase", "two_phase_recipe", "validate",
]  # fmt: skip
