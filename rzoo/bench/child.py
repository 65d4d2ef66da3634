"""The process of one engine: `python -m rzoo.bench.child MODULE:CLASS SETTINGS`, JSON lines in and out.

The engine is built with `SETTINGS` (a JSON object) as keywords; that loads and warms it. The first line out is what its
`about()` returns. Then each line in, `{"case": NAME}`, gets one line out, what `run(NAME)` returns: `seconds`, and what
else there is to say. Between turns the process sleeps in a read. An exception ends it, with the traceback on stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, Protocol


class Engine(Protocol):
    """What a child runs."""

    def about(self) -> dict[str, Any]:
        """Facts known once the engine is warm, of JSON's types."""

    def run(self, case: str) -> dict[str, Any]:
        """Time `case` once: {"seconds": float, …}, of JSON's types."""


def keep_to_cores(count: int) -> None:
    """Let this process use at most `count` cores, where the system can say so: the same rule for every engine."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def main(target: str, settings: str) -> None:
    """Serve the engine `target` ("module:Class") until stdin ends."""
    # Libraries print where they like: the pipe to the parent gets a number of its own, and stdout becomes stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    keywords = json.loads(settings)
    keep_to_cores(keywords["threads"])
    module, _, name = target.partition(":")
    engine: Engine = getattr(importlib.import_module(module), name)(**keywords)
    print(json.dumps(engine.about()), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.run(json.loads(line)["case"])), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
