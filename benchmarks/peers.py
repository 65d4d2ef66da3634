"""rzoo beside transformers and llama.cpp: `python benchmarks/peers.py [MODEL] [--rounds 5] [--json] [--plot FILE]`."""

from __future__ import annotations

import argparse
import json
import sys

from rzoo.bench.compare import ENGINES, bench, plot, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--dtype", default="float32", help="what rzoo holds weights in")
    parser.add_argument("--policy", default="exact")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    result = bench(
        args.model,
        engines=args.engines,
        dtype=args.dtype,
        policy=args.policy,
        rounds=args.rounds,
        threads=args.threads,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(result, indent=2) if args.json else table(result))
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
