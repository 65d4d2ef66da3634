"""Weights: the logical axes of each, and how it is stored.

A module makes a weight with `weight("hcd", shape, rngs)` and uses it by `contract`, `rows` and `dense`. It never asks
how the numbers are stored: that is the type of the weight's value, a plain array or a storage object such as
`Quantized`. Letters of axes: rzoo.core. Matrices keep the order of checkpoint files, [out..., in]: nothing is
transposed on load, and CPU dots read that order fastest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

PIECE = 2**20  # values of a Quantized weight that are wide at a time: they stay in a cache


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The types a program computes in, for the whole model; rzoo.compile.precision makes one from a policy.

    compute: activations and both sides of every dot. accumulate: sums of dots and softmax. precision: what each dot
    asks of the hardware for float32 inputs (HIGHEST forbids TF32 and bfloat16 passes). cache: cached keys and values.
    """

    compute: str = "float32"
    accumulate: str = "float32"
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
    cache: str = "float32"

    def dot(self, spec: str, *operands: Array) -> Array:
        """jnp.einsum in these types; the result is in `compute`."""
        return self.dot_accumulated(spec, *operands).astype(self.compute)

    def dot_accumulated(self, spec: str, *operands: Array) -> Array:
        """The same with the result left in `accumulate`: logits, attention scores."""
        cast = [o.astype(self.compute) for o in operands]
        return jnp.einsum(spec, *cast, precision=self.precision, preferred_element_type=jnp.dtype(self.accumulate))


@runtime_checkable
class Storage(Protocol):
    """What a weight's value is when it is no plain array: a pytree of arrays that knows its logical shape."""

    shape: tuple[int, ...]

    def product(self, spec: str, x: Array, numerics: Numerics) -> Array:
        """einsum of x with this weight, in `numerics.accumulate`."""

    def rows(self, ids: Array, numerics: Numerics) -> Array:
        """Entries `ids` of the first logical axis."""

    def dense(self) -> Array:
        """The whole weight as one array."""

    def entry(self, i: Array | int) -> "Storage":
        """Entry i of the first logical axis, e.g. one of stacked experts, in the same storage."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """Low-precision codes in blocks, each block with a scale: value = codes * scale + offset.

    codes [m, n]: integers or float8 in the flattened order of the file. scale, offset (or None) [ceil(m/bm),
    ceil(n/bn)] for block = (bm, bn); the last block of an axis may be partial (DeepSeek's 576 rows in blocks of 128).
    Matrices with blocks of their own may be stacked: codes [e, m, n]. shape: the logical shape, which flattens to that
    of codes. activations: "int8" where products round their inputs to codes, too, each row and block by its own
    largest value. It is split over devices on block borders only, and takes no gradient.
    """

    codes: Any
    scale: Any
    offset: Any
    block: tuple[int, int] = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    activations: str | None = field(default=None, metadata={"static": True})

    def dequantize(self, dtype: Any = "float32") -> Array:
        """The dense weight in its logical shape; the arithmetic is float32."""
        values = self.codes.astype(jnp.float32) * _spread(self.scale, self.block, self.codes.shape)
        if self.offset is not None:
            values = values + _spread(self.offset, self.block, self.codes.shape)
        return values.astype(dtype).reshape(self.shape)

    def dense(self) -> Array:
        """The whole weight in float32."""
        return self.dequantize()

    def product(self, spec: str, x: Array, numerics: Numerics) -> Array:
        """Products of the codes block by block, which the scales then multiply: compilers for GPUs widen codes within
        a dot, where no wide copy of the weight is made. The reference, dequantized first, serves all other einsums.
        """
        depth, whole = summed_axes(spec), self.codes.ndim == 2 and self.codes.shape[1] % self.block[1] == 0
        if whole and depth and math.prod(self.shape[-depth:]) == self.codes.shape[1]:
            lead = x.shape[:-depth]
            return self._rows_times(x.reshape(*lead, -1), numerics).reshape(*lead, *self.shape[:-depth])
        if whole and not depth and self.shape[-1] == self.codes.shape[1] and _sums_rows(spec):
            return self._summed_rows(spec, x, numerics)
        return dense_product(spec, x, self.dequantize(numerics.compute), numerics)

    def _rows_times(self, x: Array, numerics: Numerics) -> Array:
        """x [..., n] -> [..., m]: sums over the blocks apart while these are few beside the weight, else in pieces; for
        several rows XLA:GPU would copy codes of 4 bits, wide and transposed.
        """
        (m, n), count = self.codes.shape, math.prod(x.shape[:-1])
        apart = count == 1 or self.codes.dtype not in (jnp.int4, jnp.int2)
        few = (apart and 4 * count <= self.block[1]) or n == self.block[1]
        if not few and self.activations is None:
            return self._in_pieces(x, numerics)
        blocks = x.reshape(*x.shape[:-1], n // self.block[1], self.block[1])
        sums = self._sums(blocks, self.codes.reshape(m, -1, self.block[1]), numerics)
        out = (sums * self._of_rows(self.scale).T).sum(axis=-2)
        if self.offset is not None:
            totals = blocks.astype(numerics.accumulate).sum(axis=-1)
            out = out + jnp.einsum("...b,mb->...m", totals, self._of_rows(self.offset), precision=numerics.precision)
        return out.astype(numerics.accumulate)

    def _in_pieces(self, x: Array, numerics: Numerics) -> Array:
        """The same with a piece of the weight dequantized at a time: rows i, i + count, … so that each device of a mesh
        has its share of every piece.
        """
        m, n = self.codes.shape
        count = next(c for c in range(1, m + 1) if (m % c == 0 and m // c * n <= PIECE) or c == m)
        parts = self.codes, self._of_rows(self.scale), None if self.offset is None else self._of_rows(self.offset)
        by_piece = jax.tree.map(lambda a: a.reshape(m // count, count, -1), parts)

        def piece(i: Array) -> Array:
            take = lambda a: jax.lax.dynamic_index_in_dim(a, i, axis=1, keepdims=False)  # noqa: E731
            codes, scale, offset = jax.tree.map(take, by_piece)
            own = Quantized(codes, scale, offset, (1, self.block[1]), (m // count, n))
            return numerics.dot_accumulated("...n,mn->...m", x, own.dequantize(numerics.compute))

        out = jax.lax.map(piece, jnp.arange(count))
        return jnp.moveaxis(out, 0, -1).reshape(*x.shape[:-1], m)

    def _sums(self, x: Array, codes: Array, numerics: Numerics) -> Array:
        """x [..., b, w] and codes [m, b, w] -> [..., b, m], the blocks apart."""
        if self.activations is None:
            # Else XLA:GPU joins products of one input (q, k, v), for which it copies the codes, wide and transposed.
            own = jax.lax.optimization_barrier(x) if x.shape[-2] > 1 else x
            return numerics.dot_accumulated("...bw,mbw->...bm", own, codes)
        largest = jnp.abs(x.astype(jnp.float32)).max(axis=-1, keepdims=True)
        scale = jnp.where(largest > 0, largest / 127, 1)
        rounded = jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8)
        sums = jnp.einsum("...bw,mbw->...bm", rounded, codes.astype(jnp.int8), preferred_element_type=jnp.int32)
        return sums * scale

    def _of_rows(self, per_block: Array) -> Array:
        """[ceil(m/bm), b] -> [m, b] in float32."""
        return jnp.repeat(per_block.astype(jnp.float32), self.block[0], axis=0)[: self.codes.shape[0]]

    def _summed_rows(self, spec: str, x: Array, numerics: Numerics) -> Array:
        """An einsum such as "bthc,hcr->bthr", over rows of codes: the scales multiply x, a copy for each block."""
        given, out = spec.split("->")
        of_x, of_weight = given.split(",")
        rows, wide = of_weight[:-1], (*self.shape[:-1], -1)
        each = lambda per_block: jnp.einsum(  # noqa: E731
            f"{of_x},{rows}B->{of_x}B", x.astype(jnp.float32), self._of_rows(per_block).reshape(wide)
        )
        codes = self.codes.reshape(*wide, self.block[1])
        sums = numerics.dot_accumulated(f"{of_x}B,{rows}BW->{out[:-1]}BW", each(self.scale), codes)
        if self.offset is not None:
            gone = tuple(i for i, letter in enumerate(of_x) if letter not in out)
            sums = sums + each(self.offset).sum(axis=gone)[..., None]
        return sums.reshape(*sums.shape[:-2], -1)

    def rows(self, ids: Array, numerics: Numerics) -> Array:
        """Rows of a matrix, such as an embedding: only their codes and scales are read."""
        row, width = ids.reshape(-1), self.codes.shape[1]
        of_row = Quantized(
            codes=self.codes[row],
            scale=self.scale[row // self.block[0]],
            offset=None if self.offset is None else self.offset[row // self.block[0]],
            block=(1, self.block[1]),
            shape=(*ids.shape, width),
        )
        return of_row.dequantize(numerics.compute)

    def entry(self, i: Array | int) -> "Quantized":
        """Matrix i of a stack: its codes and scales alone."""
        take = lambda a: None if a is None else jax.lax.dynamic_index_in_dim(a, i, keepdims=False)  # noqa: E731
        codes, scale, offset = take(self.codes), take(self.scale), take(self.offset)
        return replace(self, codes=codes, scale=scale, offset=offset, shape=self.shape[1:])


def held_as(value: Any) -> str:
    """How a weight is stored, in words that differ where programs do: its type, with the blocks of a Quantized one."""
    if isinstance(value, Quantized):
        both = " for both sides" if value.activations else ""
        return f"{value.codes.dtype.name}{both} in blocks of {value.block[0]}x{value.block[1]}"
    return str(getattr(value, "held_as", getattr(value, "dtype", type(value).__name__)))


def _sums_rows(spec: str) -> bool:
    """Whether an einsum is x [rows...] with a weight [rows..., w] to [kept rows..., w]."""
    given, out = spec.split("->")
    of_x, of_weight = given.split(",")
    kept = "".join(letter for letter in of_x if letter in out)
    return set(of_weight[:-1]) <= set(of_x) and of_weight[-1] not in of_x and out == kept + of_weight[-1]


def _spread(per_block: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """One value per block -> one per element: each repeated over its block, the partial last blocks cut."""
    rows = jnp.repeat(per_block.astype(jnp.float32), block[0], axis=-2)[..., : shape[-2], :]
    return jnp.repeat(rows, block[1], axis=-1)[..., : shape[-1]]


def dense_product(spec: str, x: Array, weight: Array, numerics: Numerics) -> Array:
    """einsum of x [rows..., in...] and a weight [out..., in...] as a product of matrices, in `numerics.accumulate`.

    Head and head width contracted as two axes make XLA:CPU transpose the weight at every call; merged into one axis, it
    is read where it lies.
    """
    depth = summed_axes(spec)
    if not depth:
        return numerics.dot_accumulated(spec, x, weight)  # a letter of both that is kept, or another order
    matrix = weight.reshape(math.prod(weight.shape[:-depth]), -1)
    product = numerics.dot_accumulated("...k,nk->...n", x.reshape(*x.shape[:-depth], -1), matrix)
    return product.reshape(*x.shape[:-depth], *weight.shape[:-depth])


def summed_axes(spec: str) -> int:
    """How many last axes of both x [rows..., in...] and a weight [out..., in...] an einsum to [rows..., out...] sums
    over; 0 where it is of another kind.
    """
    given, out = spec.split("->")
    of_x, of_weight = given.split(",")
    inner = "".join(letter for letter in of_weight if letter not in out)
    rows, outer = of_x.removesuffix(inner), of_weight.removesuffix(inner)
    return len(inner) if (rows + inner, outer + inner, rows + outer) == (of_x, of_weight, out) else 0


class Stored(nnx.Variable):
    """What the weights of a module answer, whatever Variable type and storage they have."""

    def contract(self, spec: str, x: Array, numerics: Numerics) -> Array:
        """einsum(spec, x, this weight), e.g. "btd,hcd->bthc"; accumulated and returned as `numerics` says."""
        return self._product(spec, x, numerics).astype(numerics.compute)

    def scores(self, x: Array, numerics: Numerics) -> Array:
        """x [..., d] against every row of a [v, d] table: logits, in float32 (the head, or a tied embedding)."""
        return self._product("...d,vd->...v", x, numerics).astype(jnp.float32)

    def _product(self, spec: str, x: Array, numerics: Numerics) -> Array:
        value = self.get_value()
        if isinstance(value, Storage):
            return value.product(spec, x, numerics)
        return dense_product(spec, x, value, numerics)

    def contract_entry(self, i: Array, spec: str, x: Array, numerics: Numerics) -> Array:
        """einsum of x with entry i of the first axis (one of stacked experts); the other entries are not read."""
        value = self.get_value()
        if isinstance(value, Storage):
            return value.entry(i).product(spec, x, numerics).astype(numerics.compute)
        entry = jax.lax.dynamic_index_in_dim(value, i, keepdims=False)
        return dense_product(spec, x, entry, numerics).astype(numerics.compute)

    def rows(self, ids: Array, numerics: Numerics) -> Array:
        """Entries `ids` of the first axis (embedding look-up), in `numerics.compute`."""
        value = self.get_value()
        if isinstance(value, Storage):
            return value.rows(ids, numerics)
        if ids.size == 1:  # XLA turns a look-up of one row into a slice, for which a split table is gathered whole
            return value[jnp.stack([ids, ids])][0].astype(numerics.compute)
        return value[ids].astype(numerics.compute)

    def dense(self) -> Array:
        """The whole weight as one array: norm scales, biases."""
        value = self.get_value()
        return value.dense() if isinstance(value, Storage) else value


class Weight(Stored, nnx.Param):
    """A trainable weight: a dense array."""


class FrozenWeight(Stored):
    """A weight in a storage that takes no gradient; nnx.grad and optimizers over nnx.Param skip it."""


class SelectionBias(Stored):
    """A router's bias per expert: float32 whatever the other weights are held in (bfloat16 merges its values), moved by
    the load that it causes and by no gradient, so it is no nnx.Param.
    """


def contract_together(spec: str, x: Array, weights: Sequence[Stored], numerics: Numerics) -> tuple[Array, ...]:
    """Several weights contracted with the same x (q, k, v; gate and up): the place where a fused storage can answer
    once.

    spec names the out axes of each weight in one letter pattern, e.g. "btd,hcd->bthc" for q [h,c,d], k and v [k,c,d].
    """
    first = weights[0].get_value()
    if hasattr(first, "contract_together"):
        return first.contract_together(spec, x, [w.get_value() for w in weights], numerics)
    return tuple(w.contract(spec, x, numerics) for w in weights)


def weight(axes: str, shape: Sequence[int], rngs: nnx.Rngs | None, *, scale: float | None = None) -> Weight:
    """A new weight with logical axes such as "hcd" (one letter an axis), drawn from N(0, scale^2).

    scale None: 1/sqrt(last axis), which keeps activations at unit size for [out..., in]; 0 gives zeros. rngs None: the
    shape alone, nothing is drawn or allocated. The axes are Flax's own metadata: `nnx.get_named_sharding` under
    `nnx.logical_axis_rules` maps them to a mesh.
    """
    deviation = shape[-1] ** -0.5 if scale is None else scale
    return _new(axes, shape, rngs, lambda key: deviation * jax.random.normal(key, tuple(shape), jnp.float32))


def ones(axes: str, shape: Sequence[int], rngs: nnx.Rngs | None) -> Weight:
    """A weight of ones: the scale of a norm. rngs None: the shape alone."""
    return _new(axes, shape, rngs, lambda _: jnp.ones(tuple(shape), jnp.float32))


def _new(axes: str, shape: Sequence[int], rngs: nnx.Rngs | None, draw: Callable[[Array], Array]) -> Weight:
    if len(axes) != len(shape):
        raise ValueError(f"axes ({axes}) must name each dimension of shape {tuple(shape)}")
    value = jax.ShapeDtypeStruct(tuple(shape), jnp.float32) if rngs is None else draw(rngs.params())
    return Weight(value, out_sharding=tuple(axes), eager_sharding=False)


def selection_bias(experts: int, rngs: nnx.Rngs | None) -> SelectionBias:
    """A new router's bias, zero for every expert. rngs None: the shape alone."""
    shape = jax.ShapeDtypeStruct((experts,), jnp.float32)
    return SelectionBias(shape if rngs is None else jnp.zeros(experts), out_sharding=("e",), eager_sharding=False)
