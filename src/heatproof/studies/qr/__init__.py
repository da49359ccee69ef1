"""CAMBench-QR: do maps land on the parts that make a code one, and stay off the rest?"""

from heatproof.studies.qr.protocol import QrOutcome, qr_study
from heatproof.studies.qr.settings import FULL, QrSettings
from heatproof.studies.qr.trainings import total_epochs

__all__ = ["FULL", "QrOutcome", "QrSettings", "qr_study", "total_epochs"]
