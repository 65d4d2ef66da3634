"""`rzoo models | export | save`: what can be loaded, and writing it."""

import sys
from typing import Annotated, Any

import typer

from rzoo.cli.common import AsJson, Dtype, MeshOption, Model, RulesOption, app, load, print_json, say


@app.command()
def models(
    layout: Annotated[str | None, typer.Option(metavar="NAME", help="Show the layers of this one instead.")] = None,
    fit: Annotated[str | None, typer.Option(metavar="MEMORY", help="Say what fits into 8GB, and why not.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens that --fit makes room for.")] = 4096,
    as_json: AsJson = False,
) -> None:
    """List what can be loaded by name, with exact parameter counts."""
    from rzoo.catalog import presets

    if layout is not None:
        _print_layout(layout, as_json)
        return
    found = presets()
    if fit is not None:
        _print_fits(found, fit, context, as_json)
        return
    if as_json:
        fields = ("name", "alias", "parameters", "bytes", "bits", "found", "thinking")
        print_json([{field: getattr(info, field) for field in fields} for info in found])
        return
    from rich.console import Console
    from rich.table import Table

    from rzoo.compile.plan_words import size

    table = Table(box=None, pad_edge=False)
    for column in ("model", "parameters", "size", "bits", "thinking"):
        table.add_column(column, no_wrap=True)
    table.add_column("found", overflow="ellipsis", no_wrap=True)
    for info in found:
        name = info.name if info.alias is None else f"{info.name} ({info.alias})"
        table.add_row(name, f"{info.parameters:,}", size(info.bytes), info.bits, info.thinking or "-", info.found)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _print_fits(found: Any, memory: str, context: int, as_json: bool) -> None:
    from rzoo.compile.editions import fit, memory_size

    size = memory_size(memory)
    fits = [(info, fit(info.config, size, context)) for info in found]
    if as_json:
        print_json([{"name": i.name, **vars(f), "fits": f.fits, "why": f.why} for i, f in fits])
        return
    for info, one in sorted(fits, key=lambda pair: (not pair[1].fits, pair[0].parameters)):
        print(f"{'fits' if one.fits else 'no':<5} {info.name:<36} {one.why}")


def _print_layout(name: str, as_json: bool) -> None:
    from rzoo.catalog import layout

    found = layout(name)
    if as_json:
        runs = [{"block": block, "layers": layers} for block, layers in found.runs]
        print_json({**vars(found), "runs": runs})
        return
    print(
        f"{found.name}: {found.layers} layers, {found.distinct_blocks} distinct blocks in {len(found.runs)} runs,"
        f" {found.kv_slots} with keys and values"
    )
    for block, layers in found.runs:
        label = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
        print(f"{label:>9}  {len(layers):>3}x  {block}")


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

    path = rzoo.export(load(model, dtype, "exact", mesh, rules), folder, fp8=fp8, overwrite=overwrite)
    say(f"wrote {path}")


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

    saving = rzoo.save(load(model, dtype, "exact", mesh, rules), folder, step, keep=keep)
    say(f"saved {saving.path}")
