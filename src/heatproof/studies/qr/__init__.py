"""CAMBench-QR: mass of maps on the parts of a code and on the rest of the image."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
