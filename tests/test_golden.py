"""Against recorded outputs of transformers: logits and hidden states to 1e-4 in float32."""

import jax
import numpy as np
import pytest

import rzoo
from rzoo.engine.session import prefill
from rzoo.models import step
from tests.goldens import DEEPSEEKS, GOLDEN, LLAMAS, NEMOTRONS, in_old_spelling, reference


@pytest.fixture(scope="module", params=LLAMAS + DEEPSEEKS + NEMOTRONS)
def golden(request):
    """(name, handle, reference)."""
    return request.param, rzoo.load(str(GOLDEN / request.param), quiet=True), reference(request.param)


def test_logits_are_those_of_the_reference(golden):
    _, lm, expected = golden
    np.testing.assert_allclose(lm(expected["input_ids"]), expected["logits"], atol=1e-4)


def test_captured_hidden_states_are_those_of_the_reference(golden):
    _, lm, expected = golden
    logits, captured = lm(expected["input_ids"], capture=("hidden", "attention", "router"))
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    assert len(captured["hidden"]) == lm.config.layers + 1
    for i, hidden in enumerate(captured["hidden"]):
        np.testing.assert_allclose(hidden, expected[f"hidden.{i}"], atol=1e-4)
    mixtures = getattr(lm.config, "experts", None) and lm.config.layers - lm.config.experts.dense_layers
    assert len(captured["router"]) == (mixtures or 0)
    for probabilities in captured["attention"]:
        np.testing.assert_allclose(probabilities.sum(-1), 1.0, atol=1e-5)


def test_the_old_spelling_of_the_config_gives_the_same_model(golden, tmp_path):
    name, lm, _ = golden
    assert rzoo.load(str(in_old_spelling(name, tmp_path / name)), quiet=True).config == lm.config


def test_rows_of_a_padded_batch_give_what_each_gives_alone(golden):
    _, lm, expected = golden
    ids = expected["input_ids"]
    state = prefill(lm, [ids[0, :40].tolist(), ids[1, :17].tolist()], room=8)
    np.testing.assert_allclose(state.logits[0], expected["logits"][0, 39], atol=1e-4)
    np.testing.assert_allclose(state.logits[1], expected["logits"][1, 16], atol=1e-4)


def test_prefill_and_single_steps_give_the_logits_of_the_whole(golden):
    _, lm, expected = golden
    ids = expected["input_ids"].astype(np.int32)
    state = prefill(lm, ids[:, :40].tolist(), room=8)
    np.testing.assert_allclose(state.logits, expected["logits"][:, 39], atol=1e-4)
    one_step = jax.jit(step.prefill_chunk_scored, static_argnames="blueprint")
    cache = state.cache
    for i in range(40, 48):
        logits, cache = one_step(lm.blueprint, lm.params, ids[:, i : i + 1], cache)
        np.testing.assert_allclose(logits[:, 0], expected["logits"][:, i], atol=1e-4)
