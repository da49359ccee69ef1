"""CAMBench-QR: do maps land on the parts that make a code one, and stay off the rest?"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
