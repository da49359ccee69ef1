"""docs/results/evidence.md: what real networks use, from `python -m research.evidence real`."""

from __future__ import annotations

import csv

from claims import RESULTS, Page, Row, Rows

NAMES = {
    "xray-small": "X-rays, small CNN", "xray-squeezenet": "X-rays, SqueezeNet",
    "xray-package": "X-rays, packaged Xception", "lite0": "photographs, EfficientNet-Lite0",
    "squeezenet": "photographs, SqueezeNet", "resnet50": "photographs, ResNet-50",
}  # fmt: skip
PHOTOGRAPHS = ("lite0", "squeezenet", "resnet50")


def listed(name: str) -> list[Row]:
    with (RESULTS / "evidence" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def networks() -> Rows:
    return [
        [NAMES[r["network"]], "yes" if r["regions"] == "True" else "no", r["images"], r["correct"],
         r["donors"], r["answer"], *("" if r[key] == "nan" else f"{float(r[key]):+.2f}"
                        for key in ("transplant", "recurring", "property", "removal", "exchange"))]
        for r in listed("networks.csv")
    ]  # fmt: skip


def xray_items() -> Rows:
    return [
        [NAMES[r["network"]], "yes" if r["regions"] == "True" else "no", r["sentence"]]
        for r in listed("items.csv")
        if r["network"] not in PHOTOGRAPHS
    ]


def context() -> Rows:
    """Classes whose answer is kept without the object, by network."""
    return [
        [NAMES[r["network"]], r["class"].replace("_", " "), r["donors"], r["keeps_without_object"],
         r["turning_off_object"], r["object_share"]]
        for r in listed("classes.csv")
        if r["network"] in PHOTOGRAPHS and int(r["keeps_without_object"])
    ]  # fmt: skip


def evidence() -> Page:
    page = Page("docs/results/evidence.md")
    page.tables += [networks(), xray_items(), context()]
    for item in listed("items.csv"):
        if item["network"] in PHOTOGRAPHS:
            page.says(f"{NAMES[item['network']].partition(', ')[2]}: {item['sentence']}")
    for name in PHOTOGRAPHS:
        rows = [r for r in listed("classes.csv") if r["network"] == name]
        kept, donors = (sum(int(r[key]) for r in rows) for key in ("keeps_without_object", "donors"))
        turning = sum(int(r["turning_off_object"]) for r in rows)
        page.says(
            f"{NAMES[name].partition(', ')[2]} keeps {kept} of {donors} answers when the object is removed, "
            f"and a patch off the object turns other images in {turning} of {donors}"
        )
    page.states(
        "trained for 300 steps on 400 X-rays of each class",
        "the central 80 % of both sides",
        "two photographs of each of 43 classes",
        "X-rays: Kermany et al., CC BY 4.0",
    )
    return page
