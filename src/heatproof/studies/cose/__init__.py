"""COSE: maps should stay if the prediction stays, and change if the prediction changes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
