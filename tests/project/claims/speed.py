"""docs/results/speed.md: the files of `python -m benchmarks --csv`, table by table.

Every sentence with a number is made here, whichever way the numbers come out; docs/results_pages.py writes
them between the marks on the page. Around them stands what holds for any numbers.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence

from benchmarks.__main__ import within
from claims import RESULTS, Page, Row, Rows, percent

NETWORKS = {"resnet50": "ResNet-50", "convnext_base": "ConvNeXt-B"}
COMMANDS = {  # how each file is made, where its rows do not say it themselves
    "h200-audit": "python -m benchmarks --section audit --device cuda",
    "h200-packages": "python -m benchmarks --section packages --device cuda",
    "h200-explain": "python -m benchmarks --section explain --device cuda",
    "h200-calls": "python -m benchmarks --section calls --device cuda",
    "h200-faithfulness": "python -m benchmarks --section faithfulness --device cuda",
    "h200-steady": "python -m benchmarks --section steady --device cuda",
    "h200-maps": "python -m benchmarks --section maps --device cuda",
    "cpu-audit": "python -m benchmarks --section audit",
    "cpu-packages": "python -m benchmarks --section packages",
    "cpu-explain": "python -m benchmarks --section explain",
    "cpu-calls": "python -m benchmarks --section calls",
    "startup": "python -m benchmarks --section startup",
    "h200-startup": "python -m benchmarks --section startup --device cuda",
}
AIM_GPU, AIM_CPU = 50, 10  # times as fast as the other packages together


def measured(name: str) -> list[Row]:
    with (RESULTS / "speed" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured_row(name: str, what: str, other: str) -> Row:
    (row,) = (row for row in measured(name) if (row["what"], row["other"]) == (what, other))
    return row


def milliseconds(value: str) -> str:
    number = float(value)
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def ratio(row: Row) -> str:
    return f"{float(row['ratio']):.3g}"


def lines(table: Iterable[Row]) -> Rows:
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
        for row in table
    ]


def per_image(table: Sequence[Row]) -> Rows:
    """Milliseconds per image by network, precision and batch: bare, Grad-CAM and the seven CAMs."""
    rows, lines = {row["what"]: row for row in table}, []
    for what, seven in rows.items():
        if not what.startswith("seven CAMs per image"):
            continue
        _, network, batch, precision = what.split(", ")
        cells = [f"{float(seven['other_ms']):.3f}"]
        for row in (rows[what.replace("seven CAMs", "gradcam")], seven):
            cells += [f"{float(row['ours_ms']):.3f}", f"{float(row['ratio']):.2f}"]
        lines.append([NETWORKS[network], batch.removeprefix("batch "), precision, *cells])
    return lines


def made(table: Iterable[Row]) -> str:
    """By which version, when and where these rows were measured."""
    rows = list(table)
    when = dict.fromkeys(f"{row['heatproof']} of {row['date']}" for row in rows)
    where = dict.fromkeys(row["machine"] for row in rows)
    return f"By heatproof {' and '.join(when)}, on {' and on '.join(where)}."


def limits(table: Iterable[Row], describe: Callable[[Row], str] = lambda row: row["what"]) -> str:
    """Whether the limits of a table are kept, and which are not."""
    held = [row for row in table if row["limit"]]
    over = [row for row in held if not within(float(row["ratio"]), row["limit"])]
    if not over:
        return "Both limits are kept." if len(held) == 2 else f"All {len(held)} limits are kept."
    named = "; ".join(f"{describe(row)} ({ratio(row)}, limit {row['limit'].split()[1]})" for row in over)
    return f"{len(over)} of {len(held)} limits {'is' if len(over) == 1 else 'are'} missed: {named}."


def made_how() -> str:
    """The command of every file, and which rows were not made by it."""
    typed, older = [], []
    for name, usual in COMMANDS.items():
        rows = measured(name)
        recorded = dict.fromkeys(row["command"] for row in rows if row["command"])
        typed += [f"{line} --csv docs/results/speed/{name}.csv" for line in recorded or [usual]]
        older += [name] if any(not row["command"] for row in rows) else []
    text = "\n".join(["```", *typed, "```"])
    if older:
        text += (
            "\n\nRows whose file names no command for them were measured by functions of older code, one by "
            f"one: in {', '.join(f'{name}.csv' for name in older)}."
        )
    return text


def audit_on_a_gpu(page: Page) -> None:
    rows = measured("h200-audit")
    page.tables.append(lines(rows))
    busy = {
        row["part"].replace(", ", " in "): float(row["ratio"]) for row in rows if row["what"].endswith("unit")
    }
    shares = ", ".join(f"{percent(share)} with {part}" for part, share in busy.items())
    busy_text = f" Busy after the first unit (at least {percent(0.8)} were wanted): {shares}." if busy else ""
    page.writes("the audit on a GPU", f"{made(rows)} {limits(rows)}{busy_text}")


def together(rows: Sequence[Row], aim: int) -> str:
    *parts, whole = rows
    assert whole["part"] == "all", "the section packages was not measured to its end"
    best, worst = (choose(parts, key=lambda row: float(row["ratio"])) for choose in (max, min))
    reached = "which is reached" if float(whole["ratio"]) >= aim else "which is not reached"
    sentences = [made(rows)]
    if whole["device"] != "cpu" and not whole["command"]:
        sentences.append(
            "Both sides had one turn to warm up, too few for ours to be recorded, and one that counts."
        )
    sentences += [
        f"All parts together are {float(whole['ratio']):.1f} times as fast; we aimed at {aim}, {reached}.",
        f"The ratio is largest for {best['part']} ({ratio(best)}) and smallest for {worst['part']} "
        f"({ratio(worst)}).",
    ]
    return " ".join(sentences)


def packages(page: Page, name: str, title: str, aim: int) -> None:
    rows = measured(name)
    page.tables.append(lines(rows))
    page.writes(title, together(rows, aim))


def methods_on_a_gpu(page: Page) -> None:
    rows = measured("h200-explain")
    each = [row for row in rows if row["part"].startswith("per image")]
    rest = [row for row in rows if row not in each]
    alone = [row for row in each if row["what"].endswith("milliseconds")]
    page.tables.append(per_image(each))
    seven = [float(row["ratio"]) for row in each if row["what"].startswith("seven CAMs per image, resnet50")]
    below = sum(value < 1 for value in seven)
    latency = " and ".join(
        f"{float(row['ratio']):.2f} ms ({row['part'].rpartition(', ')[2]})" for row in alone
    )
    page.writes(
        "seven CAMs on a GPU",
        f"{made(each)} {limits(each)} One image through ResNet-50 takes {latency}; the limit is 3 ms. Of the "
        f"{len(seven)} ratios of the seven CAMs with ResNet-50 {below} are below 1.",
    )
    page.tables.append(lines(rest))
    page.writes("methods on a GPU", f"{made(rest)} {limits(rest)}")


def steady(page: Page) -> None:
    rows = measured("h200-steady")
    page.tables.append(lines(rows))
    parts = {row["part"]: row for row in rows}
    apart, memory = (float(parts[name]["ratio"]) for name in ("rows", "memory"))
    text = (
        f"**Rows on a GPU depend on the number of inputs per pass**: by up to {apart:.2g} here, in a study "
        "with LIME and random weights, since cuDNN chooses other kernels for other batches."
        if apart > 1e-5
        else f"Other numbers of inputs per pass and shards move rows on a GPU by {apart:.2g} at most; with "
        "the same number a run gives the same bits each time, which a test on a GPU holds."
    )
    flat = "stays flat" if memory <= 1.05 else "grows"
    peak = parts["memory"]["what"].rpartition(", ")[2]
    page.writes(
        "steady",
        f"{made(rows)} Memory {flat} over {peak}: {memory:.2f} times the peak of the first tenth.\n{text}",
    )


def audit_on_a_cpu(page: Page) -> None:
    rows = measured("cpu-audit")
    page.tables.append(lines(rows))
    sentences = [made(rows), limits(rows)]
    for part in dict.fromkeys(row["part"] for row in rows):
        of = {row["what"].rpartition(": ")[2]: float(row["ratio"]) for row in rows if row["part"] == part}
        sentences.append(
            f"By the CPU's clock {part} takes {of['CPU time']:.2f} times the bare passes; of its wall time "
            f"{percent(of['in passes'])} were passes, {percent(of['outside of passes'])} the host's work "
            f"outside of them, {percent(of['waiting'])} waiting for pictures, superpixels and files."
        )
    page.writes("the audit on a CPU", " ".join(sentences))


def startup(page: Page) -> None:
    rows = measured("startup") + measured("h200-startup")
    page.tables.append(
        [
            [
                f"`{row['what']}`" + (" on a GPU" if row["device"].startswith("cuda") else ""),
                f"{float(row['ours_ms']) / 1e3:.2f}",
                f"{float(row['other_ms']) / 1e3:.2f}",
                "no" if row["note"].endswith("without torch") else "yes",
                row["limit"],
            ]
            for row in rows
        ]
    )
    held = [row for row in rows if row["limit"]]
    walls, times = (
        sum(float(row[clock]) / 1e3 <= float(row["limit"].removeprefix("<= ")) for row in held)
        for clock in ("ours_ms", "other_ms")
    )
    page.writes(
        "start-up",
        f"{made(rows)} Of the {len(held)} commands with a limit {walls} end in time by the wall's clock, "
        f"{times} by the CPU's, which does not tell about other programs on the machine.",
    )


def speed() -> Page:
    page = Page("docs/results/speed.md")
    page.writes("commands", made_how())
    audit_on_a_gpu(page)
    packages(page, "h200-packages", "packages on a GPU", AIM_GPU)
    methods_on_a_gpu(page)
    curves, maps = measured("h200-faithfulness"), measured("h200-maps")
    page.tables.append(lines(curves))
    page.writes("insertion and deletion", f"{made(curves)} {limits(curves)}")
    steady(page)
    for device, where in (("cuda", "a GPU"), ("cpu", "the CPU beside it")):
        own = [row for row in maps if row["device"].startswith(device)]
        page.tables.append(lines(own))
        page.writes(f"maps on {where}", f"{made(own)} {limits(own)}")
    audit_on_a_cpu(page)
    packages(page, "cpu-packages", "packages on a CPU", AIM_CPU)
    small = measured("cpu-explain")
    page.tables.append(lines(small))
    page.writes("methods on a CPU", f"{made(small)} {limits(small)}")
    for name, where in (("h200-calls", "a GPU"), ("cpu-calls", "a CPU")):
        calls = measured(name)
        page.tables.append(lines(calls))
        page.writes(f"one Grad-CAM on {where}", f"{made(calls)} {limits(calls)}")
    startup(page)
    page.states(
        "224 x 224 images", "20 turns after 5 warm-up turns", "a little below 1", "under 0.4 s",
        "median of three", "below 1:",
        "input gradients took 256 inputs, as a forward pass; it has taken 64 since",
    )  # fmt: skip
    return page
