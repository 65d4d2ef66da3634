"""HumanEval and MBPP: the answers of the authors pass, in every way that models write them."""

from dataclasses import replace

import pytest

from rzoo.evals.evaluate import evaluate
from rzoo.evals.task import Instance, Source
from rzoo.evals.tasks import task_named
from rzoo.evals.tasks.programs import passes
from tests.pretended import Pretended, Said

HEAD = 'def double(x):\n    """Twice x."""\n'
ONE = Instance(
    id="t/0", text=HEAD, answer="    return 2 * x\n", extra={"name": "double", "tests": "assert double(4) == 8"}
)
RIGHT = [
    "    return 2 * x\n",
    "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nIt doubles x.",
    "```python\n    return 2 * x\n```",
    "```python\ndef double(x):\n    return x + x",
]
WRONG = [("    return x\n", "failed"), ("", "unparsed"), ("    import os; os._exit(0)\n", "exited")]


@pytest.mark.parametrize("text", RIGHT)
def test_a_program_is_found_however_it_is_written(text):
    assert passes(ONE, text).score == 1


@pytest.mark.parametrize(("text", "reason"), WRONG)
def test_a_program_that_fails_says_how(text, reason):
    assert (passes(ONE, text).score, passes(ONE, text).reason) == (0, reason)


@pytest.mark.parametrize(("name", "count"), [("humaneval", 164), ("mbpp", 500)])
def test_the_authors_own_answers_pass(shared, name, count):
    task, source = task_named(name), Source(shared / "data")
    every = list(task.instances(source))
    assert len(every) == count
    few = replace(task, instances=lambda source: every[:: count // 5])
    answers = {task.chat.messages(one)[-1]["content"]: one.answer for one in every}
    engine = Pretended(lambda prompt, seed: Said(answers[prompt[-1]["content"]]), chat=True)
    assert evaluate(engine, few).scores["accuracy"].mean == 1
    none = Pretended(lambda prompt, seed: Said("    pass"), chat=True)
    assert evaluate(none, few).scores["accuracy"].mean == 0


def test_a_command_of_the_users_own_may_run_programs(tmp_path):
    task = replace(task_named("humaneval"), instances=lambda source: [ONE])
    mark = tmp_path / "ran"
    wrapper = tmp_path / "box"
    wrapper.write_text(f'#!/bin/sh\ntouch {mark}\nexec "$@"\n')
    wrapper.chmod(0o755)
    scores = evaluate(Pretended(lambda p, s: Said(ONE.answer)), task, sandbox=(str(wrapper),)).scores
    assert scores["accuracy"].mean == 1
    assert mark.exists()


def test_a_base_models_function_ends_where_the_next_thing_begins():
    task = task_named("humaneval")
    engine = Pretended(lambda p, s: Said(ONE.answer + "\nprint(double(3))\n" * 3, finish_reason="length"))
    result = evaluate(engine, replace(task, instances=lambda source: [ONE]))
    assert engine.asked[0][0] == [HEAD]
    assert result.scores["accuracy"].mean == 1
    assert result.run.samples[0][0].text == "    return 2 * x\n"
