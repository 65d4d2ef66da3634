"""Storage of weights: the quantized reference against numpy, and products against einsum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rzoo.models import registry
from rzoo.models.weights import FrozenWeight, Numerics, Quantized, Weight, dense_product
from tests.tiny import TINY

RNG = np.random.default_rng(0)


def quantized(m: int, n: int, block: tuple[int, int], *, shape=None, offset: bool = False) -> Quantized:
    """Random codes and scales."""
    grid = (-(-m // block[0]), -(-n // block[1]))
    return Quantized(
        codes=jnp.asarray(RNG.integers(-8, 8, (m, n)), jnp.int8),
        scale=jnp.asarray(RNG.normal(size=grid), jnp.float32),
        offset=jnp.asarray(RNG.normal(size=grid), jnp.float32) if offset else None,
        block=block,
        shape=shape or (m, n),
    )


def by_hand(q: Quantized) -> np.ndarray:
    """Element by element, as the format is written down."""
    codes, scale = np.asarray(q.codes, np.float32), np.asarray(q.scale)
    out = np.empty_like(codes)
    for i, j in np.ndindex(codes.shape):
        at = i // q.block[0], j // q.block[1]
        out[i, j] = codes[i, j] * scale[at] + (0 if q.offset is None else float(q.offset[at]))
    return out.reshape(q.shape)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("m", "n", "block"), [(6, 64, (1, 32)), (9, 10, (4, 4)), (5, 7, (128, 128)), (6, 8, (6, 1))])
def test_dequantized_values_are_codes_times_scales_also_in_partial_blocks(m, n, block, offset):
    q = quantized(m, n, block, offset=offset)
    np.testing.assert_allclose(q.dequantize(), by_hand(q), rtol=1e-6)


def test_rows_and_products_of_a_quantized_weight_are_those_of_its_dense_form():
    q = quantized(12, 64, (4, 32), offset=True)
    ids = jnp.asarray([[3, 0], [11, 3]])
    np.testing.assert_allclose(q.rows(ids, Numerics()), q.dequantize()[ids], rtol=1e-6)
    heads = quantized(12, 64, (1, 32), shape=(3, 4, 64))
    x = jnp.asarray(RNG.normal(size=(2, 5, 64)), jnp.float32)
    expected = jnp.einsum("btd,hcd->bthc", x, heads.dequantize())
    np.testing.assert_allclose(heads.product("btd,hcd->bthc", x, Numerics()), expected, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("spec", ["btd,hcd->bthc", "bthc,dhc->btd", "btd,vd->btv", "bd,vd->bv", "btd,fd->btf"])
def test_a_product_of_matrices_is_the_einsum(spec):
    sizes = dict(zip("btdhcvf", (2, 3, 8, 2, 5, 7, 6), strict=True))
    of_x, of_weight = spec.split("->")[0].split(",")
    x = jnp.asarray(RNG.normal(size=[sizes[a] for a in of_x]), jnp.float32)
    w = jnp.asarray(RNG.normal(size=[sizes[a] for a in of_weight]), jnp.float32)
    np.testing.assert_allclose(dense_product(spec, x, w, Numerics()), jnp.einsum(spec, x, w), rtol=1e-5, atol=1e-5)


def test_a_model_runs_on_quantized_weights_and_gradients_skip_them():
    config = TINY["llama"]
    params = registry.initialize(config)
    q = quantized(32, 32, (1, 32), shape=(4, 8, 32))
    params["layers.0.attention.q"] = q
    module = registry.assemble(config, registry.Forms(), params)
    assert isinstance(module.layers[0].attention.q, FrozenWeight)
    ids = jnp.asarray([[1, 2, 3]])
    dense = registry.assemble(config, registry.Forms(), {**params, "layers.0.attention.q": q.dequantize()})
    np.testing.assert_allclose(module(ids), dense(ids), atol=1e-5)
    gradients = nnx.grad(lambda m: m(ids).sum())(module)
    paths = {registry.path_name(p) for p, _ in nnx.to_flat_state(gradients)}
    assert paths == set(params) - {"layers.0.attention.q"}
    assert all(isinstance(leaf, Weight) for _, leaf in nnx.to_flat_state(gradients))


def test_stored_numerics_compute_in_the_held_type_and_accumulate_in_float32():
    numerics = Numerics(compute="bfloat16")
    text = (
        jax.jit(lambda x, w: dense_product("bd,vd->bv", x, w, numerics))
        .lower(jnp.zeros((1, 8), jnp.bfloat16), jnp.zeros((4, 8), jnp.bfloat16))
        .as_text()
    )
    assert "(tensor<1x8xbf16>, tensor<4x8xbf16>) -> tensor<1x4xf32>" in text


@pytest.mark.parametrize(
    ("spec", "shape", "x", "block"),
    [
        ("btd,hcd->bthc", (2, 4, 12), (1, 3, 12), (1, 12)),
        ("btf,df->btd", (8, 12), (1, 3, 12), (1, 12)),
        ("bthc,dhc->btd", (8, 3, 4), (1, 3, 3, 4), (1, 12)),
        ("bthc,hcr->bthr", (2, 4, 12), (1, 3, 2, 4), (1, 12)),  # over an axis of the outputs: the scale comes first
        ("btd,fd->btf", (8, 12), (1, 3, 12), (1, 4)),
    ],
)
def test_a_scale_for_each_output_multiplies_the_product(spec, shape, x, block):
    m = 8
    q = quantized(m, 12, block, shape=shape)
    inputs = np.random.default_rng(1).standard_normal(x).astype(np.float32)
    got = q.product(spec, jnp.asarray(inputs), Numerics())
    assert np.allclose(got, np.einsum(spec, inputs, by_hand(q).reshape(shape)), rtol=1e-4, atol=1e-4)
