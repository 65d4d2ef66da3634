"""Text of an answer on the host: stop strings over any borders, and where a row ends."""

import pytest
import tokenizers
from hypothesis import given, strategies as st
from tokenizers import decoders, models

from rzoo.engine.rows import Row, StopText
from rzoo.engine.sampling import Sampling
from rzoo.tokenizer import IncrementalDecoder, Tokenizer

LETTERS = st.text("ab.", max_size=12)


@pytest.mark.report("B19", "B22", "B23")
@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3))
def test_text_is_cut_at_the_first_stop_string_however_it_comes_in_pieces(pieces, stops):
    text, stopper, sent = "".join(pieces), StopText(stops), []
    for piece in pieces:
        sent.append(stopper.push(piece))
        if stopper.found:
            break
    # Of a long piece all is looked at once; what was sent before it is certain.
    at = min((text.find(stop) for stop in stops if stop in text), default=None)
    assert stopper.found == (at is not None)
    if at is None:
        assert "".join(sent) + stopper.finish() == text
    else:
        assert text.startswith("".join(sent)) and len("".join(sent)) >= at
        assert not any(stop in "".join(sent) for stop in stops)


def row(texts, stop=(), stops=(), limit=99, **settings):
    """A row whose token i is the text at i."""
    core = tokenizers.Tokenizer(models.WordLevel({text.replace(" ", "▁"): i for i, text in enumerate(texts)}))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    decoder = IncrementalDecoder(Tokenizer(core))
    return Row((1,), limit, tuple(stops), decoder, StopText(stop), False, Sampling(), **settings)


@pytest.mark.report("B19", "B23")
def test_a_stop_string_over_or_inside_of_tokens_cuts_the_text_and_ends_the_tokens():
    over = row(["one ", "EN", "D of", " it"], stop=["END"])
    assert [over.take([i]) for i in range(3)] == ["one ", "", ""]
    assert (over.finish_reason, over.tokens, over.completion().text) == ("stop", [0, 1, 2], "one ")
    inside = row(["well", "...", "more"], stop=[".."])
    assert inside.take([0, 1, 2]) == "well"
    assert (inside.tokens, inside.completion().text) == ([0, 1], "well")


@pytest.mark.report("B22")
def test_text_that_might_have_become_a_stop_is_released_at_every_end():
    for ending in ({"stops": (2,)}, {"limit": 2}):
        held = row(["a", "EN", "x"], stop=["END"], **ending)
        assert held.take([0, 1, 2]) == "aEN"
        assert held.finish_reason == ("stop" if "stops" in ending else "length")


@pytest.mark.report("B20")
def test_the_turn_end_as_a_stop_string_is_held_before_reasoning_is_split():
    thinking = row(["<think>", "why", "</think>", "so<", "|im_", "end|>x"], stop=["<|im_end|>"])
    assert "".join(thinking.take([i]) for i in range(6)) == "<think>why</think>so"
    assert (thinking.completion().reasoning, thinking.completion().text) == ("why", "so")


def test_a_row_asks_for_one_token_while_a_thought_may_open_and_for_none_past_its_budget():
    budgeted = row(["<th", "ink>", "hm", "</think>", "so"], thought=4, limit=20)
    assert budgeted.wanted(16) == 1
    budgeted.take([0])
    assert budgeted.wanted(16) == 1
    budgeted.take([1])
    assert (budgeted.wanted(16), budgeted.must_close) == (2, False)
    budgeted.take([2, 2])
    assert budgeted.must_close
    budgeted.take([3])
    assert (budgeted.wanted(16), budgeted.must_close) == (15, False)
    plain = row(["no", " thought"], thought=1)
    plain.take([0])
    assert (plain.wanted(16), plain.must_close) == (16, False)
