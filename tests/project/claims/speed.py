"""docs/results/speed.md: the files of `heatproof bench --csv`, row by row."""

from __future__ import annotations

from claims import RESULTS, Page, Row, Rows, percent, rows
from heatproof.cli.bench import within

CPU, GPU, AUDIT = "speed/cpu.csv", "speed/h200.csv", "speed/audit-cpu.csv"
BEFORE = "speed/h200-before.csv"
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


def audit_on_a_gpu(page: Page, table: dict[str, Row]) -> None:
    """The runs, and every part beside another package."""
    (machine,) = {row["machine"] for row in table.values()}
    page.says(f"On {machine}")
    whole = {k: row for k, row in table.items() if row["what"].startswith("standard audit")}
    parts = {k: row for k, row in table.items() if row["section"] == "audit" and k not in whole}
    page.tables += [lines(whole), lines(parts)]
    ratios = {row["what"]: float(row["ratio"]) for row in whole.values()}
    busy = {what: ratio for what, ratio in ratios.items() if "busy" in what}
    kept = all(
        ratio <= (1.3 if "resnet50" in what else 2) for what, ratio in ratios.items() if what not in busy
    )
    page.says("All four networks keep their limits", kept and len(ratios) - len(busy) == 4)
    page.says(
        "takes hardly longer than its bare passes", all(r < 1.1 for w, r in ratios.items() if "resnet50" in w)
    )
    first, second = (percent(ratio) for ratio in busy.values())
    page.says(
        f"{first} of the time after the first unit with ResNet-50 in bf16 (we aimed at 80 %) and {second}"
    )
    total = next(float(r["ratio"]) for r in parts.values() if r["what"].startswith("all parts together"))
    page.says(f"All parts together are {total:.1f} times as fast; we aimed at 50", total < 50)


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


def cams(page: Page, gpu: dict[str, Row]) -> None:
    page.tables.append(per_image(gpu))
    each = {
        row["what"]: row for row in gpu.values() if "resnet50" in row["what"] and row["section"] == "explain"
    }
    kept = [within(float(row["ratio"]), row["limit"]) for row in each.values() if row["limit"]]
    said = (
        "Every limit is kept: 1.08 and 1.12 times a bare forward at batch 256, 1.35 times at batch 32, 3 ms"
    )
    page.says(said, all(kept) and len(kept) == 10)
    alone = [f"{float(row['ratio']):.2f}" for what, row in each.items() if "milliseconds" in what]
    page.says(f"({' and '.join(alone)} ms were measured)")
    page.says(
        "All ratios are below 1", all(float(r["ratio"]) < 1 for w, r in each.items() if "per image" in w)
    )


def speed() -> Page:
    page = Page("docs/results/speed.md")
    gpu, small, before = measured(GPU), measured(CPU), measured(BEFORE)
    audit_on_a_gpu(page, gpu)
    cams(page, gpu)
    steady = [row for row in gpu.values() if row["section"] == "steady"]
    others = {
        k: r
        for k, r in gpu.items()
        if r["section"] in ("steady", "faithfulness") or "milliseconds" in r["what"]
    }
    page.tables.append(lines(others))
    apart, memory = (float(row["ratio"]) for row in steady)
    page.says("Memory stays flat over 10,000 images", memory <= 1.05)
    page.says(f"by up to {apart:.2g}", apart > 1e-5)
    audit(page)
    (machine,) = {row["machine"] for row in small.values()}
    page.says(f"On {machine}")
    on_gpu = {name: row for name, row in before.items() if "GPU" in row["machine"]}
    host = {name: row for name, row in before.items() if name not in on_gpu}
    rest = {name: row for name, row in on_gpu.items() if "per image" not in name}
    page.tables += [lines(small), per_image(on_gpu), lines(rest), lines(host)]
    said = {"GPU rows": gpu, "CPU rows of methods": small}
    for where, table in said.items():
        ((version, day),) = {(row["heatproof"], row["date"]) for row in table.values()}
        page.says(f"The {where} are by heatproof {version} of {day}")
    ((version, day),) = {(row["heatproof"], row["date"]) for row in before.values()}
    page.says(f"These rows are by heatproof {version} of {day}")
    page.says(next(iter({row["machine"] for row in host.values()})))
    page.states(
        "224 x 224 images", "two images, one turn", "20 turns after 5 warm-up turns", "a little below 1",
        "of four images with ResNet-50",
    )  # fmt: skip
    return page
