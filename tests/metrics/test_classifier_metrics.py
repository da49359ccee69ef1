"""Accuracy, recall, F1 and AUC against scikit-learn, and where they are not defined; calibration."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, recall_score, roc_auc_score

from heatproof.errors import InputError
from heatproof.metrics.classifier import accuracy, auc, auc_errors, f1, recall
from heatproof.metrics.cscores import calibrate, temperature

quick = settings(max_examples=40, deadline=None)


def problem(seed: int, classes: int, n: int = 60, digits: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Labels of every class and rounded logits, so that ties occur where digits are few."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, n - classes)])
    return labels, rng.normal(size=(n, classes)).round(digits) + np.eye(classes)[labels]


def softmax(z: np.ndarray) -> np.ndarray:
    return torch.tensor(z).softmax(1).numpy()


@quick
@given(st.integers(0, 10_000), st.integers(0, 8))
def test_binary_auc_equals_sklearn_with_ties(seed: int, digits: int) -> None:
    y, z = problem(seed, 2, digits=digits)
    z = z[:, 1].round(digits)
    expected = roc_auc_score(y, z)
    assert auc(y, z, logits=True).value == pytest.approx(expected, abs=1e-12)
    assert auc(y, z[:, None], logits=True).value == pytest.approx(expected, abs=1e-12)
    p = (1 / (1 + np.exp(-z))).round(digits + 1)
    assert auc(y, p).value == pytest.approx(roc_auc_score(y, p), abs=1e-12)
    assert auc(y, np.stack([1 - p, p], 1)).classes[1] == auc(y, p).value


@quick
@given(st.integers(0, 10_000), st.integers(3, 6))
def test_multiclass_equals_sklearn(seed: int, classes: int) -> None:
    y, z = problem(seed, classes)
    p = softmax(z)
    expected = roc_auc_score(y, p, multi_class="ovr", average="macro")
    assert auc(y, p).value == pytest.approx(expected, abs=1e-12)
    assert auc(y, z, logits=True).value == pytest.approx(expected, abs=1e-12)
    assert auc(y, p).classes[2] == pytest.approx(roc_auc_score(y == 2, p[:, 2]), abs=1e-12)
    predicted = z.argmax(1)
    for outputs, logits in ((p, False), (z, True)):
        assert accuracy(y, outputs, logits=logits).value == pytest.approx(accuracy_score(y, predicted))
        result = recall(y, outputs, logits=logits)
        assert result.value == pytest.approx(balanced_accuracy_score(y, predicted))
        assert list(result.classes.values()) == pytest.approx(recall_score(y, predicted, average=None))
        scores = f1(y, outputs, logits=logits)
        assert scores.value == pytest.approx(f1_score(y, predicted, average="macro"))
        assert list(scores.classes.values()) == pytest.approx(f1_score(y, predicted, average=None))


def test_saturated_logits_still_rank() -> None:
    """float64 cannot tell sigmoid(40) from sigmoid(80); the logits can."""
    z = np.array([40.0, 60.0, 80.0, 100.0])
    assert auc([0, 0, 1, 1], z, logits=True).value == 1
    assert auc([0, 0, 1, 1], np.stack([-z, z], 1), logits=True).value == 1
    three = np.stack([z, 0 * z, 0 * z - 1], 1)
    assert auc([1, 2, 0, 0], three, logits=True).classes[0] == 1


def test_slow_twin_counts_pairs() -> None:
    y, z = problem(1, 2, digits=1)
    pairs = [(a > b) + (a == b) / 2 for a in z[y == 1, 1] for b in z[y == 0, 1]]
    assert auc(y, z[:, 1], logits=True).value == pytest.approx(np.mean(pairs), abs=1e-12)


def test_one_class_only_is_nan_with_a_reason() -> None:
    result = auc([1, 1, 1], [0.2, 0.5, 0.9])
    assert math.isnan(result.value) and "class 0, 1" in result.reason
    result = recall([1, 1, 1], [0.2, 0.6, 0.9])
    assert result.value == pytest.approx(2 / 3) and math.isnan(result.classes[0])
    assert result.reason == "left out: class 0 has no image"
    three = auc([0, 0, 1, 1], softmax(np.random.default_rng(0).normal(size=(4, 3))))
    assert math.isnan(three.classes[2]) and not math.isnan(three.value) and "class 2" in three.reason
    for metric in (accuracy, recall, f1, auc):
        nothing = metric([], np.zeros((0, 3)))
        assert math.isnan(nothing.value) and nothing.n == 0 and nothing.reason


def test_calibration_finds_the_temperature_that_was_applied() -> None:
    rng = np.random.default_rng(0)
    truth = torch.tensor(rng.dirichlet([1, 1, 1], 6000))
    y = torch.tensor([rng.choice(3, p=row) for row in truth.numpy()])
    overconfident = calibrate(truth, 1 / 3)
    t = temperature(y, overconfident)
    assert t == pytest.approx(3, rel=0.05)
    assert torch.allclose(calibrate(overconfident, t), truth, atol=0.02)
    assert temperature([], np.zeros((0, 3))) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_gives_the_same() -> None:
    y, z = problem(0, 4)
    for metric in (accuracy, recall, f1, auc):
        here, there = (
            metric(y, z, logits=True),
            metric(torch.tensor(y).cuda(), torch.tensor(z).cuda(), logits=True),
        )
        assert there.value == pytest.approx(here.value, abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "probs", "logits", "sentence"),
    [
        ([0, 1], [0.5, 0.5, 0.5], False, "probs has 3 entries but labels has 2"),
        ([0, 2], [0.5, 0.5], False, "label 2 is outside the 2 classes"),
        ([0, 1], [0.5, -0.5], False, "probabilities must lie in [0, 1]; pass softmax or sigmoid outputs"),
        ([0, 1], [0.5, float("inf")], True, "logits must be finite"),
    ],
)
def test_bad_input_raises_a_clear_error(labels: list, probs: list, logits: bool, sentence: str) -> None:
    for metric in (accuracy, recall, f1, auc):
        with pytest.raises(InputError) as error:
            metric(labels, probs, logits=logits)
        assert sentence in str(error.value) and "\n" not in str(error.value)


def test_auc_of_saturated_probabilities_follows_the_logits() -> None:
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(60) % 2
    for k in (2, 3):
        z = torch.randn(60, k, generator=generator)
        z[torch.arange(60), labels] += 1.0
        z[:, 1] += 20.0  # every p(1) is 1 in single precision
        probs = z.softmax(1)
        assert (probs[:, 1] == 1).any()
        assert auc(labels, probs).value == pytest.approx(auc(labels, z, logits=True).value, abs=1e-3)


# ---- the error of a difference of AUCs on the same images


def slow_delong(y: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    """The variance of AUC - AUC', as DeLong et al. write it: kernels, components, covariances."""

    def beats(a: float, b: float) -> float:
        return 1.0 if a > b else 0.5 if a == b else 0.0

    own, rest = np.flatnonzero(y == 1), np.flatnonzero(y == 0)
    v10 = np.array([[np.mean([beats(s[i], s[j]) for j in rest]) for i in own] for s in (first, second)])
    v01 = np.array([[np.mean([beats(s[i], s[j]) for i in own]) for j in rest] for s in (first, second)])
    covariance = np.cov(v10) / len(own) + np.cov(v01) / len(rest)
    contrast = np.array([1.0, -1.0])
    return float(contrast @ covariance @ contrast)


def pair(seed: int, classes: int, n: int, digits: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two checkpoints that answer the same images alike."""
    y, z = problem(seed, classes, n, digits)
    noise = np.random.default_rng(seed + 1).normal(size=z.shape)
    return y, softmax(z).round(digits), softmax(z + 0.5 * noise).round(digits)


@pytest.mark.parametrize("digits", [1, 8])
def test_the_paired_error_is_delong_s(digits: int) -> None:
    y, first, second = pair(3, 2, 50, digits)
    e, f = auc_errors(y, first[:, 1]), auc_errors(y, second[:, 1])
    expected = slow_delong(y, first[:, 1], second[:, 1])
    assert float(((e - f) ** 2).sum()) == pytest.approx(expected, rel=1e-9)
    assert float((e**2).sum()) == pytest.approx(slow_delong(y, first[:, 1], np.zeros(50)), rel=1e-9)


@pytest.mark.parametrize("classes", [2, 4])
def test_the_paired_error_is_that_of_a_bootstrap_over_images(classes: int) -> None:
    y, first, second = pair(5, classes, 240)
    rng, differences = np.random.default_rng(0), []
    members = [np.flatnonzero(y == c) for c in range(classes)]
    for _ in range(400):
        drawn = np.concatenate([rng.choice(member, len(member)) for member in members])
        differences.append(auc(y[drawn], first[drawn]).value - auc(y[drawn], second[drawn]).value)
    errors = [auc_errors(y, p) for p in (first, second)]
    paired = float(((errors[0] - errors[1]) ** 2).sum()) ** 0.5
    assert paired == pytest.approx(np.std(differences), rel=0.12)
    assert paired < 0.8 * float(sum((e**2).sum() for e in errors)) ** 0.5  # what unpaired errors claim


def test_a_class_with_one_image_has_no_error() -> None:
    assert np.isnan(auc_errors([0, 0, 1], [0.1, 0.2, 0.7])).tolist() == [False, False, True]


@quick
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_f1_of_several_labels_and_of_a_class_without_images_equals_sklearn(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    table, p = rng.integers(0, 2, (40, k)), rng.random((40, k))
    expected = f1_score(table, p >= 0.4, average=None, zero_division=0)
    assert list(f1(table, p, tau=0.4).classes.values()) == pytest.approx(expected)
    y, z = problem(seed, k)
    wider = np.concatenate([z, z[:, :1] + 0.1], axis=1)  # a class that is predicted and never occurs
    known = f1_score(y, wider.argmax(1), labels=range(k), average="macro", zero_division=0)
    result = f1(y, wider, logits=True)
    assert result.value == pytest.approx(known) and math.isnan(result.classes[k])
