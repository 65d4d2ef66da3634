"""What a model makes of given continuations of a prompt: log-probabilities, without sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rzoo.compile.programs import on_host
from rzoo.core import RzooError
from rzoo.engine.prompts import check_ids, needs_text, prompt_ids
from rzoo.engine.session import CHUNKS, State, bucket, padded, prefill, read_chunk, take_rows
from rzoo.handle import LM
from rzoo.models.rope import depends_on_length

MOST_ROWS = 8  # continuations of a batch: the logits of a chunk, b * t * v float32, are in memory for a moment
CHUNK = CHUNKS[-1]


@dataclass(frozen=True)
class Score:
    """logprobs: natural logarithm of each token's probability after the prompt and those before it, over all rows of
    the vocabulary. greedy: whether each token is the likeliest in its place.
    """

    tokens: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float, ...] = field(repr=False)
    total: float
    greedy: bool


def score(lm: LM, prompt: Any, continuations: Any, *, raw: bool = False) -> Any:
    """Log-probabilities of continuations of a prompt, which is computed once: a Score for one continuation, a list in
    the same order for a list.

    prompt: as `generate` reads it. A continuation is text or token ids; text after a text that is taken as it is (raw,
    or a model without a template) is tokenized together with it where that leaves the prompt's tokens as they are, else
    by itself. Raises RzooError for a continuation that is empty, malformed or does not fit into the context.
    """
    if not isinstance(lm, LM):
        raise RzooError(f"lm must be a handle from rzoo.load; got {type(lm).__name__}", field="lm")
    ids = prompt_ids(lm, prompt, raw=raw)
    text = _raw_text(lm, prompt, raw)
    single = _is_single(continuations)
    given = [continuations] if single else list(continuations)
    wanted = [_continuation_ids(lm, ids, text, continuation) for continuation in given]
    state = prefill(lm, [ids], max((len(c) for c in wanted), default=0) + CHUNK)
    found: list[Score] = []
    for first in range(0, len(wanted), MOST_ROWS):
        batch = wanted[first : first + MOST_ROWS]
        found += _scores(lm, state, batch, [0] * len(batch))
    return found[0] if single else found


def score_pairs(lm: LM, pairs: Sequence[tuple[Any, Any]], *, raw: bool = False) -> list[Score]:
    """A Score for each (prompt, continuation), in the same order, many prompts in a batch: what all prompts begin with
    is computed once, and so is a prompt that neighbouring pairs share.

    Raises RzooError as `score` does.
    """
    if not isinstance(lm, LM):
        raise RzooError(f"lm must be a handle from rzoo.load; got {type(lm).__name__}", field="lm")
    asked = [(prompt_ids(lm, prompt, raw=raw), prompt, continuation) for prompt, continuation in pairs]
    wanted = [_continuation_ids(lm, ids, _raw_text(lm, text, raw), given) for ids, text, given in asked]
    prompts = [ids for ids, _, _ in asked]
    room = max((len(p) + len(c) for p, c in zip(prompts, wanted, strict=True)), default=0) + 2 * CHUNK
    shared = 0 if depends_on_length(lm.config.rope) else _common(prompts)
    start = prefill(lm, [prompts[0][:shared]], room) if shared else None
    found: list[Score] = []
    for first in range(0, len(pairs), MOST_ROWS):
        batch = slice(first, first + MOST_ROWS)
        found += _batch_scores(lm, start, [p[shared:] for p in prompts[batch]], wanted[batch], room)
    return found


def _common(prompts: Sequence[list[int]]) -> int:
    """How many tokens to compute once: those that all prompts begin with, one of each left over; 0 for few."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)  # in the order of words, so that all others begin as these two do
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    same = min(same, *(len(prompt) - 1 for prompt in prompts))
    return same if same >= CHUNK else 0


def _batch_scores(
    lm: LM, start: State | None, prompts: Sequence[list[int]], wanted: Sequence[Sequence[int]], room: int
) -> list[Score]:
    """Of up to MOST_ROWS pairs whose prompts follow the one row of `start`."""
    unique = list(dict.fromkeys(map(tuple, prompts)))
    rows = [*unique, *[()] * (bucket(len(unique)) - len(unique))]
    state = prefill(lm, rows, room, after=None if start is None else take_rows(lm, start, [0] * len(rows)))
    return _scores(lm, state, wanted, [unique.index(tuple(prompt)) for prompt in prompts])


def _raw_text(lm: LM, prompt: Any, raw: bool) -> str | None:
    """The prompt where it is text that is taken as it is."""
    return prompt if isinstance(prompt, str) and (raw or lm.about.template is None) else None


def _is_single(continuations: Any) -> bool:
    if isinstance(continuations, str):
        return True
    if not isinstance(continuations, Sequence) and not hasattr(continuations, "ndim"):
        kind = type(continuations).__name__
        raise RzooError(f"continuations must be text, ids, or a list of these; got {kind}", field="continuations")
    return len(continuations) > 0 and all(hasattr(item, "__index__") for item in continuations)


def _continuation_ids(lm: LM, prompt: list[int], text: str | None, continuation: Any) -> list[int]:
    if isinstance(continuation, str):
        needs_text(lm)
        whole = lm.tokenizer.encode(text + continuation, add_bos=lm.tokenizer.add_bos_token) if text else []
        shared = whole[: len(prompt)] == prompt
        ids = whole[len(prompt) :] if shared else lm.tokenizer.encode(continuation, parse_special=text is not None)
    else:
        ids = prompt_ids(lm, continuation) if len(continuation) else []
    if not ids:
        raise RzooError("a continuation is empty", field="continuations", fix="give at least one token")
    check_ids(ids, lm.config.vocab_size)
    if len(prompt) + len(ids) > lm.config.context:
        raise RzooError(
            f"prompt and continuation have {len(prompt) + len(ids)} tokens, the context is {lm.config.context}",
            field="continuations",
            value=len(ids),
            fix="shorten one of the two",
        )
    return ids


def token_scores(
    logits: Float[Array, "b t v"], states: Any, targets: Int[Array, "b t"]
) -> tuple[Float[Array, "b t"], Bool[Array, "b t"]]:
    """The log-probability of each target, and whether it is the likeliest."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    chosen = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    return chosen, jnp.argmax(logits, axis=-1) == targets


_first_scores = jax.jit(lambda logits, targets: token_scores(logits[:, None], None, targets))


def _scores(lm: LM, prompts: State, wanted: Sequence[Sequence[int]], follows: Sequence[int]) -> list[Score]:
    """Of up to MOST_ROWS continuations, each of the row of `prompts` that it follows: the first token by the logits of
    the prompt, the rest in chunks.
    """
    rows, lengths = bucket(len(wanted)), np.asarray([len(c) for c in wanted])
    steps = -(-(int(lengths.max()) - 1) // CHUNK) * CHUNK
    ids = padded(wanted, rows, steps + 1)
    state = take_rows(lm, prompts, [*follows, *[0] * (rows - len(wanted))])
    parts = [_first_scores(state.logits, ids[:, :1])]
    fed = np.pad(lengths - 1, (0, rows - len(wanted)))
    for at in range(0, steps, CHUNK):
        counts = np.clip(fed - at, 0, CHUNK).astype(np.int32)
        targets = ids[:, at + 1 : at + 1 + CHUNK]
        found, state = read_chunk(lm, state, ids[:, at : at + CHUNK], counts, targets, token_scores)
        parts.append(found)
    logprobs, best = (np.concatenate([on_host(part[i]) for part in parts], axis=1) for i in (0, 1))
    return [_score(c, logprobs[i, : len(c)], best[i, : len(c)]) for i, c in enumerate(wanted)]


def _score(ids: Sequence[int], logprobs: np.ndarray, best: np.ndarray) -> Score:
    values = tuple(float(x) for x in logprobs)
    return Score(tuple(ids), values, float(sum(values)), bool(best.all()))
