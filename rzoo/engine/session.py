"""Device state of rows being generated: prefill in chunks of a few fixed lengths, decode in short device loops.

Programs depend on the blueprint, the batch size, the chunk length and the cache's capacity alone, so few are compiled
however lengths vary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rzoo.compile.programs import on_host, programs_of
from rzoo.handle import LM
from rzoo.models import step
from rzoo.models.cache import Cache
from rzoo.models.rope import depends_on_length
from rzoo.sharding.fit import check_cache_fits

CHUNKS = (512, 128, 32)  # lengths in which prompts are read; the last piece is padded to the shortest that holds it
DECODE_STEPS = 16  # tokens of one device loop: between loops the host looks at text, stops and Ctrl-C
SMALLEST_CAPACITY = 256


@dataclass(frozen=True)
class State:
    """Rows between two calls: logits after the last token of each [b, v], and the cache. Used up by the call it is
    given to.

    lengths: tokens of each row, the host's copy, so that nothing waits for the device to ask.
    """

    logits: jax.Array
    cache: Cache
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths)

    def cut(self, lengths: Sequence[int]) -> "State":
        """Rows that forget all after their first `lengths` tokens; the logits of those that do mean nothing."""
        return State(self.logits, self.cache.with_lengths(jnp.asarray(lengths, jnp.int32)), tuple(lengths))


def prefill(lm: LM, prompts: Sequence[Sequence[int]], room: int, *, after: State | None = None) -> State:
    """Reads prompts (token ids, one row each) into a cache with room for `room` more tokens a row.

    after: rows that these tokens follow; one with none keeps its logits. Else the cache is fresh, and a row without
    tokens is an idle one.
    """
    lengths = np.asarray([len(p) for p in prompts], np.int32)
    pieces = chunks_of(int(lengths.max()))
    if depends_on_length(lm.config.rope):
        pieces = [sum(pieces)]
    ids = padded(prompts, len(prompts), sum(pieces))
    held = np.zeros_like(lengths) if after is None else np.asarray(after.lengths, np.int32)
    total = held + lengths
    cache = _room_for(lm, after, len(prompts), max(int(held.max()) + sum(pieces), int(total.max()) + room + 1))
    program = programs_of(lm.blueprint, lm.record, len(prompts)).prefill_chunk
    logits, start = None if after is None else after.logits, 0
    for size in pieces:
        counts = np.clip(lengths - start, 0, size)
        new, cache = program(lm.blueprint, lm.params, ids[:, start : start + size], counts, cache)
        logits = new if logits is None else jnp.where((counts > 0)[:, None], new, logits)
        start += size
    assert logits is not None
    return State(logits, cache, tuple(total.tolist()))


def padded(lists: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """Ids [rows, width], each list on the left of a row and zeros elsewhere."""
    ids = np.zeros((rows, width), np.int32)
    for row, given in zip(ids, lists, strict=False):
        row[: len(given)] = given
    return ids


def _room_for(lm: LM, state: State | None, rows: int, tokens: int) -> Cache:
    """The cache of `state`, or an empty one, with room for `tokens` a row."""
    capacity = capacity_for(tokens)
    if state is not None:
        return state.cache if capacity <= state.cache.capacity else state.cache.grown(capacity)
    check_cache_fits(lm.blueprint, rows, capacity)
    return lm.blueprint.empty_cache(rows, capacity)


def empty_state(lm: LM, rows: int, tokens: int) -> State:
    """Rows that hold nothing yet, with room for `tokens` each; their logits are zeros."""
    return State(jnp.zeros((rows, lm.config.vocab_size)), _room_for(lm, None, rows, tokens + 1), (0,) * rows)


def take_rows(lm: LM, state: State, rows: Sequence[int]) -> State:
    """Copies of these rows, in this order."""
    picks = jnp.asarray(rows, jnp.int32)
    cache = programs_of(lm.blueprint).take_rows(lm.blueprint, state.cache, picks)
    return State(state.logits[picks], cache, tuple(state.lengths[i] for i in rows))


def put_row(lm: LM, state: State, row: int, one: State) -> State:
    """`state` with a row replaced by the only row of `one`."""
    capacity = max(state.cache.capacity, one.cache.capacity)
    ours, theirs = (s.cache if s.cache.capacity == capacity else s.cache.grown(capacity) for s in (state, one))
    cache = programs_of(lm.blueprint).put_row(lm.blueprint, ours, jnp.int32(row), theirs)
    lengths = (*state.lengths[:row], *one.lengths, *state.lengths[row + 1 :])
    return State(state.logits.at[row].set(one.logits[0]), cache, lengths)


def decode(
    lm: LM, state: State, wanted: Sequence[int] | int, *, stops: Sequence[int] = (), select: Any = step.greedy
) -> tuple[np.ndarray, State]:
    """Up to DECODE_STEPS tokens a row: `wanted` of each (0: a finished row), fewer where one of `stops` comes first.

    Returns ids [b, DECODE_STEPS] with -1 where a row took none, and the next state.
    """
    left, cache = _wanted(lm, state, wanted, DECODE_STEPS)
    tokens, logits, cache = programs_of(lm.blueprint, lm.record, len(left)).decode(
        lm.blueprint,
        lm.params,
        state.logits,
        cache,
        jax.random.key(0),
        left,
        _padded(stops),
        steps=DECODE_STEPS,
        select=select,
    )
    out = on_host(tokens)
    return out, _after(state, out, logits, cache)


def decode_drawn(
    lm: LM,
    state: State,
    wanted: Sequence[int] | int,
    draws: Any,
    *,
    choose: step.Choose,
    stops: Sequence[int] = (),
    steps: int = DECODE_STEPS,
) -> tuple[np.ndarray, Any, Any, State]:
    """As decode, where `choose` with its state `draws` says how: also its notes [b, steps, …], and its state."""
    left, cache = _wanted(lm, state, wanted, steps)
    tokens, notes, draws, logits, cache = programs_of(lm.blueprint, lm.record, len(left)).decode_chosen(
        lm.blueprint, lm.params, state.logits, cache, draws, left, _padded(stops), steps=steps, choose=choose
    )
    out = on_host(tokens)
    return out, notes, draws, _after(state, out, logits, cache)


def read_chunk(
    lm: LM, state: State, tokens: np.ndarray, counts: np.ndarray, given: Any, read: Any
) -> tuple[Any, State]:
    """Appends the first counts [b] of tokens [b, t]; read(logits [b, t, v], given), and the state, whose logits are
    those before.
    """
    cache = _room_for(lm, state, len(tokens), state.longest + tokens.shape[1] + 1)
    found, cache = programs_of(lm.blueprint).read_chunk(
        lm.blueprint, lm.params, tokens, counts, cache, given, read=read
    )
    return found, State(state.logits, cache, tuple((np.asarray(state.lengths) + counts).tolist()))


def _wanted(lm: LM, state: State, wanted: Sequence[int] | int, steps: int) -> tuple[np.ndarray, Cache]:
    """Tokens that each row takes, and the cache with room for them."""
    rows = len(state.lengths)
    left = np.minimum(np.broadcast_to(np.asarray(wanted, np.int32), (rows,)), steps)
    return left, _room_for(lm, state, rows, state.longest + int(left.max()) + 1)


def _after(state: State, tokens: np.ndarray, logits: Any, cache: Cache) -> State:
    taken = (tokens >= 0).sum(axis=1)
    return State(logits, cache, tuple((np.asarray(state.lengths) + taken).tolist()))


def _padded(stops: Sequence[int]) -> np.ndarray:
    """Ids in an array of one of few sizes: -1 is no token."""
    ids = np.full(bucket(max(len(stops), 1)), -1, np.int32)
    ids[: len(stops)] = stops
    return ids


def bucket(count: int) -> int:
    """The power of two that holds `count`: sizes for which programs are compiled."""
    return 1 << (count - 1).bit_length()


def chunks_of(length: int) -> list[int]:
    """Chunk lengths that cover `length` tokens: the longest that fit, then one padded piece."""
    pieces: list[int] = []
    left = length
    while left > 0:
        pieces.append(next((c for c in CHUNKS if c <= left), CHUNKS[-1]))
        left -= pieces[-1]
    return pieces


def pieces_of(length: int) -> list[tuple[int, int]]:
    """chunks_of with the place where each begins."""
    sizes = chunks_of(length)
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def capacity_for(tokens: int) -> int:
    """The bucket that holds `tokens`: powers of two from SMALLEST_CAPACITY on."""
    return max(SMALLEST_CAPACITY, bucket(tokens))


class Session:
    """A cache that is kept from one answer to the next, so that what a prompt has in common with the last prompt and
    its answer is not computed again: `generate(lm, prompt, session=session)`. It holds one conversation of one model.
    """

    def __init__(self) -> None:
        self._lm: LM | None = None
        self._ids: tuple[int, ...] = ()
        self._state: State | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that are kept."""
        return self._ids

    def claim(self, lm: LM, prompt: Sequence[int]) -> State | None:
        """The kept state, cut to the longest common prefix with `prompt` that leaves a token to compute; None where
        there is none. The session is empty until something is kept again.
        """
        state, ids, self._state, self._ids = self._state, self._ids, None, ()
        common = next(
            (i for i, (a, b) in enumerate(zip(ids, prompt, strict=False)) if a != b), min(len(ids), len(prompt))
        )
        common = min(common, len(prompt) - 1)
        # A rotation that depends on the length of the row has turned the kept keys for another one.
        usable = state is not None and lm is self._lm and common > 0 and not depends_on_length(lm.config.rope)
        return state.cut([common]) if state is not None and usable else None

    def keep(self, lm: LM, ids: Sequence[int], state: State) -> None:
        """Keeps the first row of `state`, which has read at least the tokens `ids`; nothing of one that is used up."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache)):
            return
        state = state if len(state.lengths) == 1 else take_rows(lm, state, [0])
        self._lm, self._ids, self._state = lm, tuple(ids)[: state.lengths[0]], state
