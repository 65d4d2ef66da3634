"""Every fact that the goldens guard, broken on purpose: the golden must notice.

name -> (golden, what to break, the largest logit difference that this bug was measured to make). A mutation changes a
config value or one named function of rzoo; one whose target is gone fails.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rzoo
from rzoo.core import RzooError
from rzoo.models import deepseek, dynamic, layers, llama, moe, nemotron, rope, step
from rzoo.models.forms import rms_norm
from rzoo.models.rope import DefaultRope
from tests.goldens import GOLDEN, reference


def config_value(**values):
    """Replaces fields of the config."""
    return lambda lm, monkeypatch: replace(lm, config=replace(lm.config, **values))


def routing(**values):
    """Replaces fields of the routing of experts."""

    def apply(lm, monkeypatch):
        experts = replace(lm.config.experts, routing=replace(lm.config.experts.routing, **values))
        return replace(lm, config=replace(lm.config, experts=experts))

    return apply


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


def normed_without_attention(block, x, at, starts, slot):
    """Norms the stream of a block without attention, which has no norm there."""
    stream = x if block.attention is not None else rms_norm(x, jnp.ones(x.shape[-1]), 1e-5)
    return NEMOTRON_BLOCK(block, stream, at, starts, slot)


def unnormed_linear(block, x, at, starts, slot):
    """Gives the linear map in the place of attention the stream itself."""
    if isinstance(block.attention, nemotron.LinearMap):
        return x + block.attention(x) + block.mlp(block.mlp_norm(x + block.attention(x))), slot
    return NEMOTRON_BLOCK(block, x, at, starts, slot)


NEMOTRON_BLOCK = nemotron.Block.__call__


def rotated_last(indexer, x, at):
    """Rotates the last values of index queries and keys, as latent attention does."""
    width = x.shape[-1] - indexer.rope_width
    return jnp.concatenate([x[..., :width], rope.rotate_half_split(x[..., width:], at)], axis=-1)


def with_indexer(**values):
    """Replaces fields of the indexer's config."""
    return lambda lm, _: replace(lm, config=replace(lm.config, indexer=replace(lm.config.indexer, **values)))


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
    "V3: masked groups 0, not -inf": ("deepseek_v3", function(moe, "closed_score", lambda: 0.0), 1.8),
    "V3: group score max, not top-2 sum": ("deepseek_v3", function(moe, "best_two", moe.best_one), 3.4),
    "V3: group score sum of all": ("deepseek_v3", function(moe, "best_two", lambda grouped: grouped.sum(-1)), 3.0),
    "V3: weights from biased scores": (
        "deepseek_v3",
        function(moe, "weights_of", lambda scores, choice, indices: jnp.take_along_axis(choice, indices, -1)),
        3.2,
    ),
    "V3: bias ignored": ("deepseek_v3", zeroed(".router.bias"), 5.1),
    "V3: no renormalisation": ("deepseek_v3", routing(normalize=False), 3.7),
    "V3: no 2.5 scaling": ("deepseek_v3", routing(scale=1.0), 2.9),
    "V3: softmax, not sigmoid": ("deepseek_v3", function(moe, "sigmoid_scores", jax.nn.softmax), 4.9),
    "V3: m² missing": ("deepseek_v3", function(deepseek, "softmax_scale", lambda _, width: width**-0.5), 4.4),
    "V3: half-split rotary pairs": ("deepseek_v3", function(layers, "rotate_interleaved", rope.rotate_half_split), 6.1),
    "V3: YaRN ignored": ("deepseek_v3", config_value(rope=DefaultRope(theta=10000.0)), 5.0),
    "V3.2: indexer rope interleaved": (
        "deepseek_v32",
        function(layers, "rotate_half_split", rope.rotate_interleaved),
        6.6,
    ),
    "V3.2: latent attention half-split": (
        "deepseek_v32",
        function(layers, "rotate_interleaved", rope.rotate_half_split),
        6.6,
    ),
    "V3.2: indexer rope on the last dims": ("deepseek_v32", function(layers.Indexer, "rotated", rotated_last), 6.2),
    "V3.2: no ReLU": ("deepseek_v32", function(dynamic, "rectified", lambda products: products), 5.7),
    "V3.2: no causal mask before top-k": ("deepseek_v32", function(dynamic, "causal", lambda scores, *_: scores), 6.8),
    "V3.2: dense attention": ("deepseek_v32", with_indexer(keep=48), 6.6),
    "V3.2: k_norm bias dropped": ("deepseek_v32", zeroed(".key_norm.bias"), 5.6),
    "V3.2: masked groups 0, not -inf": ("deepseek_v32", function(moe, "closed_score", lambda: 0.0), 3.7),
    "V3.2: m² missing": ("deepseek_v32", function(deepseek, "softmax_scale", lambda _, width: width**-0.5), 5.5),
    "V3.2: YaRN ignored": ("deepseek_v32", config_value(rope=DefaultRope(theta=10000.0)), 6.1),
    "positions off by one are harmless, off by scale are not": (
        "llama_tied",
        function(llama, "rotation", lambda r, w, p, n: rope.rotation(r, w, 2 * p, n)),
        1.0,
    ),
    "norm where there is no attention": (
        "nemotron_nas",
        function(nemotron.Block, "__call__", normed_without_attention),
        5.8,
    ),
    "linear map left out": ("nemotron_nas", function(nemotron.LinearMap, "__call__", lambda self, x: x), 4.5),
    "norm before a linear map left out": ("nemotron_nas", function(nemotron.Block, "__call__", unnormed_linear), 3.1),
}

# name -> (what to break, words of the refusal): facts that already the shapes of the weights guard.
REFUSED = {
    "size of a group taken for KV heads": (
        function(nemotron, "_divided", lambda part, heads: part.count("n_heads_in_group")),
        "model.layers.2.self_attn.k_proj.weight is [16, 64], the config says [64, 64]",
    ),
    "widths not rounded up to 256": (
        function(nemotron, "up_to_256", lambda width: width),
        "model.layers.0.mlp.gate_proj.weight is [512, 64], the config says [298, 64]",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_golden_notices(name, monkeypatch):
    golden, mutate, effect = MUTATIONS[name]
    expected = reference(golden)
    lm = mutate(rzoo.load(str(GOLDEN / golden), quiet=True), monkeypatch)
    logits = jax.jit(lambda ids: step.forward(lm.blueprint, lm.params, ids))(expected["input_ids"])
    assert not np.abs(logits - expected["logits"]).max() < effect / 2  # NaN is noticed as well


@pytest.mark.parametrize("name", REFUSED)
def test_the_shapes_of_the_golden_notice(name, monkeypatch):
    mutate, words = REFUSED[name]
    mutate(None, monkeypatch)
    with pytest.raises(RzooError) as error:
        rzoo.load(str(GOLDEN / "nemotron_nas"), quiet=True)
    assert words in str(error.value)
