"""The instructions of IFEval (Zhou et al. 2023, arXiv:2311.07911) that a program can check: CHECKS, by their ids.

A check takes an answer and the arguments that the data file gives, under its names. The rules are those of the authors'
program, but for these: sentences and languages are told by rules and not by the trained models of NLTK and langdetect;
an instruction over "!" or "#" counts that sign and not a letter drawn by chance; empty paragraphs never count.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rzoo.evals.languages import LANGUAGES, language_of

Check = Callable[..., bool]
RELATIONS: dict[str, Callable[[int, int], bool]] = {"at least": operator.ge, "less than": operator.lt}

WORD = re.compile(r"\w+")
CAPITALS = re.compile(r"\w+(?:[-./]\w+)*")
BULLET = re.compile(r"^[ \t]*(?:\*[^*\n]|-)", re.MULTILINE)
PLACEHOLDER = re.compile(r"\[[^\[\]\n]*\]")
HIGHLIGHT, DOUBLE_HIGHLIGHT = re.compile(r"\*([^\n*]*)\*"), re.compile(r"\*\*([^\n*]*)\*\*")
POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\.", re.IGNORECASE), "P.P.S": re.compile(r"p\.\s?p\.\s?s", re.IGNORECASE)}
JSON_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)
FIRST_WORD = re.compile(r"""['"]*([^\s.,?!'"]*)""")
PHRASES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

# An end of a sentence: its marks, closing quotes, then space; Chinese writes none. "(1. so", "john f. so" hold none.
END = re.compile(r"""(?<![.!?…])[.!?…]+["'”’)\]*_]*(?=\s|$)(?!(?:(?<=\d\.)|(?<=\b\w\.))\s+[a-z])|[。！？।]""")
# A point that is none: behind a title, an initial, "e.g", the number of a list.
TITLES = "mr|mrs|ms|dr|prof|st|jr|sr|vs"
NO_END = re.compile(
    rf"(?:(?:^|[\s(\"“])(?:{TITLES}|(?-i:[A-HJ-Z])|(?:[^\W\d_]\.)+[^\W\d_])|(?:^|\n)[ \t#>*-]*\d+)\.$",
    re.IGNORECASE,
)


def sentences(text: str) -> list[str]:
    """The sentences of a text; a line break ends none, and what has no letter or digit is none."""
    found, start = [], 0
    for end in END.finditer(text):
        if not NO_END.search(text[max(start, end.start() - 20) : end.end()]):
            found.append(text[start : end.end()])
            start = end.end()
    return [part.strip() for part in [*found, text[start:]] if WORD.search(part)]


def _count(count: Callable[[str], int], threshold: str, relation: str = "relation") -> Check:
    """A check that counts; threshold, relation: the names of its arguments."""

    def check(text: str, **arguments: Any) -> bool:
        return RELATIONS[arguments[relation]](count(text), arguments[threshold])

    return check


def _keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return RELATIONS[relation](text.lower().count(keyword.strip().lower()), frequency)


def _letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return RELATIONS[let_relation](text.lower().count(letter.lower()), let_frequency)


def _keywords(text: str, *, keywords: Sequence[str]) -> bool:
    return all(word.lower() in text.lower() for word in keywords)


def _no_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _response_language(text: str, *, language: str) -> bool:
    """Text without a letter is in every language, as with the authors."""
    if language not in LANGUAGES:
        raise ValueError(f"language {language} is unknown")
    return language_of(text) in (language, None)


def _paragraphs(text: str, *, num_paragraphs: int) -> bool:
    parts = _divided(text, "***")
    return parts is not None and len(parts) == num_paragraphs


def _two_responses(text: str) -> bool:
    parts = _divided(text, "******")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def _divided(text: str, divider: str) -> list[str] | None:
    """The parts between dividers; None where there is nothing between two of these."""
    parts = [part.strip() for part in text.split(divider)]
    return [part for part in parts if part] if all(parts[1:-1]) else None


def _first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    found = FIRST_WORD.match(parts[nth_paragraph - 1])
    return found is not None and found[1].lower() == first_word.lower()


def _postscript(text: str, *, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    return (POSTSCRIPTS.get(marker) or re.compile(re.escape(marker), re.IGNORECASE)).search(text) is not None


def _placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(PLACEHOLDER.findall(text)) >= num_placeholders


def _bullets(text: str, *, num_bullets: int) -> bool:
    return len(BULLET.findall(text)) == num_bullets


def _highlights(text: str, *, num_highlights: int) -> bool:
    found = HIGHLIGHT.findall(text) + DOUBLE_HIGHLIGHT.findall(text)
    return sum(bool(part.strip()) for part in found) >= num_highlights


def _sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d", text)) >= num_sections


def _title(text: str) -> bool:
    """Something between << and >> on one line."""
    opened = (line.partition("<<")[2] for line in text.split("\n"))
    return any(rest.rpartition(">>")[0].strip("<> \t") for rest in opened)


def _json(text: str) -> bool:
    """JSON, alone or in one block between ``` lines."""
    text = text.strip()
    fence = JSON_FENCE.match(text)
    try:
        json.loads(text[fence.end() if fence else 0 :].removesuffix("```"))
    except (ValueError, RecursionError):
        return False
    return True


def _repeated_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end_phrase(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _english(cased: Callable[[str], bool]) -> Check:
    return lambda text: cased(text) and language_of(text) == "en"


CHECKS: dict[str, Check] = {
    "change_case:capital_word_frequency": _count(
        lambda text: sum(map(str.isupper, CAPITALS.findall(text))), "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": _english(str.isupper),
    "change_case:english_lowercase": _english(str.islower),
    "combination:repeat_prompt": _repeated_prompt,
    "combination:two_responses": _two_responses,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": lambda text: any(phrase in text for phrase in PHRASES),
    "detectable_format:json_format": _json,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:title": _title,
    "keywords:existence": _keywords,
    "keywords:forbidden_words": _no_forbidden_words,
    "keywords:frequency": _keyword_frequency,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _response_language,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_sentences": _count(lambda text: len(sentences(text)), "num_sentences"),
    "length_constraints:number_words": _count(lambda text: len(WORD.findall(text)), "num_words"),
    "punctuation:no_comma": lambda text: "," not in text,
    "startend:end_checker": _end_phrase,
    "startend:quotation": _quoted,
}
Instruction = tuple[str, Mapping[str, Any]]  # its id and its arguments


def followed(text: str, instruction: Instruction) -> bool:
    """Whether an answer follows an instruction to the letter; an empty one follows none."""
    name, arguments = instruction
    return bool(text.strip()) and CHECKS[name](text, **arguments)


def followed_loosely(text: str, instruction: Instruction) -> bool:
    """Whether it does so without its first line, its last, both or neither, and with or without its stars."""
    lines = text.split("\n")
    parts = (text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])))
    return any(followed(each, instruction) for part in parts for each in (part, part.replace("*", "")))
