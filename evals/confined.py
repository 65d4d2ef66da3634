"""What runs inside of the sandbox: `rzoo.evals.sandbox` hands this text to a bare Python; it imports nothing of rzoo.

Reads from stdin 16 digits and so many bytes of JSON; what follows is the stdin of the code. Writes to stdout a line
when it starts and one of how the code ended, both with a word that is new in every run.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import struct
import sys
import traceback
import types

# Linux, mount_setattr(2): the number is the same on every machine.
MOUNT_SETATTR, AT_FDCWD, RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
# Linux, seccomp(2): numbers of audit architecture; clone; fork, vfork, kill, tkill, socket, setsid, setpgid.
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 56, (57, 58, 62, 200, 41, 112, 109)),
    "aarch64": (0xC00000B7, 220, (129, 130, 198, 157, 154)),
}
CLONE3, PIDFD_SEND_SIGNAL, CLONE_THREAD = 435, 424, 0x10000
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # of the kernel's packet filter
ALLOW, NOT_PERMITTED, NOT_THERE = 0x7FFF0000, 0x50001, 0x50026
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38


def main() -> None:
    """Never returns: exits with 0, however the code ended."""
    stdout = os.dup(1)  # the code may close or replace its own
    asked = json.loads(_read(int(_read(16))))
    guards = ["mounts"] if asked["own_mounts"] and _all_read_only_but_here(asked["disk"]) else []
    for name, value in asked["limits"].items():
        _limit(getattr(resource, name), value)
    if _alone():
        guards.append("system calls")
    else:
        _limit(resource.RLIMIT_NPROC, 0)
    os.write(stdout, f"{asked['word']} {', '.join(guards)}\n".encode())
    end = _run(asked["code"])
    with contextlib.suppress(BaseException):  # such as a stdout that the code has closed
        sys.stdout.flush()
    os.write(stdout, f"\n{asked['word']} {end}\n".encode())
    os._exit(0)  # no thread or exit handler of the code's goes on


def _read(size: int) -> bytes:
    """Exactly so many bytes: none of the code's own input may lie in a buffer."""
    data = b""
    while len(data) < size and (more := os.read(0, size - len(data))):
        data += more
    return data


def _limit(which: int, value: int) -> None:
    """The limit, or the one that there is where that is lower or can't be changed."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(which, (value, value))
    except (OSError, ValueError):
        print("a limit can't be set here:", which, file=sys.stderr)


def _all_read_only_but_here(size: int) -> bool:
    """No file can be changed but in the working folder, a disk in memory. Needs a mount namespace of its own."""
    libc, here = ctypes.CDLL(None), os.getcwd()
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    failed = libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", RECURSIVE, attributes, ctypes.sizeof(attributes))
    failed |= libc.mount(b"tmpfs", os.fsencode(here), b"tmpfs", 0, f"size={size},nr_inodes=4096".encode())
    os.chdir(here)
    return failed == 0


def _alone() -> bool:
    """Forbids new processes, signals, sockets and leaving the process group. False where the system knows no way."""
    if sys.platform != "linux" or platform.machine() not in SYSTEM_CALLS:
        return False
    architecture, clone, forbidden = SYSTEM_CALLS[platform.machine()]
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, 0)]
    for number in (*forbidden, PIDFD_SEND_SIGNAL):
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, NOT_PERMITTED)]
    steps += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, NOT_THERE)]  # its flags can't be seen; libc then calls clone
    steps += [(EQUAL, 1, 0, clone), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, 16)]
    steps += [(ANY_BIT, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, NOT_PERMITTED)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    libc, zero = ctypes.CDLL(None), ctypes.c_ulong(0)
    failed = libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    return failed == 0 and libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), program, zero, zero) == 0


def _run(code: str) -> str:
    """How the code ended: passed (it came to its end), exited (on its own before that), memory or failed."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "program.py", "exec"), module.__dict__)
    except MemoryError:
        return "memory"
    except SystemExit as ending:
        return "failed" if ending.code else "exited"
    except BaseException:
        traceback.print_exc(limit=-8)
        return "failed"
    return "passed"


if __name__ == "__main__":
    main()
