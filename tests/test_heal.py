"""Healing: a pruned model learns what its parent predicts, and a run that was stopped ends with the same bits."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.models.prune import everything, select, sizes_of
from rzoo.models.registry import initialize
from rzoo.train.heal import heal, taught
from rzoo.train.prune import calibrate, log_perplexity, pruned_to
from rzoo.train.step import divergence
from tests.tiny import TINY

CONFIG = TINY["llama-tied"]
ROWS = np.random.default_rng(0).integers(0, 97, (6, 12)).astype(np.int32)


@pytest.fixture(scope="module")
def parent() -> LM:
    params = initialize(CONFIG)
    return LM(CONFIG, {**params, "embed": params["embed"] * CONFIG.width**-0.5})


@pytest.fixture(scope="module")
def child(parent) -> LM:
    narrow = [replace(own, channels=16) for own in sizes_of(CONFIG)]
    return pruned_to(parent, calibrate(parent, ROWS), narrow, refit=False).lm


OPTIONS = {"peak": 1e-2, "hidden": 0.5}
STEPS = 12


@pytest.fixture(scope="module")
def healed(parent, child) -> tuple[LM, list[dict[str, float]]]:
    seen: list[dict[str, float]] = []
    return heal(child, parent, ROWS, STEPS, progress=lambda step, found: seen.append(found), **OPTIONS), seen


def distance(parent: LM, child: LM) -> float:
    return float(divergence(parent(ROWS), child(ROWS)).mean())


def test_a_healed_model_is_nearer_to_its_parent(parent, child, healed):
    model, seen = healed
    before = distance(parent, child)
    assert distance(parent, model) < 0.9 * before and model.config == child.config
    assert seen[0]["loss"] == pytest.approx(before, rel=0.5) and 0 < seen[-1]["hidden_loss"] < seen[0]["hidden_loss"]


def test_healing_that_was_stopped_goes_on_to_the_same_bits(parent, child, healed, tmp_path):
    def stop(step: int, metrics: object) -> None:
        if step == 3:
            raise KeyboardInterrupt

    options = {"folder": tmp_path / "healing", **OPTIONS}
    with pytest.raises(KeyboardInterrupt):
        heal(child, parent, ROWS, STEPS, progress=stop, **options)
    resumed = heal(child, parent, ROWS, STEPS, **options)
    assert all((healed[0].params[path] == value).all() for path, value in resumed.params.items())


def test_a_parent_has_nothing_to_learn_from_itself(parent):
    batch = taught(parent, ROWS, with_hidden=True)
    assert float(jnp.abs(divergence(batch.logits, parent(ROWS))).max()) < 1e-5
    assert select(CONFIG, calibrate(parent, ROWS).importance, sizes_of(CONFIG)) == everything(CONFIG)


def test_strangers_and_empty_text_are_refused(parent, child):
    other = LM(replace(CONFIG, vocab_size=50), initialize(replace(CONFIG, vocab_size=50)))
    with pytest.raises(RzooError, match="vocabularies differ: 97 and 50"):
        heal(child, other, ROWS, 1)
    with pytest.raises(RzooError, match="0 rows for batches of 4"):
        heal(child, parent, ROWS[:0], 1)
    assert np.isfinite(log_perplexity(child, ROWS))
