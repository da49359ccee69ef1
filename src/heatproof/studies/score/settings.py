"""Which maps are scored, for which network and pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from heatproof.run.metrics import read_metrics
from heatproof.studies.audit.settings import AuditSettings, seen_from
from heatproof.studies.settings import (
    DEVICE,
    HEAD,
    LIMIT,
    THREADS,
    PreprocessSettings,
    Settings,
    calls,
    option,
    words,
)

SHARED = (  # with an audit
    "model", "images", "checkpoint", "pretrained", "num_classes", "class_names", "limit", "head",
    "preprocess", "allow_pickle", "device", "threads", "seed", "out",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScoreSettings(Settings):
    """What is scored, and on what."""

    model: str = option(
        help="lite0, torchvision:NAME, timm:NAME, hf:FOLDER, FILE.py:FUNCTION, ...", short="M"
    )
    images: Path = option(help="A folder of pictures, or a CSV file that lists them.")
    maps: str = option(help='A folder of maps, a pattern such as "maps/{id}.npy", or one file for all.')
    checkpoint: tuple[str, ...] = option((), "Weights: safetensors or torch.", short="c")
    pretrained: bool = option(False, "The library's own weights, which are downloaded.")
    num_classes: int | None = option(None, "Of the network; the checkpoint's by default.", least=1)
    class_names: tuple[str, ...] = option(
        (), "Comma-separated, in the order of the model's classes; else its own, or the folders'.", read=words
    )
    targets: str | None = option(
        None,
        "The class that the maps explain; the label by default, where there is one.",
        choices=("label", "predicted"),
    )
    metrics: tuple[str, ...] = option(
        (), "Comma-separated, instead of all that can be computed.", read=calls, shown=""
    )
    limit: int | None = option(None, LIMIT, least=1)
    head: str | None = option(None, HEAD)
    preprocess: PreprocessSettings = field(default_factory=PreprocessSettings)
    allow_pickle: bool = option(False, "Let checkpoints run code. Only if you trust them.")
    device: str | None = option(None, DEVICE)
    threads: int | None = option(None, THREADS, least=1)
    seed: int = option(0, "Everything follows from it.", least=0)
    out: Path = option(Path("scores"), "Folder.", short="o")

    def __post_init__(self) -> None:
        super().__post_init__()
        read_metrics(self.metrics)  # before torch is imported

    @property
    def audit(self) -> AuditSettings:
        """What an audit of the same network and pictures would be told."""
        return AuditSettings(**{name: getattr(self, name) for name in SHARED})

    @property
    def method(self) -> str:
        """The maps as a method of the study in `out`."""
        return f"files:{seen_from(self.out.resolve(), self.maps)}"
