"""Tables, claims and page of COSE, from the trainings that cose.py measured.

    cose.csv         one row per training and method: both halves and COSE, by the pairs that count
    checkpoints.csv  one row per training, checkpoint and method: accuracy, SSIM to the final network's maps
    magnitudes.csv   one row per training, method, kind of transform and half of its magnitudes
    claims.csv       one row per claim and group (a network, or a method where networks are compared)

`write_tables` needs the stored trainings, the page only these files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from heatproof.disk import write_whole
from heatproof.images.transforms import TRANSFORMS, draw
from heatproof.metrics.stability import harmonic, ssim_to_final
from research.replication.claims import UNTESTED, Claim, t_interval
from research.replication.cose import CHECKPOINTS, CONTROLS, DRAWS, IMAGES, METHODS, OTHERS, PAPER
from research.replication.pages import RESULTS, as_csv, as_table, read_table

FOLDER = RESULTS / "replication" / "cose"
NETWORKS = {  # network -> its title, whether it is a transformer
    "resnet20": ("ResNet-20, CIFAR-10", False),
    "resnet56": ("ResNet-56, CIFAR-10", False),
    "vit": ("ViT, CIFAR-10", True),
    "squeezenet": ("SqueezeNet, X-rays", False),
}
CONVNETS, TRANSFORMER = ("resnet20", "resnet56"), "vit"
# Table 1 of the paper, in the order of PAPER.
PUBLISHED = {
    "CIFAR10, ResNet50": (60.47, 62.29, 42.75, 48.27, 51.20, 59.86, 52.02),
    "CIFAR10, ViT-B/16": (66.46, 71.54, 59.11, 55.72, 66.68, 63.85, 61.00),
    "Overall": (63.23, 64.66, 54.59, 54.73, 61.33, 60.11, 57.94),
}
NAMES = {method: name for name, method in PAPER.items()} | {m: m for m in (*OTHERS, *CONTROLS)}
HALVES = ("small", "large")  # magnitudes up to half of the reach, and above it
COMMAND = (
    "python -m research.replication prepare --data DATA --out PACKED --study cifar --study cose\n"
    "    python -m research.replication train --data PACKED --out OUT --device cuda --processes 4 \\\n"
    "        --study cifar --study cose\n"
    "    python -m research.replication tables OUT/results.json.gz\n"
    "    python -m research.replication pages"
)
Row = Mapping[str, Any]
Table = list[dict[str, Any]]
ByMethod = Mapping[str, float]  # by the paper's name of the method


@dataclass(frozen=True)
class Measures:
    """Numbers of all trainings: cose.csv, checkpoints.csv and magnitudes.csv."""

    scores: Sequence[Row]
    checkpoints: Sequence[Row]
    magnitudes: Sequence[Row]

    def by_method(self, column: str) -> dict[tuple[str, int], dict[str, float]]:
        """By (network, seed): the column of each of the paper's methods."""
        table: dict[tuple[str, int], dict[str, float]] = {}
        for row in self.scores:
            if row["method"] in PAPER.values():
                own = table.setdefault((row["network"], int(row["seed"])), {})
                own[NAMES[row["method"]]] = float(row[column])
        return table

    def correlations(self, method: str) -> dict[str, list[float]]:
        """By network: of each training, r of SSIM to the final maps and accuracy over its checkpoints."""
        points: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for row in self.checkpoints:
            if row["method"] == method:
                key = row["network"], int(row["seed"])
                points.setdefault(key, []).append((float(row["ssim"]), float(row["accuracy"])))
        result: dict[str, list[float]] = {}
        for (network, _), own in points.items():
            result.setdefault(network, []).append(ssim_to_final(*zip(*own, strict=True)).r)
        return result

    def change(self, kind: str, column: str) -> dict[str, list[float]]:
        """By network: of each training, large less small magnitudes, mean over the paper's methods."""
        values: dict[tuple[str, int], dict[str, list[float]]] = {}
        for row in self.magnitudes:
            if row["kind"] == kind and row["method"] in PAPER.values():
                own = values.setdefault((row["network"], int(row["seed"])), {half: [] for half in HALVES})
                own[row["half"]].append(float(row[column]))
        result: dict[str, list[float]] = {}
        for (network, _), own in values.items():
            small, large = (np.array(own[half]) for half in HALVES)
            result.setdefault(network, []).append(mean_of(large - small))
        return result


def _by_network(
    column: str, number: Callable[[ByMethod], float]
) -> Callable[[Measures], dict[str, list[float]]]:
    def values(measures: Measures) -> dict[str, list[float]]:
        result: dict[str, list[float]] = {}
        for (network, _), own in measures.by_method(column).items():
            result.setdefault(network, []).append(number(own))
        return result

    return values


def _against(
    column: str, methods: Sequence[str], sign: int = 1
) -> Callable[[Measures], dict[str, list[float]]]:
    """Of each seed, the transformer less the mean of the ConvNets, by method."""

    def values(measures: Measures) -> dict[str, list[float]]:
        table = measures.by_method(column)
        seeds = [s for n, s in table if n == TRANSFORMER and all((c, s) in table for c in CONVNETS)]
        return {
            m: [
                sign * (table[TRANSFORMER, s][m] - float(np.mean([table[c, s][m] for c in CONVNETS])))
                for s in seeds
            ]
            for m in methods
        }  # fmt: skip

    return values


def _margin(own: ByMethod, first: Sequence[str], others: Sequence[str] = ()) -> float:
    """The lowest of the first methods less the highest of the others; the rest by default."""
    rest = others or [method for method in own if method not in first]
    return min(own[m] for m in first) - max(own[m] for m in rest)


def _lowest(own: ByMethod) -> float:
    return own["GradCAM++"] - min(value for method, value in own.items() if method != "GradCAM++")


def _published(number: Callable[[ByMethod], float]) -> str:
    values = {name: number(dict(zip(PAPER, row, strict=True))) for name, row in PUBLISHED.items()}
    return "; ".join(f"{name} {value:.2f}" for name, value in values.items())


def _differences() -> str:
    rows = [PUBLISHED[name] for name in ("CIFAR10, ViT-B/16", "CIFAR10, ResNet50")]
    pairs = zip(PAPER, *rows, strict=True)
    return "CIFAR10, ViT-B/16 less ResNet50: " + ", ".join(f"{m} {a - b:.2f}" for m, a, b in pairs)


def _first(own: ByMethod) -> float:
    return _margin(own, ["GradCAM"])


def _runners_up(own: ByMethod) -> float:
    return _margin(own, ["BlurIG", "IG"], ["GradCAM++", "GuidedIG", "LIME", "SmoothGrad"])


CLAIMS = (
    Claim("4.2, Table 1", "GradCAM has the highest COSE of the seven methods", "COSE less the next method's",
          _published(_first), _by_network("cose", _first)),
    Claim("Table 1", "BlurIG and IG follow GradCAM", "the lower of both less the highest of the other four",
          _published(_runners_up), _by_network("cose", _runners_up)),
    Claim("Table 1", "GradCAM++ has the lowest COSE", "COSE less the lowest of the others",
          _published(_lowest), _by_network("cose", _lowest), above=False),
    Claim("4.2, Figure 6", "GradCAM has the highest consistency", "consistency less the next method's",
          "a figure", _by_network("consistency", _first)),
    Claim("4.2", "GradCAM, GradCAM++ and BlurIG are the most consistent methods",
          "the lowest of the three less the highest of the other four", "no number",
          _by_network("consistency", lambda own: _margin(own, ["GradCAM", "GradCAM++", "BlurIG"]))),
    Claim("4.1, Figure 3", "Transformers have a higher COSE than ConvNets for every method",
          "ViT less the mean of both ResNets, by seed", _differences(), _against("cose", list(PAPER))),
    Claim("4.1", "Transformers have a higher sensitivity than ConvNets",
          "ViT less the mean of both ResNets, by seed", "no number", _against("sensitivity", list(PAPER))),
    Claim("4.1", "ConvNets are more consistent than transformers for CAM-based methods",
          "the mean of both ResNets less ViT, by seed", "no number",
          _against("consistency", ["GradCAM", "GradCAM++"], -1)),
    Claim("4.2, Figure 5", "SSIM of GradCAM's maps to the final ones rises with the checkpoint's accuracy",
          "r over checkpoints", "a figure", lambda own: own.correlations(PAPER["GradCAM"])),
    Claim("4.2, Figure 5", "SSIM of LIME's maps to the final ones rises with the checkpoint's accuracy",
          "r over checkpoints", "a figure", lambda own: own.correlations(PAPER["LIME"])),
    Claim("4.3, Figure 8", "Consistency falls with the magnitude of photometric transforms",
          "large less small magnitudes, mean of seven methods", "a figure",
          lambda own: own.change("photometric", "consistency"), above=False),
    Claim("4.3, Figure 8", "Sensitivity rises with the magnitude of photometric transforms",
          "large less small magnitudes, mean of seven methods", "a figure",
          lambda own: own.change("photometric", "sensitivity")),
    Claim("4.3, Figure 8", "Consistency is about the same for all magnitudes of geometric transforms",
          "distance of large and small magnitudes, mean of seven methods", "a figure",
          lambda own: {n: [abs(v) for v in values] for n, values in
                       own.change("geometric", "consistency").items()}, 0.05, False),
)  # fmt: skip
NOT_HERE = (
    ("4.2, Figure 7", "Most methods have their lowest COSE on CUB200", "a figure", "CUB200 is not available"),
)


def write_tables(results: Sequence[Row], out: Path = FOLDER) -> None:
    """Write all CSV files and both figures."""
    ready = [r for r in results if r.get("cose")]
    tables = {
        "cose": [row for r in ready for row in score_rows(r)],
        "checkpoints": [row for r in ready for row in checkpoint_rows(r)],
        "magnitudes": [row for r in ready for row in magnitude_rows(r)],
    }
    tables["claims"] = claim_rows(Measures(tables["cose"], tables["checkpoints"], tables["magnitudes"]))
    write_whole({out / f"{name}.csv": as_csv(rows) for name, rows in tables.items()})
    draw_scores(tables["cose"], out / "cose.png")
    draw_checkpoints(tables["checkpoints"], out / "checkpoints.png")


def _place(result: Row) -> dict[str, Any]:
    return {key: result["training"][key] for key in ("network", "seed")}


def _numbers(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.float64)  # None becomes NaN


def _halves(ssim: np.ndarray, same: np.ndarray) -> tuple[float, float]:
    """Consistency and sensitivity of pairs; NaN without a pair."""
    alike, changed = ssim[same & ~np.isnan(ssim)], ssim[~same & ~np.isnan(ssim)]
    return (
        float(alike.mean()) if len(alike) else math.nan,
        float(1 - changed.mean()) if len(changed) else math.nan,
    )


def score_rows(result: Row) -> Iterator[dict[str, Any]]:
    """COSE by eq. 4 and 7, and by the pairs of inputs, of checkpoints, and of both."""
    own, accuracy = result["cose"], result["epochs"][-1]["accuracy"]
    same = np.array(own["same"], dtype=bool).ravel()
    stayed = np.array([c["same"] for c in own["checkpoints"]], dtype=bool).ravel()
    for method in own["ssim"]:
        inputs = _numbers(own["ssim"][method]).ravel()
        models = _numbers([c["ssim"][method] for c in own["checkpoints"]]).ravel()
        everything, kind = np.concatenate([inputs, models]), np.concatenate([same, stayed])
        pooled = _halves(everything, kind)
        by_inputs, by_models = _halves(inputs, same), _halves(models, stayed)
        yield {
            **_place(result), "accuracy": accuracy, "method": method, "consistency": by_inputs[0],
            "sensitivity": pooled[1], "cose": float(harmonic(by_inputs[0], pooled[1])),
            "cose_inputs": float(harmonic(*by_inputs)), "cose_checkpoints": float(harmonic(*by_models)),
            "cose_pooled": float(harmonic(*pooled)), "same": int(kind.sum()), "changed": int((~kind).sum()),
            "changed_inputs": int((~same).sum()), "undefined": int(np.isnan(everything).sum()),
            "blank": own["blank"][method],
        }  # fmt: skip


def checkpoint_rows(result: Row) -> Iterator[dict[str, Any]]:
    accuracies = {row["epoch"]: row["accuracy"] for row in result["epochs"]}
    for checkpoint in result["cose"]["checkpoints"]:
        for method, values in checkpoint["ssim"].items():
            yield {
                **_place(result), "epoch": checkpoint["epoch"], "accuracy": accuracies[checkpoint["epoch"]],
                "same": float(np.mean(checkpoint["same"])), "method": method,
                "ssim": mean_of(_numbers(values)),
            }  # fmt: skip


def magnitude_rows(result: Row) -> Iterator[dict[str, Any]]:
    """Signed transforms, by kind and by half of their magnitudes."""
    own = result["cose"]
    drawn = draw(0, own["ids"], own["draws"])
    signed = [i for i, name in enumerate(drawn.names) if TRANSFORMS[name].signed]
    names = [drawn.names[i] for i in signed]
    reach = np.array([TRANSFORMS[name].reach for name in names])
    large = np.abs(drawn.magnitudes[:, signed]) / reach > 0.5
    same = np.array(own["same"], dtype=bool)[:, signed]
    kinds = np.array(["geometric" if TRANSFORMS[name].geometric else "photometric" for name in names])
    for method, values in own["ssim"].items():
        ssim = _numbers(values)[:, signed]
        for kind in ("geometric", "photometric"):
            for half, chosen in zip(HALVES, (~large, large), strict=True):
                rows = chosen & (kinds == kind)
                consistency, sensitivity = _halves(ssim[rows], same[rows])
                yield {
                    **_place(result), "method": method, "kind": kind, "half": half, "pairs": int(rows.sum()),
                    "consistency": consistency, "sensitivity": sensitivity,
                }  # fmt: skip


def claim_rows(measures: Measures) -> Table:
    return [
        claim.row("group", group, numbers)
        for claim in CLAIMS for group, numbers in claim.number(measures).items() if numbers
    ]  # fmt: skip


def claims(folder: Path = FOLDER) -> list[dict[str, str]]:
    """Entries of the index of all claims."""
    rows = read_table("claims", folder)
    entries = [claim.entry("cose", rows, _title) for claim in CLAIMS]
    entries += [
        {"paper": "cose", "where": where, "text": text, "published": published, "here": why,
         "answer": UNTESTED}
        for where, text, published, why in NOT_HERE
    ]  # fmt: skip
    return entries


def _title(row: Row) -> str:
    """The name of a row's network, without its data set, or of its method."""
    group = row["group"]
    return NETWORKS[group][0].split(",")[0] if group in NETWORKS else group


def _spread(
    values: Sequence[float], digits: int = 1, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> str:
    """Mean and interval over trainings, cut at the bounds of the number."""
    mean, low, high = t_interval(values)
    if not math.isfinite(mean):
        return "–"
    if not math.isfinite(low):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({max(low, bounds[0]):.{digits}f} to {min(high, bounds[1]):.{digits}f})"


def mean_of(values: Any) -> float:
    """The mean of the numbers that are not NaN; NaN without one."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[~np.isnan(numbers)]
    return float(numbers.mean()) if len(numbers) else math.nan


def page(folder: Path = FOLDER) -> str:
    """The whole page."""
    scores, claim_table = read_table("cose", folder), claims(folder)
    measures = Measures(scores, read_table("checkpoints", folder), read_table("magnitudes", folder))
    networks = [n for n in NETWORKS if any(row["network"] == n for row in scores)]
    counted = {n: len({row["seed"] for row in scores if row["network"] == n}) for n in networks}

    def cells(method: str, column: str, digits: int = 1) -> list[str]:
        own = {n: [float(r[column]) for r in scores if (r["network"], r["method"]) == (n, method)]
               for n in networks}  # fmt: skip
        return [_spread(own[n], digits) for n in networks]

    titles = [NETWORKS[n][0] for n in networks]
    published = {m: [f"{row[i]:.2f}" for row in PUBLISHED.values()] for i, m in enumerate(PAPER.values())}
    none = ["–"] * len(PUBLISHED)
    main = as_table(
        ("method", *titles, *(f"published: {name}" for name in PUBLISHED)),
        ([NAMES[m], *cells(m, "cose"), *published.get(m, none)] for m in METHODS),
    )
    parts = as_table(
        ("method", *(f"{title}: consistency, sensitivity" for title in titles)),
        ([NAMES[m], *(", ".join(pair) for pair in zip(cells(m, "consistency", 2), cells(m, "sensitivity", 2),
                                                      strict=True))] for m in METHODS),
    )  # fmt: skip
    pairs = as_table(
        ("method", *(f"{title}: inputs, checkpoints, pooled" for title in titles)),
        ([NAMES[m], *(", ".join(group) for group in zip(
            *([text.split(" (")[0] for text in cells(m, f"cose_{kind}")]
              for kind in ("inputs", "checkpoints", "pooled")), strict=True))] for m in METHODS),
    )  # fmt: skip
    correlations = {m: measures.correlations(m) for m in METHODS}
    course = as_table(
        ("method", *titles),
        ([NAMES[m], *(_spread(correlations[m].get(n, []), 2, (-1, 1)) for n in networks)] for m in METHODS),
    )
    halves = as_table(
        ("transforms", "measured", *titles),
        ([kind, column, *(_spread(measures.change(kind, column).get(n, []), 2) for n in networks)]
         for kind in ("geometric", "photometric") for column in ("consistency", "sensitivity")),
    )  # fmt: skip
    own_claims = as_table(
        ("where", "claim", "published", "here: mean over trainings (95 %)", "answer"),
        ([c["where"], c["text"], c["published"], c["here"], c["answer"]] for c in claim_table),
    )
    first = [r for r in scores if r["method"] == METHODS[0]]
    networks_table = as_table(
        ("network", "trainings", "accuracy of the test images", "pairs with another prediction"),
        ([NETWORKS[n][0], str(counted[n]),
          _spread([float(r["accuracy"]) for r in first if r["network"] == n], 2),
          ", ".join(f"{r['changed']} of {int(r['changed']) + int(r['same'])}" for r in first
                    if r["network"] == n)] for n in networks),
    )  # fmt: skip
    return Path(__file__).with_name("cose.md").read_text("utf-8").format(
        images=IMAGES, draws=DRAWS, variants=7 * DRAWS + 6, earlier=len(CHECKPOINTS["cifar"]) - 1,
        folder="replication/cose", command=COMMAND,
        networks=networks_table, ranks=_rank_table(measures, networks), order=_order(measures, networks),
        controls=_controls(scores, networks), main=main, parts=parts, pairs=pairs, course=course,
        halves=halves, claims=own_claims,
        settings=", ".join(f"`{method}`" for method in PAPER.values() if "(" in method),
    )  # fmt: skip


def _ranks(measures: Measures) -> dict[str, dict[str, list[float]]]:
    """By network and method, the rank of the method's COSE among the seven in each training; 1 is best."""
    result: dict[str, dict[str, list[float]]] = {}
    for (network, _), own in measures.by_method("cose").items():
        for method, rank in zip(own, rankdata([-value for value in own.values()]), strict=True):
            result.setdefault(network, {}).setdefault(method, []).append(float(rank))
    return result


def _rank_table(measures: Measures, networks: Sequence[str]) -> str:
    ranks = _ranks(measures)
    rows = []
    for i, method in enumerate(PAPER):
        printed = [f"{rankdata([-v for v in row])[i]:.0f}" for row in PUBLISHED.values()]
        rows.append(
            [method, *(_spread(ranks[n].get(method, []), 1, (1, len(PAPER))) for n in networks), *printed]
        )
    head = ("method", *(NETWORKS[n][0] for n in networks), *(f"published: {name}" for name in PUBLISHED))
    return as_table(head, rows)


def _order(measures: Measures, networks: Sequence[str]) -> str:
    """The methods of the highest and lowest mean rank, as a sentence per network."""
    ranks, lines = _ranks(measures), []
    for network in networks:
        means = {method: float(np.mean(own)) for method, own in ranks[network].items()}
        order = sorted(means, key=lambda method: means[method])
        lines.append(f"- {NETWORKS[network][0]}: {', '.join(order)}.")
    return "\n".join(lines)


def _controls(scores: Sequence[Row], networks: Sequence[str]) -> str:
    """Which of the paper's methods have, in the mean over trainings, no higher COSE than a control."""
    lines = []
    for network in networks:
        own = [row for row in scores if row["network"] == network]
        means = {m: mean_of([float(row["cose"]) for row in own if row["method"] == m]) for m in METHODS}
        best = max(CONTROLS, key=lambda control: np.nan_to_num(means[control], nan=-1))
        below = [NAMES[m] for m in PAPER.values() if means[m] <= means[best]]
        text = f"not above it: {', '.join(below)}" if below else "all seven methods are above it"
        lines.append(f"- {NETWORKS[network][0]}: the highest control is {best} ({means[best]:.1f}); {text}.")
    return "\n".join(lines)


def draw_scores(rows: Table, path: Path) -> None:
    """COSE of every method, mean and interval over trainings, a panel per network."""
    from matplotlib.figure import Figure

    networks = [n for n in NETWORKS if any(row["network"] == n for row in rows)]
    figure = Figure((2.6 * len(networks) + 1.4, 3.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(networks), sharey=True))
    methods = list(reversed(METHODS))
    for axes, network in zip(panels, networks, strict=True):
        for i, method in enumerate(methods):
            values = [r["cose"] for r in rows if (r["network"], r["method"]) == (network, method)]
            mean, low, high = t_interval(values)
            colour = "grey" if method in CONTROLS else "#4477aa"
            if math.isfinite(low):
                axes.plot([max(low, 0), min(high, 100)], [i, i], color=colour, lw=2)
            axes.plot(mean, i, "o", color=colour, ms=4)
        axes.set_title(NETWORKS[network][0], fontsize=9)
        axes.set_xlim(0, 100)
        axes.set_xlabel("COSE, %")
    panels[0].set_yticks(range(len(methods)), [NAMES[m] for m in methods], fontsize=8)
    figure.savefig(path, dpi=110)


def draw_checkpoints(rows: Table, path: Path) -> None:
    """SSIM to the final maps against accuracy, means over trainings at each checkpoint."""
    from matplotlib.figure import Figure

    networks = [n for n in NETWORKS if any(row["network"] == n for row in rows)]
    figure = Figure((2.4 * len(networks) + 1.8, 3.4), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(networks), sharey=True))
    for axes, network in zip(panels, networks, strict=True):
        for name, method in PAPER.items():
            own = [r for r in rows if (r["network"], r["method"]) == (network, method)]
            points = [
                [float(np.mean([r[key] for r in own if r["epoch"] == epoch])) for key in ("accuracy", "ssim")]
                for epoch in sorted({r["epoch"] for r in own})
            ]
            axes.plot(*zip(*points, strict=True), "o-", ms=3, lw=1, label=name)
        axes.set_title(NETWORKS[network][0], fontsize=9)
        axes.set_xlabel("accuracy of the checkpoint")
    panels[0].set_ylabel("SSIM to the final maps")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=110)
