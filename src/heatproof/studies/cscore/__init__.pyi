from .protocol import (
    CscoreOutcome,
    NetworksOutcome,
    cscore_study,
    networks_study,
)
from .reference import compare
from .settings import CscoreSettings

__all__ = [
    "CscoreOutcome", "CscoreSettings", "NetworksOutcome", "compare", "cscore_study", "networks_study",
]  # fmt: skip
