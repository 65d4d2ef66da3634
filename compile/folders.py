"""Where rzoo keeps what it can make again."""

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from rzoo.core import RzooError


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


def write_whole(path: Path, data: bytes | bytearray) -> None:
    """Writes a file beside its place and renames it, so that no other process ever reads a part of it."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)


def files_digest(files: Iterable[Path]) -> str:
    """SHA-256 of what the files hold, one after the other."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
