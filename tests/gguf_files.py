"""Small GGUF files made from the golden checkpoints, as converters write them."""

from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from rzoo.models.names import file_shape, named
from rzoo.models.registry import abstract_weights, family_of
from rzoo.models.rope import DefaultRope, frequencies
from tests.goldens import GOLDEN

F32 = gguf.GGMLQuantizationType.F32


def turned(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (i, i + width/2) to pairs (2i, 2i+1), as in files of architecture llama."""
    return matrix.reshape(heads, 2, -1, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


def write_llama(
    path: Path,
    golden: str,
    config,
    *,
    kind=gguf.GGMLQuantizationType.F32,
    rope_freqs=None,
    extra=(),
    tokens=None,
    **changes,
) -> Path:
    """A golden checkpoint with its config as a GGUF file; `changes` replace metadata keys (None drops one).

    extra: names of vectors that the model has no place for. tokens: how many the vocabulary lists, None for all.
    """
    arch = config.kind
    writer = gguf.GGUFWriter(path, arch)
    metadata = {
        f"{arch}.block_count": config.layers,
        f"{arch}.context_length": config.context,
        f"{arch}.embedding_length": config.width,
        f"{arch}.feed_forward_length": config.ffn_width,
        f"{arch}.attention.head_count": config.heads,
        f"{arch}.attention.head_count_kv": config.kv_heads,
        f"{arch}.vocab_size": config.vocab_size,
    }
    for key, value in (metadata | changes).items():
        if value is not None:
            writer.add_uint32(key, value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope.theta)
    _add_tokenizer(writer, tokens or config.vocab_size)
    tensors = load_file(GOLDEN / golden / "model.safetensors")
    for our_path in abstract_weights(config):
        row = named(family_of(config).names, our_path)
        array = tensors[row.hf]
        if row.turned and arch == "llama":
            array = turned(array, config.heads if ".attention.q" in our_path else config.kv_heads)
        stored = kind if array.ndim == 2 else F32
        writer.add_tensor(row.gguf, gguf.quants.quantize(array, stored), raw_dtype=stored)
    for name in extra:
        writer.add_tensor(name, np.ones(config.width, np.float32))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def write_deci(path: Path, config, params) -> Path:
    """A model with a block layout as a GGUF file of arch deci in float32: three arrays describe its blocks."""
    writer = gguf.GGUFWriter(path, "deci")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_head_count([0 if block.attention is None else config.heads for block in config.blocks])
    writer.add_head_count_kv([getattr(block.attention, "kv_heads", 0) for block in config.blocks])
    writer.add_feed_forward_length([block.ffn.width if block.ffn else 0 for block in config.blocks])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    _add_tokenizer(writer, config.vocab_size)
    one, width = jnp.ones(1, jnp.int32), config.head_width
    plain = frequencies(DefaultRope(theta=config.rope.theta), width, one)
    writer.add_tensor("rope_freqs.weight", np.asarray(plain / frequencies(config.rope, width, one))[0])
    for our_path, (axes, weight) in abstract_weights(config).items():
        row = named(family_of(config).names, our_path)
        array = np.asarray(params[our_path]).reshape(file_shape(axes, weight.shape))
        writer.add_tensor(row.gguf, turned(array, weight.shape[0]) if row.turned else array)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """A vocabulary of single characters, byte-level as gpt2's."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(chr(33 + i) for i in range(94)), "ab", "Ġ", "</s>"][-size:])
    writer.add_token_types([1] * (size - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(size - 1)
