"""Compares mathematics for `rzoo.evals.mathematics` until it is killed. A process of its own: sympy may never end.

First writes a line, "ready" or what can't be imported; then for each line of JSON, [gold, answer], one: true or false.
"""

import json
import resource
import sys

MEMORY = 4 << 30  # bytes


def main() -> None:
    """Ends with stdin. What is computed leaves nothing behind in the caller, memory included."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        from math_verify import parse, verify
    except ImportError as error:
        print(error, flush=True)
        return
    print("ready", flush=True)
    for line in sys.stdin:
        gold, answer = (parse(f"${text}$", parsing_timeout=None) for text in json.loads(line))
        print(json.dumps(bool(verify(gold, answer, timeout_seconds=None))), flush=True)


if __name__ == "__main__":
    main()
