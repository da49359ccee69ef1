"""Which model is meant, and how its classes are named: what every command that takes a model shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from heatproof.errors import InputError, ModelError, TargetError, did_you_mean
from heatproof.models.keras_graph import FILES
from heatproof.models.load import LITE, best_device, load_model
from heatproof.models.model import Model

Command = Callable[..., Any]


def model_options(command: Command) -> Command:
    """MODEL and the options every command that loads one has."""
    for decorate in reversed(
        (
            click.argument("model"),
            click.option(
                "--checkpoint", type=click.Path(path_type=Path), help="Weights: safetensors or torch."
            ),
            click.option("--random-weights", is_flag=True, help="Do not ask for pretrained weights."),
            click.option(
                "--classes", type=click.Path(path_type=Path), help="Class names: a text file, one per line."
            ),
            click.option(
                "--allow-pickle", is_flag=True, help="Let the checkpoint run code. Only if you trust it."
            ),
            click.option("--device", help="cpu, cuda, cuda:1, ...; a GPU where there is one."),
        )
    ):
        command = decorate(command)
    return command


def open_model(
    spec: str,
    checkpoint: Path | None,
    random_weights: bool,
    classes: Path | None,
    allow_pickle: bool,
    device: str | None,
    layer: str | None = None,
) -> Model:
    """The model the options name. Without a checkpoint, pretrained weights are wanted."""
    if random_weights and checkpoint is not None:
        raise InputError("--random-weights and --checkpoint exclude each other; leave one out")
    if random_weights and (spec.lower() in LITE or spec.startswith("hf:") or spec.endswith(FILES)):
        raise InputError(f"{spec} brings its own weights; leave out --random-weights")
    pretrained = checkpoint is None and not random_weights
    try:
        return load_model(
            spec,
            checkpoint,
            pretrained=pretrained,
            device=best_device(device),
            layer=layer,
            classes=None if classes is None else read_names(classes),
            allow_pickle=allow_pickle,
        )
    except ModelError as error:
        if not pretrained or spec.partition(":")[0] not in ("torchvision", "timm", "keras"):
            raise
        reason = str(error).partition("; get the weights elsewhere")[0]
        raise ModelError(
            f"{reason}; name weights you have with --checkpoint FILE, or use --random-weights to see the "
            "methods run on an untrained network"
        ) from error


def read_names(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read class names from {path}: {error}") from error


def class_name(model: Model, number: int) -> str:
    """The name of a class, or its number where the model has no names."""
    names = model.classes
    return names[number] if names and number < len(names) else f"class {number}"


def read_target(text: str | None, model: Model) -> int | None:
    """A class by number or name; a name may be one of the synonyms ImageNet lists for a class."""
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    if model.classes is None:
        raise TargetError(
            f"{model.name} has no class names, so {text!r} says nothing; give the class's number"
        )
    wanted = text.strip().casefold()
    whole = [i for i, name in enumerate(model.classes) if name.casefold() == wanted]
    among = [
        i for i, name in enumerate(model.classes) if wanted in map(str.strip, name.casefold().split(","))
    ]
    found = whole or among
    if len(found) == 1:
        return found[0]
    if found:
        numbers = ", ".join(f"{i} ({model.classes[i]})" for i in found)
        raise TargetError(f"{text!r} names several classes: {numbers}; give the number of one")
    synonyms = [word.strip() for name in model.classes for word in name.split(",")]
    raise TargetError(f"{model.name} has no class {text!r}; {did_you_mean(text, synonyms)}")
