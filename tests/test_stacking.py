"""Runs of equal layers as one loop: the same numbers, under the same names."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rzoo
from rzoo.core import RzooError
from rzoo.models import registry, step
from rzoo.models.forms import Forms
from rzoo.models.presets import PRESETS
from rzoo.models.stacking import runs, stack, stacked_weights, unstack
from rzoo.models.weights import Quantized
from tests.test_every_model import IDS, tiny
from tests.tiny import TINY

NAMES = ("llama-biased", "nemotron")


@pytest.fixture(scope="module", params=NAMES)
def pair(request):
    """A tiny model of several equal layers, unstacked and stacked."""
    lm = tiny(request.param)
    return lm, replace(lm, forms=replace(lm.forms, stacked=True))


def test_runs_join_equal_neighbours_across_layers_that_hold_nothing():
    assert [run.layers for run in runs(TINY["nemotron"])] == [(0, 1), (2, 4), (5,), (6,), (7,)]
    assert [run.layers for run in runs(PRESETS["llama-3.1-8b-instruct"].config)] == [tuple(range(32))]


def test_stacked_rows_of_any_length_continue_alike_against_a_cache(pair):
    plain, stacked = pair
    prompts = [IDS[0, :23].tolist(), IDS[1, :5].tolist()]
    for group in (prompts, prompts[1:]):  # one row is written in another way than several
        expected = rzoo.generate(plain, group, max_new_tokens=8)
        assert [c.tokens for c in rzoo.generate(stacked, group, max_new_tokens=8)] == [c.tokens for c in expected]


def test_long_ids_in_chunks_give_the_logits_of_the_unstacked(pair):
    plain, stacked = pair
    ids = np.random.default_rng(2).integers(0, 97, (1, 1300))
    np.testing.assert_allclose(stacked(ids), plain(ids), atol=5e-5)


def test_a_stacked_cache_has_a_slot_for_each_run_and_grows():
    cache = step.Blueprint(TINY["nemotron"], Forms(stacked=True)).empty_cache(3, 16)
    shapes = [None if slot is None else slot.keys.shape for slot in cache.slots]
    assert shapes == [(2, 3, 2, 16, 8), None, (3, 4, 16, 8), None, (3, 1, 16, 8)]
    assert (cache.capacity, cache.grown(48).capacity) == (16, 48)


def temporary_bytes(config, batch, stacked):
    """(memory that decode needs beside its arguments and results, bytes of one layer's slot)."""
    blueprint = step.Blueprint(config, Forms(stacked=stacked))
    params = jax.eval_shape(lambda: registry.initialize(config))
    params = jax.eval_shape(lambda p: stack(config, p), params) if stacked else params
    cache = jax.eval_shape(lambda: blueprint.empty_cache(batch, 4096))
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    logits, key = jax.ShapeDtypeStruct((batch, 97), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))
    program = jax.jit(partial(step.decode, blueprint, steps=4), donate_argnames="cache")
    compiled = program.lower(params, logits, cache=cache, key=key, wanted=row, stops=row).compile()
    held = sum(leaf.size * 4 for leaf in jax.tree.leaves(cache.slots))
    return compiled.memory_analysis().temp_size_in_bytes, held // config.layers


@pytest.mark.parametrize("batch", [1, 3])
def test_entries_of_a_stacked_cache_are_written_in_place(batch):
    config = replace(TINY["llama"], layers=6)
    plain, slot = temporary_bytes(config, batch, stacked=False)
    stacked, _ = temporary_bytes(config, batch, stacked=True)
    assert stacked < plain + 3 * slot  # the slot at work, taken out and appended to; a copy of the cache would be 6


def test_gradients_of_a_stacked_model_are_those_of_the_unstacked():
    lm = tiny("nemotron")
    gradients = jax.jit(jax.grad(lambda m: jnp.square(m(IDS)).mean()))
    plain, stacked = gradients(lm).params, gradients(replace(lm, forms=replace(lm.forms, stacked=True))).params
    assert stacked.keys() == plain.keys()
    for path, gradient in plain.items():
        np.testing.assert_allclose(stacked[path], gradient, rtol=1e-3, atol=1e-5)


def test_programs_take_stacked_parameters_as_they_take_per_layer_ones(pair):
    plain, stacked = pair
    params = stack(plain.config, plain.params)
    assert {p: v.shape for p, v in params.items()} == {
        p: w.shape for p, (_, w) in stacked_weights(plain.config).items()
    }
    np.testing.assert_array_equal(stacked.with_params(params)(IDS), stacked(IDS))
    np.testing.assert_allclose(plain.with_params(params)(IDS), plain(IDS), atol=2e-5)
    assert stack(plain.config, params).keys() == params.keys()


def test_unstacking_gives_back_names_and_bits(pair):
    plain, _ = pair
    back = unstack(plain.config, stack(plain.config, plain.params))
    assert back.keys() == plain.params.keys()
    for path, value in plain.params.items():
        np.testing.assert_array_equal(back[path], value)


@pytest.mark.report("A39")
def test_a_handle_over_stacked_parameters_is_exported_under_per_layer_names(tmp_path):
    lm = tiny("nemotron")
    rzoo.export(lm.with_params(stack(lm.config, lm.params)), tmp_path / "out")
    back = rzoo.load(str(tmp_path / "out"), quiet=True).params
    assert (
        back.keys() == lm.params.keys() == registry.flatten(lm.with_params(stack(lm.config, lm.params)).module()).keys()
    )
    for path, value in lm.params.items():
        np.testing.assert_array_equal(back[path], value)


def test_stacked_weights_have_the_axis_l_first():
    axes, shape = stacked_weights(TINY["nemotron"])["layers.0-1.attention.q"]
    assert (axes, shape.shape) == (("l", "h", "c", "d"), (2, 4, 8, 32))


def test_a_capture_sees_every_layer_of_a_stacked_model(pair):
    plain, stacked = pair
    _, expected = plain(IDS, capture=("hidden",))
    _, found = stacked(IDS, capture=("hidden",))
    assert len(found["hidden"]) == plain.config.layers + 1
    for a, b in zip(found["hidden"], expected["hidden"], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def quantized(value):
    """int8 codes of a weight, one scale a row."""
    rows = value.reshape(-1, value.shape[-1])
    scale = jnp.abs(rows).max(axis=1, keepdims=True) / 127
    codes = jnp.round(rows / scale).astype(jnp.int8)
    return Quantized(codes=codes, scale=scale, offset=None, block=(1, value.shape[-1]), shape=value.shape)


def test_runs_of_quantized_weights_stack_if_all_are_stored_alike(pair):
    plain, stacked = pair
    some = [path for path in plain.params if path.endswith("attention.q")]
    params = {**plain.params, **{path: quantized(plain.params[path]) for path in some}}
    np.testing.assert_allclose(stacked.with_params(params)(IDS), plain.with_params(params)(IDS), atol=2e-5)
    with pytest.raises(RzooError, match=r"layers 0-1 hold attention\.q in several storages"):
        stack(plain.config, {**params, "layers.1.attention.q": plain.params["layers.1.attention.q"]})


def test_a_loop_over_stacked_weights_needs_no_second_copy_of_them():
    lm = tiny("llama")
    lm = replace(lm, forms=replace(lm.forms, stacked=True))
    params = jax.eval_shape(lambda p: stack(lm.config, p), lm.params)
    program = jax.jit(lambda p, ids: lm.with_params(p)(ids))
    before_the_loop = lambda p: program.lower(p, IDS[:1]).as_text().split("stablehlo.while")[0]  # noqa: E731
    assert "stablehlo.concatenate" in before_the_loop(lm.params)
    assert "stablehlo.concatenate" not in before_the_loop(params)


@pytest.mark.report("F18")
def test_a_program_over_stacked_layers_does_not_grow_with_their_number():
    def lines(layers, stacked):
        config = replace(TINY["llama-biased"], layers=layers)
        weights = {path: weight for path, (_, weight) in registry.abstract_weights(config).items()}
        forms = Forms(stacked=stacked)
        params = jax.eval_shape(partial(stack, config), weights) if stacked else weights
        lowered = jax.jit(step.forward, static_argnums=0).lower(step.Blueprint(config, forms), params, IDS)
        return len(lowered.as_text().splitlines())

    assert lines(16, stacked=True) == lines(4, stacked=True)
    assert lines(16, stacked=False) > 3 * lines(4, stacked=False)
