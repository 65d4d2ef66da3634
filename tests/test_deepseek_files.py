"""DeepSeek's files: names and shapes of the published checkpoint, FP8 blocks, multi-token prediction, GGUF."""

import gzip
import hashlib
import json
import shutil
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import rzoo
from rzoo.checkpoint import fp8
from rzoo.checkpoint.huggingface import open_folder, write_folder
from rzoo.checkpoint.names import sources
from rzoo.core import RzooError
from rzoo.models.presets import DEEPSEEK_V3
from rzoo.models.registry import config_from_hf, initialize
from rzoo.models.weights import Quantized
from tests.goldens import GOLDEN, reference
from tests.tiny import V3 as TINY_V3

V3 = GOLDEN / "deepseek_v3"
RNG = np.random.default_rng(0)


def layout(config: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every tensor that a published checkpoint of `config` in FP8 holds."""
    found = {}
    for source in sources(replace(config, layers=config.layers + config.mtp_layers), "hf").values():
        stored = "F8_E4M3" if source.row.blocks else "F32" if source.row.path.endswith("router.bias") else "BF16"
        for name in source.names:
            found[name] = (stored, source.shape)
            if source.row.blocks:
                found[name + fp8.SCALE] = ("F32", fp8.scale_shape(source.shape))
    for i in range(config.layers, config.layers + config.mtp_layers):
        matrix, vector = (config.vocab_size, config.width), (config.width,)
        extra: dict[str, tuple[int, ...]]
        extra = {"embed_tokens": matrix, "shared_head.head": matrix, "eh_proj": (config.width, 2 * config.width)}
        extra |= {"enorm": vector, "hnorm": vector, "shared_head.norm": vector}
        found |= {f"model.layers.{i}.{name}.weight": ("BF16", shape) for name, shape in extra.items()}
    return found


def digest(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> str:
    lines = [f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in sorted(tensors.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_names_shapes_and_types_made_from_the_config_are_those_of_deepseek_r1():
    found = layout(DEEPSEEK_V3)
    assert len(found) == 91_991
    assert digest(found) == "a4b0b6c63949f34fac626e926c786ca7994cf168bcd224c56119ad0e54a0f2e3"


def test_the_digest_is_that_of_the_published_map(shared):
    with gzip.open(shared / "deepseek-r1" / "params_map.json.gz") as file:
        published = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in json.load(file).items()}
    assert layout(config_from_hf(json.loads((shared / "deepseek-r1" / "config.json").read_text()))) == published


def test_the_recorded_block_is_quantized_to_the_recorded_bytes():
    w = np.float32(0.37) * (np.arange(15, dtype=np.float32) - 7).reshape(3, 5)
    codes, scale = fp8.quantize_blocks(w)
    assert scale[0, 0] == np.float32(0.005781250540167093)
    expected = [[254, 252, 250, 248, 244], [240, 232, 0, 104, 112], [116, 120, 122, 124, 126]]
    assert codes.view(np.uint8).tolist() == expected
    np.testing.assert_allclose(fp8.dequantize_blocks(codes, scale), w, atol=1e-6)


@pytest.mark.report("A28")
def test_partial_blocks_and_blocks_of_zeros_survive():
    w = RNG.normal(size=(576, 300)).astype(np.float32) * np.exp(RNG.normal(size=(576, 1)))
    w[128:256, :128] = 0
    codes, scale = fp8.quantize_blocks(w)
    assert scale.shape == (5, 3)
    back = fp8.dequantize_blocks(codes, scale)
    normal = np.abs(w) > fp8._spread(scale, w.shape) * 2.0**-6
    assert (np.abs(back - w)[normal] <= np.abs(w)[normal] * 2.0**-4).all()
    assert not back[128:256, :128].any()
    assert np.isfinite(back).all()


def test_every_code_has_its_value():
    assert (fp8.VALUES[0x7E], fp8.VALUES[0x01]) == (448.0, 2.0**-9)
    assert np.isnan(fp8.VALUES[[0x7F, 0xFF]]).all()


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory):
    """The golden checkpoint in FP8 blocks, written by our own writer into several files, and its dense twin."""
    lm = rzoo.load(str(V3), quiet=True)
    folder = tmp_path_factory.mktemp("fp8") / "tiny"
    return rzoo.export(lm, folder, fp8=True, max_shard_bytes=2_500), lm


@pytest.mark.report("A27")
def test_scales_are_found_in_other_files_and_multiplied(in_blocks):
    folder, lm = in_blocks
    tensors = open_folder(folder).tensors
    apart = [n for n in tensors if n.endswith(fp8.SCALE) and tensors[n].file != tensors[n[: -len(fp8.SCALE)]].file]
    assert apart
    back = rzoo.load(str(folder), quiet=True)
    for path, value in lm.params.items():
        source = sources(lm.config, "hf")[path]
        if source.row.blocks:
            assert np.abs(back.params[path] - value).max() <= np.abs(value).max() * 2.0**-4
        else:
            np.testing.assert_array_equal(back.params[path], value)


def test_blocks_are_kept_when_asked_and_compute_what_their_dense_form_does(in_blocks):
    folder, _ = in_blocks
    dense, kept = rzoo.load(str(folder), quiet=True), rzoo.load(str(folder), dtype="fp8", quiet=True)
    held = {path for path, value in kept.params.items() if isinstance(value, Quantized)}
    assert held == {path for path, source in sources(dense.config, "hf").items() if source.row.blocks}
    for path in held:
        np.testing.assert_array_equal(kept.params[path].dequantize(), dense.params[path])
    ids = reference("deepseek_v3")["input_ids"]
    np.testing.assert_allclose(kept(ids), dense(ids), atol=2e-5)


def test_kept_blocks_are_written_with_the_same_bits(in_blocks, tmp_path):
    folder, _ = in_blocks
    again = rzoo.export(rzoo.load(str(folder), dtype="fp8", quiet=True), tmp_path / "again")
    first, second = open_folder(folder), open_folder(again)
    assert second.config["quantization_config"] == first.config["quantization_config"] == fp8.QUANTIZATION
    assert first.tensors.keys() == second.tensors.keys()
    for name in first.tensors:
        assert first.read(name).tobytes() == second.read(name).tobytes()


@pytest.mark.report("A28")
def test_parts_of_a_tensor_keep_blocks_that_cross_their_borders(tmp_path):
    config = replace(TINY_V3, nope_width=60, value_width=68, heads=3)
    lm = replace(rzoo.load(str(V3), quiet=True), config=config, params=initialize(config))
    folder = rzoo.export(lm, tmp_path / "odd", fp8=True)
    dense, kept = rzoo.load(str(folder), quiet=True), rzoo.load(str(folder), dtype="fp8", quiet=True)
    for part in ("key_up", "value_up"):
        path = f"layers.0.attention.{part}"
        assert kept.params[path].block == (4, 128)
        np.testing.assert_array_equal(kept.params[path].dequantize(), dense.params[path])


def rewritten(folder, out, change):
    """A copy of a checkpoint whose {name: array} `change` has edited."""
    opened = open_folder(folder)
    tensors = {name: opened.read(name) for name in opened.tensors}
    write_folder(out, opened.config, (change(tensors) or tensors).items())
    return out


@pytest.mark.report("A27")
def test_a_lost_scale_bias_or_norm_is_an_error(in_blocks, tmp_path):
    folder, _ = in_blocks
    layer = "model.layers.1."
    scale = layer + "mlp.experts.3.up_proj.weight" + fp8.SCALE
    for number, (name, words) in enumerate(
        [
            (scale, f"is FP8 and has no {scale}"),
            (layer + "mlp.gate.e_score_correction_bias", "missing (1): " + layer),
            (layer + "self_attn.kv_a_layernorm.weight", "missing (1): " + layer),
            (layer + "mlp.experts.3.up_proj.weight", "is the scale of no FP8 tensor"),
        ]
    ):
        broken = rewritten(folder, tmp_path / str(number), lambda t, name=name: t.pop(name) is None)
        with pytest.raises(RzooError) as error:
            rzoo.load(str(broken), quiet=True)
        assert words in str(error.value)


def test_scales_of_another_shape_are_refused(in_blocks, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight" + fp8.SCALE
    broken = rewritten(in_blocks[0], tmp_path / "x", lambda t: t.update({name: np.ones((2, 1), np.float32)}))
    with pytest.raises(RzooError, match=r"up_proj.weight_scale_inv is F32 \[2, 1\], not F32 \[1, 1\]"):
        rzoo.load(str(broken), quiet=True)


@pytest.mark.report("G09")
def test_another_quantization_is_refused(tmp_path):
    shutil.copytree(V3, tmp_path / "x")
    file = tmp_path / "x" / "config.json"
    for given, words in [
        ({"quant_method": "awq"}, "quant_method ('awq') is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [1, 128]}, "weight_block_size ([1, 128]) is not supported"),
    ]:
        file.write_text(json.dumps(json.loads((V3 / "config.json").read_text()) | {"quantization_config": given}))
        with pytest.raises(RzooError) as error:
            rzoo.load(str(tmp_path / "x"), quiet=True)
        assert words in str(error.value)


def test_fp8_is_refused_where_the_file_has_none():
    with pytest.raises(RzooError, match=r"dtype \(fp8\): deepseek_v3 has no weights in FP8 blocks"):
        rzoo.load(str(V3), dtype="fp8", quiet=True)
    llama = rzoo.load(str(GOLDEN / "llama_tied"), quiet=True)
    with pytest.raises(RzooError, match="not published in FP8 blocks"):
        rzoo.export(llama, "unused", fp8=True)


def test_bfloat16_leaves_the_selection_bias_in_float32():
    lm = rzoo.load(str(V3), dtype="bfloat16", quiet=True)
    exact = rzoo.load(str(V3), quiet=True)
    assert lm.params["layers.1.mlp.expert_up"].dtype == "bfloat16"
    np.testing.assert_array_equal(lm.params["layers.1.mlp.router.bias"], exact.params["layers.1.mlp.router.bias"])


@pytest.mark.report("A30", "A31")
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_the_layer_of_multi_token_prediction_is_skipped_with_one_counted_line(prefix, tmp_path, capsys):
    shutil.copytree(V3, tmp_path / "x")
    tensors = load_file(V3 / "model.safetensors")
    one = np.ones((3, 3), np.float32)
    tensors |= {f"{prefix}layers.3.{name}.weight": one for name in ("eh_proj", "mlp.experts.7.up_proj", "enorm")}
    save_file(tensors, tmp_path / "x" / "model.safetensors")
    lm = rzoo.load(str(tmp_path / "x"))
    lines = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert lines == ["rzoo: skipped 3 tensors of layer 3 (multi-token prediction, no part of the model)"]
    assert lm.config.layers == 3
    tensors[f"{prefix}layers.4.enorm.weight"] = one
    save_file(tensors, tmp_path / "x" / "model.safetensors")
    with pytest.raises(RzooError, match=r"not part of this model \(1\): .*layers.4.enorm.weight"):
        rzoo.load(str(tmp_path / "x"), quiet=True)


@pytest.mark.parametrize(("field", "words"), [("num_hidden_layers", "layers"), ("n_routed_experts", "experts")])
def test_absurd_counts_are_refused_before_anything_is_made_of_them(field, words, tmp_path):
    shutil.copytree(V3, tmp_path / "x")
    config = json.loads((V3 / "config.json").read_text()) | {field: 2**40, "num_nextn_predict_layers": 2**40}
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RzooError, match=rf"the config says {2**40} {words}, but the file has 139 tensors"):
        rzoo.load(str(tmp_path / "x"), quiet=True)


def test_no_weights_exist_of_the_briefs_sizes():
    with pytest.raises(RzooError, match="no weights exist"):
        rzoo.load("brief/v3-175b", quiet=True)
    found = {info.name: info for info in rzoo.presets()}
    assert "no weights exist" in found["brief/v3-175b"].found
    assert abs(found["brief/v3-175b"].parameters / 175e9 - 1) < 0.005
    assert found["deepseek-r1"].bytes == 688_574_839_360


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def as_gguf(path, *, apart: bool):
    """The golden checkpoint as a GGUF file of architecture deepseek2, in either layout of kv_b_proj."""
    heads, nope, value = 4, 16, 16
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_block_count(3)
    writer.add_context_length(2560)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_vocab_size(97)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if apart else heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(24)
    writer.add_value_length(16)
    if apart:
        writer.add_key_length_mla(24)
        writer.add_value_length_mla(16)
    writer.add_q_lora_rank(32)
    writer.add_kv_lora_rank(16)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(40.0)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_scaling_yarn_log_mul(0.1)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(16)
    writer.add_expert_used_count(3)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(32)
    writer.add_expert_group_count(4)
    writer.add_expert_group_used_count(2)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(94))])
    writer.add_token_merges(["a b"])
    with safe_open(V3 / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118  safe_open is no mapping
            write_one(writer, file, name, apart, heads, nope, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_one(writer, file, name, apart, heads, nope, value):
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    block = f"blk.{layer}."
    if not name.startswith("model.layers."):
        writer.add_tensor(f"{GGUF_NAMES[name.removesuffix('.weight')]}.weight", file.get_tensor(name))
    elif rest == "self_attn.kv_b_proj.weight" and apart:
        both = file.get_tensor(name).reshape(heads, nope + value, -1)
        writer.add_tensor(block + "attn_k_b.weight", np.ascontiguousarray(both[:, :nope].swapaxes(1, 2)))
        writer.add_tensor(block + "attn_v_b.weight", np.ascontiguousarray(both[:, nope:]))
    elif rest == "self_attn.kv_b_proj.weight":
        writer.add_tensor(block + "attn_kv_b.weight", file.get_tensor(name))
    elif rest.endswith("e_score_correction_bias"):
        writer.add_tensor(block + "exp_probs_b.bias", file.get_tensor(name))
    elif ".experts.0." in rest:
        stack = np.stack([file.get_tensor(name.replace(".experts.0.", f".experts.{e}.")) for e in range(16)])
        writer.add_tensor(f"{block}ffn_{rest.split('.')[3].removesuffix('_proj')}_exps.weight", stack)
    elif ".experts." not in rest:
        writer.add_tensor(f"{block}{GGUF_NAMES[rest.removesuffix('.weight')]}.weight", file.get_tensor(name))


@pytest.mark.parametrize("apart", [False, True])
def test_gguf_files_of_either_layout_hold_the_same_model(apart, tmp_path):
    lm, back = rzoo.load(str(V3), quiet=True), rzoo.load(str(as_gguf(tmp_path / "x.gguf", apart=apart)), quiet=True)
    assert back.config == replace(lm.config, mtp_layers=0)
    assert back.params.keys() == lm.params.keys()
    for path, value in lm.params.items():
        np.testing.assert_array_equal(back.params[path], value)
