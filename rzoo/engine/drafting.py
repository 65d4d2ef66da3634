"""Where guesses of the next tokens come from: earlier text, a smaller model, or the model's own module for a second
token. Checked and counted by speculative.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rzoo.compile.programs import on_host, programs_of
from rzoo.engine.rows import Row
from rzoo.engine.sampling import Draws, folded, log_weights, noise
from rzoo.engine.session import (
    CHUNKS,
    State,
    bucket,
    capacity_for,
    decode_drawn,
    empty_state,
    padded,
    pieces_of,
    read_chunk,
)
from rzoo.handle import LM

PURPOSES = np.uint32(2**32 - 3) + np.arange(3, dtype=np.uint32)  # of keys: guess, accept, replace; no position is one
LONGEST_MATCH = 3  # tokens at the end that prompt lookup looks for, then fewer


def for_guesses(draws: Draws) -> Draws:
    """The settings of rows with keys of their own for guesses."""
    return replace(draws, keys=folded(draws.keys, np.full(len(draws.keys), PURPOSES[0])))


@runtime_checkable
class Guesser(Protocol):
    """Makes up to k guesses a pass for each of b rows, and is told what became of them."""

    def guess(self, pending: np.ndarray, live: np.ndarray) -> tuple[np.ndarray, np.ndarray, Array | None]:
        """ids [b, k] after the newest tokens `pending` [b], of which the first counts [b] are guesses; q [b, k, v]:
        what they were drawn from, None where they are certain. live [b]: 0 for a row that has ended.
        """
        ...

    def learn(self, lengths: Sequence[int], tokens: np.ndarray, counts: np.ndarray, states: Array) -> None:
        """After a pass: what each row now holds, and of the first counts [b] positions of the pass the token that
        follows each [b, k+1] and the final hidden states [b, k+1, d].
        """
        ...


@dataclass(frozen=True)
class LookUp:
    """What followed where the last tokens of a row stood before."""

    rows: Sequence[Row]
    k: int

    def guess(self, pending: np.ndarray, live: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
        """As Guesser says."""
        ids, counts = np.zeros((len(live), self.k), np.int32), np.zeros(len(live), np.int32)
        for place, row in enumerate(self.rows):
            found = looked_up((*row.prompt, *row.tokens), self.k)
            ids[place, : len(found)], counts[place] = found, len(found)
        return ids, counts, None

    def learn(self, lengths: Sequence[int], tokens: np.ndarray, counts: np.ndarray, states: Array) -> None:
        """Nothing: the rows hold it."""


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


@dataclass(frozen=True)
class Drafter:
    """A step.Choose that notes the probabilities it drew from."""

    vocab: int

    def __call__(self, logits: Array, draws: Draws, positions: Array, live: Array) -> tuple[Array, Any, Draws]:
        weights = log_weights(logits[:, : self.vocab].astype(jnp.float32), draws)
        chosen = jnp.argmax(weights + noise(draws.keys, positions, self.vocab), axis=-1).astype(jnp.int32)
        return chosen, jax.nn.softmax(weights), draws


@dataclass
class SmallerModel:
    """Draws of a model with the same vocabulary. state: of the same rows as the large one's, before their newest
    token. draws: those that `for_guesses` gives.
    """

    lm: LM
    state: State
    draws: Draws
    k: int
    vocab: int

    def guess(self, pending: np.ndarray, live: np.ndarray) -> tuple[np.ndarray, np.ndarray, Array]:
        """As Guesser says."""
        logits, state = read_chunk(self.lm, self.state, pending[:, None], live, None, last_logits)
        state, wanted = replace(state, logits=logits), (live * self.k).tolist()
        ids, q, _, self.state = decode_drawn(
            self.lm, state, wanted, self.draws, choose=Drafter(self.vocab), steps=self.k
        )
        return np.maximum(ids, 0), np.full(len(live), self.k, np.int32), q

    def learn(self, lengths: Sequence[int], tokens: np.ndarray, counts: np.ndarray, states: Array) -> None:
        """Forgets the guesses that were refused."""
        self.state = self.state.cut(lengths)


def last_logits(logits: Float[Array, "b t v"], states: Any, given: None) -> Float[Array, "b v"]:
    """Of a chunk, the logits after its last token."""
    return logits[:, -1]


@dataclass
class OwnModule:
    """The likeliest tokens by a model's module of multi-token prediction, as step.draft makes them.

    states [b, t, d], tokens [b, t], counts [b]: what the module has not read yet; the newest token, which `guess` is
    given, is the last of each row. longest: tokens that the longest row holds.
    """

    lm: LM
    cache: Any
    longest: int
    states: Array
    tokens: np.ndarray
    counts: np.ndarray
    k: int

    def guess(self, pending: np.ndarray, live: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
        """As Guesser says."""
        self.tokens[np.arange(len(live)), np.maximum(self.counts - 1, 0)] = pending
        capacity = capacity_for(self.longest + self.tokens.shape[1] + self.k)
        cache = self.cache if capacity <= self.cache.capacity else self.cache.grown(capacity)
        draft: Any = programs_of(self.lm.blueprint).draft
        ids, self.cache = draft(
            self.lm.blueprint, self.lm.params, self.states, self.tokens, self.counts, cache, count=self.k
        )
        return on_host(ids), np.full(len(live), self.k, np.int32), None

    def learn(self, lengths: Sequence[int], tokens: np.ndarray, counts: np.ndarray, states: Array) -> None:
        """Keeps the new states for the next guesses."""
        self.longest, self.states, self.tokens, self.counts = max(lengths), states, tokens, counts


def own_module(lm: LM, prompts: Sequence[Sequence[int]], k: int) -> tuple[State, OwnModule]:
    """Reads prompts, one a row (an idle row has none), for a model and for its module."""
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    width = bucket(int(lengths.max()))
    ids = padded(prompts, len(prompts), width + 1)
    before = np.maximum(lengths - 1, 0)  # the last token of each is read by itself, for its logits
    state, found = empty_state(lm, len(prompts), width + CHUNKS[-1]), []
    for start, size in pieces_of(int(before.max())):
        counts = np.clip(before - start, 0, size).astype(np.int32)
        chunk = np.pad(ids[:, start : start + size], ((0, 0), (0, max(0, start + size - width - 1))))
        states, state = read_chunk(lm, state, chunk, counts, None, states_alone)
        found.append(states)
    last, one = np.take_along_axis(ids, before[:, None], axis=1), (lengths > 0).astype(np.int32)
    (logits, states), state = read_chunk(lm, state, last, one, None, last_logits_and_states)
    whole = jnp.concatenate([*found, jnp.zeros_like(states)], axis=1)[:, :width]
    whole = jnp.pad(whole, ((0, 0), (0, width - whole.shape[1]), (0, 0)))
    whole = whole.at[jnp.arange(len(prompts)), before].set(states[:, 0])
    cache = lm.blueprint.empty_draft_cache(len(prompts), capacity_for(width + k))
    module = OwnModule(lm, cache, int(lengths.max()), whole, ids[:, 1:].copy(), lengths, k)
    return replace(state, logits=logits), module


def states_alone(logits: Any, states: Float[Array, "b t d"], given: None) -> Float[Array, "b t d"]:
    """Of a chunk, the final hidden states."""
    return states


def last_logits_and_states(
    logits: Float[Array, "b t v"], states: Float[Array, "b t d"], given: None
) -> tuple[Float[Array, "b v"], Float[Array, "b t d"]]:
    """Of a chunk, the logits after its last token and all states."""
    return logits[:, -1], states
