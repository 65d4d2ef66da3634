"""How fast this machine reads float32: the bound on decoding at batch 1, where each token reads every weight once."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

# 64 running sums are independent, so the compiler may use vectors without being allowed to reorder a sum.
SUM_IN_C = """
#include <stddef.h>
float total(const float *x, size_t n) {
    float sums[64] = {0}, all = 0;
    for (size_t i = 0; i + 64 <= n; i += 64)
        for (int j = 0; j < 64; j++) sums[j] += x[i + j];
    for (int j = 0; j < 64; j++) all += sums[j];
    return all;
}
"""
COMPILERS = ("cc", "gcc", "clang")
PIECES_PER_THREAD = 8  # a thread that was held up leaves its last pieces to the others
WIDTH = 4096  # columns of the array as a matrix
REPEATS = 3

Way = Callable[[], Any]


class Bandwidth:
    """The engine: reads one array of `megabytes` in every way that this machine has; the fastest counts."""

    def __init__(self, threads: int, megabytes: int):
        self.array = np.ones((megabytes * 10**6 // 4 // WIDTH, WIDTH), np.float32)
        self.ways = ways(self.array, threads)
        self.run("read")

    def about(self) -> dict[str, Any]:
        return {"cases": ["read"], "ways": list(self.ways), "bytes": self.array.nbytes}

    def run(self, case: str) -> dict[str, Any]:
        """{"seconds": of the fastest read of the array, "bytes": its size, "way": which}."""
        fastest = {name: min(seconds(way) for _ in range(REPEATS)) for name, way in self.ways.items()}
        best = min(fastest, key=lambda name: fastest[name])
        return {"seconds": fastest[best], "bytes": self.array.nbytes, "way": best}


def seconds(work: Way) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ways(array: np.ndarray, threads: int) -> dict[str, Way]:
    """The ways to read `array` [rows, WIDTH] whole, by name; those whose tool this machine lacks are left out."""
    pool = ThreadPoolExecutor(threads)
    pieces = np.array_split(array, threads * PIECES_PER_THREAD)
    vector = np.ones(array.shape[1], np.float32)
    found = {"numpy": lambda: list(pool.map(lambda piece: piece @ vector, pieces)), "jax": _jax_way(array, vector)}
    total = _compiled_sum()
    if total is not None:
        found["c"] = lambda: list(pool.map(lambda piece: total(piece.ctypes.data, piece.size), pieces))
    return found


def _jax_way(array: np.ndarray, vector: np.ndarray) -> Way:
    """A matrix-vector product under jit, in the layout [n, d] that XLA's CPU backend reads fastest."""
    import jax

    product = jax.jit(lambda a, x: a @ x)
    on_device, x = jax.device_put(array), jax.device_put(vector)
    return lambda: product(on_device, x).block_until_ready()


def _compiled_sum() -> Callable[[int, int], float] | None:
    """SUM_IN_C as a function of an address and a count, or None where no C compiler makes it."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "total.c"), Path(folder, "total.so")
        source.write_text(SUM_IN_C)
        if not any(_compiles(compiler, source, library) for compiler in COMPILERS):
            return None
        total = ctypes.CDLL(str(library)).total
    total.argtypes, total.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_float
    return total


def _compiles(compiler: str, source: Path, library: Path) -> bool:
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False
