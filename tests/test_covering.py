"""Attention that reads blocks of keys until a share is covered: dense at a share of 1, gathered as masked, counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rzoo.compile.kernels import candidate_forms, covering, default_forms, form_named
from rzoo.core import RzooError
from rzoo.engine.session import decode, prefill
from rzoo.handle import LM
from rzoo.models.attention import attend, attention_probabilities
from rzoo.models.covering import AttendCovering, spreads, upper_bounds
from rzoo.models.registry import initialize
from rzoo.models.weights import Numerics
from rzoo.sharding.place import place
from tests.tiny import DIVISIBLE, TINY

RNG = np.random.default_rng(0)
EXACT = Numerics()
B, H, K, C, S = 2, 4, 2, 8, 300
STARTS = jnp.asarray([289, 70])
IDS = RNG.integers(0, 97, (2, 48))


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


# Peaked attention: keys lie near a few directions, block by block.
KEYS = normal(B, K, S, C) * 0.3 + jnp.repeat(normal(B, K, -(-S // 16), C), 16, axis=2)[:, :, :S] * 2
VALUES = normal(B, K, S, C)


def given(t: int):
    return (normal(B, t, H, C) * 2, KEYS, VALUES, STARTS, 0.5, EXACT)


@pytest.mark.parametrize("t", [1, 5])
def test_at_a_share_of_one_it_is_dense_attention(t):
    form, arguments = AttendCovering(share=1.0, size=16, estimate="bound"), given(t)
    np.testing.assert_allclose(jax.jit(lambda: form(*arguments))(), attend(*arguments), atol=1e-5)


@pytest.mark.parametrize(
    "form",
    [
        AttendCovering(share=0.9, size=16, estimate="bound"),
        AttendCovering(share=0.5, size=16),
        AttendCovering(share=1.0, size=16, most=8),
    ],
)
def test_the_gathered_blocks_are_those_of_the_masked_reference_and_are_counted(form):
    arguments = given(1)
    gathered, masked = (jax.jit(lambda f=f: f(*arguments))() for f in (form.gathered, form.masked))
    np.testing.assert_allclose(gathered[0], masked[0], atol=1e-5)
    np.testing.assert_array_equal(gathered[1], masked[1])
    visible = np.asarray(STARTS)[:, None, None] + 1
    assert (gathered[1] <= visible).all()
    assert (gathered[1] < visible).any()
    np.testing.assert_array_equal(form.touched(*arguments), gathered[1])


def test_what_is_read_has_the_share_in_every_head():
    form, (q, keys, *rest) = AttendCovering(share=0.8, size=16, estimate="bound"), given(6)
    ones = jnp.broadcast_to(jnp.eye(S)[None, None], (B, K, S, S))  # values that give the weights back
    weights = np.asarray(jax.jit(lambda: form(q, keys, ones, *rest[1:]))())
    exact = np.asarray(attention_probabilities(q, keys, *rest[1:])).swapaxes(1, 2)
    covered = np.where(weights > 0, exact, 0).sum(-1)
    assert covered.min() >= 0.8
    assert (weights > 0).sum() < (exact > 0).sum()


def test_no_product_is_above_the_bound_and_normal_keys_are_estimated_right():
    grouped, blocks = normal(1, 2, 3, 4, 8) * 0.3, normal(1, 2, 5, 4096, 8) * 0.5 + 0.2
    products = np.einsum("bkgtc,bknsc->bkgtns", grouped, blocks)
    assert (upper_bounds(grouped, blocks, EXACT) >= products.max(-1) - 1e-5).all()
    np.testing.assert_allclose(spreads(grouped, blocks, EXACT), np.log(np.exp(products).mean(-1)), atol=0.05)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_a_model_at_a_share_of_one_says_what_it_said_and_counts_what_it_read(name):
    config = TINY[name]
    lm = LM(config, initialize(config), default_forms(EXACT))
    whole, less = covering(lm, 1.0, size=8, estimate="bound"), covering(lm, 0.3, size=4)
    assert (whole.policy, lm.policy) == ("fast", "exact")
    state = prefill(whole, IDS[:, :40].tolist(), room=4)
    tokens, state = decode(whole, state, 2)
    ids = np.concatenate([IDS[:, :40], tokens[:, :2]], axis=1)
    np.testing.assert_allclose(state.logits, lm(ids)[:, -1], atol=5e-5)
    _, seen = less(IDS, capture="touched")
    assert len(seen["touched"]) == config.layers
    kv_heads = getattr(config, "kv_heads", 1)
    for touched in seen["touched"]:
        assert touched.shape == (2, kv_heads, 48)
        assert (np.asarray(touched) <= np.arange(48) + 1).all()
        assert (np.asarray(touched) < np.arange(48) + 1).any()


def test_the_name_serves_where_asked_and_no_tuner_tries_it():
    assert form_named("attend_decode", "covering 0.95") == AttendCovering(share=0.95)
    assert form_named("latent_attend_decode", "covering 0.95").form == AttendCovering(share=0.95)
    for config in (TINY["llama"], TINY["deepseek-v3"]):
        names = [name for forms in candidate_forms(config, EXACT, "cpu").values() for name in forms]
        assert not any("covering" in name for name in names)


BROKEN = [
    ({"share": 0.0}, r"share \(0.0\) must be above 0 and at most 1"),
    ({"share": float("nan")}, r"share \(nan\) must be above 0"),
    ({"share": 0.5, "size": 0}, r"size \(0\) must be at least 1"),
    ({"share": 0.5, "most": 0}, r"most \(0\) must be at least 1"),
    ({"share": 0.5, "estimate": "median"}, r"estimate \(median\) is unknown; known: bound, spread"),
]


@pytest.mark.parametrize(("values", "words"), BROKEN)
def test_values_out_of_range_are_refused_in_words(values, words):
    with pytest.raises(RzooError, match=words):
        AttendCovering(**values)


def test_a_model_on_a_mesh_is_refused_in_words():
    config = DIVISIBLE["llama"]
    lm = place(LM(config, initialize(config), default_forms(EXACT)), {"tensor": 2}, "tensor")
    with pytest.raises(RzooError, match="covering: this model lies on a mesh"):
        covering(lm, 0.9)
