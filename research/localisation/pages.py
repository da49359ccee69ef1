"""CSV files of the localisation study and its page, docs/results/localise.md.

    photographs.csv  one row per network and photograph: labels, predictions, overlap of Grad-CAM and LIME
    scores.csv       one row per network, photograph and method
    lime.csv         one row per network, photograph and form of LIME
    claims.csv       one row per claim and network, computed from these
    work.csv         one row per network: units, inputs and seconds

`write_tables` needs the joined results of `measure`, everything else only these files.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from heatproof.disk import write_whole
from heatproof.report.tables import Value
from heatproof.studies.common import average
from heatproof.studies.localise.results import THESIS
from research.localisation.claims import (
    CLAIMS,
    METRICS,
    TITLES,
    Network,
    apart,
    read_networks,
)
from research.localisation.measure import BUDGETS, CONTROLS, METHODS, NETWORKS, VARIANTS
from research.replication.claims import HOLDS, MIXED, NOT, UNTESTED, answer, overall

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FOLDER = RESULTS / "replication" / "localise"
VERSION = "0.3.0.dev"
FULL_NAMES = dict(
    zip(NETWORKS, ("EfficientNet-Lite0", "ResNet-50", "SqueezeNet 1.1", "MobileNetV2"), strict=True)
)
COMMAND = """python -m research.localisation prepare --data DATA --out PACKED1 --network lite0 \\
        --network resnet50
    python -m research.localisation prepare --data DATA --out PACKED2 --network squeezenet --network mobilenet
    python -m research.localisation measure --data PACKED1 --out OUT1 --device cuda --processes 4 \\
        --network lite0 --network resnet50
    python -m research.localisation measure --data PACKED2 --out OUT2 --device cuda --processes 4 \\
        --network squeezenet --network mobilenet
    python -m research.localisation tables OUT1/results.json.gz OUT2/results.json.gz
    python -m research.localisation pages"""
LINK = ": [localisation](localise.md)"
GROUPS = ("living things", "not living", "artefacts")
Row = Mapping[str, Any]


def write_tables(results: Sequence[Row], out: Path = FOLDER) -> None:
    """Write all CSV files."""
    order = sorted(results, key=lambda r: (NETWORKS.index(r["network"]), r["name"]))
    photographs, scores, lime = [], [], []
    work: dict[str, dict[str, Any]] = {}
    for result in order:
        head = {"network": result["network"]}
        filtered = {"filtered": int(result["part"] == "filtered")}
        photographs += [
            head | {"image": row["image"]} | filtered | row for row in result.get("photographs", ())
        ]
        scores += [head | row for row in result.get("scores", ())]
        lime += [head | row for row in result.get("lime", ())]
        own = work.setdefault(result["network"], head | {"units": 0, "inputs": 0, "seconds": 0.0})
        own |= {"units": own["units"] + 1, "inputs": own["inputs"] + result["inputs"],
                "seconds": round(own["seconds"] + result["seconds"], 1)}  # fmt: skip
    tables = {"photographs": photographs, "scores": scores, "lime": lime, "work": list(work.values())}
    write_whole({out / f"{name}.csv": as_csv(rows) for name, rows in tables.items() if rows})
    write_whole({out / "claims.csv": as_csv(claim_rows(read_networks(out)))})


def as_csv(rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return file.getvalue()


def claim_rows(networks: Sequence[Network]) -> list[dict[str, Any]]:
    """A row per claim and network."""
    rows = []
    for claim in CLAIMS:
        for network in networks:
            value = claim.number(network)
            low, high = value.interval or (-math.inf, math.inf)
            own = answer(low, high, claim.limit, True) if value.n else UNTESTED
            rows.append({"claim": claim.text, "network": network.name, "photographs": value.n,
                         "number": value.value, "low": low, "high": high, "limit": claim.limit,
                         "answer": own})  # fmt: skip
    return rows


def read_claims(folder: Path = FOLDER) -> list[dict[str, str]]:
    with (folder / "claims.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def claims(folder: Path = FOLDER) -> list[dict[str, str]]:
    """The claims for docs/results/index.md."""
    rows, entries = read_claims(folder), []
    for claim in CLAIMS:
        own = [row for row in rows if row["claim"] == claim.text]
        numbers = "; ".join(f"{row['network']} {_claim_number(row)}" for row in own)
        limit = f", above {claim.limit:g}" if claim.limit else ""
        entries.append({
            "paper": "thesis", "where": claim.where, "text": f"{claim.text} ({claim.measured}{limit})",
            "published": claim.published, "here": f"{numbers}{LINK}",
            "answer": overall([row["answer"] for row in own]),
        })  # fmt: skip
    return entries


def _claim_number(row: Mapping[str, str]) -> str:
    low, high = float(row["low"]), float(row["high"])
    interval = f" ({low:.3f} to {high:.3f})" if math.isfinite(low + high) else ""
    return f"{float(row['number']):.3f}{interval}"


def write_page(folder: Path = FOLDER, page: Path = RESULTS / "localise.md") -> None:
    """Write the page and its figures."""
    networks = read_networks(folder)
    draw_differences(networks, folder / "differences.png")
    draw_budgets(networks, folder / "budgets.png")
    write_whole({page: localise_page(folder)})


@lru_cache(maxsize=2)
def localise_page(folder: Path = FOLDER) -> str:
    networks = read_networks(folder)
    every = {image for network in networks for image in network.photographs}
    filtered = {image for network in networks for image in network.filtered}
    labels = {network.label(image) for network in networks for image in network.filtered}
    with (folder / "work.csv").open(encoding="utf-8", newline="") as file:
        seconds = sum(float(row["seconds"]) for row in csv.DictReader(file))
    fields = {
        "summary": _summary(folder), "photographs": len(every), "count": len(networks),
        "filtered": len(filtered), "classes": len(labels),
        "networks": _network_table(networks), "claims": _claim_table(folder),
        "means": "\n\n".join(f"**{FULL_NAMES[n.name]}**\n\n{_mean_table(n)}" for n in networks),
        "controls": _control_table(networks), "groups": _group_table(networks), "living": _living(networks),
        "budgets": _budget_table(networks), "lime": _lime_table(networks), "answers": _answer_table(networks),
        "version": VERSION, "seconds": f"{seconds:,.0f}", "command": COMMAND,
    }  # fmt: skip
    return Path(__file__).with_name("page.md").read_text("utf-8").format(**fields)


def as_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: Value, sign: str = "") -> str:
    """A number with its interval."""
    if math.isnan(value.value):
        return ""
    interval = f" ({value.interval[0]:{sign}.2f} to {value.interval[1]:{sign}.2f})" if value.interval else ""
    return f"{value.value:{sign}.3f}{interval}"


def _summary(folder: Path) -> str:
    """Number of claims that hold, and of the five means on which each method is significantly better."""
    answers = [entry["answer"] for entry in claims(folder)]
    counts = ", ".join(f"{a} {answers.count(a)}" for a in (HOLDS, NOT, MIXED, UNTESTED) if a in answers)
    rows = read_claims(folder)
    five = [claim.text for claim in CLAIMS if claim.where.startswith("Table")]
    per_network = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row["answer"] for row in rows if row["network"] == network and row["claim"] in five]
        per_network.append(f"{FULL_NAMES[network]} {own.count(HOLDS)} (LIME on {own.count(NOT)})")
    return (
        f"**{len(answers)} claims: {counts}.** In the thesis Grad-CAM is better than LIME on all five "
        f"means. Means on which it is significantly better here: {', '.join(per_network)}."
    )


def _network_table(networks: Sequence[Network]) -> str:
    rows = []
    for network in networks:
        right = {image: float(network.right(image)) for image in network.filtered}
        probability = {i: network.photographs[i]["probability"] for i in network.filtered}
        change = max(row["half_precision"] for row in network.photographs.values())
        rows.append([
            FULL_NAMES[network.name], str(len(network.photographs)), str(len(network.filtered)),
            _shown(network.mean(right)), _shown(network.mean(probability)), f"{change:.3f}",
        ])  # fmt: skip
    head = ("network", "photographs", "after the filter", "recall", "probability of the true class",
            "half precision")  # fmt: skip
    return as_table(head, [*rows, ["ResNet-18, thesis", "", "", "0.793", "", ""]])


def _claim_table(folder: Path) -> str:
    entries = claims(folder)
    rows = [
        [e["where"], e["text"], e["published"], e["here"].removesuffix(LINK), e["answer"]]
        for e in entries
    ]  # fmt: skip
    return as_table(("where", "claim", "published", "here (95 % over photographs)", "answer"), rows)


def _mean_table(network: Network) -> str:
    methods = [method for method in METHODS if method in network.scores]
    values = {(m, k): network.mean(network.column(m, k)) for m in methods for k in METRICS}
    real = [method for method in methods if method not in CONTROLS]
    best = {k: (min if k == "deletion" else max)(real, key=lambda m: values[m, k].value) for k in METRICS}
    rows = []
    for method in methods:
        cells = [f"**{_shown(values[method, k])}**" if best[k] == method else _shown(values[method, k])
                 for k in METRICS]  # fmt: skip
        rows.append([f"*{method}*" if method in CONTROLS else method, *cells])
    for k, name in enumerate(("Grad-CAM, thesis", "LIME, thesis")):
        rows.append([name, *(f"{THESIS[m][k]:.3f}" if m in THESIS else "" for m in METRICS)])
    return as_table(("method", *TITLES.values()), rows)


def _control_table(networks: Sequence[Network]) -> str:
    rows = []
    for metric in METRICS:
        cells = []
        for network in networks:
            sign = -1 if metric == "deletion" else 1
            means = {c: network.mean(network.column(c, metric)).value for c in CONTROLS}
            best = max(CONTROLS, key=lambda c: sign * means[c])
            below = [
                m for m in METHODS if m not in CONTROLS and m in network.scores
                and (network.mean(network.ahead(m, best, metric)).interval or (0, 0))[0] <= 0
            ]  # fmt: skip
            cells.append(f"{best} {means[best]:.3f}: {', '.join(below) or 'none'}")
        rows.append([TITLES[metric], *cells])
    return as_table(("", *(FULL_NAMES[n.name] for n in networks)), rows)


def _group_table(networks: Sequence[Network]) -> str:
    rows = []
    for network in networks:
        groups: dict[str, list[int]] = {"after the filter": network.filtered}
        groups |= {group: network.of_group(group) for group in GROUPS}
        groups |= {name: [i for i in network.filtered if network.right(i) == side]
                   for name, side in (("right", True), ("wrong", False))}  # fmt: skip
        groups["all photographs"] = list(network.photographs)
        for group, images in groups.items():
            values = (network.mean(network.ahead("gradcam", "lime", metric, images)) for metric in METRICS)
            rows.append(
                [FULL_NAMES[network.name], group, str(len(images)), *(_shown(v, "+") for v in values)]
            )
    return as_table(("network", "group", "photographs", *TITLES.values()), rows)


def _living(networks: Sequence[Network]) -> str:
    parts = []
    for network in networks:
        counts = []
        for metric in ("box_iou", "mask_iou"):
            by_class = network.by_class(
                network.ahead("lime", "gradcam", metric, network.of_group("living things"))
            )
            higher = sum(average(values) > 0 for values in by_class.values())
            counts.append(f"{higher} of {len(by_class)} ({TITLES[metric]})")
        parts.append(f"{FULL_NAMES[network.name]} {', '.join(counts)}")
    return "; ".join([*parts, "thesis 11 of 17 (box IoU), 0 of 17 (mask IoU)"])


def _at_budget(network: Network, method: str, budget: float) -> float:
    return network.mean(network.column(method, f"mask_iou_{round(100 * budget)}")).value


def _budget_table(networks: Sequence[Network]) -> str:
    rows = [
        [FULL_NAMES[n.name], method, *(f"{_at_budget(n, method, budget):.3f}" for budget in BUDGETS)]
        for n in networks for method in METHODS if method in n.scores
    ]  # fmt: skip
    return as_table(("network", "method", *(f"{budget:.0%}" for budget in BUDGETS)), rows)


def _lime_table(networks: Sequence[Network]) -> str:
    keys = {"mask_iou": "mask IoU", "box_iou": "box IoU", "inside": "inside", "pointing": "pointing",
            "overlap": "overlap of seeds", "spearman": "rank correlation of seeds"}  # fmt: skip
    rows = [
        [FULL_NAMES[n.name], str(form[0]), f"{form[1]:,}", str(len(n.lime[form])),
         *(_shown(n.mean(n.variant(key, form))) for key in keys)]
        for n in networks for form in VARIANTS if form in n.lime
    ]  # fmt: skip
    return as_table(("network", "segments", "samples", "photographs", *keys.values()), rows)


def _answer_table(networks: Sequence[Network]) -> str:
    rows = []
    for network in networks:
        sides = [[i for i in network.filtered if network.right(i) == side] for side in (True, False)]
        for method in ("gradcam", "lime"):
            for metric in ("mask_iou", "inside", "pointing", "dispersion"):
                values = [list(network.column(method, metric, images).values()) for images in sides]
                rows.append([
                    FULL_NAMES[network.name], method, TITLES.get(metric, metric),
                    *(f"{average(own):.3f} ({len(own)})" for own in values), _shown(apart(*values), "+"),
                ])  # fmt: skip
    return as_table(("network", "method", "", "right (n)", "wrong (n)", "difference"), rows)


def draw_differences(networks: Sequence[Network], path: Path) -> None:
    """Grad-CAM less LIME with intervals, beside the thesis's difference."""
    from matplotlib.figure import Figure

    figure = Figure((9, 3.2), layout="constrained")
    axes = figure.subplots(1, len(THESIS), sharey=True)
    names = ["ResNet-18, thesis", *(FULL_NAMES[network.name] for network in networks)]
    for ax, metric in zip(axes, THESIS, strict=True):
        sign = -1 if metric == "deletion" else 1
        ax.plot(sign * (THESIS[metric][0] - THESIS[metric][1]), 0, "D", color="grey")
        for i, network in enumerate(networks, 1):
            value = network.mean(network.ahead("gradcam", "lime", metric))
            ax.plot(value.interval or (value.value,) * 2, [i, i], color="#4477aa", lw=2)
            ax.plot(value.value, i, "o", color="#4477aa")
        ax.axvline(0, color="grey", ls=":")
        ax.set_title(TITLES[metric] + (", lower" if metric == "deletion" else ""), fontsize=9)
        ax.tick_params(labelsize=8)
        ax.invert_yaxis()
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    axes[0].set_yticks(range(len(names)), names)
    figure.supxlabel("Grad-CAM better than LIME by (95 % over photographs)", fontsize=9)
    figure.savefig(path, dpi=110)


def draw_budgets(networks: Sequence[Network], path: Path) -> None:
    """Mask IoU against the budget, a panel per network."""
    from matplotlib.figure import Figure

    figure = Figure((9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    for ax, network in zip(panels, networks, strict=True):
        for i, method in enumerate(m for m in METHODS if m in network.scores):
            look: dict[str, Any] = {"color": "black" if method == "rise" else f"C{i}"}
            if method in CONTROLS:
                look = {"color": "grey", "ls": ("--", ":", "-.")[CONTROLS.index(method)], "lw": 1.2}
            values = [_at_budget(network, method, budget) for budget in BUDGETS]
            ax.plot([100 * b for b in BUDGETS], values, label=method, **look)
        ax.set_title(FULL_NAMES[network.name], fontsize=9)
        ax.set_xlabel("pixels, %", fontsize=8)
        ax.tick_params(labelsize=8)
    panels[0].set_ylabel("mask IoU", fontsize=8)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", fontsize=7)
    figure.savefig(path, dpi=110)
