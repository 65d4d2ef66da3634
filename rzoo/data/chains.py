"""Chained arithmetic: `7+5-3*2=` read from left to right modulo 10, with the steps written out as a thought.

The task needs as many dependent steps as it has operations, so that a small model solves long chains only if it may
write the steps down.
"""

from dataclasses import dataclass

import numpy as np

from rzoo.core import RzooError

# What may stand after each sign: factors without an inverse modulo 10 would make all that comes before them irrelevant.
OPERANDS = {"+": range(10), "-": range(10), "*": (1, 3, 7, 9)}


@dataclass(frozen=True)
class Chain:
    """One sample. prompt: "7+5-3=". thought: "7+5=2 2-3=9". answer: "9"."""

    prompt: str
    thought: str
    answer: str
    depth: int


def chain(rng: np.random.Generator, depth: int) -> Chain:
    """A chain of `depth` operations on one-digit numbers. Raises RzooError for a depth below 1."""
    if depth < 1:
        raise RzooError(f"depth ({depth}) must be at least 1", field="depth", value=depth)
    value = int(rng.integers(10))
    prompt, steps = str(value), []
    for _ in range(depth):
        sign = [*OPERANDS][rng.integers(len(OPERANDS))]
        digit = int(rng.choice(OPERANDS[sign]))
        result = applied(value, sign, digit)
        prompt += f"{sign}{digit}"
        steps.append(f"{value}{sign}{digit}={result}")
        value = result
    return Chain(f"{prompt}=", " ".join(steps), str(value), depth)


def applied(value: int, sign: str, digit: int) -> int:
    """value sign digit modulo 10."""
    return {"+": value + digit, "-": value - digit, "*": value * digit}[sign] % 10
