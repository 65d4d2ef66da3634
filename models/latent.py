"""Multi-head latent attention: keys and values of all heads are made from one small latent vector a token.

Source: DeepSeek-V2 (2024), section 2.1; DeepSeek-V3 (2024), section 2.1.1. The cache holds `latents`, [b, 1, s, m] with
m = r+p: r values of the normed latent, then p of a rotated key that all heads share. A head's key is [key_up @ latent |
shared key], w = c+p wide, and its value value_up @ latent. All forms below take the same arguments and give [b, t, h,
z]; queries [b, t, h, w] stand at `starts` and see the positions up to their own, as in attention.py.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rzoo.models.attention import attend, attend_in_blocks, attend_to_blocks, attention_probabilities
from rzoo.models.rope import Rope, YarnRope
from rzoo.models.weights import Numerics, Stored


def softmax_scale(rope: Rope, key_width: int) -> float:
    """key_width^-0.5 of the expanded key (c+p), times what YaRN adds to attention."""
    return key_width**-0.5 * (rope.softmax_factor if isinstance(rope, YarnRope) else 1.0)


def attend_naive(
    q: Float[Array, "b t h w"],
    latents: Float[Array, "b 1 s m"],
    key_up: Stored,
    value_up: Stored,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
) -> Float[Array, "b t h z"]:
    """The reference: keys and values of every head, then ordinary attention."""
    keys, values = expanded(latents, key_up, value_up, numerics)
    return attend(q, keys, values, starts, scale, numerics)


def attend_naive_in_blocks(
    q: Float[Array, "b t h w"],
    latents: Float[Array, "b 1 s m"],
    key_up: Stored,
    value_up: Stored,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
) -> Float[Array, "b t h z"]:
    """The same, a block of keys and values expanded at a time: memory does not grow with s. No reverse gradient."""
    heads, value_width, _ = value_up.shape
    block = expanded_block(latents, key_up, value_up, numerics)
    return attend_to_blocks(q, block, heads, latents.shape[2], value_width, starts, scale, numerics)


def attend_absorbed(
    q: Float[Array, "b t h w"],
    latents: Float[Array, "b 1 s m"],
    key_up: Stored,
    value_up: Stored,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
) -> Float[Array, "b t h z"]:
    """key_up goes into the queries and value_up into the output, so that attention runs on the latents themselves.

    One key/value head of width r+p serves all query heads. The p values of the shared key ride along in the weighted
    sum and are dropped after it: cutting them off first would copy the cache.
    """
    latent_q = absorbed_queries(q, key_up, numerics)
    mixed = attend(latent_q, latents, latents, starts, scale, numerics)
    return value_up.contract("bthr,hzr->bthz", mixed[..., : value_up.shape[-1]], numerics)


def attend_absorbed_in_blocks(
    q: Float[Array, "b t h w"],
    latents: Float[Array, "b 1 s m"],
    key_up: Stored,
    value_up: Stored,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
) -> Float[Array, "b t h z"]:
    """The same; blocks of latents past the last query are not read. No reverse gradient."""
    latent_q = absorbed_queries(q, key_up, numerics)
    mixed = attend_in_blocks(latent_q, latents, latents, starts, scale, numerics)
    return value_up.contract("bthr,hzr->bthz", mixed[..., : value_up.shape[-1]], numerics)


def absorbed_queries(q: Float[Array, "b t h w"], key_up: Stored, numerics: Numerics) -> Float[Array, "b t h m"]:
    """Queries that meet the latents themselves."""
    nope = key_up.shape[1]
    return jnp.concatenate([key_up.contract("bthc,hcr->bthr", q[..., :nope], numerics), q[..., nope:]], axis=-1)


def expanded(
    latents: Float[Array, "b 1 s m"], key_up: Stored, value_up: Stored, numerics: Numerics
) -> tuple[Float[Array, "b h s w"], Float[Array, "b h s z"]]:
    """Keys and values of every head."""
    heads, _, rank = key_up.shape
    latent, shared_key = latents[:, 0, :, :rank], latents[..., rank:].astype(numerics.compute)
    keys = key_up.contract("bsr,hcr->bhsc", latent, numerics)
    b, _, s, p = shared_key.shape
    keys = jnp.concatenate([keys, jnp.broadcast_to(shared_key, (b, heads, s, p))], axis=-1)
    return keys, value_up.contract("bsr,hzr->bhsz", latent, numerics)


def expanded_block(
    latents: Float[Array, "b 1 s m"], key_up: Stored, value_up: Stored, numerics: Numerics
) -> Callable[..., tuple[Array, Array]]:
    """(start, size) -> keys and values of that block of positions."""

    def block(start: Int[Array, ""], size: int) -> tuple[Array, Array]:
        part = jax.lax.dynamic_slice_in_dim(latents, start, size, axis=2)
        return expanded(part, key_up, value_up, numerics)

    return block


def latent_probabilities(
    q: Float[Array, "b t h w"],
    latents: Float[Array, "b 1 s m"],
    key_up: Stored,
    value_up: Stored,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
    seen: Bool[Array, "b t s"] | None = None,
) -> Float[Array, "b h t s"]:
    """What each query of each head gives to each token, for observation."""
    keys, _ = expanded(latents, key_up, value_up, numerics)
    return attention_probabilities(q, keys, starts, scale, numerics, seen)
