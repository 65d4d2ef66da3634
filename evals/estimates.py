"""What many scores come to, and how sure that is.

Answers to one question are alike, so a standard error counts questions and not samples: it is the cluster-robust one,
with questions as clusters. An interval is one of 95 %: Wilson's for right and wrong with one sample a question, a
bootstrap over questions where these are fewer than 100, and else the normal one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rzoo.core import RzooError

NORMAL_95 = 1.959964
FEW = 100  # questions, below which the normal interval is too narrow
RESAMPLES = 2000
Floats = np.ndarray
Real = float | int  # a score may be a bool


@dataclass(frozen=True)
class Estimate:
    """mean over samples; error: its standard error, None for a single question; low, high: its interval of 95 %;
    n: questions; samples: of all questions together.
    """

    mean: float
    error: float | None
    low: float
    high: float
    n: int
    samples: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] (n = {self.n})"


def estimate(values: Sequence[Real], questions: Sequence[Hashable] | None = None) -> Estimate:
    """The mean of one value for each sample; questions: the question that each is of, one for each where left out.

    With k samples of each question this is avg@k; of 0 and 1, the accuracy. Raises RzooError for no values and for one
    that is no finite number, since a sample that failed is a wrong one and none that is missing.
    """
    sums, counts = _by_question(values, range(len(values)) if questions is None else questions)
    n, mean = len(sums), float(sums.sum() / counts.sum())
    if n == 1:
        return Estimate(mean, None, math.nan, math.nan, 1, int(counts[0]))
    error = float(np.sqrt(n / (n - 1) * np.square(sums - mean * counts).sum()) / counts.sum())
    if (counts == 1).all() and np.isin(sums, (0, 1)).all():
        low, high = wilson(int(sums.sum()), n)
    elif n < FEW:
        low, high = _bootstrap(lambda drawn: (drawn @ sums) / (drawn @ counts), n)
    else:
        low, high = mean - NORMAL_95 * error, mean + NORMAL_95 * error
    return Estimate(mean, error, low, high, n, int(counts.sum()))


def _by_question(values: Sequence[Real], questions: Sequence[Hashable]) -> tuple[Floats, Floats]:
    """(sum, count) of the values of each question."""
    if not len(values):
        raise RzooError("there is nothing to take the mean of", field="values", value=[], fix="give at least one")
    if not np.isfinite(np.asarray(values, float)).all():
        fix = "score a sample that failed as 0"
        raise RzooError("every value must be a finite number", field="values", value=list(values), fix=fix)
    places: dict[Hashable, int] = {}
    which = [places.setdefault(question, len(places)) for question in questions]
    if len(which) != len(values):
        raise RzooError(f"{len(values)} values are of {len(which)} questions", field="questions", value=len(which))
    return np.bincount(which, np.asarray(values, float)), np.bincount(which).astype(float)


def wilson(right: int, n: int) -> tuple[float, float]:
    """Wilson's score interval of 95 % for `right` of `n` (Wilson 1927)."""
    share, z = right / n, NORMAL_95**2 / n
    middle, half = share + z / 2, math.sqrt(z * share * (1 - share) + (z / 2) ** 2)
    return max(0.0, min(share, (middle - half) / (1 + z))), min(1.0, max(share, (middle + half) / (1 + z)))


def _bootstrap(statistic: Callable[[Floats], Floats], n: int) -> tuple[float, float]:
    """The middle 95 % of `statistic` where n questions are drawn with replacement; it takes counts, [RESAMPLES, n]."""
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(float)
    found = statistic(drawn)
    low, high = np.quantile(found[np.isfinite(found)], (0.025, 0.975))
    return float(low), float(high)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one of k samples is right, from `right` of `samples`, unbiased (Chen et al. 2021).

    Raises RzooError where k is not 1 to `samples`.
    """
    if not 1 <= k <= samples:
        fix = f"make at least {k} samples of each question" if k > 0 else "k must be at least 1"
        raise RzooError(f"pass@{k} can't be told from {samples} samples", field="k", value=k, fix=fix)
    return 1 - math.prod((1 - k / i for i in range(samples - right + 1, samples + 1)), start=1.0)


def majority_at_k(answers: Sequence[Hashable | None], scores: Sequence[Real], k: int | None = None) -> float:
    """The score of the answer given most often by the first k samples of one question (cons@k).

    answers: in one spelling for equal ones; None, for an answer that could not be read, has no vote. Answers that are
    equally frequent share: what counts is the mean of their scores. 0 where no answer could be read.
    """
    votes = Counter(answer for answer in answers[:k] if answer is not None)
    most = max(votes.values(), default=0)
    first = {answer: score for answer, score in reversed(list(zip(answers[:k], scores[:k], strict=True)))}
    winners = [first[answer] for answer, count in votes.items() if count == most]
    return math.fsum(winners) / len(winners) if winners else 0.0


def calibration_error(confidence: Sequence[Real], right: Sequence[Real], bins: int = 10) -> float:
    """Expected calibration error over bins of equally many answers; noise below about 300 of them.

    confidence: 0 to 1, of the answer given; right: 0 or 1. With bins=1, how far all are too sure on the whole.
    """
    order = np.argsort(confidence, kind="stable")
    gaps = np.asarray(right, float)[order] - np.asarray(confidence, float)[order]
    return float(sum(abs(part.sum()) for part in np.array_split(gaps, bins)) / len(gaps))


def brier(confidence: Sequence[Real], right: Sequence[Real]) -> float:
    """Brier score of the answers given: mean squared distance of confidence (0 to 1) from right (0 or 1); 0 is best."""
    return float(np.square(np.asarray(confidence, float) - np.asarray(right, float)).mean())


@dataclass(frozen=True)
class F1:
    """macro: mean of the F1 of the classes used; used: how many of the list; each: by class, None for one unused."""

    macro: float
    used: int
    each: Mapping[str, float | None]


def macro_f1(gold: Sequence[str], predicted: Sequence[str | None], labels: Sequence[str]) -> F1:
    """F1 over a fixed list of classes.

    A class that is never predicted rightly has 0; one that stands in neither gold nor predictions is left out of the
    mean. A prediction that is not in the list, None too, is a miss of its gold class and no class of its own. Raises
    RzooError for gold outside of the list.
    """
    if strange := set(gold) - set(labels):
        raise RzooError(f"gold classes are not in the list: {sorted(strange)[:3]}", field="labels", value=len(labels))
    hits = Counter(one for one, other in zip(gold, predicted, strict=True) if one == other)
    totals = Counter(gold) + Counter(one for one in predicted if one is not None)
    each = {label: 2 * hits[label] / totals[label] if totals[label] else None for label in labels}
    used = [value for value in each.values() if value is not None]
    return F1(math.fsum(used) / len(used) if used else 0.0, len(used), each)


def paired_difference(a: Mapping[Hashable, Sequence[Real]], b: Mapping[Hashable, Sequence[Real]]) -> Estimate:
    """How much better b is than a on the questions that both have, by question the scores of its samples.

    Differences of the same questions vary less than the two means do. Raises RzooError where no question is shared.
    """
    first, second = _paired(a, b)
    return estimate((second - first).tolist())


def paired_ratio(a: Mapping[Hashable, Sequence[Real]], b: Mapping[Hashable, Sequence[Real]]) -> Estimate:
    """The mean score of b over that of a, on the questions that both have; its error and interval by bootstrap.

    Raises RzooError where no question is shared, and where a's mean is 0.
    """
    first, second = _paired(a, b)
    if not first.sum():
        raise RzooError("there is no ratio to a mean of 0", field="a", value=0.0, fix="take the difference")
    n = len(first)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = _bootstrap(lambda drawn: (drawn @ second) / (drawn @ first), n)
    return Estimate(float(second.sum() / first.sum()), (high - low) / (2 * NORMAL_95), low, high, n, n)


def _paired(a: Mapping[Hashable, Sequence[Real]], b: Mapping[Hashable, Sequence[Real]]) -> tuple[Floats, Floats]:
    shared = [question for question in a if question in b]
    if not shared:
        raise RzooError("the two runs share no question", field="questions", value=0, fix="compare runs of one task")
    return np.array([np.mean(a[one]) for one in shared]), np.array([np.mean(b[one]) for one in shared])


def repetition_rate(tokens: Sequence[Hashable], size: int = 4) -> float:
    """The share of runs of `size` tokens that stood before in the text, 0 to 1 (seq-rep-4, Welleck et al. 2020)."""
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
