"""The parent's end of a child process (child.py): ask, wait at most so long, know why when there is no answer."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from typing import Any


class ChildFailed(Exception):  # noqa: N818 (it says what happened)
    """A child gave no answer; the message is its last word on stderr, its exit, or the time limit it passed."""


def environment(threads: int, spin: int) -> dict[str, str]:
    """A child's environment: `threads` threads for every pool, asleep between turns, and the parent's import path.

    `spin` is how many times a thread of GNU OpenMP looks for work before it sleeps: 0 sleeps at once, 20 000 is a
    fraction of a millisecond, which spans the gaps within a turn and not those between turns.
    """
    pools = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(spin)}
    return os.environ | dict.fromkeys(pools, str(threads)) | waiting | {"PYTHONPATH": path}


class Child:
    """One engine in a process of its own. Use it in a `with` block: the process is gone after it, whatever happened."""

    def __init__(self, target: str, *, threads: int, spin: int = 0, **settings: Any):
        """Start the engine `target` ("module:Class") with `threads` and `settings` (of JSON's types) as keywords.

        `spin`: see `environment`.
        """
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the child)
        command = [sys.executable, "-P", "-m", "rzoo.bench.child", target, json.dumps({"threads": threads, **settings})]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment(threads, spin),
            text=True,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_forward, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(OSError):  # what was still to be sent has no reader any more
                pipe.close()  # type: ignore[union-attr]

    def ready(self, seconds: float) -> dict[str, Any]:
        """What the engine says about itself once warm. Raises ChildFailed after `seconds` or when it ends before."""
        return self._answer(seconds, "starting")

    def run(self, case: str, seconds: float) -> dict[str, Any]:
        """The engine's answer to one run of `case`. Raises ChildFailed after `seconds` or when the engine ends."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"case": case}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise ChildFailed(self._last_words()) from None
        return self._answer(seconds, case)

    def _answer(self, seconds: float, doing: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._process.kill()
            raise ChildFailed(f"no answer within {seconds:g} s ({doing})") from None
        if not line:
            raise ChildFailed(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        """The last line that the ended process wrote to stderr with what is indented below it, and a signal's name."""
        code = self._process.wait()
        self._stderr.seek(0)
        said: list[str] = []
        for line in filter(str.strip, self._stderr):
            said = [*said, line.strip()] if line[0].isspace() else [line.strip()]
        if code < 0:
            said.append(f"(ended by {signal.Signals(-code).name})")
        return " ".join(said) or f"exit status {code}"


def _forward(pipe: Iterable[str], lines: queue.SimpleQueue) -> None:
    """Hand each line of `pipe` to `lines`, then "" for its end."""
    for line in pipe:
        lines.put(line)
    lines.put("")
