"""Tasks on the user's files: rows in their public formats, and what is said of files that are something else."""

import gzip
import json
from collections import Counter

import pytest

from rzoo.core import RzooError
from rzoo.evals.data_files import rows
from rzoo.evals.evaluate import evaluate
from rzoo.evals.task import Source
from rzoo.evals.tasks import task_named
from tests.pretended import Pretended, Said, Weight

COUNTS = {
    "gsm8k": 1319,
    "svamp": 1000,
    "aime24": 30,
    "aime25": 30,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "piqa": 1838,
    "openbookqa": 500,
    "boolq": 3270,
    "winogrande": 1267,
    "lambada": 5153,
    "mmlu": 3018,
    "banking77": 3080,
    "financial_news": 2388,
    "bbh": 6511,
    "ifeval": 541,
}


@pytest.mark.parametrize("name", COUNTS)
def test_every_question_of_a_public_file_is_read(shared, name):
    found = list(task_named(name).instances(Source(shared / "data")))
    assert len(found) == len({one.id for one in found}) == COUNTS[name]
    assert all(one.text and one.answer for one in found)
    assert all(one.answer in one.options for one in found if one.options)


def written(tmp_path, name, rows):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path


AI2 = {
    "id": "Mercury_1",
    "question": {"stem": "What is hot?", "choices": [{"text": "ice", "label": "A"}, {"text": "fire", "label": "B"}]},
    "answerKey": "B",
}
GOAL = {"goal": "dry hair", "sol1": "towel", "sol2": "hose", "label": 0}
ASKED = {"question": "Q?", "choices": ["x", "y"], "answer": 1}
PUBLIC = [
    ("arc_easy", "arc/ARC-Easy-Test.jsonl", AI2, "Question: What is hot?\nAnswer:", "fire"),
    (
        "piqa",
        "piqa.jsonl",
        {"goal": "dry hair", "sol1": "towel", "sol2": "hose", "label": 0},
        "Question: dry hair\nAnswer:",
        "towel",
    ),
    (
        "boolq",
        "boolq/dev.jsonl",
        {"passage": "Ice is cold.", "question": "is ice cold", "answer": True},
        "Passage: Ice is cold.\nQuestion: is ice cold?\nAnswer:",
        "yes",
    ),
    ("lambada", "lambada/lambada_test.jsonl", {"text": "she said his name"}, "she said his", "name"),
    ("gsm8k", "gsm8k.jsonl", {"question": "How many?", "answer": "Many. #### 1,200"}, None, "1,200"),
    (
        "mmlu",
        "mmlu/test.jsonl",
        {"question": "Q?", "choices": ["x", "y"], "answer": 1},
        "Question: Q?\nA. x\nB. y\nAnswer:",
        "y",
    ),
]


@pytest.mark.parametrize(("name", "file", "row", "prompt", "answer"), PUBLIC, ids=[entry[0] for entry in PUBLIC])
def test_the_formats_of_the_authors_are_read(tmp_path, name, file, row, prompt, answer):
    (one,) = task_named(name).instances(Source(written(tmp_path, file, [row])))
    assert one.answer == answer
    assert prompt is None or task_named(name).text.text(one) == prompt


GPQA = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n" + "".join(
    f"secret {i},right{i},wrong a{i},wrong b{i},wrong c{i}\n" for i in range(40)
)


def test_gpqa_is_shuffled_for_each_question_and_shown_nowhere(tmp_path):
    (tmp_path / "gpqa_diamond.csv").write_text(GPQA)
    found = list(task_named("gpqa").instances(Source(tmp_path)))
    assert {one.answer for one in found} == {f"right{i}" for i in range(40)}
    assert len(Counter(one.options.index(one.answer) for one in found)) == 4
    assert found == list(task_named("gpqa").instances(Source(tmp_path, seed=5)))
    engine = Pretended(lambda prompt, seed: Said("secret wrong\nAnswer: A"), chat=True)
    result = evaluate(engine, "gpqa", data=tmp_path, out=tmp_path / "out")
    assert 0 < result.scores["accuracy"].mean < 1
    written_files = {file.name: file.read_text() for file in (tmp_path / "out").rglob("*.*") if file.is_file()}
    assert len(written_files) == 8
    assert [name for name, text in written_files.items() if "secret" in text or "wrong" in text] == []


BROKEN = [
    ("gsm8k", "gsm8k.jsonl", b"{", "can't be read"),
    ("gsm8k", "gsm8k.jsonl", b'{"question": "x"}', "row 1 has no 'answer'"),
    ("gsm8k", "gsm8k.jsonl", b"[1]", "row 1 is not as expected"),
    ("gsm8k", "gsm8k.jsonl", b"", "a task without questions"),
    ("gsm8k", "gsm8k.jsonl", b"\xff\xfe", "can't be read"),
    ("arc_easy", "arc_easy.jsonl", b'{"query": "x", "choices": ["a"], "gold": 1}', "number 1 of 1"),
    ("arc_easy", "arc_easy.jsonl", b'{"query": "x", "choices": ["a"], "gold": -1}', "number -1 of 1"),
    ("banking77", "banking77.csv", b"a,b\n1,2\n", "are not as expected"),
    ("financial_news", "sent_valid.csv", b"text,label\nhello,x\n", "row 1 is not as expected"),
    ("bbh", "bbh/boolean_expressions.json", b'{"examples": 3}', "no list of rows"),
    ("gpqa", "gpqa_diamond.csv", b'"Question\n', "can't be read"),
]


@pytest.mark.parametrize(("name", "file", "data", "words"), BROKEN, ids=[f"{e[0]}-{e[3][:20]}" for e in BROKEN])
def test_a_file_that_is_something_else_is_told_in_words(tmp_path, name, file, data, words):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(data)
    with pytest.raises(RzooError, match=words):
        evaluate(Pretended(lambda p, s: Said("")), name, data=tmp_path)


def test_a_file_that_is_not_there_is_asked_for_by_name(tmp_path):
    with pytest.raises(RzooError, match=r"--data DIR; put gsm8k/test.jsonl or gsm8k.jsonl there; test.jsonl of github"):
        evaluate(Pretended(), "gsm8k")
    with pytest.raises(RzooError, match="has no file for this task"):
        evaluate(Pretended(), "gsm8k", data=tmp_path)


def test_a_packed_file_is_read_and_one_that_is_cut_is_told(tmp_path):
    packed, file = gzip.compress(b'{"question": "x"}'), tmp_path / "x.jsonl.gz"
    file.write_bytes(packed)
    assert rows(file) == [{"question": "x"}]
    file.write_bytes(packed[:-9])
    with pytest.raises(RzooError, match="can't be read"):
        rows(file)


SPELLINGS = ["#### 18", "so \\boxed{18}", "The answer is 18.0", "**18**", "that makes $18", "\\boxed{18 eggs}", "18"]


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_number_is_right_in_every_spelling(tmp_path, text):
    data = written(tmp_path, "gsm8k.jsonl", [{"question": "How many?", "answer": "x #### 18"}])
    scores = evaluate(Pretended(lambda p, s: Said(text)), "gsm8k", data=data).scores
    assert scores["accuracy"].mean == 1
    assert scores["accuracy_strict"].mean == float("boxed" in text or "####" in text)


def test_macro_f1_stands_beside_accuracy(shared):
    engine = Pretended(lambda prompt, seed: Said("neutral"), chat=True)
    scores = evaluate(engine, "financial_news", data=shared / "data").scores
    assert scores["accuracy"].mean == pytest.approx(0.656, abs=1e-3)
    assert scores["macro_f1"].mean == pytest.approx(0.264, abs=1e-3)


@pytest.mark.report("I37")
def test_a_label_that_is_not_in_the_list_is_a_miss_and_no_class(shared):
    texts = iter(["archive"] * 4 + ["neutral"] * 3000)
    engine = Pretended(lambda prompt, seed: Said(next(texts)), chat=True)
    scores = evaluate(engine, "financial_news", data=shared / "data", limit=30).scores
    assert scores["unparsed_rate"].mean == pytest.approx(4 / 30)
    assert scores["labels_used"].mean <= 3


def test_labels_of_banking77_are_those_of_its_list(shared):
    engine = Pretended(lambda prompt, seed: Said("It is card arrival."), chat=True)
    result = evaluate(engine, "banking77", data=shared / "data", limit=400)
    assert result.scores["accuracy"].mean == pytest.approx(
        sum(one.answer == "card_arrival" for one in result.run.instances) / 400
    )
    assert len(result.run.instances[0].options) == 77


def test_a_choice_by_likelihood_gives_calibration(shared):
    engine = Pretended(weigh=lambda prompt, option: Weight(-float(len(option))))
    scores = evaluate(engine, "arc_easy", data=shared / "data", limit=50).scores
    assert 0 <= scores["ece_10_bin"].mean <= 1
    assert 0 <= scores["brier"].mean <= 1


TARGETS = [
    ("(B)", "so the answer is (B).", 1),
    ("(B)", "the answer is (A)", 0),
    ("True", "So the answer is True.", 1),
    ("] }", "thinking\nthe answer is ] }", 1),
    ("7", "the answer is 7", 1),
    ("yes", "I think\nYes", 1),
    ("yes", "", 0),
]


@pytest.mark.parametrize(("target", "text", "score"), TARGETS)
def test_answers_of_bbh_are_letters_or_words(tmp_path, target, text, score):
    (tmp_path / "bbh").mkdir()
    (tmp_path / "bbh" / "boolean_expressions.json").write_text(
        json.dumps({"examples": [{"input": "x", "target": target}]})
    )
    scores = evaluate(Pretended(lambda p, s: Said(text)), "bbh", data=tmp_path).scores
    assert scores["accuracy"].mean == score
    assert scores["unparsed_rate"].mean == float(not text)
