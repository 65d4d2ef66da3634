"""The options of `generate` and `stream`, checked before any work, and the rows that prompts become under them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rzoo.chat import END_THINK, opens_reasoning
from rzoo.core import RzooError, closest
from rzoo.engine.prompts import prompt_ids, vocabulary
from rzoo.engine.rows import Row, StopText
from rzoo.engine.sampling import Sampling, seed_of
from rzoo.engine.session import Session
from rzoo.handle import LM
from rzoo.sharding.pipeline import Pipeline
from rzoo.tokenizer import IncrementalDecoder

MOST_TOP = 100  # alternatives of logprobs
MOST_DRAFTED = 32  # draft tokens of one pass


SETTINGS = tuple(item.name for item in fields(Sampling))
LISTS = (list, tuple)  # of values for each prompt


@dataclass(frozen=True, kw_only=True)
class Options:
    """As `rzoo.generate` describes them."""

    max_new_tokens: Any = 512
    temperature: Any = 0.0
    top_k: Any = None
    top_p: Any = 1.0
    min_p: Any = 0.0
    repetition_penalty: Any = 1.0
    frequency_penalty: Any = 0.0
    presence_penalty: Any = 0.0
    seed: Any = None
    n: int = 1
    stop: Any = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    max_think_tokens: Any = None
    deterministic: bool = False
    draft: Any = None
    draft_tokens: int = 4
    session: Any = None
    raw: bool = False
    thinking: bool | None = None


def options_of(given: dict[str, Any]) -> Options:
    """The options with these values. Raises RzooError for an unknown name and for a value out of range."""
    known = [item.name for item in fields(Options)]
    for name in given:
        if name not in known:
            raise RzooError(f"option ({name}) is unknown", field=name, value=given[name], fix=closest(name, known))
    options = Options(**given)
    Sampling(**{name: value for name, value in given.items() if name in SETTINGS and not isinstance(value, LISTS)})
    _check_integer("n", options.n, 1, 4096)
    _check_integer("draft_tokens", options.draft_tokens, 1, MOST_DRAFTED)
    if options.logprobs is not None:
        _check_integer("logprobs", options.logprobs, 0, MOST_TOP)
    if options.session is not None and not isinstance(options.session, Session):
        raise RzooError("session must be a rzoo.Session", field="session", value=options.session)
    if options.draft is not None:
        _check_draft(options)
    return options


def _check_draft(options: Options) -> None:
    if options.draft not in ("lookup", "mtp") and not isinstance(options.draft, LM):
        words = f'draft ({options.draft!r:.40}) must be a handle from rzoo.load, "lookup" or "mtp"'
        raise RzooError(words, field="draft", value=options.draft)
    for name in ("logprobs", "session", "max_think_tokens"):
        if getattr(options, name) is not None:
            raise RzooError(f"{name} can't be had with a draft", field=name, fix="leave one of the two out")


def _check_vocabulary(lm: LM, draft: LM) -> None:
    """Raises RzooError where the ids of `draft` do not stand for the same tokens as those of `lm`."""
    ours, its = vocabulary(lm), vocabulary(draft)
    unlike = ours != its
    if lm.tokenizer is not None and draft.tokenizer is not None and not unlike:
        unlike = lm.tokenizer.core.get_vocab() != draft.tokenizer.core.get_vocab()
    if unlike:
        raise RzooError(
            f"draft has {its} tokens and the model {ours}, or others of the same number",
            field="draft",
            value=its,
            fix='give a model with the same vocabulary, or draft="lookup"',
        )


def _check_module(lm: LM) -> None:
    """Raises RzooError for a model that has no module to draft with, or has it on another stage of a pipeline."""
    if not getattr(lm.config, "mtp", False):
        words = "draft (mtp): this model has no module for multi-token prediction"
        fix = 'load a checkpoint that holds one with mtp=True, or give draft="lookup"'
        raise RzooError(words, field="draft", value="mtp", fix=fix)
    if isinstance(lm.forms.place, Pipeline):
        words = "draft (mtp) is not possible under pipe"
        raise RzooError(words, field="draft", value="mtp", fix="load the model under other rules")


def _check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        words = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise RzooError(f"{name} ({value!r:.40}) must be an integer {words}", field=name, value=value)


def rows_of(lm: LM, prompts: Sequence[Any], options: Options) -> list[Row]:
    """The rows of each prompt, `n` in turn. Raises RzooError for what can't be answered."""
    if not isinstance(lm, LM):
        raise RzooError(f"lm must be a handle from rzoo.load; got {type(lm).__name__}", field="lm")
    if options.session is not None and (len(prompts), options.n) != (1, 1):
        raise RzooError("a session keeps one prompt and its answer", field="session", fix="give one prompt, and no n")
    if isinstance(options.draft, LM):
        _check_vocabulary(lm, options.draft)
    if options.draft == "mtp":
        _check_module(lm)
    return [row for place in range(len(prompts)) for row in _rows(lm, prompts, place, options)]


def _rows(lm: LM, prompts: Sequence[Any], place: int, options: Options) -> list[Row]:
    """The rows of the prompt at `place`."""

    def own(name: str) -> Any:
        value = getattr(options, name)
        if not isinstance(value, LISTS):
            return value
        if len(value) != len(prompts):
            words = f"{name} has {len(value)} values for {len(prompts)} prompts"
            raise RzooError(words, field=name, value=value, fix="give one for all, or one for each")
        return value[place]

    sampling = Sampling(**{name: own(name) for name in SETTINGS})
    if options.n > 1 and sampling.greedy:
        words = f"n ({options.n}) answers at temperature 0 would all be the same"
        raise RzooError(words, field="n", value=options.n, fix="give a temperature, such as temperature=0.6")
    if options.draft is not None and sampling.penalised:
        raise RzooError("penalties can't be had with a draft", field="draft", fix="leave one of the two out")
    _check_integer("max_new_tokens", own("max_new_tokens"), 1)
    thought = own("max_think_tokens")
    if thought is not None:
        _check_integer("max_think_tokens", thought, 0)
    ids = tuple(prompt_ids(lm, prompts[place], raw=options.raw, thinking=options.thinking))
    seed = seed_of(own("seed"), 0 if isinstance(options.seed, LISTS) else place)
    return [
        _row(lm, ids, min(own("max_new_tokens"), _room(lm, ids)), options, sampling, (seed, sample), thought)
        for sample in range(options.n)
    ]


def _room(lm: LM, ids: Sequence[int]) -> int:
    room = lm.config.context - len(ids)
    if room < 1:
        raise RzooError(
            f"the prompt has {len(ids)} tokens, the context of the model is {lm.config.context}",
            field="prompt",
            value=len(ids),
            fix=f"shorten it to at most {lm.config.context - 1} tokens",
        )
    return room


def _row(
    lm: LM,
    ids: tuple[int, ...],
    limit: int,
    options: Options,
    sampling: Sampling,
    seed: tuple[int, int],
    thought: int | None,
) -> Row:
    text_stops, stops = _stops(lm, options)
    return Row(
        ids,
        int(limit),
        stops,
        IncrementalDecoder(lm.tokenizer) if lm.tokenizer else None,
        StopText(text_stops),
        lm.tokenizer is not None and opens_reasoning(lm.tokenizer.decode(ids, skip_special=False)),
        sampling,
        *seed,
        thought=thought if lm.tokenizer else None,
        closing=tuple(lm.tokenizer.encode(END_THINK)) if lm.tokenizer and thought is not None else (),
        top=options.logprobs,
    )


def _stops(lm: LM, options: Options) -> tuple[list[str], tuple[int, ...]]:
    """Strings and ids that end an answer: the model's own unless they are ignored, and those of `stop`.

    A control token given by its text is an id: text has no control tokens in it.
    """
    given = options.stop if isinstance(options.stop, LISTS) else [] if options.stop is None else [options.stop]
    texts: list[str] = []
    ids = [] if options.ignore_eos else list(lm.about.stops)
    for stop in given:
        if isinstance(stop, str) and stop and lm.tokenizer is None:
            raise RzooError("stop: this model has no tokenizer", field="stop", value=stop, fix="give token ids")
        if isinstance(stop, str) and stop:
            number = lm.tokenizer.token_id(stop)
            special = number in lm.tokenizer.special_ids
            (ids if special else texts).append(number if special else stop)  # type: ignore[arg-type]
        elif isinstance(stop, int | np.integer) and not isinstance(stop, bool) and 0 <= stop < lm.config.vocab_size:
            ids.append(int(stop))
        else:
            words = f"stop ({stop!r:.40}) must be text that is not empty, a token id, or a list of these"
            raise RzooError(words, field="stop", value=stop)
    return texts, tuple(dict.fromkeys(ids))
