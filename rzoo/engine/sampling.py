"""How the next token is drawn: settings of a row, and the one program that serves rows of unlike settings.

    w = logits of the vocabulary, after penalties; w = (w - max w) / temperature
    top_k keeps the k largest, top_p the fewest of these that hold the share p, min_p those of at least min_p times the
    largest probability; of equals at a border all stay. The token is argmax(w + Gumbel noise): a draw from softmax(w).

Temperature 0 leaves the largest alone. Noise comes from (seed, sample, position), so a row's draws are its own whatever
it is batched with.
"""

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from rzoo.core import RzooError

SEEDS = 2**63  # seeds are from 0 to this less 1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings of one row. Raises RzooError for one that is out of its range.

    temperature: 0 is greedy. top_k: None keeps the whole vocabulary. repetition_penalty: logits of tokens of the prompt
    and the answer so far are divided by it where positive, multiplied where negative (arXiv:1909.05858).
    frequency_penalty, presence_penalty: taken off a token's logit, for each time and once, where the answer holds it.
    """

    temperature: Any = 0.0
    top_k: Any = None
    top_p: Any = 1.0
    min_p: Any = 0.0
    repetition_penalty: Any = 1.0
    frequency_penalty: Any = 0.0
    presence_penalty: Any = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item.name, getattr(self, item.name))

    @property
    def greedy(self) -> bool:
        """Whether nothing is left to chance."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether what stands in the row changes its logits."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


# Setting -> (whether a number is allowed, what is, the way out).
_RANGES: dict[str, tuple[Any, str, str]] = {
    "temperature": (lambda x: 0 <= x <= 1e6, "from 0 to 1e6", "0 is greedy, 1 draws as the model says"),
    "top_k": (lambda x: x >= 1, "an integer of at least 1", "None keeps the whole vocabulary"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1", "1 keeps the whole vocabulary"),
    "min_p": (lambda x: 0 <= x <= 1, "from 0 to 1", "0 keeps the whole vocabulary"),
    "repetition_penalty": (lambda x: 1e-3 <= x <= 1e3, "from 0.001 to 1000", "1 is none"),
    "frequency_penalty": (lambda x: -1e3 <= x <= 1e3, "from -1000 to 1000", "0 is none"),
    "presence_penalty": (lambda x: -1e3 <= x <= 1e3, "from -1000 to 1000", "0 is none"),
}


def _check(name: str, value: Any) -> None:
    allowed, words, fix = _RANGES[name]
    if name == "top_k" and value is None:
        return
    kinds = (int, np.integer) if name == "top_k" else (int, float, np.integer, np.floating)
    number = isinstance(value, kinds) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and allowed(value)):
        raise RzooError(f"{name} ({value!r:.40}) must be {words}", field=name, value=value, fix=fix)


def seed_of(given: Any, index: int) -> int:
    """The seed of the prompt at `index` of a call that was given one for all, or None: a fresh one.

    The first prompt has the given seed itself, so that it, and with its own reported seed every other one, is drawn
    again alone. Raises RzooError for what is no seed.
    """
    if given is None:
        return secrets.randbelow(SEEDS)
    if not isinstance(given, int | np.integer) or isinstance(given, bool) or not 0 <= given < SEEDS:
        raise RzooError(
            f"seed ({given!r:.40}) must be an integer from 0 to 2**63 - 1",
            field="seed",
            value=given,
            fix="leave it out for a fresh one",
        )
    if index == 0:
        return int(given)
    digest = hashlib.sha256(f"{int(given)}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % SEEDS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draws:
    """Settings of the rows of a batch as arrays [b], a key each [b, 2], and where some row has penalties what its
    prompt holds, bool [b, v], and its answer, counts [b, v]; else None.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition: Any
    frequency: Any
    presence: Any
    keys: Any
    prompt: Any = None
    counts: Any = None


def draws_of(
    settings: Sequence[Sampling],
    seeds: Sequence[tuple[int, int]],
    vocab: int,
    prompts: Sequence[Sequence[int]] = (),
    answers: Sequence[Sequence[int]] = (),
) -> Draws:
    """The arrays for rows with these settings and (seed, sample); prompts and answers: ids so far, of rows with
    penalties.
    """
    column = lambda name: np.asarray([getattr(s, name) for s in settings], np.float32)  # noqa: E731
    top_k = np.asarray([min(s.top_k or vocab, vocab) for s in settings], np.float32)
    roots = np.asarray([[seed >> 32, seed & 0xFFFFFFFF] for seed, _ in seeds], np.uint32)
    samples = np.asarray([sample for _, sample in seeds], np.uint32)
    held = any(s.penalised for s in settings)
    draws = Draws(
        column("temperature"),
        top_k,
        column("top_p"),
        column("min_p"),
        column("repetition_penalty"),
        column("frequency_penalty"),
        column("presence_penalty"),
        folded(roots, samples),
        _counted(prompts, vocab) > 0 if held else None,
        _counted(answers, vocab) if held else None,
    )
    return jax.tree.map(jnp.asarray, draws)


def _counted(rows: Sequence[Sequence[int]], vocab: int) -> np.ndarray:
    return np.stack([np.bincount(np.asarray(ids, np.int64), minlength=vocab) for ids in rows]).astype(np.int32)


@jax.jit
def folded(roots: UInt[Array, "b 2"], numbers: UInt[Array, " b"]) -> Array:
    """Key data [b, 2] of keys with a number folded in."""
    fold = lambda root, n: jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(root), n))  # noqa: E731
    return jax.vmap(fold)(roots, numbers)


@dataclass(frozen=True)
class Greedy:
    """The most likely of the first `vocab` ids: rows that pad the vocabulary stand for no token."""

    vocab: int

    def __call__(self, logits: Float[Array, "b v"], key: Any) -> Int[Array, " b"]:
        return jnp.argmax(logits[:, : self.vocab], axis=-1).astype(jnp.int32)


@dataclass(frozen=True)
class Sampler:
    """A step.Choose whose state is Draws. vocab: ids that stand for tokens.

    top: how many of the most likely tokens are noted with their log-probabilities beside the chosen one's; None: no
    notes. Log-probabilities are the model's own, before penalties, temperature and filters.
    """

    vocab: int
    top: int | None = None

    def __call__(self, logits: Array, draws: Draws, positions: Array, live: Array) -> tuple[Array, Any, Draws]:
        logits = in_vocabulary(logits, self.vocab)
        weights = log_weights(logits, draws)
        chosen = jnp.argmax(weights + noise(draws.keys, positions, weights.shape[-1]), axis=-1).astype(jnp.int32)
        if draws.counts is not None:
            counts = draws.counts.at[jnp.arange(len(chosen)), chosen].add(live.astype(jnp.int32))
            draws = Draws(**{**vars(draws), "counts": counts})
        return chosen, () if self.top is None else self._notes(logits, chosen), draws

    def _notes(self, logits: Array, chosen: Array) -> tuple[Array, Array, Array]:
        logprobs = jax.nn.log_softmax(logits)
        values, ids = jax.lax.top_k(logprobs, min(self.top or 0, self.vocab))
        return jnp.take_along_axis(logprobs, chosen[:, None], axis=1)[:, 0], values, ids


def in_vocabulary(logits: Float[Array, "*b v"], vocab: int) -> Float[Array, "*b v"]:
    """Float32, with -inf for ids that stand for no token."""
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits.astype(jnp.float32), -jnp.inf)


def noise(keys: UInt[Array, "b 2"], positions: Int[Array, " b"], size: int) -> Float[Array, "b size"]:
    """Gumbel noise of each row at its position."""
    at = lambda key, position: jax.random.gumbel(jax.random.fold_in(jax.random.wrap_key_data(key), position), (size,))  # noqa: E731
    return jax.vmap(at)(keys, positions)


def log_weights(logits: Float[Array, "b v"], draws: Draws) -> Float[Array, "b v"]:
    """Logarithms of weights from which a token is drawn: the largest is 0, of what is excluded -inf."""
    logits = _penalised(logits, draws)
    column = lambda a: a[:, None]  # noqa: E731
    best = jnp.arange(logits.shape[-1]) == column(jnp.argmax(logits, axis=-1))
    # The lowest temperature keeps float32 normal: all but the largest then underflow to no weight.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / column(jnp.maximum(draws.temperature, 1e-30))
    size = logits.shape[-1]
    kept = jnp.where(_at_least(scaled, jnp.ones_like(scaled), draws.top_k, draws.top_k < size), scaled, -jnp.inf)
    kept = jnp.where(_at_least(kept, jax.nn.softmax(kept), draws.top_p, draws.top_p < 1), kept, -jnp.inf)
    kept = jnp.where(kept >= column(jnp.log(draws.min_p)), kept, -jnp.inf)
    return jnp.where(column(draws.temperature) > 0, kept, jnp.where(best, 0.0, -jnp.inf))


def _penalised(logits: Array, draws: Draws) -> Array:
    if draws.counts is None:
        return logits
    seen, factor = draws.prompt | (draws.counts > 0), draws.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - draws.frequency[:, None] * draws.counts - draws.presence[:, None] * (draws.counts > 0)


def _at_least(values: Array, weights: Array, wanted: Array, active: Array) -> Array:
    """Where `values` reach the highest threshold above which a row holds the weight `wanted`; everywhere in rows that
    are not active.

    A search over the bits of a float: 32 sums of the row where a sort costs tens of times as much, and none where no
    row is active.
    """
    signed = jax.lax.bitcast_convert_type(values, jnp.int32)
    ordered = jax.lax.bitcast_convert_type(jnp.where(signed < 0, ~signed, signed | jnp.int32(-(2**31))), jnp.uint32)

    def bit(i, threshold):
        higher = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        held = jnp.where(ordered >= higher[:, None], weights, 0).sum(axis=-1)
        return jnp.where(active & (held >= wanted), higher, threshold)

    none = jnp.zeros(values.shape[0], jnp.uint32)
    threshold = jax.lax.fori_loop(0, jnp.where(jnp.any(active), 32, 0), bit, none)
    return ordered >= threshold[:, None]
