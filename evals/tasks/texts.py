"""Classes with macro-F1 beside accuracy, and BIG-Bench Hard."""

import json
from collections.abc import Iterator
from typing import Any

from rzoo.core import RzooError
from rzoo.evals.answers import written_answer
from rzoo.evals.choices import choice_letter, label_in
from rzoo.evals.data_files import found, instances_of, rows
from rzoo.evals.task import CHOICE, Adapter, Instance, Source, Task, Verdict

FEELINGS = ("bearish", "bullish", "neutral")
BANKING = ("banking77/test.csv", "banking77.csv")
NEWS = ("twitter_financial_news/sent_valid.csv", "sent_valid.csv")
ONE_LABEL = "Which of these labels fits the text? Answer with the label alone.\nLabels: "


def label(instance: Instance, text: str) -> Verdict:
    """Right where the answer names the right label of the list; what is not in the list is a miss."""
    named = label_in(text, instance.options)
    return Verdict(float(named == instance.answer), named, None if named else "unparsed")


def banking77(source: Source) -> Iterator[Instance]:
    """PolyAI's table; the list of labels is categories.json beside it, else the labels that the table holds."""
    get = "test.csv and categories.json of github.com/PolyAI-LDN/task-specific-datasets, banking_data"
    path = found(source.data, BANKING, get)
    table, listed = rows(path), path.with_name("categories.json")
    try:
        labels = json.loads(listed.read_text("utf-8")) if listed.is_file() else sorted({r["category"] for r in table})
        for place, row in enumerate(table):
            yield Instance(id=f"{place}", text=row["text"], answer=row["category"], options=tuple(map(str, labels)))
    except (KeyError, TypeError, ValueError) as error:
        words = f"{path} and {listed.name} are not as expected ({error})"
        raise RzooError(words, field="data", value=str(path), fix=get) from error


def financial_news(place: int, row: Any) -> Instance:
    """A message, and what it means for a price."""
    return Instance(id=f"{place}", text=row["text"], answer=FEELINGS[int(row["label"])], options=FEELINGS)


def bbh(source: Source) -> Iterator[Instance]:
    """Every file of BIG-Bench Hard that is in the folder bbh, each a part of the task."""
    get = "the folder bbh of github.com/suzgunmirac/BIG-Bench-Hard"
    first = found(source.data, ("bbh/boolean_expressions.json",), get)
    for path in sorted(first.parent.glob("*.json")):
        if not path.stem.startswith("davinci"):
            convert = _converter(path.stem)
            yield from instances_of((path.name,), get, convert)(Source(first.parent))


def _converter(name: str) -> Any:
    return lambda place, row: Instance(
        id=f"{name}-{place}", text=row["input"], answer=row["target"].strip(), group=name
    )


def bbh_answer(instance: Instance, text: str) -> Verdict:
    """Right where the answer is the target: its letter where that is one, else its words, case and points apart."""
    if len(instance.answer) == 3 and instance.answer[0] == "(":
        letters = "".join(chr(code) for code in range(ord("A"), ord("R") + 1))
        named = choice_letter(text, letters)
        return Verdict(float(f"({named})" == instance.answer), named, None if named else "unparsed")
    answer = written_answer(text) or next((line for line in reversed(text.split("\n")) if line.strip()), "")
    same = _spelled(answer) == _spelled(instance.answer)
    return Verdict(float(same), answer or None, None if answer else "unparsed")


def _spelled(text: str) -> str:
    return " ".join(text.casefold().strip(" .*\"'$").split())


NEWS_LABELS = ", ".join(FEELINGS)
TASKS = [
    Task(
        name="banking77",
        about="what a bank's customer wants, one of 77 labels",
        instances=banking77,
        text=Adapter(question=ONE_LABEL + "{labels}\n\nText: {text}\nLabel:", stop=("\n",), max_tokens=24),
        chat=Adapter(question=ONE_LABEL + "{labels}\n\nText: {text}", max_tokens=64),
        scorer=label,
        f1=True,
        files=BANKING,
    ),
    Task(
        name="financial_news",
        about="what a message means for a price, one of 3 labels",
        instances=instances_of(NEWS, "sent_valid.csv of zeroshot/twitter-financial-news-sentiment", financial_news),
        text=Adapter(method=CHOICE, question="News: {text}\nSentiment (" + NEWS_LABELS + "):"),
        chat=Adapter(question=ONE_LABEL + "{labels}\n\nText: {text}", max_tokens=64),
        scorer=label,
        f1=True,
        files=NEWS,
    ),
    Task(
        name="bbh",
        about="27 hard parts of BIG-Bench",
        instances=bbh,
        text=Adapter(question="Q: {text}\nA: Let's think step by step.", stop=("\nQ:",), max_tokens=512),
        chat=Adapter(question='{text}\n\nThink step by step and end with "the answer is …".', max_tokens=1024),
        scorer=bbh_answer,
        files=("bbh/boolean_expressions.json",),
    ),
]
