"""`rzoo tune | report | bench`: a model on this machine."""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import typer

from rzoo.cli.common import AsJson, Dtype, Model, Policy, app, print_json, say


@app.command()
def tune(
    model: Model,
    budget: Annotated[float | None, typer.Option(help="Seconds to search for; default: 120.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows to tune decode for; may be repeated: 1 and 8.")] = None,
    dtype: Dtype = None,
    policy: Policy = "exact",
    kl: Annotated[float | None, typer.Option(help="Mean KL bound of policy fast, in nats.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the record of an earlier run.")] = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the ratios of all candidates.")] = None,
    gpu: Annotated[str | None, typer.Option(help="For a GPU that need not be here, such as h100; modelled.")] = None,
    weights: Annotated[str | None, typer.Option(help="With --gpu: bf16 (default), int8, int4 or fp8.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="With --gpu: tokens of room; default: 4096.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest programs on this machine within the policy, and keep them for later loads.

    With --gpu: for one GPU, by what its compiled programs read, write and launch, for `rzoo plan --tuned`.
    """
    here = {"budget": budget, "dtype": dtype, "kl": kl, "resume": resume, "plot": plot}
    here["policy"] = policy if policy != "exact" else None
    asked = {name: value for name, value in {"weights": weights, "context": context}.items() if value is not None}
    _check_belongs(gpu, here, asked)
    if gpu is not None:
        _tune_for(model, gpu, batch or [1], as_json, asked)
        return
    import rzoo
    from rzoo.compile.record import draw, to_json

    budget = 120.0 if budget is None else budget
    lm = rzoo.load(model, dtype=dtype, policy=policy, kl=kl, record=False)
    rzoo.tune  # noqa: B018  (imports what it needs)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _lines_above_a_bar(budget, sys.stderr if as_json else sys.stdout) as show:
            tuned = rzoo.tune(lm, budget, batches=batch or (1, 8), resume=resume, progress=show)
    except KeyboardInterrupt:
        say("rzoo: stopped; what was tried is kept: the same command with --resume goes on", file=sys.stderr)
        raise
    if as_json:
        print_json(to_json(tuned.record))
    if plot is not None:
        draw(tuned.record, plot)


def _check_belongs(gpu: str | None, here: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raises RzooError for an option of the other search: here: that on this machine; asked: that for a GPU."""
    from rzoo.core import RzooError

    given = next((name for name, value in (asked if gpu is None else here).items() if value not in (None, False)), None)
    if given and gpu is None:
        raise RzooError(f"--{given} goes with --gpu alone", field=given, fix="name a GPU, such as --gpu h100")
    if given:
        words = f"--{given} is for a search that measures, on this machine"
        raise RzooError(words, field=given, fix="with --gpu: --weights, --batch and --context")


def _tune_for(model: str, gpu: str, batches: Sequence[int], as_json: bool, asked: Mapping[str, Any]) -> None:
    """The search without the GPU, for each count of rows."""
    from rzoo.compile.tune_for_target import tune_for_target

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the process that compiles ends with this one
    show = lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True)  # noqa: E731
    records = [tune_for_target(model, gpu, batch=rows, progress=show, **asked) for rows in batches]
    if as_json:
        print_json(records[0] if len(records) == 1 else records)


@contextmanager
def _lines_above_a_bar(seconds: float, file: TextIO) -> Iterator[Callable[[str], None]]:
    """A function that prints a line; on a terminal, above a bar of the time that is used."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    if not file.isatty():
        yield lambda line: print(line, file=file, flush=True)
        return
    columns = (TextColumn("tuning"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} s"))
    with Progress(*columns, console=Console(file=file), transient=True) as bar:
        task, start = bar.add_task("", total=seconds), time.monotonic()

        def show(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False)
            bar.update(task, completed=time.monotonic() - start)

        yield show


@app.command()
def report(
    model: Model,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows of decode; may be repeated: 1 and 8.")] = None,
    dtype: Dtype = None,
    policy: Policy = "exact",
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the roofline; needs matplotlib.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what each phase costs and which share of this machine's bandwidth and matrix rate it reaches."""
    import rzoo
    from rzoo.compile import report as reports

    found = reports.report(rzoo.load(model, dtype=dtype, policy=policy), batch or (1, 8))
    print_json(found) if as_json else print(reports.table(found))
    if plot is not None:
        reports.plot(found, plot)


@app.command()
def bench(
    model: Model = "smollm2",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    dtype: Annotated[str, typer.Option(help="What rzoo holds weights in; file: a GGUF file's own blocks.")] = "float32",
    policy: Policy = "exact",
    as_json: AsJson = False,
) -> None:
    """Compare speed with transformers and llama.cpp on this machine, in interleaved runs."""
    from rzoo.bench.compare import bench as run, table

    result = run(model, rounds=rounds, dtype=dtype, policy=policy)
    print_json(result) if as_json else print(table(result))
