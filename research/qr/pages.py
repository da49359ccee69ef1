"""Tables and the page of the QR trainings.

    trainings.csv   one row per training: accuracy, AUC, loss, share of the parameters that it trained
    scores.csv      one row per training and method: every number of Tables 2 to 6
    claims.csv      one row per claim and network

`write_tables` needs the joined results, `write_page` only these files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from heatproof.disk import write_whole
from heatproof.explain.baselines import is_floor
from heatproof.images.distort import DISTORTIONS, SEVERITIES
from heatproof.metrics.agreement import rank_correlation
from heatproof.metrics.on_parts import aurc, bl_slope, structure_score
from heatproof.studies.qr.results import mean_curves, partial_rho, published_rows
from heatproof.studies.settings import QR_FLOORS
from heatproof.train.protocols import GRID, REGIMES
from research.qr.claims import (
    DEPTH,
    EIGEN,
    EVERY_CLAIM,
    LEAKMIN,
    STRUCT,
    Numbers,
    answers,
    cell,
    claim_rows,
    with_cells,
)
from research.qr.measure import BACKBONES, DEEP, FULL, MASSES, METHODS, PAPER, restored
from research.replication.claims import HOLDS, MIXED, NOT, UNTESTED, t_interval
from research.replication.pages import RESULTS, as_csv, as_table, read_table

FOLDER = RESULTS / "replication" / "qr"
PAGE = RESULTS / "qr.md"
SCORES = ("bl", "fmr", "tmr", "dts", "auc_f", "auc_t", "auc_bg", "structure_score", "mass_score", "empty")
TITLES = {"bl": "BL", "fmr": "FMR", "tmr": "TMR", "dts": "DtS", "structure_score": "StructureScore",
          "mass_score": "mass score", "empty": "empty maps", "bl_slope": "BL slope", "fmr_aurc": "FMR-AURC",
          "tmr_aurc": "TMR-AURC", "empty_distorted": "empty maps", "rho_finder": "rho(FMR, drop)",
          "rho_timing": "rho(TMR, drop)", "partial_finder": "finder, size taken out",
          "partial_timing": "timing, size taken out", "accuracy": "accuracy"}  # fmt: skip
DROPS = ("drop_finder", "drop_timing")
NAMES = {"zs": "ZS", "ft-struct": "FT-Struct", "ft-leakmin": "FT-LeakMin"}
DEPTH_NAMES = dict(zip(DEPTH, ("head", "L4", "L3-L4", "all"), strict=True))
NETWORK_NAMES = {"resnet50": "ResNet-50", "lite0": "EfficientNet-Lite0"}
ALL_METHODS = (*METHODS, *QR_FLOORS)
COMMAND = """\
python -m research.qr prepare --data DATA --out PACKED
    python -m research.qr measure --data PACKED --out OUT --device cuda --processes 4
    python -m research.qr tables OUT/results.json.gz
    python -m research.qr page"""
Row = Mapping[str, Any]
Table = Sequence[Mapping[str, str]]  # as read from a CSV file


def score_rows(result: Row) -> list[dict[str, Any]]:
    """A row per method of one training; means over codes leave empty maps out."""
    columns = {m: {n: restored(v) for n, v in own.items()} for m, own in result["columns"].items()}
    network = columns.pop("")
    rows = []
    for method, own in columns.items():
        row = {
            **result["training"],
            "method": method,
            "codes": len(own["bl"]),
            "accuracy": result["accuracy"],
        }
        row |= {name: _mean(own[name]) for name in SCORES}
        row |= _robustness(own) | _causality(own, network)
        rows.append(row)
    return rows


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def _robustness(own: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Slope and AURC of curves of means; blank for trainings without distorted codes."""
    slopes = [f"slope_{kind}" for kind in DISTORTIONS]
    if "bl(clean=0)" not in own:
        return dict.fromkeys(
            ["distorted", "bl_slope", "fmr_aurc", "tmr_aurc", "empty_distorted", *slopes], ""
        )
    levels = [f"{level:g}" for level in SEVERITIES[1:]]
    curves = {
        mass: np.array([
            [own[f"{mass}(clean=0)"], *(own[f"{mass}({kind}={level})"] for level in levels)]
            for kind in DISTORTIONS
        ]).transpose(2, 0, 1)
        for mass in MASSES
    }  # fmt: skip
    means = {mass: mean_curves(curve) for mass, curve in curves.items()}
    by_kind = bl_slope(means["bl"][:, None], SEVERITIES)["bl_slope"].tolist()
    return {
        "distorted": len(curves["bl"]),
        "bl_slope": float(bl_slope(means["bl"], SEVERITIES)["bl_slope"]),
        **{f"{mass}_aurc": float(aurc(means[mass], SEVERITIES)["aurc"]) for mass in MASSES[1:]},
        "empty_distorted": float(np.isnan(curves["bl"][..., 1:]).mean()),
        **dict(zip(slopes, by_kind, strict=True)),
    }


def _causality(own: Mapping[str, np.ndarray], network: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Spearman's rho of mass and drop over codes, and with the size of the codes taken out."""
    row: dict[str, Any] = {}
    for part, mass in (("finder", "fmr"), ("timing", "tmr")):
        drop = network.get(f"drop_{part}")
        if drop is None:
            row |= {f"rho_{part}": "", f"partial_{part}": ""}
            continue
        table = np.stack([own[mass][: len(drop)], drop, network["size"][: len(drop)]], 1)
        table = table[np.isfinite(table).all(1)]
        enough = len(table) > 8
        row[f"rho_{part}"] = rank_correlation(table[:, 0], table[:, 1]).rho if enough else math.nan
        row[f"partial_{part}"] = partial_rho(table) if enough else math.nan
    return row


def training_rows(results: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            **r["training"], "accuracy": r["accuracy"], "auc": r["auc"], "first_loss": r["losses"][0],
            "last_loss": r["losses"][-1], "epochs": len(r["losses"]), "parameters": r["parameters"],
            **{name: _mean(restored(r["columns"][""].get(name, [None]))) for name in DROPS},
            "covered": _mean(restored(r["columns"][""]["size"])), **r["made"],
        }
        for r in results
    ]  # fmt: skip


def numbers_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, Numbers]]:
    """By network and seed, what the claims read."""
    made: dict[str, dict[int, dict[tuple[str, str], dict[str, float]]]] = {}
    for row in rows:
        own = {k: float(v) for k, v in row.items() if k in TITLES and v != ""}
        made.setdefault(row["network"], {}).setdefault(int(row["seed"]), {})[row["regime"], row["method"]] = (
            own
        )
    return {n: {seed: with_cells(own) for seed, own in seeds.items()} for n, seeds in made.items()}


def papers() -> dict[str, Numbers]:
    """The published tables in the form of our trainings; Tables 3 and 4 name no backbone, 6 no method."""
    made: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for backbone in ("ResNet-50", "ConvNeXt-B"):
        own = made.setdefault(backbone, {})
        for regime, method, bl, fmr, tmr, dts, _ in published_rows("table-2", backbone):
            score = structure_score(fmr, tmr, bl, dts)
            own[regime, method] = {"bl": bl, "fmr": fmr, "tmr": tmr, "dts": dts, "mass_score": score}
    first = made["ResNet-50"]
    for name, columns in (
        ("table-3", ("bl_slope", "fmr_aurc", "tmr_aurc")),
        ("table-4", ("rho_finder", "rho_timing")),
    ):
        for regime, method, *values in published_rows(name, "ResNet-50"):
            first[regime, method] |= dict(zip(columns, values, strict=True))
    for (_, method, *values), regime in zip(published_rows("table-5", "ResNet-50"), DEPTH, strict=True):
        first.setdefault((regime, method), dict(zip(("bl", "fmr", "tmr", "dts"), values, strict=False)))
    for _, lam, alpha, *values in published_rows("table-6", "ResNet-50"):
        first[cell(lam, alpha), EIGEN] = dict(zip(("bl", "fmr", "tmr", "accuracy"), values, strict=True))
    return {**made}


def write_tables(results: Sequence[Row], out: Path = FOLDER) -> None:
    """Write all CSV files and the figures."""
    order = {name: i for i, name in enumerate((*REGIMES, *DEPTH[2:]))}

    def place(result: Row) -> tuple[int, int, str, int]:
        network, regime, seed = (result["training"][key] for key in ("network", "regime", "seed"))
        return BACKBONES.index(network), order.get(regime, len(order)), regime, seed

    ordered = sorted(results, key=place)
    rows = [row for result in ordered for row in score_rows(result)]
    tables = {
        "trainings": training_rows(ordered),
        "scores": rows,
        "claims": claim_rows(numbers_of(rows), papers()),
    }
    write_whole({out / f"{name}.csv": as_csv(table) for name, table in tables.items()})
    scores = read_table("scores", out)
    draw_leakage(scores, out / "leakage.png")
    if any(row["regime"] == DEPTH[-1] for row in scores):
        draw_depths(scores, out / "depths.png")


def by_seed(rows: Table, column: str, **of: str) -> dict[str, float]:
    """Values of the trainings with these fields, by seed; undefined ones are left out."""
    own = [r for r in rows if all(r[k] == v for k, v in of.items())]
    return {r["seed"]: float(r[column]) for r in own if r[column] not in ("", "nan")}


def over_seeds(rows: Table, column: str, **of: str) -> tuple[float, float, float, int]:
    """Mean and 95 % t interval over the trainings with these fields, and their number."""
    own = by_seed(rows, column, **of)
    return *t_interval([*own.values()]), len(own)


def with_interval(mean: float, low: float, high: float, form: str = ".3f") -> str:
    """A mean and, unless there is one training only, its interval; empty where nothing was measured."""
    if math.isnan(mean):
        return ""
    return f"{mean:{form}}" + (f" ({low:{form}} to {high:{form}})" if math.isfinite(low) else "")


def in_cell(rows: Table, column: str, form: str = ".3f", **of: str) -> str:
    mean, low, high, n = over_seeds(rows, column, **of)
    if n and column.startswith("empty"):
        return f"{100 * mean:.0f} %"
    return with_interval(mean, low, high, form)


def networks_of(rows: Table) -> list[str]:
    return [network for network in BACKBONES if any(r["network"] == network for r in rows)]


def _label(method: str) -> str:
    return f"*{method}*" if is_floor(method) else method


def regime_table(rows: Table, network: str, columns: Sequence[str], published: Numbers) -> str:
    """A table of regimes and methods: ours, and the published row of the same regime and method below.

    Maps of controls are the same in every regime; only their correlations with the logit differ.
    """
    lines = []
    once = not any(column.startswith("rho") for column in columns)
    for regime in REGIMES:
        for method in METHODS if once and regime != REGIMES[0] else ALL_METHODS:
            of = {"network": network, "regime": regime, "method": method}
            n = over_seeds(rows, "accuracy", **of)[3]
            if n:
                cells = (in_cell(rows, c, **of) for c in columns)
                name = "any" if once and is_floor(method) else NAMES[regime]
                lines.append([name, _label(method), str(n), *cells])
            if method in PAPER and (regime, method) in published:
                own = published[regime, method]
                printed = (f"{own[c]:.3f}" if c in own else "" for c in columns)
                lines.append([NAMES[regime], f"{method}, published", "", *printed])
    return as_table(("regime", "method", "trainings", *(TITLES[c] for c in columns)), lines)


def accuracy_table(folder: Path) -> str:
    rows = read_table("trainings", folder)
    keys = dict.fromkeys((r["network"], r["regime"]) for r in rows)
    lines = []
    for network, regime in keys:
        of = {"network": network, "regime": regime}
        losses = (f"{over_seeds(rows, name, **of)[0]:.3f}" for name in ("first_loss", "last_loss"))
        share, *_, n = over_seeds(rows, "parameters", **of)
        scores = [in_cell(rows, name, **of) for name in ("accuracy", "auc")]
        title = NETWORK_NAMES[network], NAMES.get(regime, regime), str(n)
        lines.append([*title, *scores, *losses, f"{100 * share:.3g} %"])
    head = ("network", "training", "trainings", "accuracy", "AUC", "loss, first epoch", "loss, last epoch",
            "trained parameters")  # fmt: skip
    return as_table(head, lines)


def depth_table(rows: Table, published: Numbers) -> str:
    columns, lines = ("bl", "fmr", "tmr", "dts", "mass_score", "accuracy", "empty"), []
    for method in (EIGEN, "gradcam"):
        for regime, depth in DEPTH_NAMES.items():
            of = {"network": DEEP, "regime": regime, "method": method}
            lines.append(
                [
                    depth,
                    method,
                    str(over_seeds(rows, "bl", **of)[3]),
                    *(in_cell(rows, c, **of) for c in columns),
                ]
            )
    for regime, depth in DEPTH_NAMES.items():
        own = published[regime, EIGEN]
        lines.append(
            [depth, f"{EIGEN}, published", "", *(f"{own[c]:.3f}" if c in own else "" for c in columns)]
        )
    return as_table(("trained", "method", "trainings", *(TITLES[c] for c in columns)), lines)


def cell_table(rows: Table, published: Numbers) -> str:
    columns, lines = ("bl", "fmr", "tmr", "accuracy", "empty"), []
    regimes = {cell(0, 0): STRUCT, cell(0.25, 0.25): LEAKMIN}
    for method in (EIGEN, "gradcam"):
        for lam in GRID:
            for alpha in GRID if lam else GRID[:1]:
                name = cell(lam, alpha)
                of = {"network": DEEP, "regime": regimes.get(name, name), "method": method}
                own = [
                    f"{lam:g}",
                    f"{alpha:g}" if lam else "any",
                    method,
                    str(over_seeds(rows, "accuracy", **of)[3]),
                ]
                lines.append([*own, *(in_cell(rows, c, **of) for c in columns)])
    for lam in GRID:
        for alpha in GRID:
            printed = published[cell(lam, alpha), EIGEN]
            values = [f"{printed[c]:.3f}" if c in printed else "" for c in columns]
            lines.append([f"{lam:g}", f"{alpha:g}", "published", "", *values])
    return as_table(("lambda", "alpha", "method", "trainings", *(TITLES[c] for c in columns)), lines)


def distortion_table(rows: Table) -> str:
    lines = []
    for network in networks_of(rows):
        for regime in REGIMES:
            of = {"network": network, "regime": regime, "method": EIGEN}
            cells = [in_cell(rows, f"slope_{kind}", ".2f", **of) for kind in DISTORTIONS]
            lines.append([NETWORK_NAMES[network], NAMES[regime], *cells])
    return as_table(("network", "regime", *(kind.replace("_", " ") for kind in DISTORTIONS)), lines)


def penalty_table(rows: Table) -> str:
    """What the penalty changes, paired by seed."""
    lines = []
    for network in networks_of(rows):
        for method in METHODS:
            cells = []
            for column in ("bl", "fmr", "tmr", "dts", "empty"):
                before, after = (
                    by_seed(rows, column, network=network, regime=r, method=method) for r in (STRUCT, LEAKMIN)
                )
                gaps = [after[s] - v for s, v in before.items() if s in after]
                cells.append(with_interval(*t_interval(gaps), "+.3f"))
            lines.append([NETWORK_NAMES[network], method, *cells])
    return as_table(("network", "method", "BL", "FMR", "TMR", "DtS", "share of empty maps"), lines)


def _measured(row: Mapping[str, str]) -> str:
    """A network's mean over seeds, its interval and their number."""
    names = " and ".join(NETWORK_NAMES[name] for name in row["network"].split(" and "))
    interval = with_interval(float(row["mean"]), float(row["low"]), float(row["high"]))
    return f"{names} {interval}, {row['seeds']} seed{'s' * (row['seeds'] != '1')}"


def claim_lines(folder: Path = FOLDER) -> list[dict[str, str]]:
    """One entry per claim: where, text, published, here, answer."""
    rows = read_table("claims", folder)
    over = answers(rows)
    made = []
    for claim in EVERY_CLAIM:
        own = [r for r in rows if r["claim"] == claim.text]
        here = "; ".join(_measured(row) for row in own if row["network"])
        made.append({
            "where": claim.where, "text": f"{claim.text} ({claim.measured}; {claim.predicted})",
            "published": own[0]["published"], "here": here or "not measured", "answer": over[claim.text],
        })  # fmt: skip
    return made


def claims(folder: Path = FOLDER) -> list[dict[str, str]]:
    """Claims for the index of all papers; empty before anything was measured."""
    if not (folder / "claims.csv").exists():
        return []
    return [
        {"paper": "cambench", **line, "here": f"{line['here']}: [QR](qr.md)"} for line in claim_lines(folder)
    ]


def below_controls(rows: Table) -> str:
    """Methods that leak significantly less than the controls, by the intervals over trainings."""
    sentences = []
    for network in networks_of(rows):
        counts = []
        for floor in QR_FLOORS:
            low = over_seeds(rows, "bl", network=network, regime="zs", method=floor)[0]
            less = [
                f"{m} ({NAMES[r]})" for r in REGIMES for m in METHODS
                if over_seeds(rows, "bl", network=network, regime=r, method=m)[2] < low
            ]  # fmt: skip
            total = len(REGIMES) * len(METHODS)
            few = f": {', '.join(less)}" if 0 < len(less) <= 6 else ""
            counts.append(f"{len(less)} of {total} leak significantly less than *{floor}* ({low:.3f}){few}")
        sentences.append(f"Of the methods and regimes of {NETWORK_NAMES[network]}, {'; '.join(counts)}.")
    return " ".join(sentences)


def emptied(rows: Table) -> str:
    """Methods with empty maps."""
    emptied = []
    for network in networks_of(rows):
        for regime in REGIMES:
            for method in METHODS:
                mean, *_, n = over_seeds(rows, "empty", network=network, regime=regime, method=method)
                if n and mean >= 0.01:
                    emptied.append(f"{method}, {NETWORK_NAMES[network]}, {NAMES[regime]}: {100 * mean:.0f} %")
    if not emptied:
        return "No method has 1 % of empty maps or more in any regime."
    return f"Share of empty maps, if 1 % or more: {'; '.join(emptied)}."


def twins(rows: Table) -> str:
    """Methods with the same scores in all trainings."""
    sentences = []
    for network in networks_of(rows):
        groups: dict[tuple[str, ...], list[str]] = {}
        for method in METHODS:
            own = [r for r in rows if (r["network"], r["method"]) == (network, method)]
            key = tuple(f"{float(r[c]):.2f}" for r in own for c in ("bl", "fmr", "tmr", "dts"))
            groups.setdefault(key, []).append(method)
        same = "; ".join(", ".join(names) for names in groups.values() if len(names) > 1)
        sentences.append(f"{NETWORK_NAMES[network]}: {same or 'none'}.")
    return f"Methods with the same BL, FMR, TMR and DtS to two digits in all trainings: {' '.join(sentences)}"


def page(folder: Path = FOLDER) -> str:
    scores, trainings = read_table("scores", folder), read_table("trainings", folder)
    lines, published = claim_lines(folder), papers()
    counted = Counter(line["answer"] for line in lines)
    head = ("where", "claim", "published", "here: mean over seeds (95 %)", "answer")
    first = published["ResNet-50"]
    made = trainings[-1]
    counts = Counter(NETWORK_NAMES[t["network"]] for t in trainings)
    structure = ("bl", "fmr", "tmr", "dts", "structure_score", "mass_score", "empty")
    robust = ("bl_slope", "fmr_aurc", "tmr_aurc", "empty_distorted")
    causal = ("rho_finder", "rho_timing", "partial_finder", "partial_timing")

    def both(columns: Sequence[str]) -> str:
        return "\n\n".join(
            f"{NETWORK_NAMES[n]}:\n\n{regime_table(scores, n, columns, first if n == DEEP else {})}"
            for n in networks_of(scores)
        )

    measured = {t["regime"] for t in trainings}
    deep = DEPTH[-1] in measured
    fields = {
        "answers": ", ".join(f"{a} {counted[a]}" for a in (HOLDS, NOT, MIXED, UNTESTED)),
        "count": len(lines), "claims": as_table(head, ([*line.values()] for line in lines)),
        "trainings": ", ".join(f"{name} {n}" for name, n in counts.items()),
        "codes": scores[0]["codes"], "distorted": next(r["distorted"] for r in scores if r["distorted"]),
        "train": FULL.train, "causal": FULL.causal, "head_epochs": FULL.head_epochs, "epochs": FULL.epochs,
        "covered": f"{100 * float(made['covered']):.0f}", "accuracies": accuracy_table(folder),
        "structure": both(structure), "controls": below_controls(scores), "emptied": emptied(scores),
        "twins": twins(scores),
        "penalty": penalty_table(scores), "robustness": both(robust), "distortions": distortion_table(scores),
        "causality": both(causal), "depths": depth_table(scores, first),
        "depth_figure": f"![FMR and BL by depth]({_link('depths.png')})" if deep else "Not measured.",
        "cells": cell_table(scores, first), "device": made["device"],
        "date": max(t["date"] for t in trainings), "command": COMMAND, "folder": _link("").rstrip("/"),
    }  # fmt: skip
    return Path(__file__).with_name("page.md").read_text("utf-8").format(**fields)


def _link(name: str) -> str:
    return f"{FOLDER.relative_to(RESULTS).as_posix()}/{name}"


def write_page(folder: Path = FOLDER, path: Path = PAGE) -> None:
    write_whole({path: page(folder)})


def draw_leakage(rows: Table, path: Path) -> None:
    """BL of methods and regimes with intervals; the published numbers of ResNet-50 as crosses."""
    from matplotlib.figure import Figure

    drawn, colours = (
        [*METHODS, *QR_FLOORS],
        dict(zip(REGIMES, ("#999999", "#4477aa", "#cc6677"), strict=True)),
    )
    figure = Figure((8, 3.6), layout="constrained")
    printed = papers()["ResNet-50"]
    for panel, network in zip(figure.subplots(1, 2, sharey=True), BACKBONES, strict=True):
        for i, method in enumerate(drawn):
            for k, (regime, colour) in enumerate(colours.items()):
                mean, low, high, n = over_seeds(rows, "bl", network=network, regime=regime, method=method)
                place = i + 0.22 * (k - 1)
                if n > 1:
                    panel.plot([max(low, 0), min(high, 1)], [place, place], color=colour, lw=1.5)
                panel.plot(mean, place, "o", ms=4, color=colour, label=NAMES[regime] if not i else None)
                if network == DEEP and (regime, method) in printed:
                    label = "published" if (i, k) == (0, 0) else None
                    panel.plot(printed[regime, method]["bl"], place, "x", ms=5, color="black", label=label)
        panel.set_yticks(range(len(drawn)), drawn)
        panel.set(
            title=NETWORK_NAMES[network], xlabel="background leakage (95 % over trainings)", xlim=(0, 1)
        )
        panel.legend(fontsize=7)
    panel.invert_yaxis()
    figure.savefig(path, dpi=100)


def draw_depths(rows: Table, path: Path) -> None:
    """FMR and BL of EigenGrad-CAM by depth, here and published (the paper's Figure 4)."""
    from matplotlib.figure import Figure

    figure, printed = Figure((8, 3), layout="constrained"), papers()["ResNet-50"]
    for panel, column in zip(figure.subplots(1, 2), ("fmr", "bl"), strict=True):
        own = [over_seeds(rows, column, network=DEEP, regime=r, method=EIGEN) for r in DEPTH_NAMES]
        means = np.array([values[0] for values in own])
        ends = np.array([values[1:3] if values[3] > 1 else (math.nan, math.nan) for values in own])
        panel.errorbar(
            range(4), means, np.abs(ends.T - means), fmt="o-", capsize=3, color="#4477aa", label="here"
        )
        panel.plot(
            range(4),
            [printed[r, EIGEN][column] for r in DEPTH_NAMES],
            "x--",
            color="black",
            label="published",
        )
        panel.set_xticks(range(4), [*DEPTH_NAMES.values()])
        panel.set(title=f"{TITLES[column]}, {EIGEN}, {NETWORK_NAMES[DEEP]}", xlabel="trained layers")
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=100)
