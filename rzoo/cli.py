"""The `rzoo` command. Thin: each command parses, calls one public function, prints."""

import errno
import json
import signal
import sys
import time
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="rzoo",
    help="Open reasoning models in JAX: exact, readable, fast.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="--debug shows the traceback of an error. Compiled programs are kept in ~/.cache/rzoo (RZOO_CACHE).",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Model = Annotated[str, typer.Argument(help="A preset (see `rzoo models`), a folder, a .gguf file or a hub id.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16, float16, or fp8 (blocks kept); default: float32 if it fits.")
]
Policy = Annotated[
    str, typer.Option(help="exact (float32), stored (the held type, float32 sums) or fast (within a KL bound).")
]
MeshOption = Annotated[
    str | None, typer.Option("--mesh", help="Such as tensor=4,data=2; default: chosen for the devices that there are.")
]
RulesOption = Annotated[str | None, typer.Option("--rules", help="Such as tensor or tensorxdata; default: by --mesh.")]


@app.command()
def models(
    layout: Annotated[str | None, typer.Option(metavar="NAME", help="Show the layers of this one instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """List what can be loaded by name, with exact parameter counts."""
    from rzoo.catalog import presets

    if layout is not None:
        _print_layout(layout, as_json)
        return
    found = presets()
    if as_json:
        fields = ("name", "alias", "parameters", "bytes", "bits", "found", "thinking")
        _print_json([{field: getattr(info, field) for field in fields} for info in found])
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("model", "parameters", "size", "bits", "thinking"):
        table.add_column(column, no_wrap=True)
    table.add_column("found", overflow="ellipsis", no_wrap=True)
    for info in found:
        name = info.name if info.alias is None else f"{info.name} ({info.alias})"
        table.add_row(
            name, f"{info.parameters:,}", f"{info.bytes / 1e9:.2f} GB", info.bits, info.thinking or "-", info.found
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _print_layout(name: str, as_json: bool) -> None:
    from rzoo.catalog import layout

    found = layout(name)
    if as_json:
        runs = [{"block": block, "layers": layers} for block, layers in found.runs]
        _print_json({**vars(found), "runs": runs})
        return
    print(
        f"{found.name}: {found.layers} layers, {found.distinct_blocks} distinct blocks in {len(found.runs)} runs,"
        f" {found.kv_slots} with keys and values"
    )
    for block, layers in found.runs:
        label = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
        print(f"{label:>9}  {len(layers):>3}x  {block}")


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 512,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Switch a reasoning model's thinking on or off.")
    ] = None,
    dtype: Dtype = None,
    policy: Policy = "exact",
    mesh: MeshOption = None,
    rules: RulesOption = None,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt."""
    import rzoo

    text = sys.stdin.read() if prompt == "-" else prompt
    lm = _load(model, dtype, policy, mesh, rules)
    start = time.perf_counter()
    if as_json:
        answer: Any = rzoo.generate(lm, text, max_new_tokens=max_new_tokens, raw=raw, thinking=thinking)
        seconds = time.perf_counter() - start
        result = {"model": lm.source, **vars(answer), "seconds": round(seconds, 3)}
        _say(json.dumps(result, ensure_ascii=False))
        if answer.finish_reason == "interrupted":
            raise KeyboardInterrupt
        return
    answer = rzoo.stream(lm, text, max_new_tokens=max_new_tokens, raw=raw, thinking=thinking)
    waiting = sys.stderr.isatty()
    if waiting:  # the first piece takes seconds where programs have to be compiled, and more for a long prompt
        _say(f"rzoo: reading {answer.prompt_length} tokens …", end="", file=sys.stderr)
    try:
        for piece in answer:
            if waiting:
                _say("\r\033[K", end="", file=sys.stderr)
            waiting = False
            _say(piece, end="")
    except KeyboardInterrupt:  # what there is stays, and the line below says that it was cut
        _say(f"\nrzoo: {answer.report()}", file=sys.stderr)
        raise
    _say("")
    _say(f"rzoo: {answer.report()}", file=sys.stderr)


@app.command()
def export(
    model: Model,
    folder: Annotated[str, typer.Argument(help="Where to write; it must be empty or not exist.")],
    fp8: Annotated[bool, typer.Option(help="Write weights in FP8 blocks, as DeepSeek publishes them.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the checkpoint that is there.")] = False,
    dtype: Dtype = None,
    mesh: MeshOption = None,
    rules: RulesOption = None,
) -> None:
    """Write a model in Hugging Face form, for transformers and others to read."""
    import rzoo

    path = rzoo.export(_load(model, dtype, "exact", mesh, rules), folder, fp8=fp8, overwrite=overwrite)
    _say(f"wrote {path}")


@app.command()
def save(
    model: Model,
    folder: Annotated[str, typer.Argument(help="A folder of steps; it is made where it does not exist.")],
    step: Annotated[int | None, typer.Option(min=0, help="Number of the step; default: after the latest.")] = None,
    keep: Annotated[int | None, typer.Option(min=1, help="How many of the latest steps to leave.")] = None,
    dtype: Dtype = None,
    mesh: MeshOption = None,
    rules: RulesOption = None,
) -> None:
    """Save a model as a step of training (Orbax), to be restored on any mesh."""
    import rzoo

    saving = rzoo.save(_load(model, dtype, "exact", mesh, rules), folder, step, keep=keep)
    _say(f"saved {saving.path}")


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
        _print_json(to_json(tuned.record))
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
    _print_json(found) if as_json else print(reports.table(found))
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
    _print_json(result) if as_json else print(table(result))


def _load(model: str, dtype: str | None, policy: str, mesh: str | None, rules: str | None) -> Any:
    """The model on the mesh that is asked for; where none is and there are several devices, on a chosen one."""
    import jax

    import rzoo
    from rzoo.sharding.distributed import join_processes

    join_processes()
    rzoo.load, rzoo.generate  # noqa: B018  (imports what they need)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    several = mesh is None and rules is None and jax.device_count() > 1
    return rzoo.load(model, dtype=dtype, policy=policy, mesh="auto" if several else mesh, rules=rules)


def _say(text: str, **options: Any) -> None:
    """Prints in the first of several processes, which all compute the same."""
    import jax

    if jax.process_index() == 0:
        print(text, flush=True, **options)


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def main() -> None:
    """Entry point: a user's mistake is one message and exit code 2, Ctrl-C is 130; --debug shows tracebacks."""
    # Until the libraries are imported Ctrl-C ends the process: an exception in the middle of an import is swallowed.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        message = None if debug else _told(error)
        if message is None:
            raise
        print(f"rzoo: {message}", file=sys.stderr)
        sys.exit(2)


def _told(error: Exception) -> str | None:
    """What to say of an error that is no fault of the program; None for one that is."""
    from rzoo.core import RzooError

    if isinstance(error, RzooError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO):
        return f"the output can't be written: {error.strerror}"
    return (
        "the terminal's encoding can't show the answer: set PYTHONUTF8=1" if isinstance(error, UnicodeError) else None
    )


if __name__ == "__main__":
    main()
