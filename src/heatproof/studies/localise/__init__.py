"""Localisation and faithfulness under a fair budget: do maps find the object, and what the model used?"""

from typing import TYPE_CHECKING

from heatproof.lazy import names_are_late

if TYPE_CHECKING:
    from heatproof.studies.localise.protocol import LocaliseOutcome, localise_study
    from heatproof.studies.localise.settings import FlagThresholds, LocaliseSettings

__all__ = ["FlagThresholds", "LocaliseOutcome", "LocaliseSettings", "localise_study"]

names_are_late(__name__)
