"""COSE: does a map stay when the prediction stays, and change when the prediction changes?"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
