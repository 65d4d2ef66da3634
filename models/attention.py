"""Causal attention over grouped heads: the reference, and the form in key blocks that long prompts run on.

All take queries [b, t, h, c] whose first token stands at position `starts` of its row, and keys and values [b, k, s,
c], arrays or Coded, of positions 0..s-1 of the same row; query i sees the positions up to starts + i. Entries past a
row's end are never seen.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rzoo.models.cache import Coded
from rzoo.models.weights import Numerics

KEY_BLOCK = 512  # keys of one step of attend_in_blocks: scores of a 512-token chunk are then 1 MiB a head
ONE_QUERY_BLOCK = 64  # the same for a single token: few keys past the last one in use are read


def attend(
    q: Float[Array, "b t h c"],
    keys: Float[Array, "b k s c"] | Coded,
    values: Float[Array, "b k s z"] | Coded,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
    seen: Bool[Array, "b t s"] | None = None,
) -> Float[Array, "b t h z"]:
    """The reference: all scores at once, softmax in `numerics.accumulate`. seen: the only positions of each query."""
    grouped = by_kv_head(q, keys.shape[1])
    weights = probabilities(grouped, keys, starts, scale, numerics, seen)
    return by_query_head(mixture(weights, values, numerics).astype(numerics.compute))


def products(grouped: Float[Array, "b k g t c"], keys: Any, numerics: Numerics) -> Float[Array, "b k g t s"]:
    """Of every query with every key; of Coded keys those of the codes, times the scale of each."""
    codes, scale = (keys.codes, by_key(keys.scale)) if isinstance(keys, Coded) else (keys, None)
    found = numerics.dot_accumulated("bkgtc,bksc->bkgts", grouped, codes)
    return found if scale is None else found * scale.astype(found.dtype)


def mixture(weights: Float[Array, "b k g t s"], values: Any, numerics: Numerics) -> Float[Array, "b k g t z"]:
    """The sum of the values by weight, in `numerics.accumulate`."""
    if isinstance(values, Coded):
        weights, values = weights * by_key(values.scale), values.codes
    return numerics.dot_accumulated("bkgts,bksz->bkgtz", weights, values)


def by_key(scale: Float[Array, "b k s 1"]) -> Float[Array, "b k 1 1 s"]:
    """One number for each key, as scores lie."""
    return scale.swapaxes(2, 3)[:, :, None]


def probabilities(
    grouped: Float[Array, "b k g t c"],
    keys: Float[Array, "b k s c"] | Coded,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
    seen: Bool[Array, "b t s"] | None = None,
) -> Float[Array, "b k g t s"]:
    """Softmax over the visible keys of each query."""
    scores = products(grouped, keys, numerics) * scale
    allowed = visible(starts, grouped.shape[3], jnp.arange(keys.shape[2]))
    allowed = allowed if seen is None else allowed & seen
    return jax.nn.softmax(jnp.where(allowed[:, None, None], scores, -jnp.inf), axis=-1)


def attend_in_blocks(
    q: Float[Array, "b t h c"],
    keys: Float[Array, "b k s c"] | Coded,
    values: Float[Array, "b k s z"] | Coded,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
    size: int | None = None,
) -> Float[Array, "b t h z"]:
    """The same with keys in blocks under a running maximum and sum; blocks past the last query are not computed.

    Memory is t * size scores a head whatever s is; size None: that of block_of. The number of blocks is data dependent:
    no reverse-mode gradient.
    """

    def block(start: Int[Array, ""], size: int) -> tuple[Any, Any]:
        cut = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis=2)  # noqa: E731
        return jax.tree.map(cut, (keys, values))  # type: ignore[no-any-return]

    return attend_to_blocks(q, block, keys.shape[1], keys.shape[2], values.shape[3], starts, scale, numerics, size)


def attend_to_blocks(
    q: Float[Array, "b t h c"],
    key_block: Callable[..., tuple[Any, Any]],
    kv_heads: int,
    s: int,
    value_width: int,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
    size: int | None = None,
    seen: Bool[Array, "b t s"] | None = None,
) -> Float[Array, "b t h z"]:
    """Attention to s positions whose keys [b, k, size, c] and values [b, k, size, z] come from key_block(start, size),
    one block after another; seen: the only ones of each query.
    """
    _, total, out = partial_sums(q, key_block, kv_heads, s, value_width, starts, scale, numerics, size, seen)
    return by_query_head((out / total[..., None]).astype(q.dtype))


def partial_sums(
    q: Float[Array, "b t h c"],
    key_block: Callable[..., tuple[Any, Any]],
    kv_heads: int,
    s: int,
    value_width: int,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
    size: int | None = None,
    seen: Bool[Array, "b t s"] | None = None,
) -> tuple[Float[Array, "b k g t"], Float[Array, "b k g t"], Float[Array, "b k g t z"]]:
    """The softmax of attend_to_blocks before its division: largest score, sum of exp(score - largest), and the values
    weighted by it. Where a query sees none of the keys the sums are 0; `starts` may be negative.
    """
    t = q.shape[1]
    block = block_of(t, s, size)
    grouped = by_kv_head(q, kv_heads) * jnp.asarray(scale, q.dtype)

    def step(j, carry):
        top, total, out = carry
        block_keys, block_values = key_block(j * block, block)
        scores = products(grouped, block_keys, numerics)
        allowed = visible(starts, t, j * block + jnp.arange(block))
        if seen is not None:
            allowed &= jax.lax.dynamic_slice_in_dim(seen, j * block, block, axis=2)
        scores = jnp.where(allowed[:, None, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        new = mixture(weights, block_values, numerics)
        return new_top, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + new

    wide = jnp.dtype(numerics.accumulate)
    rows = grouped.shape[:-1]
    lowest = jnp.full(rows, jnp.finfo(wide).min, wide)  # finite: -inf less -inf is no number
    first = (lowest, jnp.zeros(rows, wide), jnp.zeros((*rows, value_width), wide))
    if size is not None and size >= s:  # asked for in one step: no loop
        return step(jnp.int32(0), first)
    used = jnp.minimum((jnp.max(starts) + t + block - 1) // block, s // block)
    return jax.lax.fori_loop(0, used, step, first)


def block_of(t: int, s: int, size: int | None = None) -> int:
    """Keys of one step of attend_to_blocks for t queries against s positions; all of them where `size` is no part."""
    wanted = min(s, size or (ONE_QUERY_BLOCK if t == 1 else KEY_BLOCK))
    return wanted if s % wanted == 0 else s


def visible(starts: Int[Array, " b"], t: int, key_positions: Int[Array, " s"]) -> Bool[Array, "b t s"]:
    """Which of these positions each of t queries may see: those up to its own."""
    query_positions = starts[:, None] + jnp.arange(t)
    return key_positions[None, None, :] <= query_positions[:, :, None]


def by_kv_head(q: Float[Array, "b t h c"], kv_heads: int) -> Float[Array, "b k g t c"]:
    """Queries in groups by the key/value head that serves them."""
    b, t, h, c = q.shape
    return q.reshape(b, t, kv_heads, h // kv_heads, c).transpose(0, 2, 3, 1, 4)


def by_query_head(out: Float[Array, "b k g t z"]) -> Float[Array, "b t h z"]:
    """The inverse, of what attention gives."""
    b, k, g, t, z = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, z)


def attention_probabilities(
    q: Float[Array, "b t h c"],
    keys: Float[Array, "b k s c"] | Coded,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
    seen: Bool[Array, "b t s"] | None = None,
) -> Float[Array, "b h t s"]:
    """What each query of each head gives to each key, for observation."""
    by_group = probabilities(by_kv_head(q, keys.shape[1]), keys, starts, scale, numerics, seen)
    b, k, g, t, s = by_group.shape
    return by_group.reshape(b, k * g, t, s)


def entropy(probabilities: Float[Array, "b h t s"]) -> Float[Array, "b h t"]:
    """Entropy in nats of what each query gives to the keys; 0 for a query that sees one key alone."""
    return jax.scipy.special.entr(probabilities).sum(axis=-1)
