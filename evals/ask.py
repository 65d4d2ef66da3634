"""What is asked of a model: prompts that fit, in batches, and what its answers are worth."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rzoo.core import RzooError
from rzoo.evals.answers import before_stops
from rzoo.evals.engine import Answer, Engine, Likelihood, Prompt
from rzoo.evals.samples import Sample, digest, seed_for
from rzoo.evals.settings import Settings
from rzoo.evals.task import CHOICE, GENERATION, Adapter, Instance, Task, Verdict, letter_of

CHOICES_AT_ONCE = 16  # questions between two looks at the running score
NO_ROOM = {"score": 0.0, "reason": "no_room", "finish_reason": "no_room"}  # for the question, or its answer


@dataclass(frozen=True)
class Plan:
    """A run before it starts. chat: whether prompts are conversations."""

    engine: Engine
    task: Task
    adapter: Adapter
    chat: bool
    settings: Settings

    @property
    def drawn(self) -> bool:
        """Whether answers are drawn and not the likeliest."""
        return self.settings.drawing["temperature"] > 0

    @property
    def thinks(self) -> bool:
        """Whether an answer may begin with a thought."""
        return self.chat and self.engine.thinking is not None and self.settings.thinking is not False

    @property
    def limit(self) -> int:
        """Tokens of an answer, its thought included."""
        return self.settings.max_tokens or self.adapter.max_tokens + (self.adapter.thought if self.thinks else 0)

    @property
    def options(self) -> dict[str, Any]:
        """Of rzoo.generate, the seeds apart. A task's stops would end a thought that holds them: they are left to
        `graded` where the model may think. One that always does is made not to by a budget of no tokens.
        """
        thinks, wish = self.engine.thinking if self.chat else None, self.settings.thinking
        always = thinks == "always"
        return {
            **self.settings.drawing,
            "max_new_tokens": self.limit,
            "stop": () if thinks else self.adapter.stop,
            "deterministic": self.settings.deterministic,
            **({"max_think_tokens": 0} if always and wish is False else {}),
            **({"thinking": wish} if thinks and not always else {}),
        }

    @property
    def name(self) -> str:
        """The name of the run, in HELM's way."""
        samples, thinking = self.settings.samples, self.settings.thinking
        told = [f"samples={samples}"] if samples > 1 else []
        told += [] if thinking is None else [f"thinking={'on' if thinking else 'off'}"]
        return f"{self.task.name}:{','.join([*told, f'model={self.engine.name}'])}"

    @property
    def about(self) -> dict[str, Any]:
        """All that a sample depends on, but its question."""
        return {
            "model": self.engine.name,
            **self.engine.key,
            "task": self.task.name,
            "adapter": digest(repr(self.adapter)),
            "chat": self.chat,
            "seed": self.settings.seed,
            "thinking": self.settings.thinking,
            "max_tokens": self.limit,
            "deterministic": self.settings.deterministic,
            **self.settings.drawing,
        }


def planned(engine: Engine, task: Task, settings: Settings) -> Plan:
    """How a task is run. Raises RzooError for a wish that it has no use for."""
    adapter = task.adapter(chat=engine.chat and not settings.raw)
    plan = Plan(engine, _boxed(task, settings), adapter, adapter is task.chat, settings)
    for name, wish in (
        ("thinking", settings.thinking),
        ("samples", settings.samples if settings.samples > 1 else None),
    ):
        if wish is not None and adapter.method != GENERATION:
            words = f"task ({task.name}) compares likelihoods of given answers: nothing is written"
            raise RzooError(words, field=name, value=wish, fix=f"leave {name} out, or choose tasks that generate")
    if settings.thinking is not None and (engine.thinking is None or not plan.chat):
        words = f"{engine.name} has no thinking to switch" + (" in plain text" if engine.thinking else "")
        raise RzooError(words, field="thinking", value=settings.thinking, fix="leave thinking out")
    return plan


def _boxed(task: Task, settings: Settings) -> Task:
    """The task with the user's own sandbox around what it runs."""
    if not (task.runs_code and settings.sandbox and task.scorer):
        return task
    return replace(task, scorer=partial(task.scorer, command=settings.sandbox))


@dataclass(frozen=True)
class Wanted:
    """One sample to make. asked: a digest of the question."""

    instance: Instance
    number: int
    asked: str


def samples_of(plan: Plan, wanted: Sequence[Wanted]) -> Iterator[Sample]:
    """Each sample as soon as it is known, those of a batch in the order in which they end."""
    size = plan.settings.batch if plan.adapter.method == GENERATION else CHOICES_AT_ONCE
    ask = _written if plan.adapter.method == GENERATION else _weighed
    last = time.perf_counter()
    for first in range(0, len(wanted), size):
        for one, about in ask(plan, wanted[first : first + size]):
            now = time.perf_counter()
            yield _sample(plan, one, {**about, "seconds": now - last})
            last = now


def _sample(plan: Plan, one: Wanted, about: Mapping[str, Any]) -> Sample:
    hidden = _hidden(one.instance, about.get("answer")) if plan.task.private else {}
    return Sample(id=one.instance.id, number=one.number, asked=one.asked, **{**about, **hidden})


def _hidden(instance: Instance, answer: str | None) -> dict[str, Any]:
    """What takes the place of a private task's text: of an option, its letter."""
    known = answer in instance.options
    return {"text": "", "reasoning": None, "answer": letter_of(instance.options.index(answer)) if known else None}


def _written(plan: Plan, wanted: Sequence[Wanted]) -> Iterator[tuple[Wanted, dict[str, Any]]]:
    """The answers that a model writes to a batch."""
    found = [(one, fitting(plan, one.instance)) for one in wanted]
    yield from ((one, NO_ROOM) for one, prompt in found if prompt is None)
    fitted = [(one, prompt) for one, prompt in found if prompt is not None]
    seeds = [seed_for(plan.settings.seed, one.instance, one.number) for one, _ in fitted]
    options = {**plan.options, **({"seed": seeds} if plan.drawn else {})}
    if not fitted:
        return
    for place, answer in plan.engine.answers([prompt for _, prompt in fitted], options):
        one = fitted[place][0]
        yield one, graded(plan.task, plan.adapter, one.instance, answer)


def fitting(plan: Plan, instance: Instance) -> Prompt | None:
    """The prompt with as many solved examples as leave room for the answer; None where the question alone is too long.

    A prompt is never cut: the question itself would be what is lost.
    """
    write = plan.adapter.messages if plan.chat else plan.adapter.text
    for shots in range(len(plan.adapter.shots), -1, -1):
        prompt = write(instance, shots)
        room = plan.engine.room(prompt)
        if room >= plan.limit or (shots == 0 and room > 0):
            return prompt
    return None


def graded(task: Task, adapter: Adapter, instance: Instance, answer: Answer) -> dict[str, Any]:
    """What a sample holds of an answer. Only what follows the reasoning counts; one that is unfinished is wrong."""
    text, stop = before_stops(answer.text, adapter.stop)  # those of a model that may think; others stopped at them
    cut = answer.finish_reason != "stop" and stop is None
    if cut and (adapter.whole or (answer.reasoning is not None and not text)):
        verdict = Verdict(0.0, None, "truncated")
    else:
        verdict = task.verdict(instance, text)
    return {
        **asdict(verdict),
        "text": text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason if cut else "stop",
        "prompt_tokens": len(answer.prompt_tokens),
        "output_tokens": len(answer.tokens),
    }


def _weighed(plan: Plan, wanted: Sequence[Wanted]) -> Iterator[tuple[Wanted, dict[str, Any]]]:
    """The likelihoods that a model gives to the options of a batch."""
    fitted = []
    for one in wanted:
        pairs = pairs_of(plan.adapter, one.instance)
        if all(plan.engine.room(prompt + option) >= 0 for prompt, option in pairs):
            fitted.append((one, pairs))
        else:
            yield one, NO_ROOM
    found = iter(plan.engine.likelihoods([pair for _, pairs in fitted for pair in pairs]))
    for one, pairs in fitted:
        yield one, weighed(plan.adapter, one.instance, [option for _, option in pairs], [next(found) for _ in pairs])


def pairs_of(adapter: Adapter, instance: Instance) -> list[tuple[str, str]]:
    """(text, continuation) of each option."""
    if instance.contexts:
        return [(adapter.text(replace(instance, text=context)), " " + instance.text) for context in instance.contexts]
    told = [adapter.told(replace(instance, answer=option)) for option in instance.options or (instance.answer,)]
    return [(adapter.text(instance), words) for words in told]


def weighed(
    adapter: Adapter, instance: Instance, continuations: Sequence[str], found: Sequence[Likelihood]
) -> dict[str, Any]:
    """What a sample holds of the likelihoods of its options."""
    totals = np.asarray([one.total for one in found])
    if adapter.method != CHOICE:
        return {**asdict(Verdict(float(found[0].greedy))), "logprobs": tuple(totals.tolist())}
    right = instance.options.index(instance.answer)
    each_byte = totals / [len(text.encode()) for text in continuations]
    share = np.exp(totals - totals.max())
    also = {"accuracy_norm": float(each_byte.argmax() == right), "confidence": float(share.max() / share.sum())}
    choice = int(totals.argmax())
    return {
        **asdict(Verdict(float(choice == right), instance.options[choice], None, also)),
        "logprobs": tuple(totals.tolist()),
    }
