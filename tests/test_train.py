"""The training step and its loop: what a loss counts, balance without gradients, resumption to the bit."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rzoo
from rzoo.core import RzooError
from rzoo.data.chains import applied, chain
from rzoo.handle import LM
from rzoo.models.registry import always_float32, initialize
from rzoo.train.loop import curve, fit
from rzoo.train.step import Batch, Objective, balanced, initial, step_of
from tests.tiny import TINY

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def batch(number: int) -> Batch:
    tokens = np.random.default_rng(number).integers(0, 97, (2, 12)).astype(np.int32)
    return Batch(tokens, np.ones(tokens.shape, np.float32))


@pytest.fixture(scope="module")
def lm() -> LM:
    return LM(TINY["deepseek-v3"], initialize(TINY["deepseek-v3"]))


def test_tokens_of_weight_zero_teach_nothing(lm):
    step = step_of(lm, OPTIMIZER)
    full = batch(0)
    first_half = Batch(full.tokens, np.where(np.arange(12) < 6, full.weights, 0).astype(np.float32))
    changed = Batch(np.where(np.arange(12) < 6, full.tokens, 5).astype(np.int32), first_half.weights)
    losses = [step(initial(lm, OPTIMIZER), given)[1]["loss"] for given in (first_half, changed, full)]
    assert losses[0] == losses[1] != losses[2]


def test_the_loss_falls_and_the_handle_it_began_with_is_left_alone(lm):
    before = {path: np.asarray(value) for path, value in lm.params.items()}
    seen = []
    trained = fit(lm, lambda number: batch(0), 12, optimizer=OPTIMIZER, progress=lambda i, found: seen.append(found))
    assert seen[-1]["loss"] < 0.8 * seen[0]["loss"]
    assert all((np.asarray(lm.params[path]) == value).all() for path, value in before.items())
    assert float(jnp.abs(trained.params["embed"] - lm.params["embed"]).max()) > 0


def test_a_selection_bias_moves_towards_an_even_load_and_by_no_gradient(lm):
    load = jnp.asarray([4, 0, 2])
    assert balanced(jnp.zeros(3), load, 0.5).tolist() == [-0.5, 0.5, 0.0]
    (path,) = always_float32(lm.config)
    loads = lm(batch(0).tokens, capture="load")[1]["load"]
    moved, metrics = step_of(lm, OPTIMIZER, Objective(bias_rate=0.25))(initial(lm, OPTIMIZER), batch(0))
    expected = lm.params[path] + 0.25 * jnp.sign(loads[0].mean() - loads[0])
    assert (moved.biases[path] == expected).all()
    assert metrics["load"] == loads[0].max() / loads[0].mean()


def test_loads_and_biases_of_many_layers_belong_together():
    config = replace(TINY["deepseek-v3"], layers=12)
    model = LM(config, initialize(config))
    state, _ = step_of(model, OPTIMIZER, Objective(bias_rate=0.25))(initial(model, OPTIMIZER), batch(1))
    loads = model(batch(1).tokens, capture="load")[1]["load"]
    assert len(loads) == len(state.biases) == 11
    for path, bias in state.biases.items():
        load = loads[int(path.split(".")[1]) - 1]
        assert (bias - model.params[path] == 0.25 * jnp.sign(load.mean() - load)).all()


def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_bits(lm, tmp_path):
    options = {"optimizer": OPTIMIZER, "objective": Objective(bias_rate=0.01), "save_every": 2}
    whole = fit(lm, batch, 5, folder=tmp_path / "whole", **options)

    def interrupted(step, metrics):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(lm, batch, 5, folder=tmp_path / "parts", progress=interrupted, **options)
    resumed = fit(lm, batch, 5, folder=tmp_path / "parts", **options)
    assert all((whole.params[path] == resumed.params[path]).all() for path in whole.params)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert curve(tmp_path / "parts")["step"] == [1, 2, 3, 4, 5]
    again = rzoo.load(str(tmp_path / "parts"), quiet=True)
    assert all((np.asarray(again.params[path]) == np.asarray(whole.params[path])).all() for path in whole.params)


def test_what_can_not_be_trained_or_resumed_is_refused_in_words(lm, tmp_path):
    rzoo.save(lm, tmp_path / "model")
    with pytest.raises(RzooError, match=r"holds a model and no state of training\n.*new folder"):
        fit(lm, batch, 2, optimizer=OPTIMIZER, folder=tmp_path / "model")
    fit(lm, batch, 1, optimizer=OPTIMIZER, folder=tmp_path / "adam")
    with pytest.raises(RzooError, match=r"was saved by another optimizer"):
        fit(lm, batch, 2, optimizer=optax.sgd(0.1), folder=tmp_path / "adam")
    with pytest.raises(RzooError, match=r"steps \(0\) must be at least 1"):
        fit(lm, batch, 0, optimizer=OPTIMIZER)
    with pytest.raises(RzooError, match=r"bias_rate \(2.0\) must be at least 0"):
        Objective(bias_rate=2.0)
    broken = replace(lm, params={**lm.params, "norm.scale": lm.params["norm.scale"] * jnp.nan})
    with pytest.raises(RzooError, match=r"the loss of step 0 is nan\n.*learning rate.*nothing was saved"):
        fit(broken, batch, 1, optimizer=OPTIMIZER)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_chain_is_its_own_proof(depth):
    found = chain(np.random.default_rng(depth), depth)
    steps = found.thought.split(" ")
    assert len(steps) == depth and steps[-1][-1] == found.answer
    assert found.prompt == steps[0][:3] + "".join(step[1:3] for step in steps[1:]) + "="
    for step in steps:
        assert applied(int(step[0]), step[1], int(step[2])) == int(step[4])
    assert chain(np.random.default_rng(depth), depth) == found


def test_the_start_of_a_chain_decides_its_end():
    ends = {rng: chain(np.random.default_rng(rng), 6) for rng in range(20)}
    for found in ends.values():
        value = (int(found.prompt[0]) + 1) % 10
        for step in found.thought.split(" "):
            value = applied(value, step[1], int(step[2]))
        assert str(value) != found.answer


def test_a_chain_without_operations_is_refused():
    with pytest.raises(RzooError, match=r"depth \(0\) must be at least 1"):
        chain(np.random.default_rng(0), 0)
