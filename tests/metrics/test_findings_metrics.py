"""Gold lists, AUC, recall and accuracy where an image may have several findings: each as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from heatproof.errors import InputError
from heatproof.metrics.classifier import accuracy, auc, auc_errors, recall, thresholds
from heatproof.metrics.cscores import gold_list


def made(n: int = 60, k: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    truth = random.random((n, k)) < [0.3, 0.5, 0.1]
    return torch.tensor(truth), torch.tensor(1 / (1 + np.exp(-random.normal(2.0 * truth - 1, 1.2))))


def test_each_finding_is_judged_as_a_binary_label_of_its_own() -> None:
    truth, p = made()
    for c in range(3):
        alone, own = truth[:, c].long(), p[:, c]
        assert auc(truth, p).classes[c] == auc(alone, own).value
        assert recall(truth, p).classes[c] == recall(alone, own).classes[1]
        assert accuracy(truth, p).classes[c] == accuracy(alone, own).value
        lists = gold_list(truth, p)[:, c]
        assert torch.equal(lists, gold_list(alone, own) & truth[:, c])
        assert thresholds(truth, p, "adaptive")[c] == thresholds(alone, own, "adaptive")[1]
    for score in (auc, recall, accuracy):
        result = score(truth, p)
        assert result.value == pytest.approx(np.mean(list(result.classes.values()))) and result.n == 60


def test_scikit_learn_agrees() -> None:
    known = pytest.importorskip("sklearn.metrics")
    truth, p = made(seed=3)
    assert auc(truth, p).value == pytest.approx(known.roc_auc_score(truth, p))
    assert recall(truth, p).value == pytest.approx(known.recall_score(truth, p >= 0.5, average="macro"))


def test_thresholds_are_per_finding() -> None:
    truth, p = made()
    tau = [0.2, 0.5, 0.9]
    predicted = p >= torch.tensor(tau)
    assert torch.equal(gold_list(truth, p, tau), truth & predicted)
    result = recall(truth, p, tau=tau)
    assert result.classes[2] == pytest.approx(float((predicted & truth)[:, 2].sum() / truth[:, 2].sum()))
    assert auc(truth, p).classes == auc(truth, p.logit(), logits=True).classes
    assert recall(truth, p.logit(), logits=True, tau=tau).value == result.value


def test_the_error_of_a_mean_auc_is_that_of_repeated_draws() -> None:
    """Findings of one image move together: the error of the mean is not that of AUCs apart."""
    random, values, errors = np.random.default_rng(1), [], []
    truth = torch.tensor(random.random((80, 2)) < 0.5)
    for _ in range(400):
        shared = random.normal(0, 1, (80, 1))
        z = torch.tensor(1.2 * truth.numpy() + shared + random.normal(0, 0.3, (80, 2)))
        values.append(auc(truth, z, logits=True).value)
        errors.append(float((auc_errors(truth, z, logits=True) ** 2).sum()) ** 0.5)
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.15)


def test_a_finding_that_never_occurs_is_left_out_and_named() -> None:
    truth, p = made()
    truth[:, 1] = False
    result = auc(truth, p)
    assert np.isnan(result.classes[1]) and "class 1" in result.reason and result.value == result.value
    assert np.isnan(accuracy(truth, p).classes[1]) and np.isnan(recall(truth, p).classes[1])


def test_tables_that_do_not_fit_are_refused() -> None:
    truth, p = made()
    with pytest.raises(InputError, match="0 or 1 in 2 columns"):
        auc(truth, p[:, :2])
    with pytest.raises(InputError, match="0 or 1 in 3 columns"):
        recall(truth.long() * 2, p)
    with pytest.raises(InputError, match="2 values of tau for 3 classes"):
        gold_list(truth, p, [0.5, 0.5])
