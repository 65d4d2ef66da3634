"""Answers of real models with known grades: what the readers of answers make of them is what their authors publish."""

import json

import pytest

from rzoo.evals.answers import number_in
from rzoo.evals.choices import choice_letter
from rzoo.evals.task import Instance
from rzoo.evals.tasks.word_problems import number

RIGHT = {"6b_finetuning": 286, "6b_verification": 515, "175b_finetuning": 458, "175b_verification": 742}
MARK = "A: "  # behind which these files have their answers, where GSM8K itself has "#### "


@pytest.fixture(scope="module")
def solutions(shared):
    """(the model, its solution, the answer, OpenAI's label) of each answer to GSM8K's test set."""
    lines = (shared / "data/gsm8k_model_outputs/example_model_solutions.jsonl").read_text("utf-8").splitlines()
    return [
        (model, row[model]["solution"], row["ground_truth"].rpartition(MARK)[2], row[model]["is_correct"])
        for row in map(json.loads, lines)
        for model in RIGHT
    ]


def test_every_label_of_gsm8k_answers_is_reproduced(solutions):
    graded = [number(Instance(id="", text="", answer=answer), text).score == 1 for _, text, answer, _ in solutions]
    assert len(solutions) == 4 * 1319
    assert graded == [label for *_, label in solutions]
    right = [model for (model, *_), score in zip(solutions, graded, strict=True) if score]
    assert {model: right.count(model) for model in RIGHT} == RIGHT


def test_ten_right_answers_are_spelled_unlike_the_one_that_is_asked_for(solutions):
    spelled = [(text.rpartition(MARK)[2].strip(), answer.strip(), label) for _, text, answer, label in solutions]
    missed = [(given, answer) for given, answer, label in spelled if (given == answer) != label]
    assert len(missed) == 10
    assert all(number_in(given) == number_in(answer) is not None for given, answer in missed)


def test_the_published_score_on_mmmu_is_reproduced(shared):
    folder = shared / "data/mmmu_answers"
    asked = json.loads((folder / "answer_dict_val.json").read_text("utf-8"))
    given = json.loads((folder / "llava1.5_13b_total_val_output.json").read_text("utf-8"))
    choices = {name: of["ground_truth"] for name, of in asked.items() if of["question_type"] == "multiple-choice"}
    read = {name: choice_letter(given[name], "ABCDEFGHI") for name in choices}
    assert (len(asked), len(choices)) == (900, 847)
    assert read == {name: given[name] for name in choices}
    # The 53 short answers have none that is spelled as it is asked for.
    spelled = sum(given[name] == of["ground_truth"] for name, of in asked.items() if name not in choices)
    assert sum(read[name] == letter for name, letter in choices.items()) + spelled == 328
