"""Every fact that the goldens guard, broken on purpose: the golden must notice.

name -> (golden, what to break, the largest logit difference that this bug was measured to make). A mutation changes a
config value or one named function of rzoo; one whose target is gone fails.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

import rzoo
from rzoo.models import layers, llama, nemotron, rope, step
from rzoo.models.rope import DefaultRope
from tests.goldens import GOLDEN, reference


def config_value(**values):
    """Replaces fields of the config."""
    return lambda lm, monkeypatch: replace(lm, config=replace(lm.config, **values))


def function(module, name, wrong):
    """Replaces a function that exists under this name in this module."""

    def apply(lm, monkeypatch):
        monkeypatch.setattr(module, name, wrong)  # raises where the name is gone
        return lm

    return apply


def zeroed(*suffixes):
    """Zeroes the weights whose path ends so."""

    def apply(lm, monkeypatch):
        hit = [path for path in lm.params if path.endswith(suffixes)]
        assert hit, f"no weight ends with {suffixes}"
        return lm.with_params({**lm.params, **{path: 0 * lm.params[path] for path in hit}})

    return apply


MUTATIONS = {
    "llama3 scaling ignored": ("llama_llama3rope", config_value(rope=DefaultRope(theta=500000.0)), 5.0),
    "theta 10000": (
        "llama_llama3rope",
        config_value(rope=rope.Llama3Rope(theta=1e4, factor=8.0, original_context=64)),
        5.0,
    ),
    "theta 10000, tied model": ("llama_tied", config_value(rope=DefaultRope(theta=10000.0)), 1.0),
    "norm eps 1e-6 for 1e-5": ("llama_llama3rope", config_value(norm_eps=1e-6), 0.0047),
    "q, k, v bias dropped": ("qwen2", zeroed(".q_bias", ".k_bias", ".v_bias"), 5.0),
    "interleaved rotary pairs": (
        "llama_llama3rope",
        function(layers, "rotate_half_split", rope.rotate_interleaved),
        5.0,
    ),
    "rotation left out": ("qwen2", function(layers, "rotate_half_split", lambda x, at: x), 5.0),
    "positions off by one are harmless, off by scale are not": (
        "llama_tied",
        function(llama, "rotation", lambda r, w, p, n: rope.rotation(r, w, 2 * p, n)),
        1.0,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_golden_notices(name, monkeypatch):
    golden, mutate, effect = MUTATIONS[name]
    expected = reference(golden)
    lm = mutate(rzoo.load(str(GOLDEN / golden), quiet=True), monkeypatch)
    logits = jax.jit(lambda ids: step.forward(lm.blueprint, lm.params, ids))(expected["input_ids"])
    assert np.abs(logits - expected["logits"]).max() >= effect / 2
