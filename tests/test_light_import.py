"""`import rzoo` and `rzoo --help` load nothing heavy: they answer at once on every machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"jax", "jaxlib", "flax", "numpy", "optax", "orbax", "chex", "safetensors", "tokenizers", "jinja2", "jaxtyping"}

LOADED = "import sys, json; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})), file=sys.stderr)"
HELP = """
import sys
sys.argv = ["rzoo", "--help"]
from rzoo.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a new interpreter holds after running `code`."""
    ran = subprocess.run([sys.executable, "-c", code + "\n" + LOADED], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stderr.splitlines()[-1]))


def test_the_check_sees_what_a_program_loads():
    assert {"rzoo", "numpy"} <= loaded_by("import rzoo, numpy")


@pytest.mark.parametrize("code", ["import rzoo", HELP], ids=["import", "help"])
def test_nothing_heavy_is_loaded(code):
    loaded = loaded_by(code)
    assert "rzoo" in loaded
    assert loaded & HEAVY == set()


def test_the_module_runs_as_the_command():
    helped = subprocess.run([sys.executable, "-m", "rzoo", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert helped.returncode == 0, helped.stderr
    assert "generate" in helped.stdout
