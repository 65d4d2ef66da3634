"""`rzoo.load`: a name or a path becomes a handle, tensor by tensor; what cannot fit is refused before it is read."""

import os
import sys
from typing import Any

import jax
import numpy as np

from rzoo.checkpoint.opened import Opened, open_checkpoint
from rzoo.checkpoint.sources import Located, locate
from rzoo.compile.aot import use_compile_cache
from rzoo.compile.kernels import policy_forms
from rzoo.compile.precision import bound_of
from rzoo.compile.record import recorded
from rzoo.core import RzooError, dtype_named
from rzoo.formats import TEMPLATES, thinking_of
from rzoo.handle import LM, About
from rzoo.models.presets import Preset
from rzoo.models.registry import Params, abstract_weights, always_float32, count_parameters
from rzoo.sharding.fit import free_memory, in_gib, largest_weight_bytes, weight_bytes


def load(
    source: str,
    dtype: Any = None,
    policy: str = "exact",
    *,
    kl: float | None = None,
    record: bool = True,
    quiet: bool = False,
) -> LM:
    """Loads a model: a preset's name, a folder in Hugging Face form, a .gguf file or a hub id.

    dtype: in which type weights are held; None is float32 where that fits into memory on a CPU, else the stored type.
    "fp8" keeps the FP8 blocks of a DeepSeek checkpoint as they are, and all other weights in the stored type.
    policy: "exact" computes in float32, "stored" in the held type with float32 sums, "fast" in whatever a tuner shows
    to stay within `kl` nats of exact in the mean (0.01 where none is given). One line on what will be loaded goes to
    stderr before weights are read, unless quiet. record: apply the tuning record that rzoo.tune kept for exactly this
    model, policy and machine, and say so. Raises RzooError for whatever is absent, malformed or too large.
    """
    located = locate(source)
    opened = open_checkpoint(located.path)
    _check_preset(located, opened.config)
    held = choose_dtype(opened, dtype, located.name)
    bound = bound_of(policy, kl)
    forms = policy_forms(policy, opened.dtype if held == "fp8" else held)
    use_compile_cache()
    if not quiet:
        for line in (*opened.warnings, _announcement(located, opened, held)):
            print(f"rzoo: {line}", file=sys.stderr)
    preset = located.preset or Preset(config=opened.config)
    template = opened.tokenizer.chat_template if opened.tokenizer else None
    template = template or TEMPLATES.get(preset.template or "")
    about = About(
        source=f"{located.name} from {located.path}",
        bits=opened.bits,
        tokenizer=opened.tokenizer,
        template=template,
        stops=opened.stops,
        thinking=preset.thinking or thinking_of(template),
        recommended={**preset.recommended, **opened.recommended},
    )
    lm = LM(opened.config, read_weights(opened, held, located.name), forms, policy, about, bound=bound)
    if not record:
        return lm
    tuned, words = recorded(lm)
    if words and not quiet:
        print(f"rzoo: {words}", file=sys.stderr)
    return tuned


def _check_preset(located: Located, config: Any) -> None:
    """A preset's name always means the same model: a file with other sizes is no such preset."""
    if located.preset is not None and config != located.preset.config:
        raise RzooError(
            f"{located.name}: {located.path} holds another model than the preset means: {config}",
            field="source",
            fix="load it by its path",
        )


def choose_dtype(opened: Opened, asked: Any, name: str) -> str:
    """The type to hold weights in; RzooError with the sizes that would fit where the wanted one does not."""
    if asked == "fp8" and opened.fp8_bytes is None:
        raise RzooError(
            f"dtype (fp8): {name} has no weights in FP8 blocks, most of it is {opened.bits}",
            field="dtype",
            value=asked,
            fix=f'load it with dtype="{opened.dtype}"',
        )
    on_cpu = jax.default_backend() == "cpu"
    named = [asked if asked == "fp8" else dtype_named(asked).name] if asked is not None else []
    wanted = named or (["float32", opened.dtype] if on_cpu else [opened.dtype])
    free = free_memory()
    sizes = {}
    for candidate in dict.fromkeys(wanted):
        stored = opened.dtype if candidate == "fp8" else candidate
        sizes[candidate] = held_bytes(opened, candidate) + largest_weight_bytes(opened.config, stored)
        if free is None or sizes[candidate] <= free:
            return candidate
    needs = ", ".join(f"{in_gib(size)} in {candidate}" for candidate, size in sizes.items())
    half = weight_bytes(opened.config, "bfloat16")
    assert free is not None
    fix = f'load it with dtype="bfloat16" ({in_gib(half)})' if half < free else "use a machine with more memory"
    raise RzooError(
        f"{name} needs {needs}; {in_gib(free)} of memory are free",
        field="dtype",
        value=asked,
        fix=f"{fix}, or take a model of at most {int(free * 0.45 / 2e9)} billion parameters",
    )


def held_bytes(opened: Opened, held: str) -> int:
    """Bytes of all weights held in the type that choose_dtype gave."""
    return opened.fp8_bytes or 0 if held == "fp8" else weight_bytes(opened.config, held)


def _announcement(located: Located, opened: Opened, held: str) -> str:
    count = count_parameters(opened.config)
    size = in_gib(held_bytes(opened, held))
    return f"loading {located.name}: {count:,} parameters, {opened.bits} in the file, {held} in memory ({size})"


def read_weights(opened: Opened, dtype: str, name: str) -> Params:
    """All weights, one tensor at a time: beside those placed, memory holds at most one more."""
    _check_copies(opened)
    paths = list(abstract_weights(opened.config))
    params: Params = {}
    for path in _with_progress(paths, name, held_bytes(opened, dtype)):
        params[path] = jax.device_put(opened.read(path, "float32" if path in always_float32(opened.config) else dtype))
    return params


def _check_copies(opened: Opened) -> None:
    """A tied model's file may repeat the embedding as head: equal is dropped, different contradicts the config."""
    for name in opened.matched.copies:
        (embed,) = opened.matched.tensors["embed"].names
        if not np.array_equal(opened.read_raw(name), opened.read_raw(embed)):
            raise RzooError(
                f"{name} differs from {embed}, but the config says tie_word_embeddings true",
                field="tie_word_embeddings",
                value=True,
                fix="set tie_word_embeddings to false to use both, or remove the tensor from the file",
            )


def _with_progress(paths: list[str], name: str, size: int):
    """A bar on stderr where a person is watching and the load takes long enough to see."""
    if size < 2**30 or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return paths
    from rich.console import Console
    from rich.progress import track

    return track(paths, f"loading {name}", console=Console(stderr=True), transient=True)
