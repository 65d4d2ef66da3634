"""Block layouts: an oracle made of Llama, readers of every spelling, presets against the published configs."""

import itertools
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import rzoo
from rzoo.compile.kernels import default_forms
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models import registry
from rzoo.models.llama import LlamaConfig
from rzoo.models.nemotron import (
    BlockSpec,
    FeedForwardSpec,
    GroupedAttentionSpec,
    Linear,
    NemotronConfig,
    empty_cache,
    parse_layout,
)
from rzoo.models.presets import PRESETS
from rzoo.models.rope import Llama3Rope
from rzoo.models.stacking import runs
from rzoo.models.weights import Numerics
from tests.gguf_files import write_deci
from tests.goldens import GOLDEN
from tests.tiny import TINY

IDS = np.random.default_rng(0).integers(0, 97, (2, 12))
SIZES = {"vocab_size": 97, "width": 32, "heads": 4, "head_width": 8}


# The oracle: a model without linear parts is a Llama with zeros where it has nothing.


def as_llama(config, params):
    """The same model as a Llama: widths padded with zeros, KV heads repeated, the way back zero where nothing is."""
    widest = max((b.ffn.width for b in config.blocks if b.ffn), default=1)
    kv_heads = max(b.attention.kv_heads for b in config.blocks if b.attention)
    llama = LlamaConfig(**SIZES, layers=config.layers, ffn_width=widest, kv_heads=kv_heads, norm_eps=config.norm_eps)
    out = {}
    for path, (_, weight) in registry.abstract_weights(llama).items():
        value = np.asarray(params[path]) if path in params else np.zeros(weight.shape, np.float32)
        if path.endswith(("attention.k", "attention.v")):
            value = np.repeat(value, kv_heads // value.shape[0], axis=0)
        missing = [(0, whole - part) for whole, part in zip(weight.shape, value.shape, strict=True)]
        out[path] = np.pad(value, missing)
    return llama, out


layouts = st.lists(
    st.builds(
        BlockSpec,
        st.sampled_from([None, *map(GroupedAttentionSpec, (1, 2, 4))]),
        st.sampled_from([None, *map(FeedForwardSpec, (8, 24))]),
    ),
    min_size=1,
    max_size=4,
).filter(lambda blocks: any(block.attention for block in blocks))


@given(layouts, st.integers(0, 3))
@settings(max_examples=8)
def test_any_layout_equals_a_llama_with_zeros_in_its_gaps(blocks, seed):
    config = NemotronConfig(**SIZES, blocks=tuple(blocks))
    params = registry.initialize(config, seed)
    forms = default_forms(Numerics())
    llama, padded = as_llama(config, params)
    expected = LM(llama, padded, forms)(IDS)
    np.testing.assert_allclose(LM(config, params, forms)(IDS), expected, atol=2e-5)


# Counts and layouts.


REGULAR = parse_layout("8/14336")[0]


@pytest.mark.parametrize(
    ("second", "count"),
    [
        (REGULAR, 1_486_901_248),
        (replace(REGULAR, attention=None), 1_444_954_112),
        (replace(REGULAR, ffn=None), 1_310_736_384),
        (replace(REGULAR, attention=Linear()), 1_461_735_424),
        (replace(REGULAR, ffn=Linear()), 1_327_517_696),
    ],
)
def test_counts_are_those_of_megatrons_own_tests(second, count):
    sizes = {"vocab_size": 128256, "width": 4096, "heads": 32, "head_width": 128}
    assert registry.count_parameters(NemotronConfig(**sizes, blocks=(REGULAR, second))) == count


PUBLISHED = {
    "super-49b": ("llama-3.3-nemotron-super-49b-v1", 49, 80, 8, 25),
    "ultra-253b": ("llama-3.1-nemotron-ultra-253b-v1", 64, 162, 15, 32),
}


@pytest.mark.parametrize("alias", PUBLISHED)
def test_presets_are_the_published_configs(alias, shared):
    name = PUBLISHED[alias][0]
    fields = json.loads((shared / "checkpoints" / "configs" / f"{alias}.json").read_text())
    assert registry.config_from_hf(fields) == PRESETS[name].config
    assert registry.preset(alias)[0] == name
    written = PRESETS[name].config.to_hf(spelling=4)
    assert registry.config_from_hf(written) == PRESETS[name].config
    same = written.keys() & fields.keys() - {"block_configs"}
    assert len(same) == 16
    assert {field: written[field] for field in same} == {field: fields[field] for field in same}


@pytest.mark.parametrize("alias", PUBLISHED)
def test_only_layers_with_real_attention_keep_keys_and_values(alias):
    name, with_slot, layers, _, _ = PUBLISHED[alias]
    config = PRESETS[name].config
    cache = jax.eval_shape(lambda: empty_cache(config, 1, 16, "float32"))
    assert (len(cache.slots), sum(slot is not None for slot in cache.slots)) == (layers, with_slot)
    for block, slot in zip(config.blocks, cache.slots, strict=True):
        assert (slot.keys.shape[1] if slot else None) == (block.attention.kv_heads if block.attention else None)


@pytest.mark.parametrize("alias", PUBLISHED)
def test_blocks_and_runs_are_those_counted_in_the_published_config(alias, shared):
    """Counted from the raw fields alone, without anything of rzoo's readers."""
    _, _, _, distinct, count = PUBLISHED[alias]
    fields = json.loads((shared / "checkpoints" / "configs" / f"{alias}.json").read_text())
    raw = [(b["attention"]["no_op"], b["ffn"]["no_op"], b["ffn"]["ffn_mult"]) for b in fields["block_configs"]]
    lengths = [len(list(group)) for _, group in itertools.groupby(b for b in raw if b[:2] != (True, True))]
    found = runs(PRESETS[PUBLISHED[alias][0]].config)
    assert [len(run.layers) for run in found] == lengths
    assert (len({run.weights for run in found}), len(found)) == (distinct, count)
    assert len({b for b in raw if b[:2] != (True, True)}) == distinct


# Readers.


GOOD = json.loads((GOLDEN / "nemotron_nas" / "config.json").read_text())
EXPECTED = NemotronConfig.from_hf(GOOD)


@pytest.mark.report("A34")
def test_the_blocks_of_the_golden_are_read_as_they_are_described():
    widths = [block.ffn.width if isinstance(block.ffn, FeedForwardSpec) else block.ffn for block in EXPECTED.blocks]
    assert widths == [512, 256, None, None, 768, Linear(), 256, 512, 256, 256]
    kv_heads = [getattr(block.attention, "kv_heads", block.attention) for block in EXPECTED.blocks]
    assert kv_heads == [2, None, 1, None, Linear(), 4, 2, None, None, 2]
    assert registry.count_parameters(EXPECTED) == 625_728


def respelled(attention_field, ffn, ffn_field, **others):
    """The golden's config with other names for blocks, counts for groups and widths for multiples."""
    blocks = []
    for old, block in zip(GOOD["block_configs"], EXPECTED.blocks, strict=True):
        flags = [{f: old[p][f] for f in ("no_op", "replace_with_linear")} for p in ("attention", "ffn")]
        attention = {**flags[0], attention_field: getattr(block.attention, "kv_heads", None), **others}
        blocks.append({"attention": attention, ffn: {**flags[1], ffn_field: getattr(block.ffn, "width", None)}})
    return {**GOOD, "block_configs": blocks}


SPELLINGS = {
    "Megatron and NeMo": respelled("num_query_groups", "mlp", "ffn_hidden_size"),
    "ModelOpt": respelled("num_key_value_heads", "ffn", "intermediate_size", mamba=None) | {"model_type": "llama"},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_give_the_same_model(spelling):
    assert registry.config_from_hf(SPELLINGS[spelling]) == EXPECTED


def first_block(part, **fields):
    """The golden's config with fields of its first block replaced."""
    blocks = [{**block} for block in GOOD["block_configs"]]
    blocks[0] = {**blocks[0], part: {**blocks[0][part], **fields}}
    return {**GOOD, "block_configs": blocks}


BROKEN = [
    (first_block("attention", window_length=512), "block_configs[0]: attention: window_length (512) is not supported"),
    (first_block("attention", sparsify=["2:4"]), "attention: sparsify (['2:4']) is not supported"),
    (first_block("attention", num_sink_tokens=4), "num_sink_tokens (4) is not supported"),
    (first_block("attention", unshifted_sink=True), "unshifted_sink (True) is not supported"),
    (first_block("ffn", moe={"num_local_experts": 8}), "ffn: moe ({'num_local_experts': 8}) is not supported"),
    (first_block("attention", n_heads_in_group=3), "n_heads_in_group (3) must divide num_attention_heads (4)"),
    (first_block("attention", n_heads_in_group=None), "n_heads_in_group (None) is missing; one of n_heads_in_group"),
    (first_block("attention", num_key_value_heads=4), "contradicts the others: {'n_heads_in_group': 2"),
    (first_block("attention", replace_with_linear=True, no_op=True), "no_op (True) contradicts replace_with_linear"),
    (first_block("attention", no_op="yes"), "no_op ('yes') must be true or false"),
    (first_block("ffn", ffn_mult=-1.0), "ffn_mult (-1.0) must be positive"),
    (first_block("ffn", ffn_mult=1e300), "ffn_mult (1e+300) must be positive, and no larger"),
    (first_block("ffn", ffn_mult=None), "ffn_mult (None) is missing"),
    (GOOD | {"block_configs": None}, "block_configs is missing"),
    (GOOD | {"block_configs": {}}, "block_configs ({}) must be a list"),
    (GOOD | {"block_configs": [7]}, "num_hidden_layers (10) contradicts block_configs, which has 1 entries"),
    (GOOD | {"block_configs": [7], "num_hidden_layers": 1}, "block_configs[0] (7) must be an object"),
    (GOOD | {"block_configs": [{}], "num_hidden_layers": 1}, "block_configs[0]: attention is missing"),
    (
        GOOD | {"block_configs": [GOOD["block_configs"][0] | {"parallel_blocks": [1]}], "num_hidden_layers": 1},
        "block_configs[0]: parallel_blocks ([1]) is not supported",
    ),
    (
        GOOD | {"block_configs": [GOOD["block_configs"][0] | {"mlp": {"no_op": True}}], "num_hidden_layers": 1},
        "block_configs[0]: mlp ({'no_op': True}) contradicts ffn: give one of them",
    ),
    (GOOD | {"model_type": "qwen2"}, "block_configs"),
    (GOOD | {"attention_bias": True}, "attention_bias (True) is not supported"),
    (
        GOOD | {"block_configs": GOOD["block_configs"][1:2], "num_hidden_layers": 1},
        "at least one with grouped attention",
    ),
]


@pytest.mark.parametrize(("fields", "words"), BROKEN)
def test_a_broken_layout_is_refused_in_words(fields, words):
    with pytest.raises(RzooError) as error:
        registry.config_from_hf(fields)
    assert words in str(error.value)


def test_a_wrong_block_cannot_be_written():
    for block, words in [
        (BlockSpec(GroupedAttentionSpec(3), None), r"blocks\[0\]: heads \(4\) must be a multiple of kv_heads \(3\)"),
        (BlockSpec(GroupedAttentionSpec(2), FeedForwardSpec(0)), r"width \(0\) must be a positive integer"),
    ]:
        with pytest.raises(RzooError, match=words):
            NemotronConfig(**SIZES, blocks=(block,))


def test_widths_that_a_multiple_cannot_say_are_written_as_they_are():
    for config in (TINY["nemotron"], EXPECTED):
        written = [block["ffn"] for block in config.to_hf()["block_configs"]]
        assert all(("intermediate_size" in ffn) == (ffn["ffn_mult"] is None) for ffn in written if not off(ffn))
        assert registry.config_from_hf(config.to_hf()) == config


def off(part):
    """Whether a part of block_configs has no size."""
    return part["no_op"] or part["replace_with_linear"]


# GGUF, arch deci.


@pytest.mark.report("A36")
def test_a_gguf_file_gives_the_same_bits_with_each_block_turned_by_its_own_head_count(tmp_path):
    blocks = [replace(block, ffn=None) if block.ffn == Linear() else block for block in EXPECTED.blocks]
    config = replace(EXPECTED, blocks=tuple(blocks), rope=Llama3Rope(factor=16.0))
    params = registry.initialize(config)
    lm = rzoo.load(str(write_deci(tmp_path / "tiny.gguf", config, params)), quiet=True)
    assert lm.config == config
    for path, value in params.items():
        np.testing.assert_array_equal(lm.params[path], value)


ARRAYS = {
    "deci.block_count": 3,
    "deci.embedding_length": 32,
    "deci.attention.head_count": [4, 0, 4],
    "deci.attention.head_count_kv": [2, 0, 0],
    "deci.feed_forward_length": [48, 0, 24],
    "deci.context_length": 2048,
    "deci.vocab_size": 97,
    "deci.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.mark.report("A36")
def test_gguf_arrays_say_grouped_linear_and_nothing():
    config = NemotronConfig.from_gguf(ARRAYS, tensors=frozenset({"output.weight"}))
    assert config.blocks == (*parse_layout("2/48 -/-"), BlockSpec(Linear(), FeedForwardSpec(24)))
    assert (config.heads, config.head_width, config.tied) == (4, 8, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"deci.attention.head_count": 4}, "head_count (4) must be an array with a number for each of the 3 blocks"),
        ({"deci.feed_forward_length": [48, 0]}, "feed_forward_length ([48, 0]) must be an array"),
        ({"deci.block_count": 2**39}, "must be an array with a number for each of the 549755813888 blocks"),
        ({"deci.attention.head_count": [4, 0, 8]}, "head_count ([4, 0, 8]) must be one number in all blocks"),
        ({"deci.attention.head_count": [0, 0, 0]}, "head_count ([0, 0, 0]) must be one number in all blocks"),
        ({"deci.attention.head_count_kv": [3, 0, 0]}, "heads (4) must be a multiple of kv_heads (3)"),
        ({"deci.attention.head_count_kv": [2, 0, -1]}, "must hold integers of at least 0"),
        ({"deci.rope.dimension_count": 4}, "rope.dimension_count (4) is not supported"),
    ],
)
def test_broken_gguf_arrays_are_refused_in_words(change, words):
    with pytest.raises(RzooError) as error:
        NemotronConfig.from_gguf(ARRAYS | change, tensors=frozenset())
    assert words in str(error.value)
