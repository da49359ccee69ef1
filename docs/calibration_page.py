"""Rewrites the tables of docs/results/calibration.md and its figure from the CSV files beside it.

python docs/calibration_page.py
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from heatproof.metrics.stats import wins
from heatproof.studies.calibrate.thresholds import SINCE, Share
from heatproof.verdict.follow import calibration

HERE = Path(__file__).parent / "results"
TESTS = ("insertion", "deletion", "untrained_excess", "untrained_entropy", "fragility", "agreement")
WORDS = {
    "insertion": "insertion above `random`", "deletion": "deletion above `random`",
    "untrained_excess": "unlike an untrained network's map, more than two of those are",
    "untrained_entropy": "rise of entropy under random weights", "fragility": "stable under noise",
    "agreement": "agreement with the other methods", "weights": "specificity: above its untrained maps",
    "place": "specificity: above itself turned", "both": "specificity: the smaller of the two (votes)",
}  # fmt: skip


def rows(name: str) -> list[dict[str, str]]:
    with (HERE / "calibration" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def columns() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By test: its means for methods that follow, and for controls."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name, tests in (("judged.csv", ("weights", "place")), ("tests.csv", TESTS)):
        for row in rows(name):
            control = row["control"] == "True"
            if not control and float(row["contrast_low"]) <= 0.5:
                continue
            values = {test: float(row[test]) for test in tests if row[test] not in ("", "nan")}
            if "untrained_excess" in values:
                values["untrained_excess"] *= -1  # less alike is better
            if len(values) == 2 and "place" in values:
                values["both"] = min(values["weights"], values["place"])
            for test, value in values.items():
                found.setdefault(test, ([], []))[control].append(value)
    return {test: (np.array(a), np.array(b)) for test, (a, b) in found.items()}


def area(found: tuple[np.ndarray, np.ndarray]) -> float:
    return float(wins(*found).mean())


def draw(found: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    figure, axes = plt.subplots(figsize=(5.4, 5.0))
    for test in sorted(found, key=lambda t: -area(found[t])):
        following, controls = found[test]
        cuts = np.sort(np.concatenate([following, controls, [-np.inf, np.inf]]))[::-1]
        x, y = ([float((lot >= cut).mean()) for cut in cuts] for lot in (controls, following))
        style = "-" if test in ("both", "weights", "place") else "--"
        axes.plot(
            x,
            y,
            style,
            lw=2 if test == "both" else 1.2,
            label=f"{WORDS[test]} ({area(found[test]):.2f})",
        )
    axes.plot([0, 1], [0, 1], ":", color="grey", lw=1)
    axes.set_xlabel("controls above the cut")
    axes.set_ylabel("methods that follow, above the cut")
    axes.legend(fontsize=6.5, loc="lower right")
    figure.tight_layout()
    figure.savefig(HERE / "calibration" / "roc.png", dpi=150)


def tables(found: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, str]:
    known = calibration()
    lots = {**known["rates_by_lot"], "**all that chose nothing**": known["rates"]}
    lines = ["| pairs | networks | false alarm | miss | undecided |", "|---|---|---|---|---|"]
    for lot, rates in lots.items():
        cells = [Share(**rates[kind]).text for kind in ("false_alarm", "miss", "undecided")]
        lines.append(f"| {lot} | {rates['networks']} | {' | '.join(cells)} |")
    tests = ["| test | area under the curve | methods that follow | controls |", "|---|---|---|---|"]
    for test in sorted(found, key=lambda t: -area(found[t])):
        a, b = found[test]
        tests.append(f"| {WORDS[test]} | {area(found[test]):.3f} | {len(a)} | {len(b)} |")
    judged = rows("judged.csv")
    controls = ["| control | does not follow | undecided | follows |", "|---|---|---|---|"]
    for control in dict.fromkeys(row["method"] for row in judged if row["control"] == "True"):
        said = [row["answer"] for row in judged if row["method"] == control]
        controls.append(
            f"| {control} | {said.count('no')} | {said.count('undecided')} | {said.count('yes')} |"
        )
    pairs = ["| pictures | network | tokens |", "|---|---|---|"]
    kinds: dict[tuple[str, str], list[str]] = {}
    for row in judged:
        lot = kinds.setdefault((row["data"], row["network"]), [])
        since = "*" if row["lot"] == SINCE else ""
        if (name := f"{row['token']} {float(row['strength']):.0%}{since}") not in lot:
            lot.append(name)
    pairs += [
        f"| {data} | {network} | {', '.join(sorted(lot))} |" for (data, network), lot in sorted(kinds.items())
    ]
    looks: dict[str, dict[str, str]] = {}
    for row in rows("objects.csv"):
        looks.setdefault(row["pair"], {"n": row["n"]})[row["network"]] = row["above_chance"]
    objects = ["| pair | planted | clean | pictures |", "|---|---|---|---|"]
    objects += [f"| {pair} | {of['planted']} | {of['clean']} | {of['n']} |" for pair, of in looks.items()]
    named = {"objects": objects, "rates": lines, "tests": tests, "controls": controls, "pairs": pairs}
    return {name: "\n".join(lot) for name, lot in named.items()}


def main() -> None:
    found = columns()
    draw(found)
    page = HERE / "calibration.md"
    text = page.read_text()
    for name, table in tables(found).items():
        text = re.sub(
            rf"<!-- {name} -->.*?<!-- end -->", f"<!-- {name} -->\n{table}\n<!-- end -->", text, flags=re.S
        )
    page.write_text(text)


if __name__ == "__main__":
    main()
