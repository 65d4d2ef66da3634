"""`rzoo eval`: how good a model is, and how sure that is."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from rzoo.cli.common import AsJson, Dtype, MeshOption, Policy, RulesOption, app, load, print_json, say

SWITCH = {"on": True, "off": False}


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A model, as for `rzoo generate`; or: tasks, to list the tasks.")],
    tasks: Annotated[list[str] | None, typer.Argument(help="Names of tasks; default: those made here.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of data files, DIR/TASK/FILE.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task, a seeded sample.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for HELM's files; a killed run resumes.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample of questions and of every draw.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each question.")] = 1,
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: 0, or 0.6 for several samples.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: 1, or 0.95 for several samples.")] = None,
    thinking: Annotated[str | None, typer.Option(metavar="on|off", help="Default: as the model comes.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer, thought included.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts of plain text, without the chat template.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 64,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits in any batch, before and after a resume; slower.")
    ] = False,
    dtype: Dtype = None,
    policy: Policy = "exact",
    mesh: MeshOption = None,
    rules: RulesOption = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on tasks, with standard errors; without --data on tasks that are made here."""
    from rzoo.evals.settings import Settings
    from rzoo.evals.tasks import task_named

    if model == "tasks":
        return _list_tasks(as_json)
    settings = Settings(
        data=data,
        limit=limit,
        out=out,
        seed=seed,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        thinking=_switch(thinking),
        max_tokens=max_tokens,
        raw=raw,
        batch=batch,
        deterministic=deterministic,
    )
    wanted = [task_named(name) for name in tasks or ()]  # before the model is loaded, which takes longer
    lm = load(model, dtype, policy, mesh, rules)
    _run(lm, _name_of(model), wanted or [task_named(name) for name in _usual(lm)], settings, as_json)


def _switch(words: str | None) -> bool | None:
    from rzoo.core import RzooError

    if words is None or words in SWITCH:
        return None if words is None else SWITCH[words]
    raise RzooError(f"thinking ({words}) must be on or off", field="thinking", value=words)


def _name_of(model: str) -> str:
    """A model's name in results: of a file or a folder its last part."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _usual(lm: Any) -> tuple[str, ...]:
    """The tasks made here that suit a model: the small lineage knows chained arithmetic alone."""
    from rzoo.evals.tasks.generated import EASY
    from rzoo.train.lineage import CONFIG

    small = (lm.config.vocab_size, lm.config.width) == (CONFIG.vocab_size, CONFIG.width)
    return ("chain",) if small else EASY


def _run(lm: Any, name: str, tasks: list[Any], settings: Any, as_json: bool) -> None:
    """Runs the tasks; a line on each as soon as it is done."""
    from rzoo.evals.engine import LoadedModel
    from rzoo.evals.evaluate import evaluated

    engine, results = LoadedModel(lm, name), []
    for task in tasks:
        results.append(evaluated(engine, task, settings, _running))
        if not as_json:
            say(_line(results[-1]))
    if as_json:
        print_json([result.to_json() for result in results])


def _running(task: Any, done: int, every: int, samples: Iterable[Any]) -> None:
    """The running score, on a terminal."""
    if sys.stderr.isatty():
        scores = [sample.score for sample in samples]
        words = f"rzoo: {task.name} {done} of {every}, {sum(scores) / len(scores):.3f} so far"
        say(f"\r\033[K{words}" if done < every else "\r\033[K", end="", file=sys.stderr)


def _line(result: Any) -> str:
    """What people want to know first, and what would make it worth less."""
    main, about = result.scores["accuracy"], result.scores
    low, high = main.interval
    wrong = {"unparsed": "unparsed_rate", "truncated": "truncated_rate", "without room": "no_room_rate"}
    told = [f"{about[name].mean:.0%} {words}" for words, name in wrong.items() if about[name].mean]
    told += [f"{about['output_tokens'].mean:.0f} tokens"] if about["output_tokens"].mean else []
    told.append(f"{about['seconds'].mean:.0f} s")
    return f"{result.run.task.name:12} {main}  95 % {low:.2f} to {high:.2f}  n {main.n}  ({', '.join(told)})"


def _list_tasks(as_json: bool) -> None:
    from rzoo.evals.tasks import TASKS

    if as_json:
        print_json([{"name": task.name, "about": task.about, "files": task.files} for task in TASKS.values()])
        return
    for task in TASKS.values():
        say(f"{task.name:12} {task.about}{f' (--data: {task.files[0]})' if task.files else ''}")
