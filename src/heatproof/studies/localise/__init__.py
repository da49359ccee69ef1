"""Localisation and faithfulness under a fair budget: do maps find the object, and what the model used?"""

from heatproof.studies.localise.protocol import LocaliseOutcome, localise_study
from heatproof.studies.localise.settings import LocaliseSettings, Thresholds

__all__ = ["LocaliseOutcome", "LocaliseSettings", "Thresholds", "localise_study"]
