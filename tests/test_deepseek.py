"""Latent attention and mixtures of experts: forms that must agree, routing by hand, observation, refusals."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rzoo.compile.kernels import default_forms
from rzoo.compile.sums import experts_in_sums
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models import registry, step
from rzoo.models.attention import KEY_BLOCK
from rzoo.models.deepseek import DeepSeekConfig
from rzoo.models.forms import Forms
from rzoo.models.latent import (
    attend_absorbed,
    attend_absorbed_in_blocks,
    attend_naive,
    attend_naive_in_blocks,
    softmax_scale,
)
from rzoo.models.moe import (
    SigmoidRouting,
    SoftmaxRouting,
    experts_in_tiles,
    experts_one_by_one,
    experts_ragged,
    experts_reference,
    route,
)
from rzoo.models.presets import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from rzoo.models.weights import FrozenWeight, Numerics, Quantized, SelectionBias, weight
from tests.tiny import TINY, V3, V3_EXPERTS

RNG = np.random.default_rng(0)
EXACT = Numerics()


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@pytest.mark.parametrize("form", [attend_absorbed, attend_absorbed_in_blocks, attend_naive_in_blocks])
@pytest.mark.parametrize("t", [1, 7])
def test_forms_of_latent_attention_agree(form, t):
    b, h, c, p, z, r, s = 2, 3, 8, 4, 6, 16, 2 * KEY_BLOCK
    starts = jnp.asarray([KEY_BLOCK + 5, 9])
    key_up, value_up = weight("hcr", (h, c, r), nnx.Rngs(0)), weight("hzr", (h, z, r), nnx.Rngs(1))
    given = (normal(b, t, h, c + p), normal(b, 1, s, r + p), key_up, value_up, starts, 0.2, EXACT)
    np.testing.assert_allclose(jax.jit(lambda: form(*given))(), attend_naive(*given), atol=2e-5)


@pytest.mark.report("C26")
def test_the_softmax_scale_is_that_of_the_expanded_key_with_the_square_of_yarns_m():
    assert softmax_scale(DEEPSEEK_V3.rope, 192) == pytest.approx(0.1352337788608801, rel=1e-12)
    assert softmax_scale(DEEPSEEK_V2_LITE.rope, 192) == pytest.approx(0.1147213867929261, rel=1e-12)
    assert softmax_scale(TINY["deepseek-dense"].rope, 192) == pytest.approx(0.07216878364870323, rel=1e-12)
    assert DEEPSEEK_V3.rope.magnitude == DEEPSEEK_V2_LITE.rope.magnitude == 1.0


def test_the_cache_holds_576_values_a_token_and_layer():
    cache = jax.eval_shape(lambda: step.Blueprint(DEEPSEEK_V3).empty_cache(1, 256))
    assert [leaf.shape for leaf in jax.tree.leaves(cache.slots)] == [(1, 1, 256, 576)] * 61
    assert cache.capacity == 256


EXPERTS = 8
STACKS = [weight(a, s, nnx.Rngs(i)) for i, (a, s) in enumerate([("efd", (8, 16, 12))] * 2 + [("edf", (8, 12, 16))])]


def chosen(n: int, k: int = 2) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, and for each k different experts and their weights."""
    indices = np.stack([RNG.permutation(EXPERTS)[:k] for _ in range(n)])
    return normal(n, 12), jnp.asarray(indices), jnp.asarray(RNG.uniform(size=(n, k)), jnp.float32)


@pytest.mark.parametrize("form", [experts_one_by_one, experts_in_tiles, experts_ragged, experts_in_sums])
@pytest.mark.parametrize("n", [1, 2, 3, 90])
def test_every_backend_of_experts_is_the_reference(form, n):
    given = (*chosen(n), *STACKS, EXACT)
    expected = experts_reference(*given)
    np.testing.assert_allclose(jax.jit(lambda: form(*given))(), expected, atol=1e-5)


@pytest.mark.parametrize("form", [experts_reference, experts_one_by_one, experts_in_tiles, experts_ragged])
def test_backends_compute_the_weighted_sum_of_the_chosen_experts(form):
    x, indices, weights = chosen(40)
    indices = indices.at[:].set(jnp.asarray([5, 2]))  # all tokens to the same experts: more than one tile of each
    gate, up, down = (np.asarray(w.get_value()) for w in STACKS)
    silu = lambda a: a / (1 + np.exp(-a))  # noqa: E731
    expected = sum(
        np.asarray(weights)[:, i : i + 1] * ((silu(x @ gate[e].T) * (x @ up[e].T)) @ down[e].T)
        for i, e in enumerate((5, 2))
    )
    np.testing.assert_allclose(form(x, indices, weights, *STACKS, EXACT), expected, atol=1e-5)


@pytest.mark.parametrize("form", [experts_reference, experts_one_by_one, experts_in_tiles, experts_in_sums])
def test_backends_run_on_quantized_experts(form):
    def in_blocks(w) -> FrozenWeight:
        e, m, n = w.shape
        codes = jnp.asarray(RNG.integers(-8, 8, (e, m, n)), jnp.int8)
        scale = jnp.asarray(RNG.uniform(0.01, 0.1, (e, -(-m // 5), -(-n // 5))), jnp.float32)
        return FrozenWeight(Quantized(codes=codes, scale=scale, offset=None, block=(5, 5), shape=(e, m, n)))

    stacks = [in_blocks(w) for w in STACKS]
    dense = [FrozenWeight(w.get_value().dequantize()) for w in stacks]
    given = chosen(6)
    np.testing.assert_allclose(form(*given, *stacks, EXACT), form(*given, *dense, EXACT), rtol=1e-5, atol=1e-5)


def test_the_differentiable_backends_have_the_same_gradient():
    x, indices, weights = chosen(9)
    loss = lambda form: jax.grad(lambda a: (form(a, indices, weights, *STACKS, EXACT) ** 2).sum())(x)  # noqa: E731
    np.testing.assert_allclose(loss(experts_ragged), loss(experts_reference), atol=1e-4)


@pytest.mark.report("C29", "C30", "C32")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_v3_routing_by_hand(normalize, scale):
    logits, bias = np.asarray(normal(50, 8)), np.asarray(normal(8)) - 1.5
    routing = SigmoidRouting(groups=4, kept_groups=2, normalize=normalize, scale=scale)
    indices, weights = route(routing, jnp.asarray(logits), jnp.asarray(bias), 3)
    for row, found, given in zip(logits, np.asarray(indices), np.asarray(weights), strict=True):
        scores = 1 / (1 + np.exp(-row))
        choice = scores + bias
        groups = sorted(range(4), key=lambda g: -choice[2 * g : 2 * g + 2].sum())[:2]
        best = sorted((e for g in groups for e in (2 * g, 2 * g + 1)), key=lambda e: -choice[e])[:3]
        assert found.tolist() == best
        expected = scores[best] / (scores[best].sum() if normalize else 1) * scale
        np.testing.assert_allclose(given, expected, rtol=1e-5)


def test_v2_routing_by_hand():
    logits = np.asarray(normal(50, 8))
    indices, weights = route(SoftmaxRouting(groups=4, kept_groups=2, scale=16.0), jnp.asarray(logits), None, 3)
    for row, found, given in zip(logits, np.asarray(indices), np.asarray(weights), strict=True):
        scores = np.exp(row) / np.exp(row).sum()
        groups = sorted(range(4), key=lambda g: -scores[2 * g : 2 * g + 2].max())[:2]
        best = sorted((e for g in groups for e in (2 * g, 2 * g + 1)), key=lambda e: -scores[e])[:3]
        assert found.tolist() == best
        np.testing.assert_allclose(given, scores[best] * 16.0, rtol=1e-5)


def test_one_group_routes_like_no_groups():
    logits, bias = normal(20, 8), normal(8)
    np.testing.assert_array_equal(
        route(SigmoidRouting(groups=1, kept_groups=1), logits, bias, 3)[0],
        jax.lax.top_k(jax.nn.sigmoid(logits) + bias, 3)[1],
    )


@pytest.mark.report("C33")
def test_weights_of_tiny_scores_survive_a_large_bias():
    logits, bias = jnp.full((1, 8), -18.4).at[0, 3].set(-18.0), jnp.full(8, 12.0).at[3].set(12.5)
    _, weights = route(SigmoidRouting(normalize=False), logits, bias, 2)
    np.testing.assert_allclose(weights[0, 0], 1 / (1 + np.exp(18.0)), rtol=1e-4)


def test_the_router_computes_in_float32_and_keeps_its_bias_in_float32():
    params = registry.initialize(V3, dtype="bfloat16")
    assert {str(v.dtype) for p, v in params.items() if p.endswith("router.bias")} == {"float32"}
    assert {str(v.dtype) for p, v in params.items() if not p.endswith("router.bias")} == {"bfloat16"}
    module = registry.assemble(V3, default_forms(Numerics(compute="bfloat16", cache="bfloat16")), params)
    router = module.layers[1].mlp.router
    text = jax.jit(lambda x: router(x)).lower(jnp.zeros((3, 32), jnp.bfloat16)).as_text()
    assert "(tensor<3x32xf32>, tensor<8x32xf32>) -> tensor<3x8xf32>" in text


def test_the_bias_is_no_parameter_of_an_optimizer():
    module = registry.assemble(V3, Forms(), registry.initialize(V3))
    assert isinstance(module.layers[1].mlp.router.bias, SelectionBias)
    trained = {registry.path_name(path) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    assert set(registry.flatten(module)) - trained == {"layers.1.mlp.router.bias"}


@pytest.fixture(scope="module")
def lm() -> LM:
    return LM(V3, registry.initialize(V3), default_forms(EXACT))


def test_load_and_entropy_are_observed(lm):
    ids = RNG.integers(0, 97, (2, 24))
    logits, seen = lm(ids, capture=("router", "load", "entropy", "attention"))
    np.testing.assert_allclose(logits, lm(ids), atol=2e-5)
    (share,), (load,) = seen["router"], seen["load"]
    np.testing.assert_allclose(share.sum(-1), V3_EXPERTS.routing.scale, rtol=1e-5)
    np.testing.assert_array_equal(load, (share > 0).sum((0, 1)))
    assert load.sum() == ids.size * V3_EXPERTS.active
    for probabilities, entropy in zip(seen["attention"], seen["entropy"], strict=True):
        p = np.asarray(probabilities)
        np.testing.assert_allclose(entropy, -(p * np.log(np.where(p > 0, p, 1))).sum(-1), atol=1e-5)
        np.testing.assert_allclose(entropy[:, :, 0], 0.0, atol=1e-6)


def test_what_is_not_observed_is_not_in_the_program(lm, monkeypatch):
    ids = jnp.zeros((1, 8), jnp.int32)

    def program(capture: tuple[str, ...] = ()) -> str:
        blueprint = step.Blueprint(V3, replace(lm.forms, capture=capture))
        return jax.jit(lambda p, i: step.forward_captured(blueprint, p, i)).lower(lm.params, ids).as_text()

    off = program()
    for name in ("router", "load", "attention", "entropy"):
        assert len(program((name,))) > len(off)
    monkeypatch.setattr(Forms, "observe", lambda *_: None)
    assert program() == off


def test_decoding_holds_less_than_two_layers_of_chosen_experts_beside_its_arguments():
    wide = replace(V3, width=64, experts=replace(V3_EXPERTS, width=512))
    blueprint = step.Blueprint(wide, default_forms(EXACT))
    params = {path: shape for path, (_, shape) in registry.abstract_weights(wide).items()}
    cache = jax.eval_shape(lambda: blueprint.empty_cache(1, 256))
    one = jax.jit(lambda p, i, c: step.prefill_chunk_scored(blueprint, p, i, c), donate_argnums=2)
    memory = one.lower(params, jax.ShapeDtypeStruct((1, 1), jnp.int32), cache).compile().memory_analysis()
    chosen_bytes = 4 * wide.experts.active * 3 * wide.width * wide.experts.width
    assert memory.temp_size_in_bytes < 2 * chosen_bytes


HF = V3.to_hf()
BROKEN = [
    ({"n_group": 3}, "count (n_routed_experts 8) must be a multiple of groups (n_group 3)"),
    ({"topk_group": 5}, "kept_groups (topk_group 5) must be at least 1 and at most groups (n_group 4)"),
    ({"num_experts_per_tok": 5}, "active (num_experts_per_tok 5) must be at most the 4 experts of kept_groups"),
    ({"n_group": 8}, "groups (n_group 8) leaves groups of one expert"),
    ({"scoring_func": "softmax"}, "scoring_func ('softmax') is not supported by this model; supported: 'sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method ('greedy') is not supported by this model; supported: 'noaux_tc'"),
    ({"attention_bias": True}, "attention_bias (True) is not supported"),
    ({"rope_interleave": False}, "rope_interleave (False) is not supported"),
    ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ({"qk_rope_head_dim": 5}, "rope_width (5) must be even"),
    ({"model_type": "deepseek_v2"}, "scoring_func ('sigmoid') is not supported by this model; supported: 'softmax'"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_a_broken_config_is_refused_in_words(change, words):
    with pytest.raises(RzooError) as error:
        DeepSeekConfig.from_hf(HF | change)
    assert words in str(error.value)


def test_groups_contradict_the_greedy_method_of_v2():
    config = TINY["deepseek-v2"].to_hf() | {"n_group": 4, "topk_group": 2}
    with pytest.raises(RzooError, match=r"n_group \(4\) contradicts topk_method \('greedy'\)"):
        DeepSeekConfig.from_hf(config)
    assert DeepSeekConfig.from_hf(config | {"topk_method": "group_limited_greedy"}).experts.routing.groups == 4


def test_aliases_of_fields_are_read():
    config = {k: v for k, v in HF.items() if k not in ("n_routed_experts", "num_nextn_predict_layers")}
    read = DeepSeekConfig.from_hf(config | {"num_local_experts": 8, "num_mtp_layers": 1})
    assert (read.experts.count, read.mtp_layers) == (8, 1)


def test_layers_are_dense_or_mixed_by_the_configs_rule():
    config = replace(V3, layers=8, experts=replace(V3_EXPERTS, dense_layers=3, every=2))
    assert [i for i in range(8) if config.is_mixture(i)] == [4, 6]
    assert "layers.4.mlp.router.weight" in registry.abstract_weights(config)
    assert "layers.5.mlp.gate" in registry.abstract_weights(config)
