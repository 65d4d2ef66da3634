"""Presets and counts, from shapes alone."""

import pytest

import rzoo
from rzoo.core import RzooError
from rzoo.models.presets import PRESETS
from rzoo.models.registry import config_from_hf, count_parameters, preset

# Published or independently counted numbers of parameters.
COUNTS = {
    "smollm2-135m-instruct-q4_1": 134_515_008,
    "smollm2-135m-instruct": 134_515_008,
    "smollm2-360m-instruct": 361_821_120,
    "smollm2-1.7b-instruct": 1_711_376_384,
    "llama-3.1-8b-instruct": 8_030_261_248,
    "llama-3.3-70b-instruct": 70_553_706_496,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
    "deepseek-r1-distill-qwen-14b": 14_770_033_664,
    "deepseek-r1-distill-qwen-32b": 32_763_876_352,
    "deepseek-r1-distill-llama-8b": 8_030_261_248,
    "deepseek-r1-distill-llama-70b": 70_553_706_496,
    "llama-3.1-nemotron-nano-8b-v1": 8_030_261_248,
    "deepseek-v3": 671_026_419_200,
    "deepseek-r1": 671_026_419_200,
    "deepseek-v3.1": 671_026_419_200,
    "deepseek-v3.2-exp": 671_877_944_064,  # 61 indexers of 13,959,424 more
    "deepseek-v2-lite": 15_706_484_224,
    "brief/v3-175b": 174_626_015_880,
    "llama-3.3-nemotron-super-49b-v1": 49_867_145_216,
    "llama-3.3-nemotron-super-49b-v1.5": 49_867_145_216,
    "llama-3.1-nemotron-ultra-253b-v1": 253_401_268_224,
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_exact(name):
    assert count_parameters(PRESETS[name].config) == COUNTS[name]


def test_aliases_and_names_lead_to_presets_in_any_case():
    assert preset("smollm2")[0] == "smollm2-135m-instruct-q4_1"
    assert preset("Nano-8B")[0] == "llama-3.1-nemotron-nano-8b-v1"
    names = [*PRESETS, *(p.alias for p in PRESETS.values() if p.alias)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)


def test_an_unknown_preset_names_close_ones():
    with pytest.raises(RzooError, match=r"preset \(smolm2\) is unknown; did you mean smollm2"):
        preset("smolm2")


def test_presets_say_what_they_are():
    found = {info.name: info for info in rzoo.presets()}
    assert found.keys() == PRESETS.keys()
    assert found["llama-3.1-8b-instruct"].bytes == 2 * 8_030_261_248
    assert found["smollm2-135m-instruct-q4_1"].bits == "Q4_1"


GOOD = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

BROKEN = [
    ({"model_type": "gpt_bigcode"}, "model_type ('gpt_bigcode') is not supported; supported: llama, qwen2"),
    ({"model_type": None}, "model_type (None) is not supported"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"hidden_size": "64"}, "hidden_size ('64') must be an integer of at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers (0) must be an integer of at least 1"),
    ({"num_hidden_layers": True}, "num_hidden_layers (True) must be an integer"),
    ({"num_hidden_layers": 2**50}, "must be an integer of at least 1"),
    ({"num_key_value_heads": 3}, "heads (4) must be a multiple of kv_heads (3)"),
    ({"head_dim": 15}, "head_width (15) must be even"),
    ({"hidden_act": "gelu"}, "hidden_act ('gelu') is not supported by this model; supported: 'silu'"),
    ({"use_sliding_window": True}, "use_sliding_window (True) is not supported"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps (inf) must be a finite number"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings ('yes') must be true or false"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_a_broken_config_is_refused_in_words(change, words):
    with pytest.raises(RzooError) as error:
        config_from_hf(GOOD | change)
    assert words in str(error.value)


def test_defaults_are_those_of_the_reference():
    config = config_from_hf(GOOD)
    assert (config.norm_eps, config.context, config.tied, config.head_width) == (1e-6, 2048, False, 16)
