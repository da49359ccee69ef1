"""The full audit on generated images, in a few minutes on a laptop and without a network connection.

    images    QR codes and hard negatives, with exact masks                       OUT/pictures
    trainings   a small CNN in two phases; the second phase twice, once harmful     OUT/training
    audit       the healthy network: every method, every family of metrics          OUT/audit
    twin        a copy that uses a tag; which methods show that?                    OUT/twin
    twins       both trainings, checkpoint by checkpoint: C-Score, alarms           OUT/healthy, OUT/harmful
    cose        maps under 13 transforms, and over the checkpoints                  OUT/cose
    report      one page about all of it                                            OUT/report.html

OUT/audit.toml, healthy.toml and harmful.toml are studies for `heatproof run`. Finished stages are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heatproof.demo import networks
from heatproof.demo.networks import FULL, HARMFUL, HEALTHY, QUICK, Sizes, Twin
from heatproof.demo.story import story
from heatproof.report.page import write_page
from heatproof.run.progress import Progress
from heatproof.run.worker import fixed_threads
from heatproof.studies.common import named_run
from heatproof.studies.cose.protocol import cose_study
from heatproof.studies.settings import CoseSettings
from heatproof.train import Epoch, TrainProgress
from heatproof.verdict.answers import Verdict
from heatproof.verdict.data import RunData, read_run
from heatproof.verdict.judge import judge

__all__ = ["FULL", "QUICK", "Audit", "Sizes", "run"]
Steps = Callable[[str, int], AbstractContextManager[Any]]  # (stage, number of steps)


class SilentProgress(Progress):
    """A progress bar without the log lines of the engine."""

    def say(self, text: str) -> None:
        pass


@dataclass(frozen=True)
class Audit:
    """The results of the demo."""

    report: Path
    audit: RunData  # the healthy network at its last checkpoint, in depth
    verdict: Verdict
    twin: Twin  # the cheating one
    twins: Mapping[str, RunData]  # healthy and harmful, checkpoint by checkpoint
    computed: int  # images explained and epochs trained by this call, and inputs to explain the twin


def run(
    out: Path,
    sizes: Sizes = FULL,
    seed: int = 0,
    steps: Steps = lambda what, total: nullcontext(),
    console: Any = None,
    say: Callable[[str], object] = lambda text: None,
) -> Audit:
    """Run all stages into the folder `out`, and write the report.

    steps: shows the epochs of a training. console: shows the progress of a run. say: called with every stage.
    """
    networks.settle(out, sizes, seed)
    say(f"{2 * sizes.train} training and {2 * sizes.test} test images: QR codes and hard negatives")
    networks.write_pictures(out, sizes, seed)
    computed = 0

    def run_study(
        name: str, weights: list[str], methods: tuple[str, ...], metrics: tuple[str, ...], about: str
    ) -> RunData:
        nonlocal computed
        say(about)
        config = networks.study(name, weights, methods, metrics, seed)
        result = named_run(out, name, config, SilentProgress(console))
        computed += result.computed
        return read_run(result.folder)

    def on_epoch(name: str, epoch: Epoch) -> None:
        nonlocal computed
        computed += 1
        scores = f"loss {epoch.loss:.3f}, AUC {epoch.auc:.3f}, accuracy {epoch.accuracy:.1%}"
        if counter:
            counter.done(f"{name}, epoch {epoch.epoch}: {scores}")

    taught = 0

    def on_progress(which: str, at: TrainProgress | int) -> None:
        nonlocal taught
        if isinstance(at, int):
            taught += at
            detail = f"maps, {taught} inputs"
        elif at.result is None:
            return
        else:
            taught += 1
            network = {"A": "with the tag", "B": "without it"}[which]
            detail = f"{network}, epoch {at.epoch}: loss {at.result.loss:.3f}"
        if counter:
            counter.now(detail)

    # For a network this small, threads wait for each other longer than they work.
    with fixed_threads(1):
        with steps("training", sizes.first_epochs + 2 * sizes.second_epochs) as counter:
            networks.train_twins(out, sizes, seed, on_epoch)
        weights = {name: networks.gather_weights(out, name, sizes) for name in (HEALTHY, HARMFUL)}
        audit = run_study(
            "audit", weights[HEALTHY][-1:], networks.audit_methods(sizes), networks.audit_metrics(sizes),
            "the healthy network: all methods and metrics",
        )  # fmt: skip
        say(f"the cheating twin: a copy that learns to use a tag, on {2 * sizes.twin} new images")
        with steps("the cheating twin", 1) as counter:
            twin = networks.cheating_twin(out, sizes, seed, weights[HEALTHY][-1], on_progress)
            if taught and counter:
                counter.done(twin.point.planting.sentence)
        twins = {
            name: run_study(
                name, paths, networks.FOLLOWED_METHODS, networks.FOLLOWED,
                f"the {name} training: {len(paths)} checkpoints",
            )
            for name, paths in weights.items()
        }  # fmt: skip
        say(f"COSE: {sizes.cose_images} images under 13 transforms, and over the checkpoints")
        progress = SilentProgress(console)
        settings = CoseSettings(
            model=f"{out / 'network.py'}:build", images=out / "pictures" / "manifest.csv", kind="csv",
            checkpoints=tuple(out / path for path in weights[HEALTHY]), methods=(*networks.LIGHT, "edges"),
            draws=sizes.cose_draws, limit=sizes.cose_images, name="small CNN (healthy)", dataset="QR codes",
            figures=False, device="cpu", seed=seed, out=out / "cose",
        )  # fmt: skip
        results = cose_study(settings, progress).results
    for name, data in twins.items():
        write_page(data, out / name / "report.html", most=24)
    report = out / "report.html"
    verdict = write_page(audit, report, more=story(sizes, audit, judge(audit), twin, twins, results))
    return Audit(report, audit, verdict, twin, twins, computed + taught + progress.images)
