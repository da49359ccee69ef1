"""CAMBench-QR end to end: do maps land on the parts that make a code one, and stay off the rest?

    data      codes with exact masks and hard negatives, from the seed            OUT/data
    train     ZS, FT-Struct, FT-LeakMin; deeper ones; lambda x alpha              OUT/training, OUT/weights
    run       every method on every test code, for each regime: the engine        OUT/run, OUT/subset, ...
    measure   distorted codes, occluded parts, milliseconds per picture           OUT/measured
    report    Tables 2 to 6, Figures 4 and 5, answers to the paper's questions    OUT/summary.md

Several seeds repeat everything behind the data: the first lies in OUT itself, the others in OUT/seeds/1, ...
Everything can be left at any moment and taken up by the same call. chakraborty2025cambench.

Deviations: where there are no ImageNet weights, the backbone learns a proxy task first (_qr_train.py), and
the page says so; masks are distorted with the picture; every number carries a 95 % interval; floors (random,
edges) stand beside the methods; times include the model's passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from heatproof.report.book import Book
from heatproof.run.process import fixed_threads, usual_threads
from heatproof.run.progress import Progress
from heatproof.studies import _qr_page as page
from heatproof.studies._qr_measure import CURVES, STRUCTURE, Bench, RunPlan, run_plan
from heatproof.studies._qr_results import Columns, Results, read_columns
from heatproof.studies._qr_tables import shown_methods
from heatproof.studies._qr_train import (
    Pictures,
    Told,
    Trained,
    cell_name,
    check_network,
    depth_name,
    make_pictures,
    total_epochs,
    train_all,
)
from heatproof.studies.qr_settings import FULL, HEAVY, LIGHT, QrSettings, check, remember
from heatproof.train import DEPTHS, REGIMES, ablation_grid

__all__ = ["FULL", "HEAVY", "LIGHT", "QrOutcome", "QrSettings", "qr_study", "total_epochs"]


@dataclass(frozen=True)
class QrOutcome:
    """What a study left behind."""

    page: Path
    book: Book
    results: tuple[Results, ...]


def qr_study(
    settings: QrSettings, progress: Progress | None = None, training: Told | None = None
) -> QrOutcome:
    """Run the whole protocol, or go on with it; OUT/summary.md is its page."""
    settings = check(settings)
    check_network(settings)
    remember(settings)
    with fixed_threads(settings.threads or usual_threads()):
        pictures = make_pictures(settings)
        numbers = range(settings.seeds)
        results = [one_seed(settings, number, pictures, progress, training) for number in numbers]
        book = Book(settings.out, f"Do maps of {settings.model} find the parts of a {settings.symbol} code?")
        page.write(book, results)
    return QrOutcome(book.write(), book, tuple(results))


def folder_of(settings: QrSettings, number: int) -> Path:
    """Where the weights and runs of a seed lie, counted from 0."""
    return settings.out if number == 0 else settings.out / "seeds" / str(number)


def one_seed(
    settings: QrSettings, number: int, pictures: Pictures, progress: Progress | None, training: Told | None
) -> Results:
    """Trainings and measurements of one seed."""
    folder, seed = folder_of(settings, number), settings.seed + number
    trained = train_all(settings, folder, seed, pictures, training)
    runs: dict[str, Columns] = {}
    for plan in plans(settings, trained):
        # A bar of its own for each run: it counts pictures from its start on.
        fresh = None if progress is None else Progress(progress.console, progress.quiet)
        runs[plan.name] = read_columns(run_plan(settings, folder, seed, plan, fresh))
    say = None if progress is None else progress.say
    measured = Bench(settings, folder, seed, pictures.test, say).measure()
    runs["measured"] = read_columns(measured)
    machine = measured.manifest.machine
    device = machine["cpu"] if machine["device_name"] == "cpu" else machine["device_name"]
    return Results(settings, seed, trained, runs, device)


def plans(settings: QrSettings, trained: Trained) -> list[RunPlan]:
    """The engine's runs of one seed."""
    light = settings.every_method
    found = [
        RunPlan("run", REGIMES, light, STRUCTURE),
        RunPlan("subset", REGIMES, (*light, *settings.heavy), (*STRUCTURE, *CURVES), settings.subset),
    ]
    methods = shown_methods(Results(settings, settings.seed, trained, {}))
    if settings.depth_study:
        found.append(RunPlan("depth", tuple(map(depth_name, DEPTHS[2:])), methods, STRUCTURE))
    if settings.ablation:
        cells = dict.fromkeys(cell_name(settings, lam, alpha) for lam, alpha in ablation_grid())
        found.append(RunPlan("ablation", tuple(c for c in cells if c not in REGIMES), methods, STRUCTURE))
    return found
