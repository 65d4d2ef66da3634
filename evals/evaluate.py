"""`rzoo.evaluate`: a model on tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rzoo.compile.folders import write_whole
from rzoo.evals import helm_files, report
from rzoo.evals.engine import Engine, LoadedModel
from rzoo.evals.run import Progress, run
from rzoo.evals.settings import Settings, settings_of
from rzoo.evals.summary import Result, result_of
from rzoo.evals.task import Task
from rzoo.evals.tasks import task_named
from rzoo.handle import LM


def evaluate(lm: Any, tasks: str | Task | Sequence[str | Task], **settings: Any) -> Any:
    """`rzoo.evaluate(lm, "gsm8k", data="data", limit=100)`: the Result of a task, a list of them for a list.

    lm: a handle, or any rzoo.evals.engine.Engine. Settings are those of rzoo.evals.settings; with out, HELM's files are
    written into a folder of it for each task. Raises RzooError for an unknown task or setting, for data that is missing
    or malformed, and for a wish that a task has no use for.
    """
    engine = LoadedModel(lm) if isinstance(lm, LM) else lm
    asked = settings_of(settings)
    named = [tasks] if isinstance(tasks, str | Task) else [*tasks]
    wanted = [task_named(task) if isinstance(task, str) else task for task in named]
    results = [evaluated(engine, task, asked) for task in wanted]
    if asked.out is not None:
        write_report(results, asked.out)
    return results[0] if isinstance(tasks, str | Task) else results


def evaluated(engine: Engine, task: Task, settings: Settings, progress: Progress | None = None) -> Result:
    """Runs a task and writes its files. Raises RzooError as `evaluate` does."""
    result = result_of(run(engine, task, settings, progress))
    if result.run.folder is not None:
        helm_files.write(result, result.run.folder)
    return result


def write_report(results: Sequence[Result], folder: Path) -> None:
    """Writes report.md and report.html."""
    write_whole(folder / "report.md", report.markdown(results).encode())
    write_whole(folder / "report.html", report.page(results).encode())
