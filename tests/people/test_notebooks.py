"""The notebooks of the documentation, run anew in a real kernel: every cell works and shows what is kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import heatproof as hp

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
RUN = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
import nbformat
from run_notebooks import executed
nbformat.write(executed(Path(sys.argv[2])), sys.argv[3])
"""


def cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def outputs_of(cell: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """What kinds of things a cell shows; printed lines count as one."""
    return [(output["output_type"], sorted(output.get("data", ()))) for output in cell["outputs"]]


# Fewer images and epochs: the kinds of outputs are compared, not their numbers.
SHORTER = {
    "first-audit": {
        "make_qr(180, 180,": "make_qr(60, 60,",
        "order[:300], order[300:]": "order[:80], order[80:]",
        "for epoch in range(8):": "for epoch in range(3):",
        "minutes=3)": "minutes=0.1)",
    },
    "monitor-a-training": {
        "make_qr(180, 180,": "make_qr(60, 60,",
        "order[:300], order[300:]": "order[:80], order[80:]",
        "for epoch in range(1, 9):": "for epoch in range(6, 9):",
        "for epoch in range(9, 13):": "for epoch in range(9, 11):",
    },
}


def shortened(path: Path, target: Path) -> Path:
    text = path.read_text()
    for old, new in SHORTER[path.stem].items():
        old, new = (json.dumps(part)[1:-1] for part in (old, new))
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    target.write_text(text)
    return target


@pytest.mark.trains
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_showed(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.ipynb"
    short = shortened(path, tmp_path / path.name)
    command = [sys.executable, "-c", RUN, str(ROOT / "docs"), str(short), str(again)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = cells(path), cells(again)
    assert [cell["execution_count"] for cell in before] == [*range(1, len(before) + 1)]
    for old, new in zip(before, after, strict=True):
        assert outputs_of(old) == outputs_of(new), "".join(new["source"])


def pages(name: str) -> str:
    """All HTML that a notebook shows."""
    outputs = [output for cell in cells(ROOT / "docs" / "notebooks" / name) for output in cell["outputs"]]
    return "".join(
        "".join(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {})
    )


def test_maps_verdicts_runs_and_scores_show_themselves() -> None:
    first, second = pages("first-audit.ipynb"), pages("monitor-a-training.ipynb")
    assert "maps of <bdi>gradcam</bdi>" in first and "maps of <bdi>layercam</bdi>" in first
    assert first.count("data:image/png;base64,") > 15
    assert re.search(r"<h3><bdi>.*</h3>.*gradcam.*<td><bdi>(follows|does not follow|undecided)<", first)
    assert "specificity_weights" in first and "mean (n) at" in first  # the run
    assert "<bdi>class 1</bdi>" in first and "95 % from" in first  # C-Scores
    assert "C-Score of" in second and "data:image/png" in second  # a step of the monitor
    printed = json.dumps(cells(ROOT / "docs" / "notebooks" / "monitor-a-training.ipynb"), ensure_ascii=False)
    assert "collapse" in printed or "masking" in printed  # the alarm


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_is_small_and_says_nothing_of_the_machine(path: Path) -> None:
    text = path.read_text()
    assert path.stat().st_size < 400 * 1024
    assert not re.search(r"/tmp|/work|/root|/home|\.venv|Warning|Traceback", text)
    assert set(json.loads(text)["metadata"]) == {"kernelspec", "language_info"}
    for link in re.findall(r"\]\(([^)#]+)\)", "".join(map(str, json.loads(text)["cells"]))):
        assert (path.parent / link).exists(), link


def test_a_step_of_the_monitor_shows_itself() -> None:
    import torch

    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(4, 2),
    )  # fmt: skip
    names = ["<b>a</b>", "b"]
    monitor = hp.monitor.Monitor(
        torch.rand(8, 3, 12, 12), torch.arange(8) % 2, "gradcam", class_names=names, tau=0.0
    )
    page = monitor.step(net, 1)._repr_html_()
    assert "epoch 1: AUC" in page and "gradcam, all" in page and "&lt;b&gt;a&lt;/b&gt;" in page
    assert page.count("data:image/png") == 1
    broken = hp.monitor.Monitor(torch.rand(8, 3, 12, 12), torch.arange(8) % 2, layer="nothing").step(net, 1)
    assert "not measured" in broken._repr_html_() and "<table" not in broken._repr_html_()
