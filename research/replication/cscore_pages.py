"""Pages of C-Scores: trainings by the paper's protocol on X-rays, and on the ten classes of CIFAR-10.

    cscore-cifar/cscores.csv   one row per training, checkpoint and method: C-Scores of all and of each class
    cscore-cifar/classes.csv   one row per training, checkpoint and class: the share that is classified right
    cscore-cifar/claims.csv    one row per claim and network

The page of X-rays is made from cscores.csv of the replication, which pages.py writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import pearsonr

from heatproof.disk import write_whole
from research.replication.claims import (
    CONVERGING,
    EPOCHS,
    GRADIENT,
    SCORE,
    Claim,
    Rows,
    claim_rows,
    t_interval,
)
from research.replication.cose import CSCORE_IMAGES
from research.replication.cose_tables import COMMAND, mean_of
from research.replication.pages import COMMAND as PROTOCOL_COMMAND
from research.replication.pages import FOLDER as REPLICATION
from research.replication.pages import RESULTS, as_csv, as_table, read_table
from research.replication.train import METHODS

TEN = RESULTS / REPLICATION / "cscore-cifar"
XRAYS = RESULTS / REPLICATION
NETWORKS = {"resnet20": "ResNet-20", "resnet56": "ResNet-56", "lite0": "EfficientNet-Lite0",
            "resnet50": "ResNet-50", "squeezenet": "SqueezeNet"}  # fmt: skip
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
XRAY_CLASSES = ("NORMAL", "PNEUMONIA")
Row = Mapping[str, Any]


def _epochs(rows: Rows) -> list[int]:
    return [epoch for epoch, row in rows.items() if row.get("cscores")]


def _value(rows: Rows, epoch: int, method: str) -> float:
    return float(rows[epoch]["cscores"][method]["value"])


def _classes(rows: Rows, epoch: int, method: str) -> list[float]:
    """C-Scores of the classes; NaN where fewer than two images count."""
    classes = rows[epoch]["cscores"][method]["classes"].values()
    return [float(own["value"]) if own.get("n", 2) > 1 else math.nan for own in classes]


def _last(rows: Rows) -> int:
    return max(_epochs(rows))


def _difference(first: str, second: str, distance: bool = False) -> Callable[[Rows], float]:
    def number(rows: Rows) -> float:
        apart = [_value(rows, e, first) - _value(rows, e, second) for e in _epochs(rows)]
        return float(np.mean(np.abs(apart) if distance else apart))

    return number


def _eigen_is_first(rows: Rows) -> float:
    others = [_value(rows, _last(rows), method) for method in (*GRADIENT, SCORE)]
    return _value(rows, _last(rows), "eigencam") - max(others)


def _spread(rows: Rows) -> float:
    values = [_value(rows, _last(rows), method) for method in CONVERGING]
    return max(values) - min(values)


def _gap(rows: Rows) -> float:
    known = [v for v in _classes(rows, _last(rows), "gradcam") if math.isfinite(v)]
    return max(known) - min(known) if known else math.nan


def _hidden(rows: Rows) -> float:
    known = [v for v in _classes(rows, _last(rows), "gradcam") if math.isfinite(v)]
    return _value(rows, _last(rows), "gradcam") - min(known) if known else math.nan


def _class_correlation(rows: Rows, method: str, epoch: int) -> float:
    return _r(rows[epoch]["recalls"], _classes(rows, epoch, method))


def _r(first: Sequence[float], second: Sequence[float]) -> float:
    pairs = np.array([first, second], dtype=np.float64)
    pairs = pairs[:, np.isfinite(pairs).all(0)]
    if pairs.shape[1] < 3 or (np.ptp(pairs, axis=1) < 1e-9).any():
        return math.nan
    return float(pearsonr(*pairs).statistic)


CLAIMS = (
    Claim("3.3", "Grad-CAM++ is more consistent than Grad-CAM", "mean difference over checkpoints",
          (0.267, 0.269, 0.160), _difference("gradcam++", "gradcam")),
    Claim("3.3", "LayerCAM is comparable to Grad-CAM++", "mean distance over checkpoints",
          (0.016, 0.060, 0.059), _difference("layercam", "gradcam++", True), 0.05, False),
    Claim("Tables 3 to 5", "EigenCAM is the most consistent method of the final network",
          "margin to the next method", (-0.034, 0.089, 0.006), _eigen_is_first),
    Claim("4.2.1", "Methods converge (method equivalence)",
          "spread of Grad-CAM++, LayerCAM and ScoreCAM of the final network", (0.010, 0.004, 0.489), _spread,
          0.05, False),
    Claim("3.3", "MS-Grad-CAM++ dilutes: it is below Grad-CAM++", "difference of the final network",
          (-0.252, -0.108, -0.069),
          lambda rows: _value(rows, _last(rows), "ms-gradcam++") - _value(rows, _last(rows), "gradcam++"),
          0.0, False),
    Claim("4.3.1", "A large class gap of Grad-CAM",
          "highest less lowest class, final network", (0.163, 0.839, 0.370), _gap, 0.2),
    Claim("4.4, mechanism 3", "The score over all classes hides a class",
          "Grad-CAM of all classes less the lowest class, final network", (0.046, 0.236, 0.370), _hidden,
          0.1),
    Claim("4.3.1", "The accuracy of a class gives no signal of its consistency",
          "distance from 0 of r over ten classes, Grad-CAM, final network", (),
          lambda rows: abs(_class_correlation(rows, "gradcam", _last(rows))), 0.5, False),
)  # fmt: skip


def write_tables(results: Sequence[Row], out: Path = TEN) -> None:
    """Write the CSV files of the ten classes and their figure."""
    own = [r for r in results if any(row.get("cscores") for row in r["epochs"])]
    tables = {
        "cscores": [row for r in own for row in score_rows(r)],
        "classes": [row for r in own for row in class_rows(r)],
        "claims": claim_rows(own, CLAIMS, epochs=0),
    }
    write_whole({out / f"{name}.csv": as_csv(rows) for name, rows in tables.items()})
    draw_courses(read_table("cscores", out), out / "courses.png")


def score_rows(result: Row) -> Iterator[dict[str, Any]]:
    for row in result["epochs"]:
        for method, score in row.get("cscores", {}).items():
            yield {
                "network": result["training"]["network"], "seed": result["training"]["seed"],
                "epoch": row["epoch"], "auc": row["auc"], "accuracy": row["accuracy"], "method": method,
                "cscore": score["value"],
                **dict(zip(CLASSES, _classes({0: row}, 0, method), strict=True)),
            }  # fmt: skip


def class_rows(result: Row) -> Iterator[dict[str, Any]]:
    for row in result["epochs"]:
        if not row.get("cscores"):
            continue
        lists = row["cscores"]["gradcam"]["classes"]
        for c, recall in enumerate(row["recalls"]):
            yield {
                "network": result["training"]["network"], "seed": result["training"]["seed"],
                "epoch": row["epoch"], "class": CLASSES[c], "accuracy": recall, "images": lists[str(c)]["n"],
            }  # fmt: skip


def claims(folder: Path = TEN) -> list[dict[str, str]]:
    """Entries of the index of all claims."""
    rows = read_table("claims", folder)
    entries = [claim.entry("cscore", rows, lambda row: NETWORKS[row["network"]]) for claim in CLAIMS]
    return [{**entry, "text": f"Ten classes: {entry['text']}"} for entry in entries]


def _cell(values: Sequence[float], digits: int = 2) -> str:
    """Mean and interval over trainings."""
    mean, low, high = t_interval(values)
    if not math.isfinite(mean):
        return "–"
    spread = f" ({low:.{digits}f} to {high:.{digits}f})" if math.isfinite(low) else ""
    return f"{mean:.{digits}f}{spread}"


def _networks(rows: Sequence[Row]) -> list[str]:
    return [n for n in NETWORKS if any(row["network"] == n for row in rows)]


def _column(rows: Sequence[Row], key: str, **where: object) -> list[float]:
    return [float(r[key]) for r in rows if all(r[k] == str(v) for k, v in where.items())]


def ten_classes_page(folder: Path = TEN) -> str:
    """The page of CIFAR-10."""
    rows, classes = read_table("cscores", folder), read_table("classes", folder)
    networks = _networks(rows)
    epochs = sorted({int(row["epoch"]) for row in rows})
    last, sections = epochs[-1], []
    for network in networks:
        trainings = len({r["seed"] for r in rows if r["network"] == network})
        of = {"network": network}
        accuracy = ["accuracy", *(_cell(_column(rows, "accuracy", epoch=e, method="gradcam", **of))
                                  for e in epochs)]  # fmt: skip
        course = [
            [method, *(_cell(_column(rows, "cscore", epoch=e, method=method, **of)) for e in epochs)]
            for method in METHODS
        ]
        by_class = [
            [name, _cell(_column(classes, "accuracy", epoch=last, **{"class": name}, **of)),
             _cell(_column(classes, "images", epoch=last, **{"class": name}, **of), 0),
             *(_cell(_column(rows, name, epoch=last, method=method, **of)) for method in METHODS)]
            for name in CLASSES
        ]  # fmt: skip
        related = [
            [method, _cell(_over_classes(rows, classes, network, method, last)),
             _cell(_over_checkpoints(rows, network, method))]
            for method in METHODS
        ]  # fmt: skip
        sections.append("\n\n".join([
            f"## {NETWORKS[network]}, {trainings} trainings",
            "C-Score over all classes, by epoch:",
            as_table(("method", *(f"epoch {e}" for e in epochs)), [accuracy, *course]),
            f"By class at epoch {last}; images: correct ones that count (gold list).",
            as_table(("class", "accuracy", "images", *METHODS), by_class),
            _gaps(rows, network, last),
            "Pearson correlation of C-Score and accuracy, over the ten classes at the last epoch and over "
            "checkpoints:",
            as_table(("method", "over classes", "over checkpoints"), related),
        ]))  # fmt: skip
    own_claims = as_table(
        ("where", "claim", "published", "here: mean over trainings (95 %)", "answer"),
        ([c["where"], c["text"], c["published"], c["here"], c["answer"]] for c in claims(folder)),
    )
    return Path(__file__).with_name("cscore_cifar.md").read_text("utf-8").format(
        images=CSCORE_IMAGES, folder=f"{REPLICATION}/cscore-cifar", sections="\n\n".join(sections),
        claims=own_claims, order=_order(rows, last), command=COMMAND,
    )  # fmt: skip


def _over_classes(
    rows: Sequence[Row], classes: Sequence[Row], network: str, method: str, epoch: int
) -> list[float]:
    result = []
    for seed in sorted({r["seed"] for r in rows if r["network"] == network}):
        of = {"network": network, "seed": seed, "epoch": epoch}
        accuracies = [_column(classes, "accuracy", **{"class": name}, **of)[0] for name in CLASSES]
        scores = [_column(rows, name, method=method, **of)[0] for name in CLASSES]
        result.append(_r(accuracies, scores))
    return result


def _over_checkpoints(rows: Sequence[Row], network: str, method: str) -> list[float]:
    result = []
    for seed in sorted({r["seed"] for r in rows if r["network"] == network}):
        of = {"network": network, "seed": seed, "method": method}
        result.append(_r(_column(rows, "accuracy", **of), _column(rows, "cscore", **of)))
    return result


def _gaps(rows: Sequence[Row], network: str, epoch: int) -> str:
    """The class of the highest and of the lowest mean C-Score by Grad-CAM."""
    of = {"network": network, "epoch": epoch, "method": "gradcam"}
    means = {name: mean_of(_column(rows, name, **of)) for name in CLASSES}
    high, low = max(means, key=lambda c: means[c]), min(means, key=lambda c: means[c])
    return (
        f"Grad-CAM is most consistent for {high} ({means[high]:.2f}) and least for {low} ({means[low]:.2f}), "
        "in the mean over trainings."
    )


def _order(rows: Sequence[Row], epoch: int) -> str:
    """The order of methods by their mean C-Score, a line per network."""
    lines = []
    for network in _networks(rows):
        of = {"network": network, "epoch": epoch}
        means = {m: mean_of(_column(rows, "cscore", method=m, **of)) for m in METHODS}
        order = sorted(means, key=lambda m: -means[m])
        lines.append(f"- {NETWORKS[network]}: {', '.join(f'{m} {means[m]:.2f}' for m in order)}.")
    return "\n".join(lines)


def xray_page(folder: Path = XRAYS) -> str:
    """The page of trainings by the paper's protocol."""
    rows = read_table("cscores", folder)
    networks, sections = _networks(rows), []
    for network in networks:
        of = {"network": network}
        seeds = len({r["seed"] for r in rows if r["network"] == network})

        def course(key: str, of: Mapping[str, object] = of, **where: object) -> list[str]:
            return [_cell(_column(rows, key, epoch=e, **of, **where)) for e in EPOCHS]

        scores = [
            ["AUC", *course("auc", method="gradcam")],
            ["accuracy", *course("accuracy", method="gradcam")],
        ]
        scores += [[method, *course("cscore", method=method)] for method in METHODS]
        gaps = []
        for method in METHODS:
            both = [_gaps_of(rows, epoch=e, method=method, **of) for e in EPOCHS]
            gaps.append([method, *(_cell(values) for values in both)])
        head = ("", *(f"epoch {e}" for e in EPOCHS))
        sections.append("\n\n".join([
            f"## {NETWORKS[network]}, {seeds} trainings",
            as_table(head, scores),
            f"Gap between the classes ({XRAY_CLASSES[0]} less {XRAY_CLASSES[1]}):",
            as_table(head, gaps),
        ]))  # fmt: skip
    return Path(__file__).with_name("cscore.md").read_text("utf-8").format(
        folder=REPLICATION, sections="\n\n".join(sections), changes=_changes(rows, networks),
        widest=_widest(rows), command=PROTOCOL_COMMAND,
    )  # fmt: skip


def _gaps_of(rows: Sequence[Row], **where: object) -> list[float]:
    """Of each training the first class less the second, where both have images that count (else 0)."""
    pairs = zip(*(_column(rows, f"class{c}", **where) for c in (0, 1)), strict=True)
    return [first - second for first, second in pairs if first > 0 and second > 0]


def _changes(rows: Sequence[Row], networks: Sequence[str]) -> str:
    """What fine-tuning changed, beside the paper's Figure 3."""
    lines = []
    for method in METHODS:
        cells = []
        for network in networks:
            of = {"network": network, "method": method}
            before, after = (_column(rows, "cscore", epoch=e, **of) for e in (20, 30))
            cells.append(_cell([b - a for a, b in zip(before, after, strict=True)]))
        lines.append([method, *cells, *(f"{p:+.3f}" for p in PUBLISHED_CHANGES[method])])
    head = ("method", *(NETWORKS[n] for n in networks), "published: DenseNet201", "published: InceptionV3",
            "published: ResNet50V2")  # fmt: skip
    return as_table(head, lines)


PUBLISHED_CHANGES = {  # from epoch 20 to 30, by the paper's tables
    "gradcam": (0.610, 0.048, -0.015),
    "gradcam++": (0.321, 0.277, -0.115),
    "layercam": (0.312, 0.195, -0.165),
    "eigencam": (0.211, 0.096, -0.193),
    SCORE: (0.250, 0.380, -0.612),
    "ms-gradcam++": (0.173, 0.235, -0.098),
}


def _widest(rows: Sequence[Row]) -> str:
    """The widest gap between the classes of a training."""
    own = [r for r in rows if float(r["class0"]) > 0 and float(r["class1"]) > 0]
    row = max(own, key=lambda r: abs(float(r["class0"]) - float(r["class1"])))
    normal, pneumonia = (f"{float(row[f'class{c}']):.2f} for {name}" for c, name in enumerate(XRAY_CLASSES))
    return (
        f"The widest gap between the classes of one training is that of {row['method']} in "
        f"{NETWORKS[row['network']]} at epoch {row['epoch']} (seed {row['seed']}): {normal} and {pneumonia}; "
        "published: 0.66 and 0.01 (Grad-CAM of DenseNet201, epoch 20)."
    )


def draw_courses(rows: Sequence[Row], path: Path) -> None:
    """C-Score of every method by epoch, mean over trainings, a panel per network."""
    from matplotlib.figure import Figure

    networks = _networks(rows)
    figure = Figure((2.7 * len(networks) + 2.2, 3.3), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(networks), sharey=True))
    epochs = sorted({int(row["epoch"]) for row in rows})
    for axes, network in zip(panels, networks, strict=True):
        for method in METHODS:
            values = [_column(rows, "cscore", network=network, method=method, epoch=e) for e in epochs]
            axes.plot(epochs, [mean_of(v) for v in values], "o-", ms=3, lw=1, label=method)
        accuracy = [_column(rows, "accuracy", network=network, method="gradcam", epoch=e) for e in epochs]
        axes.plot(epochs, [mean_of(v) for v in accuracy], "k:", lw=1, label="accuracy")
        axes.set_title(NETWORKS[network], fontsize=9)
        axes.set_xlabel("epoch")
        axes.set_ylim(0, 1)
    panels[0].set_ylabel("C-Score, mean over trainings")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=110)
