"""`rzoo prune`: a smaller model of a large one."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from rzoo.cli.common import AsJson, Dtype, Model, app, print_json, read_text, say
from rzoo.cli.show import CLEAR


@app.command()
def prune(
    model: Model,
    keep: Annotated[float | None, typer.Option(help="The share that is kept, such as 0.79.")] = None,
    params: Annotated[float | None, typer.Option(help="Or the most parameters, such as 138e9.")] = None,
    unit: Annotated[str, typer.Option(help="What --keep is a share of: parameters, bytes or flops.")] = "parameters",
    calibrate: Annotated[Path | None, typer.Option(metavar="FILE", help="Text; its end is kept to judge by.")] = None,
    method: Annotated[str, typer.Option(help="greedy (by measured loss), uniform, or random to compare.")] = "greedy",
    heal: Annotated[int, typer.Option(min=0, metavar="STEPS", help="Steps of learning from the whole model.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write; empty or not there.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="From shapes alone: what would come out.")] = False,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Cut a model down to a budget, heal it, write it; Ctrl-C while it heals saves, and the same command goes on."""
    from rzoo.core import RzooError
    from rzoo.train import prune_run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    budget = prune_run.Budget(keep, params, "parameters" if params is not None else unit)
    if dry_run:
        found = prune_run.dry_run(model, budget)
        if as_json:
            print_json(found)
        else:
            print(_dry(model, found))
        return
    if calibrate is None or out is None:
        name = "calibrate" if calibrate is None else "out"
        raise RzooError(f"--{name} is missing", field=name, fix="or see what would come out with --dry-run")
    shown: dict[str, Any] = {"say": _stages(), "healing": lambda: _bar(heal)}
    found = prune_run.run(
        model, read_text(calibrate, "calibrate"), out, budget, method=method, steps=heal, dtype=dtype, **shown
    )
    if as_json:
        print_json(found)
    else:
        _print(found, out)


def _dry(model: str, found: dict[str, Any]) -> str:
    before, after = (found[when]["parameters"] for when in ("before", "after"))
    kind = found["after"]["config"]["model_type"]
    share = f"{after:,} ({after / before:.1%})"
    return f"{model}: {before:,} parameters, pruned {share}, of kind {kind}; --json has its config"


def _stages() -> Callable[[str, int, int], None]:
    """Shows a line that tells the stage and how far it is; without a terminal, one line a stage."""
    last = ""

    def show(what: str, done: int, of: int) -> None:
        nonlocal last
        if sys.stderr.isatty():
            print(f"{CLEAR}rzoo: {what} {done}/{of}", end="\n" if done == of else "", file=sys.stderr, flush=True)
        elif what != last:
            print(f"rzoo: {what}, {of}", file=sys.stderr, flush=True)
        last = what

    return show


@contextmanager
def _bar(steps: int) -> Iterator[Any]:
    from rzoo.train.loop import Bar

    with Bar("healing", steps, shown=True) as bar:
        yield bar.update


ROWS = {
    "parameters": "{:,}",
    "bytes": "{:,}",
    "kv_bytes_per_token": "{:,}",
    "perplexity": "{:.2f}",
    "tokens_per_second": "{:.1f}",
}


def _print(found: dict[str, Any], out: Any) -> None:
    names = [name for name in ("before", "pruned", "after") if name in found]
    say(" " * 20 + "".join(f"{name:>16}" for name in names))
    for field, form in ROWS.items():
        say(f"{field.replace('_', ' '):<20}" + "".join(f"{form.format(found[name][field]):>16}" for name in names))
    say(f"rzoo: wrote {out}; try: rzoo generate {out} 'Hello'")
