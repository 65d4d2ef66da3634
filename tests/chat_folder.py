"""A tiny model folder that can talk: a golden checkpoint with a tokenizer of single letters and a chat template."""

import json
import shutil
from pathlib import Path
from typing import Any

import rzoo
from rzoo.handle import LM
from tests.goldens import GOLDEN

BOS, EOS = 94, 95
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}A:{{ '<think>\n' if think is defined }}{% endif %}"
)

# The same for a model that knows no thinking.
PLAIN = "<s>{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


def load_talker(folder: Path) -> LM:
    """Writes the model without thinking and without a BOS before plain text, and loads it."""
    return rzoo.load(str(write_talker(folder, add_bos_token=False, chat_template=PLAIN)), quiet=True)


def write_talker(
    folder: Path, *, context: int = 2560, stops: tuple[int, ...] = (EOS,), end: str = "</s>", **settings: Any
) -> Path:
    """Writes the model; stops go into generation_config.json, settings into tokenizer_config.json; end: text of EOS."""
    shutil.copytree(GOLDEN / "llama_tied", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context, "eos_token_id": EOS}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(stops)}))
    letters = {chr(33 + i): i for i in range(94)} | {"<s>": BOS, end: EOS, "Ġ": 96}
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": t, "special": True, **flags} for t, i in (("<s>", BOS), (end, EOS))],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    own = {"bos_token": "<s>", "eos_token": end, "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**own, **settings}))
    return folder
