"""Every epoch: the flags of the paper's Table 2, events of the training, and whether they precede alarms."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heatproof.train.recipe import Epoch, GradientNorm
from heatproof.verdict.trajectory import (
    WINDOW,
    early_warning,
    epoch_flag,
    grown_layers,
    jumps,
    read_gradients,
    training_events,
    whole_deviation,
    whole_norm,
    write_gradients,
)

TABLE = json.loads((Path(__file__).parents[1] / "data" / "papers.json").read_text())["cscore"]
COLLAPSED, CROSSED = "AUC below 0.5", "accuracy below 50 %, AUC intact"


def test_the_published_epochs_are_flagged_as_the_caption_says() -> None:
    """Red: AUC < 0.50. Amber: accuracy < 50 % with intact AUC, of which it names DenseNet201, 21 to 23."""
    epochs: dict[str, dict[str, list[int]]] = {name: {COLLAPSED: [], CROSSED: []} for name in TABLE["archs"]}
    for epoch, row in TABLE["acc"].items():
        for name, (auc, percent) in zip(TABLE["archs"], row, strict=True):
            if flag := epoch_flag(auc, percent / 100):
                epochs[name][flag].append(int(epoch))
    assert epochs == {
        "DenseNet201": {COLLAPSED: [], CROSSED: [3, 21, 22, 23]},
        "InceptionV3": {COLLAPSED: [], CROSSED: [23, 26]},  # the paper: "collapse events at epochs 23 and 26"
        "ResNet50V2": {COLLAPSED: [23, 30], CROSSED: [22, 24]},
    }


@given(st.floats(0, 1), st.floats(0, 1), st.integers(2, 20))
def test_a_flag_has_one_kind_only(auc: float, accuracy: float, classes: int) -> None:
    flag = epoch_flag(auc, accuracy, classes)
    assert (flag == COLLAPSED) == (auc < 0.5)
    assert flag.startswith("accuracy below") == (auc >= 0.75 and accuracy < 1 / classes)
    assert epoch_flag(math.nan, accuracy, classes) == ""


def test_guessing_among_ten_classes_is_a_tenth() -> None:
    assert epoch_flag(0.9, 0.3, 10) == "" and epoch_flag(0.9, 0.09, 10) == "accuracy below 10 %, AUC intact"


def epochs(*norms: float, phase: str = "second", start: int = 1) -> list[Epoch]:
    layers = [{"stem": GradientNorm(0.6 * n, n), "fc": GradientNorm(0.8 * n, n)} for n in norms]
    return [Epoch(start + k, phase, 0.1, 0.9, 0.9, 1e-3, 1.0, made) for k, made in enumerate(layers)]


def gradient_jumps(epochs: list[Epoch]) -> list[int]:
    return jumps(epochs, lambda epoch: whole_norm(epoch.gradients))


def test_a_jump_is_twice_the_past_of_its_own_phase() -> None:
    assert whole_norm(epochs(2.0)[0].gradients) == pytest.approx(2.0)
    assert gradient_jumps(epochs(1.0, 1.1, 0.9, 2.5, 1.0)) == [4]
    assert gradient_jumps(epochs(1.0, 1.1, 0.9, 1.9)) == []  # not twice
    assert gradient_jumps(epochs(1.0, 9.0)) == []  # too little past
    assert gradient_jumps(epochs(9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.5)) == [9]  # of late it was calm
    assert gradient_jumps(epochs(1.0, 4.0, 0.2, 5.0, 2.5)) == []  # as wild as before
    both = [*epochs(1.0, 1.0, 1.0, phase="first"), *epochs(20.0, 20.0, 20.0, start=4)]
    assert gradient_jumps(both) == []  # another phase trains other layers
    assert gradient_jumps([Epoch(1, "a", 0.1, 0.9, 0.9, 1e-3, 1.0)] * 4) == []  # nothing was logged


def test_the_layers_that_grew() -> None:
    before = {"a": GradientNorm(1, 1), "b": GradientNorm(1, 1), "c": GradientNorm(0, 0)}
    now = {"a": GradientNorm(2, 2), "b": GradientNorm(5, 5), "c": GradientNorm(9, 9)}
    assert grown_layers(before, now) == ["b", "a"]


@given(st.sets(st.integers(1, 30), max_size=6), st.sets(st.integers(1, 30), max_size=6), st.integers(1, 30))
def test_preceded_equals_a_count_by_hand(at: set[int], alarms: set[int], last: int) -> None:
    every = list(range(1, last + 1))
    warning = early_warning(every, sorted(at), sorted(alarms))
    raised, jumped = alarms & set(every), at & set(every)

    def by_hand(at: set[int]) -> int:
        return len([a for a in raised if any(a - k in at for k in range(WINDOW + 1))])

    assert (warning.alarms, warning.preceded) == (len(raised), by_hand(jumped))
    if raised and jumped:
        turned = [{(j - 1 + k) % last + 1 for j in jumped} for k in range(last)]
        assert warning.p == pytest.approx(sum(by_hand(t) >= warning.preceded for t in turned) / last)
        assert 0 < warning.p <= 1
    else:
        assert math.isnan(warning.p)


def test_norms_of_a_monitor_are_kept_beside_the_run(tmp_path: Path) -> None:
    assert read_gradients(tmp_path) == {}
    write_gradients(tmp_path, "epoch-001", {"fc": GradientNorm(0.5, 1.5)})
    write_gradients(tmp_path, "epoch-002", {"fc": GradientNorm(0.25, math.inf)})
    assert read_gradients(tmp_path) == {
        "epoch-001": {"fc": GradientNorm(0.5, 1.5)}, "epoch-002": {"fc": GradientNorm(0.25, math.inf)},
    }  # fmt: skip


def test_events_of_a_training_are_those_that_were_put_in() -> None:
    """Epoch 4: gradients grow; 5: their spread; 6: that of the loss; 8: the rate, with the phase."""
    made = []
    for k in range(1, 11):
        norms = {
            "stem": GradientNorm(3.0 * (5 if k == 4 else 1), 9, 0.3),
            "fc": GradientNorm(4.0, 9, 0.4 * (9 if k == 5 else 1)),
        }  # fmt: skip
        phase, rate = ("first", 1e-4 / k) if k < 8 else ("second", 1e-3 / k)
        made.append(Epoch(k, phase, 0.5, 0.9, 0.9, rate, 1.0, norms, 0.1 * (4 if k == 6 else 1)))
    assert whole_deviation(made[0].gradients) == pytest.approx(0.5)
    assert training_events(made) == {
        "gradient norm": [4],
        "gradient norm over batches": [5],
        "loss over batches": [6],
        "learning rate": [8],
    }  # fmt: skip
    plain = [Epoch(k, "first", 0.5, 0.9, 0.9, 1e-4, 1.0) for k in range(1, 5)]
    assert training_events(plain) == {"learning rate": []}, "what was not logged is not judged"


def test_a_cause_counts_in_the_epoch_itself() -> None:
    every = list(range(1, 31))
    cause = early_warning(every, [21], [21, 22, 27])
    assert cause.preceded == 2 and cause.p == pytest.approx(6 / 30)  # events at 17 to 22
