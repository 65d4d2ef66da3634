"""Weights in the blocks of a GGUF file: the file's own bits, multiplied as they are.

A block packs 32 or 256 columns of a row into bytes: scales and minima, then codes of few bits. Sixteen rows make a
tile, in which the blocks of the same columns lie transposed: each field of all sixteen rows together, in units of the
field's width. Nothing is added but whole tiles, and `untiled` gives back the bytes of the file.

A product in XLA's form widens one piece of the weight at a time; the kernels of native.cc widen in registers alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rzoo.compile import native
from rzoo.models.registry import Params
from rzoo.models.weights import Numerics, Quantized, dense_product

TILE = 16  # rows
PIECE = 2**18  # values that the XLA form widens at a time
Fields = Sequence[Array]  # uint8 [..., bytes] each


class Kind(NamedTuple):
    """A block type. values: columns of a block. fields: (bytes, bytes of a unit) of each. read(fields) -> codes int8
    [..., values], scales and (or None) minima float32 [..., groups]: value = code * scale + minimum.
    """

    values: int
    fields: tuple[tuple[int, int], ...]
    read: Callable[[Fields], tuple[Array, Array, Array | None]]

    @property
    def nbytes(self) -> int:
        """Of one block."""
        return sum(size for size, _ in self.fields)


def _halves(packed: Array) -> Array:
    """float16 in two bytes each -> float32."""
    pairs = packed.reshape(*packed.shape[:-1], -1, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)


def _codes(packed: Array, width: int, group: int) -> Array:
    """Integers of `width` bits: the lowest of each of `group` bytes, then the next of each, and so on by group."""
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8)[:, None]
    grouped = packed.reshape(*packed.shape[:-1], -1, 1, group) >> shifts & ((1 << width) - 1)
    return grouped.reshape(*packed.shape[:-1], -1).astype(jnp.int8)


def _q4_0(fields: Fields) -> tuple[Array, Array, None]:
    return _codes(fields[1], 4, 16) - 8, _halves(fields[0]), None


def _q4_1(fields: Fields) -> tuple[Array, Array, Array]:
    return _codes(fields[2], 4, 16), _halves(fields[0]), _halves(fields[1])


def _q8_0(fields: Fields) -> tuple[Array, Array, None]:
    return fields[1].astype(jnp.int8), _halves(fields[0]), None


def _q4_k(fields: Fields) -> tuple[Array, Array, Array]:
    """Scales and minima of 6 bits in 12 bytes: eight whole ones, then the upper halves of which are in the former."""
    low, middle, high = (fields[2][..., i : i + 4] for i in (0, 4, 8))
    scales = jnp.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = jnp.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return _codes(fields[3], 4, 32), _halves(fields[0]) * scales, -_halves(fields[1]) * minima


def _q6_k(fields: Fields) -> tuple[Array, Array, None]:
    codes = _codes(fields[0], 4, 64) | _codes(fields[1], 2, 32) << 4
    return codes - 32, _halves(fields[3]) * fields[2].astype(jnp.int8), None


# In the order of kKinds in native.cc.
KINDS: Mapping[str, Kind] = {
    "Q4_0": Kind(32, ((2, 2), (16, 4)), _q4_0),
    "Q4_1": Kind(32, ((2, 2), (2, 2), (16, 4)), _q4_1),
    "Q8_0": Kind(32, ((2, 2), (32, 4)), _q8_0),
    "Q4_K": Kind(256, ((2, 2), (2, 2), (12, 1), (128, 4)), _q4_k),
    "Q6_K": Kind(256, ((128, 4), (64, 4), (16, 1), (2, 2)), _q6_k),
}


def tiled(kind: str, rows: np.ndarray) -> np.ndarray:
    """Blocks of rows as in the file, uint8 [n, bytes] -> tiles [ceil(n / 16), blocks, 16 * bytes of a block]; the rows
    that the last tile lacks are zeros.
    """
    n, nbytes = len(rows), KINDS[kind].nbytes
    whole = rows if n % TILE == 0 else np.pad(rows, ((0, -n % TILE), (0, 0)))
    blocks = whole.reshape(len(whole) // TILE, TILE, -1, nbytes)
    out = np.empty((len(blocks), blocks.shape[2], TILE * nbytes), np.uint8)
    at = 0
    for size, unit in KINDS[kind].fields:
        units = blocks[..., at : at + size].reshape(*blocks.shape[:3], size // unit, unit)
        place = out[..., TILE * at : TILE * (at + size)]
        place[...] = units.transpose(0, 2, 3, 1, 4).reshape(place.shape)
        at += size
    return out


def _fields_of(kind: str, tiles: Any) -> list[Any]:
    """Each field as [..., blocks, units, 16, bytes of a unit]."""
    out, at = [], 0
    for size, unit in KINDS[kind].fields:
        part = tiles[..., TILE * at : TILE * (at + size)]
        out.append(part.reshape(*part.shape[:-1], size // unit, TILE, unit))
        at += size
    return out


def untiled(kind: str, tiles: np.ndarray, n: int) -> np.ndarray:
    """The inverse of `tiled` for n rows."""
    parts = [
        part.transpose(0, 3, 1, 2, 4).reshape(len(tiles) * TILE, tiles.shape[1], -1) for part in _fields_of(kind, tiles)
    ]
    return np.concatenate(parts, axis=-1).reshape(len(tiles) * TILE, -1)[:n]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockQuantized:
    """A weight of logical `shape`, whose last axes, k columns in all, are its inputs, in tiles of blocks of KINDS.

    tiles: uint8 [rows / 16, k / values of a block, 16 * bytes of a block]. integer: products may round activations to 8
    bits, a scale for each 32 of them; else they are exact but for float32's rounding. It takes no gradient.
    """

    tiles: Any
    kind: str = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    integer: bool = field(default=False, metadata={"static": True})

    @classmethod
    def of_file(cls, kind: str, rows: np.ndarray, shape: tuple[int, ...], integer: bool = False) -> "BlockQuantized":
        """From the bytes of the file, uint8 [n, bytes], for a weight of this shape."""
        return cls(tiled(kind, rows), kind, shape, integer)

    @property
    def held_as(self) -> str:
        """For models.weights.held_as: its kind, and what it is multiplied with."""
        return f"{self.kind} by 8 bits" if self.integer else self.kind

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.tiles.shape)

    @property
    def columns(self) -> int:
        """Inputs: columns of the matrix."""
        return self.tiles.shape[-2] * KINDS[self.kind].values  # type: ignore[no-any-return]

    @property
    def outputs(self) -> int:
        """Rows of the matrix."""
        return math.prod(self.shape) // self.columns

    def quantized(self) -> Quantized:
        """The same numbers as codes and scales."""
        return _quantized(self.kind, self.tiles, self.outputs, self.shape)

    def dense(self) -> Array:
        """The whole weight in float32."""
        return self.quantized().dense()

    def product(self, spec: str, x: Array, numerics: Numerics) -> Array:
        """einsum of x with this weight; a contraction over other axes than its inputs runs on the dense weight."""
        if not self._takes(spec):
            return dense_product(spec, x, self.dense(), numerics)
        return multiply(x, [self], self._depth(spec), numerics)[0]

    def contract_together(self, spec: str, x: Array, values: Sequence[Any], numerics: Numerics) -> tuple[Array, ...]:
        """The products of several weights with the same x."""
        if all(isinstance(value, BlockQuantized) and value._takes(spec) for value in values):
            found = multiply(x, values, self._depth(spec), numerics)
        else:
            found = [value.product(spec, x, numerics) for value in values]
        return tuple(product.astype(numerics.compute) for product in found)

    def _depth(self, spec: str) -> int:
        """How many axes are summed over."""
        given, out = spec.split("->")
        return sum(letter not in out for letter in given.split(",")[1].replace("...", ""))

    def _takes(self, spec: str) -> bool:
        """Whether spec sums over the columns, "btd,hcd->bthc", in this order of axes."""
        given, out = spec.split("->")
        of_x, of_weight = given.split(",")
        depth = self._depth(spec)
        inner, outer = of_weight[len(of_weight) - depth :], of_weight[: len(of_weight) - depth]
        ordered = of_x.endswith(inner) and out == of_x.removesuffix(inner) + outer
        return bool(depth) and ordered and math.prod(self.shape[-depth:]) == self.columns

    def rows(self, ids: Array, numerics: Numerics) -> Array:
        """Rows of a matrix, such as an embedding: only their blocks are read."""
        row = ids.reshape(-1)
        parts = [part[row // TILE, :, :, row % TILE] for part in _fields_of(self.kind, self.tiles)]
        one = _of_parts(self.kind, parts, (*ids.shape, self.columns))
        return one.dequantize(numerics.compute)

    def entry(self, i: Array | int) -> "BlockQuantized":
        """Matrix i of a stack whose matrices are whole tiles."""
        count = len(self.tiles) // self.shape[0]
        tiles = jax.lax.dynamic_slice_in_dim(self.tiles, i * count, count)
        return replace(self, tiles=tiles, shape=self.shape[1:])


def _quantized(kind: str, tiles: Array, n: int, shape: tuple[int, ...]) -> Quantized:
    parts = []
    for part in _fields_of(kind, tiles):
        by_row = jnp.moveaxis(part, -2, 1)
        parts.append(by_row.reshape(-1, *by_row.shape[2:])[:n])
    return _of_parts(kind, parts, shape)


def _of_parts(kind: str, parts: Fields, shape: tuple[int, ...]) -> Quantized:
    """From fields [n, blocks, units, bytes of a unit]."""
    codes, scales, minima = KINDS[kind].read([part.reshape(*part.shape[:2], -1) for part in parts])
    n, values = len(codes), KINDS[kind].values
    size = values // scales.shape[-1]
    flat = lambda a: a.reshape(n, -1)  # noqa: E731
    return Quantized(flat(codes), flat(scales), None if minima is None else flat(minima), (1, size), shape)


def with_integers(params: Params, integer: bool) -> Params:
    """`params`, where kernels may, or may not, round to 8 bits what they multiply weights in blocks with."""
    return {
        path: replace(value, integer=integer) if isinstance(value, BlockQuantized) else value
        for path, value in params.items()
    }


def multiply(x: Array, weights: Sequence[BlockQuantized], depth: int, numerics: Numerics) -> list[Array]:
    """x, whose last `depth` axes are inputs, by each of the weights, in `numerics.accumulate`."""
    lead, k = x.shape[: x.ndim - depth], weights[0].columns
    flat, tiles = x.reshape(-1, k), [weight.tiles for weight in weights]
    by_xla = lambda x, tiles: [_by_pieces(x, t, w, numerics) for t, w in zip(tiles, weights, strict=True)]  # noqa: E731
    if native.unavailable() is None:
        kernel = lambda x, tiles: _differentiable(x, tiles, weights, by_xla)  # noqa: E731
        found = jax.lax.platform_dependent(flat, tiles, cpu=kernel, default=by_xla)
    else:
        found = by_xla(flat, tiles)
    wide = [product.astype(numerics.accumulate) for product in found]
    return [p.reshape(*lead, *w.shape[: len(w.shape) - depth]) for p, w in zip(wide, weights, strict=True)]


def _differentiable(x: Array, tiles: Sequence[Array], weights: Sequence[BlockQuantized], by_xla: Any) -> list[Array]:
    """by_kernel, whose derivative, the product being linear in x, is that of XLA's form."""
    kernel = jax.custom_jvp(lambda x, *tiles: by_kernel(x, tiles, weights))
    kernel.defjvp(lambda primals, tangents: (kernel(*primals), by_xla(tangents[0], primals[1:])))
    return kernel(x, *tiles)  # type: ignore[no-any-return]


def by_kernel(x: Array, tiles: Sequence[Array], weights: Sequence[BlockQuantized], suffix: str = "") -> list[Array]:
    """x [m, k] by each of the weights, whose tiles are given: float32 [m, n] each, from one call of the kernel."""
    results = [jax.ShapeDtypeStruct((len(x), weight.outputs), jnp.float32) for weight in weights]
    order = list(KINDS)
    kinds = np.array([order.index(weight.kind) for weight in weights], np.int32)
    call = jax.ffi.ffi_call(f"rzoo_multiply{suffix}", results, vmap_method="sequential")
    return list(call(jnp.asarray(x, jnp.float32), *tiles, kinds=kinds, integer=weights[0].integer))


def _by_pieces(x: Array, tiles: Array, weight: BlockQuantized, numerics: Numerics) -> Array:
    """One piece at a time is widened and multiplied; x [m, k] -> [m, n] in float32."""
    most = max(1, PIECE // (TILE * weight.columns))
    size = max(count for count in range(1, min(most, len(tiles)) + 1) if len(tiles) % count == 0)

    def piece(part: Array) -> Array:
        wide = _quantized(weight.kind, part, size * TILE, (size * TILE, weight.columns)).dequantize(numerics.compute)
        return numerics.dot_accumulated("mk,nk->mn", x, wide).astype(jnp.float32)

    found = jax.lax.map(piece, tiles.reshape(-1, size, *tiles.shape[1:]))
    return jnp.moveaxis(found, 0, 1).reshape(len(x), -1)[:, : weight.outputs]
