"""Names of weights in files: rows of the tables that stand at the end of each family's file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Axis pairs (heads, width of a head) that are one axis in files.
MERGED = ("hc", "kc", "hz", "kz")


@dataclass(frozen=True)
class WeightName:
    """One weight, or with {} one a layer: our path, its name in Hugging Face files and in GGUF files (None: not there).

    turned: GGUF's arch llama stores the rows of each head with rotary pairs interleaved; they are put back on load.
    """

    path: str
    hf: str
    gguf: str | None
    turned: bool = False

    def of_layer(self, layer: str) -> "WeightName":
        """The row with its {} filled in."""
        return WeightName(
            self.path.replace("{}", layer),
            self.hf.replace("{}", layer),
            None if self.gguf is None else self.gguf.replace("{}", layer),
            self.turned,
        )


def file_shape(axes: Sequence[str], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that a weight with these logical axes has in a file: heads and head width are one axis there."""
    out: list[int] = []
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        if i and axes[i - 1] + axis in MERGED:
            out[-1] *= size
        else:
            out.append(size)
    return tuple(out)


def named(table: Iterable[WeightName], path: str) -> WeightName:
    """The row of `table` for our path, e.g. "layers.7.attention.q"."""
    parts = path.split(".")
    layer = next((part for part in parts if part.isdigit()), "")
    pattern = ".".join("{}" if part.isdigit() else part for part in parts)
    for row in table:
        if row.path == pattern:
            return row.of_layer(layer)
    raise KeyError(f"no name for weight {path}: add a row to the family's table")
