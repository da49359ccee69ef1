"""Every score, one file per metric: pure functions, tensors or arrays (or Maps) in, nothing hidden."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
