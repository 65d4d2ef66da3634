"""Damaged files of every kind: whatever is wrong with them, loading ends with an RzooError or with a model."""

import copy
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

import rzoo
from rzoo.chat import encode_chat
from rzoo.core import RzooError
from tests.chat_folder import write_talker
from tests.gguf_files import write_llama
from tests.goldens import GOLDEN

FILES = (
    "model.safetensors",
    "model.gguf",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "chat_template.jinja",
)
CASES = int(os.environ.get("RZOO_FUZZ_CASES") or 2000)  # over all files
MEMORY = 256 * 2**10  # KiB
HANG = 20  # seconds: a guard against loading without end, generous where the machine is busy

ODD: tuple[object, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 2**31, 2**62, -(2**63), 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\ud800", "\x00", "{{", "a" * 100_000, [], [[]], [0] * 1000, {}, {"": {}}, "llama", "float8", "F32"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model with every kind of file: a folder in two shards, and the same as GGUF."""
    root = tmp_path_factory.mktemp("fuzz")
    lm = rzoo.load(str(write_talker(root / "talker")), quiet=True)
    rzoo.export(lm, root / "folder", max_shard_bytes=60_000)
    shutil.copy(GOLDEN / "llama_tied" / "model.safetensors", root / "talker")
    write_llama(root / "model.gguf", "llama_tied", lm.config)
    return root


def place_of(root: Path, name: str) -> tuple[Path, Path]:
    """The file to damage, and what to load."""
    if name == "model.gguf":
        return root / name, root / name
    if name.endswith("index.json") or name == "chat_template.jinja":
        return root / "folder" / name, root / "folder"
    return root / "talker" / name, root / "talker"


def damaged(rng: random.Random, content: bytes, name: str) -> bytes:
    """The content with one to three faults, of its structure where it has one that can be read."""
    for _ in range(rng.randint(1, 3)):
        structured = rng.random() < 0.7
        if structured and name.endswith(".json"):
            content = other_json(rng, content)
        elif structured and name == "model.safetensors":
            content = other_header(rng, content)
        else:
            content = other_bytes(rng, content, near=2000 if name.startswith("model.") else len(content))
    return content


def other_bytes(rng: random.Random, content: bytes, near: int) -> bytes:
    """Bytes changed, removed, doubled or put in, most of them near the beginning."""
    at = rng.randrange(max(1, min(near, len(content))))
    size = rng.choice((1, 4, 8))
    extreme = rng.choice((b"\x00", b"\xff", b"\x7f", b"\x80")) * (size - 1) + rng.choice((b"\x00", b"\x7f", b"\xff"))
    return rng.choice(
        (
            content[:at] + extreme + content[at + size :],
            content[:at] + rng.randbytes(size) + content[at + size :],
            content[:at],
            content[:at] + content[at + size :],
            content[:at] + content[at : at + 64] + content[at:],
        )
    )


def other_json(rng: random.Random, content: bytes) -> bytes:
    """A value somewhere in it replaced, removed, named otherwise, written twice, or laid deep."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return other_bytes(rng, content, len(content))
    spots = [spot for spot in parents(value) if len(spot)]
    if not spots:
        return json.dumps(rng.choice(ODD)).encode()
    parent = rng.choice(spots)
    key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
    way = rng.randrange(6)
    if way < 3:
        parent[key] = copy.deepcopy(rng.choice(ODD))
    elif way == 3:
        del parent[key]
    elif way == 4 and isinstance(parent, dict):
        parent[rng.choice(("", "0", "type", "extra", "a" * 300))] = parent.pop(key)
    text = json.dumps(value)
    if way == 5:
        deep = rng.choice((20, 5000))
        return text.replace(": ", ": " + "[" * deep + "1" + "]" * deep + ', "x": ', 1).encode()
    return (text[:-1] + ", " + text[1:] if rng.random() < 0.05 else text).encode(errors="surrogatepass")


def parents(value: object) -> list:
    """All lists and objects in a value, itself first."""
    found, left = [], [value]
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            found.append(one)
            left.extend(one.values() if isinstance(one, dict) else one)
    return found


def other_header(rng: random.Random, content: bytes) -> bytes:
    """A safetensors file whose header is changed as JSON, its length told rightly or not."""
    size = int.from_bytes(content[:8], "little")
    header = other_json(rng, content[8 : 8 + size])
    told = rng.choice((len(header), len(header), len(header), rng.getrandbits(63), len(header) + 1, 0))
    return told.to_bytes(8, "little") + header + content[8 + size :]


def use(path: Path) -> None:
    """What a user does first: load, read a conversation, look at the numbers."""
    lm = rzoo.load(str(path), quiet=True)
    assert lm.params
    if lm.tokenizer is not None:
        lm.tokenizer.decode(lm.tokenizer.encode("a b <s> é"))
        if lm.about.template is not None:
            encode_chat(lm.tokenizer, [{"role": "user", "content": "hi"}], template=lm.about.template)


def resident(*, reset: bool = False) -> int:
    """The most memory of this process in KiB, since it was last reset; 0 where the system does not tell."""
    if not Path("/proc/self/clear_refs").exists():
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def too_long(*_: object) -> None:
    """Ends a case that does not end by itself."""
    raise TimeoutError(f"loading took more than {HANG} s")


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_gives_an_error_of_ours_or_a_model_within_bounds(whole, name):
    path, source = place_of(whole, name)
    content = path.read_bytes()
    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for number in range(CASES // len(FILES)):
            rng = random.Random(f"{name} {number}")
            path.write_bytes(damaged(rng, content, name))
            start = resident(reset=True)
            signal.alarm(HANG)
            try:
                use(source)
            except RzooError as error:
                assert str(error).strip()
            except Exception as error:
                pytest.fail(f"{name}, case {number}: {type(error).__name__}: {error}"[:600])
            finally:
                signal.alarm(0)
            assert resident() - start < MEMORY, f"{name}, case {number}"
    finally:
        signal.signal(signal.SIGALRM, before)
        path.write_bytes(content)
