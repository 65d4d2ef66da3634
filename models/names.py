"""Names of weights in files: rows of the tables that stand at the end of each family's file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Axis pairs (heads, width of a head) that are one axis in files.
MERGED = ("hc", "kc", "hz", "kz", "ix")


@dataclass(frozen=True)
class WeightName:
    """One weight, or with {} one a layer: our path, its name in Hugging Face files and in GGUF files (None: not there).

    A name with {e} stands for one tensor for each entry of the weight's first axis. Weights of one layer with the same
    name lie in one tensor side by side: the rows of each head, in the order of the table.
    turned: GGUF's arch llama stores the rows of each head with rotary pairs interleaved; they are put back on load.
    apart: the name in GGUF files where such a weight is a tensor of its own, [heads, rows, columns]; transposed: it is
    [heads, columns, rows] there. blocks: a checkpoint in FP8 stores it in blocks of codes with a scale each.
    """

    path: str
    hf: str
    gguf: str | None
    turned: bool = False
    apart: str | None = None
    transposed: bool = False
    blocks: bool = False

    def of_layer(self, layer: str) -> "WeightName":
        """The row with its {} filled in."""
        fill: Any = lambda name: None if name is None else name.replace("{}", layer)  # noqa: E731
        return replace(self, path=fill(self.path), hf=fill(self.hf), gguf=fill(self.gguf), apart=fill(self.apart))


def file_shape(axes: Sequence[str], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that a weight with these logical axes has in a file: heads and head width are one axis there."""
    out: list[int] = []
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        if i and axes[i - 1] + axis in MERGED:
            out[-1] *= size
        else:
            out.append(size)
    return tuple(out)


def pattern(path: str) -> str:
    """The path with {} for the layer: "layers.7.attention.q" -> "layers.{}.attention.q"."""
    return ".".join("{}" if part.isdigit() else part for part in path.split("."))


def file_slices(axes: Sequence[str], shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """[start, stop) on each logical axis as slices of the axes in a file. A head that shares one is taken whole."""
    out: list[slice] = []
    for i, (axis, size, (start, stop)) in enumerate(zip(axes, shape, bounds, strict=True)):
        if i and axes[i - 1] + axis in MERGED:
            out[-1] = slice(out[-1].start * size, out[-1].stop * size)
        else:
            out.append(slice(start, stop))
    return tuple(out)


def named(table: Iterable[WeightName], path: str, layers: int | None = None) -> WeightName:
    """The row of `table` for our path, e.g. "layers.7.attention.q"; one that is of no layer counts in files as the one
    after the last of `layers`, where its name asks for a number.
    """
    layer = next((part for part in path.split(".") if part.isdigit()), str(layers))
    wanted = pattern(path)
    for row in table:
        if row.path == wanted:
            return row.of_layer(layer)
    raise KeyError(f"no name for weight {path}: add a row to the family's table")
