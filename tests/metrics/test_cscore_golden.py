"""C-Score against the published tables: what follows from them, and what provably does not."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from heatproof.metrics.cscores import cscore, cscore_by_class, global_cscore, soft_iou

DATA = Path(__file__).parents[1] / "data"
PAPERS = json.loads((DATA / "papers.json").read_text())
TABLES = PAPERS["cscore"]
DIFFERENCES = json.loads((DATA / "cscore_differences.json").read_text())
NORMAL, PNEUMONIA = 317, 855
# A printed number is within half a last digit of the true one. The global and the mean of the two class
# values each carry that, hence twice as much between the printed global and one made of printed values.
PRINTED, BETWEEN = 0.0005, 0.001
EPSILON = 1e-9

checkpoints = [(architecture, e) for architecture in TABLES["archs"] for e in range(len(TABLES["epochs"]))]


def misses(architecture: str, e: int, n0: int, n1: int) -> list[float]:
    """How far each method's printed global is from the one made of its printed class values."""
    tables = [TABLES[name][architecture] for name in ("global", "normal", "pneumonia")]
    return [
        abs(printed[e] - global_cscore([normal[e], pneumonia[e]], [n0, n1]))
        for printed, normal, pneumonia in zip(*(t.values() for t in tables), strict=True)
    ]


def recognised(architecture: str, epoch: int) -> int:
    accuracy = TABLES["acc"][str(epoch)][TABLES["archs"].index(architecture)][1]
    return round(accuracy / 100 * (NORMAL + PNEUMONIA))


def feasible(architecture: str, e: int) -> list[int]:
    """Sizes of the Normal list that fit all six methods, given how many images are recognised in all."""
    total = recognised(architecture, TABLES["epochs"][e])
    possible = range(max(0, total - PNEUMONIA), min(NORMAL, total) + 1)
    return [n0 for n0 in possible if max(misses(architecture, e, n0, total - n0)) <= BETWEEN + EPSILON]


@pytest.mark.parametrize(("architecture", "e"), checkpoints)
def test_globals_follow_from_lists_made_at_every_checkpoint(architecture: str, e: int) -> None:
    known = TABLES["gold"][f"{architecture}|E{TABLES['epochs'][e]}"]
    assert recognised(architecture, TABLES["epochs"][e]) == known["N"]
    sizes = feasible(architecture, e)
    assert [sizes[0], sizes[-1]] == known["n0_feasible"]


def test_126_of_126_with_new_lists_and_only_22_with_all_images() -> None:
    assert sum(6 for architecture, e in checkpoints if feasible(architecture, e)) == 126
    anchored = [m for architecture, e in checkpoints for m in misses(architecture, e, NORMAL, PNEUMONIA)]
    assert len(anchored) == 126
    # 22 reproduce the printed digits. Even with the rounding of all three numbers allowed for, as above, 49.
    assert sum(m <= PRINTED + EPSILON for m in anchored) == 22
    assert sum(m <= BETWEEN + EPSILON for m in anchored) == 49
    best = [TABLES["gold"][f"{a}|E{TABLES['epochs'][e]}"] for a, e in checkpoints]
    exact = [
        sum(
            m <= PRINTED + EPSILON
            for m in misses(a, e, g["best_point"]["n0"], g["N"] - g["best_point"]["n0"])
        )
        for (a, e), g in zip(checkpoints, best, strict=True)
    ]
    assert exact == [g["best_point"]["exact"] for g in best] and sum(exact) == 112


def change(architecture: str, method: str) -> float:
    values = TABLES["global"][architecture][method]
    return values[TABLES["epochs"].index(30)] - values[TABLES["epochs"].index(20)]


def test_the_published_differences_of_methods() -> None:
    listed = [
        (architecture, method, value)
        for architecture, notes in DIFFERENCES["table_notes"].items()
        for method, value in notes.items()
        if method != "avg"
    ]
    listed += [(d["architecture"], d["method"], d["value"]) for d in DIFFERENCES["text"].values()]
    assert len(listed) == 15 + 3
    for architecture, method, value in listed:
        assert change(architecture, method) == pytest.approx(value, abs=EPSILON)
    gap = DIFFERENCES["class_gap"]
    e = TABLES["epochs"].index(gap["epoch"])
    normal, pneumonia = (TABLES[k][gap["architecture"]][gap["method"]][e] for k in ("normal", "pneumonia"))
    assert normal - pneumonia == pytest.approx(gap["value"], abs=EPSILON)


@pytest.mark.parametrize("architecture", TABLES["archs"])
def test_the_published_averages_follow_from_no_set_of_methods(architecture: str) -> None:
    changes = {m: change(architecture, m) for m in TABLES["global"][architecture]}
    published = DIFFERENCES["table_notes"][architecture]["avg"]
    for size in range(1, 7):
        for methods in itertools.combinations(changes, size):
            assert abs(np.mean([changes[m] for m in methods]) - published) > PRINTED
    ours = DIFFERENCES["recomputed_means"][architecture]
    assert np.mean(list(changes.values())) == pytest.approx(ours["six"], abs=1e-4)
    listed = [m for m in DIFFERENCES["table_notes"][architecture] if m != "avg"]
    assert np.mean([changes[m] for m in listed]) == pytest.approx(ours["five listed"], abs=1e-4)


def test_the_average_over_six_of_section_5_is_not_the_mean_of_six() -> None:
    claim = DIFFERENCES["mean_of_six_section_5_1"]
    changes = [change(claim["architecture"], m) for m in TABLES["global"][claim["architecture"]]]
    assert abs(np.mean(changes) - claim["value"]) > 0.02


def test_the_empty_list_of_epochs_22_and_23_is_pneumonia_not_normal() -> None:
    """317 of 1172 is every Normal image and no other; the paper says that no Normal image passes."""
    for architecture, epochs in DIFFERENCES["accuracy_claims"].items():
        for epoch, claim in epochs.items():
            full = {"Normal": NORMAL, "Pneumonia": PNEUMONIA}
            del full[claim["empty"]]
            assert recognised(architecture, int(epoch)) == claim["recognised"] == sum(full.values())


def test_synthetic_vector() -> None:
    vector = PAPERS["synthetic"]["cscore"]
    maps, p = np.array(vector["H"], dtype=np.float32), vector["p"]
    for pair, expected in vector["sIoU_alpha2"].items():
        i, j = int(pair[0]), int(pair[1])
        assert soft_iou(maps[i] ** 2, maps[j] ** 2).item() == pytest.approx(expected, abs=1e-12)
    w = np.array(p) / np.sum(p)
    assert sum(w[i] + w[j] for i, j in itertools.combinations(range(3), 2)) == pytest.approx(vector["Z"])
    assert cscore(maps, p).value == pytest.approx(vector["C"], abs=1e-12)
    assert cscore(maps, [1.0] * 3).value == pytest.approx(vector["unweighted"], abs=1e-12)
    by_class = cscore_by_class(maps, [1, 1, 1], p)
    assert by_class.classes[1].value == by_class.overall.value == pytest.approx(vector["C"], abs=1e-12)
