"""FFN fusion: exact against the sum of the parts, and no other model around it."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import rzoo
from rzoo.core import RzooError
from rzoo.models.fusion import fusable_runs, fuse_ffns
from rzoo.models.nemotron import BlockSpec, FeedForwardSpec
from rzoo.models.presets import PRESETS
from rzoo.models.registry import abstract_weights
from rzoo.models.weights import Quantized
from tests.goldens import GOLDEN, reference


@pytest.fixture(scope="module")
def golden():
    """A model with the fusable layers 7 and 8, of different widths."""
    return rzoo.load(str(GOLDEN / "nemotron_nas"), quiet=True)


def test_the_runs_that_the_paper_names_are_found(golden):
    assert fusable_runs(golden.config) == ((7, 8),)
    runs = fusable_runs(PRESETS["llama-3.3-nemotron-super-49b-v1"].config)
    assert [(run[0], run[-1]) for run in runs] == [(6, 7), (42, 51), (53, 70)]


def test_the_fused_layer_is_the_parallel_sum(golden):
    config, params = fuse_ffns(golden.config, golden.params, [(7, 8)])
    assert config.blocks[7:9] == (BlockSpec(None, None), BlockSpec(None, FeedForwardSpec(768)))
    assert {path: value.shape for path, value in params.items()} == {
        path: weight.shape for path, (_, weight) in abstract_weights(config).items()
    }
    ids, layers = reference("nemotron_nas")["input_ids"], golden.module().layers
    _, before = golden(ids, capture=("hidden",))
    _, fused = replace(golden, config=config, params=params)(ids, capture=("hidden",))
    x = before["hidden"][7]
    parallel = x + sum(layer.mlp(layer.mlp_norm(x)) for layer in layers[7:9])
    np.testing.assert_array_equal(fused["hidden"][7], x)
    np.testing.assert_array_equal(fused["hidden"][8], x)
    np.testing.assert_allclose(fused["hidden"][9], parallel, atol=1e-5)
    assert jnp.abs(parallel - before["hidden"][9]).max() > 1e-2  # fusion is no more than close to the run itself


def test_the_other_weights_are_shared_with_the_model_before(golden):
    _, params = fuse_ffns(golden.config, golden.params, [(7, 8)])
    others = [path for path in golden.params if not path.startswith(("layers.7", "layers.8"))]
    assert all(params[path] is golden.params[path] for path in others)


def test_what_is_no_run_is_refused_with_the_runs_that_are(golden):
    for run, words in [
        ((6, 7), r"layer 6 is .*, no feed-forward layer without attention\s+runs of this model: 7-8"),
        ((1, 3), r"run \(\[1, 3\]\) must be numbers of neighbouring layers"),
        ((9, 10), "layer 9 is"),
        ((), r"run \(\[\]\) must be numbers of neighbouring layers"),
    ]:
        with pytest.raises(RzooError, match=words):
            fuse_ffns(golden.config, golden.params, [run])
    with pytest.raises(RzooError, match=r"layer 7 is BlockSpec\(attention=None, ffn=None\)"):
        fuse_ffns(golden.config, golden.params, [(7, 8), (7, 8)])


def test_quantized_layers_are_not_fused(golden):
    gate = golden.params["layers.7.mlp.gate"]
    coded = Quantized(
        codes=jnp.zeros(gate.shape, jnp.int8), scale=jnp.ones((512, 1)), offset=None, block=(1, 64), shape=gate.shape
    )
    with pytest.raises(RzooError, match="layer 7 is quantized and cannot be fused"):
        fuse_ffns(golden.config, {**golden.params, "layers.7.mlp.gate": coded}, [(7, 8)])
