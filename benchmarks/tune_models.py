"""What `rzoo tune` gains on whole models, and whether it finds the same twice.

python benchmarks/tune_models.py [--budget SECONDS] [--only smollm2-f32-b8 …] [--out FILE.json]

Each case is tuned from scratch twice, in folders of its own, with no record of any other run. Then untuned, first and
second run are measured interleaved by the tuner's own rule: ratios of times, with their bounds.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import rzoo
from benchmarks.v3_mini import write_model
from rzoo.compile.measure import compare
from rzoo.compile.record import Record, apply, key_of
from rzoo.compile.workload import Case, Work

# Name -> (model, type that weights are held in, policy, rows).
CASES = {
    "smollm2-f32-b8": ("smollm2", "float32", "exact", 8),
    "smollm2-f32-b1": ("smollm2", "float32", "exact", 1),
    "v3-mini-f32-b8": ("v3-mini", "float32", "exact", 8),
    "v3-mini-f32-b1": ("v3-mini", "float32", "exact", 1),
    "smollm2-bf16-b8": ("smollm2", "bfloat16", "stored", 8),
    "smollm2-bf16-b1": ("smollm2", "bfloat16", "stored", 1),
}


def source_of(model: str, folder: Path) -> str:
    """A preset, or the folder that a model is written to."""
    if model != "v3-mini":
        return model
    if not (folder / model).exists():
        write_model(folder / model)
    return str(folder / model)


def tuned(lm: Any, rows: int, budget: float, say: Any) -> Any:
    """The handle after a search that knows of no other."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RZOO_CACHE"] = folder
        return rzoo.tune(lm, budget, batches=(rows,), progress=say)


def measured(name: str, folder: Path, budget: float) -> dict[str, Any]:
    """Two searches, and how their winners and the untuned program compare."""
    model, dtype, policy, rows = CASES[name]
    lm = rzoo.load(source_of(model, folder), dtype=dtype, policy=policy, record=False, quiet=True)
    runs = [tuned(lm, rows, budget, lambda line: print(f"  {line}"[:150], flush=True)) for _ in range(2)]
    found: dict[str, Any] = {}
    for phase, tokens in (("decode", 8), ("prefill", 128)):
        case = Case(phase, rows if phase == "decode" else 1, tokens)
        works = [work(one, case) for one in (apply(Record(key_of(lm)), lm), *runs)]
        pairs = {"first / untuned": (1, 0), "second / untuned": (2, 0), "second / first": (2, 1)}
        found[case.name] = {label: vars(compare(works[a], works[b])) for label, (a, b) in pairs.items()}
    choices = [run.record.choice.to_json() for run in runs]
    losers = [entry | {"beside": None} for entry in runs[0].record.candidates]
    return {"times": found, "choices": choices, "candidates": losers}


def work(lm: Any, case: Case) -> Work:
    """A case's program, warm."""
    made = Work(lm.blueprint, lm.params, case, lm.record.options(case.phase, case.rows))
    made()
    return made


def main() -> None:
    """Runs the cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--budget", type=float, default=150.0)
    parser.add_argument("--only", nargs="*", choices=[*CASES], default=[*CASES])
    parser.add_argument("--out", type=Path, default=Path("tune_models.json"))
    asked = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.only:
            print(f"{name} (load {os.getloadavg()[0]:.1f})", flush=True)
            results[name] = measured(name, Path(folder), asked.budget)
            asked.out.write_text(json.dumps(results, indent=1, default=str))
    print("| case | program | first / untuned | second / untuned | second / first |\n|---|---|---|---|---|")
    for name, found in results.items():
        for case, times in found["times"].items():
            said = [f"{one['ratio']:.2f} [{one['low']:.2f}, {one['high']:.2f}]" for one in times.values()]
            print(f"| {name} | {case} | {' | '.join(said)} |")


if __name__ == "__main__":
    main()
