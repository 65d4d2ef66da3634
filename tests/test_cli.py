"""The command line: exit codes, words, JSON; run as a person runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.goldens import GOLDEN

ROOT = Path(__file__).parent.parent


def rzoo(*arguments: str, **settings) -> subprocess.CompletedProcess:
    """Runs `rzoo …` in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "COLUMNS": "120"}
    command = [sys.executable, "-m", "rzoo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300, **settings)


def test_help_names_the_commands():
    done = rzoo("--help")
    assert done.returncode == 0
    for command in ("models", "generate", "export", "save", "bench"):
        assert command in done.stdout


def test_models_are_listed_as_text_and_as_json():
    text, data = rzoo("models"), rzoo("models", "--json")
    assert "smollm2-135m-instruct-q4_1 (smollm2)" in text.stdout
    assert "134,515,008" in text.stdout
    found = {entry["name"]: entry for entry in json.loads(data.stdout)}
    assert found["llama-3.1-8b-instruct"]["parameters"] == 8_030_261_248
    assert set(found["llama-3.1-8b-instruct"]) == {"name", "alias", "parameters", "bytes", "bits", "found", "thinking"}


def test_the_layout_of_a_model_is_printed_as_text_and_as_json():
    text = rzoo("models", "--layout", "super-49b").stdout
    assert "80 layers, 8 distinct blocks in 25 runs, 49 with keys and values" in text
    assert "    12-41   30x  attention h=64 k=8, mlp f=28672\n" in text
    ultra = json.loads(rzoo("models", "--layout", "ultra-253b", "--json").stdout)
    assert (ultra["layers"], ultra["distinct_blocks"], len(ultra["runs"]), ultra["kv_slots"]) == (162, 15, 32, 64)
    assert {"block": "mlp f=425984", "layers": [134]} in ultra["runs"]


MISTAKES = [
    (("models", "--layout", "super-48b"), "preset (super-48b) is unknown; did you mean super-49b"),
    (("generate", "smolm2", "hi"), "source (smolm2) is unknown\n  presets: did you mean smollm2"),
    (("generate", "absent/model/path", "hi"), "no such file or folder"),
    (("generate", str(GOLDEN / "qwen2"), "hi"), "has no tokenizer"),
    (("generate", str(GOLDEN / "qwen2"), "hi", "--dtype", "int3"), "dtype (int3) must be one of"),
    (("generate", str(GOLDEN / "qwen2"), "hi", "--policy", "best"), "policy (best) is unknown"),
    (("generate", str(GOLDEN / "qwen2"), "hi", "--mesh", "tensor=2"), "vocabulary (97) over tensor (2)"),
    (("generate", "absent", "hi", "--temperature", "-1"), "temperature (-1.0) must be from 0 to 1e6"),
    (("generate", str(GOLDEN / "qwen2"), "1 x", "--ids"), "prompt ('1 x') is not a list of token ids"),
    (("save", str(GOLDEN / "qwen2"), "out", "--rules", "tensr"), "rules (tensr) are unknown; known: single, tensor"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_message_and_exit_code_2(arguments, words):
    done = rzoo(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_debug_shows_the_traceback():
    assert "Traceback" in rzoo("generate", "smolm2", "hi", "--debug").stderr


def test_wrong_options_are_refused_with_exit_code_2():
    done = rzoo("generate", "smollm2", "hi", "--max-new-tokens", "0")
    assert done.returncode == 2
    assert "max-new-tokens" in done.stderr


def test_a_model_is_saved_and_exported_from_the_command_line(tmp_path):
    saved = rzoo("save", str(GOLDEN / "qwen2"), str(tmp_path / "steps"), "--mesh", "fsdp=4")
    assert saved.stdout == f"saved {tmp_path / 'steps' / '0'}\n"
    written = rzoo("export", str(tmp_path / "steps"), str(tmp_path / "out"))
    assert written.stdout == f"wrote {tmp_path / 'out'}\n"
    assert "chosen for 8 devices: mesh " in written.stderr
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", GOLDEN / "qwen2"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value)


@pytest.mark.extras
def test_the_model_answers_as_text_and_as_json(model_file):
    question = "What is the capital of France?"
    text = rzoo("generate", str(model_file), question)
    assert text.stdout == "The capital of France is Paris.\n"
    assert "Q4_1 in the file" in text.stderr and "tokens/s (stop)" in text.stderr
    answer = json.loads(rzoo("generate", str(model_file), "-", "--json", input=question).stdout)
    assert answer["text"] == "The capital of France is Paris."
    assert answer["finish_reason"] == "stop"
    assert len(answer["prompt_tokens"]) == 37
