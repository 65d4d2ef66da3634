"""Data with known grades, and what users of other evaluators complained about: each grade is the right one here."""

import gzip
import json

import pytest

from rzoo.evals import mathematics
from rzoo.evals.answers import after_reasoning, completed, last_boxed, number_in, written_answer
from rzoo.evals.choices import choice_letter
from rzoo.evals.mathematics import equal
from rzoo.evals.sandbox import Limits, run_code


def passes(problem: dict[str, str], text: str, seconds: float = 8.0) -> str:
    """How the tests of a problem of HumanEval's end on an answer."""
    code = completed(problem["prompt"], text, problem["entry_point"])
    tests = f"{problem['test']}\ncheck({problem['entry_point']})\n"
    return run_code(f"{code}\n{tests}", limits=Limits(seconds=seconds)).reason


def test_the_sample_file_of_human_eval_has_its_published_score(shared):
    folder = shared / "data/humaneval"
    problem = json.loads((folder / "example_problem.jsonl").read_text("utf-8"))
    samples = map(json.loads, (folder / "example_samples.jsonl").read_text("utf-8").splitlines())
    reasons = [passes(problem, sample["completion"]) for sample in samples]
    assert reasons == ["failed", "timeout", "failed", "passed", "passed", "passed"]
    assert reasons.count("passed") / len(reasons) == pytest.approx(0.4999, abs=2e-4)


@pytest.mark.extras
def test_every_canonical_solution_of_human_eval_passes(shared):
    text = gzip.decompress((shared / "data/humaneval/HumanEval.jsonl.gz").read_bytes()).decode()
    problems = map(json.loads, text.splitlines())
    assert [one["task_id"] for one in problems if passes(one, one["canonical_solution"], 60.0) != "passed"] == []


@pytest.fixture(scope="module")
def golds(shared) -> list[str]:
    """The answers of OlympiadBench's 675 open problems in mathematics."""
    lines = (shared / "data/olympiadbench/test.jsonl").read_text("utf-8").splitlines()
    return [", ".join(json.loads(line)["final_answer"]) for line in lines]


def test_every_gold_of_olympiadbench_is_itself_in_a_box(golds):
    assert len(golds) == 675
    assert [gold for gold in golds if not equal(gold, last_boxed(rf"so $\boxed{{{gold}}}$."))] == []


@pytest.mark.extras
def test_golds_of_olympiadbench_equal_themselves_by_mathematics_alone(golds):
    same = [mathematics._comparer.compare(gold, gold, 60.0) for gold in golds]
    assert same.count(True) >= 673


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The total is 18.", 18),  # lighteval#82: no ####
        ("<think>\nIs the answer 12? The answer is 12.\n</think>\n\nThe answer is 18.", 18),  # lm-eval#3675
        ("The answer is 12, I think.</think>#### 18", 18),  # lighteval#869: opened by the template
        ("First \\boxed{17}. No wait, \\boxed{18}", 18),
        ("**Final answer:** $18$ dollars", 18),
        ("#### $18.00", 18),
        ("The answer is 18.\n\nQuestion: 3 + 4?\nAnswer:", 18),
    ],
)
def test_a_right_number_is_graded_right_wherever_it_stands(text, number):
    assert number_in(written_answer(after_reasoning(text))) == number


@pytest.mark.parametrize(
    "text",
    [
        "ANSWER: $B$",  # inspect_ai#5145: 29 points of GPQA
        "After all, the answer is (B)",  # lm-eval#2237
        "B. 12",  # helm#2939
        "Answer: B",  # helm PR#3445: lost by a bracket that was escaped
        "\\boxed{B}",
        "the answer is A? No. The correct answer is (B).",
        "<think>Answer: A</think>Answer: B",  # tpu-inference PR#3518
    ],
)
def test_a_right_letter_is_graded_right_however_it_is_spelled(text):
    assert choice_letter(after_reasoning(text)) == "B"


@pytest.mark.parametrize("text", ["<think>The answer is 18, that is B.", "<think>\\boxed{18} (B)"])
def test_an_unfinished_thought_has_no_answer(text):  # lighteval#869, inspect_ai#3582
    assert after_reasoning(text) is None


def test_what_can_not_be_read_is_told_from_what_is_wrong():  # inspect_ai#5323
    assert number_in(written_answer("I can not say.")) is None
    assert number_in(written_answer("It is 17.")) == 17
    assert choice_letter("I can not say.") is None
    assert choice_letter("Answer: C") == "C"


def test_code_in_a_block_behind_prose_is_run():  # lm-eval#2648, #2990
    problem = {"prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1", "entry_point": "one"}
    text = (
        "<think>```python\ndef one():\n    return 2\n```</think>Here it is:\n\n```python\ndef one():\n    return 1\n```"
    )
    assert passes(problem, after_reasoning(text)) == "passed"
