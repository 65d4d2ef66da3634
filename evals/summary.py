"""What a run's samples come to: each score with its n and standard error, and what went wrong how often."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rzoo.evals.engine import LoadedModel
from rzoo.evals.run import Run, run as run_task
from rzoo.evals.samples import Sample
from rzoo.evals.settings import Settings
from rzoo.evals.task import Task
from rzoo.evals.tasks import task_named
from rzoo.handle import LM

NORMAL_95 = 1.96


@dataclass(frozen=True)
class Estimate:
    """mean over n questions; error: its standard error, None where one question says nothing of it."""

    mean: float
    error: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.error is None else f" ± {self.error:.3f}")

    @property
    def interval(self) -> tuple[float, float]:
        """About 95 %."""
        wide = NORMAL_95 * (self.error or 0.0)
        return self.mean - wide, self.mean + wide


def estimate(values: Sequence[float]) -> Estimate:
    """Of one value for each question, the mean of its samples: the error is that of the mean of independent questions,
    however many samples each has.
    """
    n = len(values)
    error = float(np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else None
    return Estimate(float(np.mean(values)), error, n)


@dataclass(frozen=True)
class Result:
    """A run and what it comes to. scores: by name, the main one "accuracy" first; groups: that of each part."""

    run: Run
    scores: Mapping[str, Estimate]
    groups: Mapping[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        scores = {name: asdict(value) for name, value in self.scores.items()}
        groups = {name: asdict(value) for name, value in self.groups.items()}
        return {"name": self.run.name, **self.run.about, "scores": scores, "groups": groups}


def evaluate(lm: Any, tasks: str | Task | Sequence[str | Task], **settings: Any) -> Any:
    """`rzoo.evaluate(lm, "gsm8k", data="data", limit=100)`: the Result of a task, a list of them for a list.

    lm: a handle, or any rzoo.evals.engine.Engine. Settings are those of rzoo.evals.settings. Raises RzooError for an
    unknown task, for data that is missing or malformed, and for a wish that a task has no use for.
    """
    engine = LoadedModel(lm) if isinstance(lm, LM) else lm
    paths = {name: Path(settings[name]) for name in ("data", "out") if settings.get(name) is not None}
    if not isinstance(tasks, str | Task):
        return [evaluate(engine, task, **settings) for task in tasks]
    task = task_named(tasks) if isinstance(tasks, str) else tasks
    return result_of(run_task(engine, task, Settings(**{**settings, **paths})))


def result_of(run: Run) -> Result:
    """What a run comes to."""
    return Result(run, scores(run), groups(run))


def per_question(run: Run, value: Callable[[Sample], float]) -> list[float]:
    """The mean over the samples of each question."""
    return [float(np.mean([value(sample) for sample in samples])) for samples in run.samples]


# What is said of every run, whatever its task.
RATES: dict[str, Callable[[Sample], float]] = {
    "unparsed_rate": lambda sample: float(sample.reason == "unparsed"),
    "truncated_rate": lambda sample: float(sample.finish_reason in ("length", "interrupted")),
    "no_room_rate": lambda sample: float(sample.finish_reason == "no_room"),
    "output_tokens": lambda sample: float(sample.output_tokens),
}


def scores(run: Run) -> dict[str, Estimate]:
    """Every figure of a run by name, its main score "accuracy" first."""
    found = {"accuracy": estimate(per_question(run, lambda sample: sample.score))}
    found |= {name: estimate(per_question(run, value)) for name, value in RATES.items()}
    every = [sample for samples in run.samples for sample in samples]
    names = sorted({name for sample in every for name in sample.also})
    for name in names:
        found[name] = estimate([float(np.mean([s.also.get(name, 0.0) for s in samples])) for samples in run.samples])
    found["seconds"] = Estimate(sum(sample.seconds for sample in every), None, len(run.instances))
    return found


def groups(run: Run) -> dict[str, Estimate]:
    """The main score of each part of the task."""
    means = per_question(run, lambda sample: sample.score)
    names = list(dict.fromkeys(one.group for one in run.instances if one.group))
    return {
        name: estimate([mean for one, mean in zip(run.instances, means, strict=True) if one.group == name])
        for name in names
    }
