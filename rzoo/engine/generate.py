"""From a prompt to an answer: `generate` and `stream`, greedy.

A string is one user turn where the model has a chat template and raw text where it has none (or with raw=True); a list
of messages is a conversation; a list of ids is taken as it is.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rzoo.chat import ReasoningSplitter, encode_chat, opens_reasoning, split_reasoning
from rzoo.core import RzooError
from rzoo.engine.session import decode, prefill
from rzoo.formats import with_thinking
from rzoo.handle import LM
from rzoo.tokenizer import IncrementalDecoder


@dataclass(frozen=True)
class Completion:
    """One answer; printed, it is its text.

    tokens: ids of the answer as generated, the stop included. finish_reason: stop, length or interrupted.
    text: the answer without its reasoning; reasoning: what stood between the think tags, or None.
    """

    text: str
    prompt_tokens: tuple[int, ...] = field(repr=False)
    tokens: tuple[int, ...] = field(repr=False)
    reasoning: str | None
    finish_reason: str

    def __str__(self) -> str:
        return self.text


@dataclass
class _Row:
    """What the host knows of one row while it is generated."""

    prompt: tuple[int, ...]
    limit: int
    decoder: IncrementalDecoder | None
    opened: bool
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""

    def take(self, new: np.ndarray, stops: Sequence[int]) -> str:
        """Adds new ids (-1: none); returns the text that became certain."""
        ids = [int(i) for i in new if i >= 0]
        self.tokens += ids
        if ids and ids[-1] in stops:
            self.finish_reason = "stop"
            ids = ids[:-1]
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        if self.decoder is None:
            return ""
        piece = self.decoder.push(ids) + (self.decoder.finish() if self.finish_reason else "")
        self.pieces.append(piece)
        return piece

    def completion(self) -> Completion:
        reasoning, text = split_reasoning("".join(self.pieces), opened=self.opened)
        return Completion(text, self.prompt, tuple(self.tokens), reasoning, self.finish_reason or "interrupted")


def generate(
    lm: LM, prompts: Any, *, max_new_tokens: int = 512, raw: bool = False, thinking: bool | None = None
) -> Any:
    """Greedy answers: one prompt gives one Completion, a list of prompts a list in the same order, computed as one
    batch.

    A prompt is text (one user turn where the model has a chat template; with raw, or where it has none, the text as it
    is, control tokens in it alive), a list of messages {"role", "content"}, or a list of token ids. max_new_tokens: of
    each answer, at most. thinking: True or False switches a reasoning model's thinking; None leaves it as it comes.
    Ctrl-C ends the call with what there is (finish_reason "interrupted"). Raises RzooError, before any work, for a
    prompt that is empty, malformed or leaves no room in the context.
    """
    single = is_single(prompts)
    batch: Any = [prompts] if single else list(prompts)
    if not batch:
        return []
    rows = [_row(lm, prompt, max_new_tokens, raw, thinking) for prompt in batch]
    try:
        for _ in _run(lm, rows):
            pass
    except KeyboardInterrupt:
        pass
    answers = [row.completion() for row in rows]
    return answers[0] if single else answers


class Stream(Iterator[str]):
    """The answer to one prompt as it comes: iterate for text, reasoning included; no piece splits a character.

    Joined, the pieces are the text that `generate` decodes. `completion` is what there is so far, also after Ctrl-C.
    """

    def __init__(
        self, lm: LM, prompt: Any, *, max_new_tokens: int = 512, raw: bool = False, thinking: bool | None = None
    ):
        if not is_single(prompt):
            raise RzooError("stream takes one prompt; a list of prompts goes to generate", field="prompt")
        if isinstance(lm, LM) and lm.tokenizer is None:
            raise RzooError("stream gives text, and this model has no tokenizer", field="lm", fix="generate takes ids")
        self._row = _row(lm, prompt, max_new_tokens, raw, thinking)
        self._pieces = (piece for pieces in _run(lm, [self._row]) for piece in pieces if piece)
        self._seconds: list[float] = [time.perf_counter()]  # when asked for, then when each piece came

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        finally:
            self._seconds.append(time.perf_counter())

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self._row.prompt)

    @property
    def completion(self) -> Completion:
        """The answer so far."""
        return self._row.completion()

    def parts(self) -> Iterator[tuple[str, str]]:
        """The same in pairs (reasoning, answer), without the tags: joined, what `completion` holds of each."""
        splitter = ReasoningSplitter(opened=self._row.opened)
        yield from map(splitter.push, self)
        yield splitter.finish()

    def report(self) -> str:
        """One line: tokens, seconds to the first piece (compiling included), tokens a second after it."""
        made, start, *came = len(self._row.tokens), *self._seconds
        if not came or not made:
            return f"no tokens ({self.completion.finish_reason})"
        after, span = max(made - 1, 0), came[-1] - came[0]
        rate = f", then {after / span:.1f} tokens/s" if after and span > 0 else ""
        tokens = "1 token" if made == 1 else f"{made} tokens"
        return f"{tokens}, first after {came[0] - start:.1f} s{rate} ({self.completion.finish_reason})"


def stream(
    lm: LM, prompt: Any, *, max_new_tokens: int = 512, raw: bool = False, thinking: bool | None = None
) -> Stream:
    """The answer to one prompt piece by piece: `for piece in rzoo.stream(lm, "…"): print(piece, end="")`.

    Raises RzooError here, before the first piece is asked for, as `generate` does.
    """
    return Stream(lm, prompt, max_new_tokens=max_new_tokens, raw=raw, thinking=thinking)


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt (text, ids, messages) and not a list of prompts."""
    if isinstance(prompts, bytes):
        raise RzooError("prompt is bytes: decode them to text first", field="prompt")
    if isinstance(prompts, str):
        return True
    if hasattr(prompts, "ndim"):
        return prompts.ndim == 1
    if not isinstance(prompts, Sequence):
        kind = type(prompts).__name__
        raise RzooError(
            f"prompt must be text, a list of ids, a list of messages, or a list of those; got {kind}", field="prompt"
        )
    return bool(prompts) and all(
        isinstance(p, int) or hasattr(p, "__index__") or isinstance(p, Mapping) for p in prompts
    )


def _run(lm: LM, rows: list[_Row]) -> Iterator[list[str]]:
    """Decodes until every row is finished; after each device loop yields the new text of each row."""
    stops = lm.about.stops
    longest = max(len(row.prompt) for row in rows)
    state = prefill(lm, [row.prompt for row in rows], room=min(max(row.limit for row in rows), longest + 128))
    step = 1  # the first token is shown as soon as it is known
    while not all(row.finish_reason for row in rows):
        wanted = [0 if row.finish_reason else min(step, row.limit - len(row.tokens)) for row in rows]
        tokens, state = decode(lm, state, wanted, stops=stops)
        yield ["" if row.finish_reason else row.take(ids, stops) for row, ids in zip(rows, tokens, strict=True)]
        step = len(tokens[0])


def _row(lm: LM, prompt: Any, max_new_tokens: int, raw: bool, thinking: bool | None) -> _Row:
    if not isinstance(lm, LM):
        raise RzooError(f"lm must be a handle from rzoo.load; got {type(lm).__name__}", field="lm")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise RzooError(
            f"max_new_tokens ({max_new_tokens!r}) must be an integer of at least 1",
            field="max_new_tokens",
            value=max_new_tokens,
        )
    ids = prompt_ids(lm, prompt, raw=raw, thinking=thinking)
    room = lm.config.context - len(ids)
    if room < 1:
        raise RzooError(
            f"the prompt has {len(ids)} tokens, the context of the model is {lm.config.context}",
            field="prompt",
            value=len(ids),
            fix=f"shorten it to at most {lm.config.context - 1} tokens",
        )
    decoder = IncrementalDecoder(lm.tokenizer) if lm.tokenizer else None
    opened = lm.tokenizer is not None and opens_reasoning(lm.tokenizer.decode(ids, skip_special=False))
    return _Row(tuple(ids), min(max_new_tokens, room), decoder, opened)


def prompt_ids(lm: LM, prompt: Any, *, raw: bool = False, thinking: bool | None = None) -> list[int]:
    """The token ids of one prompt, as `generate` reads it: exactly one BOS where the model uses one.

    thinking: True or False puts the words that switch it into the conversation (rzoo.formats.THINKING).
    """
    if isinstance(prompt, str):
        _needs_text(lm)
        if not prompt.strip():
            raise RzooError("the prompt is empty", field="prompt", fix="give some text")
        if raw or lm.about.template is None:
            ids = lm.tokenizer.encode(prompt, add_bos=lm.tokenizer.add_bos_token)
        else:
            ids = _chat_ids(lm, [{"role": "user", "content": prompt}], thinking)
    elif not isinstance(prompt, Sequence) and not hasattr(prompt, "__array__"):
        raise RzooError(f"a prompt is text, ids or messages; got {type(prompt).__name__}", field="prompt", value=prompt)
    elif len(prompt) and all(isinstance(m, Mapping) for m in prompt):
        _needs_text(lm)
        if lm.about.template is None:
            raise RzooError(
                "messages need a chat template and this model has none", field="prompt", fix="give plain text"
            )
        ids = _chat_ids(lm, prompt, thinking)
    else:
        wrong = next((i for i in prompt if not hasattr(i, "__index__")), None)
        if wrong is not None:
            raise RzooError(f"prompt contains {wrong!r}, which is no token id", field="prompt", value=wrong)
        ids = [int(i) for i in prompt]
    _check_ids(ids, lm.config.vocab_size)
    return ids


def _chat_ids(lm: LM, messages: Any, thinking: bool | None) -> list[int]:
    asked = with_thinking(lm.about.thinking, messages, thinking)
    ids = encode_chat(lm.tokenizer, asked.messages, template=lm.about.template, **asked.variables)
    if asked.opening and not opens_reasoning(lm.tokenizer.decode(ids[-8:], skip_special=False)):
        ids += lm.tokenizer.encode(asked.opening)
    return ids


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        raise RzooError("the prompt is empty", field="prompt", fix="give at least one token")
    for i in ids:
        if not 0 <= i < vocab_size:
            raise RzooError(
                f"prompt contains id {i}, outside of the vocabulary 0..{vocab_size - 1}", field="prompt", value=i
            )


def _needs_text(lm: LM) -> None:
    if lm.tokenizer is None:
        raise RzooError(
            f"{lm.about.source} has no tokenizer",
            field="prompt",
            fix="add tokenizer.json to its folder, or give token ids",
        )
