"""What the commands share: the application, options, loading, printing."""

import json
import signal
from pathlib import Path
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
    str | None,
    typer.Option(help="float32, bfloat16, float16, or fp8 or file (blocks kept); default: float32 if it fits."),
]
Policy = Annotated[
    str, typer.Option(help="exact (float32), stored (the held type, float32 sums) or fast (within a KL bound).")
]
MeshOption = Annotated[
    str | None, typer.Option("--mesh", help="Such as tensor=4,data=2; default: chosen for the devices that there are.")
]
RulesOption = Annotated[str | None, typer.Option("--rules", help="Such as tensor or tensorxdata; default: by --mesh.")]

Thinking = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="Switch a reasoning model's thinking on or off.")
]
MaxThinkTokens = Annotated[
    int | None, typer.Option(help="Close a thought after so many tokens, so that the model answers.")
]
Temperature = Annotated[float, typer.Option(help="0 is greedy, 1 draws as the model says.")]
TopK = Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this share.")]
MinP = Annotated[float, typer.Option(help="Draw from tokens of at least this part of the likeliest's.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: less of what the text holds.")]
Seed = Annotated[int | None, typer.Option(help="Repeats an answer that named it.")]


def load(model: str, dtype: str | None, policy: str, mesh: str | None, rules: str | None, *, mtp: bool = False) -> Any:
    """The model on the mesh that is asked for; where none is and there are several devices, on a chosen one."""
    import jax

    import rzoo
    from rzoo.sharding.distributed import join_processes

    join_processes()
    rzoo.load, rzoo.generate  # noqa: B018  (imports what they need)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    several = mesh is None and rules is None and jax.device_count() > 1
    return rzoo.load(model, dtype=dtype, policy=policy, mesh="auto" if several else mesh, rules=rules, mtp=mtp)


def read_text(path: str | Path, field: str) -> str:
    """The text of a file. Raises RzooError for one that can't be read as text."""
    from rzoo.core import RzooError

    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        fix = "give a file of plain text in UTF-8"
        raise RzooError(f"{path} can't be read as text: {error}", field=field, value=str(path), fix=fix) from None


def say(text: str, **options: Any) -> None:
    """Prints in the first of several processes, which all compute the same."""
    import jax

    if jax.process_index() == 0:
        print(text, flush=True, **options)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))
