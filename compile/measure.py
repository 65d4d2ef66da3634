"""When a candidate is faster: paired times of candidate and incumbent, and a rule that noise alone seldom passes.

In each round both run once, in the opposite order every other round, and the ratio incumbent / candidate is taken
within the round, so that what slows the machine for a while slows both. After 8, 16 and 32 rounds a one-sided sign test
at SIGNIFICANCE bounds the median ratio: a win needs the lower bound above 1 + MARGIN, a loss the upper bound below
1 - MARGIN; a median that is no gain ends the comparison.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from statistics import median

LOOKS = (8, 16, 32)  # rounds after which the rule is asked
SIGNIFICANCE = 0.005
MARGIN = 0.01

Work = Callable[[], object]


@dataclass(frozen=True)
class Comparison:
    """word: "win", "loss" or "even". ratio: median of incumbent / candidate; low, high: the bounds on it."""

    word: str
    ratio: float
    low: float
    high: float
    seconds: float
    rounds: int


def compare(candidate: Work, incumbent: Work, looks: Sequence[int] = LOOKS) -> Comparison:
    """Runs both, which are warm and wait for their results, for as many rounds as the rule asks for."""
    mine: list[float] = []
    theirs: list[float] = []
    for look in looks:
        while len(mine) < look:
            pair = ((candidate, mine), (incumbent, theirs))
            for work, times in pair if len(mine) % 2 else pair[::-1]:
                start = time.perf_counter()
                work()
                times.append(time.perf_counter() - start)
        found = judged(mine, theirs, last=look == looks[-1])
        if found is not None:
            return found
    raise AssertionError("the last look always judges")


def judged(mine: Sequence[float], theirs: Sequence[float], *, last: bool) -> Comparison | None:
    """The rule on paired times so far; None where more rounds may change it."""
    ratios = sorted(b / a for a, b in zip(mine, theirs, strict=True))
    n, middle = len(ratios), median(ratios)
    k = most_against(n)
    low, high = ratios[k], ratios[n - 1 - k]
    word = "win" if low > 1 + MARGIN else "loss" if high < 1 - MARGIN else "even"
    if word == "even" and middle > 1 and not last:
        return None
    return Comparison(word, middle, low, high, median(mine), n)


@lru_cache
def most_against(n: int) -> int:
    """The largest k for which at most k of n fair coins show heads with a probability of at most SIGNIFICANCE."""
    chances = [comb(n, k) / 2**n for k in range(n + 1)]
    return max(k for k in range(n) if sum(chances[: k + 1]) <= SIGNIFICANCE)
