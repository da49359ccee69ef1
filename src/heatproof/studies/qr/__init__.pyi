from .protocol import QrOutcome, qr_study
from .settings import FULL, QrSettings
from .trainings import total_epochs

__all__ = ["FULL", "QrOutcome", "QrSettings", "qr_study", "total_epochs"]
