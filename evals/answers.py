r"""What a model's text gives as its answer: text in; the answer out, None where there is none ("unparsed").

`after_reasoning`: only what follows the last </think> is graded; None for a thought that never ends ("truncated").
`written_answer`: the last \boxed{}, alone; boxes with nothing but a comma, "and" or "or" between them are one list. A
last box that is empty or never closed is an empty answer, for which neither an earlier box nor another spelling stands
in. Without a box what follows the last "####", then the last "answer is", then the last number of the text.
`number_in`, `choice_letter`, `label_in`, `code_in`: the answer in the form in which it is compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rzoo.chat import END_THINK, THINK

MARKDOWN = re.compile(r"(?<![\w*])(\*{1,3})([^*\n]+)\1(?![\w*])")  # not powers: 2**3 has a digit beside the stars

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\S)")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
UP_TO_SPACE = re.compile(r"[\s$]")
BETWEEN_BOXES = re.compile(r"(?:[\s,;$&}]|\\text\s*\{|\\[()\[\],;]|\band\b|\bor\b)*")

MARK = re.compile(r"####[ \t]*")
SAID = re.compile(r"\banswer\s*(?:(?:is|are|would be|should be|must be)\b\s*[:：]?|[:：=])\s*", re.IGNORECASE)
SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")

DIGITS = r"(?:\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"((?<![\w)}}])[-−]\s?)?(?:\\?\$)?([-−]?{DIGITS})(?:\s*/\s*({DIGITS}))?")
FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
THIN_SPACE = re.compile(r"\{,\}|\\[,!]")
MOST_DIGITS = 400  # a longer number is no answer, and Python refuses to read thousands

FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


def after_reasoning(text: str, *, opened: bool = False) -> str | None:
    """What follows the last thought; None where a thought was begun and never closed.

    opened: the prompt ended in <think>, so that the text begins inside of a thought.
    """
    _, closed, answer = text.rpartition(END_THINK)
    if (opened and not closed) or answer.lstrip().startswith(THINK):
        return None
    return answer.lstrip("\n") if closed else text


def before_stops(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """(the text before the first stop that stands in it, that stop or None). For text without its reasoning."""
    starts = [(text.find(stop), stop) for stop in stops if stop and stop in text]
    start, stop = min(starts, default=(len(text), None))
    return text[:start], stop


def plain(text: str) -> str:
    """The text without the stars of bold and italics."""
    return MARKDOWN.sub(r"\2", text)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{} (\fbox{}, \boxed 5); "" where it is empty or never closed; None for no box."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    last = boxes.pop()
    answers, start = [_braced(text, last.end())[0]], last.start()
    while boxes and answers[0]:
        box = boxes.pop()
        content, end = _braced(text, box.end())
        if not content or not BETWEEN_BOXES.fullmatch(text, end, start):
            break
        answers, start = [content, *answers], box.start()
    return ", ".join(answers)


def _braced(text: str, start: int) -> tuple[str, int]:
    """(what the brace at `start` holds, where it ends); "" where it is never closed. Without a brace, up to a space."""
    if text[start] != "{":
        word = UP_TO_SPACE.split(text[start:], maxsplit=1)[0]
        return word.rstrip(".,"), start + len(word)
    depth = 0
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()].strip(), brace.end()
    return "", len(text)


def written_answer(text: str, *, strict: bool = False) -> str | None:
    """The answer as it is written. strict: only in a box or behind "####"."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    text = plain(text)
    if marks := list(MARK.finditer(text)):
        return text[marks[-1].end() :].partition("\n")[0].strip()
    if strict:
        return None
    return _said(text) or _last_number(text)


def _said(text: str) -> str | None:
    """What the last sentence with "answer is" or "answer:" says."""
    for said in reversed(list(SAID.finditer(text))):
        if sentence := SENTENCE_END.split(text[said.end() :], maxsplit=1)[0].strip():
            return sentence
    return None


def _last_number(text: str) -> str | None:
    numbers = [number[0] for number in NUMBER.finditer(text)]
    return numbers[-1] if numbers else None


def number_in(text: str | None) -> Fraction | None:
    r"""The number that an answer gives, exactly: the first behind its last "=".

    Reads thousands (1,234; 1{,}234), decimals, fractions (3/4, \frac{3}{4}), either minus sign, $ and units around it.
    """
    text = FRACTION.sub(r" \1/\2 ", THIN_SPACE.sub("", text or ""))
    found = NUMBER.search(text.rpartition("=")[2]) or NUMBER.search(text)
    if found is None or len(found[0]) > MOST_DIGITS:
        return None
    sign, above, below = (part or "" for part in found.groups())
    value = Fraction(above.replace("−", "-").replace(",", "")) * (-1 if sign else 1)
    divisor = Fraction(below.replace(",", "") or 1)
    return value / divisor if divisor else None


def code_in(text: str, name: str | None = None) -> str:
    """The code in an answer: its last block between ``` lines, the last that defines `name` where one does.

    A block that is never closed ends with the text; text without a block is code as it stands, first spaces included.
    """
    blocks = FENCE.findall(text)
    defining = [block for block in blocks if name and defines(block, name)]
    return (defining or blocks or [text])[-1]


def defines(code: str, name: str) -> bool:
    """Whether the code has a function or class of this name on its outermost level."""
    return re.search(rf"^(?:async\s+def|def|class)\s+{re.escape(name)}\b", code, re.MULTILINE) is not None


def completed(prompt: str, text: str, name: str) -> str:
    """The program that an answer makes of a prompt which ends in the head of the function `name`, as HumanEval's do.

    The answer may be the body alone, or write the function again; then what the prompt has above it stays.
    """
    code = code_in(text, name)
    if not defines(code, name):
        return prompt + code
    head = re.search(rf"^(?:async\s+)?def\s+{re.escape(name)}\b", prompt, re.MULTILINE)
    return (prompt[: head.start()] if head else "") + code
