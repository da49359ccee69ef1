"""Run the notebooks of docs/notebooks and keep what they show: python docs/run_notebooks.py."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 600  # for one cell, on a machine that does much else
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path) -> Any:
    """The notebook after a run from its first cell to its last, in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            startup_timeout=SECONDS,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
        )
        client.execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = nbformat.from_dict({}), f"cell-{number}"
        if "outputs" in cell:
            cell.outputs = _joined(cell.outputs)
        for output in cell.get("outputs", []):
            _clean(output, folder)
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Lines that were printed one after the other as one output: how they are cut is chance."""
    merged: list[Any] = []
    for output in outputs:
        if merged and output.output_type == "stream" and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def _clean(output: Any, folder: str) -> None:
    """Without the name of the folder that it ran in, and without a second, plainer form of what is a page."""
    if "text" in output:
        output.text = output.text.replace(folder, "")
    if "data" in output:
        output.data = {kind: value.replace(folder, "") for kind, value in output.data.items()}
        if "text/html" in output.data:
            output.data["text/plain"] = "<shown as a page>"


if __name__ == "__main__":
    for path in NOTEBOOKS:
        nbformat.write(executed(path), path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
