"""The instructions of IFEval: each check takes an answer that follows it and refuses one that doesn't."""

import json

import pytest

from rzoo.core import RzooError
from rzoo.evals.evaluate import evaluate
from rzoo.evals.ifeval import CHECKS, Instruction, followed, followed_loosely, sentences
from rzoo.evals.task import Source
from rzoo.evals.tasks import task_named
from rzoo.evals.tasks.instructions import following
from tests.pretended import Pretended, Said

ENGLISH = "the cat sat on the mat and it was happy"
# (the instruction, its arguments, answers that follow it, answers that don't)
CASES = [
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA is BIG", "A WELL-KNOWN thing"],
        ["NASA is big", "a well-KNOWN NASA"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["NASA is big"],
        ["NASA is BIG"],
    ),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, "DER HUND UND DIE KATZE SIND NICHT DA"]),
    ("change_case:english_lowercase", {}, [ENGLISH], [ENGLISH.title(), "der hund und die katze sind nicht da", "12"]),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Name a bird. "},
        ["Name a bird.\n\nA wren."],
        ["A wren.", "Sure! Name a bird. A wren."],
    ),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "one******two******"],
        ["one", "one******one", "one ****** two ****** three", "one************two"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["Dear [name] of [city]"],
        ["Dear [name]", "Dear [name of [city]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. Write soon", "p. s. so"],
        ["Bye.", "PS: so"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S. More", "P. P. S"], ["P.S. More"]),
    (
        "detectable_content:postscript",
        {"postscript_marker": "N.B."},
        ["n.b. this"],
        ["nobody"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is maybe.", "I think: My answer is no."],
        ["Yes.", "my answer is yes"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[]\n```"],
        ["a: 1", 'Here: {"a": 1}', '{"a": 1', "[" * 100_000],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "**Section 1** a **Section2** b"],
        ["Section 1\na", "Section one Section two"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "Two:\n- a\n  - b\n**not one**"],
        ["* a", "* a\n* b\n* c", "1. a\n2. b"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** and **two**"],
        ["*one* and two", "** ** * *", "*one\ntwo* three"],
    ),
    ("detectable_format:title", {}, ["<<On cats>>\nText"], ["On cats", "<<>> text", "<<On\ncats>>"]),
    (
        "keywords:existence",
        {"keywords": ["cat", "Dog"]},
        ["Cats and dogs"],
        ["Cats", "do g cat"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat", "c++"]},
        ["a catalogue"],
        ["A Cat.", "no cat"],
    ),
    (
        "keywords:frequency",
        {"keyword": "war", "frequency": 2, "relation": "at least"},
        ["War and warfare"],
        ["War and peace"],
    ),
    (
        "keywords:frequency",
        {"keyword": "war", "frequency": 2, "relation": "less than"},
        ["War and peace"],
        ["war, war"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
        ["Quite quiet"],
        ["Quiet"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_frequency": 2, "let_relation": "less than"},
        ["So!"],
        ["So! So!"],
    ),
    ("language:response_language", {"language": "de"}, ["Der Hund ist nicht da.", "12"], [ENGLISH, "собака"]),
    ("language:response_language", {"language": "kn"}, ["ನಾನು ಚಹಾ"], [ENGLISH, "Առավոտյան"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Elm"},
        ["One.\n\nelm, a tree", 'One.\n\n\n\n"Elm"'],
        ["One.\n\nOak", "Elm\n\nOne", "elm", "a\n\nelm\n\nb", "a\n\nElms"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***"],
        ["a\n\nb", "a ***", "a *** *** b", "a***b***c"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["I am. You are!", "one. two"],
        ["Dr. A. Smith is here.", "I am, e.g. today"],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["I am."], ["I am. So?"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one two three"], ["one two."]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one, two, three"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ["So. That is all.", '"so. that is ALL." '],
        ["That is all. Bye", "so"],
    ),
    ("startend:quotation", {}, ['"All of it."', ' "a "b" c" '], ['"', 'All "of" it', "“All”"]),
]


def test_every_instruction_has_its_cases():
    assert {name for name, *_ in CASES} == CHECKS.keys()


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_a_check_takes_what_follows_its_instruction_and_refuses_what_does_not(name, arguments, good, bad):
    assert [text for text in good if not followed(text, (name, arguments))] == []
    assert [text for text in [*bad, "", " \n"] if followed(text, (name, arguments))] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("***", 0),
        ("No end", 1),
        ("My answer is no. Why? Well... because!", 4),
        ('She said "Stop." Then she left.', 2),
        ("Mr. and Mrs. Smith met J. K. Rowling at 3.5 p.m. sharp.", 1),
        ("So do I. And you?", 2),
        ("1. Wash the cup.\n2. Dry it.", 2),
        ("Do this (1. wash the cup; 2. dry it). It was 1999. Then it ended.", 3),
        ("The letter o. Then the letter X.", 2),
        ("A heading\n\nand one sentence.", 1),
        ("今天很好。明天呢？", 2),
    ],
)
def test_sentences_are_counted_as_a_reader_counts_them(text, count):
    assert len(sentences(text)) == count


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("." * 200_000 + "x", "length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}),
        ("<<" * 100_000, "detectable_format:title", {}),
        ("[" * 200_000, "detectable_content:number_placeholders", {"num_placeholders": 1}),
        ("*" * 200_000 + "x", "detectable_format:number_highlighted_sections", {"num_highlights": 1}),
        ("\n" * 200_000, "detectable_format:number_bullet_lists", {"num_bullets": 1}),
        (" " * 200_000 + "x", "detectable_format:multiple_sections", {"section_spliter": "Day", "num_sections": 1}),
    ],
)
def test_an_answer_that_repeats_one_mark_is_judged_in_linear_time(text, name, arguments):
    assert not followed(text, (name, arguments))


COMMA: Instruction = ("punctuation:no_comma", {})
SHORT: Instruction = ("length_constraints:number_words", {"relation": "less than", "num_words": 5})
QUOTED: Instruction = ("startend:quotation", {})


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        ("a plain answer", True, True),
        ("Sure, here it is:\na plain answer", False, True),
        ("a plain answer\nBye, friend", False, True),
        ("Yes, so:\na plain answer\nBye, friend", False, True),
        ("one, two\nthree, four\nfive, six", False, False),
        ("", False, False),
    ],
)
def test_loosely_a_first_and_a_last_line_may_be_left_out(text, strict, loose):
    assert followed(text, COMMA) is strict
    assert followed_loosely(text, COMMA) is loose


def test_loosely_stars_may_be_left_out():
    assert not followed('**"so"**', QUOTED)
    assert followed_loosely('**"so"**', QUOTED)


ROWS = [
    {"key": 7, "prompt": "One", "instruction_id_list": [COMMA[0]], "kwargs": [{}]},
    {
        "key": 8,
        "prompt": "Three",
        "instruction_id_list": [COMMA[0], SHORT[0], QUOTED[0]],
        "kwargs": [{"num_words": None}, SHORT[1], {}],
    },
]


def written(tmp_path, rows):
    (tmp_path / "ifeval.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_a_prompt_is_right_where_all_is_followed_and_shares_tell_the_rest(tmp_path):
    one, three = task_named("ifeval").instances(Source(written(tmp_path, ROWS)))
    assert (one.id, one.parts, three.parts) == ("ifeval-7", 1, 3)
    assert following(one, "yes").score == 1
    verdict = following(three, "Well, so:\nyes")
    assert (verdict.score, verdict.reason) == (0.0, "punctuation:no_comma; startend:quotation")
    assert verdict.also == {
        "accuracy_loose": 0.0,
        "instructions_followed": 1 / 3,
        "instructions_followed_loose": 2 / 3,
    }


@pytest.mark.parametrize("samples", [1, 2])
def test_instructions_count_alike_however_many_a_prompt_has(tmp_path, samples):
    engine = Pretended(say=lambda prompt, seed: Said("so it is"))
    scores = evaluate(engine, "ifeval", data=written(tmp_path, ROWS), samples=samples).scores
    assert scores["accuracy"].mean == 1 / 2
    assert scores["instructions_followed"].mean == 3 / 4  # of 4 instructions, not the mean of 1 and 2/3
    assert scores["instructions_followed"].n == 2
    assert not any(name.startswith("majority") for name in scores)  # there is no answer that many could give


@pytest.mark.parametrize(
    ("names", "arguments", "words"),
    [
        (["punctuation:no_colon"], [{}], "unknown instruction punctuation:no_colon"),
        ([SHORT[0]], [{"relation": "less than"}], "num_words"),
        ([SHORT[0]], [{"relation": "about", "num_words": 5}], "about"),
        ([SHORT[0]], [{"relation": "less than", "num_words": "five"}], "not supported"),
        (["language:response_language"], [{"language": "xx"}], "language xx is unknown"),
        ([COMMA[0]], [{"colour": "red"}], "colour"),
        ([COMMA[0]], [], "zip"),
        ([COMMA[0]], None, "not as expected"),
    ],
)
def test_a_row_that_asks_for_something_strange_is_told_of_when_it_is_read(tmp_path, names, arguments, words):
    row = {"key": 1, "prompt": "?", "instruction_id_list": names, "kwargs": arguments}
    with pytest.raises(RzooError, match=words) as error:
        list(task_named("ifeval").instances(Source(written(tmp_path, [row]))))
    assert "row 1" in str(error.value)


def test_every_instruction_of_the_public_file_is_known(shared):
    every = list(task_named("ifeval").instances(Source(shared / "data")))
    asked = [name for one in every for name, _ in one.extra["instructions"]]
    assert (len(every), len(asked)) == (541, 834)
    assert set(asked) == CHECKS.keys()
