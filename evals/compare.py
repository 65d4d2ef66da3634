"""Two runs of the same questions: how much better one is, with an interval of the paired differences."""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rzoo.core import RzooError
from rzoo.evals.estimates import Estimate, estimate, paired_difference
from rzoo.evals.run import Run
from rzoo.evals.summary import scores_by_question

Scores = Mapping[Hashable, Sequence[float]]  # of the samples of a question, by its id

MAIN = ("accuracy", "exact_match", "quasi_exact_match")  # ours, then those of HELM's own folders
FILE = "per_instance_stats.json"
SOLVED = 0.9  # share of right answers at which a depth counts as solved
RESAMPLES = 2000


@dataclass(frozen=True)
class Comparison:
    """A task in two runs. better: second less first, of the questions that both have."""

    task: str
    first: Estimate
    second: Estimate
    better: Estimate


def compare(first: str | Path, second: str | Path) -> list[Comparison]:
    """The tasks that two folders of results have in common, ours or HELM's, of one run or of several.

    Raises RzooError for a folder without results, and where no task or no question is in both.
    """
    ours, theirs = runs_in(Path(first)), runs_in(Path(second))
    shared = [task for task in ours if task in theirs]
    if not shared:
        words = f"{first} has {', '.join(ours)} and {second} has {', '.join(theirs)}: no task is in both"
        raise RzooError(words, field="out", value=str(second), fix="compare runs of one task")
    return [compared(task, ours[task], theirs[task]) for task in shared]


def compared(task: str, first: Scores, second: Scores) -> Comparison:
    """One task in two runs."""
    return Comparison(task, _mean(first), _mean(second), paired_difference(first, second))


def _mean(scores: Scores) -> Estimate:
    return estimate([float(np.mean(values)) for values in scores.values()])


def runs_in(folder: Path) -> dict[str, Scores]:
    """Main scores by task and question, of a run's folder or of all those in a folder."""
    alone = (folder / FILE).is_file()
    found = [folder / FILE] if alone else sorted(folder.glob(f"*/{FILE}"))
    if not found:
        fix = "give a folder that `rzoo eval --out` or helm-run wrote"
        raise RzooError(f"{folder} holds no {FILE}", field="out", value=str(folder), fix=fix)
    hidden = ("model=", "thinking=") if alone else ("model=",)
    return {_task_of(file.parent, hidden): _scores(file) for file in found}


def _task_of(folder: Path, hidden: tuple[str, ...]) -> str:
    """A run's name without what two runs of one task may differ in."""
    name = str(_read(folder / "run_spec.json", lambda spec: spec["name"]))
    task, _, settings = name.partition(":")
    kept = [part for part in settings.split(",") if part and not part.startswith(hidden)]
    return f"{task}:{','.join(kept)}" if kept else task


def _scores(file: Path) -> Scores:
    return _read(file, lambda ones: {str(one["instance_id"]): [_main(one["stats"])] for one in ones})


def _main(stats: Sequence[Mapping[str, Any]]) -> float:
    means = {stat["name"]["name"]: stat["mean"] for stat in stats if "mean" in stat}
    return float(next(means[name] for name in MAIN if name in means))


def _read(file: Path, convert: Any) -> Any:
    try:
        return convert(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, StopIteration, RecursionError) as error:
        raise RzooError(
            f"{file} can't be read as one of HELM's files: {error!r}", field="out", value=str(file)
        ) from error


def solved_depth(accuracies: Sequence[float]) -> int:
    """The longest depth up to which every depth is solved; accuracies are of depths 1, 2, …"""
    return next((i for i, share in enumerate(accuracies) if share < SOLVED), len(accuracies))


def depth_of(run: Run) -> Estimate:
    """The solved depth of a task whose parts are depths, with the interval of a bootstrap over its questions."""
    by_depth = _by_depth(run)
    drawn = _drawn_depths(by_depth)
    return _told(solved_depth([float(np.mean(scores)) for scores in by_depth]), drawn, run)


def depth_ratio(first: Run, second: Run) -> Estimate:
    """The solved depth of the second run over that of the first, which counts as at least 1."""
    ours, theirs = _by_depth(first), _by_depth(second)
    drawn = _drawn_depths(theirs) / np.maximum(_drawn_depths(ours), 1)
    depths = [solved_depth([float(np.mean(scores)) for scores in of]) for of in (ours, theirs)]
    return _told(depths[1] / max(depths[0], 1), drawn, second)


def _told(value: float | int, drawn: np.ndarray, run: Run) -> Estimate:
    low, high = np.quantile(drawn, (0.025, 0.975))
    questions = len(run.instances)
    return Estimate(float(value), float(drawn.std()), float(low), float(high), questions, questions)


def _by_depth(run: Run) -> list[np.ndarray]:
    """The score of each question by its depth, from 1 on."""
    scores = scores_by_question(run)
    depths = sorted({int(one.group) for one in run.instances})
    return [np.asarray([np.mean(scores[one.id]) for one in run.instances if int(one.group) == d]) for d in depths]


def _drawn_depths(by_depth: Sequence[np.ndarray]) -> np.ndarray:
    """Solved depths where the questions of each depth are drawn with replacement, RESAMPLES times."""
    rng = np.random.default_rng(0)
    shares = np.stack([of[rng.integers(len(of), size=(RESAMPLES, len(of)))].mean(axis=1) for of in by_depth], axis=1)
    return np.asarray([solved_depth(row.tolist()) for row in shares], float)
