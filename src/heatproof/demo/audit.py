"""The demo's stages one after the other; each is skipped where an earlier call has finished it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from heatproof.demo import settings
from heatproof.demo.settings import HARMFUL, HEALTHY, LIGHT, Sizes
from heatproof.demo.story import story
from heatproof.demo.trainings import gather_weights, train_twins, write_pictures
from heatproof.demo.twin import Twin, cheating_twin
from heatproof.report.page import write_page
from heatproof.run.process import fixed_threads
from heatproof.run.progress import Progress
from heatproof.studies import cose
from heatproof.studies.common import named_run
from heatproof.studies.cose.results import CoseResults
from heatproof.train import Epoch, History, TrainProgress
from heatproof.verdict.answers import Verdict
from heatproof.verdict.data import RunData, read_run
from heatproof.verdict.judge import judge


class Counter(Protocol):
    """What epochs are reported to."""

    def now(self, detail: str) -> None: ...

    def done(self, what: str | None, steps: int = 1) -> None: ...


Steps = Callable[[str, int], AbstractContextManager[Counter]]


@dataclass(frozen=True)
class Audit:
    """What the demo found, and where it is."""

    report: Path
    audit: RunData  # the healthy network at its last checkpoint, in depth
    verdict: Verdict
    twin: Twin  # the cheating one
    twins: Mapping[str, RunData]  # healthy and harmful, checkpoint by checkpoint
    verdicts: Mapping[str, Verdict]
    cose: CoseResults
    histories: Mapping[str, History]
    computed: int  # pictures explained and epochs trained by this call, and inputs to explain the twin


def run(
    out: Path,
    sizes: Sizes = settings.FULL,
    seed: int = 0,
    steps: Steps | None = None,
    console: Any = None,
    say: Callable[[str], object] = lambda text: None,
) -> Audit:
    """All stages into the folder `out`, and the report.

    steps: shows the epochs of a training. console: shows how far a run is. say: told what begins.
    """
    settings.settle(out, sizes, seed)
    say(f"{2 * sizes.train} training and {2 * sizes.test} test pictures: QR codes and hard negatives")
    write_pictures(out, sizes, seed)
    # For a network this small, threads wait for each other longer than they work.
    with fixed_threads(1):
        histories, epochs = _train(out, sizes, seed, steps)
        runs = Runs(out, seed, console, say)
        weights = {name: gather_weights(out, name, sizes) for name in (HEALTHY, HARMFUL)}
        audit = runs.study(
            "audit", weights[HEALTHY][-1:], settings.audit_methods(sizes), settings.audit_metrics(sizes),
            "the healthy network, in depth: every method, every family of metrics",
        )  # fmt: skip
        say(f"the cheating twin: a copy of it that learns to look at a tag, on {2 * sizes.twin} new pictures")
        twin, taught = _teach(out, sizes, seed, weights[HEALTHY][-1], steps)
        twins = {
            name: runs.study(
                name, paths, settings.FOLLOWED_METHODS, settings.FOLLOWED,
                f"the {name} training: {len(paths)} checkpoints",
            )
            for name, paths in weights.items()
        }  # fmt: skip
        found = runs.cose(weights[HEALTHY], sizes)
    verdicts = {name: write_page(of, out / name / "report.html", most=24) for name, of in twins.items()}
    report = out / "report.html"
    verdict = write_page(audit, report, more=story(sizes, audit, judge(audit), twin, twins, found))
    computed = epochs + runs.computed + taught
    return Audit(report, audit, verdict, twin, twins, verdicts, found, histories, computed)


def _train(out: Path, sizes: Sizes, seed: int, steps: Steps | None) -> tuple[dict[str, History], int]:
    """Both trainings, and how many epochs of them this call took."""
    finished = 0
    total = sizes.first_epochs + 2 * sizes.second_epochs
    with steps("training", total) if steps else nullcontext() as counter:

        def told(name: str, epoch: Epoch) -> None:
            nonlocal finished
            finished += 1
            if counter is not None:
                scores = f"loss {epoch.loss:.3f}, AUC {epoch.auc:.3f}, accuracy {epoch.accuracy:.1%}"
                counter.done(f"{name}, epoch {epoch.epoch}: {scores}")

        histories = train_twins(out, sizes, seed, told)
    return histories, finished


def _teach(out: Path, sizes: Sizes, seed: int, weights: str, steps: Steps | None) -> tuple[Twin, int]:
    """The cheating twin, and how many epochs and inputs of it this call took."""
    taken = 0
    with steps("the cheating twin", 1) if steps else nullcontext() as counter:

        def told(which: str, at: TrainProgress | int) -> None:
            nonlocal taken
            if isinstance(at, int):
                taken, detail = taken + at, f"maps, {taken + at} inputs"
            elif at.result is None:
                return
            else:
                network = {"A": "with the tag", "B": "without it"}[which]
                taken, detail = taken + 1, f"{network}, epoch {at.epoch}: loss {at.result.loss:.3f}"
            if counter is not None:
                counter.now(detail)

        twin = cheating_twin(out, sizes, seed, weights, told)
        if taken and counter is not None:
            counter.done(twin.point.planting.sentence)
    return twin, taken


class OnlyBar(Progress):
    """How far a run is, without the engine's remarks, which a newcomer would have to ignore."""

    def say(self, text: str) -> None:
        pass


@dataclass
class Runs:
    """The studies over the test pictures, and how many pictures they took this time."""

    out: Path
    seed: int
    console: Any
    say: Callable[[str], object]
    computed: int = 0

    def study(
        self, name: str, weights: list[str], methods: tuple[str, ...], metrics: tuple[str, ...], about: str
    ) -> RunData:
        self.say(about)
        config = settings.study(name, weights, methods, metrics, self.seed)
        result = named_run(self.out, name, config, OnlyBar(self.console))
        self.computed += result.computed
        return read_run(result.folder)

    def cose(self, weights: list[str], sizes: Sizes) -> CoseResults:
        """Maps under transforms and over checkpoints, of a part of the pictures."""
        self.say(f"COSE: {sizes.cose_images} pictures under 13 transforms, and over the checkpoints")
        asked = cose.CoseSettings(
            model=f"{self.out / 'network.py'}:build",
            images=self.out / "pictures" / "manifest.csv",
            kind="csv",
            checkpoints=tuple(self.out / path for path in weights),
            methods=(*LIGHT, "edges"),
            draws=sizes.cose_draws,
            limit=sizes.cose_images,
            name="small CNN (healthy)",
            dataset="QR codes",
            figures=False,
            device="cpu",
            seed=self.seed,
            out=self.out / "cose",
        )
        progress = OnlyBar(self.console)
        found = cose.cose_study(asked, progress).results
        self.computed += progress.images
        return found
