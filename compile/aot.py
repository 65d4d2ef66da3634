"""How programs are compiled, and the persistent compile cache in a folder of the user's own."""

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax

from rzoo.compile.folders import private_folder
from rzoo.models import step

Options = tuple[tuple[str, Any], ...]  # XLA's compiler options by name; hashable, so that programs can be shared


@lru_cache(maxsize=64)
def prefill_program(options: Options = ()) -> Any:
    """step.prefill_chunk, compiled with these options; the cache is donated."""
    compiled = partial(jax.jit, static_argnames="blueprint", donate_argnames="cache", compiler_options=dict(options))
    return compiled(step.prefill_chunk)


@lru_cache(maxsize=64)
def decode_program(options: Options) -> Any:
    """step.decode, compiled with these options; the cache is donated."""
    static = ("blueprint", "steps", "select")
    return partial(jax.jit, static_argnames=static, donate_argnames="cache", compiler_options=dict(options))(
        step.decode
    )


@lru_cache(maxsize=64)
def decode_chosen_program(options: Options) -> Any:
    """step.decode_chosen, compiled with these options; the cache is donated."""
    static = ("blueprint", "steps", "choose")
    return partial(jax.jit, static_argnames=static, donate_argnames="cache", compiler_options=dict(options))(
        step.decode_chosen
    )


def decode_options() -> Options:
    """XLA's options for decode programs on this machine's CPU; other platforms take no notice of them.

    XLA prefers vectors of 256 bits also where there are wider ones: with 512, SmolLM2 at batch 1 takes 13.6 ms a token
    instead of 14.0 on 2 Zen 5 cores, and batch 8 the same time.
    """
    return (("xla_cpu_prefer_vector_width", 512),) if "avx512f" in cpu_fact("flags").split() else ()


def cpu_fact(name: str) -> str:
    """A line of /proc/cpuinfo, such as "flags" or "model name"; empty where there is none."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(name)), "")
    except OSError:
        return ""


def use_compile_cache() -> Path | None:
    """Lets XLA keep compiled programs on disk, unless the user has chosen a folder or turned the cache off.

    Returns the folder, or None where the user's setting stands or the folder cannot be made private to the user.
    """
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return None
    folder = private_folder("xla")
    if folder is None:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return folder
