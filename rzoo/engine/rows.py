"""One answer while it is made, as the host sees it: ids, text, where it stops."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rzoo.chat import END_THINK, THINK, split_reasoning
from rzoo.engine.sampling import Sampling
from rzoo.tokenizer import IncrementalDecoder

TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Completion:
    """One answer; printed, it is its text.

    tokens: ids of the answer as generated: a stop id, or the token in which a stop string ended, is the last of them.
    finish_reason: stop, length or interrupted. text: the answer without its reasoning and without what stopped it;
    reasoning: what stood between the think tags, or None. seed: draws the same again, with the same settings; None
    where nothing is drawn. logprobs, top_logprobs: of each token, and (id, log-probability) of the likeliest in its
    place, where they were asked for; of a token that max_think_tokens put there None and ().
    computed: tokens of the prompt that had to be computed, the rest was kept or shared. passes: of the model over
    draft tokens, 0 without a draft.
    """

    text: str
    prompt_tokens: tuple[int, ...] = field(repr=False)
    tokens: tuple[int, ...] = field(repr=False)
    reasoning: str | None
    finish_reason: str
    seed: int | None = None
    logprobs: tuple[float | None, ...] | None = field(default=None, repr=False)
    top_logprobs: tuple[TopLogprobs, ...] | None = field(default=None, repr=False)
    computed: int = field(default=0, repr=False, compare=False)
    passes: int = field(default=0, repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens that each pass of the model over draft tokens gave; the first comes with the prompt."""
        return (len(self.tokens) - 1) / self.passes if self.passes else None


class StopText:
    """Passes text on but for what is, or may yet become, one of some strings; `found` once one is."""

    def __init__(self, stops: Iterable[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is certain: all before the first stop string, without an end that could begin one."""
        text, self._held = self._held + text, ""
        starts = [start for start in (text.find(stop) for stop in self._stops) if start >= 0]
        if starts:
            self.found = True
            return text[: min(starts)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """What was held and became no stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` is a beginning of `stop`, less than all of it."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass
class Row:
    """limit: of tokens. stops: ids that end it. opened: whether the prompt ends in an open <think>. thought: after how
    many tokens a thought is closed with the ids `closing`, None for never. top: of Sampler's notes.
    """

    prompt: tuple[int, ...]
    limit: int
    stops: tuple[int, ...]
    decoder: IncrementalDecoder | None
    stopper: StopText
    opened: bool
    sampling: Sampling
    seed: int = 0
    sample: int = 0
    thought: int | None = None
    closing: tuple[int, ...] = ()
    top: int | None = None
    tokens: list[int] = field(default_factory=list)
    written: str = ""  # all text, what is held included
    pieces: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    computed: int = 0
    passes: int = 0

    def take(self, ids: Iterable[int], notes: Sequence[Any] | None = None) -> str:
        """Adds ids, up to where the answer ends; returns the text that became certain. notes: the Sampler's, [t, …]."""
        pieces = []
        for place, number in enumerate(ids):
            if self.finish_reason:
                break
            self.tokens.append(number)
            if self.top is not None:
                self._note(None if notes is None else [column[place] for column in notes])
            pieces.append(self._text_after(number))
        self.pieces += pieces
        return "".join(pieces)

    def _text_after(self, number: int) -> str:
        """The text that became certain by one more token."""
        ended = number in self.stops
        new = "" if self.decoder is None or ended else self.decoder.push([number])
        if ended or len(self.tokens) >= self.limit:
            self.finish_reason = "stop" if ended else "length"
            new += "" if self.decoder is None else self.decoder.finish()
        self.written += new if self.thought is not None else ""
        certain = self.stopper.push(new)
        if self.stopper.found:
            self.finish_reason = "stop"
        return certain + self.stopper.finish() if self.finish_reason else certain

    def _note(self, note: Sequence[Any] | None) -> None:
        chosen, values, ids = note if note is not None else (None, (), ())
        self.logprobs.append(None if chosen is None else float(chosen))
        self.top_logprobs.append(tuple((int(i), float(v)) for i, v in zip(ids, values, strict=True)))

    def wanted(self, most: int) -> int:
        """How many tokens to ask for, at most `most`: none past the limit, none past where a thought is closed."""
        if self.finish_reason:
            return 0
        most = min(most, self.limit - len(self.tokens))
        if self.thought is None:
            return most
        if not self.opened and self.written.lstrip() != THINK and THINK.startswith(self.written.lstrip()):
            return 1  # it may be about to open a thought
        return min(most, self.thought - len(self.tokens)) if self.thinks else most

    @property
    def thinks(self) -> bool:
        """Whether it is inside of a thought; known where `thought` is given."""
        return (self.opened or self.written.lstrip().startswith(THINK)) and END_THINK not in self.written

    @property
    def must_close(self) -> bool:
        """Whether its thought is to be closed now."""
        return self.thought is not None and not self.finish_reason and self.thinks and len(self.tokens) >= self.thought

    def completion(self) -> Completion:
        """What there is so far."""
        reasoning, text = split_reasoning("".join(self.pieces), opened=self.opened)
        return Completion(
            text,
            self.prompt,
            tuple(self.tokens),
            reasoning,
            self.finish_reason or "interrupted",
            seed=None if self.sampling.greedy else self.seed,
            logprobs=None if self.top is None else tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs) if self.top else None,
            computed=self.computed,
            passes=self.passes,
        )
