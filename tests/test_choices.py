"""Which choice a model's text names: letters in all spellings, labels of a fixed list."""

import pytest
from hypothesis import given, strategies as st

from rzoo.evals.answers import written_answer
from rzoo.evals.choices import choice_letter, label_in

SPELLINGS = [
    "Answer: C",
    "ANSWER: $C$",
    "answer: c",
    "Answer: **C**",
    "**Answer:** C",
    "**Answer: C**",
    "Answer: (C)",
    "Answer:\nC",
    r"Answer: \(C\)",
    r"Answer: $\text{C}$",
    "The answer is (C).",
    "the answer is c.",
    "The correct answer is option C, because A is a number.",
    "The answer would be C) 12",
    "答案是C",
    "答案：C。",
    r"\boxed{C}",
    r"$\boxed{\text{C}}$",
    r"\boxed{\textbf{(C) } 12}",
    r"\boxed{c}",
    "C",
    "c",
    "(C)",
    "**C**",
    "C.",
    "C. 12",
    "C) 12",
    "C: 12",
    "(C) 12, since (A) and (B) are too small",
    "I choose option C.",
    "So it must be C",
    "A is wrong, B is wrong, so C",
    "A. 1\nB. 2\nC. 12\nD. 4\n\nAnswer: C",
    "Answer: A? No.\nAnswer: C",
    "The answer is A? No. The correct answer is (C).",
    "The answer is not (A) but (C).",
    "Answer: C\n\nA and B are too small, and (D) is too large.",
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_letter_is_read_in_every_spelling_and_the_last_counts(text):
    assert choice_letter(text) == "C"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I don't know.",
        "The answer is a number.",
        "A number of things could be meant.",
        "Answer: Paris",
        "Answer: E",
        r"The answer is C. \boxed{",
        r"\boxed{12}",
        "Don't",
    ],
)
def test_text_without_a_choice_has_no_letter(text):
    assert choice_letter(text) is None


def test_i_is_a_letter_and_not_a_word():
    assert choice_letter("I think the answer is I.", "ABCDEFGHIJ") == "I"
    assert choice_letter("I think that I can not say.", "ABCDEFGHIJ") is None


def test_choices_may_be_digits():
    assert choice_letter("Answer: 3", "1234") == "3"


@given(st.text(max_size=60), st.sampled_from("ABCD"))
def test_an_answer_line_decides_whatever_stands_before_it(text, letter):
    before = text.replace("boxed", "")
    assert choice_letter(f"{before}\nAnswer: {letter}") == letter


LABELS = ["card_payment", "card_payment_wrong_exchange_rate", "lost_or_stolen_card", "Refund_not_showing_up"]


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("card_payment", "card_payment"),
        ("Card payment wrong exchange rate.", "card_payment_wrong_exchange_rate"),
        ("LOST-OR-STOLEN CARD", "lost_or_stolen_card"),
        ("It is not card_payment. Answer: `refund_not_showing_up`\n(card_payment is close)", "Refund_not_showing_up"),
        (r"card_payment? \boxed{\text{lost_or_stolen_card}}", "lost_or_stolen_card"),
        ("First card_payment, then lost or stolen card", "lost_or_stolen_card"),
        ("archive", None),
        ("card_payments", None),
        (r"card_payment \boxed{}", None),
        ("", None),
    ],
)
@pytest.mark.report("I37")
def test_a_label_is_one_of_the_list_or_none(text, label):
    assert label_in(text, LABELS) == label


def test_no_choices_are_never_chosen():
    assert choice_letter("Answer: C", "") is None
    assert label_in("", []) is label_in("card payment", ["", "_"]) is None


@pytest.mark.parametrize(
    "piece",
    ["answer text", "texttext", " the", "\n", "\n- ", "answer is . ", "\\boxed{", "\\boxed", "**a", "1,", "((", "$ "],
)
def test_long_text_that_repeats_is_read_to_its_end(piece):
    text = "answer" + piece * 20_000
    assert choice_letter(text) is None
    assert label_in(text, LABELS) is None
    written_answer(text)
