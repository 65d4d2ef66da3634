"""Putting a model on a mesh: its weights where the rules say, its forms such that programs keep to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rzoo.core import RzooError
from rzoo.models.cache import Cache, Slot
from rzoo.models.forms import Forms
from rzoo.models.moe import experts_in_tiles
from rzoo.models.registry import abstract_weights
from rzoo.models.stacking import unstack
from rzoo.models.weights import Quantized
from rzoo.sharding.collectives import AttendInShares, OnShards, RouteOnShards, SharedOut, SplitSlot
from rzoo.sharding.mesh import Sizes, checked_sizes, make_mesh
from rzoo.sharding.pipeline import COPY, NewPipelineCache, Pipeline, Stage, stage_stops
from rzoo.sharding.placement import Placement
from rzoo.sharding.rules import Rules, resolve, table

ATTENTION = (("bthc", "bksc", "bksz", "b"), "bthz")
LATENT = (("bthc", "b_s_", None, None, "b"), "bthz")
SPARSE = (("bthc", "b_s_", None, None, "bt_", "b"), "bthz")
CHOOSE = (("btix", "b_s_", "bti", "b"), "bt_")


def place(lm: Any, mesh: Sizes, rules: str, *, kv: str = "split") -> Any:
    """The handle with its weights on a mesh, such as {"data": 2, "tensor": 4} under rules "tensor×data".

    kv: what becomes of KV heads that are fewer than the tensor axis: "split" puts positions of the cache on the
    devices that share a head, "copied" gives each all of them. What does not change is shared with `lm`. Raises
    RzooError with everything that does not divide, and the nearest sizes that do.
    """
    forms = forms_for(lm.config, mesh, rules, unplaced(lm.forms), kv=kv)
    params = unstack(lm.config, lm.params)
    placed = {path: put(forms.place, path, axes, params[own]) for path, own, axes in held(lm.config, forms)}
    return replace(lm, params=placed, forms=forms, mesh=forms.place.mesh)  # type: ignore[attr-defined]


def forms_for(
    config: Any, mesh: Sizes, rules: str, forms: Forms, *, kv: str = "split", devices: Sequence[Any] | None = None
) -> Forms:
    """The forms of a model on the first devices of this machine, or of `devices`; RzooError for all that does not
    work.
    """
    sizes, resolved = resolve(config, checked_sizes(mesh), table(rules), kv)
    whole = make_mesh(sizes, devices)
    if "pipe" not in sizes:
        return forms_on(Placement(whole, resolved), forms)
    if jax.process_count() > 1:
        raise RzooError("a pipeline runs in one process", field="mesh", value="pipe", fix="use tensor, data or fsdp")
    return forms_in_stages(config, whole, [Mesh(part, whole.axis_names[1:]) for part in whole.devices], resolved, forms)


def forms_in_stages(config: Any, whole: Any, meshes: Sequence[Any], rules: Rules, forms: Forms) -> Forms:
    """The forms of a pipeline with one stage on each of `meshes`, which together are `whole`."""
    stops, stages = stage_stops(config, len(meshes)), []
    for first, stop, mesh in zip([0, *stops[:-1]], stops, meshes, strict=True):
        placement = Placement(mesh, rules)
        stages.append(Stage(first, stop, placement, forms_on(placement, forms)))
    pipeline = Pipeline(whole, rules, tuple(stages))
    return replace(forms, place=pipeline, new_cache=NewPipelineCache(pipeline, forms))


def unplaced(forms: Forms) -> Forms:
    """The forms of a model before it was placed, layer by layer."""
    own = forms.new_cache
    return replace(own.unplaced if isinstance(own, NewCache | NewPipelineCache) else forms, stacked=False)


def held(config: Any, forms: Forms) -> list[tuple[str, str, tuple[str, ...]]]:
    """(name in params, weight that it is, axes) of all that a placed model holds: a pipeline has a tied embedding at
    both of its ends.
    """
    weights = [(path, path, axes) for path, (axes, _) in abstract_weights(config).items()]
    if isinstance(forms.place, Pipeline) and config.tied:
        weights.append((COPY, "embed", abstract_weights(config)["embed"][0]))
    return weights


def put(place: Any, path: str, axes: tuple[str, ...], value: Any) -> Any:
    """One weight that lies on devices, moved to those where it belongs."""
    placement = place.of(path)
    _check_blocks(placement, path, axes, value)
    return jax.device_put(value, placement.weight(value, axes))


def spread(placement: Placement, path: str, axes: tuple[str, ...], value: Any) -> Any:
    """One weight that each process holds whole in main memory, on its devices."""
    _check_blocks(placement, path, axes, value)
    make = lambda a, on: jax.make_array_from_callback(a.shape, on, lambda index: a[index])  # noqa: E731
    return jax.tree.map(make, value, placement.weight(value, axes))


def _check_blocks(placement: Placement, path: str, axes: tuple[str, ...], value: Any) -> None:
    if isinstance(value, Quantized):
        placement.check_blocks(path, value, axes)


def forms_on(placement: Placement, forms: Forms) -> Forms:
    """The same forms, each device computing attention over its own heads and rows and the experts that it holds."""
    grouped = placement.axes_of("s") is not None
    shares = AttendInShares(placement) if grouped else None
    on_shards = lambda form, axes: OnShards(form, placement, *axes)  # noqa: E731
    split_kv = "group" in placement.mesh.axis_names
    return replace(
        forms,
        attend=forms.attend if split_kv else on_shards(forms.attend, ATTENTION),
        attend_prefill=shares or (forms.attend_prefill if split_kv else on_shards(forms.attend_prefill, ATTENTION)),
        attend_decode=shares or (forms.attend_decode if split_kv else on_shards(forms.attend_decode, ATTENTION)),
        latent_attend=on_shards(forms.latent_attend, LATENT),
        latent_attend_prefill=on_shards(forms.latent_attend_prefill, LATENT),
        latent_attend_decode=on_shards(forms.latent_attend_decode, LATENT),
        choose=on_shards(forms.choose, CHOOSE),
        choose_cached=on_shards(forms.choose_cached, CHOOSE),
        sparse_attend=on_shards(forms.sparse_attend, SPARSE),
        sparse_attend_cached=on_shards(forms.sparse_attend_cached, SPARSE),
        route=RouteOnShards(forms.route, placement),
        experts=SharedOut(forms.experts, placement),
        experts_cached=SharedOut(experts_in_tiles, placement),
        place=placement,
        new_cache=NewCache(placement, forms),
    )


@dataclass(frozen=True)
class NewCache:
    """Makes empty caches, all zeros, each device its own part. unplaced: the model's forms before it was placed."""

    placement: Placement
    unplaced: Forms

    def __call__(self, make: Callable[[int], Cache], batch: int) -> Cache:
        """The form `new_cache`."""
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), self.shapes(make, batch))

    def shapes(self, make: Callable[[int], Cache], batch: int) -> Cache:
        """The same without its arrays: shapes and shardings."""
        cache = jax.eval_shape(lambda: make(batch)).placed(self._shape)
        if self.placement.axes_of("s") is None:
            return cache
        split = lambda slot: SplitSlot(slot.keys, slot.values, self.placement) if isinstance(slot, Slot) else slot  # noqa: E731
        return replace(cache, slots=tuple(split(slot) for slot in cache.slots))

    def _shape(self, array: Any, axes: str) -> Any:
        sharding = self.placement.shardings(self.placement.spec(axes, array.shape))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
