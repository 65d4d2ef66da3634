"""Choices, by likelihood of the options, or of letters where a chat model is to say one; and words to be foreseen."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rzoo.evals.choices import choice_letter
from rzoo.evals.data_files import Convert, instances_of
from rzoo.evals.task import CHOICE, GREEDY, Adapter, Instance, Task, Verdict, letter_of

CLOZE = Adapter(method=CHOICE, question="{text}\nAnswer:")
LETTERS = Adapter(method=CHOICE, question="{text}\n{options}\nAnswer:", answer=" {letter}")
SAY_LETTER = Adapter(
    instructions='Choose the right option. The last line of the answer is "Answer: X", with its letter for X.',
    question="{text}\n\n{options}",
    max_tokens=1024,
)


def letter(instance: Instance, text: str) -> Verdict:
    """Right where the answer names the letter of the right option."""
    named = choice_letter(text, "".join(letter_of(i) for i in range(len(instance.options))))
    if named is None:
        return Verdict(0.0, None, "unparsed")
    option = instance.options[ord(named) - ord("A")]
    return Verdict(float(option == instance.answer), option)


def _choice(name: str, text: str, options: list[str], right: int, **more: Any) -> Instance:
    """Options that are written alike are told apart, so that one of them alone is right."""
    told = [option if option not in options[:i] else f"{option} ({i + 1})" for i, option in enumerate(options)]
    return Instance(id=name, text=text, answer=told[_within(right, told)], options=tuple(told), **more)


def _within(index: int, values: list[str]) -> int:
    if not 0 <= index < len(values):
        raise ValueError(f"the right option is number {index} of {len(values)}")
    return index


def _asked(text: str) -> str:
    return f"Question: {text.strip().removeprefix('Question:').strip()}"


def query(place: int, row: Any) -> Instance:
    """Rows of query, choices, gold, as LLM Foundry carries ARC, PIQA, BoolQ and OpenBookQA."""
    return _choice(f"{place}", _asked(row["query"]), row["choices"], row["gold"])


def plain(place: int, row: Any) -> Instance:
    """Such a row whose query the options go on from, as it stands."""
    return _choice(f"{place}", row["query"].strip(), row["choices"], row["gold"])


def arc(place: int, row: Any) -> Instance:
    """A row as AI2 publishes ARC, or as above."""
    if "query" in row:
        return query(place, row)
    choices = row["question"]["choices"]
    right = [choice["label"] for choice in choices].index(row["answerKey"])
    texts = [choice["text"] for choice in choices]
    return _choice(str(row["id"]), _asked(row["question"]["stem"]), texts, right)


def piqa(place: int, row: Any) -> Instance:
    """A row as PIQA's authors publish it, with its label in it, or as above."""
    if "query" in row:
        return query(place, row)
    return _choice(f"{place}", _asked(row["goal"]), [row["sol1"], row["sol2"]], int(row["label"]))


def boolq(place: int, row: Any) -> Instance:
    """A passage and a question of yes or no."""
    if "query" in row:
        return plain(place, row)
    text = f"Passage: {row['passage']}\nQuestion: {row['question']}?"
    return _choice(f"{place}", text, ["no", "yes"], int(row["answer"]))


def mmlu(place: int, row: Any) -> Instance:
    """A row of question, choices, answer; its subject as type or subject."""
    group = str(row.get("subject") or row.get("type") or "")
    return _choice(f"{place}", _asked(row["question"]), row["choices"], int(row["answer"]), group=group)


def gpqa(place: int, row: Mapping[str, str]) -> Instance:
    """A row of GPQA's table; the options are shuffled by a seed of their own for each question."""
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    order = np.random.default_rng((0, place)).permutation(len(names))
    options = [row[names[i]].strip() for i in order]
    return _choice(f"gpqa-{place}", row["Question"].strip(), options, int(np.argmin(order)))


def winogrande(place: int, row: Any) -> Instance:
    """Two beginnings with one ending: the likelier ending tells which."""
    contexts = tuple(row["context_options"])
    right = contexts[_within(row["gold"], list(contexts))]
    return Instance(id=f"{place}", text=row["continuation"], answer=right, options=contexts, contexts=contexts)


def lambada(place: int, row: Any) -> Instance:
    """A passage and its last word."""
    if "context" in row:
        return Instance(id=f"{place}", text=row["context"].rstrip(), answer=row["continuation"].strip())
    text, _, word = row["text"].strip().rpartition(" ")
    return Instance(id=f"{place}", text=text, answer=word)


def _task(
    name: str, about: str, convert: Convert, files: tuple[str, ...], get: str, text: Adapter = CLOZE, **more: Any
) -> Task:
    return Task(name=name, about=about, instances=instances_of(files, get, convert), text=text, files=files, **more)


SAID = {"chat": SAY_LETTER, "scorer": letter}
EASY = ("arc/arc_easy.jsonl", "arc/ARC-Easy-Test.jsonl", "arc_easy.jsonl")
HARD = ("arc/arc_challenge.jsonl", "arc/ARC-Challenge-Test.jsonl", "arc_challenge.jsonl")
PIQA = ("piqa/validation.jsonl", "piqa.jsonl")
TASKS = [
    _task("arc_easy", "school science, the easy part", arc, EASY, "from ai2-public-datasets, ARC-V1"),
    _task("arc_challenge", "school science, hard part", arc, HARD, "from ai2-public-datasets, ARC-V1"),
    _task("piqa", "which of two ways to do a thing works", piqa, PIQA, "from yonatanbisk.com/piqa"),
    _task(
        "openbookqa",
        "elementary science facts",
        plain,
        ("openbookqa/test.jsonl",),
        "rows of query, choices, gold, as in LLM Foundry",
        Adapter(method=CHOICE),
    ),
    _task(
        "boolq",
        "yes or no, by a passage",
        boolq,
        ("boolq/validation.jsonl", "boolq/dev.jsonl"),
        "dev.jsonl of google-research-datasets/boolean-questions",
    ),
    _task(
        "winogrande",
        "whom a pronoun means",
        winogrande,
        ("winogrande/validation.jsonl",),
        "rows of context_options, continuation, gold, as in LLM Foundry",
        Adapter(method=CHOICE),
    ),
    _task(
        "lambada",
        "the last word of a passage",
        lambada,
        ("lambada/lambada_openai.jsonl", "lambada/lambada_test.jsonl"),
        "lambada_test.jsonl, one text a row",
        Adapter(method=GREEDY),
    ),
    _task(
        "mmlu",
        "knowledge in many subjects",
        mmlu,
        ("mmlu/test.jsonl", "mmlu_stem/test.jsonl"),
        "rows of question, choices, answer, subject",
        LETTERS,
        **SAID,
    ),
    _task(
        "gpqa",
        "graduate-level science; its text is shown nowhere",
        gpqa,
        ("gpqa/gpqa_diamond.csv", "gpqa_diamond.csv"),
        "gpqa_diamond.csv of the gated data set Idavidrein/gpqa",
        LETTERS,
        private=True,
        **SAID,
    ),
]
