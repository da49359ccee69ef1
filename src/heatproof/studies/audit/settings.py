"""Settings of an audit and of a scoring of stored maps, and the tables of a study that follow from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from heatproof.errors import InputError
from heatproof.images.kinds import Guess
from heatproof.models.names import placed_spec, read_lines
from heatproof.run.config import read_metrics
from heatproof.studies.settings import (
    DEVICE,
    EXPECT_ACCURACY,
    HEAD,
    LAYER,
    LIMIT,
    PROMPT,
    PROMPTS,
    THREADS,
    PreprocessSettings,
    Settings,
    calls,
    option,
    words,
)

BATCH = 8  # images per unit: what Ctrl-C has to wait for
PYTHON = "python:"  # before the name of a network that was passed in Python
CHANGEABLE = ("out", "device", "threads", "expect_accuracy")  # when an audit is resumed
CALLS: dict[str, Any] = {"read": calls, "default_text": ""}  # of a list of methods or metrics
MODEL = "lite0, torchvision:NAME, timm:NAME, hf:FOLDER, FILE.py:{}, ..."


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(Settings):
    """A network, images and how to compute: settings of everything that is planned here."""

    model: str = option(help=MODEL.format("FACTORY"), short="M")
    images: Path = option(help="A folder of images, or a CSV file that lists them.")
    checkpoint: tuple[str, ...] = option((), "Weights: safetensors or torch.", short="c")
    pretrained: bool = option(False, "The library's own weights, which are downloaded.")
    num_classes: int | None = option(None, "Number of classes; the checkpoint's by default.", least=1)
    class_names: tuple[str, ...] = option(
        (), "Comma-separated, in the order of the model's classes; else its own, or the folders'.", read=words
    )
    prompt: tuple[str, ...] = option((), PROMPT)
    prompts: tuple[str, ...] = option((), PROMPTS, read=read_lines)
    limit: int | None = option(None, LIMIT, least=1)
    head: str | None = option(None, HEAD)
    preprocess: PreprocessSettings = field(default_factory=PreprocessSettings)
    allow_pickle: bool = option(False, "Allow checkpoints to run code. Only if you trust them.")
    device: str | None = option(None, DEVICE)
    threads: int | None = option(None, THREADS, least=1)
    seed: int = option(0, "Seed of all random numbers.", least=0)

    @property
    def audit(self) -> AuditSettings:
        """Settings of an audit of the same network and images."""
        names = [each.name for each in fields(AuditSettings) if hasattr(self, each.name)]
        return AuditSettings(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class AuditSettings(NetworkSettings):
    """Settings of an audit."""

    checkpoint: tuple[str, ...] = option(
        (), "Weights: safetensors or torch; several, or a quoted pattern, for a whole training.", short="c"
    )
    minutes: float = option(5.0, "Approximate duration of the audit.")
    methods: tuple[str, ...] = option(
        (), "Comma-separated, instead of the automatic choice.", short="m", **CALLS
    )
    layer: str | None = option(None, LAYER, short="l")
    expect_accuracy: float | None = option(None, EXPECT_ACCURACY, least=0, most=1)
    out: Path = option(Path("audit"), "Folder.", short="o")

    @property
    def from_python(self) -> bool:
        """Whether the network was passed in Python."""
        return self.model.startswith(PYTHON)

    def recorded(self) -> dict[str, Any]:
        """All settings that must be equal when an audit is resumed, in plain values."""
        values = {key: value for key, value in asdict(self).items() if key not in CHANGEABLE}
        values["preprocess"] = self.preprocess.table
        return {k: list(v) if isinstance(v, tuple) else str(v) if isinstance(v, Path) else v
                for k, v in values.items()}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScoreSettings(NetworkSettings):
    """Settings of a scoring of stored maps."""

    model: str = option(help=MODEL.format("FUNCTION"), short="M")
    maps: str = option(help='A folder of maps, a pattern such as "maps/{id}.npy", or one file for all.')
    targets: str | None = option(
        None,
        "The class that the maps explain; the label by default, where there is one.",
        choices=("label", "predicted"),
    )
    metrics: tuple[str, ...] = option((), "Comma-separated, instead of all that can be computed.", **CALLS)
    out: Path = option(Path("scores"), "Folder.", short="o")

    def __post_init__(self) -> None:
        super().__post_init__()
        read_metrics(self.metrics)  # before torch is imported

    @property
    def method(self) -> str:
        """The maps as a method of the study in `out`."""
        return f"files:{seen_from(self.out.resolve(), self.maps)}"


@dataclass(frozen=True, kw_only=True)
class EvidenceSettings(NetworkSettings):
    """Settings of a study of what a network uses."""

    methods: tuple[str, ...] = option(
        (), "The method whose maps choose the patches; gradcam by default.", short="m", **CALLS
    )
    layer: str | None = option(None, LAYER, short="l")
    out: Path = option(Path("evidence"), "Folder.", short="o")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.methods) > 1:
            raise InputError(f"methods must be one method, got {', '.join(self.methods)}; name one of them")


def study_tables(
    settings: AuditSettings, source: Guess, folder: Path, preprocess: Mapping[str, Any]
) -> dict[str, Any]:
    """Tables of a study in `folder`, without methods and metrics."""
    named = settings.class_names if source.kind in ("folder", "csv", "npz", "dicom") else ()
    options = {**source.options, **({"class_names": list(named)} if named else {})}
    path, _, function = settings.model.rpartition(":")
    if settings.from_python:
        spec = settings.model
    elif path.endswith(".py"):
        spec = f"{seen_from(folder, path)}:{function}"
    else:
        spec = placed_spec(settings.model, Path.cwd())
    tables: dict[str, dict[str, Any]] = {
        "run": {"seed": settings.seed, "batch_size": BATCH, "device": settings.device,
                "threads": settings.threads, "out": "run"},
        "model": {"spec": spec, "name": settings.model.removeprefix(PYTHON),
                  "checkpoints": [seen_from(folder, file) for file in settings.checkpoint],
                  "pretrained": settings.pretrained or None, "num_classes": settings.num_classes,
                  "layer": settings.layer, "head": settings.head,
                  "prompts": [*settings.prompt, *settings.prompts] or None,
                  "allow_pickle": settings.allow_pickle or None},
        "images": {"kind": source.kind, "path": seen_from(folder, source.path), "seed": settings.seed,
                   "options": options or None},
        "preprocess": {**preprocess, **settings.preprocess.table},
    }  # fmt: skip
    return {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
        if table
    }


def seen_from(folder: Path, path: str | Path) -> str:
    """A path below the working folder relative to `folder`; other paths absolute."""
    whole = Path(os.path.abspath(Path(path).expanduser()))
    return Path(os.path.relpath(whole, folder)).as_posix() if whole.is_relative_to(Path.cwd()) else str(whole)
