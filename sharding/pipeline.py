"""Pipelines: a model cut into stages, each a program of its own on devices of its own.

One program cannot hold stages that differ. Rows of a batch go through in as many groups as there are stages; while one
group is in a stage the next one is in the stage before it, since JAX starts programs without waiting for their results.
What moves between devices is activations, and at decoding the chosen tokens; no weight moves. One process holds all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from rzoo.core import RzooError
from rzoo.models.cache import Cache
from rzoo.models.forms import Forms
from rzoo.models.registry import Params, abstract_weights, family_of, set_weight
from rzoo.models.step import Blueprint, Stateless, greedy
from rzoo.sharding.placement import Placement
from rzoo.sharding.rules import Rules

COPY = "head"  # under this name the last stage of a tied model holds the embedding of the first


@dataclass(frozen=True)
class Stage:
    """Layers first..stop-1 on the devices of `placement`, run on `forms`."""

    first: int
    stop: int
    placement: Placement
    forms: Forms


@dataclass(frozen=True)
class Pipeline:
    """The stages of one model, in order. It stands in a handle's forms in the place of a single placement."""

    mesh: Any
    rules: Rules
    stages: tuple[Stage, ...]

    def __call__(self, x: Any, axes: str) -> Any:
        """Programs of stages have forms of their own; in any other, the pieces would lie on different devices."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
            raise RzooError(
                "one program cannot hold a pipeline: jit, grad and vmap of a model under pipe are not possible",
                field="mesh",
                value="pipe",
                fix="load it under rules without pipe, such as tensor or fsdp",
            )
        return x

    def of(self, path: str) -> Placement:
        """Where a weight lies."""
        return self.stages[self._number(path)].placement

    def _number(self, path: str) -> int:
        part, _, rest = path.partition(".")
        if part != "layers":
            return 0 if part == "embed" else len(self.stages) - 1
        layer = int(rest.split(".")[0])
        return next(i for i, stage in enumerate(self.stages) if layer < stage.stop)

    def params_of(self, params: Params, number: int) -> Params:
        """The weights of one stage."""
        return {path: value for path, value in params.items() if self._number(path) == number}


def stage_stops(config: Any, count: int) -> list[int]:
    """Where each of `count` stages ends, such that the largest has as few weights as possible."""
    sizes = [0] * config.layers
    for path, (_, weight) in abstract_weights(config).items():
        part, _, rest = path.partition(".")
        layer = int(rest.split(".")[0]) if part == "layers" else 0 if part == "embed" else config.layers - 1
        sizes[layer] += weight.size
    sizes[-1] += abstract_weights(config)["embed"][1].size if config.tied else 0
    low, high = max(sizes), sum(sizes)
    while low < high:  # the least bound under which `count` stages hold all
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(sizes, middle)) <= count else (middle + 1, high)
    stops = _filled(sizes, low)
    while len(stops) < count:  # fewer would do: cut the longest, so that no stage is empty
        starts = [0, *stops[:-1]]
        start, stop = max(zip(starts, stops, strict=True), key=lambda ends: ends[1] - ends[0])
        stops = sorted([*stops, (start + stop) // 2])
    return stops


def _filled(sizes: Sequence[int], bound: int) -> list[int]:
    """Ends of stages that take layers until the next one would pass `bound`."""
    stops, held = [], 0
    for layer, size in enumerate(sizes):
        if held and held + size > bound:
            stops.append(layer)
            held = 0
        held += size
    return [*stops, len(sizes)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineCache(Cache):
    """Slots are the caches of each group of rows, one a stage, each with the lengths of its rows; its own are None."""

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        return next(leaf.shape[-2] for leaf in jax.tree.leaves(self.slots) if leaf.ndim > 1)

    def with_lengths(self, lengths: Any) -> "PipelineCache":
        """The same entries, counted anew."""
        new = np.asarray(lengths)
        parts = zip(self.slots, rows_of(self), strict=True)
        put = lambda cache, rows: cache.with_lengths(jax.device_put(new[rows], cache.lengths.sharding))  # noqa: E731
        return PipelineCache(tuple(tuple(put(cache, rows) for cache in group) for group, rows in parts), None)

    def taken(self, rows: Any) -> "PipelineCache":
        """A copy of these rows, in this order, in groups anew."""
        return _regrouped(
            self.slots, [part for part in np.array_split(np.asarray(rows), len(self.slots[0])) if len(part)]
        )

    def with_row(self, row: Any, one: Cache) -> "PipelineCache":
        """A copy with row `row` replaced by the only row of `one`, which has the same capacity."""
        sizes = [group[-1].lengths.shape[0] for group in self.slots]
        picks = np.arange(sum(sizes))
        picks[int(row)] = sum(sizes)
        return _regrouped((*self.slots, *one.slots), np.split(picks, np.cumsum(sizes)[:-1]))

    def grown(self, capacity: int) -> "PipelineCache":
        """A copy with room for `capacity` tokens a row."""
        grow = lambda cache: cache.grown(capacity) if jax.tree.leaves(cache.slots) else cache  # noqa: E731
        return PipelineCache(tuple(tuple(grow(cache) for cache in group) for group in self.slots), None)


def _regrouped(groups: Sequence[Sequence[Cache]], picks: Sequence[np.ndarray]) -> PipelineCache:
    """The rows of all groups, counted through, as groups of these."""
    join = lambda *parts: jnp.concatenate(parts, axis=max(parts[0].ndim - 4, 0))  # noqa: E731
    stages = [jax.tree.map(join, *caches) for caches in zip(*groups, strict=True)]
    return PipelineCache(tuple(tuple(stage.taken(jnp.asarray(rows)) for stage in stages) for rows in picks), None)


@dataclass(frozen=True)
class NewPipelineCache:
    """Makes an empty cache in groups and stages. unplaced: the forms of the model before it was placed."""

    pipeline: Pipeline
    unplaced: Forms

    def __call__(self, make: Callable[[int], Cache], batch: int) -> Any:
        """The form `new_cache`."""
        return self._parts(lambda stage, rows: stage.forms.new_cache(_of_stage(make, stage), rows), batch)

    def shapes(self, make: Callable[[int], Cache], batch: int) -> Any:
        """The same without its arrays: shapes and shardings."""
        of = lambda stage, rows: stage.forms.new_cache.shapes(_of_stage(make, stage), rows)  # noqa: E731
        return self._parts(of, batch)

    def _parts(self, of: Callable[[Stage, int], Cache], batch: int) -> PipelineCache:
        stages = self.pipeline.stages
        rows = [len(group) for group in np.array_split(np.arange(batch), len(stages)) if len(group)]
        return PipelineCache(tuple(tuple(of(stage, count) for stage in stages) for count in rows), None)


def _of_stage(make: Callable[[int], Cache], stage: Stage) -> Callable[[int], Cache]:
    """`make` for the layers of one stage."""

    def cut(rows: int) -> Cache:
        whole = make(rows)
        return replace(whole, slots=whole.slots[stage.first : stage.stop])

    return cut


@partial(jax.jit, static_argnames=("blueprint", "layers"), donate_argnames="cache")
def through_stage(
    blueprint: Blueprint, params: Params, x: Array, cache: Cache | None, *, layers: tuple[int, int]
) -> tuple[Array, Cache | None]:
    """One stage: tokens or activations in, activations out, after the final norm where it is the last."""
    module, (first, stop) = _module(blueprint, params, layers), layers
    x, cache = module.through_layers(module.embedded(x) if first == 0 else x, cache)
    x = module.norm(x) if stop == blueprint.config.layers else x
    return x, None if cache is None else cache.placed(blueprint.forms.place)


@partial(jax.jit, static_argnames=("blueprint", "layers"))
def _logits(blueprint: Blueprint, params: Params, x: Array, counts: Array | None, *, layers: tuple[int, int]) -> Array:
    """Scores from what the last stage gives: of every token, or of the last of each row's counts [b]."""
    if counts is not None:
        x = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return _module(blueprint, params, layers).logits(x)


def _module(blueprint: Blueprint, params: Params, layers: tuple[int, int]) -> Any:
    """The family's module with the weights and the layers of one stage alone."""
    module: Any = family_of(blueprint.config).model(blueprint.config, forms=blueprint.forms, rngs=None)
    weights = abstract_weights(blueprint.config)
    for path, value in params.items():
        own = "embed" if path == COPY and path not in weights else path
        axes = weights[own][0]
        set_weight(module, own, blueprint.forms.place(value, "".join(axes)), axes)
    module.layers = nnx.List(list(module.layers)[slice(*layers)])
    return module


class _Run:
    """The programs of one model's stages over its weights."""

    def __init__(self, blueprint: Blueprint, params: Params):
        self.stages = blueprint.forms.place.stages  # type: ignore[attr-defined]
        self.blueprints = [Blueprint(blueprint.config, stage.forms) for stage in self.stages]
        self.params = [blueprint.forms.place.params_of(params, i) for i in range(len(self.stages))]  # type: ignore[attr-defined]

    def through(self, tokens: Any, caches: Sequence[Any]) -> tuple[Array, tuple[Any, ...]]:
        """All stages for one group of rows [b, t]; the last one's activations and the new caches."""
        x, out = tokens, []
        for stage, blueprint, params, cache in zip(self.stages, self.blueprints, self.params, caches, strict=True):
            place = stage.placement
            x = jax.device_put(x, place.shardings(place.spec("btd"[: x.ndim], x.shape)))
            x, cache = through_stage(blueprint, params, x, cache, layers=(stage.first, stage.stop))
            out.append(cache)
        return x, tuple(out)

    def logits(self, x: Array, counts: Any = None) -> Array:
        """Scores on the last stage's devices."""
        last = self.stages[-1]
        return _logits(self.blueprints[-1], self.params[-1], x, counts, layers=(last.first, last.stop))

    def lengthened(self, caches: Sequence[Cache], counts: Any) -> tuple[Cache, ...]:
        """The caches with `counts` more tokens in each row."""
        return tuple(cache.with_lengths(_add(cache.lengths, counts)) for cache in caches)


def _add(lengths: Array, counts: Any) -> Array:
    return lengths + jax.device_put(counts, lengths.sharding)


def forward(blueprint: Blueprint, params: Params, tokens: np.ndarray) -> Array:
    """As step.forward."""
    run = _Run(blueprint, params)
    groups = [rows for rows in np.array_split(tokens, len(run.stages)) if len(rows)]
    nothing = [None] * len(run.stages)
    return jnp.concatenate([run.logits(run.through(rows, nothing)[0]) for rows in groups])


def forward_captured(blueprint: Blueprint, params: Params, tokens: np.ndarray) -> Any:
    """Raises RzooError: observations of a pipeline would lie on different devices."""
    raise RzooError("capture is not possible under pipe", field="capture", fix="load the model under other rules")


def prefill_chunk(
    blueprint: Blueprint, params: Params, tokens: np.ndarray, counts: np.ndarray, cache: PipelineCache
) -> tuple[Array, PipelineCache]:
    """As step.prefill_chunk."""
    run, logits, groups = _Run(blueprint, params), [], []
    for rows, caches in zip(rows_of(cache), cache.slots, strict=True):
        x, caches = run.through(tokens[rows], caches)
        logits.append(run.logits(x, counts[rows]))
        groups.append(run.lengthened(caches, counts[rows]))
    return jnp.concatenate(logits), PipelineCache(tuple(groups), None)


def prefill_chunk_scored(
    blueprint: Blueprint, params: Params, tokens: np.ndarray, cache: PipelineCache
) -> tuple[Array, PipelineCache]:
    """As step.prefill_chunk_scored."""
    counts = np.full(len(tokens), tokens.shape[1], np.int32)
    return read_chunk(blueprint, params, tokens, counts, cache, None, read=_all)


def _all(logits: Array, states: Array, given: None) -> Array:
    return logits


def rows_of(cache: PipelineCache) -> list[slice]:
    """The rows of each group."""
    ends = np.cumsum([0, *(group[-1].lengths.shape[0] for group in cache.slots)])
    return [slice(start, stop) for start, stop in pairwise(ends)]


def decode(
    blueprint: Blueprint,
    params: Params,
    logits: Array,
    cache: PipelineCache,
    key: Array,
    wanted: np.ndarray,
    stops: Any,
    *,
    steps: int,
    select: Any = greedy,
) -> tuple[Array, Array, PipelineCache]:
    """As step.decode, but that rows which ended take part until the last of `steps`."""
    keys = jnp.broadcast_to(key, logits.shape[:1])
    choose = _OneKey(select)
    found = decode_chosen(blueprint, params, logits, cache, keys, wanted, stops, steps=steps, choose=choose)
    return found[0], found[3], found[4]


@dataclass(frozen=True)
class _OneKey(Stateless):
    """The same with a copy of the key for each row, as a state that is cut into groups of rows must be."""

    def __call__(self, logits: Array, key: Array, positions: Array, live: Array) -> tuple[Array, Any, Array]:
        return super().__call__(logits, key[0], positions, live)[0], (), key


def decode_chosen(
    blueprint: Blueprint,
    params: Params,
    logits: Array,
    cache: PipelineCache,
    state: Any,
    wanted: np.ndarray,
    stops: Any,
    *,
    steps: int,
    choose: Any,
) -> tuple[Array, Any, Any, Array, PipelineCache]:
    """As step.decode_chosen, but that rows which ended take part until the last of `steps`."""
    run, rows = _Run(blueprint, params), rows_of(cache)
    scores, left = [logits[r] for r in rows], [wanted[r] for r in rows]
    states = [jax.tree.map(lambda a, r=r: a[r], state) for r in rows]
    groups, tokens, notes = list(cache.slots), [[] for _ in rows], [[] for _ in rows]  # type: ignore[var-annotated]
    taken = int(min(steps, np.max(wanted)))
    for _ in range(taken):
        for g, caches in enumerate(groups):
            chosen, shown, more, left[g], noted, states[g] = _choose(
                scores[g], states[g], caches[-1].lengths, left[g], stops, choose=choose
            )
            x, caches = run.through(chosen[:, None], caches)
            scores[g] = _kept(run.logits(x, None), scores[g], more)
            groups[g] = run.lengthened(caches, more)
            tokens[g].append(shown)
            notes[g].append(noted)
    found, noted = (_joined([_joined(columns, jnp.stack, 1) for columns in of]) for of in (tokens, notes))
    found = jnp.pad(found, ((0, 0), (0, steps - taken)), constant_values=-1)
    return found, noted, _joined(states), jnp.concatenate(scores), PipelineCache(tuple(groups), None)


def _joined(parts: Sequence[Any], join: Any = jnp.concatenate, axis: int = 0) -> Any:
    return jax.tree.map(lambda *arrays: join(arrays, axis=axis), *parts)


def read_chunk(
    blueprint: Blueprint, params: Params, tokens: Any, counts: Any, cache: PipelineCache, given: Any, *, read: Any
) -> tuple[Any, PipelineCache]:
    """As step.read_chunk."""
    run, found, groups = _Run(blueprint, params), [], []
    for rows, caches in zip(rows_of(cache), cache.slots, strict=True):
        x, caches = run.through(tokens[rows], caches)
        found.append(_read(run.logits(x), x, jax.tree.map(lambda a, r=rows: a[r], given), read=read))
        groups.append(run.lengthened(caches, counts[rows]))
    return _joined(found), PipelineCache(tuple(groups), None)


@partial(jax.jit, static_argnames="read")
def _read(logits: Array, states: Array, given: Any, *, read: Any) -> Any:
    return read(logits, states, given)


def take_rows(blueprint: Blueprint, cache: PipelineCache, rows: Any) -> PipelineCache:
    """As step.take_rows."""
    return cache.taken(rows)


def put_row(blueprint: Blueprint, cache: PipelineCache, row: Any, one: PipelineCache) -> PipelineCache:
    """As step.put_row."""
    return cache.with_row(row, one)


@partial(jax.jit, static_argnames="choose")
def _choose(
    logits: Array, state: Any, positions: Array, left: Array, stops: Array, *, choose: Any
) -> tuple[Array, Array, Array, Array, Any, Any]:
    """One token a row: its id (0 for a finished row), the same with -1 there, 1 for a live row, what is left; what was
    noted, and the state.
    """
    live = left > 0
    chosen, notes, state = choose(logits, state, positions, live)
    after = jnp.where(jnp.isin(chosen, stops), 0, jnp.maximum(left - 1, 0))
    shown, more = jnp.where(live, chosen, -1), live.astype(jnp.int32)
    return jnp.where(live, chosen, 0), shown, more, jnp.where(live, after, 0), notes, state


@jax.jit
def _kept(new: Array, old: Array, live: Array) -> Array:
    return jnp.where(live[:, None] > 0, new[:, 0], old)
