"""docs/results/speed.md: the files of `python -m benchmarks --csv`, table by table.

Every sentence with a number is made here, whichever way the numbers come out; docs/results_pages.py writes
them between the marks on the page. Around them stands what holds for any numbers.
"""

from __future__ import annotations

import csv
import textwrap
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
    "cpu-budgets": "python -m benchmarks --section budgets --data DATA",
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
    """Rows as printed: measurement, time of heatproof, reference, its time, ratio, limit."""
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
    """Version, dates and machines of these rows."""
    rows = list(table)
    when = dict.fromkeys(f"{row['heatproof']} on {row['date']}" for row in rows)
    machines = [*dict.fromkeys(row["machine"] for row in rows)]
    where = (
        f"Machine: {machines[0]}."
        if len(machines) == 1
        else f"Machines: {', '.join(f'({n}) {machine}' for n, machine in enumerate(machines, 1))}."
    )
    return f"Measured with heatproof {' and '.join(when)}. {where}"


def subject(part: str) -> str:
    """Network, precision and number of images of an audit.

    >>> subject("resnet50, bf16, 30 pictures")
    'resnet50 in bf16 on 30 images'
    """
    network, precision, *images = part.replace("pictures", "images").split(", ")
    return " on ".join([f"{network} in {precision}", *images])


def write(page: Page, name: str, *sentences: str) -> None:
    """Write the sentences into the page's block of that name, in lines of 120 columns."""
    text = " ".join(filter(None, sentences))
    page.writes(name, textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False))


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
            "\n\nRows without a command in their file were measured one by one, with functions of older "
            f"code: in {', '.join(f'{name}.csv' for name in older)}."
        )
    return text


def audit_on_a_gpu(page: Page) -> None:
    rows = measured("h200-audit")
    page.tables.append(lines(rows))
    busy = {subject(row["part"]): float(row["ratio"]) for row in rows if row["what"].endswith("unit")}
    shares = ", ".join(f"{percent(share)} with {part}" for part, share in busy.items())
    sentence = f"GPU busy after the first unit (aim: at least {percent(0.8)} of the time): {shares}."
    write(page, "the audit on a GPU", made(rows), limits(rows), sentence if busy else "")


def together(rows: Sequence[Row], aim: int) -> str:
    *parts, whole = rows
    assert whole["part"] == "all", "the section packages was not measured to its end"
    best, worst = (choose(parts, key=lambda row: float(row["ratio"])) for choose in (max, min))
    reached = "which is reached" if float(whole["ratio"]) >= aim else "which is not reached"
    sentences = [made(rows)]
    if whole["device"] != "cpu" and not whole["command"]:
        sentences.append(
            "Both sides had one warm-up run, too few to record heatproof's passes, and one timed run."
        )
    sentences += [
        f"All parts together are {float(whole['ratio']):.1f} times as fast; the aim was {aim}, {reached}.",
        f"The ratio is largest for {best['part']} ({ratio(best)}) and smallest for {worst['part']} "
        f"({ratio(worst)}).",
    ]
    return " ".join(sentences)


def packages(page: Page, name: str, title: str, aim: int) -> None:
    rows = measured(name)
    page.tables.append(lines(rows))
    write(page, title, together(rows, aim))


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
    write(
        page, "seven CAMs on a GPU", made(each), limits(each),
        f"The seven CAMs of one image with ResNet-50 take {latency}; the limit is 3 ms.",
        f"{below} of the {len(seven)} ratios of the seven CAMs with ResNet-50 are below 1.",
    )  # fmt: skip
    page.tables.append(lines(rest))
    write(page, "methods on a GPU", made(rest), limits(rest))


def steady(page: Page) -> None:
    rows = measured("h200-steady")
    page.tables.append(lines(rows))
    parts = {row["part"]: row for row in rows}
    apart, memory = (float(parts[name]["ratio"]) for name in ("rows", "memory"))
    text = (
        f"**Rows on a GPU depend on the number of inputs per pass**: by up to {apart:.2g} here, in a study "
        "with LIME and random weights, since cuDNN chooses other kernels for other batches."
        if apart > 1e-5
        else f"Other numbers of inputs per pass and shards change rows on a GPU by {apart:.2g} at most; with "
        "the same number repeated runs are bit-identical, which a test on a GPU checks."
    )
    flat = "does not grow" if memory <= 1.05 else "grows"
    peak = parts["memory"]["what"].rpartition(", ")[2]
    write(
        page, "steady", made(rows),
        f"Memory {flat} over {peak}: its peak is {memory:.2f} times that of the first tenth.", text,
    )  # fmt: skip


def audit_on_a_cpu(page: Page) -> None:
    rows = measured("cpu-audit")
    page.tables.append(lines(rows))
    sentences = [made(rows), limits(rows)]
    for part in dict.fromkeys(row["part"] for row in rows):
        of = {row["what"].rpartition(": ")[2]: float(row["ratio"]) for row in rows if row["part"] == part}
        sentences.append(
            f"The CPU time of {subject(part)} is {of['CPU time']:.2f} times that of the bare passes; of its "
            f"wall time {percent(of['in passes'])} were passes, {percent(of['outside of passes'])} work of "
            f"the host outside of passes, {percent(of['waiting'])} waiting for images, superpixels and files."
        )
    write(page, "the audit on a CPU", *sentences)


def budgets(page: Page) -> None:
    """A row per audit: time, budget, estimate, first answer, images, decided methods, inputs, object used."""
    rows = measured("cpu-budgets")
    page.tables.append([])
    for whole in (row for row in rows if row["other"] == "budget"):
        of = {row["what"].rpartition(": ")[2]: row for row in rows if row["part"] == whole["part"]}
        decided, used, images, inputs = whole["note"].split("; ")
        seconds = [whole["ours_ms"], of["estimate at the start"]["ours_ms"]]
        seconds += [of["first answer"]["ours_ms"]] if "first answer" in of else []
        cells = [f"{float(value) / 1e3:.0f}" for value in seconds] + ["-"] * (3 - len(seconds))
        counts = [images.split()[0], decided.removesuffix(" methods decided"), inputs.split()[0]]
        page.tables[-1].append([whole["part"], *cells, *counts, used.removeprefix("object used: ")])
    off = [max(ratio, 1 / ratio) for ratio in (float(r["ratio"]) for r in rows if "estimate" in r["what"])]
    write(
        page, "audits with a budget", made(rows), limits(rows, lambda row: row["part"]),
        f"Estimates at the start differ from the measured times by factors of up to {max(off):.2f}.",
    )  # fmt: skip


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
    write(
        page, "start-up", made(rows),
        f"Of the {len(held)} commands with a limit, {walls} are within it in wall time and {times} in CPU "
        "time, which does not include other programs on the machine.",
    )  # fmt: skip


def speed() -> Page:
    page = Page("docs/results/speed.md")
    page.writes("commands", made_how())
    audit_on_a_gpu(page)
    packages(page, "h200-packages", "packages on a GPU", AIM_GPU)
    methods_on_a_gpu(page)
    curves, maps = measured("h200-faithfulness"), measured("h200-maps")
    page.tables.append(lines(curves))
    write(page, "insertion and deletion", made(curves), limits(curves))
    steady(page)
    for device, where in (("cuda", "a GPU"), ("cpu", "the CPU of that machine")):
        own = [row for row in maps if row["device"].startswith(device)]
        page.tables.append(lines(own))
        write(page, f"maps on {where}", made(own), limits(own))
    audit_on_a_cpu(page)
    budgets(page)
    packages(page, "cpu-packages", "packages on a CPU", AIM_CPU)
    small = measured("cpu-explain")
    page.tables.append(lines(small))
    write(page, "methods on a CPU", made(small), limits(small))
    for name, where in (("h200-calls", "a GPU"), ("cpu-calls", "a CPU")):
        calls = measured(name)
        page.tables.append(lines(calls))
        write(page, f"one Grad-CAM on {where}", made(calls), limits(calls))
    startup(page)
    page.states(
        "224 x 224 images", "20 runs after 5 warm-up runs", "slightly below 1", "under 0.4 s",
        "median of three", "below 1:", "100 photographs", "1.1 times the budget",
        "256 inputs per pass for input gradients, as for forward passes; the number has been 64 since",
    )  # fmt: skip
    return page
