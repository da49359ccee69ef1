"""Sources of images, their preprocessing, and batches of model-ready tensors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
