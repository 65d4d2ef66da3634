"""`rzoo plan`: what a model needs on GPUs that need not be here."""

import signal
from itertools import product
from typing import Annotated, Any

import typer

from rzoo.cli.common import AsJson, app, print_json


@app.command()
def plan(
    model: Annotated[str | None, typer.Argument(help="A preset, or a folder with a config.json.")] = None,
    gpu: Annotated[str, typer.Option(help="h100, h200, b200, a100-80gb or rpi5.")] = "h100",
    devices: Annotated[int | None, typer.Option(min=1, help="How many; default: 1, or those of --mesh.")] = None,
    rules: Annotated[str | None, typer.Option(help="Such as tensor or tensorxdata; default: chosen.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Such as tensor=8,pipe=8.")] = None,
    kv: Annotated[str, typer.Option(help="split or copied: the cache where GPUs are more than KV heads.")] = "split",
    weights: Annotated[str, typer.Option(help="bf16, int8, int4 or fp8.")] = "bf16",
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens that each row has room for.")] = 4096,
    phase: Annotated[str, typer.Option(help="decode or prefill.")] = "decode",
    modelled: Annotated[bool, typer.Option("--modelled", help="By arithmetic alone; nothing is compiled.")] = False,
    unrolled: Annotated[bool, typer.Option("--unrolled", help="Compile every layer by itself, no loops.")] = False,
    tuned: Annotated[bool, typer.Option("--tuned", help="In the forms that rzoo tune MODEL --gpu found.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="A table of all rules that work on the GPUs.")] = False,
    overlap: Annotated[bool, typer.Option("--overlap", help="A table of what runs beside each collective.")] = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw bytes per GPU; needs matplotlib.")] = None,
    requests_per_day: Annotated[int | None, typer.Option(min=1, help="Tell replicas for so many requests.")] = None,
    tokens_in: Annotated[int, typer.Option(min=1, help="Tokens of a request.")] = 1000,
    tokens_out: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 500,
    short: Annotated[bool, typer.Option("--short", help="One line: whether it fits.")] = False,
    install_aot: Annotated[bool, typer.Option("--install-aot", help="Make .venv-aot, which compiles.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a model needs and costs on GPUs, compiled for them without having one."""
    from rzoo.compile import plan_words
    from rzoo.core import RzooError

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the process that compiles ends with this one
    if install_aot:
        from rzoo.compile.deviceless import install

        print(f"programs for GPUs are compiled by {install()}")
        if model is None:
            return
    if model is None:
        raise RzooError("model is missing", field="model", fix="name one, such as: rzoo plan nano-8b --gpu h100")
    asked: dict[str, Any] = dict(gpu=gpu, weights=weights, batch=batch, context=context, phase=phase)
    asked |= {"mesh": mesh, "devices": devices, "rules": rules, "kv": kv, "stacked": not unrolled}
    asked |= {"tuned": True} if tuned else {}
    plans = _plans(model, asked, not modelled, compare)
    needed = None
    if requests_per_day is not None:
        needed = plan_words.demand(plans[0], requests_per_day, tokens_in, tokens_out)
    if as_json:
        found = plans[0].to_json() | ({"demand": vars(needed)} if needed else {})
        print_json(found | ({"compared": [one.to_json() for one in plans[1:]]} if compare else {}))
    elif short:
        print(plan_words.line(plans[0]))
    else:
        print(plan_words.words(plans[0]))
        if needed:
            print(
                f"  {requests_per_day} requests a day: {needed.prompt:,.1f} tokens/s of prompts,"
                f" {needed.answer:,.1f} of answers, at least {needed.replicas} replicas (modelled)"
            )
        if overlap:
            print("\n" + plan_words.overlap_table(plans[0]))
        if compare:
            print("\n" + plan_words.markdown([plan_words.row(one) for one in plans]))
    if plot is not None:
        plan_words.plot(plans, plot)


def _plans(model: str, asked: dict[str, Any], compiled: bool, compare: bool) -> list[Any]:
    """The plan that is asked for; to compare, by arithmetic those of all other rules that work on as many devices, and
    with KV heads copied where that makes a difference.
    """
    from rzoo.compile.plan import plan as make

    plans = [make(model, **asked, compiled=compiled)]
    if not compare:
        return plans
    from rzoo.core import RzooError
    from rzoo.sharding.rules import RULES

    for rules, kv in product(RULES, ("split", "copied")):
        other = asked | {"tuned": False, "rules": rules, "kv": kv, "mesh": None, "devices": plans[0].devices}
        try:
            made = make(model, **other, compiled=False)
        except RzooError:
            continue  # does not divide this model
        if all((made.mesh, made.figures["cache"].value) != (p.mesh, p.figures["cache"].value) for p in plans):
            plans.append(made)
    return plans
