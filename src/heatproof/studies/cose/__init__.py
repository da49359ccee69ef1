"""COSE: does a map stay when the prediction stays, and change when the prediction changes?"""

from typing import TYPE_CHECKING

from heatproof.lazy import names_are_late

if TYPE_CHECKING:
    from heatproof.studies.cose.protocol import CoseResult, cose_study
    from heatproof.studies.cose.settings import CoseSettings

__all__ = ["CoseResult", "CoseSettings", "cose_study"]

names_are_late(__name__)
