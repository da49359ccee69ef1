"""One side of a comparison: a run at one checkpoint, with all its methods or one of them, judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from heatproof.errors import InputError, did_you_mean
from heatproof.store import RunFolder
from heatproof.verdict.answers import Verdict
from heatproof.verdict.data import RunData, read_run
from heatproof.verdict.judge import judge

SAID_OF_ONE = {
    "yes": "Its maps follow the network", "no": "Its maps do not follow the network",
    "undecided": "Not decided yet whether its maps follow the network",
    "": "A floor, which never looks at the network",
}  # fmt: skip


@dataclass(frozen=True)
class RunSide:
    """One run at one checkpoint, judged."""

    name: str
    data: RunData
    verdict: Verdict
    method: str = ""  # the only one that is compared; all where empty

    @property
    def follows(self) -> str:
        """The answer for its method, or for its maps as a whole; "" for a floor."""
        if not self.method:
            return self.verdict.follow
        return next((m.follows for m in self.verdict.methods if m.method == self.method), "")

    @property
    def headline(self) -> str:
        return SAID_OF_ONE[self.follows] if self.method else self.verdict.headline

    @cached_property
    def marks(self) -> Mapping[str, str]:
        """What each picture was made of, where the run recorded it."""
        return dict(self.data.folder.images())

    @cached_property
    def places(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.data.images.ids)}


def read_side(run: str | Path | RunFolder) -> RunSide:
    """A run, perhaps with a checkpoint and a method behind @."""
    path, names = (run, []) if isinstance(run, RunFolder) or Path(run).exists() else _split(str(run))
    folder = path if isinstance(path, RunFolder) else RunFolder.open(path)
    data = read_run(folder)
    checkpoint, method = None, ""
    for name in names:
        if name in data.checkpoints:
            checkpoint = name
        elif name in data.methods:
            method = name
        else:
            known = [*data.checkpoints, *data.methods]
            raise InputError(f"{path} has no checkpoint or method {name!r}; {did_you_mean(name, known)}")
    if checkpoint is not None and checkpoint != data.checkpoint:
        data = read_run(folder, data.model, checkpoint)
    return RunSide("", data, judge(data), method)


def _split(text: str) -> tuple[str, list[str]]:
    """The longest beginning that is a path, and the words behind it."""
    words = text.split("@")
    for end in range(len(words) - 1, 0, -1):
        if Path(path := "@".join(words[:end])).exists():
            return path, words[end:]
    return words[0], words[1:]


def named_sides(sides: Sequence[RunSide]) -> list[RunSide]:
    """With names that say in what they differ."""
    paths = [s.data.folder.path.resolve() for s in sides]
    folders = [path.parent.name if path.name == "run" else path.name for path in paths]
    parts = {
        "folder": folders if len(set(paths)) > 1 else [""] * len(sides),
        "model": [s.data.model for s in sides],
        "checkpoint": [s.data.checkpoint for s in sides],
        "method": [s.method for s in sides],
    }
    told = [key for key, values in parts.items() if len(set(values)) > 1]
    names = [" ".join(filter(None, (parts[key][i] for key in told))) for i in range(len(sides))]
    clear = all(names) and len(set(names)) == len(names)
    return [
        replace(side, name=name if clear else f"{name or side.data.model} ({i})")
        for i, (name, side) in enumerate(zip(names, sides, strict=True), 1)
    ]
