"""Reading tests/golden: tiny checkpoints with the outputs of transformers in float32 (tests/golden/make.py)."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parent / "golden"
LLAMAS = ("llama_llama3rope", "llama_tied", "qwen2")
DEEPSEEKS = ("deepseek_v3", "deepseek_v32")
NEMOTRONS = ("nemotron_nas",)  # recorded with the hidden states before the final norm, and in the old spelling


def reference(name: str) -> dict[str, np.ndarray]:
    """input_ids [2, 48], logits, hidden.0 … hidden.n, the last of them after the final norm."""
    found = load_file(GOLDEN / name / "reference.safetensors")
    if name in NEMOTRONS:
        scale, last = load_file(GOLDEN / name / "model.safetensors")["model.norm.weight"], found["hidden.10"]
        found["hidden.10"] = scale * last / np.sqrt(np.mean(last**2, axis=-1, keepdims=True) + 1e-5)
    return found


def in_old_spelling(name: str, folder: Path) -> Path:
    """A copy of a golden checkpoint whose config.json is spelled as transformers 4 does."""
    shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    if name in NEMOTRONS:
        return folder
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
