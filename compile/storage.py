"""Other ways for a dense weight to lie in memory: the same bits, multiplied in another way.

A `Laid` weight is one matrix [n, k] (rows are outputs, columns inputs) in one of LAYOUTS; a `Joined` one is several
weights that are multiplied with the same input (q, k, v; gate and up) as one matrix, held by the first of them, with a
`Beside` in the place of each other. `lay_out` makes them and `plain` gives back what there was.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rzoo.models.registry import Params, abstract_weights
from rzoo.models.weights import Numerics, Storage, dense_product

PIECES = 4  # independent products of one split matrix: two for each of two cores
PIECE_BYTES = 2**20  # of a widened piece: it stays in the cache of one core
ALIGNED = 64  # rows that a padded matrix is a multiple of


@dataclass(frozen=True)
class Layout:
    """lay(matrix [n, k]) -> data; restore(data, n) gives the matrix back; multiply(data, x [..., k], numerics) -> [...,
    n] in `numerics.accumulate`, n rounded up where padded. entries(data, ids) -> rows [..., k], where they can be had
    without the whole matrix: an embedding that is the head, too, lies in these layouts alone.
    """

    lay: Callable[[Array], Any]
    restore: Callable[[Any, int], Array]
    multiply: Callable[[Any, Array, Numerics], Array]
    entries: Callable[[Any, Array], Array] | None = None


def _dot(matrix: Array, x: Array, numerics: Numerics) -> Array:
    return numerics.dot_accumulated("...k,nk->...n", x, matrix)


def _dot_transposed(matrix: Array, x: Array, numerics: Numerics) -> Array:
    return numerics.dot_accumulated("...k,kn->...n", x, matrix)


def _dot_two_rows(matrix: Array, x: Array, numerics: Numerics) -> Array:
    """One row is doubled: XLA:CPU has its fast kernels for two rows and more."""
    if math.prod(x.shape[:-1]) != 1:
        return _dot(matrix, x, numerics)
    rows = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1]))
    return _dot(matrix, rows, numerics)[:1].reshape(*x.shape[:-1], -1)


def _dot_pieces(pieces: Sequence[Array], x: Array, numerics: Numerics) -> Array:
    return jnp.concatenate([_dot(piece, x, numerics) for piece in pieces], axis=-1)


def _dot_widened(blocks: Array, x: Array, numerics: Numerics) -> Array:
    """One block [n, k] at a time is widened and multiplied: no wide copy of the whole is made."""
    parts = jax.lax.map(lambda block: _dot(block, x, numerics), blocks)
    return jnp.moveaxis(parts, 0, -2).reshape(*x.shape[:-1], -1)


def _reduce_pieces(pieces: Sequence[Array], x: Array, numerics: Numerics) -> Array:
    """One row as multiply and reduce, which fuses the widening; more rows as dots."""
    if math.prod(x.shape[:-1]) != 1:
        return _dot_pieces(pieces, x, numerics)
    wide = jnp.dtype(numerics.accumulate)
    row = x.reshape(-1).astype(numerics.compute).astype(wide)
    sums = [(piece.astype(numerics.compute).astype(wide) * row).sum(axis=1) for piece in pieces]
    return jnp.concatenate(sums).reshape(*x.shape[:-1], -1)


def _split(matrix: Array) -> tuple[Array, ...]:
    return tuple(jnp.array_split(matrix, PIECES))


def _together(pieces: Sequence[Array], n: int) -> Array:
    return jnp.concatenate(list(pieces))


def _blocks(matrix: Array) -> Array:
    n, k = matrix.shape
    most = max(1, PIECE_BYTES // (4 * k))
    rows = max(size for size in range(1, min(n, most) + 1) if n % size == 0)
    return matrix.reshape(n // rows, rows, k)


def _rows_of(matrix: Array, ids: Array) -> Array:
    return matrix[ids]


def _columns_of(matrix: Array, ids: Array) -> Array:
    return jnp.moveaxis(matrix[:, ids], 0, -1)


LAYOUTS: Mapping[str, Layout] = {
    "rows": Layout(lambda m: m, lambda m, n: m, _dot, _rows_of),
    "transposed": Layout(lambda m: m.T, lambda m, n: m.T, _dot_transposed, _columns_of),
    "two_rows": Layout(lambda m: m, lambda m, n: m, _dot_two_rows, _rows_of),
    "padded": Layout(lambda m: jnp.pad(m, ((0, -m.shape[0] % ALIGNED), (0, 0))), lambda m, n: m[:n], _dot),
    "pieces": Layout(_split, _together, _dot_pieces),
    "widened": Layout(_blocks, lambda m, n: m.reshape(n, -1), _dot_widened),
    "reduced": Layout(lambda m: (m,), _together, _reduce_pieces),
    "reduced_pieces": Layout(_split, _together, _reduce_pieces),
}


def input_axes(axes: Sequence[str]) -> int:
    """How many of a weight's last axes are summed over: all but d where the output is the model width, else one."""
    return len(axes) - 1 if axes[0] == "d" else 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Laid:
    """A dense weight of logical `shape` whose last `depth` axes are its inputs, laid out as `layout` says."""

    data: Any
    layout: str = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    depth: int = field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        """Type that the weight is held in."""
        return jax.tree.leaves(self.data)[0].dtype

    @property
    def outputs(self) -> int:
        """Rows of the matrix."""
        return math.prod(self.shape[: -self.depth])

    def dense(self) -> Array:
        """The weight as it was."""
        return LAYOUTS[self.layout].restore(self.data, self.outputs).reshape(self.shape)

    def product(self, spec: str, x: Array, numerics: Numerics) -> Array:
        """einsum of x [..., in...] with this weight; a contraction over other axes runs on the dense weight."""
        inputs = self.shape[-self.depth :]
        of_weight, out = spec.split(",")[1].split("->")
        if x.shape[-self.depth :] != inputs or any(letter in out for letter in of_weight[-self.depth :]):
            return dense_product(spec, x, self.dense(), numerics)
        lead = x.shape[: -self.depth]
        product = LAYOUTS[self.layout].multiply(self.data, x.reshape(*lead, -1), numerics)
        return product[..., : self.outputs].reshape(*lead, *self.shape[: -self.depth])

    def rows(self, ids: Array, numerics: Numerics) -> Array:
        """Entries `ids` of the first axis."""
        entries = LAYOUTS[self.layout].entries
        found = self.dense()[ids] if entries is None or len(self.shape) > 2 else entries(self.data, ids)
        return found.astype(numerics.compute)

    def entry(self, i: Array | int) -> "Laid":
        """Only matrices are laid out, and no stacks of them."""
        raise NotImplementedError("a stack of matrices is never laid out")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Beside:
    """In the place of a weight that is part of a Joined one."""

    shape: tuple[int, ...] = field(metadata={"static": True})

    def product(self, spec: str, x: Array, numerics: Numerics) -> Array:
        """Only the first of a group can multiply."""
        raise NotImplementedError("a joined weight is multiplied together with the first of its group")

    rows = entry = dense = product


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Joined:
    """Several weights with the same inputs as one Laid matrix, in the place of the first; names: those of all."""

    whole: Laid
    names: tuple[str, ...] = field(metadata={"static": True})
    shapes: tuple[tuple[int, ...], ...] = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the first."""
        return self.shapes[0]

    def contract_together(self, spec: str, x: Array, values: Sequence[Any], numerics: Numerics) -> tuple[Array, ...]:
        """The products of all, from one."""
        product = self.whole.product("...d,nd->...n", x, numerics).astype(numerics.compute)
        parts = jnp.split(product, self._borders(), axis=-1)
        return tuple(part.reshape(*x.shape[:-1], *s[:-1]) for part, s in zip(parts, self.shapes, strict=True))

    def parts(self) -> tuple[Array, ...]:
        """The weights as they were."""
        matrices = jnp.split(self.whole.dense(), self._borders())
        return tuple(matrix.reshape(s) for matrix, s in zip(matrices, self.shapes, strict=True))

    def _borders(self) -> list[int]:
        ends = [math.prod(s[:-1]) for s in self.shapes]
        return [sum(ends[: i + 1]) for i in range(len(ends) - 1)]

    def product(self, spec: str, x: Array, numerics: Numerics) -> Array:
        """The first weight alone."""
        return dense_product(spec, x, self.dense(), numerics)

    def dense(self) -> Array:
        """The first weight."""
        return self.parts()[0]

    def rows(self, ids: Array, numerics: Numerics) -> Array:
        """Entries of the first weight."""
        return self.dense()[ids].astype(numerics.compute)

    def entry(self, i: Array | int) -> "Joined":
        """Only matrices are joined, and no stacks of them."""
        raise NotImplementedError("a stack of matrices is never joined")


# Weights of one module that are multiplied with the same input.
GROUPS = (("q", "k", "v"), ("gate", "up"))


def lay_out(config: Any, params: Params, joined: Sequence[str], layouts: Mapping[str, str]) -> Params:
    """`params` with the groups whose first weight `joined` names in one matrix, and weights laid out by `layouts`.

    Both name weights by path, or by the path with {} for the layer's number. Weights that are stored in another way
    already keep it.
    """
    out, axes_of = dict(params), abstract_weights(config)
    for path in params:
        names = group_of(path, params)
        if names and _named(path, joined):
            prefix = path.rpartition(".")[0]
            weights = [params[f"{prefix}.{name}"] for name in names]
            whole = jnp.concatenate([w.reshape(-1, w.shape[-1]) for w in weights])
            laid = _laid(whole, layouts.get(_name_in(path, layouts), "rows"), 1)
            out[path] = Joined(laid, names, tuple(w.shape for w in weights))
            out |= {f"{prefix}.{name}": Beside(w.shape) for name, w in zip(names[1:], weights[1:], strict=True)}
    for path, value in out.items():
        name = _name_in(path, layouts)
        if name and not isinstance(value, Storage) and can_be_laid(config, path, layouts[name]):
            out[path] = _laid(value, layouts[name], input_axes(axes_of[path][0]))
    return out


def can_be_laid(config: Any, path: str, layout: str) -> bool:
    """Whether a weight is one matrix that is multiplied over its inputs alone: no norm, bias or stack, and none of the
    two that latent attention multiplies from either side; an embedding if it is the head, too.
    """
    axes = abstract_weights(config)[path][0]
    if path == "embed":
        return bool(config.tied) and LAYOUTS[layout].entries is not None
    return len(axes) > 1 and "e" not in axes and not path.endswith(("key_up", "value_up"))


def group_of(path: str, params: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The names of the group that the weight at `path` leads, where all are there, dense, and of one type."""
    prefix, _, name = path.rpartition(".")
    for names in GROUPS:
        values = [params.get(f"{prefix}.{other}") for other in names]
        if name == names[0] and all(v is not None and not isinstance(v, Storage) for v in values):
            return names if len({v.dtype for v in values}) == 1 else None  # type: ignore[union-attr]
    return None


def of_every_layer(path: str) -> str:
    """ "layers.7.attention.q" -> "layers.{}.attention.q"."""
    return ".".join("{}" if part.isdigit() else part for part in path.split("."))


def _named(path: str, names: Any) -> bool:
    return bool(_name_in(path, names))


def _name_in(path: str, names: Any) -> str:
    return next((name for name in (path, of_every_layer(path)) if name in names), "")


def _laid(value: Array, layout: str, depth: int) -> Laid:
    matrix = value.reshape(math.prod(value.shape[:-depth]), -1)
    return Laid(LAYOUTS[layout].lay(matrix), layout, value.shape, depth)


def plain(params: Params) -> Params:
    """The inverse of lay_out for per-layer parameters: the same names, shapes and bits as before."""
    out = dict(params)
    for path, value in params.items():
        if isinstance(value, Joined):
            prefix = path.rpartition(".")[0]
            out |= {f"{prefix}.{name}": part for name, part in zip(value.names, value.parts(), strict=True)}
        elif isinstance(value, Laid):
            out[path] = value.dense()
    return out
