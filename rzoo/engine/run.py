"""Rows from their prompts to their ends: one prefill, device loops, and between them the host's looks at the text."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rzoo.compile.programs import on_host
from rzoo.engine.drafting import Guesser, LookUp, SmallerModel, for_guesses, own_module
from rzoo.engine.options import Options
from rzoo.engine.prompts import vocabulary
from rzoo.engine.rows import Row
from rzoo.engine.sampling import Draws, Greedy, Sampler, Sampling, draws_of
from rzoo.engine.session import DECODE_STEPS, State, bucket, decode, decode_drawn, prefill, put_row, take_rows
from rzoo.engine.speculative import run_drafted
from rzoo.handle import LM
from rzoo.models import step

MOST_ROWS = 64  # of a batch; further rows come after
DETERMINISTIC_ROWS = 8  # of every batch: one program for all, in which a row's bits don't depend on its place
DETERMINISTIC_ROOM = 512  # capacities from which attention reads blocks of one size


def run(lm: LM, rows: list[Row], options: Options) -> Iterator[list[str]]:
    """Decodes until every row is finished; after each device loop yields the new text of each row of a batch."""
    if options.deterministic:
        lm = replace(lm, record=None)  # a tuning record may compile batches of unlike sizes unlike
    most = DETERMINISTIC_ROWS if options.deterministic else MOST_ROWS
    for first in range(0, len(rows), most):
        batch = rows[first : first + most]
        yield from (_run if options.draft is None else _drafted)(lm, batch, options)


def _drafted(lm: LM, rows: list[Row], options: Options) -> Iterator[list[str]]:
    draft, k, vocab = options.draft, options.draft_tokens, vocabulary(lm)
    guesser: Guesser
    if draft == "mtp":
        size = DETERMINISTIC_ROWS if options.deterministic else bucket(len(rows))
        prompts = [*(row.prompt for row in rows), *[()] * (size - len(rows))]
        state, guesser = own_module(lm, prompts, k)
        for row in rows:
            row.computed = len(row.prompt)
    else:
        state = start(lm, rows, options)
    draws = draws_for(lm, rows, len(state.lengths))
    if draft == "lookup":
        guesser = LookUp(rows, k)
    elif draft != "mtp":
        guesser = SmallerModel(draft, start(draft, rows, options), for_guesses(draws), k, vocab)
    return run_drafted(lm, rows, state, guesser, draws, k, vocab)


def _run(lm: LM, rows: list[Row], options: Options) -> Iterator[list[str]]:
    state = start(lm, rows, options)
    likeliest = all(row.sampling.greedy and not row.sampling.penalised and row.top is None for row in rows)
    draws = None if likeliest else draws_for(lm, rows, len(state.lengths))
    most = 1  # the first token is shown as soon as it is known
    try:
        while not all(row.finish_reason for row in rows):
            if any(row.must_close for row in rows):
                pieces, state = _close_thoughts(lm, rows, state)
            else:
                pieces, draws, state = _loop(lm, rows, state, draws, most)
                most = DECODE_STEPS
            yield pieces
    finally:
        if options.session is not None:
            options.session.keep(lm, (*rows[0].prompt, *rows[0].tokens), state)


def _loop(
    lm: LM, rows: list[Row], state: State, draws: Draws | None, most: int
) -> tuple[list[str], Draws | None, State]:
    """Up to `most` tokens a row."""
    vocab, stops = vocabulary(lm), rows[0].stops
    wanted = [row.wanted(most) for row in rows] + [0] * (len(state.lengths) - len(rows))
    notes: Any = ()
    if draws is None:
        select = step.greedy if vocab == lm.config.vocab_size else Greedy(vocab)
        tokens, state = decode(lm, state, wanted, stops=stops, select=select)
    else:
        choose = Sampler(vocab, None if rows[0].top is None else bucket(rows[0].top + 1))
        tokens, notes, draws, state = decode_drawn(lm, state, wanted, draws, choose=choose, stops=stops)
    columns = [on_host(column) for column in notes]
    return [_taken(row, tokens[i], [column[i] for column in columns]) for i, row in enumerate(rows)], draws, state


def _taken(row: Row, ids: np.ndarray, notes: list[np.ndarray]) -> str:
    cut = [notes[0], *(column[:, : row.top] for column in notes[1:])] if notes else None
    return row.take([int(i) for i in ids if i >= 0], cut)


def _close_thoughts(lm: LM, rows: list[Row], state: State) -> tuple[list[str], State]:
    """Puts the closing tag into the rows that have thought for long enough."""
    closings: list[tuple[int, ...]] = [row.closing if row.must_close else () for row in rows]
    closings += [()] * (len(state.lengths) - len(rows))
    state = prefill(lm, closings, DECODE_STEPS, after=state)
    return [row.take(ids) for row, ids in zip(rows, closings, strict=False)], state


def start(lm: LM, rows: Sequence[Row], options: Options) -> State:
    """The state after the prompts of the rows, each computed once, and idle rows up to a size that programs have."""
    prompts = [row.prompt for row in rows]
    unique = list(dict.fromkeys(prompts))
    for place, row in enumerate(rows):
        row.computed = len(row.prompt) if row.prompt not in prompts[:place] else 0
    longest = max(len(prompt) for prompt in unique)
    room = min(max(row.limit for row in rows), longest + 128)
    if options.deterministic:
        return _each_alone(lm, prompts, max(room, DETERMINISTIC_ROOM))
    kept = options.session.claim(lm, prompts[0]) if options.session is not None else None
    if kept is not None:
        rows[0].computed = len(prompts[0]) - kept.lengths[0]
        return prefill(lm, [prompts[0][kept.lengths[0] :]], room, after=kept)
    read, size = bucket(len(unique)), bucket(len(rows))
    state = prefill(lm, [*unique, *[()] * (read - len(unique))], room)
    if len(unique) == len(rows):  # then read == size, too
        return state
    return take_rows(lm, state, [*(unique.index(p) for p in prompts), *[0] * (size - len(rows))])


def _each_alone(lm: LM, prompts: Sequence[tuple[int, ...]], room: int) -> State:
    """As `start`, but that a prompt is read by the same program in the same chunks whatever it is batched with."""
    alone = {prompt: prefill(lm, [prompt], room) for prompt in dict.fromkeys(prompts)}
    state = take_rows(lm, alone[prompts[0]], [0] * DETERMINISTIC_ROWS)
    for place, prompt in enumerate(prompts):
        if prompt != prompts[0]:
            state = put_row(lm, state, place, alone[prompt])
    return state


def draws_for(lm: LM, rows: Sequence[Row], size: int) -> Draws:
    """The settings of `size` rows, idle ones at the end."""
    idle = size - len(rows)
    return draws_of(
        [*(row.sampling for row in rows), *[Sampling()] * idle],
        [*((row.seed, row.sample) for row in rows), *[(0, 0)] * idle],
        lm.config.vocab_size,
        [*(row.prompt for row in rows), *[()] * idle],
        [()] * size,
    )
