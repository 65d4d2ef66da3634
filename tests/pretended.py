"""A model out of two functions, and a task that it can be asked: for the tests of the evaluator."""

from dataclasses import dataclass, field
from typing import Any

from rzoo.evals.task import Adapter, Instance, Task, Verdict


@dataclass
class Said:
    text: str
    reasoning: str | None = None
    finish_reason: str = "stop"
    tokens: tuple[int, ...] = (1, 2, 3)
    prompt_tokens: tuple[int, ...] = (1,)


@dataclass
class Weight:
    total: float
    greedy: bool = False
    tokens: tuple[int, ...] = (1,)


@dataclass
class Pretended:
    """An engine out of two functions. asked: prompts and options of each call; context in characters."""

    say: Any = None
    weigh: Any = None
    chat: bool = False
    thinking: str | None = None
    context: int = 10_000
    name: str = "pretended"
    key: dict[str, Any] = field(default_factory=lambda: {"weights": "a"})
    asked: list[tuple[Any, Any]] = field(default_factory=list)

    def room(self, prompt):
        return self.context - len(prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt))

    def answers(self, prompts, options):
        self.asked.append((list(prompts), options))
        seeds = options.get("seed") or [None] * len(prompts)
        for place in reversed(range(len(prompts))):  # batches end in any order
            yield place, self.say(prompts[place], seeds[place])

    def likelihoods(self, pairs):
        return [self.weigh(prompt, option) for prompt, option in pairs]


def last_word(instance, text):
    words = text.split()
    return Verdict(float(words[-1:] == [instance.answer]), words[-1] if words else None, None if words else "unparsed")


QUESTIONS = tuple(Instance(id=f"q{i}", text=f"question {i}", answer=str(i), group="ab"[i % 2]) for i in range(20))
SHOTS = tuple(Instance(id=f"s{i}", text=f"shot {i}", answer=str(i)) for i in range(2))
TASK = Task(
    name="echo",
    about="numbers",
    instances=lambda source: QUESTIONS,
    text=Adapter(question="Q: {text}\nA:", shots=SHOTS, stop=("\n",), max_tokens=40),
    chat=Adapter(instructions="Answer with a number.", question="{text}", stop=("\n",), max_tokens=40),
    scorer=last_word,
)


def echo(prompt, seed=None):
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return Said(f"it is {text.split('question ')[1].split()[0]}")
