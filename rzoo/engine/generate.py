"""From a prompt to an answer: `generate` and `stream`.

A string is one user turn where the model has a chat template and raw text where it has none (or with raw=True); a list
of messages is a conversation; a list of ids is taken as it is.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from rzoo.chat import ReasoningSplitter
from rzoo.core import RzooError
from rzoo.engine.options import options_of, rows_of
from rzoo.engine.prompts import is_single
from rzoo.engine.rows import Completion
from rzoo.engine.run import run
from rzoo.handle import LM


def generate(lm: LM, prompts: Any, **options: Any) -> Any:
    """One prompt gives one Completion, a list of prompts a list in the same order, computed as one batch; n above 1
    gives a list of n for each prompt.

    A prompt is text (one user turn where the model has a chat template; with raw, or where it has none, the text as it
    is, control tokens in it alive), a list of messages {"role", "content"}, or a list of token ids. Options, of which
    those with a * may also be lists with a value for each prompt:

    max_new_tokens* (512): of each answer, at most. raw (False). thinking (None): True or False switches a reasoning
    model's thinking; None leaves it as it comes. max_think_tokens* (None): after so many tokens a thought that is
    still open is closed with </think>, and the model answers.

    temperature* (0): greedy unless asked; what a checkpoint recommends is in `lm.about.recommended`. top_k* (None),
    top_p* (1), min_p* (0), repetition_penalty* (1), frequency_penalty* (0), presence_penalty* (0): see
    rzoo.engine.sampling. seed*: draws are repeatable and do not depend on what a prompt is batched with; without one
    they are fresh. Each Completion names the seed that draws it again, alone too. n (1): answers of each prompt, which
    is computed once.

    stop: text, token ids, or a list of them, which end an answer and are cut off it, in its reasoning too. ignore_eos
    (False): the model's own ends do not end it. logprobs (None): 0 gives the log-probability of each token, k also the
    k likeliest ones; they are the model's, before temperature, filters and penalties.

    deterministic (False): a greedy answer has bit-identical logits alone, in any batch and streamed, on a CPU in
    float32, at the price of padding (batches are of 8 rows) and of reading prompts one by one. Without it logits agree
    within 1e-4, which can turn a near tie. session: a rzoo.Session, for which the beginning that a prompt shares
    with the last one is not computed again (but with deterministic, since it would be in other chunks).

    draft: a smaller model with the same vocabulary, "mtp" for the model's own module of multi-token prediction (load it
    with mtp=True), or "lookup" for text that quotes itself; it guesses draft_tokens (4) at a time, and the model checks
    them in one pass. The answer is the same in distribution, and greedy, but for near ties, the same.

    Ctrl-C ends the call with what there is (finish_reason "interrupted"). Raises RzooError, before any work, for a
    prompt that is empty, malformed or leaves no room in the context, and for an option that is unknown or out of range.
    """
    asked = options_of(options)
    single = is_single(prompts)
    batch: Any = [prompts] if single else list(prompts)
    if not batch:
        return []
    rows = rows_of(lm, batch, asked)
    try:
        for _ in run(lm, rows, asked):
            pass
    except KeyboardInterrupt:
        pass
    found = [row.completion() for row in rows]
    answers: list[Any] = [found[i : i + asked.n] for i in range(0, len(found), asked.n)] if asked.n > 1 else found
    return answers[0] if single else answers


def finished(lm: LM, prompts: Sequence[Any], **options: Any) -> Iterator[tuple[int, Completion]]:
    """(place, Completion) of each of a list of prompts as soon as its answer ends, so that one can be kept before all
    are there.

    Options and errors are those of `generate`, n apart; Ctrl-C is raised, with nothing of the answers that are open.
    """
    asked = options_of(options)
    if asked.n != 1:
        raise RzooError("finished gives one answer to a prompt; n goes to generate", field="n", value=asked.n)
    rows = rows_of(lm, prompts, asked)
    open_rows = dict(enumerate(rows))
    for _ in run(lm, rows, asked):
        for place, row in [*open_rows.items()]:
            if row.finish_reason:
                del open_rows[place]
                yield place, row.completion()


class Stream(Iterator[str]):
    """The answer to one prompt as it comes: iterate for text, reasoning included; no piece splits a character.

    Joined, the pieces are the text that `generate` decodes. `completion` is what there is so far, also after Ctrl-C.
    """

    def __init__(self, lm: LM, prompt: Any, **options: Any):
        if not is_single(prompt):
            raise RzooError("stream takes one prompt; a list of prompts goes to generate", field="prompt")
        if isinstance(lm, LM) and lm.tokenizer is None:
            raise RzooError("stream gives text, and this model has no tokenizer", field="lm", fix="generate takes ids")
        asked = options_of(options)
        if asked.n != 1:
            raise RzooError("stream gives one answer; n goes to generate", field="n", value=asked.n)
        (self._row,) = rows_of(lm, [prompt], asked)
        self._loops = run(lm, [self._row], asked)
        self._pieces = (piece for pieces in self._loops for piece in pieces if piece)
        self._seconds: list[float] = [time.perf_counter()]  # when asked for, then when each piece came

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        finally:
            self._seconds.append(time.perf_counter())

    def close(self) -> None:
        """Ends the answer where it is; a session keeps what it has computed."""
        self._loops.close()  # type: ignore[attr-defined]

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
        """One line: tokens, seconds to the first piece (compiling included), tokens a second after it, the end, and the
        seed where tokens were drawn.
        """
        made, start, *came = len(self._row.tokens), *self._seconds
        seed = self.completion.seed
        ended = self.completion.finish_reason + ("" if seed is None else f", seed {seed}")
        if not came or not made:
            return f"no tokens ({ended})"
        after, span = max(made - 1, 0), came[-1] - came[0]
        rate = f", then {after / span:.1f} tokens/s" if after and span > 0 else ""
        tokens = "1 token" if made == 1 else f"{made} tokens"
        return f"{tokens}, first after {came[0] - start:.1f} s{rate} ({ended})"


def stream(lm: LM, prompt: Any, **options: Any) -> Stream:
    """The answer to one prompt piece by piece: `for piece in rzoo.stream(lm, "…"): print(piece, end="")`.

    Options and errors are those of `generate`; errors are raised here, before the first piece is asked for.
    """
    return Stream(lm, prompt, **options)
