"""What the protocols share: lists of pictures and runs of the engine in the study's own folder."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heatproof.disk import write_whole
from heatproof.models.load import placed_spec
from heatproof.run.config import toml
from heatproof.run.engine import Result, run_study
from heatproof.run.progress import Progress


def local_spec(spec: str) -> str:
    """With the full path of a network's own file: the study lies in another folder."""
    return placed_spec(spec, Path.cwd())


def write_study(path: Path, config: Mapping[str, Any]) -> Path:
    """A run as a TOML file, which `heatproof run` takes as well."""
    write_whole({path: lambda temporary: temporary.write_text(toml(config), encoding="utf-8")})
    return path


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """A list of pictures as a CSV manifest."""

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *rows])

    write_whole({path: write})
    return path


def whole_run(study: Path, out: Path, progress: Progress | None) -> Result:
    """Do a run, or go on with it. Ctrl-C, which ends a run in good order, ends the study too."""
    result = run_study(study, out, progress=progress)
    if result.done < result.units:
        raise KeyboardInterrupt
    return result
