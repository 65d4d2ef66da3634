"""Sparse attention of V3.2: forms that must agree, the border where it begins, ties, its cache, files and a mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rzoo
from rzoo.checkpoint import fp8
from rzoo.checkpoint.huggingface import open_folder
from rzoo.compile.kernels import default_forms
from rzoo.core import RzooError
from rzoo.engine.session import decode, prefill
from rzoo.handle import LM
from rzoo.models import dynamic, step
from rzoo.models.attention import KEY_BLOCK
from rzoo.models.deepseek import DeepSeekConfig
from rzoo.models.dynamic import attend_gathered, attend_masked, attend_masked_in_blocks, choose, choose_in_blocks
from rzoo.models.presets import DEEPSEEK_V32
from rzoo.models.registry import initialize
from rzoo.models.rope import DefaultRope, rotation
from rzoo.models.weights import Numerics, weight
from rzoo.sharding.place import place
from tests.tiny import TINY

RNG = np.random.default_rng(0)
EXACT = Numerics()
V32 = TINY["deepseek-v32"]
IDS = RNG.integers(0, 97, (2, 24))


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@pytest.fixture(scope="module")
def lm():
    return LM(V32, initialize(V32), default_forms(EXACT))


@pytest.mark.parametrize("t", [1, 8])
def test_scores_in_blocks_choose_the_same_positions(t):
    s, starts = 2 * KEY_BLOCK, jnp.asarray([KEY_BLOCK + 5, 3])
    given = (normal(2, t, 32, 8), normal(2, 1, s, 8), normal(2, t, 32), starts, 16, EXACT)
    found, expected = (np.asarray(jax.jit(lambda f=f: f(*given))()) for f in (choose_in_blocks, choose))
    at = np.asarray(starts)[:, None] + np.arange(t)
    for row in range(2):
        for i in range(t):
            ours, theirs = ({int(p) for p in chosen[row, i] if p <= at[row, i]} for chosen in (found, expected))
            assert ours == theirs
            assert len(ours) == min(16, at[row, i] + 1)


@pytest.mark.parametrize("form", [choose, choose_in_blocks])
def test_equal_scores_go_to_the_lowest_positions_whatever_the_sign_of_zero(form):
    keys = jnp.zeros((1, 1, 2 * KEY_BLOCK, 8)).at[0, 0, 700].set(1.0).at[0, 0, 20].set(-1.0)
    weights = jnp.full((1, 1, 1), -1.0)  # the score of a zero product is then -0
    found = form(jnp.ones((1, 1, 1, 8)), keys, -weights, jnp.asarray([900]), 4, EXACT)
    assert sorted(found[0, 0].tolist()) == [0, 1, 2, 700]
    assert sorted(form(jnp.ones((1, 1, 1, 8)), keys, weights, jnp.asarray([900]), 4, EXACT)[0, 0].tolist()) == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("form", [attend_gathered, attend_masked_in_blocks])
@pytest.mark.parametrize("t", [1, 7, 16])
def test_gathered_and_masked_attention_agree(form, t):
    b, h, c, p, z, r, s, n = 2, 3, 8, 4, 6, 16, 2 * KEY_BLOCK, 12
    starts = jnp.asarray([KEY_BLOCK + 5, 2])  # the second row has fewer keys than are chosen
    key_up, value_up = weight("hcr", (h, c, r), nnx.Rngs(0)), weight("hzr", (h, z, r), nnx.Rngs(1))
    chosen = choose(normal(b, t, 4, 8), normal(b, 1, s, 8), normal(b, t, 4), starts, n, EXACT)
    given = (normal(b, t, h, c + p), normal(b, 1, s, r + p), key_up, value_up, chosen, starts, 0.2, EXACT)
    np.testing.assert_allclose(jax.jit(lambda: form(*given))(), attend_masked(*given), atol=2e-5)


@pytest.mark.report("C35")
def test_below_at_and_above_the_kept_number_prefill_and_steps_give_the_whole(lm):
    whole, keep = lm(IDS), V32.indexer.keep
    for length in (keep - 1, keep, keep + 1):
        state = prefill(lm, IDS[:, :length].tolist(), room=4)
        np.testing.assert_allclose(state.logits, whole[:, length - 1], atol=2e-5)
        tokens, state = decode(lm, state, 2)
        ids = np.concatenate([IDS[:, :length], tokens[:, :2]], axis=1)
        np.testing.assert_allclose(state.logits, lm(ids)[:, -1], atol=2e-5)


def test_where_all_are_kept_attention_is_that_of_v3(lm):
    dense_params = {path: value for path, value in lm.params.items() if ".indexer." not in path}
    v3 = LM(replace(V32, kind="deepseek_v3", indexer=None), dense_params, lm.forms)
    kept = replace(lm, config=replace(V32, indexer=replace(V32.indexer, keep=64)))
    np.testing.assert_array_equal(kept(IDS), v3(IDS))
    sparse, dense = lm(IDS), v3(IDS)
    np.testing.assert_allclose(sparse[:, :8], dense[:, :8], atol=2e-5)
    assert np.abs(sparse[:, 8:] - dense[:, 8:]).max() > 1e-2


def test_what_the_indexer_chose_is_captured(lm):
    _, seen = lm(IDS, capture=("chosen", "attention"))
    assert [chosen.shape for chosen in seen["chosen"]] == [(2, 24, 8)] * 2
    for chosen, attention in zip(seen["chosen"], seen["attention"], strict=True):
        counts = (np.asarray(chosen) >= 0).sum(-1)
        np.testing.assert_array_equal(counts, np.broadcast_to(np.minimum(np.arange(24) + 1, 8), (2, 24)))
        np.testing.assert_array_equal((np.asarray(attention) > 0).sum(-1).max(1), counts)


def test_the_scores_are_the_formula():
    q, keys, weights = normal(1, 2, 3, 4), normal(1, 1, 5, 4), normal(1, 2, 3)
    expected = np.zeros((2, 5))
    for t in range(2):
        for s in range(5):
            expected[t, s] = sum(
                float(weights[0, t, i]) * max(0.0, float(q[0, t, i] @ keys[0, 0, s]) * 4**-0.5) for i in range(3)
            )
    np.testing.assert_allclose(dynamic.index_scores(q, keys, weights, EXACT)[0], expected, atol=1e-5)


@pytest.mark.report("C36")
def test_one_layer_rotates_in_two_ways(lm):
    attention: object = lm.module().layers[0].attention
    at = rotation(DefaultRope(), 4, jnp.asarray([[3]]), jnp.asarray([4]))
    cos, sin = np.asarray(at.cos)[0, 0], np.asarray(at.sin)[0, 0]
    x = normal(1, 1, 1, 8)
    a, b, c, d = np.asarray(x)[0, 0, 0, :4]
    half_split = [a * cos[0] - c * sin[0], b * cos[1] - d * sin[1], c * cos[0] + a * sin[0], d * cos[1] + b * sin[1]]
    np.testing.assert_allclose(attention.indexer.rotated(x, at)[0, 0, 0], [*half_split, *x[0, 0, 0, 4:]], atol=1e-6)
    latent, unturned = normal(1, 1, 32), rotation(DefaultRope(), 4, jnp.asarray([[0]]), jnp.asarray([1]))
    before, after = (np.asarray(attention.latents(latent, by))[0, 0, 0, -4:] for by in (unturned, at))
    a, b, c, d = before
    interleaved = [a * cos[0] - b * sin[0], b * cos[0] + a * sin[0], c * cos[1] - d * sin[1], d * cos[1] + c * sin[1]]
    np.testing.assert_allclose(after, interleaved, atol=1e-6)


def test_the_cache_holds_128_values_of_the_indexer_beside_the_latents():
    cache = jax.eval_shape(lambda: step.Blueprint(DEEPSEEK_V32).empty_cache(1, 256))
    assert [leaf.shape for leaf in jax.tree.leaves(cache.slots)] == [(1, 1, 256, 576), (1, 1, 256, 128)] * 61
    assert cache.capacity == 256


@pytest.mark.report("A27")
def test_codes_of_the_indexer_are_multiplied_by_their_scales(lm, tmp_path):
    folder = rzoo.export(lm, tmp_path / "fp8", fp8=True)
    names = [name for name in open_folder(folder).tensors if ".indexer." in name and name.endswith(fp8.SCALE)]
    assert len(names) == 2 * V32.layers
    back = rzoo.load(str(folder), quiet=True)
    for name in ("query_up", "key"):
        path = f"layers.1.attention.indexer.{name}"
        np.testing.assert_allclose(back.params[path], lm.params[path], atol=np.abs(lm.params[path]).max() * 2.0**-4)
    kept = rzoo.load(str(folder), dtype="fp8", quiet=True)
    np.testing.assert_allclose(kept(IDS), back(IDS), atol=5e-5)


@pytest.mark.parametrize(("mesh", "rules"), [({"tensor": 2, "fsdp": 2}, "tensor×fsdp")])
def test_a_mesh_gives_what_one_device_gives(mesh, rules):
    config = replace(V32, vocab_size=98)
    lm = LM(config, initialize(config), default_forms(EXACT))
    placed = place(lm, mesh, rules)
    np.testing.assert_allclose(placed(IDS), lm(IDS), atol=5e-5)
    prompts = [IDS[0].tolist(), IDS[1, :5].tolist()]
    ours, theirs = (rzoo.generate(m, prompts, max_new_tokens=6) for m in (placed, lm))
    assert [a.tokens for a in ours] == [a.tokens for a in theirs]


HF = V32.to_hf()
BROKEN = [
    ({"index_topk": 0}, "index_topk (0)"),
    ({"index_n_heads": None}, "index_n_heads is missing"),
    ({"index_head_dim": 2}, "indexer width (index_head_dim 2) must be at least rope_width (4)"),
    ({"q_lora_rank": None}, "indexer: a model with one must have a q_rank (q_lora_rank)"),
    ({"indexer_rope_interleave": True}, "indexer_rope_interleave (True) is not supported"),
    ({"layer_types": ["full_attention"] * 2}, "must be indexed_attention for each of num_hidden_layers"),
    # No list of that length is made to compare with.
    ({"layer_types": ["indexed_attention"] * 2, "num_hidden_layers": 2**31}, "must be indexed_attention for each"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_a_broken_config_is_refused_in_words(change, words):
    with pytest.raises(RzooError) as error:
        DeepSeekConfig.from_hf(HF | change)
    assert words in str(error.value)
