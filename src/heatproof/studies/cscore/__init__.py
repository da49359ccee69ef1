"""C-Score over training: does the model look at the same place for every image of a class, and since when?"""

from typing import TYPE_CHECKING

from heatproof.lazy import names_are_late

if TYPE_CHECKING:
    from heatproof.studies.cscore.protocol import (
        CscoreOutcome,
        NetworksOutcome,
        compare,
        cscore_study,
        networks_study,
    )
    from heatproof.studies.cscore.settings import CscoreSettings

__all__ = [
    "CscoreOutcome", "CscoreSettings", "NetworksOutcome", "compare", "cscore_study", "networks_study",
]  # fmt: skip

names_are_late(__name__)
