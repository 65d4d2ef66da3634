"""Editions: which forms of a model fit into a memory, what an edition costs, and which of several none beats.

The cost has the signs of a cost: it grows with power, latency and memory, each measured in that of a reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rzoo.compile.modelled import USABLE, Setting, needed
from rzoo.compile.targets import Target
from rzoo.core import RzooError

WIDEST_FIRST = ("bf16", "int8", "int4")
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Fit:
    """Whether a model fits: weights, the widest of WIDEST_FIRST that does, or the narrowest where none does; bytes that
    it needs with the cache of one row, and those that are usable.
    """

    weights: str
    needed: int
    usable: int

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.needed <= self.usable

    @property
    def why(self) -> str:
        """One sentence on it, by arithmetic."""
        room = f"{self.needed / 1e9:.3g} GB of {self.usable / 1e9:.3g} usable"
        if self.fits:
            return f"{self.weights}: {room}"
        return f"{self.weights} still needs {room}, {self.needed / self.usable:.1f} times too much"


def memory_size(text: str) -> int:
    """Bytes of a size such as 8GB (10^9) or 8GiB (2^30). Raises RzooError for what is no size."""
    number = text.strip().rstrip("BbIiKkMmGgTt")
    unit = UNITS.get(text.strip()[len(number) :].upper())
    try:
        size = int(float(number) * (unit or 0))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise RzooError(f"fit ({text}) is no size of a memory", field="fit", value=text, fix="such as 8GB or 16GiB")
    return size


@lru_cache(maxsize=256)
def fit(config: Any, memory: int, context: int = 4096) -> Fit:
    """The widest form of a model that fits into so many bytes with the cache of one row of `context` tokens (or of the
    model's own, where that is less), by arithmetic; a device can use 95 % of its memory.
    """
    device = Target(name="memory", memory=memory, bandwidth=1, rates=(("bf16", 1.0),), network=0, node=1)
    for weights in WIDEST_FIRST:
        made = Setting(config, device, {}, "single", "split", weights, 1, min(context, config.context), "decode")
        found = Fit(weights, needed(made), int(USABLE * memory))
        if found.fits:
            break
    return found


@dataclass(frozen=True)
class Edition:
    """A way to run a model. power: watts; latency: seconds; memory: bytes."""

    name: str
    power: float
    latency: float
    memory: float

    def __post_init__(self) -> None:
        for field in ("power", "latency", "memory"):
            value = getattr(self, field)
            if not 0 < value < float("inf"):
                raise RzooError(f"{field} ({value}) of {self.name} must be above 0", field=field, value=value)

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Power, latency, memory."""
        return self.power, self.latency, self.memory


def cost(edition: Edition, reference: Edition, *, alpha: float = 1.0, beta: float = 1.0, gamma: float = 1.0) -> float:
    """alpha power + beta latency + gamma memory, each as a multiple of the reference's, over the sum of the weights:
    1 for the reference. Raises RzooError for weights below 0 or all 0.
    """
    weights = (alpha, beta, gamma)
    if not all(0 <= w < float("inf") for w in weights) or not any(weights):
        words = f"weights {weights} of power, latency and memory must be at least 0, and one above"
        raise RzooError(words, field="weights", value=weights)
    pairs = zip(weights, edition.numbers, reference.numbers, strict=True)
    return sum(weight * own / other for weight, own, other in pairs) / sum(weights)


def front(editions: Sequence[Edition]) -> list[Edition]:
    """Those that no other beats: none is at most as high in power, latency and memory and lower in one (Pareto)."""
    beats = lambda a, b: a != b and all(x <= y for x, y in zip(a, b, strict=True))  # noqa: E731
    return [one for one in editions if not any(beats(other.numbers, one.numbers) for other in editions)]
