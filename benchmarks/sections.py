"""The sections of `python -m benchmarks`: what each measures, how long it takes, which options are for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BenchSection:
    """What the help says of a section; its measurements are in the file of its name."""

    what: str
    gpu: str  # how long, on an H200
    cpu: str  # and on two cores
    takes: tuple[str, ...] = ()  # options beside --quick, --device and --csv
    usual: bool = True  # measured where no section is named
    tables: bool = False  # has tables with columns of their own, so --csv is a folder


SECTIONS = {
    "audit": BenchSection(
        "the standard audit beside the bare passes it needs", "1 s a picture, 4 with fp32", "minutes",
        ("network", "precision", "pictures"),
    ),
    "packages": BenchSection(
        "its parts beside grad-cam, captum, lime, torchcam and Quantus", "2 minutes", "5 minutes",
        ("pictures",),
    ),
    "explain": BenchSection("methods beside bare passes and other packages", "100 s", "7 minutes"),
    "calls": BenchSection(
        "one Grad-CAM of a plain module beside a loaded model, captum and grad-cam", "20 s", "1 minute"
    ),
    "faithfulness": BenchSection("insertion and deletion beside bare passes", "10 s", "minutes"),
    "maps": BenchSection("C-Score, SSIM and localisation of maps; how they grow", "30 s", "2 minutes"),
    "runner": BenchSection("what a run adds to decoding and explaining", "1 minute", "minutes"),
    "steady": BenchSection(
        "what must not change: rows with inputs per pass, memory with images", "1 minute", "10 minutes"
    ),
    "startup": BenchSection("commands that compute nothing, from start to end", "1 minute", "1 minute"),
    "passes": BenchSection(
        "how close shorter forms of methods come to longer ones", "-", "hours", ("data", "network"),
        False, True,
    ),
    "budgets": BenchSection(
        "audits of trained networks with a budget of minutes", "-", "30 minutes", ("data", "network"), False
    ),
    "precision": BenchSection(
        "what bf16 changes in maps and rows", "-", "20 minutes", ("data", "precision", "pictures"),
        False, True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class BenchOptions:
    """What the command line asks of every section."""

    quick: bool = False
    device: str = "cpu"
    pictures: int | None = None
    network: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    data: Path | None = None

    @property
    def gpu(self) -> bool:
        return self.device.startswith("cuda")
