"""What each device computes on its own part, written out with shard_map, with the exchange between devices at the end.

Each piece takes the arguments of the form in models/ that it replaces and gives the same result: that form, on one
device, is its reference. Written out, a data dependent loop runs as often as its own rows ask for, and no partitioner
has to see through it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from rzoo.models.attention import partial_sums
from rzoo.models.cache import Coded, Slot, like
from rzoo.models.weights import Numerics, Quantized, Stored
from rzoo.sharding.placement import Placement, names


@dataclass(frozen=True)
class OnShards:
    """`function` computed by each device on its part. inputs: the axes of each array among the first arguments, None
    for a weight, which knows its own; all further arguments are the same everywhere. output: the axes of the result,
    or of each of several.
    """

    function: Callable[..., Any]
    placement: Placement
    inputs: tuple[str | None, ...]
    output: str

    def __call__(self, *arguments: Any) -> Any:
        """The form's own arguments and result."""
        cut, rest = arguments[: len(self.inputs)], arguments[len(self.inputs) :]
        values = [a.get_value() if isinstance(a, Stored) else a for a in cut]
        specs = [self._spec(axes, a) for axes, a in zip(self.inputs, cut, strict=True)]
        of_first = dict(zip(str(self.inputs[0]), specs[0], strict=True))
        out = PartitionSpec(*(of_first.get(c, self.placement.axes_of(c)) for c in self.output))

        def body(*parts: Any) -> Any:
            return self.function(*(self._like(a, part) for a, part in zip(cut, parts, strict=True)), *rest)

        return jax.shard_map(body, mesh=self.placement.mesh, in_specs=tuple(specs), out_specs=out, check_vma=False)(
            *values
        )

    def _spec(self, axes: str | None, argument: Any) -> Any:
        if argument is None:
            return None
        if axes is None:
            return self.placement.parts(argument.get_value(), own_axes(argument))
        return self.placement.spec(axes, argument.shape)

    def _like(self, argument: Any, part: Any) -> Any:
        """A device's part of an argument, in the type of the whole."""
        if not isinstance(argument, Stored):
            return part
        if isinstance(part, Quantized):
            part = replace(part, shape=self.placement.local_shape(own_axes(argument), part.shape))
        return type(argument)(part, out_sharding=own_axes(argument), eager_sharding=False)


def own_axes(weight: Stored) -> tuple[str, ...]:
    """The axes of a weight; of one layer's in a loop over a stack those without l, which the loop took."""
    return tuple(weight.out_sharding[-len(weight.shape) :])


@dataclass(frozen=True)
class RouteOnShards:
    """Each device routes its own tokens among all experts, whichever of them it holds."""

    function: Callable[..., tuple[Array, Array]]
    placement: Placement

    def __call__(
        self, routing: Any, logits: Float[Array, "n e"], bias: Float[Array, " e"] | None, active: int
    ) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
        """As moe.route."""
        run = lambda logits, bias: self.function(routing, logits, bias, active)  # noqa: E731
        return OnShards(run, self.placement, ("b_", "_"), "b_")(logits, bias)


@dataclass(frozen=True)
class SharedOut:
    """A mixture of experts of which each device holds some experts, a slice of each, or both.

    Pairs of token and expert that another device has get no weight here; one all-reduce adds up what all found.
    """

    function: Callable[..., Array]
    placement: Placement

    def __call__(
        self,
        x: Float[Array, "n d"],
        indices: Int[Array, "n k"],
        weights: Float[Array, "n k"],
        gate: Stored,
        up: Stored,
        down: Stored,
        numerics: Numerics,
    ) -> Float[Array, "n d"]:
        """As the functions of moe.py."""
        on = OnShards(self._own, self.placement, ("b_", "b_", "b_", None, None, None), "b_")
        return on(x, indices, weights, gate, up, down, numerics)

    def _own(self, x: Any, indices: Any, weights: Any, gate: Stored, up: Stored, down: Stored, numerics: Any) -> Array:
        experts = gate.shape[0]
        first = jax.lax.axis_index(axis) * experts if (axis := self.placement.axes_of("e")) else 0
        mine = (indices >= first) & (indices < first + experts)
        local = jnp.where(mine, indices - first, experts)
        out = self.function(x, local, jnp.where(mine, weights, 0), gate, up, down, numerics)
        axes = [axis for letter in "ef" for axis in names(self.placement.axes_of(letter))]
        shared = [axis for axis in axes if self.placement.degree(axis) > 1]
        return jax.lax.psum(out, shared) if shared else out


@dataclass(frozen=True)
class AttendInShares:
    """Attention against a cache whose positions are split over the axis `group` of the mesh.

    Each device takes the queries of its whole group to the positions that it holds; the partial softmaxes are exchanged
    in one all-to-all, after which each has those of its own heads, and adds them up. size: positions of a device in one
    step, as in attend_in_blocks.
    """

    placement: Placement
    size: int | None = None

    def __call__(
        self,
        q: Float[Array, "b t h c"],
        keys: Float[Array, "b k s c"] | Coded,
        values: Float[Array, "b k s z"] | Coded,
        starts: Int[Array, " b"],
        scale: float,
        numerics: Numerics,
    ) -> Float[Array, "b t h z"]:
        """As the functions of attention.py."""
        on = OnShards(attend_in_shares, self.placement, ("bthc", "bksc", "bksz", "b"), "bthz")
        return on(q, keys, values, starts, scale, numerics, self.size)


def attend_in_shares(
    q: Float[Array, "b t h c"],
    keys: Float[Array, "b k s c"] | Coded,
    values: Float[Array, "b k s z"] | Coded,
    starts: Int[Array, " b"],
    scale: float,
    numerics: Numerics,
    size: int | None = None,
) -> Float[Array, "b t h z"]:
    """What one device of a group does: q of its own heads, keys and values of its own positions."""
    ways, s = jax.lax.axis_size("group"), keys.shape[2]
    q = jax.lax.all_gather(q, "group", axis=2, tiled=True)
    own = starts - jax.lax.axis_index("group") * s
    k, z = keys.shape[1], values.shape[3]
    part = lambda a, at, size: jax.lax.dynamic_slice_in_dim(a, at, size, axis=2)  # noqa: E731
    block = lambda at, size: jax.tree.map(lambda a: part(a, at, size), (keys, values))  # noqa: E731
    top, total, out = partial_sums(q, block, k, s, z, own, scale, numerics, size)
    packed = jnp.concatenate([out, total[..., None], top[..., None]], axis=-1)  # [b, k, g, t, z + 2]
    b, _, _, t, wide = packed.shape
    by_head = packed.reshape(b, ways, -1, t, wide)
    parts = jax.lax.all_to_all(by_head, "group", split_axis=1, concat_axis=1, tiled=True)
    out, total, top = parts[..., :z], parts[..., z], parts[..., z + 1]
    share = jnp.exp(top - top.max(axis=1, keepdims=True))
    summed = (out * share[..., None]).sum(axis=1) / (total * share).sum(axis=1)[..., None]  # [b, h, t, z]
    return summed.swapaxes(1, 2).astype(q.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitSlot(Slot):
    """Keys and values of one layer whose positions are split over the axis `group`."""

    placement: Any = field(metadata={"static": True})

    def append(self, keys: Any, values: Any, starts: Any) -> "SplitSlot":
        """Each device writes the new entries that fall into its part."""
        return replace(
            self, keys=self._written(self.keys, keys, starts), values=self._written(self.values, values, starts)
        )

    def written_back(self, new: Any, layer: Any, starts: Any, t: int) -> "SplitSlot":
        """As Slot.written_back; each device copies the entries in its part."""
        on = OnShards(write_own_back, self.placement, ("lbksc", "bksc", "", "b"), "lbksc")
        return jax.tree.map(lambda whole, part: on(whole, part, layer, starts, t), self, new)

    def _written(self, old: Any, new: Array, starts: Array) -> Any:
        on = OnShards(write_own, self.placement, ("bksc", "bktc", "b"), "bksc")
        return jax.tree.map(lambda whole, part: on(whole, part, starts), old, like(old, new))


def write_own(
    old: Float[Array, "b k s c"], new: Float[Array, "b k t c"], starts: Int[Array, " b"]
) -> Float[Array, "b k s c"]:
    """What one device of a group does: entries outside of its positions are dropped."""
    places = own_places(starts, new.shape[2], old.shape[2])
    row = lambda own, fresh, at: own.at[:, at].set(fresh.astype(own.dtype), mode="drop")  # noqa: E731
    return jax.vmap(row)(old, new, places)


def write_own_back(
    whole: Float[Array, "l b k s c"],
    part: Float[Array, "b k s c"],
    layer: Int[Array, ""],
    starts: Int[Array, " b"],
    t: int,
) -> Float[Array, "l b k s c"]:
    """What one device of a group does with the entries that a layer of a run has appended."""
    rows, places = jnp.arange(part.shape[0])[:, None], own_places(starts, t, part.shape[2])
    new = part.at[rows, :, places].get(mode="clip")
    return whole.at[layer, rows, :, places].set(new, mode="drop")


def own_places(starts: Int[Array, " b"], t: int, s: int) -> Int[Array, "b t"]:
    """Where a device of a group, with s positions of a cache, keeps t entries from `starts`: s or more for others'."""
    places = starts[:, None] + jnp.arange(t) - jax.lax.axis_index("group") * s
    return jnp.where(places < 0, s, places)
