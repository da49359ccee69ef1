from .codes import make_qr, make_scenes
from .files import open_image
from .kinds import SOURCES, open_source, source_options
from .loader import Failure, Loaded, batches
from .preprocess import Carried, Preprocess
from .source import Sample, Source, select

__all__ = [
    "SOURCES", "Carried", "Failure", "Loaded", "Preprocess", "Sample", "Source", "batches", "make_qr",
    "make_scenes", "open_image", "open_source", "select", "source_options",
]  # fmt: skip
