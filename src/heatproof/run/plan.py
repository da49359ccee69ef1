"""Which units make up a run, from its manifest alone.

A block is one checkpoint and one range of images, as many as a batch. Its units share the decoded pictures:

    explain   one pass for all new methods: their maps, the classifier's answers, image-level metrics
    score     metrics that were added later, from the stored maps of the methods that were there before

When all blocks of a checkpoint are done, its group units follow (C-Score, AUC, ...), from the store alone.

A run may grow: the manifest keeps the settings it grew from, and each step adds units for what is new, so
no finished unit is computed again. Units depend on neither shards nor engines; blocks are dealt out to
shards by their number modulo n.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from heatproof.errors import InputError
from heatproof.rows import Unit
from heatproof.run.answers import anchor_of
from heatproof.run.metrics import MetricRequest, read_metrics
from heatproof.run.provenance import unit_origin
from heatproof.store import Manifest

ANSWERS = ("probability", "predicted")  # of the classifier, in the first unit of every block
PER_MAP = ("degenerate",)  # in every unit that makes maps
NO_EVIDENCE = "the map is blank: nothing at the layer speaks for the explained class"
DEAD_LAYER = "the map is blank: the layer is dead, its activations are the same at every place"


@dataclass(frozen=True)
class Task:
    """A unit and how it is computed."""

    unit: Unit
    kind: Literal["explain", "score", "group"]
    beside: tuple[str, ...] = ()  # of a group: methods that were there before, for metrics that compare
    among: tuple[str, ...] = ()  # of a group that compares checkpoints: all of them, the last one last
    after: tuple[str, ...] = ()  # of a group: other checkpoints whose answers it reads

    @property
    def with_answers(self) -> bool:
        """Whether it also reports the classifier's answers and the broken pictures."""
        return ANSWERS[0] in self.unit.metrics


@dataclass(frozen=True)
class Block:
    """Tasks that share pictures, in the order they must run."""

    checkpoint: str
    images: tuple[int, int]
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class RunPlan:
    """All blocks and all group tasks of a run, in order."""

    blocks: tuple[Block, ...]
    groups: tuple[Task, ...]

    @property
    def units(self) -> list[Unit]:
        in_blocks = (task for block in self.blocks for task in block.tasks)
        return [task.unit for task in (*in_blocks, *self.groups)]

    def checkpoints(self) -> list[str]:
        return list(dict.fromkeys([block.checkpoint for block in self.blocks]))

    def shard(self, index: int, count: int) -> list[Block]:
        return [block for number, block in enumerate(self.blocks) if number % count == index]

    def hashes(self, checkpoint: str) -> set[str]:
        """The block units of a checkpoint, which its group tasks wait for."""
        return {t.unit.hash for b in self.blocks if b.checkpoint == checkpoint for t in b.tasks}


def make_plan(manifest: Manifest, images: int, pictures: Sequence[tuple[str, str]] = ()) -> RunPlan:
    """The units of a run over so many images, in the order in which the run grew.

    pictures: id and identity of each, which then are part of their units' names.
    """
    stages = [*manifest.earlier, {"config": manifest.config, "models": manifest.models}]
    batch = int(manifest.config["run"]["batch_size"])
    ranges = [(start, min(start + batch, images)) for start in range(0, images, batch)]
    origin = unit_origin(manifest, pictures)
    blocks, groups = [], []
    for checkpoint in manifest.models:
        steps = list(_steps(checkpoint, stages))
        for span in ranges:
            made = manifest.seed, origin([checkpoint], span)
            tasks = tuple(t for step in steps for t in step.block_tasks(checkpoint, span, *made))
            blocks.append(Block(checkpoint, span, tasks))
        for step in steps:
            anchors = step.anchors(list(manifest.models))
            made = manifest.seed, origin(list(dict.fromkeys([checkpoint, *anchors])), (0, images))
            groups += [replace(t, after=anchors) for t in step.group_tasks(checkpoint, images, *made)]
    among = tuple(manifest.models)
    return RunPlan(tuple(blocks), (*groups, *_across(manifest, images, among, origin(among, (0, images)))))


def _across(manifest: Manifest, images: int, among: tuple[str, ...], origin: str) -> Iterator[Task]:
    """One unit per method and metric that compares checkpoints; another last checkpoint makes new units."""
    requests = [r for r in read_metrics(manifest.config["metrics"]) if r.entry.compares_checkpoints]
    for request in requests if len(among) > 1 else ():
        for method in manifest.config["methods"]:
            unit = Unit(among[-1], (0, images), (method,), (request.text,), manifest.seed, origin)
            yield Task(unit, "group", among=among)


def read_shard(text: str) -> tuple[int, int]:
    """Which of how many, from 0.

    >>> read_shard("0/4")
    (0, 4)
    """
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise InputError(f"a shard is i/n with i from 0 to n - 1, such as 0/4; got {text!r}")
    return int(index), int(count)


@dataclass(frozen=True)
class _Step:
    """What one set of settings adds for a checkpoint."""

    first: bool
    new_methods: tuple[str, ...]
    old_methods: tuple[str, ...]
    metrics: tuple[MetricRequest, ...]  # all of them, for new methods
    new_metrics: tuple[MetricRequest, ...]  # for old methods

    def block_tasks(self, checkpoint: str, span: tuple[int, int], seed: int, origin: str) -> Iterator[Task]:
        if self.new_methods:
            names = (*(ANSWERS if self.first else ()), *PER_MAP, *_texts(self.metrics, group=False))
            yield Task(Unit(checkpoint, span, self.new_methods, names, seed, origin), "explain")
        late = _texts(self.new_metrics, group=False)
        if late and self.old_methods:
            yield Task(Unit(checkpoint, span, self.old_methods, late, seed, origin), "score")

    def anchors(self, checkpoints: Sequence[str]) -> tuple[str, ...]:
        """The checkpoints that metrics anchor their lists to."""
        named = dict.fromkeys(r.anchor for r in (*self.metrics, *self.new_metrics) if r.anchor)
        return tuple(anchor_of(name, checkpoints) for name in named)

    def group_tasks(self, checkpoint: str, images: int, seed: int, origin: str) -> Iterator[Task]:
        lots = (
            (self.new_methods, self.old_methods, _texts(self.metrics, group=True, per_method=True)),
            (self.old_methods, (), _texts(self.new_metrics, group=True, per_method=True)),
        )
        for methods, beside, names in lots:
            if methods and names:
                yield Task(Unit(checkpoint, (0, images), methods, names, seed, origin), "group", beside)
        if names := _texts(self.new_metrics, group=True, per_method=False):
            yield Task(Unit(checkpoint, (0, images), (), names, seed, origin), "group")


def _steps(checkpoint: str, stages: Sequence[Mapping[str, Any]]) -> Iterator[_Step]:
    methods: list[str] = []
    known: list[str] = []
    for stage in stages:
        if checkpoint not in stage["models"]:
            continue
        requests = read_metrics(stage["config"]["metrics"])
        new_methods = [m for m in stage["config"]["methods"] if m not in methods]
        new_metrics = [r for r in requests if r.text not in known]
        yield _Step(not methods, tuple(new_methods), tuple(methods), tuple(requests), tuple(new_metrics))
        methods += new_methods
        known += [r.text for r in new_metrics]


def _texts(requests: Sequence[MetricRequest], group: bool, per_method: bool | None = None) -> tuple[str, ...]:
    return tuple(
        r.text
        for r in requests
        if r.group == group
        and not r.entry.compares_checkpoints
        and (per_method is None or r.per_method == per_method)
    )
