"""The evaluator: prompts, scores and samples, with a model that is a function."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from rzoo.core import RzooError
from rzoo.evals.evaluate import evaluate
from rzoo.evals.samples import seed_for
from rzoo.evals.task import CHOICE, GREEDY, Adapter, Instance, Source, Task, reward
from rzoo.evals.tasks import TASKS
from rzoo.evals.tasks.fields import FIELDS
from tests.pretended import QUESTIONS, SHOTS, TASK, Pretended, Said, Weight, echo


def test_a_score_has_its_error_and_says_what_went_wrong():
    def say(prompt, seed):
        number = int(echo(prompt).text.split()[-1])
        if number < 5:
            return Said("", reasoning=None)
        return Said("0", finish_reason="length") if number == 5 else echo(prompt)

    scores = evaluate(Pretended(say), TASK).scores
    assert scores["accuracy"].mean == pytest.approx(14 / 20)
    assert scores["accuracy"].error == pytest.approx(math.sqrt(0.7 * 0.3 / 19))
    assert (scores["accuracy"].n, scores["unparsed_rate"].mean, scores["truncated_rate"].mean) == (20, 0.25, 0.05)
    assert scores["output_tokens"].mean == 3
    assert scores["seconds"].mean >= 0


def test_the_parts_of_a_task_are_scored_on_their_own():
    result = evaluate(Pretended(lambda prompt, seed: Said("0")), TASK)
    assert (result.groups["a"].mean, result.groups["b"].mean) == (0.1, 0.0)


def test_plain_text_shows_solved_examples_and_a_conversation_has_turns():
    engine = Pretended(echo)
    assert evaluate(engine, TASK).scores["accuracy"].mean == 1
    assert engine.asked[0][0][0] == "Q: shot 0\nA: 0\n\nQ: shot 1\nA: 1\n\nQ: question 0\nA:"
    assert engine.asked[0][1]["stop"] == ("\n",)
    talker = Pretended(echo, chat=True)
    assert evaluate(talker, TASK).scores["accuracy"].mean == 1
    assert talker.asked[0][0][0] == [{"role": "user", "content": "Answer with a number.\n\nquestion 0"}]
    raw = Pretended(echo, chat=True)
    evaluate(raw, TASK, raw=True)
    assert raw.asked[0][0][0] == engine.asked[0][0][0]


def test_solved_examples_become_turns_of_their_own():
    adapter = Adapter(instructions="Do it.", shots=SHOTS)
    turns = adapter.messages(QUESTIONS[0])
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user", "assistant", "user"]
    assert [turn["content"] for turn in turns] == ["Do it.\n\nshot 0", "0", "shot 1", "1", "question 0"]


@pytest.mark.report("I06", "I09")
def test_a_thought_that_never_ends_is_no_answer_and_is_told():
    loose = replace(TASK, chat=Adapter(whole=False))
    engine = Pretended(lambda p, s: Said("", "the answer is 3 no 4", "length"), chat=True, thinking="always")
    for task in (TASK, loose):
        result = evaluate(engine, task)
        assert result.scores["accuracy"].mean == 0
        assert result.scores["truncated_rate"].mean == 1
        assert {sample.reason for samples in result.run.samples for sample in samples} == {"truncated"}


def test_an_answer_that_was_cut_is_wrong_unless_the_task_can_use_it():
    engine = Pretended(lambda prompt, seed: replace(echo(prompt), finish_reason="length"))
    assert evaluate(engine, TASK).scores["accuracy"].mean == 0
    loose = evaluate(engine, replace(TASK, text=replace(TASK.text, whole=False)))
    assert (loose.scores["accuracy"].mean, loose.scores["truncated_rate"].mean) == (1, 1)


@pytest.mark.report("I01", "I04")
def test_stops_end_the_answer_and_never_the_thought():
    def say(prompt, seed):
        return replace(
            echo(prompt), text=echo(prompt).text + "\nQ: more 7", reasoning="one\ntwo", finish_reason="length"
        )

    engine = Pretended(say, chat=True, thinking="detailed")
    result = evaluate(engine, TASK, thinking=True)
    assert engine.asked[0][1]["stop"] == ()
    assert engine.asked[0][1]["thinking"] is True
    assert (result.scores["accuracy"].mean, result.scores["truncated_rate"].mean) == (1, 0)


def test_a_model_that_always_thinks_is_kept_from_it_by_a_budget_of_nothing():
    engine = Pretended(echo, chat=True, thinking="always")
    evaluate(engine, TASK, thinking=False)
    assert engine.asked[0][1]["max_think_tokens"] == 0
    assert "thinking" not in engine.asked[0][1]


@pytest.mark.report("I10")
def test_a_prompt_that_does_not_fit_loses_examples_and_never_its_question():
    engine = Pretended(echo, context=len("Q: shot 1\nA: 1\n\nQ: question 10\nA:") + 40)
    assert evaluate(engine, TASK).scores["accuracy"].mean == 1
    assert engine.asked[0][0][0] == "Q: shot 0\nA: 0\n\nQ: question 0\nA:"
    full = evaluate(replace(engine, context=len("Q: question 0\nA:") + 1), TASK)
    assert full.scores["no_room_rate"].mean == 0.5
    assert full.scores["accuracy"].mean == 0.5


def test_samples_are_drawn_with_seeds_of_their_own_in_any_batch():
    def say(prompt, seed):
        return Said(str(seed))

    alone, together = (evaluate(Pretended(say), TASK, samples=3, batch=batch, seed=4).run for batch in (1, 64))
    texts = [[sample.text for sample in samples] for samples in alone.samples]
    assert texts == [[sample.text for sample in samples] for samples in together.samples]
    assert texts[2][1] == str(seed_for(4, QUESTIONS[2], 1))
    assert len({text for samples in texts for text in samples}) == 60


def test_a_limit_is_a_seeded_sample_that_a_larger_one_holds():
    few, more = ({one.id for one in evaluate(Pretended(echo), TASK, limit=limit).run.instances} for limit in (5, 12))
    assert few < more
    assert few != {one.id for one in QUESTIONS[:5]}
    assert few != {one.id for one in evaluate(Pretended(echo), TASK, limit=5, seed=1).run.instances}


PICK = Task(
    name="pick",
    about="a choice",
    instances=lambda source: [Instance(id="c", text="the sky is", answer="blue", options=("a very long word", "blue"))],
    text=Adapter(method=CHOICE),
)


def test_a_choice_is_the_likeliest_option_and_the_likeliest_by_byte_beside_it():
    engine = Pretended(weigh=lambda prompt, option: Weight({" blue": -1.0, " a very long word": -2.0}[option]))
    scores = evaluate(engine, PICK).scores
    assert (scores["accuracy"].mean, scores["accuracy_norm"].mean) == (1, 0)
    assert scores["confidence"].mean == pytest.approx(1 / (1 + math.exp(-1)))


def test_a_word_is_right_where_the_model_would_write_it():
    task = replace(PICK, instances=lambda source: QUESTIONS, text=Adapter(method=GREEDY))
    engine = Pretended(weigh=lambda prompt, option: Weight(-1.0, option == " 3"))
    assert evaluate(engine, task).scores["accuracy"].mean == 1 / 20


def test_options_may_differ_in_what_stands_before():
    one = Instance(id="w", text="is tall.", answer="Ann", options=("Ann", "Bob"), contexts=("so Ann", "so Bob"))
    seen = []

    def weigh(prompt, option):
        seen.append((prompt, option))
        return Weight(-1.0 if "Ann" in prompt else -2.0)

    assert evaluate(Pretended(weigh=weigh), replace(PICK, instances=lambda source: [one])).scores["accuracy"].mean == 1
    assert seen == [("so Ann", " is tall."), ("so Bob", " is tall.")]


WISHES = [
    ({"thinking": True}, TASK, "pretended has no thinking to switch"),
    ({"thinking": True}, PICK, "task (pick) compares likelihoods of given answers"),
    ({"samples": 4}, PICK, "leave samples out"),
    ({"samples": 4, "temperature": 0.0}, TASK, "4 samples at temperature 0 are all the same"),
    ({"sample": 4}, TASK, "setting (sample) is unknown"),
    ({"limit": 0}, TASK, "limit (0) must be at least 1"),
    ({}, "gsm9k", "task (gsm9k) is unknown"),
    ({}, replace(TASK, instances=lambda source: ()), "a task without questions"),
    ({}, replace(TASK, instances=lambda source: QUESTIONS[:1] * 2), "two questions have one id"),
]


def test_thinking_is_not_switched_in_plain_text():
    with pytest.raises(RzooError, match="no thinking to switch in plain text"):
        evaluate(Pretended(echo, chat=True, thinking="no_think"), TASK, thinking=True, raw=True)


@pytest.mark.parametrize(("settings", "task", "words"), WISHES, ids=[words[:30] for _, _, words in WISHES])
def test_a_wish_that_makes_no_sense_is_refused_in_words(settings, task, words):
    with pytest.raises(RzooError) as error:
        evaluate(Pretended(echo), task, **settings)
    assert words in str(error.value)


def test_a_scorer_is_a_reward():
    assert reward(TASK, QUESTIONS[3], "so it is 3") == 1
    with pytest.raises(RzooError, match="scores no text"):
        reward(PICK, QUESTIONS[3], "3")


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if not task.files])
def test_a_generated_task_is_exact_and_the_same_for_the_same_seed(name):
    first, second, other = (list(TASKS[name].instances(Source(seed=seed, size=60))) for seed in (0, 0, 1))
    assert first == second != other
    assert len({one.text for one in first}) > 0.5 * len(first)
    assert all(one.answer in one.options for one in first if one.options)
    assert all(len(set(one.options)) == len(one.options) for one in first)


def test_answers_of_the_fields_of_mathematics_are_right():
    known = {name: FIELDS[name](3, 5, 2, 4)[1] for name in FIELDS}
    assert known == {
        "arithmetic": 7,
        "algebra": -1,
        "calculus": 9 * 16 + 40 + 2,
        "linear algebra": 2,
        "differential equations": 48 + 20 + 2,
        "number theory": 12,
        "combinatorics": 10,
        "probability": Fraction(3, 28),
        "statistics": Fraction(5, 4),
        "geometry": 1,
        "trigonometry": 2,
        "logic": 7 - 3,
    }


def test_a_needle_stands_at_its_depth():
    for one in TASKS["needle"].instances(Source(size=10)):
        place = one.text.index(one.answer) / len(one.text)
        assert abs(place - int(one.group) / 100) < 0.08
        assert one.text.count(one.answer) == 1
