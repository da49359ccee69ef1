"""What an audit is told, and the study's tables that follow from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from heatproof.images.kinds import Guess
from heatproof.models.names import placed_spec
from heatproof.registry import check_methods
from heatproof.studies.settings import (
    DEVICE,
    EXPECT_ACCURACY,
    HEAD,
    LAYER,
    THREADS,
    PreprocessSettings,
    Settings,
    calls,
    option,
    words,
)

BATCH = 8  # pictures per unit: what Ctrl-C has to wait for
HELD = "python:"  # before the name of a network that only Python holds
WHERE_NOT_WHAT = (
    "out",
    "device",
    "threads",
    "expect_accuracy",
)  # which may differ when an audit is taken up again


@dataclass(frozen=True, kw_only=True)
class AuditSettings(Settings):
    """What an audit is told."""

    model: str = option(help="lite0, torchvision:NAME, timm:NAME, hf:FOLDER, FILE.py:FACTORY, ...", short="M")
    images: Path = option(help="A folder of pictures, or a CSV file that lists them.")
    checkpoint: tuple[str, ...] = option(
        (), "Weights: safetensors or torch; several, or a quoted pattern, for a whole training.", short="c"
    )
    pretrained: bool = option(False, "The library's own weights, which are downloaded.")
    num_classes: int | None = option(None, "Of the network; the checkpoint's by default.", least=1)
    class_names: tuple[str, ...] = option(
        (), "Comma-separated, in the order of the model's classes; else its own, or the folders'.", read=words
    )
    minutes: float = option(5.0, "About how long the whole audit may take.")
    methods: tuple[str, ...] = option(
        (), "Comma-separated, instead of those it would choose.", short="m", read=calls, shown=""
    )
    limit: int | None = option(None, "At most so many pictures, classes in proportion.", least=1)
    layer: str | None = option(None, LAYER, short="l")
    head: str | None = option(None, HEAD)
    preprocess: PreprocessSettings = field(default_factory=PreprocessSettings)
    expect_accuracy: float | None = option(None, EXPECT_ACCURACY, least=0, most=1)
    allow_pickle: bool = option(False, "Let checkpoints run code. Only if you trust them.")
    device: str | None = option(None, DEVICE)
    threads: int | None = option(None, THREADS, least=1)
    seed: int = option(0, "Everything follows from it.", least=0)
    out: Path = option(Path("audit"), "Folder.", short="o")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_methods(self.methods)  # before torch is imported

    @property
    def held(self) -> bool:
        """Whether the network is one that only Python holds."""
        return self.model.startswith(HELD)

    def asked(self) -> dict[str, Any]:
        """What makes it this audit and no other, in plain values."""
        said = {key: value for key, value in asdict(self).items() if key not in WHERE_NOT_WHAT}
        said["preprocess"] = self.preprocess.table
        return {k: list(v) if isinstance(v, tuple) else str(v) if isinstance(v, Path) else v
                for k, v in said.items()}  # fmt: skip


def study_tables(
    settings: AuditSettings, pictures: Guess, folder: Path, preprocess: Mapping[str, Any]
) -> dict[str, Any]:
    """The tables of a study that lies in `folder`; methods and metrics are still to be chosen."""
    named = settings.class_names if pictures.kind in ("folder", "csv", "npz", "dicom") else ()
    options = {**pictures.options, **({"class_names": list(named)} if named else {})}
    tables: dict[str, dict[str, Any]] = {
        "run": {"seed": settings.seed, "batch_size": BATCH, "device": settings.device,
                "threads": settings.threads, "out": "run"},
        "model": {"spec": _spec(settings, folder), "name": settings.model.removeprefix(HELD),
                  "checkpoints": [seen_from(folder, one) for one in settings.checkpoint],
                  "pretrained": settings.pretrained or None, "num_classes": settings.num_classes,
                  "layer": settings.layer, "head": settings.head,
                  "allow_pickle": settings.allow_pickle or None},
        "images": {"kind": pictures.kind, "path": seen_from(folder, pictures.path), "seed": settings.seed,
                   "options": options or None},
        "preprocess": {**preprocess, **settings.preprocess.table},
    }  # fmt: skip
    return {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
        if table
    }


def _spec(settings: AuditSettings, folder: Path) -> str:
    """The network as a file in `folder` names it."""
    path, _, function = settings.model.rpartition(":")
    if settings.held or not path.endswith(".py"):
        return settings.model if settings.held else placed_spec(settings.model, Path.cwd())
    return f"{seen_from(folder, path)}:{function}"


def seen_from(folder: Path, path: str | Path) -> str:
    """A path of the working folder as a file in `folder` writes it; others as they are."""
    whole = Path(os.path.abspath(Path(path).expanduser()))
    return Path(os.path.relpath(whole, folder)).as_posix() if whole.is_relative_to(Path.cwd()) else str(whole)
