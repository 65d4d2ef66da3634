"""How programs are compiled, and the persistent compile cache in a folder of the user's own."""

import os
import stat
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax

from rzoo.core import RzooError
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


def cache_folder() -> Path:
    """Where rzoo keeps what it can make again: $RZOO_CACHE, else rzoo/ in the user's cache folder.

    Raises RzooError for a URL, which would else become a folder of that name below the working folder.
    """
    given = os.environ.get("RZOO_CACHE")
    if given and "://" in given:
        fix = "name a folder of this machine; compiled programs alone may be shared, by JAX_COMPILATION_CACHE_DIR"
        raise RzooError(f"RZOO_CACHE ({given}) is a URL, not a folder", field="RZOO_CACHE", value=given, fix=fix)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rzoo"


def private_folder(name: str, *, make: bool = True) -> Path | None:
    """A folder below cache_folder() that nobody but the user can write, made if asked where there is none; None where
    it can't be had: what is loaded from there decides what runs.
    """
    folder = cache_folder() / name
    try:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError:
        return None
    return None if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else folder


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
