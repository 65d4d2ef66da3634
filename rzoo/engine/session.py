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
    """

    logits: jax.Array
    cache: Cache
    longest: int  # tokens in the longest row: the host's copy, so that nothing waits for the device to ask


def prefill(lm: LM, prompts: Sequence[Sequence[int]], room: int) -> State:
    """Reads prompts (token ids, one row each, none empty) into a fresh cache with room for `room` more tokens a row."""
    lengths = np.asarray([len(p) for p in prompts], np.int32)
    pieces = chunks_of(int(lengths.max()))
    if depends_on_length(lm.config.rope):
        pieces = [sum(pieces)]
    capacity = capacity_for(max(sum(pieces), int(lengths.max()) + room + 1))
    ids = np.zeros((len(prompts), sum(pieces)), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    check_cache_fits(lm.blueprint, len(prompts), capacity)
    cache = lm.blueprint.empty_cache(len(prompts), capacity)
    program = programs_of(lm.blueprint, lm.record, len(prompts)).prefill_chunk
    logits, start = None, 0
    for size in pieces:
        counts = np.clip(lengths - start, 0, size)
        new, cache = program(lm.blueprint, lm.params, ids[:, start : start + size], counts, cache)
        logits = new if logits is None else jnp.where((counts > 0)[:, None], new, logits)
        start += size
    assert logits is not None
    return State(logits, cache, int(lengths.max()))


def decode(
    lm: LM,
    state: State,
    wanted: Sequence[int] | int,
    *,
    stops: Sequence[int] = (),
    key: Any = None,
    select: Any = step.greedy,
) -> tuple[np.ndarray, State]:
    """Up to DECODE_STEPS tokens a row: `wanted` of each (0: a finished row), fewer where one of `stops` comes first.

    Returns ids [b, DECODE_STEPS] with -1 where a row took none, and the next state.
    """
    rows = state.logits.shape[0]
    left = np.minimum(np.broadcast_to(np.asarray(wanted, np.int32), (rows,)), DECODE_STEPS)
    cache = state.cache
    needed = state.longest + int(left.max()) + 1
    if needed > cache.capacity:
        cache = cache.grown(capacity_for(needed))
    key = jax.random.key(0) if key is None else key
    ids = jnp.asarray(stops or [-1], jnp.int32)
    tokens, logits, cache = programs_of(lm.blueprint, lm.record, rows).decode(
        lm.blueprint, lm.params, state.logits, cache, key, left, ids, steps=DECODE_STEPS, select=select
    )
    out = on_host(tokens)
    return out, State(logits, cache, state.longest + int((out >= 0).sum(axis=1).max()))


def chunks_of(length: int) -> list[int]:
    """Chunk lengths that cover `length` tokens: the longest that fit, then one padded piece."""
    pieces: list[int] = []
    left = length
    while left > 0:
        pieces.append(next((c for c in CHUNKS if c <= left), CHUNKS[-1]))
        left -= pieces[-1]
    return pieces


def capacity_for(tokens: int) -> int:
    """The bucket that holds `tokens`: powers of two from SMALLEST_CAPACITY on."""
    return max(SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length())
