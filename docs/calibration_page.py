"""Rewrites the tables of docs/results/calibration.md and its figure from the CSV files beside it.

python docs/calibration_page.py
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from calibration_words import GROUP_NAMES, HERE, UNSEEN, UNUSED, rates_by_method, rows, sentences
from matplotlib import pyplot as plt

from heatproof.metrics.results import wins
from heatproof.verdict.follow import calibration
from research.calibration.sequential import AUDIT, ERRORS
from research.calibration.thresholds import OTHER, Share

TESTS = ("insertion", "deletion", "untrained_excess", "untrained_entropy", "fragility", "agreement")
WORDS = {
    "insertion": "insertion above `random`", "deletion": "deletion above `random`",
    "untrained_excess": "less similar to a map under random weights than two such maps are",
    "untrained_entropy": "increase of entropy under random weights", "fragility": "stability under noise",
    "agreement": "agreement with the other methods",
    "weights": "specificity: above the maps under random weights",
    "place": "specificity: above the rotated map", "both": "specificity: the smaller of the two (votes)",
}  # fmt: skip


def columns() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By test: its means for methods that follow, and for controls."""
    by_test: dict[str, tuple[list[float], list[float]]] = {}
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
                by_test.setdefault(test, ([], []))[control].append(value)
    return {test: (np.array(a), np.array(b)) for test, (a, b) in by_test.items()}


def area(pair: tuple[np.ndarray, np.ndarray]) -> float:
    return float(wins(*pair).mean())


def draw(values: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    figure, axes = plt.subplots(figsize=(5.4, 5.0))
    for test in sorted(values, key=lambda t: -area(values[t])):
        following, controls = values[test]
        cuts = np.sort(np.concatenate([following, controls, [-np.inf, np.inf]]))[::-1]
        x, y = ([float((group >= cut).mean()) for cut in cuts] for group in (controls, following))
        style = "-" if test in ("both", "weights", "place") else "--"
        axes.plot(
            x,
            y,
            style,
            lw=2 if test == "both" else 1.2,
            label=f"{WORDS[test]} ({area(values[test]):.2f})",
        )
    axes.plot([0, 1], [0, 1], ":", color="grey", lw=1)
    axes.set_xlabel("control maps above the threshold")
    axes.set_ylabel("methods that follow, above the threshold")
    axes.legend(fontsize=6.5, loc="lower right")
    figure.tight_layout()
    figure.savefig(HERE / "calibration" / "roc.png", dpi=150)


def tables(values: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, str]:
    known = calibration()
    groups = {**known["rates_by_group"], UNUSED: known["rates"], UNSEEN: unseen()}
    lines = ["| pairs | networks | false alarm | miss | undecided |", "|---|---|---|---|---|"]
    for group, rates in groups.items():
        lines.append(
            f"| {GROUP_NAMES.get(group, group)} | {rates['networks']} | {' | '.join(shares(rates))} |"
        )
    tests = ["| test | area under the curve | methods that follow | control maps |", "|---|---|---|---|"]
    for test in sorted(values, key=lambda t: -area(values[t])):
        a, b = values[test]
        tests.append(f"| {WORDS[test]} | {area(values[test]):.3f} | {len(a)} | {len(b)} |")
    judged = rows("judged.csv")
    controls = ["| control map | does not follow | undecided | follows |", "|---|---|---|---|"]
    for control in dict.fromkeys(row["method"] for row in judged if row["control"] == "True"):
        answers = [row["answer"] for row in judged if row["method"] == control]
        controls.append(
            f"| {control} | {answers.count('no')} | {answers.count('undecided')} | {answers.count('yes')} |"
        )
    pairs = ["| images | network | tokens |", "|---|---|---|"]
    kinds: dict[tuple[str, str], list[str]] = {}
    for row in judged:
        tokens = kinds.setdefault((row["data"], row["network"]), [])
        if (name := f"{row['token']} {float(row['strength']):.0%}") not in tokens:
            tokens.append(name)
    pairs += [
        f"| {data} | {network} | {', '.join(sorted(members))} |"
        for (data, network), members in sorted(kinds.items())
    ]
    named = {"rates": lines, "tests": tests, "controls": controls, "pairs": pairs}
    summaries = ["| compared with | networks | false alarm | miss | undecided |", "|---|---|---|---|---|"]
    for name, rates in known["rates_by_other_summaries"].items():
        summaries.append(
            f"| the {name} of its maps under random weights | {rates['networks']} | "
            f"{' | '.join(shares(rates))} |"
        )
    methods = ["| method | false alarm | undecided |", "|---|---|---|"]
    for method, own in rates_by_method().items():
        methods.append(f"| {method} | {own.false_alarm.text} | {own.undecided.text} |")
    tried = rows("sequential.csv")
    looks = [f"| {' | '.join(tried[0])} |", f"|{'---|' * len(tried[0])}"]
    looks += [f"| {' | '.join(row.values())} |" for row in tried if row["looks"] in ("one look", AUDIT)]
    cells = [[row["methods"], row["looks"], *(row[kind] for kind in ERRORS)] for row in rows("sizes.csv")]
    sizes = ["| methods | test | false alarm | miss | undecided |", "|---|---|---|---|---|"]
    sizes += [f"| {' | '.join(own)} |" for own in cells]
    named |= {
        "sequential": looks,
        "sizes": sizes,
        "methods": methods,
        "summaries": summaries,
        "discs": discs(),
        "uses": uses_table(),
    }
    return {name: "\n".join(lines_of) for name, lines_of in named.items()}


def unseen() -> dict[str, Any]:
    """Rates of the other half, without pairs that were looked at before the rule was chosen."""
    known = {row["pair"] for row in rows("looked_at.csv")}
    left = [row for row in rows("judged.csv") if row["group"] == OTHER and pair_of(row) not in known]
    methods, controls = ([r for r in left if r["control"] == flag] for flag in ("False", "True"))
    following = [row for row in methods if float(row["contrast_low"]) > 0.5]
    counted = {
        "false_alarm": Share.of(sum(r["answer"] == "no" for r in following), len(following)),
        "miss": Share.of(sum(r["answer"] == "yes" for r in controls), len(controls)),
        "undecided": Share.of(sum(r["answer"] == "undecided" for r in methods), len(methods)),
    }
    networks = len({(pair_of(row), row["network_of_pair"]) for row in left})
    return {"networks": networks} | {kind: asdict(share) for kind, share in counted.items()}


def pair_of(row: dict[str, str]) -> str:
    strength = f"{float(row['strength']):.0%}".rstrip("%")
    return f"{row['data']}-{row['network']}-{row['token']}-{strength}-{row['seed']}"


def shares(rates: dict[str, Any]) -> list[str]:
    return [Share(**rates[kind]).text for kind in ("false_alarm", "miss", "undecided")]


def discs() -> list[str]:
    """Grad-CAM and the control maps on twenty small pairs: the contrast test, and the verdict."""
    lines = ["| maps | contrast AUC, range | does not follow | undecided | follows |"]
    lines.append("|---|---|---|---|---|")
    judged = rows("controls.csv")
    for method in dict.fromkeys(row["method"] for row in judged):
        own = [row for row in judged if row["method"] == method]
        answers, areas = [row["answer"] for row in own], [float(row["contrast_auc"]) for row in own]
        counts = " | ".join(str(answers.count(answer)) for answer in ("no", "undecided", "yes"))
        lines.append(f"| {method} | {min(areas):.2f} to {max(areas):.2f} | {counts} |")
    return lines


def uses_table() -> list[str]:
    """Error rates of the second answer by kind of cue, on the pairs that were not used to choose the rule."""
    known = calibration()["network"]["rates"]
    lines = [
        "| kind of cue | uses the cue, judged to use the object | ignores it, judged to use something else | "
        "shortcut stated | undecided |"
    ]
    lines.append("|---" * 5 + "|")
    for kind, own in known.items():
        if isinstance(own, dict):
            kinds = ("called_fine", "accused", "stated", "undecided")
            cells = [Share(**own[name]).text if own[name]["n"] else "–" for name in kinds]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    values = columns()
    draw(values)
    page = HERE / "calibration.md"
    text = page.read_text()
    blocks = tables(values) | {name: wrapped(sentence) for name, sentence in sentences().items()}
    for name, table in blocks.items():
        text = re.sub(
            rf"<!-- {name} -->.*?<!-- end -->", f"<!-- {name} -->\n{table}\n<!-- end -->", text, flags=re.S
        )
    page.write_text(text)


if __name__ == "__main__":
    main()
