"""Pruning: a cut model computes what its parent computes with the cut parts silent, within its budget, in its kind."""

from dataclasses import replace

import numpy as np
import pytest

import rzoo
from rzoo.compile.quantize import quantize
from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models.budget import costs_of, greedy, moves_of, planned, uniform
from rzoo.models.moe import SigmoidRouting
from rzoo.models.nemotron import NemotronConfig
from rzoo.models.presets import PRESETS
from rzoo.models.prune import Kept, Sizes, at_random, config_of, cut, everything, refitted, select, sizes_of, zeroed
from rzoo.models.registry import config_from_hf, count_parameters, initialize
from rzoo.train.prune import Calibration, calibrate, checked_costs, log_perplexity, losses_of, prune, split_rows
from tests.tiny import TINY, V3_EXPERTS

IDS = np.random.default_rng(0).integers(0, 97, (2, 12)).astype(np.int32)
# The router of TINY's V3 ranks groups by their best two experts and so can't lose any of its groups of two.
EXPERTS = replace(V3_EXPERTS, routing=SigmoidRouting(groups=2, kept_groups=1, scale=2.5))
MODELS = {
    "llama-tied": TINY["llama-tied"],
    "nemotron": TINY["nemotron"],
    "deepseek-v3": replace(TINY["deepseek-v3"], experts=EXPERTS),
}


@pytest.fixture(scope="module")
def models() -> dict[str, LM]:
    return {kind: LM(config, initialize(config)) for kind, config in MODELS.items()}


@pytest.fixture(scope="module")
def calibrated(models) -> dict[str, Calibration]:
    rows = np.random.default_rng(1).integers(0, 97, (8, 12)).astype(np.int32)
    return {kind: calibrate(lm, rows) for kind, lm in models.items()}


def logits_of(config, params) -> np.ndarray:
    return np.asarray(LM(config, params)(IDS))


# One KV group of each layer, no attention at all in the second, channels of every other place, none in the second.
LLAMA_CUT = (Kept((1,), tuple(range(0, 48, 2))), Kept((), tuple(range(1, 48, 3))))


@pytest.mark.report("G18", "G19", "G21")
def test_a_cut_llama_computes_what_its_parent_does_with_the_cut_parts_silent(models):
    lm = models["llama-tied"]
    config, params = cut(lm.config, lm.params, LLAMA_CUT)
    silent = zeroed(lm.config, lm.params, dict(enumerate(LLAMA_CUT)))
    assert isinstance(config, NemotronConfig) and config.heads == 2
    assert [(block.attention is None, block.ffn.width) for block in config.blocks] == [(False, 24), (True, 16)]
    np.testing.assert_allclose(logits_of(config, params), logits_of(lm.config, silent), atol=1e-5)
    assert np.abs(logits_of(lm.config, silent) - logits_of(lm.config, lm.params)).max() > 0.01


def test_layers_that_agree_keep_the_kind_of_the_parent_and_a_layer_with_nothing_is_gone():
    config = replace(TINY["qwen2"], layers=3)
    smaller = config_of(config, (Sizes(1, 16), Sizes(0), Sizes(1, 16)))
    assert smaller == replace(config, layers=2, heads=2, kv_heads=1, ffn_width=16)
    assert config_from_hf(smaller.to_hf()) == smaller


def test_a_nemotron_parent_keeps_its_linear_maps_and_loses_a_layer_exactly(models):
    lm = models["nemotron"]
    kept = list(everything(lm.config))
    kept[1], kept[4] = replace(kept[1], channels=tuple(range(8, 40))), Kept(())
    config, params = cut(lm.config, lm.params, kept)
    assert config.layers == lm.config.layers - 1 and config.blocks[4:] == lm.config.blocks[5:]
    silent = zeroed(lm.config, lm.params, dict(enumerate(kept)))
    np.testing.assert_allclose(logits_of(config, params), logits_of(lm.config, silent), atol=1e-5)


@pytest.mark.report("G22")
def test_fewer_experts_keep_the_kind_the_router_and_the_groups(models, calibrated):
    lm = models["deepseek-v3"]
    sizes = (Sizes(4, 32), Sizes(4, 0, 4))
    kept = select(lm.config, calibrated["deepseek-v3"].importance, sizes)
    config, params = cut(lm.config, lm.params, kept)
    assert config.kind == "deepseek_v3" and config.experts.count == 4 and config.ffn_width == 32
    assert [expert // 4 for expert in kept[1].experts] == [0, 0, 1, 1]  # as many of each of the router's groups
    router = params["layers.1.mlp.router.weight"]
    assert (router == lm.params["layers.1.mlp.router.weight"][np.asarray(kept[1].experts)]).all()
    assert params["layers.1.mlp.router.bias"].shape == (4,)
    assert np.isfinite(logits_of(config, params)).all() and config_from_hf(config.to_hf()) == config


@pytest.mark.report("G24")
def test_layers_that_no_kind_can_say_are_refused():
    with pytest.raises(RzooError, match="biases must have equal layers"):
        config_of(TINY["qwen2"], (Sizes(2, 48), Sizes(2, 40)))
    with pytest.raises(RzooError, match="same share of its KV groups"):
        config_of(TINY["llama"], (Sizes(2, 48), Sizes(1, 48)))
    with pytest.raises(RzooError, match="one number of heads, one of experts"):
        config_of(replace(TINY["deepseek-v3"], layers=3), (Sizes(4, 48), Sizes(4, 0, 8), Sizes(4, 0, 4)))
    biased = LM(TINY["qwen2"], initialize(TINY["qwen2"]))
    with pytest.raises(RzooError, match="prune it uniformly"):  # before anything is calibrated or measured
        checked_costs(biased, int(0.9 * count_parameters(biased.config)), "parameters", "greedy")
    with pytest.raises(RzooError, match="no layer with attention"):
        config_of(TINY["llama"], (Sizes(0, 48), Sizes(0, 48)))


@pytest.mark.parametrize("kind", [*TINY])
def test_costs_are_exact_counts_of_every_model_that_can_be_cut(kind):
    config = TINY[kind]
    costs = costs_of(config)
    assert costs.of(sizes_of(config)) == count_parameters(config)
    for move in moves_of(config):
        sizes = move.applied(sizes_of(config))
        try:
            smaller = config_of(config, sizes)
        except RzooError:
            continue
        assert costs.of(sizes) == count_parameters(smaller) < count_parameters(config)


def test_flops_count_the_experts_that_a_token_goes_to():
    config = MODELS["deepseek-v3"]
    costs = costs_of(config, "flops")
    fewer = [replace(own, experts=min(own.experts, 4)) for own in sizes_of(config)]
    router = 2 * 4 * (config.width + 1)  # all that four idle experts cost
    assert costs.of(sizes_of(config)) - costs.of(fewer) == router
    assert costs_of(config, "bytes", 2.0).of(fewer) == 2 * costs_of(config).of(fewer)


def test_greedy_gives_up_the_cheapest_first_and_fills_the_budget():
    config = replace(TINY["llama"], layers=4)
    costs = costs_of(config)
    losses = {move: (100.0 if move.layers == (2,) else 0.01) * (48 - move.size) for move in moves_of(config)}
    limit = int(0.8 * count_parameters(config))
    sizes, loss = greedy(costs, losses, limit)
    assert sizes[2] == Sizes(2, 48) and 0.95 * limit < costs.of(sizes) <= limit and 0 < loss < 100


@pytest.mark.parametrize(
    "allocate", [uniform, lambda costs, limit: greedy(costs, dict.fromkeys(moves_of(costs.config), 1.0), limit)]
)
def test_a_budget_that_can_not_be_reached_names_the_nearest_that_can(allocate):
    costs = costs_of(TINY["llama"])
    with pytest.raises(RzooError, match="can't be reached by pruning: the smallest model has") as caught:
        allocate(costs, 100)
    nearest = int(caught.value.fix.rpartition(" ")[2].replace(",", ""))
    assert allocate(costs, nearest)


def test_the_plan_for_the_brief_is_within_3_percent_under_its_budget_and_its_config_loads():
    smaller = planned(PRESETS["brief/v3-175b"].config, 138_000_000_000)
    assert 0.97 * 138e9 < count_parameters(config_from_hf(smaller.to_hf())) <= 138e9


def test_fitting_what_stays_is_least_squares_on_the_calibration_text(models, calibrated):
    lm, data, path = models["llama-tied"], calibrated["llama-tied"], "layers.1.mlp.down"
    kept = {1: Kept((0, 1), tuple(range(8, 48)))}
    inputs = np.asarray(lm(data.rows, capture="channels")[1]["channels"][1]).reshape(-1, 48)
    fitted = np.asarray(refitted(lm.config, lm.params, kept, data.moments, ridge=1e-6)[path])
    wanted = inputs @ np.asarray(lm.params[path]).T
    best = np.linalg.lstsq(inputs[:, 8:], wanted, rcond=None)[0]
    assert (fitted[:, :8] == 0).all()
    np.testing.assert_allclose(inputs @ fitted.T, inputs[:, 8:] @ best, atol=2e-3)


def test_importance_is_what_the_activations_say(models, calibrated):
    lm, data = models["llama-tied"], calibrated["llama-tied"]
    channels = np.concatenate([np.asarray(a) for a in lm(data.rows, capture="channels")[1]["channels"][1:2]])
    down = np.linalg.norm(np.asarray(lm.params["layers.1.mlp.down"]), axis=0)
    np.testing.assert_allclose(data.importance[1].channels, np.abs(channels).mean((0, 1)) * down, rtol=1e-4)
    assert 0 < data.importance[0].turn < 2 and data.importance[1].turn == float("inf")
    mass = np.asarray(models["deepseek-v3"](data.rows, capture="router")[1]["router"][0]).mean((0, 1))
    np.testing.assert_allclose(calibrated["deepseek-v3"].importance[1].experts, mass, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama-tied", "deepseek-v3"])
def test_a_pruned_model_is_exported_and_loads_with_the_same_logits(models, calibrated, tmp_path, kind):
    lm = models[kind]
    limit = int(0.85 * count_parameters(lm.config))
    pruned = prune(lm, calibrated[kind], limit)
    assert count_parameters(pruned.lm.config) <= limit and np.isfinite(log_perplexity(pruned.lm, IDS))
    rzoo.export(pruned.lm, tmp_path / "model")
    again = rzoo.load(tmp_path / "model", dtype="float32")
    assert again.config == pruned.lm.config and (again(IDS) == pruned.lm(IDS)).all()
    spread = rzoo.load(tmp_path / "model", dtype="float32", mesh={"data": 2})
    np.testing.assert_allclose(spread(IDS), pruned.lm(IDS), atol=1e-4)
    with pytest.raises(RzooError, match="a model on a mesh can't be pruned"):
        calibrate(spread, IDS)


def test_twins_have_the_same_shapes_and_other_weights(models, calibrated):
    lm, data = models["llama-tied"], calibrated["llama-tied"]
    limit = int(0.85 * count_parameters(lm.config))
    losses = losses_of(lm, data, moves_of(lm.config))
    own, twin, other = (
        prune(lm, data, limit, method=method, losses=losses, seed=seed)
        for method, seed in (("greedy", 0), ("random", 0), ("random", 1))
    )
    assert own.sizes == twin.sizes == other.sizes and len({own.kept, twin.kept, other.kept}) == 3
    assert at_random(lm.config, 0)[0].channels[0] == at_random(lm.config, 0)[0].channels[0]


def test_mistakes_are_refused_before_anything_is_measured(models, calibrated):
    lm, data = models["llama-tied"], calibrated["llama-tied"]
    with pytest.raises(RzooError, match=r"method \(best\) must be one of greedy, uniform, random"):
        prune(lm, data, 10_000, method="best")
    with pytest.raises(RzooError, match="prunes nothing: the model has"):
        prune(lm, data, 10**9)
    with pytest.raises(RzooError, match=r"unit \(watts\) must be one of"):
        costs_of(lm.config, "watts")
    with pytest.raises(RzooError, match="held in blocks and can't be pruned"):
        calibrate(quantize(lm, "int8"), data.rows)
    with pytest.raises(RzooError, match="60 tokens in whole rows of 12; at least 192 are needed"):
        split_rows(np.zeros((5, 12), np.int32))
