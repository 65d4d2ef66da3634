"""The key/value cache: one slot a layer (None where it has no keys), a length a row.

Keys and values lie as [b, k, s, c], in which neither reading for attention nor appending needs a transpose. Rows are
padded on the right: entries at or past a row's length are rubbish that the causal mask never shows to a real query, so
a row can be reset by setting its length to 0. `s` is the capacity; it grows by buckets outside of compiled programs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coded:
    """Cached keys or values in 8 bits: codes [b, k, s, c] and float32 scales [b, k, s, 1], one for each entry."""

    codes: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the codes."""
        return self.codes.shape  # type: ignore[no-any-return]

    def dense(self) -> Float[Array, "b k s c"]:
        """The entries in float32."""
        return self.codes.astype(jnp.float32) * self.scale


def coded(entries: Float[Array, "*rows c"]) -> Coded:
    """Entries in 8 bits: the largest value of each becomes 127."""
    wide = entries.astype(jnp.float32)
    largest = jnp.abs(wide).max(axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest / 127, 1)
    return Coded(jnp.round(wide / scale).astype(jnp.int8), scale)


def like(old: Any, new: Array) -> Any:
    """New entries in the type in which a slot holds the old ones."""
    return coded(new) if isinstance(old, Coded) else new.astype(old.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slot:
    """Cached keys [b, k, s, c] and values [b, k, s, z] of one layer, arrays or Coded."""

    keys: Any
    values: Any

    def append(
        self, keys: Float[Array, "b k t c"], values: Float[Array, "b k t z"], starts: Int[Array, " b"]
    ) -> "Slot":
        """Writes t new entries of each row at its own start; starts + t must not pass the capacity."""
        return Slot(_write(self.keys, keys, starts), _write(self.values, values, starts))

    def written_back(self, new: "Slot", layer: Array, starts: Int[Array, " b"], t: int) -> "Slot":
        """The slot of a run, [l, …], with the t entries that one of its layers has appended to its own, `new`."""
        return jax.tree.map(lambda whole, part: _write_back(whole, part, layer, starts, t), self, new)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentSlot:
    """Cached latents and shared keys of one layer with latent attention, [b, 1, s, r+p]: no values per head.

    index_keys [b, 1, s, x]: of its indexer, None where it has none.
    """

    latents: Any
    index_keys: Any = None

    def append(
        self,
        latents: Float[Array, "b 1 t m"],
        starts: Int[Array, " b"],
        index_keys: Float[Array, "b 1 t x"] | None = None,
    ) -> "LatentSlot":
        """Writes t new entries of each row at its own start; starts + t must not pass the capacity."""
        own = None if index_keys is None else _write(self.index_keys, index_keys, starts)
        return LatentSlot(_write(self.latents, latents, starts), own)

    def written_back(self, new: "LatentSlot", layer: Array, starts: Int[Array, " b"], t: int) -> "LatentSlot":
        """The slot of a run, [l, …], with the t entries that one of its layers has appended to its own, `new`."""
        return jax.tree.map(lambda whole, part: _write_back(whole, part, layer, starts, t), self, new)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """All slots of a model, and how many tokens each row holds: lengths [b], int32."""

    slots: tuple[Any, ...]
    lengths: Any

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        return jax.tree.leaves(self.slots)[0].shape[-2]

    def with_lengths(self, lengths: Int[Array, " b"]) -> "Cache":
        """The same entries, counted anew: 0 frees a row, a shorter length forgets its end."""
        return replace(self, lengths=lengths)

    def grown(self, capacity: int) -> "Cache":
        """A copy with room for `capacity` tokens a row."""
        more = capacity - self.capacity
        pad = lambda a: jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, more), (0, 0)])  # noqa: E731
        return replace(self, slots=jax.tree.map(pad, self.slots))

    def taken(self, rows: Int[Array, " n"]) -> "Cache":
        """A copy of these rows, in this order; a row may be taken several times."""
        take = lambda a: jnp.take(a, rows, axis=a.ndim - 4)  # noqa: E731
        return replace(self, slots=jax.tree.map(take, self.slots), lengths=self.lengths[rows])

    def with_row(self, row: Int[Array, ""], one: "Cache") -> "Cache":
        """A copy with row `row` replaced by the only row of `one`, which has the same capacity."""
        put = lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new, row, axis=a.ndim - 4)  # noqa: E731
        return replace(
            self, slots=jax.tree.map(put, self.slots, one.slots), lengths=self.lengths.at[row].set(one.lengths[0])
        )

    def placed(self, place: Callable[[Array, str], Array]) -> "Cache":
        """The same entries, each array where `place` says for its logical axes."""
        slots = jax.tree.map(lambda a: place(a, "lbksc"[-a.ndim :]), self.slots)
        return replace(self, slots=slots, lengths=place(self.lengths, "b"))


def _write(
    old: Float[Array, "b k s c"] | Coded, new: Float[Array, "b k t c"], starts: Int[Array, " b"]
) -> Float[Array, "b k s c"] | Coded:
    return jax.tree.map(lambda whole, part: _write_array(whole, part, starts), old, like(old, new))


def _write_array(old: Array, new: Array, starts: Array) -> Array:
    if old.shape[0] == 1:  # one row: a plain in-place slice; the general form lowers to a scatter
        return jax.lax.dynamic_update_slice(old, new, (0, 0, starts[0], 0))
    return jax.vmap(lambda o, n, start: jax.lax.dynamic_update_slice(o, n, (0, start, 0)))(old, new, starts)


def _write_back(whole: Array, part: Array, layer: Array, starts: Array, t: int) -> Array:
    """Copies the t new entries of each row of one layer, part [b, k, s, c], to their place in whole [l, b, k, s, c]."""
    if part.shape[0] == 1:  # one row: plain slices; the general form lowers to a gather and a scatter
        new = jax.lax.dynamic_slice_in_dim(part, starts[0], t, axis=2)
        return jax.lax.dynamic_update_slice(whole, new[None], (layer, 0, 0, starts[0], 0))
    rows, at = jnp.arange(part.shape[0])[:, None], starts[:, None] + jnp.arange(t)
    return whole.at[layer, rows, :, at].set(part[rows, :, at])


def empty_slots(
    count: int, batch: int, heads: int, capacity: int, key_width: int, value_width: int, dtype: Any
) -> tuple:
    """`count` zeroed slots; of type int8 Coded ones."""

    def zeros(width: int) -> Any:
        shape = (batch, heads, capacity)
        plain = jnp.zeros((*shape, width), dtype)
        return Coded(plain, jnp.zeros((*shape, 1))) if plain.dtype == jnp.int8 else plain

    return tuple(Slot(zeros(key_width), zeros(value_width)) for _ in range(count))


def empty_latent_slots(
    count: int, batch: int, capacity: int, width: int, dtype: Any, index_width: int | None = None
) -> tuple:
    """`count` zeroed slots of `width` = r+p values a token, and `index_width` = x more of the indexer."""
    zeros = lambda size: jnp.zeros((batch, 1, capacity, size), dtype)  # noqa: E731
    own = lambda: None if index_width is None else zeros(index_width)  # noqa: E731
    return tuple(LatentSlot(zeros(width), own()) for _ in range(count))
