"""A plan in words, as a table, as a picture, and what a day of requests asks of it. Nothing heavy is imported."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rzoo.compile.plan import BYTES, Plan
from rzoo.core import RzooError, new_figure, save_figure

HELD = ("weights", "cache", "temp")


def size(count: int | float) -> str:
    """Bytes as text in powers of ten, as GPUs are sold."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def time(seconds: int | float) -> str:
    """A duration as text."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def title(plan: Plan) -> str:
    """What was planned, in one line."""
    mesh = " × ".join(f"{axis} {n}" for axis, n in plan.mesh.items() if n > 1) or "one GPU"
    kv = " (KV heads copied)" if plan.kv == "copied" else ""
    return (
        f"{plan.model} in {plan.weights} on {plan.devices} × {plan.gpu}, {mesh}{kv}: {plan.phase},"
        f" batch {plan.batch}, context {plan.context}"
    )


def line(plan: Plan) -> str:
    """Whether a plan fits, in one line."""
    return f"{title(plan)}; {verdict(plan)} ({plan.figures['peak'].basis})"


def words(plan: Plan) -> str:
    """All of a plan as lines of text."""
    lines = [title(plan), verdict(plan)]
    lines += [f"  {label(name):<22}{figure}" for name, figure in _shown(plan)]
    for one in plan.collectives:
        group = len(one["devices"])
        lines.append(f"  {one['kind']:<22}{size(one['bytes'])} in {one['count']} over {group} GPUs ({one['basis']})")
    for stage in plan.stages:
        lines.append(f"  {stage['name']:<28}{', '.join(f'{size(stage[part])} {part}' for part in HELD)}")
    lines.append(f"  {plan.sequences} sequences of {plan.context} tokens fit beside the weights (modelled)")
    lines += [f"  fits with {change(near)}: {size(near['bytes'])} a GPU (modelled)" for near in plan.nearest]
    return "\n".join([*lines, *(f"  note: {note}" for note in plan.notes)])


def verdict(plan: Plan) -> str:
    """Whether it fits, with the arithmetic."""
    held = " + ".join(f"{size(plan.figures[part].value)} {part}" for part in HELD)
    peak = f"{size(plan.figures['peak'].value)} a GPU ({held})"
    room = f"{size(plan.usable)} usable of {size(plan.memory)}"
    return f"fits: {peak}; {room}" if plan.fits else f"does not fit by {size(plan.over)}: {peak}; {room}"


def label(name: str) -> str:
    """The name of a figure for people."""
    return name.replace("_", " ").replace("total seconds", "roofline").removesuffix(" seconds")


def _shown(plan: Plan) -> list[tuple[str, str]]:
    found = []
    for name, figure in plan.figures.items():
        number = size(figure.value) if figure.unit.startswith("bytes") else f"{figure.value:,.4g}"
        number = time(figure.value) if figure.unit.startswith("seconds") else number
        unit = figure.unit.removeprefix("bytes ").removeprefix("seconds ")
        found.append((name, f"{number} {unit if figure.unit != BYTES else 'a GPU'} ({figure.basis})"))
    return found


def change(near: Any) -> str:
    """What another plan changes, in words."""
    changes = dict(near["change"])
    changes.pop("mesh", None)
    return ", ".join(f"{name} {value}" for name, value in changes.items())


COLUMNS = ("plan", "weights", "KV cache", "temp", "peak", "fits", "exchanged a step", "roofline a step", "sequences")


def row(plan: Plan, name: str | None = None) -> tuple[str, ...]:
    """One plan for a table; m marks what is modelled and no program told."""
    mark = lambda figure: size(figure.value) + ("" if figure.basis == "compiled" else " m")  # noqa: E731
    held = [mark(plan.figures[part]) for part in (*HELD, "peak")]
    fits = "yes" if plan.fits else f"no, {size(plan.over)} over"
    seconds = time(plan.figures["total_seconds"].value)
    return (name or title(plan), *held, fits, mark(plan.figures["exchanged"]), f"{seconds} m", str(plan.sequences))


def markdown(rows: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def overlap_table(plan: Plan) -> str:
    """The collectives of a plan's program, and what is launched while each of them is under way."""
    if not plan.overlaps:
        return "no collective runs beside other work: none was compiled"
    columns = ("collective", "name", "sent", "launches meanwhile", "read meanwhile")
    rows = [(o["kind"], o["name"], size(o["bytes"]), str(o["launches"]), size(o["read"])) for o in plan.overlaps]
    return markdown(rows, columns)


@dataclass(frozen=True)
class Demand:
    """What a day of requests asks for. prompt, answer: tokens/s of each, on average. replicas: copies of the planned
    machine that keep up, by the roofline: at least so many.
    """

    prompt: int | float
    answer: int | float
    replicas: int


def demand(plan: Plan, requests: int, tokens_in: int, tokens_out: int) -> Demand:
    """What so many requests a day, spread evenly, ask of a decode plan. Raises RzooError for numbers that are none, and
    for another phase.
    """
    given = {"requests_per_day": requests, "tokens_in": tokens_in, "tokens_out": tokens_out}
    for name, value in given.items():
        if value < 1:
            raise RzooError(f"{name} ({value}) must be at least 1", field=name, value=value)
    if plan.phase != "decode":
        raise RzooError("replicas are counted from a plan of decode", field="phase", value=plan.phase)
    prompt, answer = requests * tokens_in / 86400, requests * tokens_out / 86400
    decoding = answer / plan.figures["tokens_per_second"].value
    return Demand(prompt, answer, math.ceil(decoding + prompt * plan.figures["prompt_seconds"].value))


def plot(plans: Sequence[Plan], path: str | Path) -> None:
    """Draws bytes per GPU, a stacked bar for each plan, or for each stage of one. Raises RzooError without matplotlib,
    and for a file that it can't write.
    """
    bars = [bar for plan in plans for bar in _bars(plan)]
    picture = new_figure(figsize=(2 + 1.2 * len(bars), 4), layout="constrained")
    axes, bottom = picture.subplots(), [0.0] * len(bars)
    for part in HELD:
        heights = [held[part] / 1e9 for _, held in bars]
        axes.bar(range(len(bars)), heights, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for memory in sorted({plan.memory for plan in plans}):
        axes.axhline(memory / 1e9, color="black", linewidth=0.8)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
    axes.set(ylabel="GB per GPU", title=title(plans[0]) if len(plans) == 1 else None)
    axes.legend()
    save_figure(picture, path)


def _bars(plan: Plan) -> list[tuple[str, dict[str, Any]]]:
    if plan.stages:
        return [(stage["name"].replace(": ", "\n"), {part: stage[part] for part in HELD}) for stage in plan.stages]
    mesh = "\n".join(f"{axis} {n}" for axis, n in plan.mesh.items()) or "one GPU"
    return [(f"{plan.weights}\n{mesh}", {part: plan.figures[part].value for part in HELD})]
