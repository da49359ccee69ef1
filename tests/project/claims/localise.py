"""docs/results/localise.md"""

from __future__ import annotations

from claims import FLOORS, Page, best_in_bold, column, percent, rows

FOLDER = "localise-lite0/tables"
WHERE = ("Mask IoU", "Box IoU", "Inside share", "Pointing game")
HOW = ("Insertion AUC", "Deletion AUC")


def localise() -> Page:
    where, how = rows(f"{FOLDER}/localisation.csv", "Method"), rows(f"{FOLDER}/faithfulness.csv", "Method")
    methods = [name for name in where if "thesis" not in name]
    of = {name: column(where, name, methods) for name in WHERE}
    of |= {name: column(how, name, methods) for name in HOW}
    page = Page("docs/results/localise.md")

    cells = {n: best_in_bold(of[n], ".3f", min if n == "Deletion AUC" else max) for n in of}
    empty = column(where, "constant maps", methods)
    label = {m: f"*{m}*" if m in FLOORS else m for m in methods}
    label |= {m: f"{m} ({percent(empty[m], 1)} empty)" for m in methods if empty[m]}
    table = [[label[m], *(cells[name][m] for name in of)] for m in methods]
    for name in ("Grad-CAM", "LIME"):
        printed = {**where[f"{name} (thesis)"], **how[f"{name} (thesis)"]}
        table.append([f"{name}, thesis", *(f"{float(printed[n]):.3f}" if printed[n] else "" for n in of)])
    page.tables.append(table)

    counted = rows(f"{FOLDER}/localisation_by_class.csv", "Class")
    recall = column(rows(f"{FOLDER}/faithfulness_by_class.csv", "Class"), "Recall")["mean over classes"]
    page.says(f"leaves {where['gradcam']['images']} photographs of {len(counted) - 1} classes")
    page.says(f"Mean recall {recall:.3f} (thesis, ResNet-18: 0.793)")

    order = rows(f"{FOLDER}/order.csv", "Mean")
    deletion = "Deletion AUC (lower is better)"
    theirs = {n: float(row["thesis Grad-CAM"]) > float(row["thesis LIME"]) for n, row in order.items()}
    page.says("In the thesis Grad-CAM is above LIME on all five means", all(
        above != (name == deletion) for name, above in theirs.items()
    ))  # fmt: skip
    ahead = column(order, "Grad-CAM ahead by")
    sure = {name: row["order"] for name, row in order.items()}
    page.says(
        f"mask IoU by {ahead['Mask IoU']:.3f}, pointing by {ahead['Pointing game']:.3f}",
        sure["Mask IoU"] == sure["Pointing game"] == "as in the thesis",
    )
    page.says(
        f"box IoU by {-ahead['Box IoU']:.3f}, insertion by {-ahead['Insertion AUC']:.3f}",
        sure["Box IoU"] == sure["Insertion AUC"] == "the other way round",
    )
    page.says(
        "deletion is not decided (the interval of the difference holds 0)", "not certain" in sure[deletion]
    )

    point, boxes, insertion = of["Pointing game"], of["Box IoU"], of["Insertion AUC"]
    page.says(
        f"points at the object in {percent(point['centre'])} of the classes' images: LIME "
        f"({point['lime']:.3f}) "
        "does not beat it",
        point["lime"] <= point["centre"],
    )
    page.says(f"random noise gets {boxes['random']:.3f}", boxes["random"] > boxes["gradcam"])
    real = [m for m in methods if m not in FLOORS]
    page.says(
        "the only one of the eight methods",
        [m for m in real if point[m] <= point["centre"]] == ["lime"],
    )
    page.says(
        f"an edge detector ({insertion['edges']:.3f}), the best floor",
        min(insertion[m] for m in real) > insertion["edges"] == max(insertion[m] for m in FLOORS),
    )
    page.says("No map is empty", max(empty.values()) == 0)
    page.states(
        "Does the order hold?",
        "What the floors say.",
        "215 photographs of the ImageNet validation set, five for each of the thesis's 43 classes",
        "one object, one box, 10 to 80 % of the picture",
        "20 % of the pixels for each, LIME with 1,000 samples, RISE with 4,000 masks",
        "insertion and deletion in 100 steps",
    )
    return page
