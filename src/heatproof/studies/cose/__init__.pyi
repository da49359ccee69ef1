from .protocol import CoseResult, cose_study
from .settings import CoseSettings

__all__ = ["CoseResult", "CoseSettings", "cose_study"]
