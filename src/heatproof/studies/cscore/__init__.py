"""C-Score over training: does the model look at the same place for every image of a class, and since when?"""

from heatproof.studies.cscore.protocol import CscoreOutcome, cscore_study
from heatproof.studies.cscore.reference import compare
from heatproof.studies.cscore.settings import CscoreSettings

__all__ = ["CscoreOutcome", "CscoreSettings", "compare", "cscore_study"]
