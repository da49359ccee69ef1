"""Where pictures come from, and what is done to them before a model sees them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
