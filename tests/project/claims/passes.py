"""docs/results/passes.md: what `python -m benchmarks --section passes` measured."""

from __future__ import annotations

import csv
import statistics
from itertools import groupby

from scipy.stats import spearmanr

from claims import RESULTS, WORDS, Page, Row, Rows, percent

FOLDER = RESULTS / "passes"
KINDS = ("insertion", "deletion")
NETWORKS = {"resnet20": "ResNet-20", "squeezenet1_1": "SqueezeNet 1.1"}


def lines(name: str) -> list[Row]:
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cases() -> list[tuple[Row, Row, Row, Row]]:
    """By network, image and sampling method: published, full; published, intermediate, current, a quarter."""
    drawn = [row for row in lines("maps") if row["method"] in ("rise", "lime")]
    groups = groupby(drawn, key=lambda row: (row["network"], row["picture"], row["method"]))
    return [tuple(rows) for _, rows in groups]  # type: ignore[misc]


def count(n: int) -> str:
    return WORDS[n] if n else "none"


def rank(row: Row) -> str:
    return f"{float(row['rank']):.3f}"


def both(row: Row) -> str:
    return f"{rank(row)} ({float(row['rmse']):.3f})"


def drawn_maps() -> Rows:
    return [
        [NETWORKS[old["network"]], old["picture"], old["method"], *map(both, (old, short, between, new))]
        for old, short, between, new in cases()
    ]


def steady() -> Rows:
    return [
        [row["method"], row["inputs"], row["longer"], rank(row), f"{float(row['rmse']):.3f}"]
        for row in lines("maps")
        if row["method"] not in ("rise", "lime")
    ]


def checks() -> dict[str, tuple[int, float, float]]:
    """By check: pairs of scores, their rank correlation, the mean difference."""
    results = {}
    for name in dict.fromkeys(row["check"] for row in lines("reduced")):
        rows = [row for row in lines("reduced") if row["check"] == name and row["full"] not in ("", "nan")]
        full, enough = ([float(row[side]) for row in rows] for side in ("full", "enough"))
        gap = statistics.mean(b - a for a, b in zip(full, enough, strict=True))
        results[name] = len(rows), float(spearmanr(full, enough).statistic), gap
    return results


def walks() -> Rows:
    table_rows = []
    for network in dict.fromkeys(row["network"] for row in lines("curves")):
        rows = [row for row in lines("curves") if row["network"] == network]
        off = {k: [float(row[f"{k}_walked"]) - float(row[k]) for row in rows] for k in KINDS}
        size = sorted(abs(e) for side in off.values() for e in side)
        points = statistics.mean(int(row["points"]) - 4 for row in rows)
        table_rows.append(
            [NETWORKS[network], str(len(size)), f"{points:.0f} of 198", f"{statistics.mean(size):.4f}",
             f"{size[int(0.95 * len(size))]:.4f}", f"{size[-1]:.4f}",
             *(f"{statistics.mean(off[k]):+.4f}" for k in KINDS), "{} of {}".format(*same_side(rows))]
        )  # fmt: skip
    return table_rows


def same_side(rows: list[Row]) -> tuple[int, int]:
    """Comparisons with random and edges with the same result, and all of them."""
    of = {(row["picture"], row["method"]): row for row in rows}
    alike = [
        (float(row[k]) > float(of[picture, floor][k]))
        == (float(row[f"{k}_walked"]) > float(of[picture, floor][f"{k}_walked"]))
        for (picture, method), row in of.items()
        if method not in ("random", "edges")
        for floor in ("random", "edges")
        for k in KINDS
    ]
    return sum(alike), len(alike)


def audit() -> tuple[Rows, int, int]:
    counts = {(row["what"], row["when"]): int(row["inputs"]) for row in lines("audit")}
    parts = dict.fromkeys(part for part, _ in counts)
    table = [[part, *(f"{counts[part, when]:,}" for when in ("before", "after"))] for part in parts]
    sums = [sum(counts[part, when] for part in parts) for when in ("before", "after")]
    return [*table, ["all", *(f"{n:,}" for n in sums)]], sums[0], sums[1]


def passes() -> Page:
    page = Page("docs/results/passes.md")
    table, before, after = audit()
    known = checks()
    page.tables += [
        drawn_maps(), steady(),
        [[name, str(n), f"{r:.3f}", f"{gap:+.3f}"] for name, (n, r, gap) in known.items()],
        walks(), table,
    ]  # fmt: skip
    every = cases()
    for method, title in (("rise", "RISE"), ("lime", "LIME")):
        own = [case for case in every if case[0]["method"] == method]
        reached = sum(float(new["rank"]) >= float(old["rank"]) for old, _, _, new in own)
        closer = sum(float(new["rank"]) > float(short["rank"]) for _, short, _, new in own)
        of = WORDS[len(own)]
        page.says(
            f"{title} in the current form at a quarter of the length is as close as the published form at "
            f"full length on {count(reached)} of {of} images; at equal length it is closer on "
            f"{count(closer)} of {of}"
        )
    page.says(
        "The default lengths are unchanged", any(float(c[3]["rank"]) < float(c[0]["rank"]) for c in every)
    )
    photographed = [row for case in every for row in case if case[0]["network"] == "squeezenet1_1"]
    lost = all(abs(float(row["rank"])) < 0.2 for row in photographed if row["method"] == "lime")
    page.says("On the photograph LIME comes near its limit in no form", lost)
    lowest = min(r for _, r, _ in known.values())
    page.says(f"the lowest of the four rank correlations is {lowest:.3f}")
    page.says(
        f"{after:,} inputs instead of {before:,} for one image, {percent(after / before)}",
        after <= before / 2,
    )
    page.states(
        "16 times", "SqueezeNet 1.1", "128 x 128",
        "32 x 32", "64,000 masks", "16,000 samples", "4,000 masks", "1,000 samples",
        "896 masks", "250 samples", "375 samples", "25 samples", "13 steps", "0.005", "0.01", "0.98",
        "three depths", "ten depths", "100 steps", "a third", "11 points",
    )  # fmt: skip
    return page
