"""docs/results/cose.md"""

from __future__ import annotations

from claims import Page, column, ranked, rows

METHODS = {
    "gradcam": "gradcam",
    "gradcam++": "gradcam++",
    "layercam": "layercam",
    "blur-ig(steps=25)": "blur-ig",
    "ig(steps=25)": "integrated gradients",
    "guided-ig(steps=25)": "guided-ig",
    "gradient": "gradient",
    "lime(samples=200)": "lime",
    "smoothgrad(samples=25)": "smoothgrad",
    "edges": "*edges*",
    "random": "*random*",
}
FOLDERS = ("cose-cnn", "cose-vit")


def cose() -> Page:
    page = Page("docs/results/cose.md")
    runs = [rows(f"{folder}/tables/cose.csv", "method") for folder in FOLDERS]
    scores = [column(run, "COSE, %", list(METHODS)) for run in runs]
    published = column(rows("cose-cnn/tables/table1.csv", "method"), "published: Overall")

    def cell(place: int, method: str) -> str:
        row, score = runs[place][method], scores[place]
        value = f"{score[method]:.2f}"
        value = f"**{value}**" if method == ranked(score)[0] else value
        return f"{float(row['consistency']):.3f}, {float(row['sensitivity']):.3f}, {value}"

    page.tables.append(
        [
            [label, *(cell(i, m) for i in range(len(runs))), f"{published[m]:.2f}" if m in published else "–"]
            for m, label in METHODS.items()
        ]
    )
    orders = [[m for m in ranked(score) if m in published] for score in (*scores, published)]
    places = {m: [order.index(m) + 1 for order in orders] for m in published}
    page.says(
        "Grad-CAM has the highest COSE of its seven methods on both networks",
        len(published) == 7 and set(places["gradcam"]) == {1},
    )
    page.says(
        "Grad-CAM++ is second of the seven here, on both networks, and the last in the paper",
        places["gradcam++"] == [*(2 for _ in runs), 7],
    )
    page.says(
        "CAMs have higher values than the published ones",
        all(score[m] > published[m] for score in scores for m in ("gradcam", "gradcam++")),
    )
    consistent, sensitive = (
        [column(run, name, list(METHODS)) for run in runs] for name in ("consistency", "sensitivity")
    )
    page.says(
        "An edge detector is the most consistent of all and blind to the prediction; noise is the "
        "most sensitive",
        all(ranked(study)[0] == "edges" for study in consistent)
        and all(ranked(study)[0] == "random" for study in sensitive),
    )
    page.says("COSE puts both at the bottom", all(set(ranked(s)[-2:]) == {"edges", "random"} for s in scores))
    page.says(
        "On the CNN, whose last stage is followed by a mean alone, LayerCAM and Grad-CAM++ differ by "
        "less than 0.001",
        all(abs(of[0]["layercam"] - of[0]["gradcam++"]) < 0.001 for of in (consistent, sensitive)),
    )
    counts = [[int(run["gradcam"][name]) for name in ("same", "changed")] for run in runs]
    (cnn, vit) = (f"{changed} of {changed + same}" for same, changed in counts)
    page.says(f"{cnn} pairs changed their prediction on the CNN, {vit} on the ViT")
    page.states(
        "What agrees with the paper.",
        "What does not.",
        "The floors do what they should.",
        "Every picture in 20 transformed versions",
        "224 x 224, checkpoints at epochs 1, 2, 4, 8 and 12; 24 pictures",
        "112 x 112, checkpoints at epochs 1 and 5; 24 pictures",
        "LIME 200, SmoothGrad 25, the path methods 25 steps",
    )
    return page
