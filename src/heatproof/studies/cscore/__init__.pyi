from .protocol import CscoreOutcome, NetworksOutcome, compare, cscore_study, networks_study
from .settings import CscoreSettings

__all__ = [
    "CscoreOutcome", "CscoreSettings", "NetworksOutcome", "compare", "cscore_study", "networks_study",
]  # fmt: skip
