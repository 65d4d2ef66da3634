"""Runs of equal layers as one loop: their weights stacked on a leading axis l and scanned, their slots likewise.

A transformation of a model's state, not a second model: `stack` and `unstack` turn parameters under per-layer names
into stacked ones and back, and `assemble_stacked` puts one `Stack` in the place of each run. Programs compile several
times faster that way. Layers without weights (Ultra has 81) compute nothing: they belong to no run and end none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import ShapeDtypeStruct
from jaxtyping import Array

from rzoo.core import RzooError
from rzoo.models.cache import Cache
from rzoo.models.forms import Forms
from rzoo.models.registry import Params, abstract_weights, family_of, set_weight

# Of each weight of a layer: name within the layer, logical axes, shape.
Weights = tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class Run:
    """Neighbouring layers with equal weights. Layers without any weight may lie between them and belong to no run."""

    weights: Weights
    layers: tuple[int, ...]

    @property
    def label(self) -> str:
        """How the run stands in the place of a layer's number in the names of stacked weights: "24-34"."""
        return f"{self.layers[0]}-{self.layers[-1]}" if len(self.layers) > 1 else str(self.layers[0])


@lru_cache(maxsize=64)
def runs(config: Any) -> tuple[Run, ...]:
    """The longest runs of a model's layers, in order."""
    layers: dict[int, Weights] = {}
    for path, (axes, weight) in abstract_weights(config).items():
        kind, _, rest = path.partition(".")
        number, _, name = rest.partition(".")
        if kind == "layers":
            layers[int(number)] = (*layers.get(int(number), ()), (name, axes, weight.shape))
    found: list[Run] = []
    for layer, weights in sorted(layers.items()):
        if found and found[-1].weights == weights:
            found[-1] = replace(found[-1], layers=(*found[-1].layers, layer))
        else:
            found.append(Run(weights, (layer,)))
    return tuple(found)


def long_runs(config: Any) -> tuple[Run, ...]:
    """Those of more than one layer."""
    return tuple(run for run in runs(config) if len(run.layers) > 1)


def stacked_weights(config: Any) -> Mapping[str, tuple[tuple[str, ...], ShapeDtypeStruct]]:
    """Our path -> (logical axes, shape) of every weight of a stacked model; those of runs have l first."""
    in_run = {f"layers.{i}." for run in long_runs(config) for i in run.layers}
    found = {p: w for p, w in abstract_weights(config).items() if not p.startswith(tuple(in_run))}
    for run in long_runs(config):
        for name, axes, shape in run.weights:
            whole = ShapeDtypeStruct((len(run.layers), *shape), jnp.float32)
            found[f"layers.{run.label}.{name}"] = (("l", *axes), whole)
    return found


def stack(config: Any, params: Params) -> Params:
    """Per-layer parameters with the weights of each run as one, "layers.24-34.attention.q" [l, h, c, d]; stacked ones
    stay. The result holds copies; within a program the copies are made at every call.

    Raises RzooError where a run holds one weight in several storages.
    """
    out = dict(params)
    for run in long_runs(config):
        for name, _, _ in run.weights:
            paths = [f"layers.{i}.{name}" for i in run.layers]
            if paths[0] in out:
                out[f"layers.{run.label}.{name}"] = _stacked([out.pop(path) for path in paths], run, name)
    return out


def _stacked(values: list[Any], run: Run, name: str) -> Any:
    if len({jax.tree.structure(value) for value in values}) > 1:
        raise RzooError(
            f"layers {run.label} hold {name} in several storages and cannot be stacked",
            field=f"layers.{run.layers[0]}.{name}",
            fix="store this weight alike in all of them, or run the model unstacked",
        )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)


def unstack(config: Any, params: Params) -> Params:
    """The inverse of `stack`."""
    out = dict(params)
    for run in long_runs(config):
        for name, _, _ in run.weights:
            whole = out.pop(f"layers.{run.label}.{name}", None)
            for i, layer in enumerate(run.layers if whole is not None else ()):
                out[f"layers.{layer}.{name}"] = jax.tree.map(lambda a, i=i: a[i], whole)
    return out


def empty_stacked_cache(config: Any, batch: int, capacity: int, dtype: Any) -> Cache:
    """The cache of a stacked model: a slot for each run, with l before the axes of a layer's where it has several."""
    layers = jax.eval_shape(lambda: family_of(config).empty_cache(config, batch, capacity, dtype)).slots
    slots = []
    for run in runs(config):
        lead = (len(run.layers),) if len(run.layers) > 1 else ()
        zeros = lambda leaf, lead=lead: jnp.zeros((*lead, *leaf.shape), leaf.dtype)  # noqa: E731
        slots.append(jax.tree.map(zeros, layers[run.layers[0]]))
    return Cache(tuple(slots), jnp.zeros(batch, jnp.int32))


def assemble_stacked(config: Any, forms: Forms, params: Params) -> nnx.Module:
    """The family's module with one Stack in the place of each run, over stacked parameters, or over per-layer ones that
    are stacked here.
    """
    module: Any = family_of(config).model(config, forms=forms, rngs=None)
    params, axes_of = stack(config, params), stacked_weights(config)
    entries = []
    for run in runs(config):
        layer = module.layers[run.layers[0]]
        for name, _, _ in run.weights:
            path = f"layers.{run.label}.{name}"
            set_weight(layer, name, params.pop(path), axes_of[path][0])
        entries.append(Stack(layer, len(run.layers)) if len(run.layers) > 1 else layer)
    module.layers = nnx.List(entries)
    for path, value in params.items():
        set_weight(module, path, value, axes_of[path][0])
    return module


class Stack(nnx.Module):
    """A run in the place of a layer: calls the layer once for each entry of its weights' leading axis, in a loop."""

    def __init__(self, layer: nnx.Module, count: int):
        self.layer, self.count = layer, count

    def __call__(self, x: Array, at: Any, starts: Array, slot: Any) -> tuple[Array, Any]:
        """As the layer, with a slot [l, …]; entries that a layer appends are written in place."""
        graph, weights = nnx.split(self.layer)

        def step(carry, entry):
            (x, slot), (i, weights) = carry, entry
            own = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False), slot)
            x, new = nnx.merge(graph, weights)(x, at, starts, own)
            return (x, None if slot is None else slot.written_back(new, i, starts, x.shape[1])), None

        (x, slot), _ = jax.lax.scan(step, (x, slot), (jnp.arange(self.count), weights))
        return x, slot
