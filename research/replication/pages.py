"""Tables and pages of the replication, made from stored trainings.

    trainings.csv    one row per training of the population of early warnings
    warnings.csv     one row per kind of warning, drop of AUC and group of trainings
    roc.csv          one row per signal and group of trainings
    cscores.csv      C-Scores, AUC and accuracy of the trainings by the paper's protocol, at its checkpoints
    claims.csv       one row per claim and network

`write_tables` needs the stored trainings, `write_pages` only these files.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heatproof.disk import write_whole
from heatproof.verdict.alarms import NAMES
from research.localisation.pages import claims as localisation_claims
from research.replication.claims import (
    CLAIMS,
    EPOCHS,
    HOLDS,
    MIXED,
    NOT,
    UNTESTED,
    answer,
    claim_rows,
    overall,
)
from research.replication.warning import (
    DROP,
    OTHER_DROPS,
    WITHIN,
    Course,
    read_course,
    roc_rows,
    signal_rows,
    training_rows,
)

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FOLDER = "replication"
ALL, GRADUAL = "all trainings", "constant or rising rates"  # the second: no change of phase
PAPERS = {"cscore": "C-Score", "cambench": "CAMBench-QR", "cose": "COSE", "thesis": "Budgeted localisation"}
COMMAND = (
    "python -m research.evidence prepare --data DATA --out PACKED\n"
    "    python -m research.replication prepare --data DATA --out PACKED\n"
    "    python -m research.replication train --data PACKED --out TRAININGS --device cuda --processes 14 \\\n"
    "        --study warning --study protocol\n"
    "    python -m research.replication tables TRAININGS/results.json.gz\n"
    "    python -m research.replication pages"
)
CLAIM_COLUMNS = ("where", "claim", "published", "here: mean over trainings (95 %)", "answer")
OTHER_COLUMNS = ("where", "claim", "published", "here", "answer")
ALARMS = (*NAMES.values(), "any alarm")
Row = Mapping[str, Any]


def write_tables(results: Sequence[Row], out: Path = RESULTS / FOLDER) -> None:
    """Write the CSV files of the studies that the results are of."""
    from research.replication import cose_tables, cscore_pages

    with_transforms = [result for result in results if "cose" in result]
    if with_transforms:
        cose_tables.write_tables(with_transforms, out / "cose")
        cscore_pages.write_tables(with_transforms, out / "cscore-cifar")
    if len(with_transforms) < len(results):
        write_protocol_tables(results, out)
        cscore_pages.draw_courses(read_table("cscores", out), out / "courses.png")


def write_protocol_tables(results: Sequence[Row], out: Path) -> None:
    """Write the CSV files of early warnings and of the trainings by the paper's protocol."""
    courses = [read_course(dict(r)) for r in results if r["training"]["study"] == "warning"]
    protocol = [r for r in results if r["training"]["study"] == "protocol"]
    groups = {ALL: courses, GRADUAL: [c for c in courses if c.schedule in ("constant", "rising")]}
    warnings = [
        {"group": group, **row}
        for group, own in groups.items() for drop in (DROP, *OTHER_DROPS) for row in signal_rows(own, drop)
    ]  # fmt: skip
    roc = [{"group": group, **row} for group, own in groups.items() for row in roc_rows(own)]
    tables = {"trainings": training_rows(courses), "warnings": warnings, "roc": roc,
              "cscores": list(_score_rows(protocol)), "claims": claim_rows(protocol)}  # fmt: skip
    write_whole({out / f"{name}.csv": as_csv(rows) for name, rows in tables.items()})
    draw_roc(courses, roc, out / "roc.png")


def _score_rows(results: Sequence[Row]) -> Iterable[dict[str, Any]]:
    for result in results:
        for row in result["epochs"]:
            if row["epoch"] not in EPOCHS:
                continue
            for method, score in row["cscores"].items():
                classes = {f"class{c}": own["value"] for c, own in score["classes"].items()}
                yield {
                    "network": result["training"]["network"], "seed": result["training"]["seed"],
                    "epoch": row["epoch"], "auc": row["auc"], "accuracy": row["accuracy"], "method": method,
                    "cscore": score["value"], **classes,
                }  # fmt: skip


def as_csv(rows: Sequence[Row]) -> str:
    """CSV text; floats are rounded to five decimals."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {k: round(float(v), 5) if isinstance(v, float) else v for k, v in row.items()} for row in rows
    )
    return file.getvalue()


def draw_roc(courses: Sequence[Course], rows: Sequence[Row], path: Path) -> None:
    """Areas under the ROC with their intervals."""
    from matplotlib.figure import Figure

    own = sorted((row for row in rows if row["group"] == ALL), key=lambda row: row["auc"])
    figure = Figure((7, 0.32 * len(own) + 1.1), layout="constrained")
    axes = figure.subplots()
    for i, row in enumerate(own):
        axes.plot([row["low"], row["high"]], [i, i], color="#4477aa", lw=2)
        axes.plot(row["auc"], i, "o", color="#4477aa")
    axes.axvline(0.5, color="grey", ls=":")
    axes.set_yticks(range(len(own)), [row["signal"] for row in own])
    axes.set_xlim(0.3, 0.9)
    axes.set_xlabel(f"area under the ROC (95 % over {len(courses)} trainings)")
    figure.savefig(path, dpi=110)


def read_table(name: str, folder: Path = RESULTS / FOLDER) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_pages(out: Path = RESULTS) -> None:
    from research.replication import cose_tables, cscore_pages, rankings_page

    pages = {"early-warning": warning_page(), "index": index_page(), "cscore": cscore_pages.xray_page()}
    pages |= {"cose": cose_tables.page(), "cscore-cifar": cscore_pages.ten_classes_page()}
    pages["rankings"] = rankings_page.page()
    write_whole({out / f"{name}.md": text for name, text in pages.items()})


def _filled(template: str, **fields: object) -> str:
    text = Path(__file__).with_name(template).read_text("utf-8")
    return text.format(folder=FOLDER, drop=DROP, within=WITHIN, command=COMMAND, **fields)


def _number(text: str, signed: bool = False) -> str:
    value = float(text)
    return "" if value != value else f"{value:+.2f}" if signed else f"{value:.2f}"


def as_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _warning_table(group: str) -> str:
    rows = [r for r in read_table("warnings") if r["group"] == group and float(r["drop"]) == DROP]
    head = ("warning", "falls preceded", "epochs earlier (median)", "trainings without a fall that had it",
            "share of epochs before a fall", "share of other epochs", "difference (95 %)")  # fmt: skip
    return as_table(head, ([
        r["warning"], f"{r['preceded']} of {r['falls']}", r["median_lead"].replace("nan", ""),
        f"{r['calm_with_warning']} of {r['calm_trainings']}", _number(r["share_before"]),
        _number(r["share_other"]),
        f"{_number(r['difference'], True)} ({_number(r['low'], True)} to {_number(r['high'], True)})",
    ] for r in rows))  # fmt: skip


def _roc_table(group: str) -> str:
    rows = [r for r in read_table("roc") if r["group"] == group]
    rows.sort(key=lambda r: -float(r["auc"]))
    return as_table(("signal", "area under the ROC", "95 %"), (
        [r["signal"], _number(r["auc"]), f"{_number(r['low'])} to {_number(r['high'])}"] for r in rows
    ))  # fmt: skip


def warned_more(group: str = ALL) -> list[str]:
    """Kinds of warnings that are significantly more frequent before a fall."""
    rows = [r for r in read_table("warnings") if r["group"] == group and float(r["drop"]) == DROP]
    return [r["warning"] for r in rows if float(r["low"]) > 0]


def above_chance(group: str = ALL) -> list[str]:
    """Signals whose area under the ROC is significantly above 1/2."""
    return [r["signal"] for r in read_table("roc") if r["group"] == group and float(r["low"]) > 0.5]


def warning_page() -> str:
    trainings = read_table("trainings")
    falls = [t for t in trainings if t["fall"]]
    counts = Counter((t["network"], t["schedule"]) for t in trainings)
    fallen = Counter((t["network"], t["schedule"]) for t in falls)
    population = as_table(("network", "schedule", "trainings", "with a fall"), (
        [network, schedule, str(n), str(fallen[network, schedule])]
        for (network, schedule), n in sorted(counts.items())
    ))  # fmt: skip
    return _filled(
        "early_warning.md", trainings=len(trainings), falls=len(falls), answer=_warning_answer(),
        population=population, all=_warning_table(ALL), all_roc=_roc_table(ALL),
        gradual=_warning_table(GRADUAL), gradual_roc=_roc_table(GRADUAL),
    )  # fmt: skip


def _warning_answer() -> str:
    """The sentence under the title: which warnings and signals are better than chance in both groups."""
    warnings = [w for w in warned_more(ALL) if w in warned_more(GRADUAL)]
    signals = [s for s in above_chance(ALL) if s in above_chance(GRADUAL)]
    alarms = [w for w in warnings if w in ALARMS] or ["no alarm of the C-Score"]
    rest = [w for w in warnings if w not in ALARMS] or ["none"]
    best = max(float(row["auc"]) for row in read_table("roc"))
    return (
        f"in both groups of trainings below, {' and '.join(alarms)} is significantly more frequent before a "
        f"fall than elsewhere; of the other warnings: {', '.join(rest)}. Signals better than chance in both: "
        f"{' and '.join(signals) or 'none'}; the largest area under a ROC is {best:.2f}."
    )


def _warning_claims() -> list[dict[str, str]]:
    """Claims that are answered by the population of early warnings, over both groups of trainings."""
    claims = []
    for where, text, kind, published in (
        ("4.2.3, 5.2", "Alarms of the C-Score precede a fall of AUC", "any alarm",
         "one training: ScoreCAM 0.612, 0.014, 0.000, AUC falls one checkpoint later"),
        ("6", "Jumps of the gradients precede a fall of AUC", "jump of the gradients",
         "proposed, not measured"),
    ):  # fmt: skip
        rows = [r for r in read_table("warnings") if r["warning"] == kind and float(r["drop"]) == DROP]
        own = rows[0]
        answers = [answer(float(r["low"]), float(r["high"]), 0.0, True) for r in rows]
        here = (
            f"preceded {own['preceded']} of {own['falls']} falls; raised in {own['calm_with_warning']} of "
            f"{own['calm_trainings']} trainings without a fall: [early warning](early-warning.md)"
        )
        claims.append({"paper": "cscore", "where": where, "text": text, "published": published, "here": here,
                       "answer": overall(answers)})  # fmt: skip
    return claims


def _measured_claims() -> list[dict[str, str]]:
    """Claims that are answered by the other studies."""
    from research.qr.pages import claims as qr_claims  # these import this module
    from research.replication import cose_tables, cscore_pages

    return [*cscore_pages.claims(), *cose_tables.claims(), *qr_claims(), *localisation_claims()]


def _sizes() -> dict[str, int]:
    """Numbers of trainings, networks and images of the other studies."""
    from research.replication.cose import IMAGES  # needs torch

    folder = RESULTS / FOLDER
    qr, cose = read_table("trainings", folder / "qr"), read_table("cose", folder / "cose")
    photographs = read_table("photographs", folder / "localise")
    return {
        "qr_trainings": len(qr), "qr_codes": int(read_table("scores", folder / "qr")[0]["codes"]),
        "cose_trainings": len({(r["network"], r["seed"]) for r in cose}),
        "cose_networks": len({r["network"] for r in cose}), "cose_images": IMAGES,
        "ten_trainings": len({(r["network"], r["seed"]) for r in cose if r["network"].startswith("resnet")}),
        "photographs": len({r["image"] for r in photographs}),
        "filtered": len({r["image"] for r in photographs if r["filtered"] == "1"}),
        "photograph_networks": len({r["network"] for r in photographs}),
    }  # fmt: skip


def index_page() -> str:
    rows = read_table("claims")
    answers = {c.text: overall([r["answer"] for r in rows if r["claim"] == c.text]) for c in CLAIMS}
    others = [*_warning_claims(), *_measured_claims()]
    counted = {paper: Counter(c["answer"] for c in others if c["paper"] == paper) for paper in PAPERS}
    counted["cscore"].update(answers.values())
    head = ("paper", HOLDS, NOT, MIXED, UNTESTED)
    summary = as_table(
        head, ([name, *(str(counted[paper][a]) for a in head[1:])] for paper, name in PAPERS.items())
    )
    networks = sorted({r["network"] for r in rows})
    trainings = {r["network"]: r["trainings"] for r in rows}
    claims = []
    for claim in CLAIMS:
        own = {r["network"]: r for r in rows if r["claim"] == claim.text}
        numbers = (
            f"{n} {_number(own[n]['mean'])} ({_number(own[n]['low'])} to {_number(own[n]['high'])})"
            for n in networks
        )
        claims.append([claim.where, claim.title, claim.published_text, "; ".join(numbers),
                       answers[claim.text]])  # fmt: skip
    tables = {
        paper: as_table(OTHER_COLUMNS, (
            [c["where"], c["text"], c["published"], c["here"], c["answer"]]
            for c in others if c["paper"] == paper
        ))
        for paper in PAPERS
    }  # fmt: skip
    n = ", ".join(f"{network} {trainings[network]}" for network in networks)
    return _filled(
        "index.md", summary=summary, trainings=n, claims=as_table(CLAIM_COLUMNS, claims),
        more_cscore=tables["cscore"], cambench=tables["cambench"], cose=tables["cose"],
        thesis=tables["thesis"], **_sizes(),
    )  # fmt: skip
