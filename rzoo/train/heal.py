"""Healing a pruned model: it learns its parent's predictions, by the training step and the loop of any training.

Source: Puzzle (Bercovich et al. 2024), section 5: KL of the logits and the distance of hidden states, no loss on the
tokens themselves.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from rzoo.core import RzooError
from rzoo.handle import LM
from rzoo.train.loop import Say, fit
from rzoo.train.step import Batch, Objective

Teach = Callable[[Int[np.ndarray, "b t"]], Batch]


def heal(
    lm: LM,
    parent: LM,
    rows: Int[np.ndarray, "n t"],
    steps: int,
    *,
    batch: int = 4,
    peak: float = 1e-4,
    hidden: float = 0.0,
    seed: int = 0,
    folder: str | Path | None = None,
    save_every: int = 100,
    progress: Say = lambda step, metrics: None,
) -> LM:
    """The model after `steps` steps of learning what `parent` predicts on rows of token ids, `batch` of them a step.

    peak: of the learning rate, warmed up over a tenth of the steps and lowered to a tenth. hidden: weight of the
    distance (1 - cosine) of the final hidden states; 0 leaves it out. folder: of `fit`, which resumes what is there.
    Raises RzooError for models of different vocabularies, for an empty set of rows, and for what `fit` refuses.
    """
    if lm.config.vocab_size != parent.config.vocab_size:
        words = f"the vocabularies differ: {lm.config.vocab_size} and {parent.config.vocab_size} tokens"
        raise RzooError(words, field="parent", fix="heal a model with the one that it was cut from")
    if not len(rows) or batch < 1:
        raise RzooError(f"there are {len(rows)} rows for batches of {batch}", field="rows", fix="give at least one")
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 10), max(2, steps), peak / 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    lessons = partial(_batch, partial(taught, parent, with_hidden=hidden > 0), rows, batch, seed)
    return fit(
        lm,
        lessons,
        steps,
        optimizer=optimizer,
        objective=Objective(hidden=hidden),
        folder=folder,
        save_every=save_every,
        progress=progress,
    )


def taught(parent: LM, ids: Int[np.ndarray, "b t"], *, with_hidden: bool = False) -> Batch:
    """A batch of what the parent makes of ids."""
    logits: Any = parent(ids, capture="hidden") if with_hidden else parent(ids)
    logits, hidden = (logits[0], logits[1]["hidden"][-1]) if with_hidden else (logits, None)
    return Batch(jnp.asarray(ids), jnp.ones(ids.shape), logits, hidden)


def _batch(teach: Teach, rows: Int[np.ndarray, "n t"], size: int, seed: int, number: int) -> Batch:
    """Batch `number`: rows in an order drawn anew for each pass over them."""
    places = [divmod(place, len(rows)) for place in range(number * size, (number + 1) * size)]
    orders = {turn: np.random.default_rng((seed, turn)).permutation(len(rows)) for turn in {turn for turn, _ in places}}
    return teach(rows[[orders[turn][place] for turn, place in places]])
