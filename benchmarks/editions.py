"""The editions on the machines that they were made for, planned without one: `python benchmarks/editions.py`.

Prints the table of the README. Every row is one command, `rzoo plan MODEL …`, and takes 5 to 60 seconds on 2 cores the
first time; the rows of a plan with KV heads copied and split differ in nothing else. With --commands the commands stand
beside the rows.
"""

import sys

import rzoo
from rzoo.compile.plan_words import COLUMNS, markdown, row, size

ROWS: tuple[tuple[str, dict[str, object]], ...] = (
    ("nano-8b", {"gpu": "h100", "context": 8192}),
    ("nano-8b", {"gpu": "rpi5", "weights": "int8", "context": 256}),
    ("super-49b", {"gpu": "a100-80gb"}),
    ("super-49b", {"gpu": "a100-80gb", "weights": "int8"}),
    ("super-49b", {"gpu": "h200"}),
    ("ultra-253b", {"gpu": "h100", "mesh": "tensor=8", "batch": 8}),
    ("ultra-253b", {"gpu": "h100", "mesh": "tensor=64", "batch": 64, "context": 8192}),
    ("ultra-253b", {"gpu": "h100", "mesh": "tensor=64", "batch": 64, "context": 8192, "kv": "copied"}),
    ("ultra-253b", {"gpu": "h100", "mesh": "tensor=8,pipe=8", "batch": 64, "context": 8192}),
    ("deepseek-r1", {"gpu": "h200", "mesh": "tensor=8", "weights": "fp8", "batch": 8}),
    ("deepseek-r1", {"gpu": "h100", "mesh": "expert=64", "weights": "fp8", "batch": 64}),
    ("deepseek-r1", {"gpu": "a100-80gb", "mesh": "tensor=8", "weights": "fp8", "batch": 8}),
)


def main() -> None:
    """Plans every row and prints the table, then what the rows that do not fit need."""
    rows, below = [], []
    for model, asked in ROWS:
        plan = rzoo.plan(model, **asked)
        print(f"{model} {asked}", file=sys.stderr, flush=True)
        command = "rzoo plan " + " ".join([model, *(f"--{name} {value}" for name, value in asked.items())])
        shape = f"{plan.devices} × {plan.gpu}" + "".join(f", {axis} {n}" for axis, n in plan.mesh.items())
        copied = ", KV copied" if plan.kv == "copied" else ""
        name = f"{model} {plan.weights}, {shape}{copied}, batch {plan.batch} × {plan.context}"
        rows.append(row(plan, f"`{command}`" if "--commands" in sys.argv else name))
        if not plan.fits:
            parts = ", ".join(f"{size(plan.figures[part].value)} {part}" for part in ("weights", "cache", "temp"))
            below.append(f"- {name}: {parts}; {size(plan.usable)} usable of {size(plan.memory)}.")
    print(markdown(rows, COLUMNS))
    print("\nAll per GPU, of the fullest one; m: modelled, the rest as compiled for that GPU.")
    print("\n".join(below))


if __name__ == "__main__":
    main()
