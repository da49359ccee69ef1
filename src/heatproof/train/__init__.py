"""The training recipes the papers need: two-phase, ZS, FT-Struct, FT-LeakMin, over one seeded epoch loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heatproof.lazy import names_are_late

if TYPE_CHECKING:
    from heatproof.train.data import Data, read_data, stratified_split
    from heatproof.train.leakmin import LeakMin
    from heatproof.train.loop import TrainProgress, fit, validate
    from heatproof.train.networks import SmallNet, new_head, small_net
    from heatproof.train.parts import DEPTHS, trained_parts
    from heatproof.train.protocols import (
        CHECKPOINTS,
        GRID,
        REGIMES,
        ablation_grid,
        regime,
        regime_recipe,
        two_phase,
        two_phase_recipe,
    )
    from heatproof.train.recipe import Epoch, History, Phase, Recipe

__all__ = [
    "CHECKPOINTS", "DEPTHS", "GRID", "REGIMES", "Data", "Epoch", "History", "LeakMin", "Phase", "Recipe",
    "SmallNet", "TrainProgress", "ablation_grid", "fit", "new_head", "read_data", "regime", "regime_recipe",
    "small_net", "stratified_split", "trained_parts", "two_phase", "two_phase_recipe", "validate",
]  # fmt: skip


names_are_late(__name__)
