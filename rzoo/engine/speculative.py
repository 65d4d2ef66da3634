"""Speculative decoding: cheap guesses of the next tokens, checked by one pass of the model over all of them.

Leviathan et al. (arXiv:2211.17192): a guess x drawn from q is taken with probability min(1, p(x) / q(x)), the first
that is not is replaced by a draw from max(p - q, 0), and after k taken guesses one more token comes from the model.
What comes out is distributed as p, and at temperature 0 it is the greedy answer. Guesses come from a smaller model with
the same vocabulary, from the model's own module for a second token, or from where the last tokens stood before; the
latter two are certain of their guess (drafting.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from rzoo.compile.programs import on_host
from rzoo.engine.drafting import PURPOSES, Guesser, for_guesses
from rzoo.engine.rows import Row
from rzoo.engine.sampling import Draws, Sampler, folded, log_weights, noise
from rzoo.engine.session import State, read_chunk
from rzoo.handle import LM


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Guesses:
    """ids [b, k], of which the first `counts` [b] are guesses; q [b, k, v]: what they were drawn from, None: certain.

    starts: position of the first guess [b]. accept, replace: key data [b, 2].
    """

    ids: Any
    counts: Any
    q: Any
    starts: Any
    draws: Draws
    accept: Any
    replace: Any


@dataclass(frozen=True)
class Verify:
    """Reads the logits of a pass over the last token and k guesses."""

    vocab: int

    def __call__(
        self, logits: Float[Array, "b t v"], states: Float[Array, "b t d"], given: Guesses
    ) -> tuple[Int[Array, " b"], Int[Array, " b"], Float[Array, "b t d"]]:
        """How many guesses are taken, the token after them, and the states, from which further guesses may be made."""
        b, t = logits.shape[:2]
        logits = logits[..., : self.vocab].astype(jnp.float32)
        settings = jax.tree.map(lambda a: jnp.repeat(a, t, axis=0), given.draws)
        p = jax.nn.softmax(log_weights(logits.reshape(b * t, -1), settings)).reshape(logits.shape)
        q = jax.nn.one_hot(given.ids, self.vocab) if given.q is None else given.q
        at = lambda probabilities: jnp.take_along_axis(probabilities, given.ids[..., None], axis=2)[..., 0]  # noqa: E731
        index = jnp.arange(t - 1)
        chance = uniform(given.accept, given.starts[:, None] + index)
        taken = (chance * at(q) < at(p[:, :-1])) & (index < given.counts[:, None])
        accepted = jnp.cumprod(taken, axis=1).sum(axis=1)
        return accepted, _next(p, q, accepted, given), states


def _next(p: Array, q: Array, accepted: Array, given: Guesses) -> Array:
    """The token after the accepted ones: of what p holds beyond q where a guess was refused, else of p."""
    pick = lambda a, i: jnp.take_along_axis(a, i[:, None, None], axis=1)[:, 0]  # noqa: E731
    ours, theirs = pick(p, accepted), pick(q, jnp.minimum(accepted, q.shape[1] - 1))
    beyond = jnp.where((accepted < given.counts)[:, None], jnp.maximum(ours - theirs, 0), ours)
    some = beyond.sum(axis=-1, keepdims=True) > 0  # rounding may leave nothing where p and q are all but equal
    weights = jnp.log(jnp.where(some, beyond, ours))
    return jnp.argmax(weights + noise(given.replace, given.starts + accepted, p.shape[-1]), axis=-1).astype(jnp.int32)


def uniform(keys: UInt[Array, "b 2"], positions: Int[Array, "b k"]) -> Float[Array, "b k"]:
    """A number in [0, 1) for each position of each row."""
    one = lambda key, position: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position))  # noqa: E731
    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(keys, positions)


@partial(jax.jit, static_argnames="choose")
def _first(logits: Array, draws: Draws, positions: Array, *, choose: Any) -> Array:
    return choose(logits, draws, positions, positions >= 0)[0]


def run_drafted(
    lm: LM, rows: list[Row], state: State, guesser: Guesser, draws: Draws, k: int, vocab: int
) -> Iterator[list[str]]:
    """As run._run, with up to k guesses a pass. draws: of the tokens that the model itself draws."""
    keys = [folded(draws.keys, np.full(len(state.lengths), purpose)) for purpose in PURPOSES[1:]]
    positions = np.asarray(state.lengths, np.int32)
    pending = on_host(_first(state.logits, for_guesses(draws), positions, choose=Sampler(vocab))).copy()
    yield [row.take([int(token)]) for row, token in zip(rows, pending, strict=False)]
    idle = [0] * (len(state.lengths) - len(rows))
    while not all(row.finish_reason for row in rows):
        live = np.asarray([*(not row.finish_reason for row in rows), *idle], np.int32)
        ids, counts, q = guesser.guess(pending, live)
        starts = np.asarray(state.lengths, np.int32) + 1
        guesses = Guesses(ids, counts, q, starts, draws, *keys)
        tokens = np.concatenate([pending[:, None], ids], axis=1)
        (*found, states), after = read_chunk(lm, state, tokens, live * (k + 1), guesses, Verify(vocab))
        accepted, pending = (np.array(on_host(array)) for array in found)
        taken = live * (1 + accepted)
        state = after.cut((starts - 1 + taken).tolist())
        after_each = np.where(np.arange(k + 1) == accepted[:, None], pending[:, None], np.pad(ids, ((0, 0), (0, 1))))
        guesser.learn(state.lengths, after_each, taken, states)
        yield [_taken(row, [*ids[i, : accepted[i]].tolist(), int(pending[i])]) for i, row in enumerate(rows)]


def _taken(row: Row, ids: Sequence[int]) -> str:
    row.passes += not row.finish_reason
    return row.take(ids)
