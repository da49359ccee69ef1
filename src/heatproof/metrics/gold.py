"""Gold lists: which images of a class count for its C-Score, and how much confidence each brings.

    G(c) = {i : y_i = c and p_i(c) >= tau},  tau = 0.5, made anew at every checkpoint

p(c) is the softmax, or for a one-logit model p(1) = sigmoid(z) and p(0) = 1 - sigmoid(z).
elangovan2026cscore also says the list is anchored to the last epoch; its tables only fit a new list at
every checkpoint, so that is the default, and an anchored list is one made with the anchor's probabilities.

Beyond the paper, which names both as open:
- tau="adaptive": tau_c is the n_c-th largest p(c) of all images, where n_c of them carry the label c, so
  that c is predicted as often as it occurs. It depends on the ranking of p(c) alone, as AUC does: a
  shifted threshold cannot empty the list, a lost ranking still does.
- calibrated confidence: one temperature T, p**(1/T) renormalised, by least negative log-likelihood
  (guo2017calibration). It changes weights, never membership. No image is weighed with a temperature that was
  fitted on it: the images of each class, in the order of p(c), go to two folds in turn, and each fold has the
  temperature of the other; or a temperature that was fitted elsewhere is given.
- an anchored list: the one of another checkpoint, with today's confidence.
- several findings per image: y is a table "b k" of 0 and 1, p(c) a sigmoid of its own, and
  G(c) = {i : y_ic = 1 and p_i(c) >= tau_c}, each finding with its own list and, if wished, its own tau_c.
  Calibrated, each finding is a question of its own with two answers, p(c) and 1 - p(c), and its own
  temperature, fitted on the images that have it and those that do not: as if its logit were all that the
  network returns.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.metrics.arrays import same_length
from heatproof.metrics.gold_masks import FIRST as FIRST
from heatproof.metrics.gold_masks import ListRule as ListRule
from heatproof.metrics.gold_masks import Tau as Tau
from heatproof.metrics.gold_masks import Weights as Weights
from heatproof.metrics.gold_masks import anchored as anchored
from heatproof.metrics.gold_masks import checked as checked
from heatproof.metrics.gold_masks import checked_tau as checked_tau
from heatproof.metrics.gold_masks import class_labels as class_labels
from heatproof.metrics.gold_masks import class_probabilities as class_probabilities
from heatproof.metrics.gold_masks import finding_table as finding_table
from heatproof.metrics.gold_masks import gold_mask as gold_mask
from heatproof.metrics.gold_masks import is_table as is_table
from heatproof.metrics.gold_masks import thresholds as thresholds
from heatproof.types import ArrayLike

TEMPERATURES = (0.05, 20.0)  # a model that is never wrong would want 0
BELOW_ONE = 1 - 2.0**-24  # the largest single below 1: a probability of 1 is one that was rounded


def gold_list(labels: ArrayLike, probs: ArrayLike, tau: Tau = 0.5) -> Tensor:
    """ "b" bool: images whose own class has a probability of at least tau.

    Args:
        labels: "b", the true classes; "b k" of 0 and 1 where an image may have several findings: then "b k"
            is given back, a list for each finding.
        probs: "b k", or "b" of class 1.
        tau: a probability, one for each class, or "adaptive": each class is predicted as often as it occurs.

    >>> gold_list([0, 0, 1, 1], [0.2, 0.7, 0.5, 0.4]).tolist()
    [True, False, True, False]
    """
    listed = torch.from_numpy(gold_mask(labels, probs, tau))
    return listed.to(probs.device) if isinstance(probs, torch.Tensor) else listed


def temperature(labels: ArrayLike, probs: ArrayLike) -> float:
    """The temperature that makes the probabilities fit the labels best; above 1 where they are too sure."""
    from scipy.optimize import minimize_scalar

    p, y = _of_one_class(labels, probs)
    if len(y) == 0:
        return 1.0
    log_p = p.clamp(min=torch.finfo(torch.float32).tiny).log()

    def loss(log_t: float) -> float:
        scaled = (log_p / math.exp(log_t)).log_softmax(1)
        return -float(scaled.gather(1, y[:, None]).mean())

    low, high = (math.log(t) for t in TEMPERATURES)
    return float(math.exp(minimize_scalar(loss, bounds=(low, high), method="bounded").x))


def calibrate(probs: ArrayLike, t: float) -> Tensor:
    """ "b k": probabilities at temperature t."""
    p = torch.from_numpy(class_probabilities(probs)).clamp(min=torch.finfo(torch.float32).tiny)
    return (p.log() / t).softmax(1)


def confidence_weights(
    labels: ArrayLike, probs: ArrayLike, kind: Weights = "confidence", t: float | None = None
) -> Tensor:
    """ "b": what the confidence in each image counts; "b k" where labels are a table, for each finding.

    Args:
        labels, probs: as for gold_list.
        kind: the probability of the own class, that after calibration, or 1.
        t: a temperature fitted on other images; None: each half of these gets that of the other.
    """
    if is_table(labels):
        chances, truth = checked(labels, probs)
        sure = np.minimum(chances, BELOW_ONE) if kind == "calibrated" else chances
        columns = zip(truth.T, sure.T, strict=True)
        return torch.stack([confidence_weights(has, chance, kind, t) for has, chance in columns], 1)
    p, y = _of_one_class(labels, probs)
    ListRule(weights=kind)  # refuses other words
    if t is not None and not 0 < t < math.inf:
        raise InputError(f"a temperature is a positive number; got {t}")
    if kind == "uniform":
        return torch.ones(len(y), dtype=p.dtype)
    own = p.gather(1, y[:, None])[:, 0]
    if kind == "confidence":
        return own
    if t is not None:
        return calibrate(p, t).gather(1, y[:, None])[:, 0]
    weights, second = own.clone(), _second_fold(y, own)
    for fold in (second, ~second):
        fitted = calibrate(p[fold], temperature(y[~fold], p[~fold]))
        weights[fold] = fitted.gather(1, y[fold][:, None])[:, 0]
    return weights


def _second_fold(y: Tensor, own: Tensor) -> Tensor:
    """ "b" bool: every other image of each class, in the order of its confidence, not of the list."""
    second = torch.zeros(len(y), dtype=torch.bool)
    for c in y.unique():
        members = torch.nonzero(y == c)[:, 0]
        second[members[own[members].argsort(stable=True)][1::2]] = True
    return second


def _of_one_class(labels: ArrayLike, probs: ArrayLike) -> tuple[Tensor, Tensor]:
    p = class_probabilities(probs)
    same_length(labels=labels, probs=p)
    return torch.from_numpy(p), torch.from_numpy(class_labels(labels, p.shape[1]))
