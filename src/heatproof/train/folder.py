"""A training's folder: weights of chosen epochs, what is needed to go on, and what happened.

    epoch05.safetensors   weights and buffers behind epoch 5, for load_model(..., checkpoint=...)
    state.pt              weights, optimiser and history behind the last epoch, for weights_only=True
    history.json          one row per epoch
    recipe.json           how it was trained, for whoever reads the weights later

Files are whole or absent, and state.pt comes after the weights of its epoch, so an epoch that counts as done
has left all its files. Random numbers need no place in it: they follow from the seed and the epoch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from heatproof.disk import Content, write_whole
from heatproof.errors import CheckpointError, StoreError
from heatproof.models.checkpoints import first_line
from heatproof.train.recipe import History, Recipe

STATE, HISTORY, RECIPE = "state.pt", "history.json", "recipe.json"


@dataclass(frozen=True)
class Saved:
    """How far a training got."""

    weights: dict[str, Tensor]
    optimiser: dict[str, Any]
    history: History


def weights_file(folder: Path, epoch: int) -> Path:
    return folder / f"epoch{epoch:02d}.safetensors"


def save(
    folder: Path,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    history: History,
    fingerprint: dict[str, str],
    keep: bool,
    recipe: Recipe | None = None,
) -> None:
    """Write what an epoch leaves behind."""
    epoch = len(history)
    # Contiguous copies: safetensors refuses weights that share memory.
    weights = {name: t.detach().cpu().contiguous().clone() for name, t in module.state_dict().items()}
    state = {
        "epoch": epoch,
        "weights": weights,
        "optimiser": optimiser.state_dict(),
        "history": history.to_json(),
        "fingerprint": fingerprint,
    }
    files: dict[Path, Content] = {}
    if keep:
        files[weights_file(folder, epoch)] = lambda path: safetensors.torch.save_file(weights, path)
    files[folder / STATE] = lambda path: torch.save(state, path)
    files[folder / HISTORY] = history.to_json() + "\n"
    if recipe is not None:
        files[folder / RECIPE] = recipe.described() + "\n"
    try:
        write_whole(files)
    except StoreError:
        raise
    except (RuntimeError, safetensors.SafetensorError) as error:  # as torch reports a full disk
        raise StoreError(f"cannot write the training to {folder}: {first_line(error)}") from error


def load(folder: Path, fingerprint: dict[str, str]) -> Saved | None:
    """What an earlier start of the same training left, None where there is nothing."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = Saved(state["weights"], state["optimiser"], History.from_json(state["history"]))
        theirs = state["fingerprint"]
    except Exception as error:  # a file that is anything else fails anywhere inside the reader
        raise CheckpointError(
            f"{path} is not the state of a training ({first_line(error)}); remove it or choose another folder"
        ) from error
    for what, mark in fingerprint.items():
        if theirs.get(what) != mark:
            raise StoreError(
                f"{folder} holds a training with {what} other than this one's; choose another folder, "
                "or remove that one to start anew"
            )
    return saved


def trained_with_transforms(folder: Path) -> bool | None:
    """Whether COSE's transforms were part of the training that wrote this folder; None: nobody knows."""
    try:
        said = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        return bool(said.get("transforms", False))
    except (OSError, ValueError, AttributeError):
        return None


def digest(module: nn.Module) -> str:
    """A short name for the weights and buffers of a network."""
    content = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        content.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()[:16]
