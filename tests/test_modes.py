"""Runtime pruning: a mode computes what its gathered channels and experts say, and touches exactly what it counts."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import rzoo
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models.modes import full, mode_config, mode_moves, touched_costs
from rzoo.models.prune import Sizes, sizes_of
from rzoo.models.registry import abstract_weights, initialize
from rzoo.train.modes import mode, mode_losses, mode_within
from rzoo.train.prune import calibrate
from tests.tiny import TINY

IDS = np.random.default_rng(0).integers(0, 97, (2, 6)).astype(np.int32)
KINDS = ("llama", "deepseek-v3")


@pytest.fixture(scope="module")
def models() -> dict[str, LM]:
    return {kind: LM(TINY[kind], initialize(TINY[kind])) for kind in KINDS}


@pytest.fixture(scope="module")
def losses(models):
    rows = np.random.default_rng(1).integers(0, 97, (4, 12)).astype(np.int32)
    return {kind: mode_losses(lm, calibrate(lm, rows)) for kind, lm in models.items()}


def test_gathered_channels_give_what_the_strongest_gates_give(models):
    lm = models["llama"]
    layer, few = lm.module().layers[0].mlp, mode(lm, (Sizes(2, 16), Sizes(2, 48))).module().layers[0].mlp
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 3, 32)), jnp.float32)
    gate, up, down = (np.asarray(w.get_value()) for w in (layer.gate, layer.up, layer.down))
    strength = np.asarray(x) @ gate.T
    strength = strength / (1 + np.exp(-strength))
    weakest = np.argsort(np.abs(strength), axis=-1)[..., :-16]
    hidden = strength * (np.asarray(x) @ up.T)
    np.put_along_axis(hidden, weakest, 0.0, axis=-1)
    np.testing.assert_allclose(few(x), hidden @ down.T, atol=1e-5)


def test_all_channels_and_all_experts_are_the_whole_model(models):
    for lm in models.values():
        again = mode(lm, full(lm.config))
        assert (again(IDS) == lm(IDS)).all() and again.params["embed"] is lm.params["embed"]


def test_a_mode_generates_with_a_cache_what_it_predicts_without(models):
    lm = mode(models["llama"], (Sizes(0, 16), Sizes(2, 0)))
    made = rzoo.generate(lm, [5, 6, 7], max_new_tokens=5).tokens
    ids = [5, 6, 7, *made]
    assert [int(i) for i in np.argmax(lm(np.asarray([ids]))[0, 2:-1], axis=-1)] == list(made)


def counted(lm: LM) -> int:
    """Parameters that one token touches: whole weights, but channels and experts by the indices that were gathered."""
    observed = lm(np.asarray([[7]], np.int32), capture=("gathered", "router"))[1]
    gathered = [np.unique(chosen).size for chosen in observed["gathered"]]
    asked = [int((np.asarray(shares) > 0).sum()) for shares in observed["router"]]
    blocks = dict(enumerate(getattr(lm.config, "blocks", ())))
    few = [i for i, block in blocks.items() if getattr(block.ffn, "active", None)]
    total = 0
    for path, (axes, shape) in abstract_weights(lm.config).items():
        name, size = path.rpartition(".")[2], int(np.prod(shape.shape))
        layer = int(path.split(".")[1]) if path.startswith("layers") else None
        if path == "embed":
            size = shape.shape[1]
        elif name in ("up", "down") and layer in few:
            size = size // shape.shape[axes.index("f")] * gathered[few.index(layer)]
        elif name.startswith("expert_"):
            size = size // shape.shape[0] * asked[layer - lm.config.experts.dense_layers]
        total += size
    return total


@pytest.mark.parametrize(("kind", "share"), [("llama", 0.8), ("deepseek-v3", 0.94)])
def test_touched_counts_are_those_of_the_gathered_indices(models, losses, kind, share):
    lm = models[kind]
    costs = touched_costs(lm.config)
    assert costs.of(full(lm.config)) == counted(lm)
    found, sizes = mode_within(lm, losses[kind], share)
    assert costs.of(sizes) == counted(found) <= share * counted(lm)


def test_what_can_not_run_is_refused(models, losses):
    with pytest.raises(RzooError, match="all KV groups of a layer or none"):
        mode_config(TINY["llama"], (Sizes(1, 48), Sizes(2, 48)))
    with pytest.raises(RzooError, match="a qwen2 model with biases has no modes"):
        mode_config(TINY["qwen2"], sizes_of(TINY["qwen2"]))
    with pytest.raises(RzooError, match="all mixtures of a mode must ask as many experts"):
        three = replace(TINY["deepseek-v3"], layers=3)
        mode_config(three, (Sizes(4, 48), Sizes(4, 0, 2), Sizes(4, 0, 1)))
    with pytest.raises(RzooError, match=r"share \(1.5\) must be above 0"):
        mode_within(models["llama"], losses["llama"], 1.5)
    with pytest.raises(RzooError, match="can't be reached"):
        mode_within(models["llama"], losses["llama"], 0.01)
    with pytest.raises(RzooError, match=r"a mode of a model can't be written"):
        mode(models["llama"], (Sizes(2, 16), Sizes(2, 48))).config.to_hf()
    assert {move.part for move in mode_moves(TINY["deepseek-v3"])} == {"experts"}
