"""Localisation and faithfulness under a fair budget: do maps find the object, and what the model used?"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
