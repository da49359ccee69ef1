"""docs/results/calibration.md"""

from __future__ import annotations

import json
import sys

from claims import ROOT, Page

sys.path.insert(0, str(ROOT / "docs"))
from calibration_page import columns, rows, tables


def calibration() -> Page:
    page = Page("docs/results/calibration.md")
    made = tables(columns())
    for name in ("rates", "controls", "tests", "pairs", "objects"):
        lines = made[name].splitlines()[2:]
        page.tables.append([[cell.strip() for cell in line.strip("|").split("|")] for line in lines])
    known = json.loads((ROOT / "src/heatproof/verdict/rates.json").read_text(encoding="utf-8"))
    rates, judged = known["rates"], rows("judged.csv")
    pairs = {(row["data"], row["network"], row["token"], row["seed"]) for row in judged}
    page.says("20 pairs of networks (40 networks)", len(pairs) == 20 == known["population"]["pairs"])
    page.says("This is a first calibration, and smaller than it shall be", len(pairs) < 30)
    wrong = round(rates["false_alarm"]["share"] * rates["false_alarm"]["n"])
    reached = rates["miss"]["share"] <= 0.1 and rates["undecided"]["share"] <= 0.25
    page.says(
        "the first was missed by one method of 170, the others were reached",
        rates["false_alarm"]["n"] == 170 and wrong - 1 <= 0.05 * 170 < wrong and reached,
    )
    page.says("On all 40 networks", 2 * len(pairs) == 40)
    never = {row["method"] for row in judged if row["control"] == "True"}
    never -= {row["method"] for row in judged if row["answer"] == "yes"}
    page.says(
        "random, edges, centre and noise were never said to follow",
        {"random", "edges", "centre", "smooth noise"} <= never,
    )
    earlier = {row["pair"] for row in rows("tests.csv")}
    page.says("come from the 20 pairs above, the others from an earlier run of 38 pairs", len(earlier) == 38)
    beaten = {
        m: [float(r["insertion"]) for r in rows("tests.csv") if r["method"] == m] for m in ("edges", "centre")
    }
    page.says(
        "an edge detector or a dot in the middle beats noise too",
        all(sum(values) / len(values) > 0 for values in beaten.values()),
    )
    looks = {network: [float(r["above_chance"]) for r in rows("objects.csv") if r["network"] == network]
             for network in ("planted", "clean")}  # fmt: skip
    above = [sum(value > 0.1 for value in looks[network]) for network in ("planted", "clean")]
    page.says("The limit of the verdict, 0.1: above it lie 2 of 14 planted and 13 of 14 clean networks",
              above == [2, 13] and len(looks["planted"]) == 14)  # fmt: skip
    page.states(
        "lies above 1/2", "where 30 pairs are wanted", "Clopper-Pearson, 95 %",
        "at most 5 % false alarms, 10 % misses, 25 % undecided at 100 pictures",
        "smoothgrad (8 samples), integrated-gradients (8 steps). 100 held-out pictures",
        "fewer than 90 % of A's answers, or more than 10 % of B's",
        "pictures above 224 pixels", "fewer than 100 pictures; maps that a run has rounded",
    )  # fmt: skip
    return page
