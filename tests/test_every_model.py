"""Laws that every family keeps, on tiny real models."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rzoo
from rzoo.checkpoint.names import sources
from rzoo.compile.kernels import default_forms
from rzoo.engine.session import decode, prefill
from rzoo.handle import LM
from rzoo.models import registry
from rzoo.models.registry import FAMILIES, abstract_weights, always_float32, count_parameters, initialize
from rzoo.models.weights import Numerics
from rzoo.sharding.rules import LETTERS
from tests.tiny import TINY

IDS = np.random.default_rng(0).integers(0, 97, (2, 24))


@pytest.fixture(scope="module", params=TINY)
def lm(request):
    """A tiny model with random weights, biases included."""
    return tiny(request.param)


def tiny(name: str) -> LM:
    """The tiny model called `name`; its zero-initialised weights are made random, so that losing one shows."""
    config, rng = TINY[name], np.random.default_rng(1)
    params = {p: v if jnp.any(v) else v + rng.normal(size=v.shape, scale=0.3) for p, v in initialize(config).items()}
    return LM(config, params, default_forms(Numerics()))


def test_every_family_has_a_tiny_config():
    assert {f.config for f in FAMILIES} <= {type(config) for config in TINY.values()}


def test_a_later_token_does_not_change_an_earlier_logit(lm):
    changed = IDS.copy()
    changed[:, 12:] = (changed[:, 12:] + 1) % 97
    before, after = lm(IDS), lm(changed)
    np.testing.assert_array_equal(before[:, :12], after[:, :12])
    assert np.abs(before[:, 12:] - after[:, 12:]).max() > 1e-2


def test_a_row_does_not_depend_on_its_batch(lm):
    np.testing.assert_allclose(lm(IDS)[1:], lm(IDS[1:]), atol=2e-5)


def test_prefill_and_steps_give_the_logits_of_the_whole(lm):
    whole = lm(IDS)
    state = prefill(lm, IDS[:, :20].tolist(), room=8)
    np.testing.assert_allclose(state.logits, whole[:, 19], atol=2e-5)
    tokens, state = decode(lm, state, 4)
    ids = np.concatenate([IDS[:, :20], tokens[:, :4]], axis=1)
    np.testing.assert_allclose(state.logits, lm(ids)[:, -1], atol=2e-5)


def test_rows_of_different_length_give_what_each_gives_alone(lm):
    prompts = [IDS[0, :23].tolist(), IDS[1, :5].tolist(), IDS[0, :1].tolist()]
    together = rzoo.generate(lm, prompts, max_new_tokens=20)
    for prompt, completion in zip(prompts, together, strict=True):
        assert rzoo.generate(lm, prompt, max_new_tokens=20).tokens == completion.tokens


def test_long_ids_in_chunks_give_the_logits_of_one_piece(lm):
    ids = np.random.default_rng(2).integers(0, 97, (1, 1300))
    np.testing.assert_allclose(lm(ids), jax.jit(lambda m, i: m(i))(lm, ids), atol=5e-5)


@pytest.mark.report("A39")
def test_what_was_written_is_read_with_the_same_bits(lm, tmp_path):
    rzoo.export(lm, tmp_path / "out", max_shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    back = rzoo.load(str(tmp_path / "out"), quiet=True)
    assert back.config == lm.config
    assert back.params.keys() == lm.params.keys()
    for path, value in lm.params.items():
        np.testing.assert_array_equal(back.params[path], value)


@pytest.mark.parametrize("spelling", [4, 5])
def test_the_config_survives_either_spelling(lm, spelling):
    assert registry.config_from_hf(lm.config.to_hf(spelling=spelling)) == lm.config


def test_gradients_reach_every_weight(lm):
    def loss(model):
        logits = model(IDS[:, :-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), IDS[:, 1:, None], axis=-1).mean()

    gradients = jax.jit(jax.grad(loss))(lm)
    unmoved = always_float32(lm.config) | {path for path in lm.params if ".indexer." in path}  # it chooses, no more
    assert {path for path, g in gradients.params.items() if not jnp.any(g)} == unmoved


def test_checkpointed_and_mapped_calls_give_the_same(lm):
    whole = lm(IDS)
    np.testing.assert_allclose(jax.jit(jax.vmap(lambda row: lm(row[None])[0]))(IDS), whole, atol=2e-5)
    gradient = lambda f: jax.jit(jax.grad(lambda m: f(m).sum()))(lm).params["embed"]  # noqa: E731
    plain, checkpointed = gradient(lambda m: m(IDS)), gradient(jax.checkpoint(lambda m: m(IDS)))
    np.testing.assert_allclose(checkpointed, plain, rtol=2e-4, atol=1e-4)


def test_stacked_layers_give_the_logits_of_the_unstacked_with_a_cache_and_without(lm):
    stacked = replace(lm, forms=replace(lm.forms, stacked=True))
    np.testing.assert_allclose(stacked(IDS), lm(IDS), atol=2e-5)
    state = prefill(stacked, [IDS[0, :20].tolist(), IDS[1, :7].tolist()], room=8)
    np.testing.assert_allclose(state.logits[0], lm(IDS)[0, 19], atol=2e-5)
    np.testing.assert_allclose(state.logits[1], lm(IDS)[1, 6], atol=2e-5)


def test_the_module_computes_the_same_over_the_same_arrays(lm):
    module = lm.module()
    np.testing.assert_allclose(module(jnp.asarray(IDS)), lm(IDS), atol=2e-5)
    assert {id(v) for v in registry.flatten(module).values()} == {id(v) for v in lm.params.values()}


def test_logical_axes_map_to_a_mesh_by_flax_alone(lm):
    mesh = jax.make_mesh((2,), ("tensor",))
    rules = [(letter, "tensor" if letter in "hkfv" else None) for letter in LETTERS]
    state = nnx.state(lm.module())
    with nnx.logical_axis_rules(rules):
        shardings = nnx.get_named_sharding(state, mesh)
    flat = {registry.path_name(p): s.get_value().spec for p, s in nnx.to_flat_state(shardings)}
    for path, (axes, _) in abstract_weights(lm.config).items():
        assert tuple(flat[path]) == tuple("tensor" if a in "hkfv" else None for a in axes)


def test_the_count_is_that_of_the_arrays(lm):
    assert count_parameters(lm.config) == sum(v.size for v in lm.params.values())


def test_every_weight_has_a_place_of_its_own_in_files(lm):
    places = [(name, source.part) for source in sources(lm.config, "hf").values() for name in source.names]
    assert len(places) == len(set(places))
