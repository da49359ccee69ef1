"""docs/results/precision.md: the tables of `python -m benchmarks --section precision`."""

from __future__ import annotations

from claims import Page, Row, Rows, column, rows

CLASSIFIER = ("probability", "predicted", "accuracy")
# Counts, and rows that are 0 or 1 for every map of both runs: nothing to compare.
COUNTS = ("degenerate", "cscore_n", "cscore_degenerate", "cscore_low", "cscore_high", "map_passes",
          "fragility_kept(draws=1)")  # fmt: skip


def number(value: str) -> str:
    return f"{float(value):.4f}"


def map_lines(table: dict[str, Row]) -> Rows:
    columns = ("spearman_median", "spearman_lowest", "difference")
    ranked = sorted(table.values(), key=lambda row: -float(row["spearman_median"]))
    return [[row["method"], *(number(row[name]) for name in columns)] for row in ranked]


def metric_lines(table: dict[str, Row]) -> Rows:
    columns = ("mean", "mean_other", "row_change", "largest_mean_change", "spread_of_methods")
    selected = [row for name, row in table.items() if name not in (*COUNTS, *CLASSIFIER)]
    return [[row["metric"], row["rows"], *(number(row[name]) for name in columns)] for row in selected]


def precision() -> Page:
    page = Page("docs/results/precision.md")
    maps, metrics = rows("precision/maps.csv", "method"), rows("precision/rows.csv", "metric")
    page.tables += [map_lines(maps), metric_lines(metrics)]
    (images,), (machine,) = ({row[name] for row in maps.values()} for name in ("images", "machine"))
    page.says(f"{images} test images")
    page.says(f"on {machine}")
    lowest = column(maps, "spearman_lowest")
    inputs = ("gradient", "integrated-gradients(steps=8)")
    rest = [value for name, value in lowest.items() if name not in inputs]
    page.says(
        "Maps of CAMs and of RISE keep their ranks: every rank correlation is at least "
        f"{int(100 * min(rest)) / 100:.2f}",
        all(min(rest) > lowest[name] for name in inputs),
    )
    medians = column(maps, "spearman_median")
    page.says(
        f"Input gradients do not: the median is {medians['gradient']:.2f} for the plain gradient and "
        f"{medians['integrated-gradients(steps=8)']:.2f} for integrated gradients of eight steps",
        max(medians[name] for name in inputs) < min(v for n, v in medians.items() if n not in inputs),
    )
    same = all(float(row["same_class"]) == 1 for row in maps.values())
    page.says(
        f"No image changed its class; probabilities changed by "
        f"{float(metrics['probability']['row_change']):.4f} on average",
        same and float(metrics["predicted"]["row_change"]) == 0,
    )
    selected = [row for name, row in metrics.items() if name not in (*COUNTS, *CLASSIFIER)]
    shares = {r["metric"]: float(r["largest_mean_change"]) / float(r["spread_of_methods"]) for r in selected}
    worst = max(shares, key=lambda name: shares[name])
    page.says(
        f"Relative to the range of the methods' means, the mean of a method changed most for {worst}: by "
        f"{float(metrics[worst]['largest_mean_change']):.3f}, where the range is "
        f"{float(metrics[worst]['spread_of_methods']):.3f}"
    )
    page.states("steps of 10", "60 masks", "8 steps", "CIFAR-10")
    return page
