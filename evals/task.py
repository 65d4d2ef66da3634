"""What an evaluation is: data, a prompt, a scorer.

Instance   one question and its answer                       HELM: Instance
Adapter    how a question becomes a prompt, and what is asked of the model       AdapterSpec
Scorer     a pure function, (instance, text of the answer) -> Verdict; training may use it as a reward
Task       a name, where its instances come from, its adapters and its scorer    Scenario and MetricSpec
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rzoo.core import RzooError

CHOICE, GREEDY, GENERATION = "choice", "greedy", "generation"


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One question. text: what is asked; answer: the right one; options: of a choice, the answer among them.

    contexts: where the options share a continuation (`text`) and not a beginning, what stands before it in each.
    group: its part of the task, such as a subject or a depth, scored on its own, too. extra: what the scorer needs.
    parts: how many things it asks for, of which a task's by_part scores are shares.
    """

    id: str
    text: str
    answer: str
    options: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()
    group: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    parts: int = 1


@dataclass(frozen=True)
class Verdict:
    """score: 0 to 1. answer: what was read out of the text, None for nothing. reason: why a wrong answer is wrong where
    that is known: "truncated", "unparsed", "timeout", … also: further scores, by name.
    """

    score: float
    answer: str | None = None
    reason: str | None = None
    also: Mapping[str, float] = field(default_factory=dict)


Scorer = Callable[..., Verdict]  # of an Instance and the text of an answer


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How instances become prompts. Templates know text, answer, options (a line each, behind letters), letter, labels.

    method: GENERATION; CHOICE, the option with the largest log-likelihood; or GREEDY, whether the answer is what the
    model would write. instructions: before all. question, answer: templates of str.format over an instance's fields;
    shots: solved examples. stop: ends an answer; never inside of a thought. max_tokens: of an answer; thought: as many
    more where the model may think. whole: an answer that is cut is wrong, whatever stands in it.
    """

    method: str = GENERATION
    instructions: str = ""
    question: str = "{text}"
    answer: str = " {answer}"
    between: str = "\n\n"
    shots: tuple[Instance, ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int = 512
    thought: int = 8192
    whole: bool = True

    def asked(self, instance: Instance) -> str:
        """The question as the model reads it."""
        return self.question.format_map(_fields(instance))

    def told(self, instance: Instance) -> str:
        """The answer as a solved example shows it."""
        return self.answer.format_map(_fields(instance))

    def text(self, instance: Instance, shots: int | None = None) -> str:
        """The prompt as plain text, after the first `shots` solved examples (all)."""
        solved = [self.asked(shot) + self.told(shot) for shot in self.shots[:shots]]
        return self.between.join([*[self.instructions][: bool(self.instructions)], *solved, self.asked(instance)])

    def messages(self, instance: Instance, shots: int | None = None) -> list[dict[str, str]]:
        """The prompt as a conversation; the instructions begin its first turn, since not every model has a system."""
        turns = [(self.asked(shot), self.told(shot).strip()) for shot in self.shots[:shots]]
        said = [(role, words) for turn in turns for role, words in zip(("user", "assistant"), turn, strict=True)]
        said.append(("user", self.asked(instance)))
        first = self.between.join([self.instructions, said[0][1]]) if self.instructions else said[0][1]
        return [{"role": role, "content": words} for role, words in [("user", first), *said[1:]]]


def _fields(instance: Instance) -> dict[str, str]:
    letters = "\n".join(f"{letter_of(i)}. {option}" for i, option in enumerate(instance.options))
    right = instance.options.index(instance.answer) if instance.answer in instance.options else 0
    return {
        "text": instance.text,
        "answer": instance.answer,
        "options": letters,
        "letter": letter_of(right),
        "labels": ", ".join(instance.options),
    }


def letter_of(index: int) -> str:
    """A for 0, B for 1, …"""
    return chr(ord("A") + index)


@dataclass(frozen=True)
class Source:
    """Where instances come from. data: the user's folder of data files, None for tasks made here; seed: of what is
    drawn; size: how many instances a generated task makes.
    """

    data: Path | None = None
    seed: int = 0
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """An evaluation: 20 lines of a table.

    instances: of a Source. text: for a model that continues text; chat: for one with a chat template, None where text
    serves both. scorer: of generated answers. labels: a fixed list for macro-F1. files: data files below --data, the
    first that is there is read. get: where these come from. private: whose authors ask that its text be shown nowhere.
    runs_code: its scorer runs what the model wrote, and takes `command` (rzoo.evals.sandbox). by_part: those of its
    further scores in which a question counts once for each of its parts.
    """

    name: str
    about: str
    instances: Callable[[Source], Iterable[Instance]]
    text: Adapter
    chat: Adapter | None = None
    scorer: Scorer | None = None
    f1: bool = False
    files: tuple[str, ...] = ()
    private: bool = False
    runs_code: bool = False
    by_part: tuple[str, ...] = ()

    def adapter(self, *, chat: bool) -> Adapter:
        """The one for a conversation where it is asked for and there is one, else the one for text."""
        return self.chat if chat and self.chat is not None else self.text

    def verdict(self, instance: Instance, text: str) -> Verdict:
        """What the scorer says of an answer. Raises RzooError for a task that scores no text."""
        if self.scorer is None:
            raise RzooError(f"task ({self.name}) compares likelihoods and scores no text", field="task")
        return self.scorer(instance, text)


def reward(task: Task, instance: Instance, text: str) -> float:
    """The score of an answer, 0 to 1, as training takes it."""
    return task.verdict(instance, text).score
