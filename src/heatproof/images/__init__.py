"""Where pictures come from, and what is done to them before a model sees them."""

from typing import TYPE_CHECKING

from heatproof.lazy import names_are_late

if TYPE_CHECKING:
    from heatproof.images.codes import make_qr
    from heatproof.images.kinds import SOURCES, open_source, source_options
    from heatproof.images.loader import Failure, Loaded, batches
    from heatproof.images.preprocess import Carried, Preprocess, open_image
    from heatproof.images.scenes import make_scenes
    from heatproof.images.source import Sample, Source, select

__all__ = [
    "SOURCES", "Carried", "Failure", "Loaded", "Preprocess", "Sample", "Source", "batches", "make_qr",
    "make_scenes", "open_image", "open_source", "select", "source_options",
]  # fmt: skip

names_are_late(__name__)
