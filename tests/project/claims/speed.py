"""docs/results/speed.md: the files of `heatproof bench --csv`, row by row."""

from __future__ import annotations

from claims import RESULTS, Page, Row, Rows, rows

CPU, GPU = "speed/cpu.csv", "speed/h200.csv"
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


def speed() -> Page:
    page = Page("docs/results/speed.md")
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
    page.states(
        "224 x 224 images",
        "20 turns after 5 warm-up turns",
        "At batches 1 and 32",
        "a little below 1",
    )
    return page
