"""Products as sums: multiply and reduce in one kernel, for the single row of a decode step on a GPU.

A matrix product of one row is bound by memory, so nothing is lost without the matrix units, and XLA fuses into a sum
what it copies out in front of a product: the widening of 8-bit codes, the choice of an expert, the cache as it lies.
Compiled for an H100, a step of DeepSeek-V3's layers in FP8 reads less than half of what dots make it read.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rzoo.compile.storage import can_be_laid, lay_out
from rzoo.models.attention import by_kv_head, by_query_head, visible
from rzoo.models.cache import Coded
from rzoo.models.moe import experts_in_tiles
from rzoo.models.registry import Params
from rzoo.models.weights import Numerics, Quantized, Storage, Stored, summed_axes

MOST = 8  # tokens of experts_in_sums: an expert is read once for each token that chose it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedInSums(Quantized):
    """A Quantized weight that multiplies one row as a sum over its codes; more rows as Quantized does."""

    def product(self, spec: str, x: Array, numerics: Numerics) -> Array:
        """einsum of x with this weight, in `numerics.accumulate`."""
        depth = summed_axes(spec)
        if not depth or math.prod(x.shape[:-depth]) != 1:
            return super().product(spec, x, numerics)
        wide = jnp.dtype(numerics.accumulate)
        row = x.reshape(-1).astype(numerics.compute).astype(wide)
        matrix = self.dequantize(wide).reshape(self.codes.shape)
        return (matrix * row).sum(axis=-1).reshape(*x.shape[:-depth], *self.shape[:-depth])


def products_in_sums(config: Any, params: Params) -> Params:
    """Per-layer parameters, the same bits, with every matrix multiplied as a sum; embeddings and experts stay: look-ups
    read rows alone, and experts have a form of their own (experts_in_sums).
    """
    layouts = {path: "reduced" for path in params if can_be_laid(config, path, "reduced")}
    out = dict(params)
    for path in layouts:
        value = params[path]
        if isinstance(value, Quantized):
            out[path] = QuantizedInSums(**{field.name: getattr(value, field.name) for field in fields(value)})
    return lay_out(config, out, (), layouts)


def attend_in_sums(
    q: Float[Array, "b t h c"],
    keys: Float[Array, "b k s c"] | Coded,
    values: Float[Array, "b k s z"] | Coded,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
) -> Float[Array, "b t h z"]:
    """attend (models/attention.py) without a dot, for which XLA lays the keys of one row out anew, s last."""
    wide = jnp.dtype(numerics.accumulate)
    grouped = by_kv_head(q, keys.shape[1]).astype(numerics.compute).astype(wide)
    keys, values = (a.dense() if isinstance(a, Coded) else a for a in (keys, values))
    by_group = lambda a: a.astype(numerics.compute).astype(wide)[:, :, None, None]  # noqa: E731
    scores = (grouped[..., None, :] * by_group(keys)).sum(axis=-1) * scale
    seen = visible(starts, q.shape[1], jnp.arange(keys.shape[2]))[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return by_query_head((weights[..., None] * by_group(values)).sum(axis=-2).astype(q.dtype))


def experts_in_sums(
    x: Float[Array, "n d"],
    indices: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    gate: Stored,
    up: Stored,
    down: Stored,
    numerics: Numerics,
) -> Float[Array, "n d"]:
    """For few tokens: the chosen experts of all are read where they lie, in one kernel for gates and ups and one for
    the outputs. More than MOST tokens, and experts in storages other than arrays and Quantized, run in tiles.
    """
    values = [w.get_value() for w in (gate, up, down)]
    if len(x) > MOST or any(isinstance(v, Storage) and not isinstance(v, Quantized) for v in values):
        return experts_in_tiles(x, indices, weights, gate, up, down, numerics)
    chosen, wide = indices.reshape(-1), jnp.dtype(numerics.accumulate)
    product = lambda w, rows: (_entries(w, chosen, wide) * rows[:, None].astype(wide)).sum(axis=-1)  # noqa: E731
    rows = jnp.repeat(x.astype(numerics.compute), indices.shape[1], axis=0)
    hidden = (jax.nn.silu(product(gate, rows)) * product(up, rows)).astype(numerics.compute)
    outputs = product(down, hidden).reshape(*indices.shape, -1)
    return (outputs * weights[..., None].astype(wide)).sum(axis=1).astype(x.dtype)


def _entries(weight: Stored, chosen: Int[Array, " m"], wide: Any) -> Array:
    """Those experts of a stack, [m, …]."""
    value = weight.get_value()
    if not isinstance(value, Quantized):
        return value[chosen].astype(wide)
    offset = None if value.offset is None else value.offset[chosen]
    shape = (*chosen.shape, *value.shape[1:])
    return Quantized(value.codes[chosen], value.scale[chosen], offset, value.block, shape).dequantize(wide)
