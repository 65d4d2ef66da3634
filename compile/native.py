"""The kernels of native.cc, built by the system's compiler when they are first used, in a folder of the user's own.

A library is named by all that it was made from (source, headers, compiler, flags, processor) and by the SHA-256 of its
bytes: one that was damaged, or that another user could have written, is never loaded. RZOO_NO_NATIVE=1 turns the
kernels off; without them, and on processors other than this one, products take XLA's forms.
"""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import jax
import jaxlib

from rzoo.compile.aot import cpu_fact
from rzoo.compile.folders import private_folder

SOURCE = "native.cc"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-Wno-psabi")
TIME_LIMIT = 300  # seconds that a build may take
KERNELS = ("rzoo_multiply", "rzoo_attend")  # symbols of a library, and names in programs


@lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Why programs can't call the kernels, in one line; None where they can: then they are built and registered."""
    if os.environ.get("RZOO_NO_NATIVE", "0") not in ("", "0"):
        return "native kernels are turned off by RZOO_NO_NATIVE"
    if jax.default_backend() != "cpu":
        return "native kernels are for CPUs"
    folder = private_folder("native")
    if folder is None:
        return "native kernels need a cache folder that only you can write (RZOO_CACHE)"
    compiler = next((found for found in map(shutil.which, COMPILERS) if found), None)
    if compiler is None:
        return f"native kernels need a C++ compiler ({', '.join(COMPILERS)}); going on without them"
    try:
        register(library(folder, compiler))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [type(error).__name__]
        return f"native kernels can't be built by {compiler}: {words[0][:200]}"
    return None


def library(folder: Path, compiler: str, flags: tuple[str, ...] = FLAGS) -> Path:
    """The path of the built library below `folder`, which must be private to the user; built where there is no sound
    one.

    Raises OSError or subprocess.SubprocessError where that fails.
    """
    made_from = _made_from(compiler, flags)
    for path in sorted(folder.glob(f"{made_from}-*.so")):
        if is_sound(path):
            return path
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as own:
        built = Path(own) / "native.so"
        source = Path(own) / SOURCE
        source.write_bytes(_source())
        command = [compiler, *flags, "-isystem", jax.ffi.include_dir(), str(source), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIME_LIMIT)
        built.chmod(0o700)
        path = folder / f"{made_from}-{_digest(built.read_bytes())}.so"
        built.replace(path)
    return path


def is_sound(path: Path) -> bool:
    """Whether a library is the user's, writable by nobody else, and holds the bytes that it is named by."""
    try:
        about = path.lstat()
        safe = stat.S_ISREG(about.st_mode) and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return safe and about.st_uid == os.getuid() and _digest(path.read_bytes()) == path.stem.partition("-")[2]
    except OSError:
        return False


def register(path: Path, suffix: str = "") -> None:
    """Loads a library and makes its kernels known to XLA by their names and this suffix."""
    loaded = ctypes.CDLL(str(path))
    for name in KERNELS:
        jax.ffi.register_ffi_target(name + suffix, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")


def _source() -> bytes:
    return files("rzoo.compile").joinpath(SOURCE).read_bytes()


def _made_from(compiler: str, flags: tuple[str, ...]) -> str:
    """A digest of all that a library depends on."""
    asked = [compiler, "--version"]
    version = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=TIME_LIMIT).stdout
    facts = (version, *flags, jaxlib.__version__, cpu_fact("model name"), cpu_fact("flags"), os.uname().machine)
    return _digest(_source() + "\0".join(facts).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
