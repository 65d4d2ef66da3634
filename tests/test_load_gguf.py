"""GGUF files through rzoo.load: the same logits as the safetensors that they were made from."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rzoo
from rzoo.checkpoint.load import held_bytes
from rzoo.checkpoint.opened import open_checkpoint
from rzoo.compile.blocks import BlockQuantized
from rzoo.compile.executables import ahead
from rzoo.compile.workload import Case
from rzoo.core import RzooError
from rzoo.models.llama import LlamaConfig
from rzoo.models.registry import abstract_weights
from rzoo.models.rope import DefaultRope, frequencies
from tests.gguf_files import write_llama
from tests.goldens import GOLDEN, reference

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 32,
    "llama.attention.head_count": 4,
    "llama.context_length": 64,
}
KINDS = gguf.GGMLQuantizationType


@pytest.mark.report("A21")
@pytest.mark.parametrize("name", ["llama_tied", "qwen2"])
def test_a_float32_file_gives_the_logits_of_the_reference(name, tmp_path):
    config = rzoo.load(str(GOLDEN / name), quiet=True).config
    lm = rzoo.load(str(write_llama(tmp_path / "model.gguf", name, config)), quiet=True)
    assert lm.config == config
    expected = reference(name)
    np.testing.assert_allclose(lm(expected["input_ids"]), expected["logits"], atol=1e-4)


@pytest.mark.report("A21")
def test_a_bias_that_the_model_has_no_place_for_is_an_error(tmp_path):
    config = rzoo.load(str(GOLDEN / "llama_tied"), quiet=True).config
    path = write_llama(tmp_path / "model.gguf", "llama_tied", config, extra=["blk.1.attn_k.bias"])
    with pytest.raises(RzooError, match=r"not part of this model \(1\): blk.1.attn_k.bias"):
        rzoo.load(str(path), quiet=True)


@pytest.mark.report("A25")
def test_a_file_without_a_vocabularys_size_has_that_of_its_tokens(tmp_path):
    config = rzoo.load(str(GOLDEN / "llama_tied"), quiet=True).config
    path = write_llama(tmp_path / "model.gguf", "llama_tied", config, **{"llama.vocab_size": None})
    assert rzoo.load(str(path), quiet=True).config == config
    fewer = write_llama(tmp_path / "fewer.gguf", "llama_tied", config, tokens=90, **{"llama.vocab_size": None})
    with pytest.raises(RzooError, match=r"token_embd.weight is \[97, 64\], the config says \[90, 64\]"):
        rzoo.load(str(fewer), quiet=True)
    with pytest.raises(RzooError, match="GGUF metadata llama: vocab_size is missing"):
        LlamaConfig.from_gguf(METADATA | {"tokenizer.ggml.tokens": 7}, tensors=frozenset())


def test_divisors_of_rotary_frequencies_are_applied(tmp_path):
    config = rzoo.load(str(GOLDEN / "llama_llama3rope"), quiet=True).config
    one = jnp.ones(1, jnp.int32)
    plain = frequencies(DefaultRope(theta=config.rope.theta), 16, one)
    divisors = (plain / frequencies(config.rope, 16, one))[0]
    path = write_llama(tmp_path / "model.gguf", "llama_llama3rope", config, rope_freqs=divisors)
    expected = reference("llama_llama3rope")
    logits = rzoo.load(str(path), quiet=True)(expected["input_ids"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)


@pytest.mark.report("A22")
@pytest.mark.parametrize("kind", [KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1])
def test_quantized_files_hold_the_weights_that_the_formats_own_library_reads(kind, tmp_path):
    config = rzoo.load(str(GOLDEN / "llama_tied"), quiet=True).config
    exact = rzoo.load(str(GOLDEN / "llama_tied"), quiet=True)
    lm = rzoo.load(str(write_llama(tmp_path / "model.gguf", "llama_tied", config, kind=kind)), quiet=True)
    assert lm.about.bits == kind.name
    for path, (axes, _) in abstract_weights(config).items():
        if len(axes) == 1:
            continue
        matrix = np.asarray(exact.params[path]).reshape(-1, exact.params[path].shape[-1] if axes[0] != "d" else 64)
        if path.endswith((".q", ".k")):
            matrix = np.asarray(exact.params[path]).reshape(-1, 64)  # rows move whole: quantizing commutes with it
        matrix = matrix if axes != ("d", "f") else np.asarray(exact.params[path])
        expected = gguf.quants.dequantize(gguf.quants.quantize(matrix, kind), kind)
        np.testing.assert_array_equal(np.asarray(lm.params[path]).reshape(expected.shape), expected)


REFUSED = [
    ({"llama.block_count": None}, "GGUF metadata llama: block_count is missing"),
    ({"llama.attention.head_count_kv": 3}, "heads (4) must be a multiple of kv_heads (3)"),
    ({"llama.block_count": 4}, "missing (9): blk.3."),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count (8) is not supported"),
    ({"llama.expert_count": 8}, "expert_count (8) is not supported"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_metadata_that_contradicts_the_tensors_is_refused(changes, words, tmp_path):
    config = rzoo.load(str(GOLDEN / "llama_tied"), quiet=True).config
    path = write_llama(tmp_path / "model.gguf", "llama_tied", config, **changes)
    with pytest.raises(RzooError) as error:
        rzoo.load(str(path), quiet=True)
    assert words in str(error.value)


def test_an_unknown_architecture_is_named_with_what_is_supported(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(
        RzooError, match=r"general.architecture \('mamba'\) is not supported; supported: .*llama, qwen2"
    ):
        rzoo.load(str(tmp_path / "model.gguf"), quiet=True)


@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_1, KINDS.Q5_0])
def test_blocks_of_the_file_give_the_logits_of_the_decoded_file(kind, tmp_path, capsys):
    config = rzoo.load(str(GOLDEN / "llama_tied"), quiet=True).config
    path = str(write_llama(tmp_path / "model.gguf", "llama_tied", config, kind=kind))
    kept, wide = rzoo.load(path, dtype="file"), rzoo.load(path, dtype="float32", quiet=True)
    assert "file in memory" in capsys.readouterr().err
    in_blocks = {name for name, value in kept.params.items() if isinstance(value, BlockQuantized)}
    matrices = {name for name, value in wide.params.items() if value.ndim > 1}
    assert in_blocks == (set() if kind == KINDS.Q5_0 else matrices)
    ids = np.arange(12).reshape(2, 6)
    np.testing.assert_allclose(kept(ids), wide(ids), atol=1e-3)
    if kind == KINDS.Q4_1:
        answers = [rzoo.generate(lm, ids.tolist(), max_new_tokens=8) for lm in (kept, wide)]
        assert [a.tokens for a in answers[0]] == [a.tokens for a in answers[1]]
    assert held_bytes(open_checkpoint(Path(path)), "file") == sum(value.nbytes for value in kept.params.values())


def test_the_files_own_blocks_are_refused_where_there_are_none(tmp_path):
    with pytest.raises(RzooError, match=r"dtype \(file\): llama_tied has no weights in blocks of a GGUF file"):
        rzoo.load(str(GOLDEN / "llama_tied"), dtype="file", quiet=True)
    config = rzoo.load(str(GOLDEN / "llama_tied"), quiet=True).config
    path = str(write_llama(tmp_path / "model.gguf", "llama_tied", config, kind=KINDS.Q8_0))
    with pytest.raises(RzooError, match=r"dtype \(file\): blocks of a GGUF file lie on one device"):
        rzoo.load(path, dtype="file", mesh={"data": 2}, quiet=True)


def test_blocks_are_saved_and_restored_bit_for_bit_and_exported_as_numbers(tmp_path):
    config = rzoo.load(str(GOLDEN / "llama_tied"), quiet=True).config
    path = str(write_llama(tmp_path / "model.gguf", "llama_tied", config, kind=KINDS.Q4_1))
    kept, wide = rzoo.load(path, dtype="file", quiet=True), rzoo.load(path, quiet=True)
    rzoo.save(kept, tmp_path / "steps")
    restored = rzoo.load(tmp_path / "steps", policy="fast", quiet=True)
    assert restored.params.keys() == kept.params.keys() and restored.params["embed"].integer
    for name, value in kept.params.items():
        assert all(map(np.array_equal, jax.tree.leaves(value), jax.tree.leaves(restored.params[name])))
    exported = rzoo.load(rzoo.export(kept, tmp_path / "folder"), quiet=True)
    assert all(np.array_equal(exported.params[name], value) for name, value in wide.params.items())
    with pytest.raises(RzooError, match=r"weights \(int4\): dtype file keeps the file's own codes"):
        rzoo.load(path, dtype="file", weights="int4", quiet=True)


def test_programs_with_kernels_are_kept_and_are_what_runs(tmp_path):
    pytest.importorskip("flatbuffers", reason="artifacts need flatbuffers")
    config = rzoo.load(str(GOLDEN / "llama_tied"), quiet=True).config
    path = str(write_llama(tmp_path / "model.gguf", "llama_tied", config, kind=KINDS.Q8_0))
    lm, ids, counts = rzoo.load(path, dtype="file", quiet=True), np.arange(8, dtype=np.int32)[None], np.array([8])
    (made,) = ahead(lm, [Case("prefill", 1, 8)], 32).values()
    logits, _ = made(lm.params, ids, counts.astype(np.int32), lm.blueprint.empty_cache(1, 32))
    np.testing.assert_allclose(logits, lm(ids)[:, -1], atol=1e-4)
