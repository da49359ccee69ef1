from .protocol import LocaliseOutcome, localise_study
from .settings import FlagThresholds, LocaliseSettings

__all__ = ["FlagThresholds", "LocaliseOutcome", "LocaliseSettings", "localise_study"]
