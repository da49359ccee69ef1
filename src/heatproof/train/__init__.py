"""Training recipes of the papers: two-phase, ZS, FT-Struct, FT-LeakMin, over one seeded epoch loop."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
