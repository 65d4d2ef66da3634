"""Where arrays lie on a mesh, by their logical axes: the function that models call as `Forms.place`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from rzoo.core import RzooError
from rzoo.models.weights import Quantized
from rzoo.sharding.mesh import sizes_of
from rzoo.sharding.rules import Axes, Rules, Table


@dataclass(frozen=True)
class Placement:
    """A mesh and the rules by which arrays lie on it. Hashable, so that programs can be kept by it. An abstract mesh
    serves shapes alone.
    """

    mesh: Any
    rules: Rules

    def __call__(self, x: Any, axes: str) -> Any:
        """Within a program: x, an activation or a weight in use, where its axes say. Outside, x as it is."""
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
            return x
        return jax.lax.with_sharding_constraint(x, self.shardings(self.parts(x, axes)))

    def of(self, path: str) -> "Placement":
        """Where a weight lies."""
        return self

    def axes_of(self, letter: str) -> Axes:
        """The mesh axes that split an activation's axis."""
        return next((on for c, on in self.rules.activations if c == letter), None)

    def spec(self, axes: Sequence[str], shape: Sequence[int]) -> PartitionSpec:
        """The split of an activation or of a weight in use. What does not divide, a batch of one say, stays whole."""
        return self._spec(self.rules.activations, axes, shape)

    def parts(self, value: Any, axes: Sequence[str]) -> Any:
        """The splits of the arrays of a weight in use: one, or in the shape of its storage."""
        return self._parts(self.rules.activations, value, axes)

    def weight(self, value: Any, axes: Sequence[str]) -> Any:
        """The shardings in which a weight is stored: one, or in the shape of its storage. value: arrays or shapes."""
        return self.shardings(self._parts(self.rules.weights, value, axes))

    def shardings(self, specs: Any) -> Any:
        """Splits as shardings on this mesh."""
        is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)

    def degree(self, on: Axes) -> int:
        """Into how many parts mesh axes cut."""
        sizes = sizes_of(self.mesh)
        return math.prod(sizes[name] for name in names(on))

    def _spec(self, table: Table, axes: Sequence[str], shape: Sequence[int]) -> PartitionSpec:
        on = dict(table)
        found = [on.get(letter) for letter in axes]
        whole = [size % self.degree(split) for split, size in zip(found, shape, strict=True)]
        return PartitionSpec(*(None if rest else split for split, rest in zip(found, whole, strict=True)))

    def _parts(self, table: Table, value: Any, axes: Sequence[str]) -> Any:
        spec = self._spec(table, axes, value.shape)
        if not isinstance(value, Quantized):
            return spec
        stack = value.codes.ndim - 2
        rows = _merged(value.shape[stack:], value.codes.shape[-2])
        split = PartitionSpec(*spec[:stack], spec[stack], spec[stack + rows])
        # Of an axis that is one block, every device has the scale.
        whole = [n == 1 for n in value.scale.shape]
        of_block = PartitionSpec(*(None if one else on for one, on in zip(whole, split, strict=True)))
        return replace(value, codes=split, scale=of_block, offset=None if value.offset is None else of_block)

    def check_blocks(self, path: str, value: Quantized, axes: Sequence[str]) -> None:
        """Raises RzooError where a quantized weight would be cut within a block."""
        split = self._parts(self.rules.weights, value, axes).codes
        for size, on, block in zip(value.codes.shape[-2:], split[-2:], value.block, strict=True):
            degree = self.degree(on)
            if degree > 1 and block < size and size // degree % block:
                raise RzooError(
                    f"{path}: {size} over {on} ({degree}) cuts blocks of {block}",
                    field=path,
                    value=degree,
                    fix=f"take a degree that divides {size // block}, or load it in another dtype",
                )

    def local_shape(self, axes: Sequence[str], shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's part of a weight in use."""
        spec = self.spec(axes, shape)
        return tuple(size // self.degree(on) for size, on in zip(shape, spec, strict=True))


def names(on: Axes) -> tuple[str, ...]:
    """Mesh axes as a tuple."""
    return () if on is None else (on,) if isinstance(on, str) else on


def _merged(shape: Sequence[int], rows: int) -> int:
    """How many leading axes of a logical shape are the rows of its codes."""
    return next(i for i in range(1, len(shape) + 1) if math.prod(shape[:i]) == rows)


def per_device(value: Any) -> Iterator[int]:
    """Bytes of an array on each device of this process that holds a part."""
    for leaf in jax.tree.leaves(value):
        for shard in leaf.addressable_shards:
            yield shard.data.nbytes
