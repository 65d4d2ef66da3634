"""Loading onto meshes: each device's part read for itself, memory bounded, several processes as one machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import rzoo
from rzoo.compile.kernels import default_forms
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models.llama import LlamaConfig
from rzoo.models.registry import initialize
from rzoo.models.weights import Numerics
from tests.goldens import GOLDEN, LLAMAS
from tests.tiny import DIVISIBLE

ROOT = Path(__file__).parent.parent
LARGER = LlamaConfig(vocab_size=4096, width=256, ffn_width=1024, layers=4, heads=8, kv_heads=8, head_width=128)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> a folder in Hugging Face form: the models of DIVISIBLE, and "larger" of 37 MB."""
    root, out = tmp_path_factory.mktemp("models"), {}
    for name, config in {**DIVISIBLE, "larger": LARGER}.items():
        out[name] = rzoo.export(LM(config, initialize(config), default_forms(Numerics())), root / name)
    return out


MESHES = {
    "llama": ({"fsdp": 2, "tensor": 4}, {"pipe": 4, "tensor": 2}),
    "deepseek-v3": ({"expert": 4, "tensor": 2}, {"fsdp": 8}),
}


@pytest.mark.parametrize(("name", "mesh"), [(name, mesh) for name in MESHES for mesh in MESHES[name]])
def test_parts_read_for_each_device_make_up_the_weights(folders, name, mesh):
    whole = rzoo.load(str(folders[name]), quiet=True)
    lm = rzoo.load(str(folders[name]), mesh=mesh, quiet=True)
    assert lm.mesh.size == 8
    assert whole.params.keys() == lm.params.keys()
    for path, value in whole.params.items():
        np.testing.assert_array_equal(lm.params[path], value)


def test_a_mesh_may_be_text_or_be_chosen(folders, capsys):
    assert dict(rzoo.load(str(folders["llama"]), mesh="tensor=4", quiet=True).mesh.shape) == {"tensor": 4}
    lm = rzoo.load(str(folders["llama"]), mesh="auto")
    assert dict(lm.mesh.shape) == {"tensor": 8}
    said = capsys.readouterr().err
    assert "rzoo: chosen for 8 devices: mesh tensor=8, rules tensor" in said
    assert "copies of the same weights on several devices: 0 MiB (most: layers.*.attention_norm.scale 0 MiB" in said
    assert dict(rzoo.load(str(folders["llama"]), rules="fsdp", quiet=True).mesh.shape) == {"fsdp": 8}


def test_a_cache_that_does_not_fit_is_refused_before_compiling(folders, monkeypatch):
    lm = rzoo.load(str(folders["llama"]), mesh={"tensor": 8}, quiet=True)
    monkeypatch.setattr("rzoo.sharding.fit.free_memory", lambda: 2**20)
    with pytest.raises(RzooError, match="a cache for 1 rows of 512 tokens needs 1 MiB; 1 MiB of memory are free"):
        rzoo.generate(lm, [[1] * 300], max_new_tokens=30)


@pytest.mark.report("D25", "D27")
@pytest.mark.parametrize("golden", [*LLAMAS, "deepseek_v3", "nemotron_nas"])
def test_an_export_from_a_mesh_is_the_checkpoint_that_was_loaded(golden, tmp_path):
    lm = rzoo.load(str(GOLDEN / golden), mesh={"fsdp": 4}, quiet=True)
    rzoo.export(lm, tmp_path / "out")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", GOLDEN / golden))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value)


@pytest.mark.extras
@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_transformers_reads_an_export_from_a_mesh(folders, name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers torch")
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    lm = rzoo.load(str(folders[name]), mesh={"tensor": 4}, quiet=True)
    rzoo.export(lm, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, 96, (2, 20))
    with torch.no_grad():
        reference = model(torch.as_tensor(ids)).logits.numpy()
    np.testing.assert_allclose(lm(ids), reference, atol=1e-4)


MEASURE = """
import resource, sys
import jax, jax.numpy as jnp
jnp.zeros(1).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
import rzoo
from rzoo.sharding.placement import per_device
lm = rzoo.load(sys.argv[1], mesh=sys.argv[2], quiet=True)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
values = lm.params.values()
print(after - before, sum(sum(per_device(v)) for v in values), max(v.nbytes for v in values))
"""


def environment(**more: str) -> dict[str, str]:
    """Of a child process with devices of its own."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@pytest.mark.parametrize("mesh", ["tensor=8", "data=8"])
def test_loading_onto_eight_devices_takes_little_more_than_the_shards(folders, mesh):
    command = [sys.executable, "-c", MEASURE, str(folders["larger"]), mesh]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    grown, shards, largest = map(int, done.stdout.split())
    assert grown <= shards + 2 * largest + 64 * 2**20


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_two_processes_of_four_devices_are_one_machine(folders, tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_NUM_PROCESSES": "2"}
    flags |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    command = [
        sys.executable,
        str(ROOT / "tests" / "one_of_two.py"),
        folders["larger"],
        folders["llama"],
        tmp_path / "o",
    ]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=environment(**flags, JAX_PROCESS_ID=str(i)), **pipe) for i in range(2)]
    said = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]  # gloo speaks first
    lm = rzoo.load(str(folders["llama"]), quiet=True)
    prompts = np.random.default_rng(0).integers(0, 96, (4, 9)).tolist()
    alone = [list(answer.tokens) for answer in rzoo.generate(lm, prompts, max_new_tokens=6)]
    for process in found:
        assert process["devices"] == 8
        assert process["tokens"] == alone
        assert process["read"] <= 1.05 * process["own"]  # its slices and the headers
    saved = rzoo.load(str(tmp_path / "o"), quiet=True)
    assert saved.params.keys() == lm.params.keys()
    for path, value in lm.params.items():
        np.testing.assert_array_equal(saved.params[path], value)


SETTINGS = [
    ({"JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID set without JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES"),
    ({"JAX_COORDINATOR_ADDRESS": "here"}, "JAX_COORDINATOR_ADDRESS (here) must be host:port"),
    ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID (2) must be one of 0..JAX_NUM_PROCESSES - 1 (2)"),
    ({"SLURM_JOB_NUM_NODES": "2"}, "is a loopback address, but the job is on several machines"),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS)
def test_wrong_settings_of_processes_are_refused(monkeypatch, settings, words):
    from rzoo.sharding.distributed import join_processes

    full = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:9", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    for name, value in (settings if "without" in words else full | settings).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RzooError) as error:
        join_processes()
    assert words in str(error.value)
