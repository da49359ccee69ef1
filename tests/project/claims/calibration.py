"""docs/results/calibration.md"""

from __future__ import annotations

import math
import sys

from claims import ROOT, Page

sys.path.insert(0, str(ROOT / "docs"))
from calibration_page import columns, tables
from calibration_words import rows, sentences

from heatproof.verdict.follow import calibration as known
from research.calibration.cheap import outcome

OTHER = "other half"


def cheap(page: Page) -> list[list[str]]:
    """The table of the cheaper tests, recounted with the limits chosen on one half."""
    table = rows("tests.csv")
    pairs = sorted({row["pair"] for row in table})
    halves = {
        name: [r for r in table if r["pair"] in pairs[k::2]]
        for k, name in enumerate(("used to choose the limits", OTHER))
    }
    limits = {
        "follows, does not follow": (0.4, -0.05, 0.0, 0.3),
        "follows": (0.4, -0.05, -math.inf, math.inf),
    }
    page.states("agreement of at least 0.40", "at least 0.05 below that of two such maps")
    cells = []
    for answers, by in limits.items():
        for name, own in halves.items():
            *shares, worst = outcome(own, by)
            cells.append([answers, name, *(share.text for share in shares), f"{worst:.1%}"])
    return cells


def calibration() -> Page:
    page = Page("docs/results/calibration.md")
    made = tables(columns())
    names = "rates methods summaries controls discs tests sequential sizes pairs uses"
    for name in names.split():
        lines = made[name].splitlines()[2:]
        page.tables.append([[cell.strip() for cell in line.strip("|").split("|")] for line in lines])
    page.tables.insert(8, cheap(page))
    for sentence in sentences().values():
        page.says(sentence)
    beaten = {
        m: [float(r["insertion"]) for r in rows("tests.csv") if r["method"] == m] for m in ("edges", "centre")
    }
    page.says(
        "an edge detector or a dot in the centre is also better than noise",
        all(sum(values) / len(values) > 0 for values in beaten.values()),
    )
    answers = [(row["truth"], row["answer"]) for row in rows("uses.csv") if row["half"] == "published"]
    fine = sum(answer == "yes" for truth, answer in answers if truth == "cheats")
    rates = known()["network"]["rates"]["all"]
    page.says(
        "Every network is a row of uses.csv",
        rates["called_fine"]["share"] * rates["called_fine"]["n"] == fine
        and rates["undecided"]["n"] == len(answers),
    )
    contrast = [row for row in rows("controls.csv") if row["method"] == "gradcam"]
    page.says(
        "Grad-CAM does in all pairs that the changed answers confirm",
        all(float(row["contrast_auc"]) > 0.9 for row in contrast) and len(contrast) == 40,
    )
    page.states(
        "lies above 1/2", "Clopper-Pearson, 95 %",
        "a test at 5 % is wrong in 5 % of the cases without an effect",
        "smoothgrad (8 samples), integrated-gradients (8 steps). 100 held-out images",
        "fewer than 90 % of A's answers, or more than 10 % of B's",
        "after 40 images, after each doubling", "100 images, the nine methods below",
        "scaled to 100 images", "nine pairs of 32 pixels", "and 9 means all",
        "1,200 X-rays of each class at 112 pixels and 4,500 images of CIFAR-10",
        "49 pairs were measured; planting failed in 12", "--repeats 2 --skip 1",
        "in 80 % of the positives", "networks of 112 pixels and more", "with 14 processes",
        "9,000 images, of which 4,200 were used", "700 of each class",
        "215 ImageNet photographs with boxes at 256 pixels",
        "in two calls of five minutes", "seeds 11 to 15",
        "28 pairs on one H200, 11 small ones on a CPU", "time for 33 of the 108 pairs that the command plans",
        "planting failed in five of the 33", "14 were measured by the same functions",
        "images above 224 pixels", "fewer than 100 images",
        "an earlier run of 38 pairs of the same population",
        "the box of the object covers 10, 30 or 60 % of the image; 80 or 100 % of a class have its cue",
        "the cue changes at most 10 % of B's answers", "fewer than 80 % of the images, are left out",
        "The plan has 104 pairs: 64 of larger networks", "and 40 of tiny ones (32 and 48 pixels)",
        "Two pairs of scenes with boxes of 30 % have too few",
    )  # fmt: skip
    return page
