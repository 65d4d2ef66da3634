"""What a run's samples come to: each score with its n, error and interval, and what went wrong how often."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rzoo.evals.estimates import (
    Estimate,
    brier,
    calibration_error,
    estimate,
    macro_f1,
    majority_at_k,
    pass_at_k,
)
from rzoo.evals.run import Run
from rzoo.evals.samples import Sample

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


@dataclass(frozen=True)
class Result:
    """A run and what it comes to. scores: by name, the main one "accuracy" first; groups: that of each part."""

    run: Run
    scores: Mapping[str, Estimate]
    groups: Mapping[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """For a program; what is not known is null."""
        scores, groups = ({name: plain(value) for name, value in of.items()} for of in (self.scores, self.groups))
        return {"name": self.run.name, **self.run.about, "scores": scores, "groups": groups}


def plain(value: Estimate) -> dict[str, Any]:
    """An estimate for JSON, which has no NaN."""
    return {name: None if number is None or math.isnan(number) else number for name, number in asdict(value).items()}


def result_of(run: Run) -> Result:
    """What a run comes to."""
    found = {name: _over(run, value) for name, value in _columns(run).items()}
    found |= by_part(run) | repeated(run) | finished(run) | calibration(run) | classes(run)
    found["seconds"] = _one_number(run, sum(sample.seconds for samples in run.samples for sample in samples))
    return Result(run, found, groups(run))


def _columns(run: Run) -> dict[str, Callable[[Sample], float]]:
    """Each score of a sample by name, the task's own behind those of every task."""
    extra = sorted({name for samples in run.samples for sample in samples for name in sample.also})
    return OF_A_SAMPLE | {name: lambda sample, n=name: sample.also.get(n, 0.0) for name in extra}  # type: ignore[misc]


def _over(run: Run, value: Callable[[Sample], float], keep: Callable[[Sample], bool] = lambda sample: True) -> Estimate:
    """The mean over the samples that are kept; questions are the clusters of its error."""
    kept = [sample for samples in run.samples for sample in samples if keep(sample)]
    return estimate([value(sample) for sample in kept], [sample.id for sample in kept])


def by_part(run: Run) -> dict[str, Estimate]:
    """Scores that are shares of what a question asks for, over all that is asked for."""
    pairs = zip(run.instances, run.samples, strict=True)
    every = [sample for one, samples in pairs for sample in samples for _ in range(one.parts)]
    questions = [sample.id for sample in every]
    return {name: estimate([s.also.get(name, 0.0) for s in every], questions) for name in run.task.by_part}


def _one_number(run: Run, value: float) -> Estimate:
    """A figure of the whole run, which has no error."""
    every = sum(len(samples) for samples in run.samples)
    return Estimate(value, None, math.nan, math.nan, len(run.instances), every)


def values(run: Run) -> dict[str, list[float]]:
    """Each score of each question by name, the mean over its samples."""
    return {
        name: [float(np.mean([value(sample) for sample in samples])) for samples in run.samples]
        for name, value in _columns(run).items()
    }


def repeated(run: Run) -> dict[str, Estimate]:
    """Of several samples a question: pass@k, and where answers are read the score of the one that most of them give."""
    count = len(run.samples[0])
    if count == 1:
        return {}
    right = [sum(sample.score == 1 for sample in samples) for samples in run.samples]
    sizes = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < count] + [count]
    found = {f"pass@{k}": estimate([pass_at_k(count, one, k) for one in right]) for k in sizes}
    if all(sample.answer is None for samples in run.samples for sample in samples):
        return found
    votes = [majority_at_k([s.answer for s in samples], [s.score for s in samples]) for samples in run.samples]
    return {**found, f"majority@{count}": estimate(votes)}


def finished(run: Run) -> dict[str, Estimate]:
    """The accuracy without the answers that were cut, where some were and some were not."""
    cut = [sample.finish_reason != "stop" for samples in run.samples for sample in samples]
    if all(cut) or not any(cut):
        return {}
    return {"accuracy_finished": _over(run, lambda sample: sample.score, lambda sample: sample.finish_reason == "stop")}


def calibration(run: Run) -> dict[str, Estimate]:
    """Of choices: how far confidence is from being right; noise below about 300 questions."""
    every = [sample for samples in run.samples for sample in samples if "confidence" in sample.also]
    if not every:
        return {}
    confidence, right = [sample.also["confidence"] for sample in every], [sample.score for sample in every]
    found = {"ece_10_bin": calibration_error(confidence, right), "ece_1_bin": calibration_error(confidence, right, 1)}
    return {name: _one_number(run, value) for name, value in {**found, "brier": brier(confidence, right)}.items()}


def classes(run: Run) -> dict[str, Estimate]:
    """Macro-F1 over the task's fixed list of labels, and how many of these stand in gold or answers."""
    if not run.task.f1:
        return {}
    pairs = zip(run.instances, run.samples, strict=True)
    gold, given = zip(*((one.answer, sample.answer) for one, samples in pairs for sample in samples), strict=True)
    found = macro_f1(gold, given, run.instances[0].options)
    return {"macro_f1": _one_number(run, found.macro), "labels_used": _one_number(run, float(found.used))}


def groups(run: Run) -> dict[str, Estimate]:
    """The main score of each part of the task."""
    names = list(dict.fromkeys(one.group for one in run.instances if one.group))
    members = {name: {one.id for one in run.instances if one.group == name} for name in names}
    return {
        name: _over(run, lambda sample: sample.score, lambda sample, m=members[name]: sample.id in m)  # type: ignore[misc]
        for name in names
    }


def scores_by_question(run: Run) -> dict[Hashable, Sequence[float]]:
    """The main score of each sample of each question, for pairs of runs."""
    return {samples[0].id: [sample.score for sample in samples] for samples in run.samples}
