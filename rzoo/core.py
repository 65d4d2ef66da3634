"""What every package shares: the letters of shapes, dtype names, the one exception base.

One letter has one meaning, in shapes, einsum strings and as the logical name of an axis that sharding maps to a mesh:

    b batch            t query tokens      s key tokens        d model width (hidden size)    v vocabulary
    h query heads      k key/value heads   g query heads per key/value head                   c head width
    z value head width p rotary width      f feed-forward width                               e experts
    r latent rank      l layers            n blocks of a quantized axis
    i index heads      x index width       m r+p, a cached latent
    j 2d, two states joined

The usual spelling elsewhere is BTNH / BSKH: B = b, T = t, S = s, N = h, K = k, H = c, D = d, V = v.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

# Names that users, configs and checkpoints write -> dtype.
DTYPES: dict[str, Any] = {
    "float32": np.dtype("float32"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype("float16"),
}
DTYPE_ALIASES = {"f32": "float32", "fp32": "float32", "bf16": "bfloat16", "f16": "float16", "fp16": "float16"}


class RzooError(Exception):
    """A mistake in what the user gave: says which field, its value, and the way out.

    Everything that rzoo refuses on purpose raises this; the command line prints it, no traceback, and exits with 2.
    """

    def __init__(self, message: str, *, field: str | None = None, value: Any = None, fix: str | None = None):
        super().__init__(message if fix is None else f"{message}\n  {fix}")
        self.message, self.field, self.value, self.fix = message, field, value, fix


def dtype_named(name: Any) -> Any:
    """The dtype called `name` (a string such as "bfloat16" or "bf16", or a dtype).

    Raises RzooError for a name that rzoo does not compute in.
    """
    text = name if isinstance(name, str) else np.dtype(name).name
    known = DTYPES.get(DTYPE_ALIASES.get(text, text))
    if known is None:
        raise RzooError(f"dtype ({text}) must be one of {', '.join(DTYPES)}", field="dtype", value=text)
    return known


def new_figure(**settings: Any) -> Any:
    """An empty figure of matplotlib's, made without a display. Raises RzooError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fix = "pip install 'rzoo[plot]', or leave --plot out"
        raise RzooError("a picture needs matplotlib, which is not installed", field="plot", fix=fix) from None
    return Figure(**settings)


def save_figure(picture: Any, path: Any) -> None:
    """Writes a figure as the kind of file that its name ends in. Raises RzooError where that can't be done."""
    try:
        picture.savefig(path)
    except (OSError, ValueError) as error:
        fix = "name a file in a folder that exists, such as picture.png"
        raise RzooError(f"{path} can't be written: {error}", field="plot", value=str(path), fix=fix) from None


def closest(name: str, known: list[str]) -> str:
    """A half-sentence naming the entries of `known` that look like `name`, or all of them when none does."""
    import difflib

    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(known)}"
