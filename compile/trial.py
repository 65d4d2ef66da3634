"""One set of compiler options, tried in a process of its own: `python -m rzoo.compile.trial JOB` with JOB as JSON.

Some options abort the process, or never return. The child builds the program from shapes, compiles and runs it once on
zeros; the parent waits for as long as it allows.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from rzoo.compile.aot import Options
from rzoo.compile.kernels import policy_forms
from rzoo.compile.record import Choice, form_fields
from rzoo.compile.storage import lay_out
from rzoo.compile.workload import Case, Work
from rzoo.models.registry import abstract_weights, always_float32, config_from_hf
from rzoo.models.stacking import stack
from rzoo.models.step import Blueprint


def failure(lm: Any, choice: Choice, case: Case, options: Options, seconds: float | int) -> str:
    """Why a program with these options cannot be had; empty where it compiled and ran."""
    job = {
        "config": lm.config.to_hf(),
        "policy": lm.policy,
        "dtype": str(lm.params["embed"].dtype),
        "choice": choice.to_json(),
        "case": vars(case),
        "options": dict(options),
    }
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with tempfile.TemporaryFile("w+", errors="replace") as words:
        command = [sys.executable, "-P", "-m", "rzoo.compile.trial", json.dumps(job)]
        try:
            done = subprocess.run(
                command,
                stderr=words,
                stdout=words,
                env=os.environ | {"PYTHONPATH": path, "JAX_TRACEBACK_FILTERING": "off"},
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return f"no end within {seconds:g} s"
        words.seek(0)
        said = [line.strip() for line in words if line.strip()]
    if done.returncode == 0:
        return ""
    how = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    return f"{how}: {said[-1][:300] if said else ''}"


def main(job: dict[str, Any]) -> None:
    """Compile and run the program once."""
    config, choice = config_from_hf(job["config"]), Choice.from_json(job["choice"])
    forms = replace(policy_forms(job["policy"], job["dtype"]), **form_fields(choice))
    wide = always_float32(config)
    params = {
        path: jnp.zeros(w.shape, "float32" if path in wide else job["dtype"])
        for path, (_, w) in abstract_weights(config).items()
    }
    params = lay_out(config, params, choice.joined, dict(choice.layouts))
    params = stack(config, params) if forms.stacked else params
    options = tuple(sorted(job["options"].items()))
    Work(Blueprint(config, forms), params, Case(**job["case"]), options)()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
