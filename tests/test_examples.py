"""Every example runs as it stands, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.goldens import GOLDEN

ROOT = Path(__file__).parent.parent
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(example: Path) -> str:
    """Its output on a tiny model."""
    command = [sys.executable, str(example), str(GOLDEN / "llama_tied")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_logits_and_gradients():
    assert re.search(r"logits \(1, 4, 97\) float32.*loss \d", run(EXAMPLES[1]), re.DOTALL)


def test_finetuning_halves_the_loss():
    last, first = re.findall(r"loss ([\d.]+) of ([\d.]+)", run(EXAMPLES[0]))[-1]
    assert float(last) <= float(first) / 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_are_short(example):
    assert len([line for line in example.read_text().splitlines() if line.strip()]) <= 30
