"""docs/results/speed.md: the files of `heatproof bench --csv`, row by row."""

from __future__ import annotations

from claims import RESULTS, Page, Row, Rows, percent, rows

CPU, GPU, AUDIT = "speed/cpu.csv", "speed/h200.csv", "speed/audit-cpu.csv"
NETWORKS = {"resnet50": "ResNet-50", "convnext_base": "ConvNeXt-B"}


def measured(path: str) -> dict[str, Row]:
    """Nothing, where that machine was not measured."""
    return rows(path, "what", "other") if (RESULTS / path).exists() else {}


def milliseconds(value: str) -> str:
    number = float(value)
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def ratio(row: Row) -> str:
    return f"{float(row['ratio']):.3g}"


def lines(table: dict[str, Row]) -> Rows:
    """Every row as it was printed: what, ours, beside what, theirs, ratio, limit."""
    return [
        [
            row["what"],
            milliseconds(row["ours_ms"]),
            row["other"],
            milliseconds(row["other_ms"]),
            ratio(row),
            row["limit"],
        ]
        for row in table.values()
    ]


def per_image(table: dict[str, Row]) -> Rows:
    """Milliseconds per image by network, precision and batch: bare, Grad-CAM and the seven CAMs."""
    found = []
    for name, seven in table.items():
        if not name.startswith("seven CAMs per image"):
            continue
        _, network, batch, precision = seven["what"].split(", ")
        cells = [f"{float(seven['other_ms']):.3f}"]
        for row in (table[name.replace("seven CAMs", "gradcam")], seven):
            cells += [f"{float(row['ours_ms']):.3f}", f"{float(row['ratio']):.2f}"]
        found.append([NETWORKS[network], batch.removeprefix("batch "), precision, *cells])
    return found


def audit(page: Page) -> None:
    """The run, its shares, and every part beside another package."""
    table = measured(AUDIT)
    (machine,) = {row["machine"] for row in table.values()}
    page.says(f"On {machine}")
    whole = {row["what"]: row for row in table.values() if row["what"].startswith("standard audit")}
    page.tables += [lines(whole), lines({k: row for k, row in table.items() if row["what"] not in whole})]
    ratios = {row["what"].rpartition(": ")[2]: float(row["ratio"]) for row in whole.values()}
    page.says(f"{percent(ratios['in passes'])} of its wall time were passes")
    page.says(f"{percent(ratios['outside of passes'])} the host's work outside of them")
    page.says(f"{percent(ratios['waiting'])} waiting")
    if "CPU time" in ratios:
        page.says(f"by the CPU's clock {ratios['CPU time']:.2f} times the bare passes")
    parts = {row["what"]: float(row["ratio"]) for row in table.values() if row["what"] not in whole}
    total = next(ratio for what, ratio in parts.items() if what.startswith("all parts together"))
    page.says(f"All parts together are {total:.1f} times as fast", total < 10)
    page.says("the ten times that we aimed at on a CPU are not reached", total < 10)
    bound = [row for row in table.values() if "same passes" in row["note"]]
    page.says("within a third of each other", all(0.75 < float(row["ratio"]) < 4 / 3 for row in bound))


def speed() -> Page:
    page = Page("docs/results/speed.md")
    audit(page)
    both, small = measured(GPU), measured(CPU)
    gpu = {name: row for name, row in both.items() if "GPU" in row["machine"]}
    host = {name: row for name, row in both.items() if name not in gpu}
    for table in filter(None, (gpu, host, small)):
        (machine,) = {row["machine"] for row in table.values()}
        page.says(f"On {machine}")
    large = [float(row["ratio"]) for name, row in gpu.items() if "per image" in name and "batch 256" in name]
    page.says(
        f"At batch 256 we aimed at 1.1 times a bare forward: {sum(r <= 1.1 for r in large)} of "
        f"{len(large)} rows "
        f"reach it, and the furthest from it is at {max(large):.2f}"
    )
    rest = {name: row for name, row in gpu.items() if "per image" not in name}
    page.tables += [per_image(gpu), lines(rest), lines(host), *([lines(small)] if small else [])]
    for table, where in ((gpu, "GPU rows"), (small, "CPU rows of methods")):
        ((version, day),) = {(row["heatproof"], row["date"]) for row in table.values()}
        page.says(f"The {where} are by heatproof {version} of {day}")
    page.states(
        "224 x 224 images",
        "Not measured yet: a GPU.",
        "two images, one turn",
        "1.3 times",
        "20 turns after 5 warm-up turns",
        "At batches 1 and 32",
        "a little below 1",
    )
    return page
