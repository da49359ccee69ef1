from .protocol import CscoreOutcome, compare, cscore_study, networks_study
from .settings import CscoreSettings

__all__ = ["CscoreOutcome", "CscoreSettings", "compare", "cscore_study", "networks_study"]
