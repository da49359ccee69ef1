"""The contrast test: one picture, two networks that use different things in it; which maps notice?"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
