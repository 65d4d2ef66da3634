"""What is read out of a model's text: the answer behind its reasoning, boxes, numbers, code."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from rzoo.evals.answers import (
    after_reasoning,
    before_stops,
    code_in,
    completed,
    last_boxed,
    number_in,
    written_answer,
)


@pytest.mark.parametrize(
    ("text", "opened", "visible"),
    [
        ("4", False, "4"),
        ("<think>2 + 2</think>\n\n4", False, "4"),
        ("2 + 2</think>\n\n4", True, "4"),
        ("2 + 2</think>4", False, "4"),  # a template opened the thought and nobody said so
        ("<think>a</think><think>b</think>4", False, "4"),
        ("2 + 2 is 4", True, None),
        ("<think>2 + 2 is 4", False, None),
        ("\n<think>2 + 2 is 4", False, None),
        ("<think>a</think><think>the answer is 4", False, None),
        ("<think></think>", False, ""),
        ("", False, ""),
        ("", True, None),
    ],
)
@pytest.mark.report("I06")
def test_only_what_follows_the_reasoning_is_graded(text, opened, visible):
    assert after_reasoning(text, opened=opened) == visible


@pytest.mark.report("I01", "I03", "I04")
def test_stops_cut_the_visible_answer_and_never_the_thought():
    text = "First,\n\nQuestion: what is it?\n\nIt is 4.</think>The answer is 4.\n\nQuestion: next"
    assert before_stops(after_reasoning(text, opened=True), ["\n\nQuestion:", "\n\n\n"]) == (
        "The answer is 4.",
        "\n\nQuestion:",
    )
    assert before_stops("The answer is 4.", ["\n\n", ""]) == ("The answer is 4.", None)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{42}", "42"),
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),  # an escaped brace opens nothing
        (r"First \boxed{17}. No wait, \boxed{18}", "18"),
        (r"the length \boxed{12\text{ cm}}, hence, after a while, \boxed{7}", "7"),
        (r"\boxed{3} and \boxed{5}", "3, 5"),
        (r"$\boxed{3}$, $\boxed{5}$ or \(\boxed{7}\)", "3, 5, 7"),
        (r"\boxed 5$", "5"),
        (r"\fbox{5}", "5"),
        ("5", None),
    ],
)
@pytest.mark.report("I12")
def test_the_last_box_alone_is_the_answer_and_neighbours_are_a_list(text, box):
    assert last_boxed(text) == box


@pytest.mark.parametrize("end", [r"\boxed{", r"\boxed{18", r"\boxed{}", r"\boxed{ }", r"\boxed{\frac{1}{2}"])
@pytest.mark.report("I13")
def test_an_empty_or_unclosed_last_box_is_no_answer_though_an_earlier_one_is_right(end):
    assert last_boxed(r"\boxed{18} " + end) == ""
    assert written_answer(r"The answer is 18. \boxed{18}, " + end) == ""


@given(st.text(max_size=40), st.text(alphabet="abc 123/^_=()é", min_size=1))
def test_whatever_is_boxed_last_is_read_whatever_stands_before_it(text, content):
    assert last_boxed(text + "; \\boxed{" + content + "}") == content.strip()
    assert last_boxed(text.replace("boxed", "")) is None


@pytest.mark.parametrize(
    ("text", "answer", "strict"),
    [
        ("so 3 and 4\n#### 18", "18", "18"),
        ("#### 17\nno\n#### 18\nQuestion", "18", "18"),
        ("Janet makes 18 dollars. The answer is 18. Next, 20.", "18", None),
        ("**Answer: 18**\nThere are 20.", "18", None),
        ("Final line.\n**Answer** 204", "204", None),
        ("The final answer is: $\\frac{1}{2}$.", "$\\frac{1}{2}$", None),
        ("she has 12, then 15", "15", None),
        ("none", None, None),
        ("The answer is\n", None, None),
        ("", None, None),
    ],
)
@pytest.mark.report("I15", "I16")
def test_an_answer_is_read_strictly_and_leniently(text, answer, strict):
    assert written_answer(text) == answer
    assert written_answer(text, strict=True) == strict


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18),
        ("$1,234.50", Fraction("1234.5")),
        (r"\$1{,}234", 1234),
        (r"1\,234", 1234),
        ("-5", -5),
        ("−5", -5),
        ("-$5", -5),
        ("$-5", -5),
        ("5.0", 5),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        ("5 * 3 = 15 dollars", 15),
        ("x =", None),
        ("18 dollars for 2 days", 18),
        ("50%", 50),
        ("1,319,000", 1319000),
        ("1000,000", 1000000),
        ("1/0", None),
        ("9" * 5000, None),
        ("five", None),
        ("", None),
        (None, None),
    ],
)
def test_a_number_is_read_exactly(text, number):
    assert number_in(text) == number


@given(st.fractions(), st.sampled_from(["{}", "${}", r"$\text{{about}} {}$", "x = {}", "**{}**"]))
def test_a_number_that_is_written_is_read(value, written):
    assert number_in(written.format(value)) == value


@given(st.text(max_size=80))
def test_any_text_has_a_number_or_none(text):
    assert number_in(written_answer(text)) is None or any(letter.isdigit() for letter in text)


BODY, WHOLE = "    return 1\n", "def one():\n    return 1\n"
PROMPT = "import math\n\ndef one():\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (WHOLE, WHOLE),
        (BODY, BODY),
        (f"Sure:\n```python\n{WHOLE}```\nThat is all.", WHOLE),
        (f"```\n{WHOLE}```\nUse it:\n```python\nprint(one())\n```", WHOLE),
        (f"```python\n{WHOLE}", WHOLE),
        ("```python\nx = 1\n```\n```\ny = 2\n```", "y = 2\n"),
    ],
)
def test_the_code_is_the_last_block_that_defines_the_function(text, code):
    assert code_in(text, "one") == code


@pytest.mark.parametrize("text", [BODY, WHOLE, f"```python\n{WHOLE}```", f"Here:\n```\n{BODY}```"])
def test_a_body_and_a_whole_function_complete_a_prompt_alike(text):
    assert completed(PROMPT, text, "one") == PROMPT + BODY
