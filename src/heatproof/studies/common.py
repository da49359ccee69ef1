"""What the protocols share: settings, runs in the study's own folder, lists of pictures, means, floors."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from heatproof.disk import write_whole
from heatproof.explain.floors import is_floor
from heatproof.metrics.agreement import rank_correlation
from heatproof.metrics.stats import mean_interval, percentile_interval, resample
from heatproof.models import Model
from heatproof.models.names import placed_spec
from heatproof.report.tables import Value
from heatproof.run.config import toml
from heatproof.run.engine import Result, run_study
from heatproof.run.progress import Progress


def local_spec(spec: str) -> str:
    """With the full path of a network's own file: the study lies in another folder."""
    return placed_spec(spec, Path.cwd())


def need_one_class(model: Model, who: str) -> None:
    """Refuse a network that does not name one class for each picture; a blank one shows it."""
    model.logits(model.preprocess.blank)
    model.head.need_one_class(who)


def some(settings: Any, *names: str) -> dict[str, Any]:
    """These of the settings, by name."""
    return {name: getattr(settings, name) for name in names}


def run_config(
    settings: Any,
    methods: Iterable[str],
    metrics: Iterable[str],
    model: Mapping[str, Any],
    images: Mapping[str, Any],
    targets: str = "label",
    **more: Mapping[str, Any],
) -> dict[str, Any]:
    """A study's run in the form of run/config.py; what is None is left to its default.

    settings: of a study whose runs have seed, batch_size, device and threads.
    """
    run = some(settings, "seed", "batch_size") | {"targets": targets} | some(settings, "device", "threads")
    tables = {"run": run, "model": model, "images": images, **more}
    return {"methods": list(methods), "metrics": list(metrics)} | {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
    }


def study_file(folder: Path, name: str = "run") -> Path:
    """What the run FOLDER/NAME was made from."""
    return folder / ("study.toml" if name == "run" else f"{name}.toml")


def named_run(folder: Path, name: str, config: Mapping[str, Any], progress: Progress | None) -> Result:
    """The run FOLDER/NAME, done or gone on with, its study file beside it."""
    return whole_run(write_study(study_file(folder, name), config), folder / name, progress)


def write_study(path: Path, config: Mapping[str, Any]) -> Path:
    """A run as a TOML file, which `heatproof run` takes as well."""
    write_whole({path: toml(config)})
    return path


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """A table as a CSV file."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    write_whole({path: out.getvalue()})
    return path


def whole_run(study: Path, out: Path, progress: Progress | None) -> Result:
    """Do a run, or go on with it. Ctrl-C, which ends a run in good order, ends the study too."""
    result = run_study(study, out, progress=progress)
    if result.done < result.units:
        raise KeyboardInterrupt
    return result


def mean_value(values: Iterable[float], seed: int = 0) -> Value:
    """The mean of what is defined, its 95 % interval, and how many that are."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Value(math.nan, None, 0)
    return Value(float(np.mean(known)), mean_interval(known, seed=seed), len(known))


def rho_value(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Value:
    """Spearman's rho with a bootstrap interval over the pairs that are defined."""
    pairs = np.array([p for p in zip(first, second, strict=True) if not any(map(math.isnan, p))])
    if len(pairs) < 3:
        return Value(math.nan, None, len(pairs))
    rho = rank_correlation(pairs[:, 0], pairs[:, 1]).rho
    drawn = resample(len(pairs), seed=seed)
    ranks = [rankdata(pairs[drawn, k], axis=1) for k in (0, 1)]
    centred = [r - r.mean(1, keepdims=True) for r in ranks]
    lengths = np.sqrt((centred[0] ** 2).sum(1) * (centred[1] ** 2).sum(1))
    rhos = (centred[0] * centred[1]).sum(1)[lengths > 0] / lengths[lengths > 0]
    return Value(rho, percentile_interval(rhos) if len(rhos) else None, len(pairs))


def floor_rows(methods: Iterable[str]) -> frozenset[int]:
    """Which rows of a table of methods are floors, which do not compete."""
    return frozenset(i for i, method in enumerate(methods) if is_floor(method))
