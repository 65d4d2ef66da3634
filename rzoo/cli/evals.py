"""`rzoo eval`: how good a model is, and how sure that is."""

import shlex
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rzoo.cli.common import AsJson, Dtype, MeshOption, Policy, RulesOption, app, load, print_json, say
from rzoo.cli.show import CLEAR

MODEL = "As for `rzoo generate`. Or the word tasks, which lists them; or compare, then two folders of results."
PARTS = ("first", "second", "better")  # of a comparison
SWITCH = {"on": True, "off": False}


@app.command("eval")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A model, as for `rzoo generate`; or: tasks, to list them; compare, two --out folders."),
    ],
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
    compare: Annotated[
        str | None, typer.Option(metavar="thinking=on,off", help="Run both, and tell the ratio.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts of plain text, without the chat template.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 64,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits in any batch, before and after a resume; slower.")
    ] = False,
    sandbox_cmd: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="What runs the programs that a model writes, such as docker run …."),
    ] = None,
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
    if model == "compare":
        return _compare(tasks or [], as_json)
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
        sandbox=tuple(shlex.split(sandbox_cmd or "")),
    )
    arms = _arms(settings, compare)
    wanted = [task_named(name) for name in tasks or ()]  # before the model is loaded, which takes longer
    lm = load(model, dtype, policy, mesh, rules)
    _run(lm, _name_of(model), wanted or [task_named(name) for name in _usual(lm)], arms, as_json)


def _arms(settings: Any, compare: str | None) -> list[Any]:
    """The settings of each run of a task: two where thinking is compared."""
    from rzoo.core import RzooError

    if compare is None:
        return [settings]
    name, _, values = compare.partition("=")
    if name != "thinking" or sorted(values.split(",")) != ["off", "on"]:
        fix = "--compare thinking=on,off"
        raise RzooError(f"compare ({compare}) knows thinking alone", field="compare", value=compare, fix=fix)
    return [replace(settings, thinking=value) for value in (False, True)]


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


def _run(lm: Any, name: str, tasks: list[Any], arms: list[Any], as_json: bool) -> None:
    """Runs the tasks, each with every settings; a line on each as soon as it is done, and files at the end."""
    from rzoo.evals.engine import LoadedModel
    from rzoo.evals.evaluate import evaluated, write_report

    engine, results, found = LoadedModel(lm, name), [], []
    for task in tasks:
        runs = [evaluated(engine, task, settings, _running) for settings in arms]
        results += runs
        told = [_line(run) for run in runs] + (_difference(*runs) if len(runs) > 1 else [])
        found += [run.to_json() for run in runs]
        if not as_json:
            say("\n".join(told))
    if arms[0].out is not None:
        write_report(results, arms[0].out)
    if as_json:
        print_json(found)


def _difference(off: Any, on: Any) -> list[str]:
    """What thinking is worth: the paired difference, and of a task in depths the solved depths and their ratio."""
    from rzoo.evals.compare import compared, depth_of, depth_ratio
    from rzoo.evals.summary import scores_by_question

    name, runs = off.run.task.name, (off.run, on.run)
    lines = [f"{name:12} thinking is worth {compared(name, *map(scores_by_question, runs)).better}"]
    if all(one.group.isdigit() for one in off.run.instances):
        depths = [f"{depth_of(run)}" for run in runs]
        lines.append(f"{name:12} solved depth off {depths[0]}, on {depths[1]}; ratio {depth_ratio(*runs)}")
    return lines


def _compare(folders: list[str], as_json: bool) -> None:
    from rzoo.core import RzooError
    from rzoo.evals.compare import compare
    from rzoo.evals.summary import plain

    if len(folders) != 2:
        raise RzooError(f"{len(folders)} folders can't be compared", field="out", fix="rzoo eval compare A B")
    found = compare(*folders)
    if as_json:
        print_json(
            [
                {name: value if isinstance(value, str) else plain(value) for name, value in vars(one).items()}
                for one in found
            ]
        )
        return
    for one in found:
        say(f"{one.task:12} {one.first} -> {one.second}  better by {one.better}")


def _running(task: Any, done: int, every: int, samples: Iterable[Any]) -> None:
    """The running score, on a terminal."""
    if sys.stderr.isatty():
        scores = [sample.score for sample in samples]
        words = f"rzoo: {task.name} {done} of {every}, {sum(scores) / len(scores):.3f} so far"
        say(f"{CLEAR}{words}" if done < every else CLEAR, end="", file=sys.stderr)


def _line(result: Any) -> str:
    """What people want to know first, and what would make it worth less."""
    main, about = result.scores["accuracy"], result.scores
    wrong = {"unparsed": "unparsed_rate", "truncated": "truncated_rate", "without room": "no_room_rate"}
    told = [f"{about[name].mean:.0%} {words}" for words, name in wrong.items() if about[name].mean]
    told += [f"{about['output_tokens'].mean:.0f} tokens"] if about["output_tokens"].mean else []
    told.append(f"{about['seconds'].mean:.0f} s")
    thinking = {True: " on", False: " off", None: ""}[result.run.about["thinking"]]
    return f"{result.run.task.name + thinking:12} {main}  ({', '.join(told)})"


def _list_tasks(as_json: bool) -> None:
    from rzoo.evals.tasks import TASKS

    if as_json:
        print_json([{"name": task.name, "about": task.about, "files": task.files} for task in TASKS.values()])
        return
    for task in TASKS.values():
        say(f"{task.name:12} {task.about}{f' (--data: {task.files[0]})' if task.files else ''}")
