"""README.md: how many methods there are, what four real runs showed, and how fast it is."""

from __future__ import annotations

from claims import FLOORS, WORDS, Page, Rows, percent, ranked, rows
from claims.speed import measured_row
from heatproof.cli.listing import cost
from heatproof.registry import explainers
from research.replication.cose import PAPER

Finding = tuple[str, bool]  # a sentence, and whether it is so


def front() -> Page:
    page = Page("README.md")
    real = [entry for entry in explainers if entry.name not in FLOORS]
    shared = [entry for entry in real if cost(entry) == "shared pass"]
    page.says(f"with {len(real)} methods, {WORDS[len(shared)]} of them from one shared pass")
    page.tables += [None, four_questions(page), None]
    sentence, holds = speed()
    page.writes("speed", sentence)
    page.says(sentence, holds)
    page.states(
        "Can this heatmap be trusted?",
        "Python 3.11 or newer",
        "rank correlation above 0.99",
        "Keras 3 on its torch backend",
        "Licence: Apache-2.0",
    )
    return page


def four_questions(page: Page) -> Rows:
    questions = {
        "cscore": "Does the model look at the same place for every image of a class, and since when?",
        "qr": "On QR codes, where the truth is known, do maps land on the patterns that matter?",
        "cose": "Does the map stay when the prediction stays, and change when it changes?",
        "localise": "With the same pixel budget for every method, do maps find the object?",
    }
    findings = dict(zip(questions, (consistency(), leakage(), stability(), pointing()), strict=True))
    for sentence, holds in findings.values():
        page.says(sentence, holds)
    return [[questions[study], f"`heatproof study {study}`", findings[study][0]] for study in questions]


def consistency() -> Finding:
    """Claims over several trainings; the other rows of the table are single trainings."""
    claims = rows("replication/claims.csv", "claim", "network")
    gains = [row for key, row in claims.items() if key.startswith("Fine-tuning raises Grad-CAM more")]
    low, high = (pick(float(row["mean"]) for row in gains) for pick in (min, max))
    alarms = rows("replication/warnings.csv", "group", "drop", "warning")["all trainings 0.05 any alarm"]
    sentence = (
        f"in {len(gains)} networks, {gains[0]['trainings']} trainings each, fine-tuning raised Grad-CAM's "
        f"consistency by {low:.2f} to {high:.2f} more than EigenCAM's; alarms preceded {alarms['preceded']} "
        f"of {alarms['falls']} falls of AUC, and were raised in {alarms['calm_with_warning']} of "
        f"{alarms['calm_trainings']} trainings without one (114 trainings)"
    )
    trainings = len(rows("replication/trainings.csv", "training")) + sum(
        int(row["trainings"]) for row in gains
    )
    return sentence, trainings == 114 and all(row["answer"] == "holds" for row in gains)


def leakage() -> Finding:
    table = rows("replication/qr/scores.csv", "network", "regime", "method", "seed")

    def mean(regime: str, method: str, name: str) -> float:
        own = [
            float(row[name]) for key, row in table.items() if key.startswith(f"resnet50 {regime} {method} ")
        ]
        return sum(own) / len(own)

    first, second = (
        " to ".join(f"{mean(regime, method, 'bl'):.2f}" for regime in ("ft-struct", "ft-leakmin"))
        for method in ("gradcam", "eigengradcam")
    )
    trainings = sum(key.startswith("resnet50 ft-leakmin gradcam ") for key in table)
    sentence = (
        f"a penalty on Grad-CAM's leakage takes it from {first} and EigenGrad-CAM's from {second}; "
        f"{percent(mean('ft-leakmin', 'gradcam', 'empty'))} of Grad-CAM's maps are empty (ResNet-50, "
        f"{trainings} trainings)"
    )
    return sentence, trainings > 1


def stability() -> Finding:
    """Means of COSE over all trainings; the intervals are on the page."""
    table = rows("replication/cose/cose.csv", "network", "seed", "method").values()
    values: dict[str, list[float]] = {}
    for row in table:
        values.setdefault(row["method"], []).append(float(row["cose"]))
    means = {method: sum(own) / len(own) for method, own in values.items()}
    order = ranked({method: means[method] for method in PAPER.values()})
    names = {method: name for name, method in PAPER.items()}
    best, worst = (f"{names[m]} has the {word} mean ({means[m]:.1f})"
                   for m, word in ((order[0], "highest"), (order[-1], "lowest")))  # fmt: skip
    trainings = {(row["network"], row["seed"]) for row in table}
    sentence = (
        f"in {len(trainings)} trainings of {len({network for network, _ in trainings})} networks, {best} and "
        f"{worst} of seven methods, an edge detector {means['edges']:.1f} (COSE)"
    )
    return sentence, all(len(own) == len(trainings) for own in values.values())


def pointing() -> Finding:
    """Counts networks, whichever way they come out."""
    table = rows("replication/localise/claims.csv", "claim", "network").values()
    surely = {
        word: f"{sum(row['answer'] == 'holds' for row in own)} of {len(own)}"
        for word in ("pointing game", "higher insertion", "higher box IoU")
        for own in [[row for row in table if row["claim"].startswith("Grad-CAM") and word in row["claim"]]]
    }
    point, insertion, boxes = surely.values()
    sentence = (
        f"Grad-CAM is surely better than LIME in the pointing game with {point} networks, in insertion with "
        f"{insertion}, in box IoU with {boxes} (photographs)"
    )
    return sentence, True


def speed() -> Finding:
    gpu = measured_row("h200-explain", "seven CAMs per image, resnet50, batch 256, fp32", "bare forward")
    cpu = measured_row("cpu-explain", "seven CAMs together, resnet50, batch 16", "grad-cam, the same seven")
    sentence = (
        f"seven CAMs of a ResNet-50 cost {float(gpu['ratio']):.2f} bare forward passes on an NVIDIA H200, "
        f"and on two CPU threads they are {float(cpu['ratio']):.0f} times faster than those of grad-cam"
    )
    machines = "NVIDIA H200" in gpu["machine"] and "2 threads" in cpu["machine"]
    return sentence, machines and cpu["note"].startswith("times faster")
