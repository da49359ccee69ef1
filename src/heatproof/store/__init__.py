"""Where results live: a run folder with scores, maps and a manifest, safe to stop at any moment."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
