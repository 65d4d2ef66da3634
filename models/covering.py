"""Attention to few blocks of keys, chosen by each query until a share of its attention is covered; nothing is trained.

A summary of each block estimates the most that attention can give to it. Blocks are read in the order of the estimates,
some at a time, until what was read outweighs the estimates of the rest: attention read / (read + rest) >= share in all
query heads of a key/value head. With the estimate "bound" (least and greatest value of each channel; Quest, 2024) that
is a guarantee, but on SmolLM2 it reads everything; with "spread" (mean and variance of each channel) it is a guess that
holds there: at share 0.95, 69 % of the keys of positions 256 to 511 at 0.0014 nats a token. The query's own block comes
first, then the row's first one, to which models give much for its place alone. A query's choice depends
on nothing but its own row. Arguments and results are those of attention.py.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rzoo.core import RzooError
from rzoo.models.attention import by_kv_head, by_query_head, visible
from rzoo.models.cache import Coded
from rzoo.models.latent import absorbed_queries
from rzoo.models.weights import Numerics, Stored

AT_A_TIME = 4  # blocks that are read before coverage is looked at again


def upper_bounds(
    grouped: Float[Array, "b k g t c"], blocks: Float[Array, "b k n size c"], numerics: Numerics
) -> Float[Array, "b k g t n"]:
    """No product of the query with a key of the block is larger."""
    low, high = blocks.min(axis=3), blocks.max(axis=3)
    of = lambda q, keys: numerics.dot_accumulated("bkgtc,bknc->bkgtn", q, keys)  # noqa: E731
    return of(jnp.maximum(grouped, 0), high) + of(jnp.minimum(grouped, 0), low)


def spreads(
    grouped: Float[Array, "b k g t c"], blocks: Float[Array, "b k n size c"], numerics: Numerics
) -> Float[Array, "b k g t n"]:
    """The mean product and half its variance, channel by channel: of normally distributed keys, the logarithm of the
    mean of exp(product).
    """
    mean = numerics.dot_accumulated("bkgtc,bknc->bkgtn", grouped, blocks.mean(axis=3))
    return mean + numerics.dot_accumulated("bkgtc,bknc->bkgtn", jnp.square(grouped), blocks.var(axis=3)) / 2


ESTIMATES = {"bound": upper_bounds, "spread": spreads}


@dataclass(frozen=True, kw_only=True)
class AttendCovering:
    """share: of each query's attention, 0 to 1. size: keys of a block. most: blocks that a query may read,
    in whole rounds of AT_A_TIME (None: all).

    Several queries at once are computed from all keys, the rest masked out: the reference for the single query of a
    step of decode, which gathers the chosen blocks alone and reads all keys once for the summaries.
    """

    share: float
    size: int = 64
    most: int | None = None
    estimate: str = "spread"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise RzooError(f"share ({self.share}) must be above 0 and at most 1", field="share", value=self.share)
        for name in ("size", "most"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RzooError(f"{name} ({value}) must be at least 1", field=name, value=value)
        if self.estimate not in ESTIMATES:
            words = f"estimate ({self.estimate}) is unknown; known: {', '.join(ESTIMATES)}"
            raise RzooError(words, field="estimate", value=self.estimate)

    def __call__(
        self,
        q: Float[Array, "b t h c"],
        keys: Float[Array, "b k s c"] | Coded,
        values: Float[Array, "b k s z"] | Coded,
        starts: Int[Array, " b"],
        scale: float,
        numerics: Numerics,
    ) -> Float[Array, "b t h z"]:
        run = self.gathered if q.shape[1] == 1 else self.masked
        return run(q, keys, values, starts, scale, numerics)[0]

    def masked(
        self, q: Array, keys: Any, values: Any, starts: Array, scale: float, numerics: Numerics
    ) -> tuple[Float[Array, "b t h z"], Int[Array, "b k t"]]:
        """The reference, and how many keys each query reads."""
        grouped, of_keys, of_values = by_kv_head(q, keys.shape[1]), self._blocks(keys), self._blocks(values)
        ranks, estimates = self._ranked(grouped, of_keys, starts, scale, numerics)
        keys, values = (a.reshape(*a.shape[:2], -1, a.shape[-1]) for a in (of_keys, of_values))
        seen = visible(starts, q.shape[1], jnp.arange(keys.shape[2]))[:, None, None]
        scores = numerics.dot_accumulated("bkgtc,bksc->bkgts", grouped, keys) * scale
        scores = jnp.where(seen, scores, -jnp.inf)
        read = jax.nn.logsumexp(scores.reshape(*scores.shape[:-1], -1, self.size), axis=-1)
        in_order = jnp.take_along_axis(read, ranks[:, :, None], axis=-1, mode="fill", fill_value=-jnp.inf)
        enough = self._enough(in_order, estimates)
        chosen = jnp.argsort(ranks, axis=-1)[..., : read.shape[-1]] < enough[..., None]
        allowed = seen & jnp.repeat(chosen, self.size, axis=-1)[:, :, None]
        weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
        return by_query_head(numerics.dot("bkgts,bksz->bkgtz", weights, values)), allowed[:, :, 0].sum(-1)

    def gathered(
        self, q: Array, keys: Any, values: Any, starts: Array, scale: float, numerics: Numerics
    ) -> tuple[Float[Array, "b 1 h z"], Int[Array, "b k 1"]]:
        """One query a row: only the chosen blocks are read, until every row and key/value head has enough."""
        grouped, of_keys, of_values = by_kv_head(q, keys.shape[1]), self._blocks(keys), self._blocks(values)
        ranks, estimates = self._ranked(grouped, of_keys, starts, scale, numerics)
        rest = _log_rest(estimates)[..., AT_A_TIME - 1 :: AT_A_TIME]
        last, wide = (
            jnp.minimum(self._rounds(ranks.shape[-1]), jnp.max(starts) // self.size // AT_A_TIME + 1),
            jnp.float32,
        )

        def unfinished(carry):
            i, live, *_ = carry
            return (i < last) & jnp.any(live)

        def step(carry):
            i, live, top, total, out, count = carry
            ids = jax.lax.dynamic_slice_in_dim(ranks[:, :, 0], i * AT_A_TIME, AT_A_TIME, axis=-1)
            pick = lambda a: jnp.take_along_axis(a, ids[..., None, None], axis=2, mode="clip")  # noqa: E731
            seen = ids[..., None] * self.size + jnp.arange(self.size) <= starts[:, None, None, None]
            seen = (seen & live[..., None, None]).reshape(*live.shape, -1)
            scores = numerics.dot_accumulated("bkgc,bknxc->bkgnx", grouped[:, :, :, 0], pick(of_keys)) * scale
            scores = jnp.where(seen[:, :, None], scores.reshape(*scores.shape[:3], -1), -jnp.inf)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            picked = pick(of_values).reshape(*live.shape, seen.shape[-1], -1)
            out = out * shrink[..., None] + numerics.dot_accumulated("bkgs,bksz->bkgz", weights, picked)
            total = total * shrink + weights.sum(axis=-1)
            left = jax.lax.dynamic_index_in_dim(rest[:, :, :, 0], i, axis=-1, keepdims=False)
            done = (total >= self.share * (total + jnp.exp(left - new_top))).all(axis=2)
            return i + 1, live & ~done, new_top, total, out, count + seen.sum(-1)

        b, k, g, _, _ = grouped.shape
        zeros = jnp.zeros((b, k, g), wide)
        sums = (zeros + jnp.finfo(wide).min, zeros, jnp.zeros((b, k, g, values.shape[-1]), wide))
        first = (jnp.int32(0), jnp.ones((b, k), bool), *sums, jnp.zeros((b, k), jnp.int32))
        _, _, _, total, out, count = jax.lax.while_loop(unfinished, step, first)
        mixed = (out / total[..., None]).astype(numerics.compute)[:, :, :, None]
        return by_query_head(mixed), count[..., None]

    def touched(
        self, q: Array, keys: Any, values: Any, starts: Array, scale: float, numerics: Numerics
    ) -> Int[Array, "b k t"]:
        """How many keys each query reads, for observation."""
        return (self.gathered if q.shape[1] == 1 else self.masked)(q, keys, values, starts, scale, numerics)[1]

    def _blocks(self, a: Float[Array, "b k s c"] | Coded) -> Float[Array, "b k n size c"]:
        """Keys or values in blocks, the last one filled up."""
        a = a.dense() if isinstance(a, Coded) else a
        whole = jnp.pad(a, ((0, 0), (0, 0), (0, -a.shape[2] % self.size), (0, 0)))
        return whole.reshape(*a.shape[:2], -1, self.size, a.shape[-1])

    def _rounds(self, blocks: int) -> int:
        """How many times blocks may be read."""
        return -(-min(self.most or blocks, blocks) // AT_A_TIME)

    def _ranked(
        self, grouped: Array, blocks: Array, starts: Array, scale: float, numerics: Numerics
    ) -> tuple[Int[Array, "b k t n"], Float[Array, "b k g t n"]]:
        """Blocks in the order of reading, and in this order the logarithm of what attention may give to each; both
        filled up to whole rounds with blocks that do not exist.
        """
        t, n = grouped.shape[3], blocks.shape[2]
        own = (starts[:, None] + jnp.arange(t))[:, None, :, None] // self.size
        past = (jnp.arange(n) > own)[:, :, None]
        scaled = grouped * jnp.asarray(scale, grouped.dtype)
        logs = ESTIMATES[self.estimate](scaled, blocks, numerics) + jnp.log(float(self.size))
        logs = jnp.where(past, -jnp.inf, logs)
        shares = (logs - jax.nn.logsumexp(logs, axis=-1, keepdims=True)).max(axis=2)
        shares = shares.at[..., 0].set(1.0)  # logarithms of shares are at most 0
        _, ranks = jax.lax.top_k(jnp.where(jnp.arange(n) == own, jnp.inf, shares), n)
        logs = jnp.take_along_axis(logs, ranks[:, :, None], axis=-1)
        more = -n % AT_A_TIME
        fill = lambda a, value: jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, more)], constant_values=value)  # noqa: E731
        return fill(ranks, n), fill(logs, -jnp.inf)

    def _enough(self, read: Float[Array, "b k g t n"], estimates: Float[Array, "b k g t n"]) -> Int[Array, "b k t"]:
        """How many blocks of the order cover the share in all heads, in whole rounds; read: what each block gets."""
        total = jax.lax.cumlogsumexp(read, axis=read.ndim - 1)
        left = jnp.exp(_log_rest(estimates) - total)
        done = (self.share * (1.0 + left) <= 1.0).all(axis=2)[..., AT_A_TIME - 1 :: AT_A_TIME]
        rounds = self._rounds(estimates.shape[-1])
        first: Bool[Array, "b k t"] = jnp.argmax(done, axis=-1) + 1
        return jnp.minimum(jnp.where(done.any(axis=-1), first, rounds), rounds) * AT_A_TIME


def _log_rest(estimates: Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
    """After each block of an order, the logarithm of the sum of those that follow it."""
    sums = jax.lax.cumlogsumexp(estimates, axis=estimates.ndim - 1, reverse=True)
    return jnp.concatenate([sums[..., 1:], jnp.full_like(sums[..., :1], -jnp.inf)], axis=-1)


@dataclass(frozen=True)
class LatentAttendCovering:
    """The same over latents: one key/value head that all query heads share. Arguments as in latent.py."""

    form: AttendCovering

    def __call__(
        self,
        q: Float[Array, "b t h w"],
        latents: Float[Array, "b 1 s m"],
        key_up: Stored,
        value_up: Stored,
        starts: Int[Array, " b"],
        scale: float,
        numerics: Numerics,
    ) -> Float[Array, "b t h z"]:
        mixed = self.form(absorbed_queries(q, key_up, numerics), latents, latents, starts, scale, numerics)
        return value_up.contract("bthr,hzr->bthz", mixed[..., : value_up.shape[-1]], numerics)

    def touched(
        self,
        q: Array,
        latents: Array,
        key_up: Stored,
        value_up: Stored,
        starts: Array,
        scale: float,
        numerics: Numerics,
    ) -> Int[Array, "b 1 t"]:
        """How many latents each query reads, for observation."""
        return self.form.touched(absorbed_queries(q, key_up, numerics), latents, latents, starts, scale, numerics)
