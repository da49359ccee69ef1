"""C-Score over training: consistency of the maps of a class at every checkpoint."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
