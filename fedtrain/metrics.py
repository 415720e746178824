"""Metrics that are no averages, such as macro F1 and AUROC, from counts summed over batches and sites.

A task's evaluate() makes the counts, and its metrics() computes the metric from the sums over all sites.
Counts are whole numbers, so their sums are exact, under masks too: the metric is that of the pooled data.

    def evaluate(self, model, batch):
        logits = model(batch[0])
        return metrics.confusion(logits, batch[1], classes=3)

    def metrics(self, sums):
        return {"accuracy": metrics.accuracy(sums), "f1": metrics.macro_f1(sums)}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .errors import TaskError

Counts = dict[str, tuple[torch.Tensor, int]]  # an entry for evaluate() to return
Sums = Mapping[str, tuple[Any, float]]  # the argument of metrics()


def confusion(
    predictions: torch.Tensor, labels: torch.Tensor, classes: int, name: str = "confusion"
) -> Counts:
    """The confusion matrix of a batch, [classes, classes]: a row for each label, a column for each
    prediction. `predictions`: logits [n, classes], or classes [n].

    >>> confusion(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), classes=2)
    {'confusion': (tensor([[1, 1],
            [0, 1]]), 3)}
    """
    chosen = predictions.argmax(1) if predictions.dim() > 1 else predictions
    pairs = labels.long() * classes + chosen.long()
    if bool(((labels < 0) | (labels >= classes) | (chosen < 0) | (chosen >= classes)).any()):
        raise TaskError(f"metrics.confusion: a label or prediction is not in 0..{classes - 1}")
    counts = torch.bincount(pairs, minlength=classes * classes)
    return {name: (counts.view(classes, classes), len(labels))}


def accuracy(sums: Sums, name: str = "confusion") -> float:
    """The fraction of correct predictions; NaN when there are none.

    >>> accuracy({"confusion": (torch.tensor([8.0, 2.0, 1.0, 9.0]), 20.0)})
    0.85
    """
    matrix = _matrix(sums, name)
    return _ratio(float(matrix.trace()), float(matrix.sum()))


def macro_f1(sums: Sums, name: str = "confusion") -> float:
    """The mean of each class's F1 = 2·TP / (2·TP + FP + FN), over the classes that occur among labels or
    predictions; NaN without any. It is scikit-learn's f1_score(average="macro") on the pooled data.

    >>> macro_f1({"confusion": (torch.tensor([1.0, 1.0, 0.0, 2.0]), 4.0)})
    0.7333333333333334
    """
    matrix = _matrix(sums, name)
    found = matrix.sum(0) + matrix.sum(1)  # 2·TP + FP + FN
    there = found > 0
    scores = 2 * matrix.diagonal()[there] / found[there]
    return math.fsum(scores.tolist()) / len(scores) if len(scores) else math.nan


def binary_histogram(
    scores: torch.Tensor, labels: torch.Tensor, bins: int = 512, name: str = "histogram"
) -> Counts:
    """The number of examples of class 0 (row 0) and class 1 (row 1) with each score, [2, bins]. `scores` [n]:
    probabilities of class 1, each rounded to the nearest of `bins` evenly spaced values from 0 to 1.

    >>> binary_histogram(torch.tensor([0.1, 0.9, 0.8]), torch.tensor([0, 1, 0]), bins=3)
    {'histogram': (tensor([[1, 0, 1],
            [0, 0, 1]]), 3)}
    """
    if bool(scores.isnan().any()):
        raise TaskError(
            "metrics.binary_histogram: NaN among the scores. Look for NaN in the data, or lower train.lr"
        )
    if not bool(((scores >= 0) & (scores <= 1)).all()):
        raise TaskError(
            "metrics.binary_histogram: scores must lie in 0..1; torch.sigmoid makes such of logits"
        )
    if bool(((labels != 0) & (labels != 1)).any()):
        raise TaskError("metrics.binary_histogram: labels must be 0 or 1")
    places = (scores.double() * (bins - 1)).round().long()
    counts = torch.bincount(labels.long() * bins + places, minlength=2 * bins)
    return {name: (counts.view(2, bins), len(labels))}


def auroc(sums: Sums, name: str = "histogram") -> float:
    """The area under the ROC curve: the probability that a random example of class 1 has a higher score than
    one of class 0, ties counting half. NaN unless both classes have examples. It is scikit-learn's
    roc_auc_score on the pooled data, with scores rounded to the histogram's bins.

    >>> auroc({"histogram": (torch.tensor([3.0, 1.0, 1.0, 3.0]), 8.0)})
    0.75
    """
    zeros, ones = _sum(sums, name).view(2, -1)
    below = zeros.cumsum(0) - zeros
    wins = math.fsum((ones * (below + zeros / 2)).tolist())
    return _ratio(wins, float(zeros.sum()) * float(ones.sum()))


def _matrix(sums: Sums, name: str) -> torch.Tensor:
    flat = _sum(sums, name)
    return flat.view(math.isqrt(flat.numel()), -1)


def _sum(sums: Sums, name: str) -> torch.Tensor:
    if name not in sums:
        raise TaskError(
            f"metrics(): evaluate() gives no {name!r}, only {', '.join(sorted(sums)) or 'nothing'}"
        )
    return torch.as_tensor(sums[name][0], dtype=torch.float64).flatten()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
