"""The `rzoo` command. Thin: each command parses, calls one public function, prints."""

import errno
import signal
import sys

from rzoo.cli import (  # noqa: F401  (each adds its commands to the application)
    answers,
    chat,
    evals,
    files,
    machine,
    plans,
    prune,
    quantize,
    train,
)
from rzoo.cli.common import app


def main() -> None:
    """Entry point: a user's mistake is one message and exit code 2, Ctrl-C is 130; --debug shows tracebacks."""
    # Until the libraries are imported Ctrl-C ends the process: an exception in the middle of an import is swallowed.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        message = None if debug else _told(error)
        if message is None:
            raise
        print(f"rzoo: {message}", file=sys.stderr)
        sys.exit(2)


def _told(error: Exception) -> str | None:
    """What to say of an error that is no fault of the program; None for one that is."""
    from rzoo.core import RzooError

    if isinstance(error, RzooError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO):
        return f"the output can't be written: {error.strerror}"
    return (
        "the terminal's encoding can't show the answer: set PYTHONUTF8=1" if isinstance(error, UnicodeError) else None
    )
