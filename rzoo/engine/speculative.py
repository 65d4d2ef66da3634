"""Speculative decoding: cheap guesses of the next tokens, checked by one pass of the model over all of them.

Leviathan et al. (arXiv:2211.17192): a guess x drawn from q is taken with probability min(1, p(x) / q(x)), the first
that is not is replaced by a draw from max(p - q, 0), and after k taken guesses one more token comes from the model.
What comes out is distributed as p, and at temperature 0 it is the greedy answer. Guesses come from a smaller model with
the same vocabulary or, as in prompt lookup, from where the last tokens stood before (q is then certain of its guess).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from rzoo.compile.programs import on_host
from rzoo.engine.rows import Row
from rzoo.engine.sampling import Draws, Sampler, folded, log_weights, noise
from rzoo.engine.session import State, decode_drawn, read_chunk
from rzoo.handle import LM

PURPOSES = np.uint32(2**32 - 3) + np.arange(3, dtype=np.uint32)  # of keys: guess, accept, replace; no position is one
LONGEST_MATCH = 3  # tokens at the end that prompt lookup looks for, then fewer


@dataclass(frozen=True)
class Drafter:
    """A step.Choose that notes the probabilities it drew from."""

    vocab: int

    def __call__(self, logits: Array, draws: Draws, positions: Array, live: Array) -> tuple[Array, Any, Draws]:
        weights = log_weights(logits[:, : self.vocab].astype(jnp.float32), draws)
        chosen = jnp.argmax(weights + noise(draws.keys, positions, self.vocab), axis=-1).astype(jnp.int32)
        return chosen, jax.nn.softmax(weights), draws


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

    def __call__(self, logits: Float[Array, "b t v"], given: Guesses) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
        """How many guesses are taken, and the token after them."""
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
        return accepted, _next(p, q, accepted, given)


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


def last_logits(logits: Float[Array, "b t v"], given: None) -> Float[Array, "b v"]:
    """Of a chunk, the logits after its last token."""
    return logits[:, -1]


@partial(jax.jit, static_argnames="choose")
def _first(logits: Array, draws: Draws, positions: Array, *, choose: Any) -> Array:
    return choose(logits, draws, positions, positions >= 0)[0]


def run_drafted(
    lm: LM, rows: list[Row], state: State, drafted: State | None, draws: Draws, draft: Any, k: int, vocab: int
) -> Iterator[list[str]]:
    """As run._run, with up to k guesses a pass by the model `draft`, whose state is `drafted`, or by prompt lookup."""
    idle = [0] * (len(state.lengths) - len(rows))
    keys = [folded(draws.keys, np.full(len(state.lengths), purpose)) for purpose in PURPOSES]
    ours = replace(draws, keys=keys[0])
    positions = np.asarray(state.lengths, np.int32)
    pending = on_host(_first(state.logits, draws, positions, choose=Sampler(vocab))).copy()
    yield [row.take([int(token)]) for row, token in zip(rows, pending, strict=False)]
    while not all(row.finish_reason for row in rows):
        live = np.asarray([*(not row.finish_reason for row in rows), *idle], np.int32)
        if drafted is None:
            ids, counts = _looked_up(rows, len(live), k)
            q = None
        else:
            ids, q, drafted = _drafted(draft, drafted, pending, live, ours, k, vocab)
            counts = np.full(len(live), k, np.int32)
        starts = np.asarray(state.lengths, np.int32) + 1
        guesses = Guesses(ids, counts, q, starts, draws, *keys[1:])
        tokens = np.concatenate([pending[:, None], ids], axis=1)
        found, after = read_chunk(lm, state, tokens, live * (k + 1), guesses, Verify(vocab))
        accepted, pending = (np.array(on_host(array)) for array in found)
        lengths = (starts - 1 + live * (1 + accepted)).tolist()
        state = after.cut(lengths)
        drafted = None if drafted is None else drafted.cut(lengths)
        yield [_taken(row, [*ids[i, : accepted[i]].tolist(), int(pending[i])]) for i, row in enumerate(rows)]


def _taken(row: Row, ids: Sequence[int]) -> str:
    row.passes += not row.finish_reason
    return row.take(ids)


def _drafted(
    draft: LM, state: State, pending: np.ndarray, live: np.ndarray, draws: Draws, k: int, vocab: int
) -> tuple[np.ndarray, Array, State]:
    """k tokens of the draft model after `pending`: ids, probabilities they were drawn from, its state."""
    logits, state = read_chunk(draft, state, pending[:, None], live, None, last_logits)
    state = replace(state, logits=logits)
    ids, q, _, state = decode_drawn(draft, state, (live * k).tolist(), draws, choose=Drafter(vocab), steps=k)
    return np.maximum(ids, 0), q, state


def _looked_up(rows: Sequence[Row], size: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """What followed where the last tokens of each row stood before: ids [size, k], and how many there are."""
    ids, counts = np.zeros((size, k), np.int32), np.zeros(size, np.int32)
    for place, row in enumerate(rows):
        found = looked_up((*row.prompt, *row.tokens), k)
        ids[place, : len(found)], counts[place] = found, len(found)
    return ids, counts


def looked_up(ids: Sequence[int], k: int) -> list[int]:
    """Up to k ids that followed an earlier place of the last LONGEST_MATCH ids, or of fewer: the latest place that k
    ids follow, else that which most follow.
    """
    held = np.asarray(ids)
    for size in range(min(LONGEST_MATCH, len(held) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(held[:-1], size)
        places = np.flatnonzero((windows == held[-size:]).all(axis=1))
        if places.size:
            whole = places[places + size + k <= len(held)]
            end = size + (whole[-1] if whole.size else places[0])
            return held[end : end + k].tolist()
    return []
