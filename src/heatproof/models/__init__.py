"""Any image classifier as one kind of object, and the one pass every method shares."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
