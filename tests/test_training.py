"""Steps of training: saved on one mesh, restored on any other with the same bits; what is broken is refused."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

import rzoo
from rzoo.checkpoint.training import restore, steps
from rzoo.compile.kernels import default_forms
from rzoo.core import RzooError
from rzoo.handle import LM, About
from rzoo.models.registry import initialize
from rzoo.models.weights import Numerics, Quantized
from rzoo.sharding.place import place
from rzoo.tokenizer import Tokenizer
from tests.tiny import DIVISIBLE

ROOT = Path(__file__).parent.parent


def tiny(config, about: About | None = None, seed: int = 0) -> LM:
    """A model with random weights on the default device."""
    return LM(config, initialize(config, seed), default_forms(Numerics()), about=about or About())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A mixture saved from 8 devices as step 7 of a folder, and the model."""
    folder = tmp_path_factory.mktemp("steps")
    lm = tiny(DIVISIBLE["deepseek-v3"])
    rzoo.save(place(lm, {"expert": 4, "tensor": 2}, "expertxtensor"), folder, step=7)
    return folder, lm


def assert_same_bits(found: LM, expected: LM) -> None:
    """Equal configs, paths, types and values."""
    assert found.config == expected.config
    assert set(expected.params) == set(found.params)
    for path, value in expected.params.items():
        assert found.params[path].dtype == value.dtype
        np.testing.assert_array_equal(found.params[path], value)


@pytest.mark.report("D25")
@pytest.mark.parametrize("mesh", [None, {"tensor": 2}, {"fsdp": 4}, {"pipe": 2, "tensor": 4}, {"expert": 8}])
def test_a_step_is_restored_on_any_mesh(saved, mesh):
    folder, lm = saved
    found = rzoo.load(str(folder), mesh=mesh, quiet=True)
    assert_same_bits(found, lm)
    assert (found.mesh.size if mesh else 1) == np.prod(list((mesh or {}).values()))


def test_a_step_is_restored_into_a_model_as_that_lies(saved):
    folder, lm = saved
    other = place(tiny(lm.config, seed=1), {"fsdp": 2, "tensor": 4}, "tensorxfsdp")
    found = restore(other, folder)
    assert_same_bits(found, lm)
    assert {p: v.sharding for p, v in found.params.items()} == {p: v.sharding for p, v in other.params.items()}


def test_a_part_of_a_step_is_restored(saved):
    folder, lm = saved
    found = rzoo.load(str(folder / "7"), only="layers.1-2, embed", mesh={"fsdp": 2}, quiet=True)
    assert {path.split(".")[1] for path in found.params if path != "embed"} == {"1", "2"}
    for path, value in found.params.items():
        np.testing.assert_array_equal(value, lm.params[path])
    assert "only (layers.9) names no weight of this model" in refused(lambda: rzoo.load(str(folder), only="layers.9"))
    assert "is not there\n  load the whole model" in refused(lambda: found([[1]]))


PLAIN = """
import sys, numpy as np, orbax.checkpoint as ocp, jax
reader = ocp.StandardCheckpointer()
tree = reader.metadata(sys.argv[1]).item_metadata.tree
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
target = {key: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one) for key, a in tree.items()}
np.savez(sys.argv[2], **reader.restore(sys.argv[1], target))
assert not any(name.split(".")[0] == "rzoo" for name in sys.modules)
"""


@pytest.mark.report("E01")
def test_orbax_alone_reads_a_step(saved, tmp_path):
    folder, lm = saved
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    command = [sys.executable, "-c", PLAIN, folder / "7" / "params", tmp_path / "out.npz"]
    subprocess.run(command, check=True, env=env, cwd=tmp_path, capture_output=True)
    with np.load(tmp_path / "out.npz") as found:
        assert set(found) == set(lm.params)
        for path, value in lm.params.items():
            np.testing.assert_array_equal(found[path], value)


def test_config_tokenizer_and_template_are_inside(tmp_path):
    words = {f"w{i}": i for i in range(96)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    about = About(
        tokenizer=replace(Tokenizer.from_file(tmp_path), bos_id=5, eos_ids=(3,), pad_id=9, add_bos_token=True),
        template="{{ messages[0].content }}",
        stops=(3, 5),
        recommended={"top_p": 0.9},
    )
    rzoo.save(tiny(DIVISIBLE["llama"], about), tmp_path / "steps")
    found = rzoo.load(str(tmp_path / "steps"), quiet=True)
    assert found.tokenizer.encode("w3 w95") == [3, 95]
    marks = (found.tokenizer.bos_id, found.tokenizer.eos_ids[0], found.tokenizer.pad_id, found.tokenizer.add_bos_token)
    assert marks == (5, 3, 9, True)
    assert (found.about.template, found.about.stops) == (about.template, about.stops)
    assert found.about.recommended == about.recommended


@pytest.mark.report("E25")
def test_types_and_quantized_weights_keep_their_bits(tmp_path):
    codes = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32)), jnp.float8_e4m3fn)
    quantized = Quantized(codes, jnp.ones((4, 1)), None, (16, 32), (8, 8, 32))
    lm = tiny(DIVISIBLE["llama"])
    lm = lm.with_params({path: value.astype("bfloat16") for path, value in lm.params.items()})
    other = replace(quantized, codes=codes.astype(jnp.float8_e5m2))
    lm = lm.with_params(lm.params | {"layers.0.attention.q": quantized, "layers.1.attention.q": other})
    rzoo.save(lm, tmp_path)
    found = rzoo.load(str(tmp_path), mesh={"tensor": 4}, quiet=True)
    assert found.params["embed"].dtype == "bfloat16"
    q = found.params["layers.0.attention.q"]
    assert (q.block, q.shape, q.codes.sharding.shard_shape((64, 32))) == ((16, 32), (8, 8, 32), (16, 32))
    for layer, saved_codes in enumerate((codes, other.codes)):
        read = found.params[f"layers.{layer}.attention.q"].codes
        assert read.dtype == saved_codes.dtype
        np.testing.assert_array_equal(read.view("uint8"), saved_codes.view("uint8"))


@pytest.mark.report("E13")
def test_twelve_layers_come_back_in_their_order_and_under_whole_numbers_in_a_module(tmp_path):
    lm = tiny(replace(DIVISIBLE["llama"], layers=12))
    rzoo.save(lm, tmp_path)
    found = rzoo.load(str(tmp_path), quiet=True)
    assert list(found.params) == list(lm.params)
    assert_same_bits(found, lm)
    downs = {path[1]: value for path, value in nnx.to_flat_state(nnx.state(found.module())) if "down" in path}
    assert list(downs) == list(range(12))
    for layer, value in downs.items():
        np.testing.assert_array_equal(value.get_value(), lm.params[f"layers.{layer}.mlp.down"])


@pytest.mark.report("E22")
def test_steps_go_forward_and_old_ones_are_let_go(tmp_path):
    lm = tiny(DIVISIBLE["llama"])
    assert rzoo.save(lm, tmp_path).path.name == "0"
    for _ in range(3):
        rzoo.save(lm, tmp_path, keep=2, wait=False)  # each waits for the one before
    assert rzoo.save(lm, tmp_path, step=10, keep=2).path == tmp_path / "10"
    assert steps(tmp_path) == [3, 10]
    words = refused(lambda: rzoo.save(lm, tmp_path, step=10))
    assert "step (10) is not after the latest" in words and "or as step 11" in words
    assert "step (-1) must be an integer" in refused(lambda: rzoo.save(lm, tmp_path, step=-1))
    assert "keep (0) must be at least 1" in refused(lambda: rzoo.save(lm, tmp_path, keep=0))


def test_weights_may_be_given_away_while_they_are_written(tmp_path):
    config = replace(DIVISIBLE["llama"], width=256, ffn_width=1024)
    lm, same = tiny(config), tiny(config)
    saving = rzoo.save(lm, tmp_path, wait=False)
    overwrite = jax.jit(lambda params: jax.tree.map(lambda a: a * 0 - 1, params), donate_argnums=0)
    jax.block_until_ready(overwrite(lm.params))
    saving.wait()
    assert_same_bits(rzoo.load(str(tmp_path), quiet=True), same)


LEAVE = """
import sys
import rzoo
from tests.test_training import DIVISIBLE, tiny
rzoo.save(tiny(DIVISIBLE["llama"]), sys.argv[1], wait=False)
"""


@pytest.mark.report("E05")
def test_a_program_that_ends_finishes_its_save(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LEAVE, tmp_path], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert_same_bits(rzoo.load(str(tmp_path), quiet=True), tiny(DIVISIBLE["llama"]))


def refused(act) -> str:
    """The words with which something is refused."""
    with pytest.raises(RzooError) as error:
        act()
    return str(error.value)


def largest_file(folder: Path) -> Path:
    """The file that holds most of the weights."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def cut(file: Path) -> None:
    """Takes the last bytes off."""
    os.truncate(file, file.stat().st_size - 10)


def flip(file: Path) -> None:
    """Changes one byte in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


DAMAGES = [
    (lambda step: cut(largest_file(step / "params")), "bytes, "),
    (lambda step: flip(largest_file(step / "params")), "is not what was written (CRC-32)"),
    (lambda step: largest_file(step / "params").unlink(), "is missing"),
    (lambda step: (step / "files.json").unlink(), "holds no complete step"),
    (lambda step: (step / "config.json").write_text("{"), "config.json"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_step_is_refused(tmp_path, damage, words):
    step = rzoo.save(tiny(DIVISIBLE["llama"]), tmp_path).path
    damage(step)
    assert words in refused(lambda: rzoo.load(str(step), quiet=True))


@pytest.mark.report("E05", "E08")
def test_an_unfinished_save_is_skipped_and_removed_by_the_next(tmp_path, capsys):
    lm = tiny(DIVISIBLE["llama"])
    rzoo.save(lm, tmp_path, step=1)
    unfinished = tmp_path / ".2.partial-0123abcd"
    (unfinished / "params").mkdir(parents=True)
    assert_same_bits(rzoo.load(str(tmp_path)), lm)
    assert "skipped 1 unfinished saves" in capsys.readouterr().err
    assert "holds no complete step" in refused(lambda: rzoo.load(str(unfinished)))
    rzoo.save(lm, tmp_path, step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.report("E17")
def test_another_model_is_refused_naming_what_differs(saved):
    folder, lm = saved
    words = refused(lambda: restore(tiny(replace(lm.config, layers=6, context=99)), folder))
    assert "layers: 4 in the step, 6 in the model" in words
    assert "context: 2048 in the step, 99 in the model" in words
    assert "it is a DeepSeekConfig, the model a LlamaConfig" in refused(
        lambda: restore(tiny(DIVISIBLE["llama"]), folder)
    )


@pytest.mark.report("E17")
def test_a_config_with_other_layers_than_the_weights_is_refused(tmp_path):
    step = rzoo.save(tiny(DIVISIBLE["llama"]), tmp_path).path
    config = json.loads((step / "config.json").read_text())
    (step / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    assert "missing (18): layers.4.attention.k" in refused(lambda: rzoo.load(str(step), quiet=True))
    (step / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "not part of this model (9): layers.3" in refused(lambda: rzoo.load(str(step), quiet=True))
    (step / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    words = refused(lambda: rzoo.load(str(step), quiet=True))
    assert "wrong shape (12): layers.0.mlp.down is [32, 64], the config says [32, 128]" in words


@pytest.mark.report("E07")
def test_what_cannot_be_written_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    lm = tiny(DIVISIBLE["llama"])
    (tmp_path / "file").write_text("")
    assert "file" in refused(lambda: rzoo.save(lm, tmp_path / "file" / "steps"))
    rzoo.save(lm, tmp_path / "steps", step=0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rzoo.checkpoint.training._write", full)
    assert "No space left on device" in refused(lambda: rzoo.save(lm, tmp_path / "steps", step=1))
    assert [path.name for path in (tmp_path / "steps").iterdir()] == ["0"]
    assert_same_bits(rzoo.load(str(tmp_path / "steps"), quiet=True), lm)
    monkeypatch.undo()
    rzoo.save(lm, tmp_path / "steps", step=1)  # the step that failed is none
    assert steps(tmp_path / "steps") == [0, 1]


SAVE_ON = """
import sys
import jax, jax.numpy as jnp
import rzoo
from rzoo.checkpoint.training import restore, steps
from rzoo.compile.kernels import default_forms
from rzoo.handle import LM
from rzoo.models.llama import LlamaConfig
from rzoo.models.registry import abstract_weights
from rzoo.models.weights import Numerics
config = LlamaConfig(vocab_size=8192, width=1024, ffn_width=4096, layers=4, heads=8, kv_heads=8, head_width=128)
def filled(step):
    weights = abstract_weights(config).items()
    key = jax.random.key(step)
    params = {p: jax.random.normal(jax.random.fold_in(key, i), w.shape) for i, (p, (_, w)) in enumerate(weights)}
    return LM(config, params, default_forms(Numerics()))
done = steps(rzoo.checkpoint.training.Path(sys.argv[1]))
if done:
    latest, found = filled(done[-1]), rzoo.load(sys.argv[1], quiet=True)
    assert all(jnp.array_equal(found.params[p], v) for p, v in latest.params.items())
print("restored", done[-1] if done else None, flush=True)
while True:
    number = (steps(rzoo.checkpoint.training.Path(sys.argv[1])) or [0])[-1] + 1
    lm = filled(number)
    print("saving", number, flush=True)
    rzoo.save(lm, sys.argv[1], step=number, keep=2)
    print("saved", number, flush=True)
"""


@pytest.mark.extras
def test_a_process_killed_while_it_saves_leaves_the_latest_step_whole(tmp_path):
    rng, growing, last = np.random.default_rng(0), 0, None
    for _ in range(10):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SAVE_ON, tmp_path / "steps"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            restored = process.stdout.readline().split()[1]
            assert last in (None, restored) or int(restored) >= int(last)
            assert process.stdout.readline().startswith("saving")
            before = wait_for_bytes(tmp_path / "steps", int(rng.integers(1, 300) * 10**6))
            process.send_signal(signal.SIGKILL)
            process.wait()
            rest = process.stdout.read().split()
            last = rest[-1] if "saved" in rest else restored if restored != "None" else None
        growing += before > 0
    assert growing >= 6
    command = [sys.executable, "-c", SAVE_ON.split("while True")[0], tmp_path / "steps"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def wait_for_bytes(root: Path, wanted: int) -> int:
    """Waits until an unfinished save has `wanted` bytes, which it then has; 0 where it finished before that."""
    seen = 0
    while seen < wanted:
        partial = next(iter(root.glob(".*.partial-*")), None) if root.is_dir() else None
        if partial is None and seen:
            return 0
        seen = max(seen, sum(sizes_below(partial)) if partial else 0)
    return seen


def sizes_below(folder: Path):
    """Bytes of each file in a folder that another process is writing to."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield os.stat(os.path.join(parent, name)).st_size
