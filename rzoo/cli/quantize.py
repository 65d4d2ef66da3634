"""`rzoo quantize`: a model in fewer bits, and what that costs it."""

import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from rzoo.cli.common import AsJson, Dtype, Model, app, load, print_json, read_text, say


@app.command()
def quantize(
    model: Model,
    weights: Annotated[str, typer.Option(help="Such as int8, int4:g32, int4:g128, int4:g128:sym or w8a8.")] = "int8",
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Save it as a step of this folder.")] = None,
    text: Annotated[str | None, typer.Option(metavar="FILE", help="What to measure on; default: 1,024 tokens.")] = None,
    layers: Annotated[bool, typer.Option("--layers/--no-layers", help="Measure each layer by itself, too.")] = True,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw what each layer loses.")] = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Quantize a model's weights and show what that costs: bytes, and next tokens on a held-out text."""
    import rzoo
    from rzoo.compile.quantize import scheme_named
    from rzoo.core import new_figure
    from rzoo.evals import quantization

    scheme_named(weights)
    given = None if text is None else read_text(text, "text")
    if plot is not None:
        new_figure()
    lm = load(model, dtype, "exact", None, None)
    ids = quantization.held_out_ids(lm, given)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    quantized, found = quantization.report(lm, weights, ids, layers=layers, track=_track)
    print_json(found.to_json()) if as_json else say(quantization.table(found))
    if plot is not None:
        quantization.draw(found, plot)
    if out is not None:
        say(f"saved {rzoo.save(quantized, out).path}", file=sys.stderr if as_json else sys.stdout)


def _track(names: Sequence[str]) -> Iterable[str]:
    """A bar over the layers where a person is watching."""
    if not sys.stderr.isatty():
        return names
    from rich.console import Console
    from rich.progress import track

    return track(names, "measuring layers", console=Console(stderr=True), transient=True)
