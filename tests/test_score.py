"""Scores of continuations against the logits of the whole."""

import jax
import numpy as np
import pytest

import rzoo
from rzoo.core import RzooError
from rzoo.engine.generate import finished
from rzoo.engine.score import score_pairs
from tests.chat_folder import load_talker
from tests.goldens import GOLDEN


@pytest.fixture(scope="module")
def lm():
    return rzoo.load(str(GOLDEN / "llama_tied"), quiet=True)


def test_scores_are_the_log_probabilities_of_the_whole(lm):
    rng = np.random.default_rng(0)
    prompt = [5, 6, 7, 8]
    continuations = [rng.integers(0, 94, n).tolist() for n in (1, 3, 2, 40, 5, 33, 1, 7, 2, 9)]
    scores = rzoo.score(lm, prompt, continuations)
    assert [s.tokens for s in scores] == [tuple(c) for c in continuations]
    for continuation, found in zip(continuations, scores, strict=True):
        logprobs = jax.nn.log_softmax(lm(np.asarray([[*prompt, *continuation]])))[0, len(prompt) - 1 : -1]
        expected = [float(row[t]) for row, t in zip(logprobs, continuation, strict=True)]
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
        assert found.total == pytest.approx(sum(expected), abs=1e-2)
        assert found.greedy == (np.argmax(logprobs, axis=-1).tolist() == continuation)


def test_what_the_model_would_say_is_greedy_and_one_continuation_gives_one_score(lm):
    answer = rzoo.generate(lm, [5, 6, 7], max_new_tokens=6, logprobs=0)
    found = rzoo.score(lm, [5, 6, 7], answer.tokens)
    assert found.greedy
    np.testing.assert_allclose(found.logprobs, answer.logprobs, atol=1e-4)
    assert not rzoo.score(lm, [5, 6, 7], [*answer.tokens[:-1], 0]).greedy
    assert rzoo.score(lm, [5, 6, 7], []) == []


def test_answers_come_one_by_one_as_generate_gives_them(lm):
    prompts, lengths = [[5, 6, 7], [8, 9], [10]], [30, 3, 9]
    came = list(finished(lm, prompts, max_new_tokens=lengths))
    assert sorted(came) == list(enumerate(rzoo.generate(lm, prompts, max_new_tokens=lengths)))
    assert [place for place, _ in came][-1] == 0
    with pytest.raises(RzooError, match="n goes to generate"):
        next(finished(lm, prompts, n=2, temperature=1.0))


def test_text_continues_text_and_a_conversation(tmp_path):
    talker = load_talker(tmp_path / "model")
    letters = talker.tokenizer.encode(" yes")
    plain = rzoo.score(talker, "Is it?", " yes", raw=True)
    ids = rzoo.prompt_ids(talker, "Is it?", raw=True)
    assert plain.tokens == tuple(letters)
    assert plain.total == pytest.approx(rzoo.score(talker, ids, letters).total, abs=1e-4)
    told = rzoo.score(talker, [{"role": "user", "content": "Is it?"}], [" yes", " no"])
    assert [s.tokens for s in told] == [tuple(letters), tuple(talker.tokenizer.encode(" no"))]
    assert told[0].total == pytest.approx(rzoo.score(talker, "Is it?", " yes").total, abs=1e-4)


@pytest.mark.parametrize("shared", [0, 40], ids=["nothing shared", "a beginning shared"])
def test_pairs_of_many_prompts_have_the_scores_of_each_alone(lm, shared):
    rng = np.random.default_rng(1)
    begin = rng.integers(0, 94, shared).tolist()
    prompts = [begin + rng.integers(0, 94, n).tolist() for n in (3, 1, 50, 3, 7)]
    pairs = [(prompt, rng.integers(0, 94, n).tolist()) for prompt in prompts for n in (1, 2, 34)]
    found = score_pairs(lm, pairs)
    for (prompt, continuation), score in zip(pairs, found, strict=True):
        np.testing.assert_allclose(score.logprobs, rzoo.score(lm, prompt, continuation).logprobs, atol=1e-4)
    assert score_pairs(lm, []) == []


WRONG = [
    ([[]], "a continuation is empty"),
    ([[1, 97]], "prompt contains id 97"),
    (["text"], "has no tokenizer"),
    (3, "continuations must be text, ids, or a list of these; got int"),
    ([[1] * 2558], "prompt and continuation have 2561 tokens, the context is 2560"),
]


@pytest.mark.parametrize(("continuations", "words"), WRONG, ids=[words[:24] for _, words in WRONG])
def test_a_continuation_that_can_not_be_scored_is_told_in_words(lm, continuations, words):
    with pytest.raises(RzooError) as error:
        rzoo.score(lm, [1, 2, 3], continuations)
    assert words in str(error.value)
