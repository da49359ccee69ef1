"""Pages of C-Score studies: one network over training, several networks, new weights against a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heatproof.images import Failure
from heatproof.report.figures import cscore as figures
from heatproof.report.markdown_report import MarkdownReport
from heatproof.store import RunFolder
from heatproof.studies.cscore import results
from heatproof.studies.cscore.results import Move, Network, flag_of
from heatproof.train.recipe import History
from heatproof.verdict.alarms import Alarm, find_alarms
from heatproof.verdict.epochs import early_warning, gradient_jumps
from heatproof.verdict.trajectory import Trajectory


def write(
    book: MarkdownReport,
    folder: RunFolder,
    history: History | None,
    ends: tuple[str, str],
    swept: Mapping[str, Trajectory],
    held_out: float | None,
    failures: Sequence[Failure] = (),
    places: bool = False,
) -> None:
    """One network. held_out: share of the images. failures: images that training could not read."""
    run = Trajectory.from_run(folder)
    alarms, last = find_alarms(run), run.checkpoints[-1]
    sizes = ", ".join(f"{run.class_name(c)} {state.total}" for c, state in sorted(last.classes.items()))
    share = f" held out ({held_out:.0%} of each class)" if held_out is not None else ""
    book.text(
        f"{sum(s.total for s in last.classes.values())} pictures{share}: {sizes}. {len(run)} checkpoints, "
        f"{len(figures.methods([run]))} methods. A C-Score of 1 means that the maps of all correctly "
        "classified pictures of a class are the same, 0 that no two of them overlap."
    )
    if failures:
        examples = "; ".join(f"{one.id}: {one.reason}" for one in failures[:3])
        book.text(f"{len(failures)} pictures could not be read for training ({examples}).")
    book.heading("What to use")
    book.text(results.recommend(run, alarms))
    book.heading("Alarms")
    if alarms:
        book.table(results.ALARMS.fill((alarm,) for alarm in alarms))
    else:
        book.text("No mechanism of failure was found at any checkpoint.")
    book.heading("The classifier")
    book.table(results.classifier_table(run))
    auc, phase_end = [(int(figures.place(run, c)), c.auc) for c in run], None
    epochs = history.epochs if history is not None else ()
    flags = {e.epoch: flag_of(e, run) for e in epochs}
    flagged = [epoch for epoch, flag in flags.items() if flag]
    if history is not None:
        listed = "; ".join(f"epoch {epoch}: {flags[epoch]}" for epoch in flagged)
        book.text(
            f"{len(flagged)} of {len(history)} epochs are flagged ({listed})." if flagged else
            f"None of {len(history)} epochs has an AUC below 0.5, or fewer right answers than guessing."
        )  # fmt: skip
        book.table(results.TRAINING.fill((e, flags[e.epoch]) for e in epochs))
        auc = [(epoch.epoch, epoch.auc) for epoch in epochs]
        phase_end = figures.place(run, figures.named(run, ends[0]))
    book.heading("Consistency")
    logged = any(epoch.gradients for epoch in epochs)
    norms = [(e.epoch, e.gradients) for e in epochs] if logged else []
    with figures.trajectories(run, alarms, auc, phase_end, norms) as figure:
        under = " Below: the norm of each layer's gradients and, thick, of all." if logged else ""
        caption = f"C-Score over training beside AUC; red numbers are alarms.{under}"
        book.figure(figure, "trajectories", caption)
    book.table(results.overall_table(run, ends))
    book.table(results.classes_table(run))
    book.table(results.gap_table(run))
    book.table(results.class_table(run, ends))
    with figures.ends(run, list(dict.fromkeys(ends))) as figure:
        book.figure(figure, "ends", f"C-Score by method and class at {ends[0]} and {ends[1]}.")
    if ends[0] != ends[1]:
        with figures.net_change(run, ends) as figure:
            book.figure(figure, "net-change", f"What changed from {ends[0]} to {ends[1]}.")
    with figures.by_class(run, phase_end) as figure:
        book.figure(figure, "by-class", "C-Score of each class with its 95 % interval.")
    if places:
        book.heading("Consistent and correct?")
        book.table(results.place_table(folder, run))
    if history is not None and logged:
        book.heading("Gradients")
        raised = [a.epoch for a in alarms if a.epoch is not None]
        jumps, every = gradient_jumps(epochs), [e.epoch for e in epochs]
        both = ((raised, "an alarm"), (flagged, "a flag"))
        warnings = (early_warning(every, jumps, at, what).sentence for at, what in both)
        book.text(f"Do the gradients warn early? {' '.join(warnings)}")
        book.table(results.gradient_table(history))
    if swept:
        book.heading("How deep to look")
        book.table(results.depth_table(swept))
        with figures.depths(swept) as figure:
            book.figure(figure, "depth", "C-Score of every CAM from early to late layers.")


def write_networks(book: MarkdownReport, networks: Sequence[Network], pages: Mapping[str, str]) -> None:
    """Several networks. pages: where a network's own page is, relative to this one."""
    names = ", ".join(f"[{n.name}]({pages[n.name]})" if n.name in pages else n.name for n in networks)
    size = sum(state.total for state in networks[0].last.classes.values())
    same = len({one.pictures for one in networks}) == 1
    scored = f"on the same {size} pictures" if same else "on different pictures (take care)"
    book.text(f"{len(networks)} networks, {scored}: {names}.")
    book.heading("Which network")
    book.text(results.recommendation(networks))
    book.table(results.network_table(networks))
    book.heading("By method")
    book.table(results.method_table(networks))
    with figures.network_changes({one.name: one.changes for one in networks}) as figure:
        book.figure(figure, "net-change", "What the second phase changed, by network and method.")
    runs = {one.name: one.run for one in networks}
    with figures.network_ends(runs, {one.name: one.ends for one in networks}) as figure:
        book.figure(figure, "ends", "C-Score over all classes at the end of each phase.")
    with figures.network_trajectories(runs) as figure:
        book.figure(figure, "trajectories", "C-Score over training: over all classes, then class by class.")
    book.heading("AUC")
    if len(networks) > 1:
        book.table(results.auc_table(networks))
    if all(one.history for one in networks):
        book.table(results.epoch_table(networks))


def write_comparison(
    book: MarkdownReport,
    pair: Trajectory,
    moves: Sequence[Move],
    fell: Sequence[str],
    alarms: Sequence[Alarm],
) -> None:
    """New weights against a reference. fell: the scores that fell, a sentence each."""
    before, after = pair
    auc = f"AUC {before.auc:.3f} before, {after.auc:.3f} now."
    worse = f"{len(fell)} scores fell and {len(alarms)} alarms are raised. {auc} {'; '.join(fell)}"
    none = f"No score fell by more than its intervals allow, and no alarm is raised. {auc}"
    book.text(worse if fell or alarms else none)
    book.table(results.WEIGHTS.fill((pair, checkpoint) for checkpoint in pair))
    names = ("all" if m.label is None else pair.class_name(m.label) for m in moves)
    book.table(results.SCORES.fill(zip(moves, names, strict=True)))
    if alarms:
        book.table(results.ALARMS.fill((alarm,) for alarm in alarms))
