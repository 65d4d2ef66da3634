r"""Whether two answers are the same mathematics: 1/2 and 0.5, \frac{\sqrt{2}}{2} and \frac{1}{\sqrt{2}}.

The comparison is math-verify's (`pip install 'rzoo[evals]'`), in a child that is killed when it takes too long:
some answers keep sympy busy for ever, and no exception or signal ends that. What is long, deep, full of digits or a
tower of powers is not compared at all.
"""

from __future__ import annotations

import atexit
import json
import re
import select
import subprocess
import sys
import threading
from pathlib import Path

from rzoo.core import RzooError
from rzoo.evals.answers import plain

WORKER = Path(__file__).with_name("math_worker.py")
START_SECONDS = 120.0  # sympy is slow to import on a busy machine
MOST_TEXT, MOST_DIGITS, MOST_DEPTH = 2000, 200, 30  # characters, digits in a row, open brackets
# What sympy would work out to the last digit: a tower of powers, a large exponent, the factorial of a large number.
ENDLESS = re.compile(r"(?:\^|\*\*)[\s{(]*\d+[\s})]*(?:\^|\*\*)|(?:\^|\*\*)[\s{(]*\d{6}|\d{6}[\s})]*!|!\s*!")
AROUND = re.compile(r"^(?:\$+|\\\(|\\\[)|(?:\$+|\\\)|\\\])?\.?(?:\$+|\\\)|\\\])?$")
SIZES = re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,;:!]")
SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # one between two digits parts two numbers


def equal(gold: str, answer: str | None, *, seconds: float = 5.0) -> bool | None:
    r"""Whether `answer` is `gold`, each LaTeX or plain text; None where that can't be told within `seconds`.

    All members of a list or set must be there, in any order. 50\% is 0.5, and is 50. Safe in threads, which take turns.
    Raises RzooError where math-verify is not installed.
    """
    gold, answer = _inner(gold), _inner(answer or "")
    if not answer:
        return False
    if SPACES.sub("", SIZES.sub("", gold)) == SPACES.sub("", SIZES.sub("", answer)):
        return True
    return _comparer.compare(gold, answer, seconds) if _bounded(answer) else None


def _inner(text: str) -> str:
    """The text without markdown, the marks of a formula and a full stop around it."""
    return AROUND.sub("", plain(text.strip()).strip()).strip()


def _bounded(text: str) -> bool:
    """Whether sympy may be shown the text."""
    depth = most = 0
    for letter in text[:MOST_TEXT]:
        depth += (letter in "({[") - (letter in ")}]")
        most = max(most, depth)
    digits = max((len(run) for run in re.findall(r"\d+", text[:MOST_TEXT])), default=0)
    return len(text) <= MOST_TEXT and most <= MOST_DEPTH and digits <= MOST_DIGITS and not ENDLESS.search(text)


class _Comparer:
    """A child that compares, started when first needed, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def compare(self, gold: str, answer: str, seconds: float) -> bool | None:
        """As `equal`; a child that does not answer in time is killed."""
        with self._lock:
            child = self._child or self._start()
            try:
                assert child.stdin is not None
                print(json.dumps([gold, answer]), file=child.stdin, flush=True)
                said = self._line(child, seconds)
            except BrokenPipeError:
                said = ""
            except KeyboardInterrupt:
                self.kill()
                raise
            if not said:
                self.kill()
            return json.loads(said) if said else None

    def _start(self) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", WORKER.read_text()]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        child = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, start_new_session=True)
        self._child = child
        said = self._line(child, START_SECONDS)
        if said != "ready\n":
            self.kill()
            words = f"mathematics can't be compared without math-verify: {said.strip() or 'it does not start'}"
            raise RzooError(words, field="evals", fix="pip install 'rzoo[evals]'")
        return child

    @staticmethod
    def _line(child: subprocess.Popen[str], seconds: float) -> str:
        """The next line that the child writes; "" where none comes in time."""
        assert child.stdout is not None
        return child.stdout.readline() if select.select([child.stdout], [], [], seconds)[0] else ""

    def kill(self) -> None:
        """Ends the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


_comparer = _Comparer()
atexit.register(_comparer.kill)
