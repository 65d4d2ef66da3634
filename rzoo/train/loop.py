"""The loop around the training step: batches by number, saved states, resumption, a curve.

A run is a function of its arguments: batch n is made from the number n alone, so that a run that was stopped and
resumed ends with the bits of one that was not.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from rzoo.checkpoint.training import find_step, read_extra, restore, save
from rzoo.core import RzooError, new_figure, save_figure
from rzoo.handle import LM
from rzoo.train.step import PLAIN, Batch, Objective, State, initial, step_of

CURVE = "curve.jsonl"  # one line a step: its number and its metrics

Say = Callable[[int, Mapping[str, float]], None]


def fit(
    lm: LM,
    batches: Callable[[int], Batch],
    steps: int,
    *,
    optimizer: optax.GradientTransformation,
    objective: Objective = PLAIN,
    folder: str | Path | None = None,
    save_every: int = 100,
    keep: int | None = 2,
    progress: Say = lambda step, metrics: None,
) -> LM:
    """The model after `steps` steps on batches(0), batches(1), …

    folder: where the state is saved every `save_every` steps, at the end and on Ctrl-C, as steps that `rzoo.load`
    reads, with the metrics of every step in curve.jsonl beside them; a folder that holds steps of this model is
    resumed after its latest. keep: how many of the latest to leave. progress gets a step's number and metrics. Raises
    RzooError for counts below 1, a folder of another model, and a loss that is no number.
    """
    for name, count in (("steps", steps), ("save_every", save_every)):
        if count < 1:
            raise RzooError(f"{name} ({count}) must be at least 1", field=name, value=count)
    root = None if folder is None else Path(folder)
    state = _resumed(lm, initial(lm, optimizer), root)
    run = step_of(lm, optimizer, objective)
    done = saved = int(state.step)
    lines: list[str] = []
    try:
        for number in range(done, steps):
            state, metrics = run(state, batches(number))
            found = {name: float(value) for name, value in metrics.items()}
            _check_finite(number, found, root)
            done = number + 1
            lines.append(json.dumps({"step": done, **found}))
            progress(done, found)
            if root is not None and (done % save_every == 0 or done == steps):
                saved = _save(lm, state, root, lines, keep)
    except KeyboardInterrupt:
        if root is not None and done > saved:
            _save(lm, state, root, lines, keep)
        raise
    return lm.with_params(state.params)


def _check_finite(number: int, found: Mapping[str, float], root: Path | None) -> None:
    if not np.isfinite(found["loss"]):
        kept = f"the latest good state is in {root}" if root else "nothing was saved"
        fix = f"lower the learning rate or clip gradients; {kept}"
        raise RzooError(f"the loss of step {number} is {found['loss']}", field="loss", value=found["loss"], fix=fix)


def _resumed(lm: LM, start: State, root: Path | None) -> State:
    """The state of the latest step of `root`, or `start` where there is none."""
    path = find_step(root.absolute())[0] if root is not None and root.is_dir() else None
    if path is None:
        return start
    params = restore(lm, path).params
    learned, biases = ({name: params[name] for name in group} for group in (start.learned, start.biases))
    leaves, tree = jax.tree.flatten((start.optimizer, start.step))
    read = read_extra(path, {str(i): leaf for i, leaf in enumerate(leaves)})
    optimizer, step = jax.tree.unflatten(tree, [read[str(i)] for i in range(len(leaves))])
    return State(learned, biases, optimizer, step)


def _save(lm: LM, state: State, root: Path, lines: list[str], keep: int | None) -> int:
    """Saves a state with the curve up to it; returns its number. The lines are used up."""
    number = int(state.step)
    extra = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves((state.optimizer, state.step)))}
    save(replace(lm, params=state.params), root, number, keep=keep, extra=extra)
    before = [line for line in _curve_lines(root) if json.loads(line)["step"] <= number - len(lines)]
    (root / CURVE).write_text("".join(f"{line}\n" for line in [*before, *lines]))
    lines.clear()
    return number


def _curve_lines(root: Path) -> list[str]:
    path = root / CURVE
    return path.read_text().splitlines() if path.exists() else []


def curve(folder: str | Path) -> dict[str, Any]:
    """The metrics of a run by name, each a list over its steps, "step" among them."""
    lines = [json.loads(line) for line in _curve_lines(Path(folder))]
    return {name: [line[name] for line in lines] for name in (lines[0] if lines else ())}


def draw(folder: str | Path, path: str | Path) -> None:
    """Draws the loss of a run over its steps, and the load of the busiest expert. Raises RzooError where there is no
    curve, and without matplotlib.
    """
    found = curve(folder)
    if not found:
        raise RzooError(f"{folder} holds no curve", field="folder", value=str(folder), fix="train into it first")
    picture = new_figure(figsize=(7, 4), layout="constrained")
    axes = picture.subplots()
    axes.semilogy(found["step"], found["loss"], label="loss, nats a token")
    if "load" in found:
        axes.semilogy(found["step"], found["load"], label="busiest expert / mean", alpha=0.5)
    axes.set_xlabel("step")
    axes.legend()
    save_figure(picture, path)


class Bar:
    """A progress bar on the terminal with the latest loss; a line each 100 steps where there is no terminal."""

    def __init__(self, name: str, steps: int, *, shown: bool):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.steps, self.name = steps, name
        console = Console(stderr=True)
        self.lines = shown and not console.is_terminal
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(
            *columns, TextColumn("{task.fields[words]}"), console=console, disable=not shown or self.lines
        )
        self.task = self.bar.add_task(name, total=steps, words="compiling")

    def __enter__(self) -> "Bar":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a step and its loss."""
        self.bar.update(self.task, completed=step, words=f"loss {metrics['loss']:.4f}")
        if self.lines and (step % 100 == 0 or step == self.steps):
            print(f"{self.name}: step {step} of {self.steps}, loss {metrics['loss']:.4f}", file=sys.stderr, flush=True)
