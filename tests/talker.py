"""A tiny model that can be talked to: its tokens are single letters."""

import json
import shutil

import rzoo
from tests.goldens import GOLDEN


def make_talker(folder):
    """The golden llama with a tokenizer of printable ASCII, <s> and </s>, and a template."""
    shutil.copytree(GOLDEN / "llama_tied", folder)
    letters = {chr(33 + i): i for i in range(94)} | {"<s>": 94, "</s>": 95, "Ġ": 96}
    added = [{"id": i, "content": text, "special": True, "lstrip": False, "rstrip": False, "normalized": False,
              "single_word": False} for text, i in (("<s>", 94), ("</s>", 95))]  # fmt: skip
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = (
        "<s>{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return rzoo.load(str(folder), quiet=True)
