"""The programs that run on a device: arrays in, arrays out, no text. engine/ calls them, compile/ plans and tunes the
same.

A Blueprint (config and forms, hashable) says what to compute; params and cache are arguments and results.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rzoo.models.cache import Cache
from rzoo.models.forms import Forms
from rzoo.models.registry import Params, assemble, family_of
from rzoo.models.stacking import assemble_stacked, empty_stacked_cache, unstack


@dataclass(frozen=True)
class Blueprint:
    """A model without its weights: equal blueprints share compiled programs."""

    config: Any
    forms: Forms = Forms()

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """A cache for `batch` rows of up to `capacity` tokens in the cache type of the forms."""
        return self.forms.new_cache(self.cache_maker(capacity), batch)

    def empty_draft_cache(self, batch: int, capacity: int) -> Cache:
        """A cache for the module of multi-token prediction alone."""
        one: Any = replace(self.config, layers=1)
        make, dtype = family_of(one).empty_cache, jnp.dtype(self.forms.types("attention").cache)
        return self.forms.new_cache(lambda rows: make(one, rows, capacity, dtype), batch)  # type: ignore[no-any-return]

    def cache_maker(self, capacity: int) -> Callable[[int], Cache]:
        """A function of the number of rows that makes the cache on the default device."""
        make = empty_stacked_cache if self.forms.stacked else family_of(self.config).empty_cache
        dtype = jnp.dtype(self.forms.types("attention").cache)
        return lambda rows: make(self.config, rows, capacity, dtype)

    def module(self, params: Params) -> Any:
        """The module that programs run, over per-layer or stacked parameters."""
        if self.forms.stacked and not self.forms.capture:
            return assemble_stacked(self.config, self.forms, params)
        return assemble(self.config, self.forms, unstack(self.config, params))


def forward(blueprint: Blueprint, params: Params, tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
    """Logits of whole sequences, without a cache."""
    return blueprint.module(params)(tokens)


def forward_captured(
    blueprint: Blueprint, params: Params, tokens: Int[Array, "b t"]
) -> tuple[Float[Array, "b t v"], dict[str, tuple[Array, ...]]]:
    """Logits, and by name what the forms capture: hidden (embedding, after each block, with the last one normed) and
    so on.
    """
    module = blueprint.module(params)
    (x, _), observed = nnx.capture(lambda m: m.hidden_states(tokens), nnx.Intermediate)(module)
    sown = nnx.to_flat_state(observed)
    found: dict[str, tuple[Array, ...]] = {name: () for name in blueprint.forms.capture}
    by_depth = sorted(sown, key=lambda item: [part if isinstance(part, int) else -1 for part in item[0]])
    for path, leaf in by_depth:
        found[str(path[-1])] += tuple(leaf.get_value())
    if "hidden" in found:
        found["hidden"] = (*found["hidden"][:-1], x)
    return module.logits(x), found


def prefill_chunk(
    blueprint: Blueprint, params: Params, tokens: Int[Array, "b t"], counts: Int[Array, " b"], cache: Cache
) -> tuple[Float[Array, "b v"], Cache]:
    """Appends the first counts[b] of the t tokens of each row to the cache; logits after the last of them.

    t is a fixed length, shorter pieces are padded on the right. The cache must have room for all t. A row with count 0
    keeps its entries; its logits mean nothing.
    """
    module = blueprint.module(params)
    x, cache = module.hidden_states(tokens, cache, counts)
    last = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return module.logits(last), cache.with_lengths(cache.lengths + counts).placed(blueprint.forms.place)


def prefill_chunk_scored(
    blueprint: Blueprint, params: Params, tokens: Int[Array, "b t"], cache: Cache
) -> tuple[Float[Array, "b t v"], Cache]:
    """Appends all t tokens to every row; logits after each."""
    counts = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    return read_chunk(blueprint, params, tokens, counts, cache, None, read=lambda logits, *_: logits)


def read_chunk(
    blueprint: Blueprint,
    params: Params,
    tokens: Int[Array, "b t"],
    counts: Int[Array, " b"],
    cache: Cache,
    given: Any,
    *,
    read: Callable[[Float[Array, "b t v"], Float[Array, "b t d"], Any], Any],
) -> tuple[Any, Cache]:
    """As prefill_chunk, but gives read(logits after every token, final hidden states, given): what is wanted of them,
    without their size.
    """
    module = blueprint.module(params)
    x, cache = module.hidden_states(tokens, cache, counts)
    return read(module.logits(x), x, given), cache.with_lengths(cache.lengths + counts).placed(blueprint.forms.place)


def take_rows(blueprint: Blueprint, cache: Cache, rows: Int[Array, " n"]) -> Cache:
    """A cache whose rows are copies of these."""
    return cache.taken(rows).placed(blueprint.forms.place)


def put_row(blueprint: Blueprint, cache: Cache, row: Int[Array, ""], one: Cache) -> Cache:
    """The cache with row `row` replaced by the only row of `one`, which has the same capacity."""
    return cache.with_row(row, one).placed(blueprint.forms.place)


Select = Callable[[Float[Array, "b v"], Array], Int[Array, " b"]]
# (logits [b, v], state, positions [b], live [b]) -> (ids [b], notes on them, state): arrays whose first axis is b.
Choose = Callable[[Array, Any, Array, Array], tuple[Array, Any, Any]]


def greedy(logits: Float[Array, "b v"], key: Array) -> Int[Array, " b"]:
    """The most likely token of each row; the lowest id among equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclass(frozen=True)
class Stateless:
    """A Choose that keeps nothing but a key, from which each step has its own."""

    select: Select

    def __call__(self, logits: Array, key: Array, positions: Array, live: Array) -> tuple[Array, Any, Array]:
        return self.select(logits, jax.random.fold_in(key, positions[0])), (), key


def draft(
    blueprint: Blueprint,
    params: Params,
    hidden: Float[Array, "b t d"],
    tokens: Int[Array, "b t"],
    counts: Int[Array, " b"],
    cache: Cache,
    *,
    count: int,
) -> tuple[Int[Array, "b count"], Cache]:
    """Guesses the `count` most likely tokens after the last of `tokens`, by the module of multi-token prediction.

    hidden: final hidden states of positions that follow what `cache` (empty_draft_cache) holds; tokens: the one after
    each of them, so that the last is the newest token, which the model itself has not seen. The first counts[b] of the
    t of each row are real and are added to the cache, as in prefill_chunk; count 0 does no more. The entries that the
    guesses make lie past its lengths: the next call, with what the model then knows, writes over them. The cache must
    have room for t or counts + count - 1 more. With one module, further guesses come from its own states.
    """
    module = blueprint.module(params)
    states, cache = module.mtp_states(hidden, tokens, cache, counts)
    state = jnp.take_along_axis(states, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    lengths = cache.lengths + counts
    guesses = jnp.zeros((tokens.shape[0], count), jnp.int32)
    for i in range(count):
        guess = jnp.argmax(module.logits(state), axis=-1).astype(jnp.int32)
        guesses = guesses.at[:, i].set(guess[:, 0])
        if i + 1 < count:
            state, cache = module.mtp_states(state, guess, cache.with_lengths(lengths + i))
    return guesses, cache.with_lengths(lengths).placed(blueprint.forms.place)


def decode(
    blueprint: Blueprint,
    params: Params,
    logits: Float[Array, "b v"],
    cache: Cache,
    key: Array,
    wanted: Int[Array, " b"],
    stops: Int[Array, " n"],
    *,
    steps: int,
    select: Select = greedy,
) -> tuple[Int[Array, "b steps"], Float[Array, "b v"], Cache]:
    """decode_chosen by a function of logits and a key alone: tokens, logits after the last of each row, the cache."""
    found = decode_chosen(blueprint, params, logits, cache, key, wanted, stops, steps=steps, choose=Stateless(select))
    return found[0], found[3], found[4]


def decode_chosen(
    blueprint: Blueprint,
    params: Params,
    logits: Float[Array, "b v"],
    cache: Cache,
    state: Any,
    wanted: Int[Array, " b"],
    stops: Int[Array, " n"],
    *,
    steps: int,
    choose: Choose,
) -> tuple[Int[Array, "b steps"], Any, Any, Float[Array, "b v"], Cache]:
    """Up to `steps` tokens a row, the first chosen from `logits`: one device loop with the cache carried in place.

    wanted: tokens each row still takes, 0 for a finished one. A row ends with the first token that is in `stops` (which
    is part of the result) or when it has what it wanted; its further places hold -1 and its cache length stays. The
    loop ends when all rows have. Returns tokens, what `choose` noted of each [b, steps, …] (where there is none, of no
    meaning), its state, logits after the last token of each row, and the cache.
    """
    module = blueprint.module(params)
    b = logits.shape[0]
    noted = jax.eval_shape(choose, logits, state, cache.lengths, wanted > 0)[1]
    no_notes = jax.tree.map(lambda a: jnp.zeros((b, steps, *a.shape[1:]), a.dtype), noted)

    def unfinished(carry):
        i, left, *_ = carry
        return (i < steps) & jnp.any(left > 0)

    def step(carry):
        i, left, tokens, notes, state, logits, cache = carry
        live = left > 0
        chosen, new, state = choose(logits, state, cache.lengths, live)
        notes = jax.tree.map(lambda all_, one: all_.at[:, i].set(one), notes, new)
        tokens = tokens.at[:, i].set(jnp.where(live, chosen, -1))
        x, cache = module.hidden_states(jnp.where(live, chosen, 0)[:, None], cache)
        logits = jnp.where(live[:, None], module.logits(x[:, 0]), logits)
        cache = cache.with_lengths(cache.lengths + live).placed(blueprint.forms.place)
        left = jnp.where(jnp.isin(chosen, stops), 0, jnp.maximum(left - 1, 0))
        return i + 1, jnp.where(live, left, 0), tokens, notes, state, logits, cache

    first = (jnp.int32(0), wanted, jnp.full((b, steps), -1, jnp.int32), no_notes, state, logits, cache)
    _, _, tokens, notes, state, logits, cache = jax.lax.while_loop(unfinished, step, first)
    return tokens, notes, state, logits, cache
