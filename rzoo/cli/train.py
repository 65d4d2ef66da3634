"""`rzoo train`: makes a member of the small lineage, from nothing."""

from typing import Annotated

import typer

from rzoo.cli.common import app, say


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="r1-tiny (thoughts and answers) or v3-tiny (answers alone).")],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of steps; one that holds some is resumed.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of training; default: the recipe's.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first weights and of the data.")] = 0,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the curve; needs matplotlib.")] = None,
) -> None:
    """Train a small V3 or R1 on chained arithmetic; Ctrl-C saves, and the same command goes on."""
    from rzoo.train.lineage import learn
    from rzoo.train.loop import draw

    learn(recipe, out, steps=steps, seed=seed, progress=True)
    say(f"rzoo: trained {recipe}; try: rzoo generate {out} '3+4*7='")
    if plot is not None:
        draw(out, plot)
