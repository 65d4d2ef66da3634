"""Runs the code that a model wrote in a process of its own, within limits. No security boundary.

The code gets a bare Python (-I -S), a new folder, an empty environment and `Limits`, and is killed when it breaks them.
On Linux it can start no process, signal none and open no socket. Where user namespaces are granted it also sees no
network and no process but its own, and can change no file outside of its folder. Code that means harm may still find
a way out: `command` (rzoo eval --sandbox-cmd) runs it in a container or machine of the user's own.
"""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rzoo.core import RzooError

DRIVER = Path(__file__).with_name("confined.py")
UNSHARE = ["--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child"]
NAMESPACES = ([*UNSHARE, "--mount", "--mount-proc"], [*UNSHARE, "--mount"], UNSHARE)  # the first that works here
# Between the evaluator and the code: what kills its parent kills this shell, which a namespace makes immortal.
PARENT = ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- & wait "$!"', "sh"]
GLANCE = 0.02  # seconds between two looks at what the code has written
MARGIN = 256  # bytes that the driver itself writes
MOST_ERROR = 4096  # bytes of stderr that an outcome keeps, the last


@dataclass(frozen=True)
class Limits:
    """seconds: of wall time, and of processor time; memory: bytes; disk: bytes of one file, and of all where the code
    has a disk of its own; files: open at one time; output: bytes on stdout and stderr together.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    disk: int = 64 << 20
    files: int = 64
    output: int = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """reason: passed, the code came to its end; failed, it raised or ended with an error; exited, it ended before its
    end, without an error; timeout; memory; output; killed, by a signal. output, error: on stdout and (the last of it)
    stderr. seconds: of wall time. guards: "mounts" and "system calls", which of them stood around the code.
    """

    reason: str
    output: str
    error: str
    seconds: float
    guards: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the code came to its end."""
        return self.reason == "passed"


def run_code(code: str, *, limits: Limits | None = None, stdin: str = "", command: Sequence[str] = ()) -> Outcome:
    """Runs Python code, with its tests behind it, as a program that reads `stdin`.

    command: what to put before "python3 …", such as docker run -i --rm --network=none python:3.11; it gets PATH and
    HOME of the environment. Raises RzooError where no Python can be started.
    """
    limits, word = limits or Limits(), secrets.token_hex(16)
    own_mounts = not command and "--mount" in namespaces()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rzoo-sandbox-"))
        given, out, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(_asked(code, word, limits, own_mounts=own_mounts) + stdin.encode())
        given.seek(0)
        start = time.monotonic()
        process = _started(command, folder, given, out, errors)
        try:
            broken = _watch(process, limits, (out, errors))
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - start
        written, error = (_text(stream, limits.output) for stream in (out, errors))
    begun, guards, written = _parted(written, word)
    if not begun and broken is None:
        fix = f"try it by hand: {' '.join(command)} python3 -c 1" if command else "give a sandbox command of your own"
        words = f"no Python has started in the sandbox: {error.strip()[-300:]}"
        raise RzooError(words, field="sandbox_cmd", value=list(command), fix=fix)
    written, _, end = written.partition(f"\n{word} ")
    reason = broken or end.strip() or _ending(process.returncode)
    return Outcome(reason, written[: limits.output], error[-MOST_ERROR:], seconds, guards)


@functools.cache
def namespaces() -> tuple[str, ...]:
    """The options of unshare that work on this machine; none where it has none."""
    for options in NAMESPACES if shutil.which("unshare") else ():
        trial = subprocess.run(["unshare", *options, "true"], capture_output=True, stdin=subprocess.DEVNULL)
        if trial.returncode == 0:
            return tuple(options)
    return ()


def _asked(code: str, word: str, limits: Limits, *, own_mounts: bool) -> bytes:
    """What the driver reads before the code's own input."""
    kernel = {
        "RLIMIT_CPU": math.ceil(limits.seconds),
        "RLIMIT_AS": limits.memory,
        "RLIMIT_FSIZE": limits.disk,
        "RLIMIT_NOFILE": limits.files,
        "RLIMIT_CORE": 0,
    }
    asked = {"code": code, "word": word, "limits": kernel, "disk": limits.disk, "own_mounts": own_mounts}
    data = json.dumps(asked).encode()
    return f"{len(data):016d}".encode() + data


def _started(command: Sequence[str], folder: str, *streams: IO[bytes]) -> subprocess.Popen:
    python = ["-I", "-S", "-X", "utf8", "-c", DRIVER.read_text()]
    own = ["unshare", *namespaces()] if namespaces() else []
    arguments = [*command, "python3", *python] if command else [*own, *PARENT, sys.executable, *python]
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment = inherited if command else {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder}
    stdin, stdout, stderr = streams
    try:
        return subprocess.Popen(
            arguments, cwd=folder, env=environment, start_new_session=True, stdin=stdin, stdout=stdout, stderr=stderr
        )
    except OSError as error:
        words, fix = f"the sandbox command can't be started: {error}", "name a program that is installed"
        raise RzooError(words, field="sandbox_cmd", value=list(command), fix=fix) from None


def _watch(process: subprocess.Popen, limits: Limits, streams: Sequence[IO[bytes]]) -> str | None:
    """Waits for the end; the limit that was broken, or None where none was or the kernel saw to it."""
    end = time.monotonic() + limits.seconds
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GLANCE)
        if sum(os.fstat(stream.fileno()).st_size for stream in streams) > limits.output + MARGIN:
            return "output"
        if process.returncode is not None:
            return None
        if time.monotonic() > end:
            return "timeout"


def _text(stream: IO[bytes], most: int) -> str:
    stream.seek(0)
    return stream.read(most + MARGIN).decode(errors="replace")


def _parted(written: str, word: str) -> tuple[bool, tuple[str, ...], str]:
    """(whether the driver began, the guards that it set up, what follows its first line)."""
    line, newline, rest = written.partition("\n")
    begun = bool(newline) and line.startswith(f"{word} ")
    guards = line.removeprefix(f"{word} ").split(", ") if begun else []
    return begun, tuple(filter(None, guards)), rest if begun else written


def _ending(status: int) -> str:
    """What the status of a process that did not come to its end tells; a shell or unshare adds 128 to a signal."""
    number = -status if status < 0 else status - 128
    if number == signal.SIGXCPU:
        return "timeout"
    return "killed" if number > 0 else "failed" if status else "exited"
