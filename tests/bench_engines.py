"""Engines for test_bench.py: small and real, and two that go wrong."""

import os
import sys
import threading
from typing import Any


class Squares:
    """Sums the squares below `limit` as the bytes of a read of one second; prints into stdout, as libraries do."""

    def __init__(self, threads: int, limit: int = 0):
        print("loading")
        self.threads, self.limit = threads, limit

    def about(self) -> dict[str, Any]:
        names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        return {
            "cases": ["read"],
            "threads": self.threads,
            "cores": cores,
            **{name: os.environ[name] for name in names},
        }

    def run(self, case: str) -> dict[str, Any]:
        print("working")
        return {"case": case, "seconds": 1.0, "bytes": sum(i * i for i in range(self.limit))}


class Broken(Squares):
    """Fails at the case "crash", ends without a word at "abort", never answers "wait"."""

    def run(self, case: str) -> dict[str, Any]:
        if case == "crash":
            raise ValueError("the weights\n  are upside down")
        if case == "abort":
            os.abort()
        threading.Event().wait()
        return {}


class Unloadable:
    """Cannot start."""

    def __init__(self, threads: int):
        sys.exit("no such model")
