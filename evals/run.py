"""From a model and a task to scored samples: prompts that fit, batches, resuming, the running score."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rzoo.core import RzooError
from rzoo.evals.ask import Wanted, planned, samples_of
from rzoo.evals.engine import Engine
from rzoo.evals.samples import FILE, Sample, SampleFile, digest
from rzoo.evals.settings import Settings
from rzoo.evals.task import Adapter, Instance, Source, Task


@dataclass(frozen=True, kw_only=True)
class Run:
    """A task as it was run. about: all that its samples depend on. samples: by question, in order, each its samples."""

    task: Task
    adapter: Adapter
    name: str
    about: Mapping[str, Any]
    instances: tuple[Instance, ...]
    samples: tuple[tuple[Sample, ...], ...]
    folder: Path | None = None


Progress = Callable[[Task, int, int, Iterable[Sample]], None]  # the task, samples done, samples in all, what there is


def run(engine: Engine, task: Task, settings: Settings, progress: Progress | None = None) -> Run:
    """Runs a task, or goes on with the run in settings.out. Raises RzooError for what a task or a model can't do."""
    plan = planned(engine, task, settings)
    instances = chosen(task.instances(Source(settings.data, settings.seed, settings.limit)), settings)
    folder = None if settings.out is None else settings.out / plan.name.replace("/", "_")
    with SampleFile(folder / FILE, plan.about) if folder else nullcontext() as kept:
        found = {} if kept is None else kept.found
        missing, every = _missing(instances, settings.samples, found), len(instances) * settings.samples
        for done, sample in enumerate(samples_of(plan, missing), every - len(missing) + 1):
            if kept is not None:
                kept.add(sample)
            found[sample.key] = sample
            if progress is not None:
                progress(task, done, every, found.values())
    answers = tuple(tuple(found[one.id, number] for number in range(settings.samples)) for one in instances)
    return Run(
        task=task,
        adapter=plan.adapter,
        name=plan.name,
        about=plan.about,
        instances=tuple(instances),
        samples=answers,
        folder=folder,
    )


def chosen(instances: Iterable[Instance], settings: Settings) -> list[Instance]:
    """All, or a seeded sample of `limit` of them, in their order; a larger limit holds what a smaller one does."""
    every = list(instances)
    if not every:
        raise RzooError("a task without questions", field="task", value=0)
    if len({one.id for one in every}) < len(every):
        raise RzooError("two questions have one id", field="task")
    order = np.random.default_rng(settings.seed).permutation(len(every))
    return [every[i] for i in sorted(order[: settings.limit])]


def _missing(instances: Sequence[Instance], samples: int, found: Mapping[tuple[str, int], Sample]) -> list[Wanted]:
    """The samples that are not there yet. Raises RzooError where one that is answers another question."""
    wanted = [Wanted(one, number, digest(repr(one))) for one in instances for number in range(samples)]
    for one in wanted:
        kept = found.get((one.instance.id, one.number))
        if kept is not None and kept.asked != one.asked:
            words = f"question {one.instance.id} is another than the one that was answered: the data has changed"
            raise RzooError(words, field="out", value=one.instance.id, fix="give another folder as --out")
    return [one for one in wanted if (one.instance.id, one.number) not in found]
