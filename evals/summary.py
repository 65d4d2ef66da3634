"""What a run's samples come to: each score with its n and standard error, and what went wrong how often."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rzoo.evals.run import Run
from rzoo.evals.samples import Sample

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


def result_of(run: Run) -> Result:
    """What a run comes to."""
    return Result(run, scores(run), groups(run))


# What is said of every sample, whatever its task.
OF_A_SAMPLE: dict[str, Callable[[Sample], float]] = {
    "accuracy": lambda sample: sample.score,
    "unparsed_rate": lambda sample: float(sample.reason == "unparsed"),
    "truncated_rate": lambda sample: float(sample.finish_reason in ("length", "interrupted")),
    "no_room_rate": lambda sample: float(sample.finish_reason == "no_room"),
    "output_tokens": lambda sample: float(sample.output_tokens),
    "prompt_tokens": lambda sample: float(sample.prompt_tokens),
    "seconds": lambda sample: sample.seconds,
}


def values(run: Run) -> dict[str, list[float]]:
    """Each score of each question by name, the mean over its samples, the main score "accuracy" first."""
    extra = sorted({name for samples in run.samples for sample in samples for name in sample.also})
    found = {
        name: [float(np.mean([value(sample) for sample in samples])) for samples in run.samples]
        for name, value in OF_A_SAMPLE.items()
    }
    for name in extra:
        found[name] = [float(np.mean([sample.also.get(name, 0.0) for sample in samples])) for samples in run.samples]
    return found


def scores(run: Run) -> dict[str, Estimate]:
    """Every figure of a run by name; "seconds" is of the whole run."""
    found = {name: estimate(column) for name, column in values(run).items()}
    seconds = sum(sample.seconds for samples in run.samples for sample in samples)
    return found | {"seconds": Estimate(seconds, None, len(run.instances))}


def groups(run: Run) -> dict[str, Estimate]:
    """The main score of each part of the task."""
    means = values(run)["accuracy"]
    names = list(dict.fromkeys(one.group for one in run.instances if one.group))
    return {
        name: estimate([mean for one, mean in zip(run.instances, means, strict=True) if one.group == name])
        for name in names
    }
