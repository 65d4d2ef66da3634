"""`rzoo tune | report | bench`: a model on this machine."""

import sys
from typing import Annotated

import typer

from rzoo.cli.common import AsJson, Dtype, Model, Policy, app, print_json


@app.command()
def tune(
    model: Model,
    budget: Annotated[float, typer.Option(help="Seconds to search for.")] = 120.0,
    batch: Annotated[list[int] | None, typer.Option(help="Rows to tune decode for; may be repeated: 1 and 8.")] = None,
    dtype: Dtype = None,
    policy: Policy = "exact",
    kl: Annotated[float | None, typer.Option(help="Mean KL bound of policy fast, in nats.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the record of an earlier run.")] = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the ratios of all candidates.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest programs on this machine within the policy, and keep them for later loads."""
    import rzoo
    from rzoo.compile.record import draw, to_json

    lm = rzoo.load(model, dtype=dtype, policy=policy, kl=kl, record=False)
    say = lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True)  # noqa: E731
    tuned = rzoo.tune(lm, budget, batches=batch or (1, 8), resume=resume, progress=say)
    if as_json:
        print_json(to_json(tuned.record))
    if plot is not None:
        draw(tuned.record, plot)


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
    as_json: AsJson = False,
) -> None:
    """Compare speed with transformers and llama.cpp on this machine, in interleaved runs."""
    from rzoo.bench.compare import bench as run, table

    result = run(model, rounds=rounds)
    print_json(result) if as_json else print(table(result))
