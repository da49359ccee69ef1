"""README.md: how many methods there are, what four real runs showed, and its table of speed."""

from __future__ import annotations

from claims import FLOORS, ROOT, WORDS, Page, Rows, column, percent, ranked, rows
from claims.speed import CPU, GPU, measured
from heatproof.cli.listing import cost
from heatproof.registry import explainers

SPEED = (
    (GPU, "seven CAMs per image, convnext_base, batch 256, fp32", "bare forward"),
    (GPU, "seven CAMs per image, resnet50, batch 256, fp32", "bare forward"),
    (GPU, "seven CAMs together, resnet50, batch 16", "bare forward"),
    (GPU, "lime(samples=1024), 8 images", "bare forward passes"),
    (GPU, "rise(masks=1024), 8 images", "bare forward passes"),
    (GPU, "ig(steps=64), 8 images", "bare forward and backward passes"),
    (GPU, "SSIM local5 of 128 pairs of 224x224, times as fast as the other", "scikit-image loop"),
    (CPU, "seven CAMs together, resnet50, batch 16", "bare forward"),
    (CPU, "seven CAMs together, resnet50, batch 16", "grad-cam, the same seven"),
)
Finding = tuple[str, bool]  # a sentence, and whether it is so


def front() -> Page:
    page = Page("README.md")
    real = [entry for entry in explainers if entry.name not in FLOORS]
    shared = [entry for entry in real if cost(entry) == "shared pass"]
    page.says(f"with {len(real)} methods, {WORDS[len(shared)]} of them from one shared pass")
    pages = (path.stem for path in (ROOT / "docs/metrics").glob("*.md"))
    page.says(f"| CAM methods | {sum('cam' in entry.name for entry in real)} |")
    page.says(f"| metrics of maps | {sum(name not in ('index', 'classifier') for name in pages)} families |")
    lime, rise = (cost(explainers.get(name)).removesuffix(" inputs") for name in ("lime", "rise"))
    page.says(f"| lime, rise | {lime} and {rise} inputs |")
    page.tables += [four_questions(page), None, None, None, speed(), None]
    page.states(
        "Python 3.11 or newer",
        "rank correlation above 0.99",
        "Keras 3 on its torch backend",
        "Licence: Apache-2.0",
        "Checked in the code of each package on 15 November 2026 (grad-cam 1.5.7, captum 0.9.0, "
        "Quantus 0.6.0, "
        "torchcam 0.5.0, xplique 2.0.2)",
    )
    return page


def four_questions(page: Page) -> Rows:
    asked = {
        "cscore": "Does the model look at the same place for every image of a class, and since when?",
        "qr": "On QR codes, where the truth is known, do maps land on the patterns that matter?",
        "cose": "Does the map stay when the prediction stays, and change when it changes?",
        "localise": "With the same pixel budget for every method, do maps find the object?",
    }
    findings = dict(zip(asked, (consistency(), leakage(), stability(), pointing()), strict=True))
    for sentence, holds in findings.values():
        page.says(sentence, holds)
    return [[asked[study], f"`heatproof study {study}`", findings[study][0]] for study in asked]


def consistency() -> Finding:
    score = rows("cscore-lite0/tables/overall.csv", "method")["gradcam"]
    auc = column(rows("cscore-lite0/tables/classifier.csv", "checkpoint"), "AUC")
    before, after = (float(score[epoch]) for epoch in ("epoch20", "epoch30"))
    sentence = (
        f"fine-tuning raised AUC from {auc['epoch20']:.3f} to {auc['epoch30']:.3f} and cut Grad-CAM's "
        "consistency "
        f"from {before:.3f} to {after:.3f} (chest X-rays)"
    )
    return sentence, auc["epoch30"] > auc["epoch20"] and after < before


def leakage() -> Finding:
    found = rows("qr-resnet50/tables/table-2.csv", "source", "regime", "method")
    before, after = (found[f"ours {regime} gradcam"] for regime in ("ft-struct", "ft-leakmin"))
    sentence = (
        f"a penalty on Grad-CAM's leakage took it from {float(before['BL']):.2f} to "
        f"{float(after['BL']):.2f}, in "
        f"the maps that were left: {percent(float(after['empty maps']))} are empty (ResNet-50)"
    )
    return sentence, int(after["BL n"]) < int(after["n"])


def stability() -> Finding:
    cose = column(rows("cose-cnn/tables/cose.csv", "method"), "COSE, %")
    sentence = (
        f"Grad-CAM is ahead ({cose['gradcam']:.1f}), plain gradients behind ({cose['gradient']:.1f}), "
        "an edge "
        f"detector far behind ({cose['edges']:.1f}) (COSE)"
    )
    return sentence, ranked(cose)[0] == "gradcam" and cose["gradient"] > cose["edges"]


def pointing() -> Finding:
    where, how = (rows(f"localise-lite0/tables/{n}.csv", "Method") for n in ("localisation", "faithfulness"))
    methods = [name for name in where if "thesis" not in name]
    point, insertion = column(where, "Pointing game", methods), column(how, "Insertion AUC", methods)
    sentence = (
        f"Grad-CAM points best ({point['gradcam']:.2f}), LIME has the best insertion "
        f"({insertion['lime']:.2f}), and "
        f"a dot in the centre points as well as LIME ({point['centre']:.2f}, {point['lime']:.2f}) "
        "(photographs)"
    )
    best = ranked(point)[0] == "gradcam" and ranked(insertion)[0] == "lime"
    return sentence, best and point["centre"] >= point["lime"]


def speed() -> Rows:
    """Each row of one machine, by name."""
    found = []
    for path, what, other in SPEED:
        if row := measured(path).get(f"{what} {other}"):
            ratio = float(row["ratio"])
            said = f"{ratio:.0f} times faster" if row["note"].startswith("times faster") else f"{ratio:.2f}"
            found.append([what, other, said, named(row["machine"])])
    return found


def named(machine: str) -> str:
    """Of the line that `heatproof bench` prints: the GPU, else the CPU with its threads."""
    cpu, _, gpu = machine.partition("; GPU: ")
    return gpu.split(",")[0] or cpu.removeprefix("CPU: ").split(";")[0]
