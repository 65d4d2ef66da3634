"""Against recorded outputs of transformers: logits and hidden states to 1e-4 in float32."""

import numpy as np
import pytest

import rzoo
from rzoo.engine.session import decode, prefill
from tests.goldens import DEEPSEEKS, GOLDEN, LLAMAS, in_old_spelling, reference


@pytest.fixture(scope="module", params=LLAMAS + DEEPSEEKS)
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


def test_prefill_and_single_steps_give_the_logits_of_the_whole(golden):
    _, lm, expected = golden
    ids = expected["input_ids"]
    state = prefill(lm, ids[:, :40].tolist(), room=8)
    np.testing.assert_allclose(state.logits, expected["logits"][:, 39], atol=1e-4)
    for i in range(40, 48):
        chosen = ids[:, i]
        _, state = decode(lm, state, 1, select=_Given(chosen))
        np.testing.assert_allclose(state.logits, expected["logits"][:, i], atol=1e-4)


class _Given:
    """A selector that takes given tokens instead of the likeliest, to follow a recorded text."""

    def __init__(self, tokens):
        self.tokens = tuple(int(t) for t in tokens)

    def __call__(self, logits, key):
        return np.asarray(self.tokens, np.int32)

    def __eq__(self, other):
        return isinstance(other, _Given) and self.tokens == other.tokens

    def __hash__(self):
        return hash(self.tokens)
