"""The checkpoints of a study, each loaded into its network.

A checkpoint is named after its file; its epoch is the last number in that name, and orders the checkpoints.
The checkpoint "random" is the network with the random weights of its builder. Whether a builder draws its
weights or brings trained ones (a file, a package, a factory's own download) is determined by building twice
from different seeds: equal weights were not drawn. Then all weights are drawn again, and none may stay equal.

A study file is code: loading its network may run code that is neither heatproof nor an installed package.

model.spec = "net.py:make"               the file, and its imports
model.allow_pickle = true                what is pickled in checkpoints, a library's weights or a .keras file
model.options.trust_remote_code = true   the Python files beside the weights of a Hugging Face model
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from heatproof.errors import InputError, ModelError
from heatproof.models.names import KERAS_FILES, placed_spec
from heatproof.registry import parse_call
from heatproof.rows import PRETRAINED as PRETRAINED
from heatproof.rows import RANDOM as RANDOM
from heatproof.rows import epoch_of as epoch_of
from heatproof.run.config import ModelTable, RunTable, Study, at, checkpoint_files, listed

if TYPE_CHECKING:
    from heatproof.models import Model

Weights: TypeAlias = "list[tuple[str, Tensor]]"
OWN = "own"
LIBRARIES_WITHOUT_WEIGHTS = ("torchvision", "timm", "keras")


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights: a file, or the builder's own."""

    name: str
    file: Path | None = None


def find_checkpoints(study: Study, folder: Path) -> list[Checkpoint]:
    """The untrained network first, then files in the order given, those of a pattern by epoch."""
    table = study.model
    with at("model.checkpoints"):
        matches = [
            sorted(checkpoint_files(text, folder), key=_by_epoch) for text in listed(table.checkpoints)
        ]
    files = list(dict.fromkeys(file for some in matches for file in some))
    checkpoints = [Checkpoint(RANDOM)] * table.random_init + [Checkpoint(PRETRAINED)] * table.pretrained
    stems = [file.stem for file in files]
    for file in files:
        alone = stems.count(file.stem) == 1 and file.stem not in (RANDOM, PRETRAINED, OWN)
        checkpoints.append(Checkpoint(file.stem if alone else _relative(file, folder), file))
    if not checkpoints:
        if table.spec.partition(":")[0] in LIBRARIES_WITHOUT_WEIGHTS:
            from heatproof.models.load import check_name

            check_name(table.spec)
            raise InputError(
                "the model has no weights: set model.checkpoints, model.pretrained = true or "
                "model.random_init = true"
            )
        checkpoints.append(Checkpoint(OWN))
    return checkpoints


def foreign_code(table: ModelTable, methods: Sequence[str] = ()) -> str:
    """Clause that names the code of this model and these methods that is run; '' if there is none.

    >>> foreign_code(ModelTable("net.py:make", checkpoints="best.pt", allow_pickle=True))
    'runs net.py and unpickles best.pt'
    """
    path = table.spec.rpartition(":")[0]
    files = [parse_call(text)[0].rpartition(":")[0] for text in methods]
    inside = table.allow_pickle and table.spec.endswith(KERAS_FILES)
    pickled = listed(table.checkpoints) if table.allow_pickle else []
    own = (
        table.allow_pickle and not path.endswith(".py") and (table.pretrained or table.spec.startswith("hf:"))
    )
    remote = table.options.get("trust_remote_code")
    phrases = [
        *(f"runs {file}" for file in dict.fromkeys([path, *files]) if file.endswith(".py")),
        f"runs the code inside {table.spec}" if inside else "",
        f"unpickles {', '.join(map(str, pickled))}" if pickled else "",
        f"unpickles the weights of {table.spec}" if own else "",
        f"runs the code of {table.spec}" if remote else "",
    ]
    return " and ".join(filter(None, phrases))


def build(table: ModelTable, folder: Path, checkpoint: Checkpoint, seed: int) -> Model:
    """The network with one checkpoint's weights; random parts are the same each time."""
    if checkpoint == Checkpoint(RANDOM):
        return _untrained(table, folder, seed)
    return _build(table, folder, checkpoint, seed)


def _build(table: ModelTable, folder: Path, checkpoint: Checkpoint, seed: int) -> Model:
    from heatproof.models import load_model

    for name in table.options:
        if name in inspect.signature(load_model).parameters:
            tables = {"model": ModelTable, "run": RunTable}
            places = [f"{key}.{name}" for key, kind in tables.items() if name in kind.__struct_fields__]
            remedy = f"write {places[0]} instead" if places else "leave it out"
            raise InputError(f"model.options.{name} is not an option of the network's builder; {remedy}")
    with seeded_builder(seed):
        return load_model(
            placed_spec(table.spec, folder),
            checkpoint.file,
            num_classes=table.num_classes,
            pretrained=checkpoint == Checkpoint(PRETRAINED),
            allow_pickle=table.allow_pickle,
            prefix=table.prefix,
            **table.options,
        )


def _untrained(table: ModelTable, folder: Path, seed: int) -> Model:
    model, other = (_build(table, folder, Checkpoint(RANDOM), seed + more) for more in (0, 1))
    brought = _weights(model)
    if not _equal(brought, _weights(other)):
        return model
    brought = [(name, weight.clone()) for name, weight in brought]
    for drawn in (seed, seed + 1):  # a factory may use the same seed itself
        model = _drawn_anew(model, drawn)
        if not (equal := _equal(brought, _weights(model))):
            return model
    raise ModelError(f"{equal[0]} of {table.spec} cannot be drawn at random; leave out random_init")


def _drawn_anew(model: Model, seed: int) -> Model:
    from heatproof.models.derived import reinitialise
    from heatproof.models.keras_graph import KerasClassifier

    if isinstance(model.module, KerasClassifier):
        with seeded_builder(seed):
            return replace(model, module=model.module.untrained())
    owners = [n for n, part in model.module.named_modules() if any(True for _ in part.parameters(False))]
    reinitialise(model.module, owners, seed)
    return model


def _weights(model: Model) -> Weights:
    """Parameters and running statistics, in order, since Keras renames each copy."""
    statistics = ("running_mean", "running_var")
    buffers = [(name, tensor) for name, tensor in model.module.named_buffers() if name.endswith(statistics)]
    return buffers + [(name, weight.detach()) for name, weight in model.module.named_parameters()]


def _equal(some: Weights, others: Weights) -> list[str]:
    """Names of weights that are equal in both, except for constant ones such as new biases."""
    pairs = zip(some, others, strict=False)
    return [n for (n, a), (_, b) in pairs if torch.equal(a, b) and not (a == a.flatten()[:1]).all()]


@contextmanager
def seeded_builder(seed: int) -> Iterator[None]:
    """Seed the generators that a builder uses (Keras: Python's), and restore them."""
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        torch.random.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before)


def weights_hash(checkpoint: Checkpoint, model: Model) -> str:
    digest = hashlib.sha256()
    if checkpoint.file is not None:
        with checkpoint.file.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    for name, tensor in sorted(model.module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _by_epoch(path: Path) -> tuple[float, str]:
    epoch = epoch_of(path.stem)
    return (float("inf") if epoch is None else epoch, path.as_posix())


def _relative(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix() if file.is_relative_to(folder) else file.as_posix()
