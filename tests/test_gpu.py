"""What must hold on a GPU the day that one is at hand: `pytest -m gpu`. In `make test` the same runs on the CPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import rzoo
from rzoo.compile.sums import attend_in_sums, experts_in_sums, products_in_sums
from rzoo.engine.session import decode, prefill
from tests.goldens import DEEPSEEKS, GOLDEN, LLAMAS, NEMOTRONS, reference

# What libraries warn of on a GPU is not known here.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).resolve().parent.parent
# What benchmarks/gpu.py does without: a machine with a GPU needs no more than jax, flax and numpy.
ABSENT = ("jaxtyping", "chex", "beartype", "typer", "safetensors", "tokenizers", "jinja2", "gguf")


@pytest.mark.parametrize("name", LLAMAS + DEEPSEEKS + NEMOTRONS)
def test_logits_are_those_of_the_reference(name):
    lm, expected = rzoo.load(str(GOLDEN / name), quiet=True), reference(name)
    np.testing.assert_allclose(lm(expected["input_ids"]), expected["logits"], atol=1e-4)


@pytest.mark.parametrize("name", ["llama_tied", "deepseek_v3"])
def test_decode_in_sums_takes_the_tokens_of_whole_sequences(name):
    lm = rzoo.load(str(GOLDEN / name), quiet=True)
    forms = replace(lm.forms, attend_decode=attend_in_sums, experts_cached=experts_in_sums)
    summed = replace(lm, forms=forms, params=products_in_sums(lm.config, lm.params))
    prompt = reference(name)["input_ids"][0, :40].tolist()
    tokens, state = decode(summed, prefill(summed, [prompt], room=8), 8)
    whole = [*prompt, *np.asarray(tokens)[0, :8].tolist()]
    logits = lm(np.asarray([whole]))[0]
    np.testing.assert_array_equal(whole[40:], np.argmax(logits[39:-1], axis=-1))
    np.testing.assert_allclose(state.logits[0], logits[-1], atol=1e-4)


def test_a_model_is_loaded_onto_a_mesh():
    lm = rzoo.load(str(GOLDEN / "llama_tied"), mesh={"fsdp": min(2, len(jax.devices()))}, quiet=True)
    expected = reference("llama_tied")
    np.testing.assert_allclose(lm(expected["input_ids"]), expected["logits"], atol=1e-4)


def benchmark(folder: Path, *sections: str) -> dict:
    """What benchmarks/gpu.py writes of some sections at tiny sizes, run where ABSENT can't be imported."""
    out = folder / "gpu.json"
    hidden = f"import runpy, sys; sys.modules |= dict.fromkeys({ABSENT})"
    code = f"{hidden}; runpy.run_path({str(ROOT / 'benchmarks' / 'gpu.py')!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, "--small", "--out", str(out), "--only", *sections]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(out.read_text())


def check(found: dict, sections: tuple[str, ...]) -> None:
    """Every section stands with what is planned beside what was measured."""
    assert found["machine"]["read_bytes_per_second"] > 0
    assert set(found) == {"machine", *sections}
    for name in sections:
        planned, measured = found[name]["planned"], found[name]["measured"]
        assert planned["launches"] > 0 < planned["seconds"]
        assert measured["finite"]
        assert measured["tokens_per_second"] > 0
        if measured["bytes_in_use"] is not None:
            assert measured["bytes_in_use"] >= planned["weights"] + planned["cache"]


def test_the_benchmark_needs_jax_and_flax_alone(tmp_path):
    sections = ("r1 fp8 decode in sums", "nano-8b int8 prefill")
    check(benchmark(tmp_path, *sections), sections)


@pytest.mark.extras
def test_every_section_of_the_benchmark_runs(tmp_path):
    from benchmarks.gpu import SECTIONS

    check(benchmark(tmp_path, *SECTIONS), tuple(SECTIONS))
