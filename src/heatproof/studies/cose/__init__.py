"""COSE: does a map stay when the prediction stays, and change when the prediction changes?"""

from heatproof.studies.cose.protocol import CoseResult, cose_study
from heatproof.studies.cose.settings import CoseSettings

__all__ = ["CoseResult", "CoseSettings", "cose_study"]
