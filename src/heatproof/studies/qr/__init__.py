"""CAMBench-QR: do maps land on the parts that make a code one, and stay off the rest?"""

from typing import TYPE_CHECKING

from heatproof.lazy import names_are_late

if TYPE_CHECKING:
    from heatproof.studies.qr.protocol import QrOutcome, qr_study
    from heatproof.studies.qr.settings import FULL, QrSettings
    from heatproof.studies.qr.trainings import total_epochs

__all__ = ["FULL", "QrOutcome", "QrSettings", "qr_study", "total_epochs"]

names_are_late(__name__)
