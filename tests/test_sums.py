"""Products as sums are the products: attention, weights of a whole model, dense and quantized; experts stand in
test_deepseek.py.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rzoo.compile.sums import QuantizedInSums, attend_in_sums, products_in_sums
from rzoo.models.attention import attend
from rzoo.models.weights import Numerics, Quantized
from tests.test_every_model import IDS, tiny

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("t", [1, 3])
def test_attention_in_sums_is_attention(t):
    q = jnp.asarray(RNG.normal(size=(2, t, 6, 8)), jnp.float32)
    keys, values = jnp.asarray(RNG.normal(size=(2, 2, 3, 16, 8)), jnp.float32)
    given = (q, keys, values, jnp.asarray([0, 9]), 0.3, Numerics())
    np.testing.assert_allclose(attend_in_sums(*given), attend(*given), atol=2e-6)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "deepseek-v3"])
def test_a_model_whose_products_are_sums_gives_the_same_logits(name):
    lm = tiny(name)
    summed = replace(lm, params=products_in_sums(lm.config, lm.params))
    for ids in (IDS[:1, :1], IDS[:1]):  # one row, and more
        np.testing.assert_allclose(summed(ids), lm(ids), atol=2e-5)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("offset", [False, True])
def test_a_quantized_weight_in_sums_gives_its_product(rows, offset):
    codes = jnp.asarray(RNG.integers(-127, 128, (12, 20)), jnp.int8)
    scale, more = jnp.asarray(RNG.uniform(0.01, 0.1, (2, 3, 3)), jnp.float32)
    of = (codes, scale, more if offset else None, (5, 8), (3, 4, 20))
    x = jnp.asarray(RNG.normal(size=(rows, 1, 20)), jnp.float32)
    expected = Quantized(*of).product("btd,hcd->bthc", x, Numerics())
    np.testing.assert_allclose(QuantizedInSums(*of).product("btd,hcd->bthc", x, Numerics()), expected, atol=5e-5)


def test_only_matrices_that_a_row_is_multiplied_with_change_and_none_of_their_bits():
    lm = tiny("deepseek-v3")
    params = {p: _coded(v) if p.endswith(("kv_down", "key_up", "embed")) else v for p, v in lm.params.items()}
    summed = products_in_sums(lm.config, params)
    changed = {path for path, value in summed.items() if isinstance(value, QuantizedInSums)}
    assert changed == {"layers.0.attention.kv_down", "layers.1.attention.kv_down"}
    for path in changed:
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(summed[path]), jax.tree.leaves(params[path]))


def _coded(value: jax.Array) -> Quantized:
    codes = value.reshape(value.shape[0], -1).astype(jnp.int8)
    return Quantized(codes, jnp.ones((codes.shape[0], 1)), None, (1, codes.shape[1]), value.shape)
