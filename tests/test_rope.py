"""Rotary frequencies against published values, and the two ways of pairing."""

import jax.numpy as jnp
import numpy as np
import pytest

from rzoo.core import RzooError
from rzoo.models.config import HFConfig
from rzoo.models.rope import (
    DefaultRope,
    DividedRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    YarnRope,
    frequencies,
    rotate_half_split,
    rotate_interleaved,
    rotation,
)
from rzoo.models.rope_config import read_gguf_rope, read_rope, write_rope

ONE = jnp.ones(1, jnp.int32)

# (settings, head width, {pair: radians a position}); Llama 3.1 and DeepSeek-V3 as their files state them.
PUBLISHED = [
    (
        Llama3Rope(factor=8.0),
        128,
        {
            28: 0.003211446,
            29: 0.0021665708,
            30: 0.0013718936,
            31: 8.5675141e-4,
            32: 5.2484616e-4,
            33: 3.1269375e-4,
            34: 1.7850781e-4,
            35: 9.5562124e-5,
            63: 3.068926e-7,
        },
    ),
    (Llama3Rope(factor=16.0), 128, {29: 0.0021344616, 32: 4.6131992e-4, 34: 1.2422452e-4, 63: 1.534463e-7}),
    (
        YarnRope(factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0),
        64,
        {
            0: 1.0,
            1: 0.74989421,
            10: 0.056234133,
            11: 0.039006927,
            12: 0.02687936,
            16: 0.0055,
            20: 7.9056942e-4,
            22: 1.7782794e-4,
            23: 3.3338036e-5,
            31: 3.3338036e-6,
        },
    ),
]


@pytest.mark.parametrize(("rope", "width", "expected"), PUBLISHED)
def test_frequencies_are_the_published_ones(rope, width, expected):
    found = frequencies(rope, width, ONE)[0]
    for pair, value in expected.items():
        np.testing.assert_allclose(found[pair], value, rtol=1e-6)


@pytest.mark.report("C27")
def test_yarn_magnitude_is_the_ratio_of_the_mscales():
    both = YarnRope(factor=40.0, original_context=4096, mscale=0.707, mscale_all_dim=0.707)
    assert both.magnitude == 1.0
    assert YarnRope(factor=40.0, original_context=4096).magnitude == pytest.approx(1.3688879454113936)
    assert YarnRope(factor=40.0, original_context=4096, attention_factor=0.5).magnitude == 0.5


def test_dynamic_frequencies_change_only_past_the_original_context():
    rope = DynamicRope(factor=2.0, original_context=100)
    short, long = frequencies(rope, 16, jnp.asarray([100, 300]))
    np.testing.assert_allclose(short, frequencies(DefaultRope(), 16, ONE)[0])
    theta = 10000.0 * (2.0 * 300 / 100 - 1.0) ** (16 / 14)
    np.testing.assert_allclose(long, theta ** -(np.arange(0, 16, 2) / 16), rtol=1e-5)


def test_linear_frequencies_are_divided():
    plain = frequencies(DefaultRope(), 16, ONE)
    np.testing.assert_allclose(frequencies(LinearRope(factor=4.0), 16, ONE), plain / 4)


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 3, 8)), jnp.float32)
    for rotate in (rotate_half_split, rotate_interleaved):
        scores = []
        for first in (0, 7):
            at = rotation(DefaultRope(), 8, jnp.asarray([[first, first + 5]]), ONE)
            turned = rotate(x, at)
            np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
            scores.append(jnp.einsum("hc,hc->h", turned[0, 0], turned[0, 1]))
        np.testing.assert_allclose(*scores, atol=1e-5)


def test_the_two_pairings_differ_by_a_reordering():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 1, 8)), jnp.float32)
    at = rotation(DefaultRope(), 8, jnp.asarray([[3]]), ONE)
    interleaved = rotate_interleaved(x, at)
    split = rotate_half_split(jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1), at)
    np.testing.assert_allclose(jnp.concatenate([interleaved[..., ::2], interleaved[..., 1::2]], -1), split, atol=1e-6)


ROPES = [
    DefaultRope(theta=123.0),
    LinearRope(theta=1e5, factor=2.0),
    DynamicRope(factor=3.0, original_context=64),
    Llama3Rope(factor=8.0),
    YarnRope(factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0, truncate=False),
]


@pytest.mark.parametrize("spelling", [4, 5, None])
@pytest.mark.parametrize("rope", ROPES, ids=lambda r: type(r).__name__)
def test_either_spelling_is_read_as_it_was_written(rope, spelling):
    assert read_rope(write_rope(rope, spelling=spelling), context=2048) == rope


def test_an_unscaled_model_of_transformers_5_is_not_scaled():
    fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": {"rope_type": "default"}}
    assert read_rope(fields, context=2048) == DefaultRope(theta=5e5)


BROKEN = [
    (
        {"rope_scaling": {"type": "longrope", "factor": 2}},
        "rope_type ('longrope') is not supported; supported: default",
    ),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor ('two') must be a finite number"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor (0.5) must be at least 1"),
    ({"rope_scaling": "linear"}, "rope_scaling ('linear') must be an object or null"),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta (10000.0) contradicts rope_parameters"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor (0.5) is not supported"),
    ({"rope_theta": float("nan")}, "rope_theta (nan) must be a finite number"),
]


@pytest.mark.parametrize(("fields", "words"), BROKEN)
def test_broken_settings_are_refused_in_words(fields, words):
    with pytest.raises(RzooError) as error:
        read_rope(fields, context=2048)
    assert words in str(error.value)


HUGE, TINY = 1e308, 1e-320
UNUSABLE = [
    *(("yarn", field, value) for field in ("beta_fast", "beta_slow") for value in (0, -1, TINY, HUGE)),
    *(("yarn", field, value) for field in ("mscale", "mscale_all_dim", "attention_factor") for value in (-HUGE, HUGE)),
    *(("llama3", field, value) for field in ("low_freq_factor", "high_freq_factor") for value in (-HUGE, HUGE)),
    *((kind, "original_max_position_embeddings", 2**40) for kind in ("dynamic", "llama3", "yarn")),
    *((kind, "factor", HUGE) for kind in ("linear", "dynamic", "llama3", "yarn")),
    *(("default", "rope_theta", value) for value in (-1, 0, 1, HUGE)),
]


@pytest.mark.parametrize(("kind", "field", "value"), UNUSABLE)
def test_a_value_that_would_overflow_or_divide_by_zero_is_refused(kind, field, value):
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    settings = {"rope_type": kind, "factor": 8.0, **llama3, field: value}
    with pytest.raises(RzooError, match=rf"{field} \(.*\) must be at least .* and at most"):
        read_rope({"rope_parameters": settings}, context=64)


@pytest.mark.parametrize("field", ["rope.freq_base", "rope.scaling.factor"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_gguf_settings_have_the_same_bounds(field, value):
    meta = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, field: value}
    with pytest.raises(RzooError, match=rf"{field} \(.*\) must be at least"):
        read_gguf_rope(HFConfig(meta, "a.gguf"), width=8, context=64, divisors=None)


def test_gguf_divisors_are_recognised_as_the_published_scaling_and_kept_otherwise():
    plain = frequencies(DefaultRope(theta=5e5), 128, ONE)
    divisors = tuple((plain / frequencies(Llama3Rope(factor=32.0), 128, ONE))[0].tolist())
    meta = HFConfig({"rope.freq_base": 5e5})
    assert read_gguf_rope(meta, width=128, context=131072, divisors=divisors) == Llama3Rope(factor=32.0)
    odd = tuple(2 * d for d in divisors)
    assert read_gguf_rope(meta, width=128, context=131072, divisors=odd) == DividedRope(theta=5e5, divisors=odd)
    with pytest.raises(RzooError, match="has 3 entries, the head width 128 needs 64"):
        read_gguf_rope(meta, width=128, context=131072, divisors=(1.0, 1.0, 1.0))
    with pytest.raises(RzooError, match="no field in config"):
        write_rope(DividedRope(theta=5e5, divisors=odd))
