"""An answer as it comes, its reasoning apart from it."""

import os
import sys

from rzoo.cli.common import say

FAINT, PLAIN, CLEAR = "\033[2m", "\033[0m", "\r\033[K"
# What a model writes cannot steer the terminal: of the control characters it has line breaks and tabs.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def styled() -> bool:
    """Whether the user's terminal shows faint letters."""
    return "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class Shown:
    """Prints reasoning and answer: on a terminal faint and plain, elsewhere to standard error and standard output.

    waiting: whether a line stands on the terminal that the first piece takes the place of.
    """

    def __init__(self, terminal: bool, waiting: bool = False):
        self.terminal, self.waiting = terminal, waiting
        self.styled = terminal and styled()
        self.faint: bool | None = None  # whether reasoning was printed last; None before anything is

    def push(self, thought: str, text: str) -> None:
        """Prints what came of each."""
        for piece, faint in ((thought, True), (text, False)):
            if piece:
                self._print(piece, faint)

    def finish(self) -> None:
        """Ends the line."""
        if self.faint is not None or not self.terminal:
            self._print("\n", False)
        else:
            self._clear()

    def _print(self, piece: str, faint: bool) -> None:
        self._clear()
        if self.faint and not faint:
            say("\n", file=None if self.terminal else sys.stderr)
        if self.styled and bool(self.faint) != faint:
            say(FAINT if faint else PLAIN, end="")
        shown = piece.translate(CONTROLS) if self.terminal else piece
        say(shown, end="", file=None if self.terminal or not faint else sys.stderr)
        self.faint = faint

    def _clear(self) -> None:
        if self.waiting:
            say(CLEAR, end="", file=sys.stderr)
        self.waiting = False
