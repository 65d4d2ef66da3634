"""What the tuner's rule makes of candidates of known speed, on this machine: `python benchmarks/tuner.py [--runs 10]`.

Real work: products of matrices, so many times fewer as the candidate is faster. A second process keeps one core busy
all the while (--quiet: none). Prints how often each known gain was found, and how many of 40 candidates that equal the
incumbent were taken for faster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SPEEDS = (1.05, 1.3, 3.0)
EQUAL = 40
REPETITIONS = 240  # of the dot, for the incumbent: some tens of milliseconds


def busy() -> None:
    """Keeps one core busy until it is ended."""
    while True:
        sum(range(10**6))


@contextmanager
def loaded(on: bool) -> Iterator[None]:
    """A process beside this one that never rests."""
    child = multiprocessing.get_context("spawn").Process(target=busy, daemon=True) if on else None
    if child is not None:
        child.start()
    try:
        yield
    finally:
        if child is not None:
            child.terminate()
            child.join()


def work(speed: float) -> Callable[[], object]:
    """Repetitions of a dot, compiled and run once; fewer for a greater speed."""
    import jax
    import jax.numpy as jnp

    count = round(REPETITIONS / speed)
    matrix = jnp.eye(256) * 0.5
    repeated = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, y: jnp.tanh(y @ matrix), x))
    x = jnp.ones((64, 256))
    run = lambda: repeated(x).block_until_ready()  # noqa: E731
    run()
    return run


def main() -> None:
    """Run and print."""
    from rzoo.compile.measure import compare

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--quiet", action="store_true", help="no second process")
    chosen = parser.parse_args()
    incumbent, planted = work(1.0), {speed: work(speed) for speed in SPEEDS}
    equal = work(1.0)
    before = os.getloadavg()[0]
    with loaded(not chosen.quiet):
        for speed, candidate in planted.items():
            found = [compare(candidate, incumbent) for _ in range(chosen.runs)]
            ratios = sorted(one.ratio for one in found)
            wins = sum(one.word == "win" for one in found)
            print(
                f"{speed:5.2f}x: found in {wins} of {chosen.runs}; ratios {ratios[0]:.2f} to {ratios[-1]:.2f}",
                flush=True,
            )
        words = Counter(compare(equal, incumbent).word for _ in range(EQUAL))
        print(f" equal: {words['win']} of {EQUAL} taken for faster, {words['loss']} for slower")
    print(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after; {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
