"""A method for the other kind of network is refused before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from heatproof.errors import HeatproofError
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from tiny_study import make_study


def test_refused_before_any_work(tmp_path: Path) -> None:
    study = make_study(tmp_path, images=2, methods=["gradcam", "rollout"], metrics=["accuracy"])
    with pytest.raises(HeatproofError, match=r"^methods: rollout is for transformers") as error:
        run_study(study, tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run" / "scores").exists()


def test_taken_where_it_fits(tmp_path: Path) -> None:
    methods = ["lrp", "guided-backprop", "deeplift", "fullgrad"]
    study = make_study(tmp_path, images=2, methods=methods, metrics=["accuracy"])
    run_study(study, tmp_path / "run")
    maps = RunFolder.open(tmp_path / "run").maps()
    assert all(len(maps.ids("epoch01", method)) == 2 for method in methods)
