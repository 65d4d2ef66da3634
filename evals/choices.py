"""Which of the given choices a model's answer names: a letter in any spelling, or a label of a fixed list."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rzoo.evals.answers import SAID, last_boxed, plain

# A and I are answers where nothing goes on behind them as behind a word: "A because", but not "A number", "I think".
WITHIN = "[A-Za-z0-9_'’]"  # beside a letter that is a part of a word; Chinese stands beside its letters without a space
GOES_ON = r"(?!\s+(?!(?:because|since|as|for|which|with|and|is|or|not)\b)[a-z])"
FILLING = (
    r"""(?:[\s$({\[\\"'`:：=*<是为选]|text\w*+|math\w++"""
    r"""|(?i:is|are|would|should|must|be|the|correct|option|choice|letter)\b)*?"""
)
NOTHING = "(?!)"  # a pattern that fits nowhere
APART = re.compile(r"[\s_\-]+")


def choice_letter(text: str, letters: str = "ABCD") -> str | None:
    """The letter out of `letters` that an answer chooses; None where it names none. The first of these that is there:

    the last box; the last "answer is C", "Answer: $C$" or "**Answer:** (c)"; the last line that is a letter alone; the
    one letter that begins lines ("C. 12"); the last "option C" or "(C)"; the last letter that stands alone. So "(A) is
    wrong" behind the answer does not count.
    """
    any_of = f"[{re.escape(letters)}]" if letters else NOTHING
    capital = rf"(?<!{WITHIN}){any_of}(?!{WITHIN})"
    capital = rf"(?:(?![AI]){capital}|(?=[AI]){capital}{GOES_ON})"
    closed = rf"""(?<!{WITHIN}){any_of.lower()}(?=\s*[)\]}}.,:;$"'`]|\s*$)"""
    boxed = last_boxed(text)
    if boxed is not None:
        return _last(rf"({capital}|{closed})", boxed)
    text = plain(text)
    return (
        _last(rf"(?:(?i:\banswer)|答案){FILLING}({capital}|{closed})", text)
        or _last(rf"^[^\w\n]*({capital}|{closed})[^\w\n]*$", text)
        or _only(rf"^[ \t]*[(\[]?({capital})[)\].:]", text)
        or _last(rf"(?:(?i:\boption|\bchoice)\s*[(\"']?|[(\[])({capital})", text)
        or _last(rf"({capital})", text)
    )


def _last(pattern: str, text: str) -> str | None:
    found = re.findall(pattern, text, re.MULTILINE)
    return found[-1].upper() if found else None


def _only(pattern: str, text: str) -> str | None:
    found = set(re.findall(pattern, text, re.MULTILINE))
    return found.pop() if len(found) == 1 else None


def label_in(text: str, labels: Sequence[str]) -> str | None:
    """The label of a fixed list that an answer names; None for none, which is an error and never a class of its own.

    Case counts for nothing, and a space, "_" and "-" are one. Where several are named the last counts, first in a box,
    then behind "answer:", then anywhere; of labels that begin alike the longest that fits.
    """
    known = {_spread(label): label for label in reversed(labels) if _spread(label)}
    pattern = "|".join(map(re.escape, sorted(known, key=len, reverse=True))) or NOTHING
    boxed, text = last_boxed(text), plain(text)
    answers = [text[said.end() :].partition("\n")[0] for said in list(SAID.finditer(text))[-1:]]
    for part in [boxed] if boxed is not None else [*answers, text]:
        if found := re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", _spread(part)):
            return known[found[-1]]
    return None


def _spread(text: str) -> str:
    return APART.sub(" ", text).strip().casefold()
