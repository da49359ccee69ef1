"""heatproof: can this heatmap be trusted?

    hp.load_model    load a network, by name or a module       hp.open_image    read an image from a file
    hp.explain       maps of several methods, one shared pass  hp.metrics       scores of maps
    hp.run           run a study                               hp.open_run      scores, maps, verdict of a run
    hp.audit         choose, run and judge automatically       hp.compare       differences between runs
    hp.evidence      what a network uses                       hp.check_data    shortcuts in a dataset
    hp.drift         do live maps differ from a run
    hp.monitor       score a network while it trains           hp.contrast      compare maps of trained copies

Names are imported on first use, so that `import heatproof` is fast.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from heatproof import metrics, monitor
    from heatproof.api import Run, audit, check_data, compare, drift, evidence, open_run, run
    from heatproof.contrast.api import contrast
    from heatproof.explain.api import explain
    from heatproof.images import open_image
    from heatproof.models import Model, load_model
    from heatproof.report.drift import DriftMonitor
    from heatproof.rows import Score, Unit
    from heatproof.types import Batch, Maps, Trace

try:
    __version__ = version("heatproof")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
__all__ = [
    "Batch", "DriftMonitor", "Maps", "Model", "Run", "Score", "Trace", "Unit", "audit", "check_data",
    "compare", "contrast", "drift", "evidence", "explain", "load_model", "metrics", "monitor", "open_image",
    "open_run", "run",
]  # fmt: skip

# Packages with the name of a public function: importing one binds its name here, so it happens before.
for _package in ("contrast", "explain", "run"):
    import_module(f"{__name__}.{_package}")
    del globals()[_package]

__getattr__, _, _ = lazy_loader.attach(
    __name__,
    submodules=[
        "errors", "images", "metrics", "models", "monitor", "registry", "report", "store", "studies", "train",
        "types", "verdict",
    ],
    submod_attrs={
        "api": ["Run", "audit", "check_data", "compare", "drift", "evidence", "open_run", "run"],
        "contrast.api": ["contrast"],
        "explain.api": ["explain"],
        "images": ["open_image"],
        "models": ["Model", "load_model"],
        "report.drift": ["DriftMonitor"],
        "rows": ["Score", "Unit"],
        "types": ["Batch", "Maps", "Trace"],
    },
)  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
